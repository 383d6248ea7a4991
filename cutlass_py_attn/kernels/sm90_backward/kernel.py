"""sm90 backward (wgmma, TMA): its kernels, their warps, registers, grids and tensor maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.backward_parts import kernel as backward_parts
from cutlass_py_attn.kernels.kernel import TERMS, BufferRule, FusedKernel, Tile, no_products
from cutlass_py_attn.kernels.sm90_backward.layout import DQ_WARPGROUPS, backward_map, registers, stored_tiles
from cutlass_py_attn.kernels.sm90_backward.rules import sm90_backward
from cutlass_py_attn.kernels.sm90_backward.schedule import steps_of
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
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_common.rules import BESIDE_RANGES
from cutlass_py_attn.kernels.tile_lists import kernel as tile_lists
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import delta_clears_sums
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid, Name, Number, ceil_div, minimum, round_up, times
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS, WARPGROUP_WARPS
from cutlass_py_attn.launch.names import (
    BATCH,
    GROUP,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_QUERIES,
    TOTAL_KEY_TILES,
    WORK_TILES,
)
from cutlass_py_attn.launch.variants import DS_REGISTERS, KEY_REGISTERS, PER_HEAD, QUERY_HEADS, SHARED_END, STANDARD
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, WORD_BYTES
from cutlass_py_attn.score_terms import registry

_DK_FROM_REGISTERS: Final = "dK from dS in registers, and dV"


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


def _backward_accumulators(build: Build) -> int:
    """Returns the registers of S and dP, and of dV and dK."""
    return _with_gradients(build, 2 * build.block_queries)


def _keeps_ds_accumulators(build: Build) -> int:
    """Returns the registers of dP beside the 16-bit weights, as the next S is multiplied after dS, of dV and of dK."""
    return _with_gradients(build, build.block_queries + build.block_queries // 2)


def _with_gradients(build: Build, scores: int) -> int:
    return build.tile_n * (scores + build.columns + build.columns_value) // consumer_threads(build)


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel: persistent blocks, one for each SM, or whole clusters of them.

    Work tiles are key tiles of every key head or every query head, and heads with one block per head. A cluster
    computes as many neighbouring tiles as it has blocks.
    """
    if build.variant == PER_HEAD:
        return _per_head_blocks(), ONE, ONE
    cluster = build.cluster
    if SHARED_END in build.options:
        return persistent_blocks(WORK_TILES * Name("num_splits_query")), ONE, ONE
    heads = NUM_HEADS if build.variant == QUERY_HEADS else NUM_HEADS_KEY
    work_tiles = ceil_div(NUM_KEYS, build.tile_n * cluster) * heads * BATCH
    return persistent_blocks(work_tiles, cluster), ONE, ONE


def num_splits_key(build: Build) -> Expr:
    """Returns the key tiles of the backward: every one is a work tile of its own."""
    return ceil_div(NUM_KEYS, build.tile_n)


def _per_head_blocks() -> Expr:
    return persistent_blocks(NUM_HEADS_KEY * BATCH)


