"""Shared memory of the 2-CTA backward, and the columns of dQ of each block of a pair."""

from __future__ import annotations

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.sm90_backward.layout import grad_query_piece
from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.smem import BARRIER_BYTES, first_that_fits, stack, tile_bytes
from cutlass_py_attn.problem.tensors import F32_BYTES


def backward_2cta_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the 2-CTA backward, with two stages of P and dS if they fit."""
    maps = {count: _backward_2cta_with(build, count) for count in (2, 1)}
    return maps[first_that_fits(build, maps.items())]


def _backward_2cta_with(build: Build, score_stages: int) -> tuple[Buffer, ...]:
    """Places the operands, the stages of P (whose place dS takes) and of the other block's dS, and all barriers.

    other_key holds this block's columns of the other block's keys. Each stage has a full and an empty barrier.
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    query_stages, grad_output_stages = build.query_stages, build.grad_output_stages
    scores = score_stages * tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("key", tile_bytes(dtype, tile_n, build.columns), 0, 7),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("other_key", tile_bytes(dtype, tile_n, first_cta_columns(build)), 0, 7),
        ("query", query_stages * tile_bytes(dtype, tile_m, build.columns), 0, 6),
        ("grad_output", grad_output_stages * tile_bytes(dtype, tile_m, build.columns_value), 0, 5),
        ("p_ds", scores, 2, 7),
        ("other_ds", scores, 4, 7),
        ("logsumexp", query_stages * tile_m * F32_BYTES, 0, 2),
        ("delta", grad_output_stages * tile_m * F32_BYTES, 0, 4),
        ("barriers", 2 * BARRIER_BYTES * (query_stages + grad_output_stages + score_stages + 2), 0, 8),
    )


def first_cta_columns(build: Build) -> int:
    """Returns the columns of dQ that the first block of a cluster computes: whole pieces. The second has no more."""
    _, columns = grad_query_piece(build)
    return ceil_div(build.columns, 2 * columns) * columns
