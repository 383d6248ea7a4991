"""Shared memory of the separate grad_bias kernel, which multiplies chunks of the head dims."""

from __future__ import annotations

from dataclasses import replace

from cutlass_py_attn.plan.build import Buffer, Build
from cutlass_py_attn.plan.smem import first_that_fits, stack, tile_bytes
from cutlass_py_attn.plan.split_d import even_chunk
from cutlass_py_attn.problem.tensors import F32_BYTES

CHUNK_ROW_BYTES = (256, 128)  # of one row of a chunk; the widest that fits is chosen
CHUNK_STAGES = 2  # one chunk is multiplied while the next is loaded


def grad_bias_build(build: Build) -> Build:
    """Returns the build with the shared-memory map of its separate grad_bias kernel."""
    return replace(build, shared_memory=_buffers(build, grad_bias_chunk(build)))


def grad_bias_chunk(build: Build) -> int:
    """Returns the head-dim columns that the grad_bias kernel multiplies at a time."""
    columns = max(build.columns, build.columns_value)
    chunks = (even_chunk(columns, row_bytes // build.item_bytes) for row_bytes in CHUNK_ROW_BYTES)
    return first_that_fits(build, ((chunk, _buffers(build, chunk)) for chunk in chunks))


def _buffers(build: Build, chunk: int) -> tuple[Buffer, ...]:
    """Returns the map: its size does not grow with the head dims.

    left, right: chunk stages of Q and K, then of dO and V; left also stages the result
    bias, logsumexp, delta: of one tile
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    scores = tile_bytes(dtype, tile_m, tile_n)
    return stack(
        ("left", max(CHUNK_STAGES * tile_bytes(dtype, tile_m, chunk), scores), 0, 8),
        ("right", CHUNK_STAGES * tile_bytes(dtype, tile_n, chunk), 0, 3),
        ("bias", scores, 0, 2),
        ("logsumexp", tile_m * F32_BYTES, 0, 2),
        ("delta", tile_m * F32_BYTES, 0, 4),
    )
