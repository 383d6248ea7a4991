"""Block-sparse masks: a mask in memory, which blocks of queries see which blocks of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.key_ranges import FULL, KeyRanges, is_array, library_of
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.tensors import VISIBLE_BLOCKS
from cutlass_py_attn.refusals import Refusal, refuse

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class BlockSparse:
    """The mask with which a query sees a key if their blocks see each other, and `within` lets it see the key too.

    visible_blocks: (batch, num_heads_key, blocks of queries, blocks of keys) bool array, or uint8 of zeros and ones;
        the last blocks may be cut by the lengths, and the first two sizes may be 1. In a forward alone the query heads
        of a group may differ, (batch, num_heads, ...). A CUDA array is read in place when kernels run, so that other
        values need no other kernel
    block_size: (queries, keys) of a block, multiples of 64; kernels of sm_90a compute (128, 128) the fastest
    within: a Mask, such as Causal(), or KeyRanges
    """

    visible_blocks: Any
    block_size: tuple[int, int] = (128, 128)
    within: Mask | KeyRanges = FULL

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # calls with other values are other calls

    @property
    def band(self) -> Mask:
        """The mask of numbers alone with which the blocks are intersected."""
        return self.within.band if isinstance(self.within, KeyRanges) else self.within

    def refusals(self) -> Iterator[Refusal]:
        """Yields what is no array, and what is no mask; `Problem.refusals` checks shapes, dtypes and the block size."""
        if not is_array(self.visible_blocks):
            rule = "must be a bool array (batch, num_heads, blocks of queries, blocks of keys)"
            yield refuse(VISIBLE_BLOCKS, self.visible_blocks, rule, "pass one; the first two sizes may be 1")
        if isinstance(self.within, KeyRanges):
            yield from self.within.refusals()
        elif not isinstance(self.within, Mask):
            yield refuse("within", self.within, "must be a Mask or KeyRanges", "create one, such as Causal()")

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by their names in a Problem."""
        ranges = self.within.arrays() if isinstance(self.within, KeyRanges) else {}
        return {VISIBLE_BLOCKS: self.visible_blocks, **ranges}

    @staticmethod
    def lists(
        counts: Any,
        indices: Any,
        num_key_blocks: int,
        block_size: tuple[int, int] = (128, 128),
        within: Mask | KeyRanges = FULL,
    ) -> BlockSparse:
        """Returns the mask of lists of key blocks, as FlashAttention-4 and FlexAttention have them.

        counts: (batch, num_heads, blocks of queries) integers: how many key blocks each block of queries sees
        indices: (batch, num_heads, blocks of queries, most blocks) integers: which; those from the count on are unused
        num_key_blocks: blocks of keys

        Blocks that a mask function cuts there, and whole ones, are two pairs of lists: pass the lists of both in one
        mask, `a | b` of their `visible_blocks`, and the cut in `within`.
        """
        xp = library_of(indices)
        if xp is None or library_of(counts) is None:
            rule = "must be arrays of NumPy, CuPy or JAX"
            raise NotSupported(refuse("counts, indices", (counts, indices), rule, "convert them"))
        indices, counts = xp.asarray(indices), xp.asarray(counts)
        if indices.ndim != 4 or tuple(counts.shape) != tuple(indices.shape[:3]):
            rule = (
                f"must be (batch, num_heads, blocks of queries), and indices {tuple(indices.shape)} have one more axis"
            )
            raise NotSupported(refuse("counts.shape", tuple(counts.shape), rule, "reshape them"))
        is_used = xp.arange(indices.shape[3]) < counts[..., None]
        is_used = is_used & (indices >= 0) & (indices < num_key_blocks)
        place = xp.where(is_used, indices, num_key_blocks)
        visible = xp.zeros((*indices.shape[:3], num_key_blocks + 1), dtype=bool)
        for entry in range(indices.shape[3]):
            visible = visible | (place[..., entry, None] == xp.arange(num_key_blocks + 1))
        return BlockSparse(visible[..., :num_key_blocks], block_size, within)

    @staticmethod
    def csr(
        indptr: Any,
        indices: Any,
        num_key_blocks: int,
        block_size: tuple[int, int] = (128, 128),
        within: Mask | KeyRanges = FULL,
    ) -> BlockSparse:
        """Returns the mask of a sparse matrix of blocks in the CSR format, for every sequence and head.

        indptr: (blocks of queries + 1,) ascending integers: where the key blocks of each block of queries begin
        indices: (entries,) integers: key blocks
        num_key_blocks: blocks of keys
        """
        xp = library_of(indptr)
        if xp is None or library_of(indices) is None:
            rule = "must be arrays of NumPy, CuPy or JAX"
            raise NotSupported(refuse("indptr, indices", (indptr, indices), rule, "convert them"))
        indptr, indices = xp.asarray(indptr), xp.asarray(indices)
        row = xp.searchsorted(indptr, xp.arange(indices.shape[0]), side="right") - 1
        rows = xp.arange(indptr.shape[0] - 1)
        of_row = (rows[:, None] == row).astype(xp.int32)
        of_key = (indices[:, None] == xp.arange(num_key_blocks)).astype(xp.int32)
        return BlockSparse((of_row @ of_key > 0)[None, None], block_size, within)

    def resolved(self, num_heads: int, num_queries: int, num_keys: int) -> BlockSparse:
        """Returns the mask in NumPy, with blocks of every query head, within ranges without a band."""
        blocks = np.asarray(self.visible_blocks)
        blocks = blocks if blocks.shape[1] == 1 else np.repeat(blocks, num_heads // blocks.shape[1], axis=1)
        ranges = self.within if isinstance(self.within, KeyRanges) else KeyRanges.of(self.within, num_queries, num_keys)
        return replace(self, visible_blocks=blocks, within=ranges.within(num_keys))

    def sees(self, batch: Any, head: Any, query: Any, key: Any, num_keys: int) -> Array:
        """Returns whether a query of a head of a sequence sees a key, of index arrays; for a `resolved` mask."""
        blocks: Array = self.visible_blocks
        rows, columns = self.block_size
        last = blocks.shape[3] - 1
        at = batch % blocks.shape[0], head % blocks.shape[1], query // rows, np.minimum(key // columns, last)
        assert isinstance(self.within, KeyRanges)
        seen: Array = (blocks[at] != 0) & self.within.sees(batch, head, query, key, num_keys)
        return seen

    def materialise(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> Array:
        """Returns the mask as a (batch, num_heads, num_queries, num_keys) bool array; slow, for tests."""
        sizes = batch, num_heads, num_queries, num_keys
        of_batch, head, query, key = np.ogrid[tuple(slice(size) for size in sizes)]
        return self.resolved(num_heads, num_queries, num_keys).sees(of_batch, head, query, key, num_keys)


ArrayMask = KeyRanges | BlockSparse
