"""Kernels of variant wide: head dims beyond 256."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.backward_parts import kernel as backward_parts
from cutlass_py_attn.kernels.kernel import Refusals, fixed_order, refuse
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.kernels.sm90_backward.rules import all_gradients
from cutlass_py_attn.kernels.sm90_common import kernel as sm90_common
from cutlass_py_attn.kernels.sm90_common.layout import LOAD_WARPGROUPS
from cutlass_py_attn.kernels.sm90_common.rules import SM90_MAX_HEAD_DIM, consumers, sm90_head_dims, sm90_operands
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.kernels.sm90_wide import backward_layout, layout
from cutlass_py_attn.kernels.sm90_wide.layout import WARPGROUPS
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Grid, ceil_div
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS, WARPGROUP_WARPS
from cutlass_py_attn.launch.names import BATCH, GROUP, NUM_HEADS, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES
from cutlass_py_attn.launch.variants import WIDE
from cutlass_py_attn.score_terms import registry

WIDE_MAX_HEAD_DIM: Final = 512  # of the sm90 kernels of variant wide


def _refusals(build: Build) -> Refusals:
    """Yields the rules of both."""
    yield from sm90_operands(build)
    yield from sm90_head_dims(build, f"variant {WIDE} ends", WIDE_MAX_HEAD_DIM, "family sm80")
    if build.kind == "backward":
        yield from all_gradients(build)
    for field, reason in (("tile_m", "both warpgroups have the same queries"), ("tile_n", "one warpgroup has S of")):
        if getattr(build, field) != WARPGROUP_ROWS:
            yield refuse(build, field, f"in variant wide {reason}, {WARPGROUP_ROWS} rows", f"use {WARPGROUP_ROWS}")
    yield from consumers(build, LOAD_WARPGROUPS, (WARPGROUPS,))
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "the next key tile is loaded while this one is multiplied", "use 2 or more")
    if build.kind == "backward" and build.grad_output_stages != build.query_stages:
        rule = f"must be query_stages = {build.query_stages}: one ring has chunks of all tiles"
        yield refuse(build, "grad_output_stages", rule, "set it so")
    if build.key_stages != 1:
        yield refuse(build, "key_stages", "variant wide has no stages of the key tile", "use 1")
    if build.score_rows:
        yield refuse(build, "score_rows", "variant wide computes all rows of a tile at once", "use 0")
    if max(build.head_dim, build.head_dim_value) <= SM90_MAX_HEAD_DIM:
        rule = f"variant wide is for head dims beyond {SM90_MAX_HEAD_DIM}"
        yield refuse(build, "head_dim", rule, "use the standard variant")


def _forward_grid(build: Build) -> Grid:
    """Returns the grid: a cluster for each pair of query tiles."""
    cluster = build.cluster
    return cluster * ceil_div(NUM_QUERIES, build.tile_m * cluster), NUM_HEADS, BATCH


def column_warps(build: Build) -> Build:
    """Returns the build with warpgroups that compute S of alternate tiles, and divide the columns of O or dQ."""
    return replace(build, warps_scores=(WARPGROUP_WARPS, 1), warps_grad_q=(WARPGROUP_WARPS, WARPGROUPS))


def _backward_warps(build: Build) -> Build:
    """Returns the build with the same warps for the columns of dK and dV."""
    build = column_warps(build)
    return replace(build, warps_grad_v=build.warps_grad_q, warps_grad_k=build.warps_grad_q)


def _forward_accumulators(build: Build) -> int:
    columns = max(layout.value_columns(build))
    return build.tile_m * (build.tile_n + build.tile_n // 2 + columns) // sm90_common.consumer_threads(build)


def _backward_accumulators(build: Build) -> int:
    gradients = backward_layout.GRAD_QUERY, backward_layout.GRAD_KEY, backward_layout.GRAD_VALUE
    widest = max(max(backward_layout.result_columns(build, gradient)) for gradient in gradients)
    return build.tile_m * (2 * build.tile_n + widest) // sm90_common.consumer_threads(build)


def _backward_grid(build: Build) -> Grid:
    """Returns the grid: for each key head a cluster for each pair of key tiles, twice, and for each of query tiles."""
    cluster = build.cluster
    key_pairs = ceil_div(NUM_KEYS, cluster * build.tile_n)
    query_pairs = ceil_div(NUM_QUERIES, cluster * build.tile_m)
    return cluster * (2 * key_pairs + GROUP * query_pairs), NUM_HEADS_KEY, BATCH


FORWARD: Final = replace(
    sm90_forward.FORWARD,
    variant=WIDE,
    takes_registered_terms=False,
    beside_ranges=None,
    module="sm90_wide.forward",
    summary="head dims beyond 256: clusters of two blocks over neighbouring query tiles; each block loads half of "
    "every key and value tile, and two warpgroups divide the columns of O",
    layouts=registry.LAYOUTS,
    terms=sm90_common.WITHOUT_DROPOUT,
    refusals=_refusals,
    with_warps=column_warps,
    shared_memory=layout.forward_map,
    accumulators=_forward_accumulators,
    accumulator_limit=sm90_common.limited_by(layout.registers),
    main_grid=_forward_grid,
    reason=sm90_common.reason(
        lambda build: (
            "two blocks of a cluster load keys and values for both: two warpgroups compute S of alternate key tiles "
            "and half of the columns of O each, one warp loads"
        )
    ),
)
BACKWARD: Final = replace(
    sm90_backward.BACKWARD,
    variant=WIDE,
    takes_registered_terms=False,
    beside_ranges=None,
    steps=fixed_order,
    module="sm90_wide.backward",
    summary="head dims beyond 256: clusters of two blocks over neighbouring query tiles for dQ, and over neighbouring "
    "key tiles for dK and for dV; each block loads half of every other tile, and two warpgroups divide the columns",
    terms=("softcap", "alibi", "sinks"),
    refusals=_refusals,
    with_warps=_backward_warps,
    shared_memory=backward_layout.backward_map,
    accumulators=_backward_accumulators,
    accumulator_limit=sm90_common.limited_by(layout.registers),
    main_grid=_backward_grid,
    workspace=lambda build: backward_parts.workspace(build, ()),  # no sums
    reason=sm90_common.reason(
        lambda build: (
            "blocks of dQ keep Q and dO, blocks of dK keep K and V, blocks of dV keep K; two blocks of a cluster load "
            "the other tiles for both: two warpgroups compute the scores of alternate tiles and half of the columns "
            "of the gradient each, one warp loads"
        )
    ),
)
KERNELS: Final = (FORWARD, BACKWARD)
