"""sm90 forward (wgmma, TMA): its kernels, their warps, registers, grids and tensor maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.kernel import TERMS, BufferRule, FusedKernel, Tile, no_products, no_splits
from cutlass_py_attn.kernels.sm90_common import shared_tiles
from cutlass_py_attn.kernels.sm90_common.kernel import (
    WITHOUT_DROPOUT,
    Reason,
    computing,
    consumer_threads,
    limited_by,
    persistent_blocks,
    reason,
)
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS, tma_tiles
from cutlass_py_attn.kernels.sm90_common.rules import BESIDE_RANGES
from cutlass_py_attn.kernels.sm90_forward.layout import deals_last_rounds, forward_map, registers
from cutlass_py_attn.kernels.sm90_forward.rules import sm90_forward
from cutlass_py_attn.kernels.tile_lists import kernel as tile_lists
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import LAST_VALUE
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid, ceil_div
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_WARPS
from cutlass_py_attn.launch.names import BATCH, NUM_HEADS, NUM_QUERIES, NUM_SMS, NUM_SPLITS_KEY, WORK_TILES
from cutlass_py_attn.launch.variants import MULTICAST, SPLIT_KV, STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.score_terms import registry

# Rounds at the end of a forward whose tiles the GPU deals to blocks, from so many queries and so many rounds on: a
# block of its own costs a tile about 2 us.
LAST_ROUNDS, LAST_ROUNDS_LENGTH, LAST_ROUNDS_LEAST = 3, 4096, 16


def forward_warps(build: Build) -> Build:
    """Returns the forward with its warps: warpgroups have rows of S and O."""
    return replace(build, warps_scores=(build.warps - LOAD_WARPGROUPS * WARPGROUP_WARPS, 1))


def forward_accumulators(build: Build) -> int:
    """Returns the registers of S, of the 16-bit weights beside it, and of O."""
    return build.tile_m * (build.tile_n + build.tile_n // 2 + build.columns_value) // consumer_threads(build)


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel: persistent blocks, one for each SM, or whole clusters of them.

    Work tiles are query tiles. A cluster computes as many neighbouring tiles as it has blocks.
    Blocks with y > 0 compute one query tile each, of the last rounds.
    """
    cluster = build.cluster
    if build.shares_query_tiles:
        return persistent_blocks(WORK_TILES * NUM_SPLITS_KEY), ONE, ONE
    work_tiles = ceil_div(NUM_QUERIES, build.tile_m * cluster) * NUM_HEADS * BATCH
    if deals_last_rounds(build):
        has_rounds = work_tiles >= LAST_ROUNDS_LEAST * NUM_SMS
        return persistent_blocks(work_tiles), 1 + LAST_ROUNDS * (NUM_QUERIES >= LAST_ROUNDS_LENGTH) * has_rounds, ONE
    return persistent_blocks(work_tiles, cluster), ONE, ONE


def _other_grids(build: Build) -> dict[str, Grid]:
    combine = {"combine": shared_tiles.combine_grid(build)} if build.shares_query_tiles else {}
    return combine | tile_lists.grids(build)


def _definitions(problem: Problem, build: Build) -> dict[str, Expr]:
    shared = shared_tiles.query_tiles(build) if build.shares_query_tiles else {}
    return shared | tile_lists.definitions(problem, build)


def _forward_workspace(build: Build) -> tuple[BufferRule, ...]:
    parts = shared_tiles.parts_bytes(build) if build.shares_query_tiles else {}
    shared = (BufferRule(name, size, condition=NUM_SPLITS_KEY > 1) for name, size in parts.items())
    return *shared, *tile_lists.workspace(build)


def forward_reason(shares: str = "", loads: str = "one warp loads") -> Reason:
    """Returns `reason` of a forward; shares: how several blocks share work; loads: what the first warpgroup does."""
    return reason(lambda build: f"{shares}{computing(build)} S and O, {loads}")


def _forward_maps(build: Build) -> dict[str, Tile]:
    tiles = tma_tiles(build)
    return {**tiles, LAST_VALUE: tiles["value"]} if build.has(registry.PAGED) else tiles


FORWARD: Final = FusedKernel(
    kind="forward",
    family="sm90",
    variant=STANDARD,
    module="sm90_forward.forward",
    summary="persistent blocks over query tiles",
    layouts=(*registry.LAYOUTS, registry.PAGED),
    takes_negative_scales=False,
    terms=TERMS,
    takes_registered_terms=True,
    beside_ranges=BESIDE_RANGES,
    refusals=sm90_forward,
    with_warps=forward_warps,
    shared_memory=forward_map,
    products=no_products,
    accumulators=forward_accumulators,
    accumulator_limit=limited_by(registers),
    main_grid=main_grid,
    other_grids=_other_grids,
    definitions=_definitions,
    num_splits_key=no_splits,
    workspace=_forward_workspace,
    tensor_maps=_forward_maps,
    reason=forward_reason(),
)
MULTICAST_FORWARD: Final = replace(
    FORWARD,
    variant=MULTICAST,
    summary="clusters of two blocks over neighbouring query tiles; each block loads half of every key and value tile",
    layouts=("grouped",),
    terms=(),
    takes_registered_terms=False,
    beside_ranges=None,
    lengths="long",
    reason=forward_reason(shares="two blocks of a cluster load keys and values for both: "),
)
SPLIT_KV_FORWARD: Final = replace(
    FORWARD,
    variant=SPLIT_KV,
    summary="blocks share the keys of each query tile; a second kernel joins their results",
    terms=WITHOUT_DROPOUT,
    beside_ranges=None,
    lengths="few_queries",
    reason=forward_reason(shares="blocks share the keys of each query tile, of which there are fewer than SMs: "),
)
KERNELS: Final = (FORWARD, MULTICAST_FORWARD, SPLIT_KV_FORWARD)
