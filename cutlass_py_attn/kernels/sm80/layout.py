"""Shared memory of the sm80 kernels whose blocks have all columns of the head dims."""

from __future__ import annotations

from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.smem import stack, tile_bytes
from cutlass_py_attn.problem.tensors import E4M3_BYTES, F32_BYTES
from cutlass_py_attn.score_terms import registry


def forward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the forward: query (reused for the output), key, value, bias, four partial sums per row.

    With an e4m3 cache also the codes of a key and a value tile, and the scales of their rows if rows have scales.
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    codes = E4M3_BYTES * tile_n if build.has(registry.KV8) else 0
    scales = F32_BYTES * tile_n if build.has(registry.KV8_ROW) else 0
    return stack(
        ("query", tile_bytes(dtype, tile_m, max(build.columns, build.columns_value)), 0, 4),
        ("key", tile_bytes(dtype, tile_n, build.columns), 0, 1),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("bias", tile_bytes(dtype, tile_m, tile_n) if build.has("bias") else 0, 0, 2),
        ("sums", 4 * tile_m * F32_BYTES, 2, 4),
        ("key_codes", codes * build.columns, 0, 4),
        ("value_codes", codes * build.columns_value, 0, 4),
        ("key_scales", scales, 0, 4),
        ("value_scales", scales, 0, 4),
    )


def backward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the backward: key, value, P, dS, and stages of query, grad_output, bias, logsumexp, delta."""
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages
    scores = tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("key", tile_bytes(dtype, tile_n, build.columns), 0, 8),
        ("value", tile_bytes(dtype, tile_n, build.columns_value), 0, 8),
        ("query", stages * tile_bytes(dtype, tile_m, build.columns), 0, 6),
        ("grad_output", build.grad_output_stages * tile_bytes(dtype, tile_m, build.columns_value), 0, 5),
        ("bias", stages * scores if build.has("bias") else 0, 0, 2),
        ("p", scores, 2, 5),
        ("ds", scores, 4, 7),
        ("logsumexp", stages * tile_m * F32_BYTES, 0, 2),
        ("delta", stages * tile_m * F32_BYTES, 0, 4),
    )