def _finish_kv_grid(build: Build) -> dict[str, Grid]:
    """Returns the grid of the kernel that converts dK and dV: a block for the rows of one warpgroup."""
    rows = times(ceil_div(NUM_KEYS, build.tile_n), build.tile_n // WARPGROUP_ROWS)
    return {"finish_kv": (rows, NUM_HEADS_KEY, BATCH)}


def _definitions(problem: Problem, build: Build) -> dict[str, Expr]:
    shared = shared_tiles.key_tiles(build) if SHARED_END in build.options else {}
    return shared | tile_lists.definitions(problem, build)


def _backward_workspace(build: Build) -> tuple[BufferRule, ...]:
    """Returns the buffers of a backward.

    grad_key_accum, grad_value_accum: (num_heads_key, total_key_tiles, tile_n, columns) float32 sums of dK and dV, if
        work tiles are those of query heads
    shared_sums: of each of the last key tiles, if blocks share their queries, the float32 sums of dK and dV and the
        int32 counts of the parts that warps have added
    tile_count_semaphore: int32 count of key tiles that have started
    """
    buffers = backward_parts.query_sums(build)
    if build.variant == QUERY_HEADS:
        for name, columns in (("grad_key_accum", build.columns), ("grad_value_accum", build.columns_value)):
            size = NUM_HEADS_KEY * TOTAL_KEY_TILES * (build.tile_n * columns * F32_BYTES)
            buffers.append(BufferRule(name, size, is_zeroed=True))
    if SHARED_END in build.options:
        buffers.append(
            BufferRule("shared_sums", shared_tiles.sums_bytes(build), condition=Name("shared_key_tiles") > 0)
        )
    is_zeroed = not delta_clears_sums(build)
    buffers.append(BufferRule("tile_count_semaphore", Number(WORD_BYTES), is_zeroed=is_zeroed))
    return *backward_parts.workspace(build, buffers), *tile_lists.workspace(build)


def _per_head_workspace(build: Build) -> tuple[BufferRule, ...]:
    """Returns the buffers with one block per head: grad_query_accum has dQ of one key head for each block."""
    rows = _per_head_blocks() * round_up(NUM_QUERIES, build.tile_m) * GROUP
    return backward_parts.workspace(build, [BufferRule("grad_query_accum", rows * (build.columns * F32_BYTES))])


def sees_keys(form: Form, tile_m: int) -> Expr:
    """Returns the rule that is 1 if every query tile sees a key: the first one and, right of a window, the last one."""
    if form.sees_all:
        return ONE
    shift = Name("bottom_right") * (NUM_KEYS - NUM_QUERIES)
    first = minimum(NUM_QUERIES, tile_m) + Name("window_right") + shift >= 1
    if form.grows:
        return first
    last_start = (ceil_div(NUM_QUERIES, tile_m) - 1) * tile_m - Name("window_left") + shift
    return first * (last_start < NUM_KEYS)


def _sees_keys(build: Build) -> Iterator[tuple[Expr, str]]:
    """A block writes the gradient of a query with the last key tile that it sees, and of no other query."""
    if not build.form.sees_all:
        says = f"each tile of {build.tile_m} queries must see a key; export a problem of which some do not"
        yield sees_keys(build.form, build.tile_m), says


def _backward_reason(shares: str = "", dk: str = "dK and dV", dq: str = "dQ") -> Reason:
    """Returns `reason` of a backward; shares: how blocks divide key tiles and heads, if not a block a key tile."""

    def roles(build: Build) -> str:
        of_group = "a block computes a key tile of all query heads of a group: " if build.has("grouped") else ""
        return f"{shares or of_group}{computing(build)} {dk}, one computes {dq}, one warp loads"

    return reason(roles)


def _backward_maps(build: Build) -> dict[str, Tile]:
    return tma_tiles(build) | stored_tiles(build)


BACKWARD: Final = FusedKernel(
    kind="backward",
    family="sm90",
    variant=STANDARD,
    module="sm90_backward.backward",
    summary="persistent blocks over key tiles",
    layouts=registry.LAYOUTS,
    terms=TERMS,
    takes_registered_terms=True,
    beside_ranges=BESIDE_RANGES,
    has_key_stages=True,
    refusals=sm90_backward,
    with_warps=backward_warps,
    shared_memory=backward_map,
    products=no_products,
    accumulators=_backward_accumulators,
    accumulator_limit=limited_by(registers),
    main_grid=main_grid,
    other_grids=tile_lists.grids,
    definitions=_definitions,
    num_splits_key=num_splits_key,
    workspace=_backward_workspace,
    tensor_maps=_backward_maps,
    reason=_backward_reason(),
    steps=steps_of,
)
# What the standard body and variant query_heads implement with score_rows.
SCORE_ROWS_BACKWARD: Final = replace(BACKWARD, terms=WITHOUT_DROPOUT, beside_ranges=None)
PER_HEAD_BACKWARD: Final = replace(
    BACKWARD,
    variant=PER_HEAD,
    summary="one block per head: each block computes all key tiles of a head and sums dQ without atomics",
    layouts=("grouped",),
    beside_ranges=None,
    lengths="short",
    workspace=_per_head_workspace,
    conditions=_sees_keys,
    reason=_backward_reason(shares="one block per head: "),
)
QUERY_HEADS_BACKWARD: Final = replace(
    BACKWARD,
    variant=QUERY_HEADS,
    summary="persistent blocks over key tiles of every query head; dK and dV of a group are added in float32",
    beside_ranges=None,
    lengths="short",
    other_grids=_finish_kv_grid,
    reason=_backward_reason(shares="a block computes a key tile of one query head and adds dK and dV in float32: "),
)
DS_REGISTERS_BACKWARD: Final = replace(
    BACKWARD,
    variant=DS_REGISTERS,
    summary="persistent blocks over key tiles; dK is multiplied from dS in registers",
    terms=("bias", "sinks"),
    takes_registered_terms=False,
    accumulators=_keeps_ds_accumulators,
    reason=_backward_reason(dk=_DK_FROM_REGISTERS),
)
KEY_REGISTERS_BACKWARD: Final = replace(
    BACKWARD,
    variant=KEY_REGISTERS,
    summary="persistent blocks over key tiles; dK is multiplied from dS in registers, dQ from the key tile in "
    "registers",
    terms=("sinks",),
    takes_registered_terms=False,
    accumulators=_keeps_ds_accumulators,
    reason=_backward_reason(dk=_DK_FROM_REGISTERS, dq="dQ from keys in registers"),
)
KERNELS: Final = (BACKWARD, PER_HEAD_BACKWARD, QUERY_HEADS_BACKWARD, DS_REGISTERS_BACKWARD, KEY_REGISTERS_BACKWARD)
