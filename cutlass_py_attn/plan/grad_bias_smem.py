"""Separate grad_bias kernel: which gradients it computes, its tile and shared memory. It multiplies chunks of head dims.

It is a kernel of mma.sync beside main kernels of both families. Beside one of the sm80 family it has that one's tile;
beside one of the sm90 family it has the same query rows, of which delta leaves row statistics, and keys and warps of
its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.plan.build import Buffer, Build, Warps
from cutlass_py_attn.plan.smem import first_that_fits, stack, tile_bytes
from cutlass_py_attn.plan.split_d import even_chunk
from cutlass_py_attn.plan.variants import STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, OPERANDS
from cutlass_py_attn.score_terms import registry

CHUNK_ROW_BYTES = (256, 128)  # of one row of a chunk; the widest that fits is chosen
CHUNK_STAGES = 2  # one chunk is multiplied while the next is loaded
# Beside a main kernel of the sm90 family: (tile_n, warps over rows and columns) by tile_m.
SM90_TILES: Final[dict[int, tuple[int, Warps]]] = {64: (128, (2, 4)), 128: (64, (4, 2))}


def grad_bias_mode(problem: Problem) -> str:
    """Returns which kernel writes grad_bias, see Build.

    The main kernel has dS in registers. With a score term that has a derivative it only has dS times the derivative.
    """
    if problem.grad_bias is None:
        return ""
    summed = [
        axis
        for axis, size, full in zip("bhqk", problem.grad_bias.shape, problem.shape.bias, strict=True)
        if size == 1 and full > 1
    ]
    has_main = any(getattr(problem, f"grad_{name}") is not None for name in OPERANDS)
    if not summed and has_main and not any(term.has_derivative for term in registry.present(problem)):
        return "main"
    return "".join(summed) or "none"


def grad_bias_build(build: Build) -> Build:
    """Returns the build of the separate grad_bias kernel: its tile, warps and shared-memory map."""
    if build.family == "sm90":
        tile_n, (rows, columns) = SM90_TILES[build.tile_m]
        build = replace(
            build,
            family="sm80",
            variant=STANDARD,
            tile_n=tile_n,
            warps=rows * columns,
            warps_scores=(rows, columns),
            score_rows=0,
            key_stages=1,
            options=(),
        )
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
