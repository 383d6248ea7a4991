"""Block-sparse masks that tests/gpu runs: shapes, block sizes, and what the blocks are within."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import FULL, KeyRanges
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Mask, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, Shape, Tensor

HOPPER: Final = 9, 0
_DTYPES: Final = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class BlockCase:
    """A problem with visible blocks of `axes` = (batch, heads), of which a share is visible.

    within: a band, or "documents" for ranges of two documents within a causal mask
    """

    shape: Shape
    dtype: str
    axes: tuple[int, int]
    block_size: tuple[int, int]
    share: float
    within: Mask | str

    @property
    def name(self) -> str:
        """Name of the case among the tests."""
        shape, (rows, columns) = self.shape, self.block_size
        within = self.within if isinstance(self.within, str) else self.within.name
        heads = f"h{shape.num_heads}k{shape.num_heads_key}"
        sizes = f"d{shape.head_dim}_q{shape.num_queries}_s{shape.num_keys}_b{shape.batch}_{heads}"
        return f"{self.dtype}_{sizes}_{within}_{rows}x{columns}_{self.axes[0]}_{self.axes[1]}_{self.share}"

    def mask(self) -> BlockSparse:
        """Returns the mask; some blocks of queries see nothing, and some blocks of keys are not seen."""
        sizes = *self.axes, *self.shape.visible_blocks(self.block_size)[2:]
        visible = np.random.default_rng(17).random(sizes) < self.share
        if self.share < 1:
            visible[:, :, sizes[2] // 2], visible[..., sizes[3] // 2] = False, False
        within: Mask | KeyRanges
        if isinstance(self.within, Mask):
            within = self.within
        else:
            rows = self.shape.num_queries
            within = KeyRanges.documents([0, rows // 3, rows], rows, Causal())
        return BlockSparse(visible, self.block_size, within)

    def problem(self, direction: str) -> Problem:
        """Returns the problem of a direction."""
        mask = self.mask()
        arrays = {name: Tensor.contiguous(array.shape, str(array.dtype)) for name, array in mask.arrays().items()}
        problem = Problem.dense(direction, self.shape, self.dtype, mask.band)
        return problem.replace(block_size=self.block_size, **arrays)

    def operands(self) -> list[npt.NDArray[Any]]:
        """Returns grad_output, query, key and value."""
        random, shape = np.random.default_rng(3), self.shape
        names = "grad_output", "query", "key", "value"
        return [random.normal(size=shape.of(name)).astype(_DTYPES[self.dtype]) for name in names]


def _case(
    sizes: tuple[int, ...], axes: tuple[int, int], block_size: tuple[int, int], share: float, within: Mask | str = FULL,
    dtype: str = "bfloat16",
) -> BlockCase:  # fmt: skip
    batch, queries, keys, heads, heads_key, head_dim = sizes
    shape = Shape(batch, queries, keys, heads, head_dim, head_dim, heads_key)
    return BlockCase(shape, dtype, axes, block_size, share, within)


# (batch, queries, keys, heads, key heads, head dim)
CASES: Final = (
    _case((2, 515, 640, 4, 2, 128), (2, 2), (128, 128), 0.3),
    _case((1, 1000, 1000, 2, 2, 128), (1, 1), (128, 128), 0.2, Causal()),
    _case((2, 600, 900, 4, 4, 128), (1, 4), (64, 128), 0.4, CausalBottomRight()),
    _case((1, 515, 640, 2, 1, 128), (1, 1), (64, 64), 0.3, "documents"),
    _case((2, 700, 700, 3, 3, 64), (2, 3), (128, 128), 0.3, Window(200, 40)),
    _case((1, 900, 515, 4, 2, 64), (1, 2), (192, 128), 0.5),
    _case((1, 300, 420, 2, 2, 64), (1, 1), (64, 64), 0.5, dtype="float16"),
    _case((2, 300, 420, 2, 2, 96), (1, 1), (256, 128), 0.5, Causal(), "float16"),
    _case((1, 515, 515, 4, 4, 32), (1, 4), (128, 256), 0.4),
    _case((1, 257, 385, 2, 2, 128), (1, 1), (128, 128), 1.0),
    _case((1, 257, 385, 2, 2, 128), (1, 1), (128, 128), 0.0),
)


def builds() -> Iterator[tuple[Build, ...]]:
    """Yields the kernels of all cases, each with its fallbacks if ptxas spills."""
    for case in CASES:
        for direction in DIRECTIONS:
            yield planner.builds_on(case.problem(direction), HOPPER)
