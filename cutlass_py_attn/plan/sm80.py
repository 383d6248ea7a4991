"""sm80 family (mma.sync, cp.async): warps of its products, grids, and key splits. It multiplies no e4m3 codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.plan.build import Build, Warps
from cutlass_py_attn.plan.expressions import Expr, Grid, ceil_div, maximum, minimum, times
from cutlass_py_attn.plan.names import BATCH, NUM_HEADS, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES, NUM_SMS, NUM_SPLITS_KEY
from cutlass_py_attn.plan.resources import warp_grid
from cutlass_py_attn.plan.split_d import blocks_per_tile, dq_piece_columns, gradient_columns
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import has_codes
from cutlass_py_attn.problem.tensors import OPERANDS

SPLIT_WAVES: Final = 32  # blocks per SM beyond which more key splits of the backward no longer shorten the last wave
MAX_HEAD_DIM_OF_CODES: Final = 256  # of an e4m3 cache, whose tiles have all columns
LEAST_COPY_OF_CODES: Final = 4  # bytes: the least that cp.async copies


def with_warps(build: Build) -> Build:
    """Returns the build with the warps of each product."""

    def grid(m: int, n: int) -> Warps:
        return warp_grid(build.warps, m, n, build.item_bytes)

    columns, columns_value = build.block_columns, build.block_columns_value
    if build.kind == "forward":
        if build.head_dim_split:
            return replace(
                build,
                warps_scores=grid(build.tile_m, build.tile_n),
                warps_grad_q=grid(build.tile_m, columns_value),
            )
        # One warp has whole rows of S, because the softmax reduces along them.
        return replace(build, warps_scores=(build.warps, 1))
    return replace(
        build,
        warps_scores=grid(build.tile_m, build.tile_n),
        warps_grad_v=grid(build.tile_n, gradient_columns(build, columns_value)),
        warps_grad_k=grid(build.tile_n, gradient_columns(build, columns)),
        warps_grad_q=grid(build.tile_m, dq_piece_columns(build)),
    )


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel: query tiles in the forward, key splits in the backward, by head, batch."""
    if build.kind == "forward":
        query_tiles = ceil_div(NUM_QUERIES, build.tile_m)
        return times(query_tiles, blocks_per_tile(build)), NUM_HEADS, BATCH
    return times(NUM_SPLITS_KEY, blocks_per_tile(build)), NUM_HEADS_KEY, BATCH


def num_splits_key(build: Build) -> Expr:
    """Returns the blocks of the backward that share one (batch, key head): enough for SPLIT_WAVES blocks per SM.

    Never more than there are key tiles. With fewer blocks than key tiles, a block computes several key tiles and
    balances their unequal lengths under a causal mask. A deterministic block waits only for blocks that started before
    it, so each has one key tile.
    """
    key_tiles = ceil_div(NUM_KEYS, build.tile_n)
    if build.deterministic:
        return key_tiles
    return minimum(key_tiles, ceil_div(SPLIT_WAVES * NUM_SMS, maximum(BATCH * NUM_HEADS_KEY, 1)))


def reason(build: Build) -> str:
    """Returns why the planner chose this tile of the family."""
    return f"sm80 family (mma.sync, cp.async): the first tile of the table that fits {build.arch}'s shared memory"


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the sm80 kernels do not take, which concerns e4m3 codes alone."""
    if not has_codes(problem):
        return ()
    shape = problem.shape
    present = {
        "query of e4m3": not problem.has_e4m3_cache,
        f"head dims beyond {MAX_HEAD_DIM_OF_CODES}": max(shape.head_dim, shape.head_dim_value) > MAX_HEAD_DIM_OF_CODES,
        f"rows aligned to less than {LEAST_COPY_OF_CODES} bytes": min(
            getattr(problem, name).vector_bytes for name in (*OPERANDS, "output")
        ) < LEAST_COPY_OF_CODES,
    }  # fmt: skip
    return tuple(name for name, is_present in present.items() if is_present)
