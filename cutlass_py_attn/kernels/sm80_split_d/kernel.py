"""Kernels of variant split_d: head dims too wide for one block are split over blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.backward_parts.layout import dq_piece_columns
from cutlass_py_attn.kernels.kernel import Product, Refusals, listed, refuse
from cutlass_py_attn.kernels.sm80 import kernel as sm80
from cutlass_py_attn.kernels.sm80_split_d.layout import (
    HEAD_DIM_SPLIT_MULTIPLE,
    blocks_per_tile,
    copyable_rows,
    even_head_dim_split,
    gradient_columns,
    split_d_map,
    splits_dk_dv,
)
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Grid, times
from cutlass_py_attn.launch.variants import SPLIT_D
from cutlass_py_attn.score_terms import registry

WARPS: Final = 8
TILE_M: Final = {"forward": (64,), "backward": (32, 64)}
TILE_N: Final = {"forward": (64, 128), "backward": (64,)}
MAX_HEAD_DIM_SPLIT: Final = 512


def _evened(build: Build) -> Build:
    """Returns the build with as even column blocks as so many blocks can have."""
    widest = build.head_dim_value if build.kind == "forward" else max(build.head_dim, build.head_dim_value)
    return replace(build, head_dim_split=even_head_dim_split(build.head_dim_split, widest))


def _also_evened(refusals: Callable[[Build], Refusals]) -> Callable[[Build], Refusals]:
    """Returns the rules of a build, and of the build with even column blocks if it breaks none."""

    def of_both(build: Build) -> Refusals:
        broken = [*refusals(build)]
        yield from broken or refusals(_evened(build))

    return of_both


def _forward_warps(build: Build) -> Build:
    build = _evened(build)
    return replace(
        build,
        warps_scores=sm80.warps_of(build, build.tile_m, build.tile_n),
        warps_grad_q=sm80.warps_of(build, build.tile_m, build.block_columns_value),
    )


def _backward_warps(build: Build) -> Build:
    build = _evened(build)
    return replace(
        build,
        warps_scores=sm80.warps_of(build, build.tile_m, build.tile_n),
        warps_grad_v=sm80.warps_of(build, build.tile_n, gradient_columns(build, build.block_columns_value)),
        warps_grad_k=sm80.warps_of(build, build.tile_n, gradient_columns(build, build.block_columns)),
        warps_grad_q=sm80.warps_of(build, build.tile_m, dq_piece_columns(build)),
    )


def _forward_products(build: Build) -> tuple[Product, ...]:
    output = Product("warps_grad_q", build.warps_grad_q, build.tile_m, build.block_columns_value)
    return sm80.scores_product(build), output


def _backward_products(build: Build) -> tuple[Product, ...]:
    return (
        sm80.scores_product(build),
        Product("warps_grad_v", build.warps_grad_v, build.tile_n, build.block_columns_value),
        Product("warps_grad_k", build.warps_grad_k, build.tile_n, build.block_columns),
        Product("warps_grad_q", build.warps_grad_q, build.tile_m, build.block_columns),
    )


def _forward_accumulators(build: Build) -> int:
    """Returns the registers of S and of a column block of O."""
    return build.tile_m * (build.tile_n + build.block_columns_value) // build.threads


def _backward_accumulators(build: Build) -> int:
    """Returns the registers of S and dP, and of column blocks of dK and dV, or of the wider if a block has one."""
    scores = 2 * build.tile_m * build.tile_n
    widths = build.block_columns, build.block_columns_value
    return (scores + build.tile_n * (max(widths) if splits_dk_dv(build) else sum(widths))) // build.threads


def _grid(of_tiles: Callable[[Build], Grid]) -> Callable[[Build], Grid]:
    """Returns the grid: neighbouring blocks share each tile of this grid."""

    def of_blocks(build: Build) -> Grid:
        tiles, heads, batch = of_tiles(build)
        return times(tiles, blocks_per_tile(build)), heads, batch

    return of_blocks


def _forward_refusals(build: Build) -> Refusals:
    """Yields the rules of the forward."""
    return _shared_refusals(build, [("tile_n", build.block_columns_value)])


def _backward_refusals(build: Build) -> Refusals:
    """Yields the rules of the backward."""
    yield from sm80.equal_stages(build)
    yield from _shared_refusals(build, [("tile_m", build.block_columns), ("tile_m", build.block_columns_value)])


def _shared_refusals(build: Build, tiles: list[tuple[str, int]]) -> Refusals:
    """Yields the rules of both; tiles: fields with the rows of column blocks that threads copy, and their columns."""
    for field, allowed in (("tile_m", TILE_M), ("tile_n", TILE_N)):
        if getattr(build, field) not in allowed[build.kind]:
            yield refuse(build, field, f"the split-D {build.kind} has {listed(allowed[build.kind])} rows", "use those")
    if build.warps != WARPS:
        yield refuse(build, "warps", f"{WARPS} warps divide the column blocks", f"use {WARPS}")
    if build.query_stages < 2:
        yield refuse(build, "query_stages", "one step is loaded while another is multiplied", "use 2 or more")
    if build.head_dim_split % HEAD_DIM_SPLIT_MULTIPLE or not 0 < build.head_dim_split <= MAX_HEAD_DIM_SPLIT:
        rule = (
            f"must be a multiple of {HEAD_DIM_SPLIT_MULTIPLE} up to {MAX_HEAD_DIM_SPLIT}, so that the warps divide it"
        )
        yield refuse(build, "head_dim_split", rule, "use one")
        return
    for field, columns in tiles:
        if not copyable_rows(build, getattr(build, field), columns):
            rule = f"{build.threads} threads copy more rows of {columns} columns at once"
            yield refuse(build, field, rule, "use 64, or the standard variant")


FORWARD: Final = replace(
    sm80.FORWARD,
    variant=SPLIT_D,
    module="sm80_split_d.forward",
    summary="head_dim_value split over blocks",
    layouts=(*registry.LAYOUTS, registry.PAGED),
    refusals=_also_evened(_forward_refusals),
    with_warps=_forward_warps,
    shared_memory=split_d_map,
    products=_forward_products,
    accumulators=_forward_accumulators,
    main_grid=_grid(sm80.FORWARD.main_grid),
)
BACKWARD: Final = replace(
    sm80.BACKWARD,
    variant=SPLIT_D,
    module="sm80_split_d.backward",
    summary="head dims split over blocks",
    refusals=_also_evened(_backward_refusals),
    with_warps=_backward_warps,
    shared_memory=split_d_map,
    products=_backward_products,
    accumulators=_backward_accumulators,
    main_grid=_grid(sm80.BACKWARD.main_grid),
    workspace=sm80.backward_workspace(blocks_per_tile),
)
KERNELS: Final = (FORWARD, BACKWARD)
