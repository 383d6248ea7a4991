"""Launch of the separate grad_bias kernel: its grid, and what blocks that share tiles exchange."""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.expressions import Expression, Grid
from cutlass_py_attn.plan.gemm_spec import MMA_ROWS
from cutlass_py_attn.plan.grad_bias_smem import WGMMA_TILE, grad_bias_build, uses_wgmma
from cutlass_py_attn.problem.tensors import F32_BYTES, WORD_BYTES

LEAST_PART_PAIRS: Final = 4  # (batch, head) pairs of a part of a tile's sum, if blocks share tiles
_SIZES: Final = {"b": "batch", "h": "num_heads"}


def grad_bias_grid(build: Build, sizes: tuple[Expression, ...]) -> Grid:
    """Returns the grid: a block for each tile of grad_bias, which has these sizes; of wgmma persistent blocks."""
    if uses_wgmma(build):
        return f"max(min(num_sms, {_num_tiles(build)} * {num_splits(build)}), 1)", "1", "1"
    (batch, heads, queries, keys), own = sizes, grad_bias_build(build)
    return f"ceil_div({queries}, {own.tile_m}) * ceil_div({keys}, {own.tile_n})", heads, batch


def num_splits(build: Build) -> Expression:
    """Returns how many blocks of the kernel of wgmma share the pairs of a tile, if tiles are fewer than SMs."""
    pairs = " * ".join(_SIZES[axis] for axis in "bh" if axis in _summed(build)) or "1"
    return f"max(min(div(num_sms, max({_num_tiles(build)}, 1)), div({pairs}, {LEAST_PART_PAIRS})), 1)"


def parts_bytes(build: Build) -> dict[str, Expression]:
    """Returns the bytes of what blocks that share tiles exchange: counts of parts by warp, and float32 sums."""
    tiles, rows = _num_tiles(build), WGMMA_TILE // MMA_ROWS
    sums = f"{tiles} * {num_splits(build)} * {WGMMA_TILE * WGMMA_TILE * F32_BYTES}"
    return {"grad_bias_counts": f"{tiles} * {rows * WORD_BYTES}", "grad_bias_parts": sums}


def _num_tiles(build: Build) -> Expression:
    """Returns the tiles of grad_bias of the kernel of wgmma."""
    whole = [_SIZES[axis] for axis in "bh" if axis not in _summed(build)]
    return " * ".join([f"ceil_div(num_queries, {WGMMA_TILE}) * ceil_div(num_keys, {WGMMA_TILE})", *whole])


def _summed(build: Build) -> str:
    return build.grad_bias_mode.replace("none", "")
