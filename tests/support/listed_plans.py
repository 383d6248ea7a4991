"""Problems with masks in memory, and plans for them with a tile of the caller's choice."""

from __future__ import annotations

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import builder, resources
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor

ARCH = "sm_90a"
FORWARD = {64: "192x128x16:2-speculative-halves", 128: "128x128x12:2-speculative"}  # tile by head dim
BACKWARD = {64: "128x128x16:3,2k2+key_registers", 128: "64x128x16:3,2k2+ds_registers"}


def with_ranges(problem: Problem, axes: tuple[int, int] | None = None) -> Problem:
    """Returns the problem with int32 ranges of keys; axes: their (batch, heads), None for those of the problem."""
    batch, heads, queries = problem.shape.range_edges
    edge = Tensor.contiguous((*(axes or (batch, heads)), queries), "int32")
    return problem.replace(key_start=edge, key_end=edge)


def with_blocks(
    problem: Problem, block_size: tuple[int, int] = (128, 128), axes: tuple[bool, bool] = (True, True), heads: int = 0
) -> Problem:
    """Returns the problem with visible blocks; axes: whether sequences, and heads, have blocks of their own.

    heads: how many have; 0 for those of key
    """
    batch, _, *counts = problem.shape.visible_blocks(block_size)
    own = batch if axes[0] else 1, (heads or problem.shape.num_heads_key) if axes[1] else 1
    return problem.replace(visible_blocks=Tensor.contiguous((*own, *counts), "bool"), block_size=block_size)


def ranges_build(problem: Problem, tile: str) -> Build:
    """Returns the Build of a tile for a problem with ranges of keys."""
    build, refused = builder.build_for(problem, ARCH, TileConfig.parse(tile), "sm90")
    assert not [*refused, *resources.refusals(build, architecture(ARCH))]
    return build
