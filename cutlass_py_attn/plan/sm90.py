"""sm90 family (wgmma, TMA): its kernels, their warps, registers, grids and tensor maps.

sm90_choice.py says which problems they take, and which of them the planner has for a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from cutlass_py_attn.plan import sm90_e4m3, sm90_smem, sm90_wide, sm90_wide_backward, tile_rules, tile_time
from cutlass_py_attn.plan.arch import Architecture
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.entry_points import LAST_VALUE, mapped_field
from cutlass_py_attn.plan.expressions import ONE, Expr, Grid, Name, ceil_div, maximum, minimum, round_up, times
from cutlass_py_attn.plan.gemm_spec import WARP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.plan.kernel import TERMS, FusedKernel, Kernel, gemm_grid, no_products, no_splits
from cutlass_py_attn.plan.names import (
    BATCH,
    GROUP,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_QUERIES,
    NUM_SMS,
    NUM_SPLITS_KEY,
    WORK_TILES,
)
from cutlass_py_attn.plan.sm90_mla import ROPE_COLUMNS, WARP_ROWS
from cutlass_py_attn.plan.sm90_smem import (
    DQ_WARPGROUPS,
    LOAD_WARPGROUPS,
    WARPGROUP_ROWS,
    deals_last_rounds,
    most_box_rows,
    stored_tiles,
    tma_tiles,
)
from cutlass_py_attn.plan.sm90_wide import WARPGROUPS
from cutlass_py_attn.plan.smem import swizzle_bytes
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.tiles import sm90_tiles
from cutlass_py_attn.plan.variants import (
    DS_REGISTERS,
    E4M3,
    E4M3_CACHE,
    KEY_REGISTERS,
    MULTICAST,
    PER_HEAD,
    QUERY_HEADS,
    SHARED_END,
    SPLIT_KV,
    STANDARD,
    TWO_CTA,
    WIDE,
)
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, KEY_ROPE
from cutlass_py_attn.score_terms import registry

Reason = Callable[[Problem, Build, Mapping[str, int]], str]

# Rounds at the end of a forward whose tiles the GPU deals to blocks, from so many queries and so many rounds on: a
# block of its own costs a tile about 2 us.
LAST_ROUNDS, LAST_ROUNDS_LENGTH, LAST_ROUNDS_LEAST = 3, 4096, 16
_DK_FROM_REGISTERS: Final = "dK from dS in registers, and dV"


def forward_warps(build: Build) -> Build:
    """Returns the forward with its warps: warpgroups have rows of S and O."""
    return replace(build, warps_scores=(build.warps - LOAD_WARPGROUPS * WARPGROUP_WARPS, 1))


def backward_warps(build: Build) -> Build:
    """Returns the backward with the warps of each product: warpgroups share rows of S^T, dV and dK."""
    key_warps = build.tile_n // WARPGROUP_ROWS * WARPGROUP_WARPS, 1
    return replace(
        build,
        warps_scores=key_warps,
        warps_grad_v=key_warps,
        warps_grad_k=key_warps,
        warps_grad_q=(DQ_WARPGROUPS * WARPGROUP_WARPS, 1),
    )


def column_warps(build: Build) -> Build:
    """Returns the build with warpgroups that compute S of alternate tiles, and divide the columns of O or dQ."""
    return replace(build, warps_scores=(WARPGROUP_WARPS, 1), warps_grad_q=(WARPGROUP_WARPS, WARPGROUPS))


def wide_backward_warps(build: Build) -> Build:
    """Returns the build with the same warps for the columns of dK and dV."""
    build = column_warps(build)
    return replace(build, warps_grad_v=build.warps_grad_q, warps_grad_k=build.warps_grad_q)


def accumulator_limit(build: Build, limits: Architecture) -> int:
    """Returns the registers of a thread of the warpgroups that compute."""
    return sm90_smem.registers(build)[-1]


def consumer_threads(build: Build) -> int:
    """Returns the threads that have accumulators of scores."""
    return build.warps_scores[0] * WARP_THREADS


def forward_accumulators(build: Build) -> int:
    """Returns the registers of S, of the 16-bit weights beside it, and of O."""
    return build.tile_m * (build.tile_n + build.tile_n // 2 + build.columns_value) // consumer_threads(build)


def _e4m3_accumulators(build: Build) -> int:
    return sm90_e4m3.consumer_registers(build, consumer_threads(build))


def _wide_accumulators(build: Build) -> int:
    columns = max(sm90_wide.value_columns(build))
    return build.tile_m * (build.tile_n + build.tile_n // 2 + columns) // consumer_threads(build)


def _wide_backward_accumulators(build: Build) -> int:
    gradients = sm90_wide_backward.GRAD_QUERY, sm90_wide_backward.GRAD_KEY, sm90_wide_backward.GRAD_VALUE
    widest = max(max(sm90_wide_backward.result_columns(build, gradient)) for gradient in gradients)
    return build.tile_m * (2 * build.tile_n + widest) // consumer_threads(build)


def _backward_accumulators(build: Build) -> int:
    """Returns the registers of S and dP, and of dV and dK."""
    return _with_gradients(build, 2 * build.block_queries)


def _keeps_ds_accumulators(build: Build) -> int:
    """Returns the registers of dP beside the 16-bit weights, as the next S is multiplied after dS, of dV and of dK."""
    return _with_gradients(build, build.block_queries + build.block_queries // 2)


def _with_gradients(build: Build, scores: int) -> int:
    return build.tile_n * (scores + build.columns + build.columns_value) // consumer_threads(build)


def _two_cta_accumulators(build: Build) -> int:
    """Returns the registers of a warpgroup that has one of both gradients."""
    widest = max(build.columns, build.columns_value)
    return build.tile_n * (build.tile_m + build.tile_m // 2 + widest) // consumer_threads(build)


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel: persistent blocks, one for each SM, or whole clusters of them.

    Variant wide has a cluster for each pair of query tiles instead, and its backward two more for each pair of key
    tiles.

    Work tiles are query tiles in the forward, key tiles in the backward, of every key head or every query head, and
    heads with one block per head. A cluster computes as many neighbouring tiles as it has blocks.
    Blocks with y > 0 compute one query tile each, of the last rounds.
    """
    if build.variant == PER_HEAD:
        return _per_head_blocks(), ONE, ONE
    cluster = build.cluster
    if build.variant == WIDE and build.kind == "backward":
        return _wide_backward_grid(build)
    if build.variant == WIDE:
        return cluster * ceil_div(NUM_QUERIES, build.tile_m * cluster), NUM_HEADS, BATCH
    if build.shares_query_tiles:
        return _up_to_sms(WORK_TILES * NUM_SPLITS_KEY), ONE, ONE
    if SHARED_END in build.options:
        return _up_to_sms(WORK_TILES * Name("num_splits_query")), ONE, ONE
    if build.kind == "forward":
        work_tiles = ceil_div(NUM_QUERIES, build.tile_m * cluster) * NUM_HEADS * BATCH
    else:
        heads = NUM_HEADS if build.variant == QUERY_HEADS else NUM_HEADS_KEY
        work_tiles = ceil_div(NUM_KEYS, build.tile_n * cluster) * heads * BATCH
    if deals_last_rounds(build):
        has_rounds = work_tiles >= LAST_ROUNDS_LEAST * NUM_SMS
        return _up_to_sms(work_tiles), 1 + LAST_ROUNDS * (NUM_QUERIES >= LAST_ROUNDS_LENGTH) * has_rounds, ONE
    if cluster == 1:
        return _up_to_sms(work_tiles), ONE, ONE
    return cluster * maximum(minimum(NUM_SMS // cluster, work_tiles), 1), ONE, ONE


def _up_to_sms(work_tiles: Expr) -> Expr:
    """Returns the persistent blocks that compute so many work tiles: at least one, and one for each SM at most."""
    return maximum(minimum(NUM_SMS, work_tiles), 1)


def _wide_backward_grid(build: Build) -> Grid:
    """Returns the grid: for each key head a cluster for each pair of key tiles, twice, and for each of query tiles."""
    cluster = build.cluster
    key_pairs = ceil_div(NUM_KEYS, cluster * build.tile_n)
    query_pairs = ceil_div(NUM_QUERIES, cluster * build.tile_m)
    return cluster * (2 * key_pairs + GROUP * query_pairs), NUM_HEADS_KEY, BATCH


def finish_kv_grid(build: Build) -> Grid:
    """Returns the grid of the kernel that converts dK and dV: a block for the rows of one warpgroup."""
    return times(ceil_div(NUM_KEYS, build.tile_n), build.tile_n // WARPGROUP_ROWS), NUM_HEADS_KEY, BATCH


def num_splits_key(build: Build) -> Expr:
    """Returns the key tiles of the backward: every one is a work tile of its own."""
    return ceil_div(NUM_KEYS, build.tile_n)


def per_head_accum_bytes(build: Build) -> Expr:
    """Returns the bytes of grad_query_accum with one block per head: dQ of one key head for each block."""
    rows = _per_head_blocks() * round_up(NUM_QUERIES, build.tile_m) * GROUP
    return rows * (build.columns * F32_BYTES)


def _per_head_blocks() -> Expr:
    return _up_to_sms(NUM_HEADS_KEY * BATCH)


def _forward_maps(build: Build) -> tuple[str, ...]:
    return ("query", "key", "value", LAST_VALUE) if build.has(registry.PAGED) else ("query", "key", "value")


def _query_map(build: Build) -> tuple[str, ...]:
    """Returns the map of the query: threads load the codes of key and value."""
    return ("query",)


def _backward_maps(build: Build) -> tuple[str, ...]:
    names = "query", "grad_output", "key", "value"
    return (*names, "grad_bias") if build.maps_grad_bias else names


def _gemm_maps(build: Build) -> tuple[str, ...]:
    return "a", "b"


def reason(roles: Callable[[Build], str]) -> Reason:
    """Returns `reason` of a kernel, from what the warpgroups of a block do."""

    def of_plan(problem: Problem, build: Build, values: Mapping[str, int]) -> str:
        tile = tile_time.reason(problem, TileConfig.of(build), sm90_tiles(problem), values["num_sms"])
        return f"sm90 family (wgmma, TMA): {roles(build)}{tile}"

    return of_plan


def _forward_reason(shares: str = "", loads: str = "one warp loads") -> Reason:
    """Returns `reason` of a forward; shares: how several blocks share work; loads: what the first warpgroup does."""
    return reason(lambda build: f"{shares}{_computing(build)} S and O, {loads}")


def _backward_reason(shares: str = "", dk: str = "dK and dV", dq: str = "dQ") -> Reason:
    """Returns `reason` of a backward; shares: how blocks divide key tiles and heads, if not a block a key tile."""

    def roles(build: Build) -> str:
        of_group = "a block computes a key tile of all query heads of a group: " if build.has("grouped") else ""
        return f"{shares or of_group}{_computing(build)} {dk}, one computes {dq}, one warp loads"

    return reason(roles)


def _computing(build: Build) -> str:
    consumers = build.warps_scores[0] // WARPGROUP_WARPS
    return "one warpgroup computes" if consumers == 1 else f"{consumers} warpgroups compute"


def value_page_rows(problem: Problem) -> int:
    """Returns the row strides from one page of value to the next; 0 if there is one page."""
    page, row, *_ = problem.value.strides
    return page // row if problem.value.shape[0] > 1 and row > 0 else 0


def tensor_map_box(build: Build, name: str, rank: int, page_size: int | None) -> tuple[tuple[int, ...], int]:
    """Returns (box, swizzle width in bytes) of the tensor map `name`: a box is one strip of a tile, or of a page in it.

    rank: axes of the map
    page_size: rows of a page; None for no pages
    """
    field = mapped_field(name)
    tiles = tma_tiles(build) | stored_tiles(build)
    rows, columns = (WARP_ROWS, ROPE_COLUMNS) if field == KEY_ROPE else tiles[field]
    if page_size is not None and field in ("key", "value"):
        rows = min(page_size, most_box_rows(build))
    swizzle = swizzle_bytes(columns, build.item_bytes)
    return (swizzle // build.item_bytes, rows, *([1] * (rank - 2))), swizzle


_WITHOUT_DROPOUT: Final = ("softcap", "bias", "alibi", "sinks")

FORWARD: Final = FusedKernel(
    kind="forward",
    family="sm90",
    variant=STANDARD,
    module="sm90.forward",
    summary="persistent blocks over query tiles",
    layouts=(*registry.LAYOUTS, registry.PAGED),
    terms=TERMS,
    refusals=tile_rules.sm90_forward,
    with_warps=forward_warps,
    shared_memory=sm90_smem.forward_map,
    products=no_products,
    accumulators=forward_accumulators,
    accumulator_limit=accumulator_limit,
    main_grid=main_grid,
    num_splits_key=no_splits,
    tensor_maps=_forward_maps,
    reason=_forward_reason(),
)
MULTICAST_FORWARD: Final = replace(
    FORWARD,
    variant=MULTICAST,
    summary="clusters of two blocks over neighbouring query tiles; each block loads half of every key and value tile",
    layouts=("grouped",),
    terms=(),
    lengths="long",
    reason=_forward_reason(shares="two blocks of a cluster load keys and values for both: "),
)
SPLIT_KV_FORWARD: Final = replace(
    FORWARD,
    variant=SPLIT_KV,
    summary="blocks share the keys of each query tile; a second kernel joins their results",
    terms=_WITHOUT_DROPOUT,
    lengths="few_queries",
    reason=_forward_reason(shares="blocks share the keys of each query tile, of which there are fewer than SMs: "),
)
E4M3_FORWARD: Final = replace(
    FORWARD,
    variant=E4M3,
    module="sm90.e4m3_forward",
    summary="persistent blocks over query tiles of 8-bit operands; two warps transpose every value tile",
    layouts=(*registry.LAYOUTS, registry.FLOAT16_OUTPUT),
    terms=(),
    shared_memory=sm90_e4m3.forward_map,
    accumulators=_e4m3_accumulators,
    reason=_forward_reason(loads="one warp loads, two transpose values"),
)
E4M3_CACHE_FORWARD: Final = replace(
    FORWARD,
    variant=E4M3_CACHE,
    module="sm90.e4m3_cache_forward",
    summary="persistent blocks over query tiles; one warpgroup converts every key and value tile of e4m3 codes to 16 "
    "bits",
    layouts=(*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.KV8_ROW),
    tensor_maps=_query_map,
    reason=_forward_reason(loads="one loads keys and values and converts them to 16 bits"),
)
WIDE_FORWARD: Final = replace(
    FORWARD,
    variant=WIDE,
    module="sm90.wide_forward",
    summary="head dims beyond 256: clusters of two blocks over neighbouring query tiles; each block loads half of "
    "every key and value tile, and two warpgroups divide the columns of O",
    layouts=registry.LAYOUTS,
    terms=_WITHOUT_DROPOUT,
    refusals=tile_rules.wide,
    with_warps=column_warps,
    shared_memory=sm90_wide.forward_map,
    accumulators=_wide_accumulators,
    reason=reason(
        lambda build: (
            "two blocks of a cluster load keys and values for both: two warpgroups compute S of alternate key tiles "
            "and half of the columns of O each, one warp loads"
        )
    ),
)
BACKWARD: Final = FusedKernel(
    kind="backward",
    family="sm90",
    variant=STANDARD,
    module="sm90.backward",
    summary="persistent blocks over key tiles",
    layouts=registry.LAYOUTS,
    terms=TERMS,
    refusals=tile_rules.sm90_backward,
    with_warps=backward_warps,
    shared_memory=sm90_smem.backward_map,
    products=no_products,
    accumulators=_backward_accumulators,
    accumulator_limit=accumulator_limit,
    main_grid=main_grid,
    num_splits_key=num_splits_key,
    tensor_maps=_backward_maps,
    reason=_backward_reason(),
)
# What the standard body and variant query_heads implement with score_rows.
SCORE_ROWS_BACKWARD: Final = replace(BACKWARD, terms=_WITHOUT_DROPOUT)
PER_HEAD_BACKWARD: Final = replace(
    BACKWARD,
    variant=PER_HEAD,
    summary="one block per head: each block computes all key tiles of a head and sums dQ without atomics",
    layouts=("grouped",),
    lengths="short",
    reason=_backward_reason(shares="one block per head: "),
)
QUERY_HEADS_BACKWARD: Final = replace(
    BACKWARD,
    variant=QUERY_HEADS,
    summary="persistent blocks over key tiles of every query head; dK and dV of a group are added in float32",
    lengths="short",
    reason=_backward_reason(shares="a block computes a key tile of one query head and adds dK and dV in float32: "),
)
DS_REGISTERS_BACKWARD: Final = replace(
    BACKWARD,
    variant=DS_REGISTERS,
    summary="persistent blocks over key tiles; dK is multiplied from dS in registers",
    terms=("bias", "sinks"),
    accumulators=_keeps_ds_accumulators,
    reason=_backward_reason(dk=_DK_FROM_REGISTERS),
)
KEY_REGISTERS_BACKWARD: Final = replace(
    BACKWARD,
    variant=KEY_REGISTERS,
    summary="persistent blocks over key tiles; dK is multiplied from dS in registers, dQ from the key tile in "
    "registers",
    terms=("sinks",),
    accumulators=_keeps_ds_accumulators,
    reason=_backward_reason(dk=_DK_FROM_REGISTERS, dq="dQ from keys in registers"),
)
TWO_CTA_BACKWARD: Final = replace(
    BACKWARD,
    variant=TWO_CTA,
    module="sm90.backward_2cta",
    summary="clusters of two blocks over neighbouring key tiles; one warpgroup has dV, one dK, one dQ of both blocks",
    layouts=("grouped",),
    terms=(),
    refusals=tile_rules.two_cta,
    shared_memory=sm90_smem.backward_2cta_map,
    accumulators=_two_cta_accumulators,
    reason=reason(
        lambda build: (
            "one warpgroup computes P and dV, one dS and dK, one dQ of both blocks of a cluster, one warp loads"
        )
    ),
)
WIDE_BACKWARD: Final = replace(
    BACKWARD,
    variant=WIDE,
    module="sm90.wide_backward",
    summary="head dims beyond 256: clusters of two blocks over neighbouring query tiles for dQ, and over neighbouring "
    "key tiles for dK and for dV; each block loads half of every other tile, and two warpgroups divide the columns",
    terms=("softcap", "alibi", "sinks"),
    refusals=tile_rules.wide,
    with_warps=wide_backward_warps,
    shared_memory=sm90_wide_backward.backward_map,
    accumulators=_wide_backward_accumulators,
    reason=reason(
        lambda build: (
            "blocks of dQ keep Q and dO, blocks of dK keep K and V, blocks of dV keep K; two blocks of a cluster load "
            "the other tiles for both: two warpgroups compute the scores of alternate tiles and half of the columns "
            "of the gradient each, one warp loads"
        )
    ),
)
KERNELS: Final = (
    *(FORWARD, MULTICAST_FORWARD, SPLIT_KV_FORWARD, WIDE_FORWARD, E4M3_FORWARD, E4M3_CACHE_FORWARD),
    *(BACKWARD, PER_HEAD_BACKWARD, QUERY_HEADS_BACKWARD, DS_REGISTERS_BACKWARD, KEY_REGISTERS_BACKWARD),
    *(TWO_CTA_BACKWARD, WIDE_BACKWARD),
)
COMPONENT_GEMM: Final = Kernel(
    kind="component_gemm",
    family="sm90",
    variant=STANDARD,
    module="component_gemms.standalone_sm90",
    summary="one block per tile",
    layouts=(),
    main_grid=gemm_grid,
    tensor_maps=_gemm_maps,
)
