"""Separate grad_bias kernel: its tile, warps and shared memory.

Beside main kernels of both families there is one of mma.sync, which multiplies chunks of the head dims. Beside a main
kernel of the sm80 family it has that one's tile; beside one of the sm90 family it has the same query rows, of which
delta leaves row statistics, and keys and warps of its own. Beside main kernels of the sm90 family there is one of
wgmma, too, for sums over batches and heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.launch.build import Buffer, Build, Warps
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_WARPS
from cutlass_py_attn.launch.grad_bias import uses_wgmma
from cutlass_py_attn.launch.smem import BARRIER_BYTES, even_chunk, first_that_fits, stack, tile_bytes
from cutlass_py_attn.launch.variants import STANDARD
from cutlass_py_attn.problem.tensors import F32_BYTES

CHUNK_ROW_BYTES = (256, 128)  # of one row of a chunk; the widest that fits is chosen
CHUNK_STAGES = 2  # one chunk is multiplied while the next is loaded
# The kernel of mma.sync beside a main kernel of the sm90 family: (tile_n, warps over rows and columns) by tile_m.
SM80_TILES: Final[dict[int, tuple[int, Warps]]] = {64: (64, (2, 2)), 128: (64, (4, 2))}
WGMMA_TILE: Final = 128  # queries and keys of a tile of the kernel of wgmma
WGMMA_WARPS: Final = (8, 1)  # over rows and columns of the scores: two warpgroups
WGMMA_REGISTERS: Final = (24, 240)  # of a thread of the warpgroup that loads, and of those that compute
WGMMA_STAGES: Final = ((2, 2), (2, 1), (1, 1))  # of Q and K, and of dO and V; the first that fit are chosen


def grad_bias_build(build: Build) -> Build:
    """Returns the build of the separate grad_bias kernel: its tile, warps and shared-memory map."""
    if uses_wgmma(build):
        return _wgmma_build(build)
    if build.family == "sm90":
        tile_n, (rows, columns) = SM80_TILES[build.tile_m]
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


def _wgmma_build(build: Build) -> Build:
    """Returns the build of the kernel of wgmma."""
    rows, columns = WGMMA_WARPS
    build = replace(
        build,
        variant=STANDARD,
        tile_m=WGMMA_TILE,
        tile_n=WGMMA_TILE,
        warps=rows * columns + WARPGROUP_WARPS,
        warps_scores=WGMMA_WARPS,
        score_rows=0,
        key_stages=1,
        options=(),
    )
    maps = {stages: _wgmma_buffers(build, *stages) for stages in WGMMA_STAGES}
    return replace(build, shared_memory=maps[first_that_fits(build, maps.items())])


def _wgmma_buffers(build: Build, score_stages: int, weight_stages: int) -> tuple[Buffer, ...]:
    """Returns the map of the kernel of wgmma.

    score_stages: of Q, K and the logsumexp; weight_stages: of dO, V and delta
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    return stack(
        ("query", score_stages * tile_bytes(dtype, tile_m, build.columns), 0, 1),
        ("key", score_stages * tile_bytes(dtype, tile_n, build.columns), 0, 1),
        ("grad_output", weight_stages * tile_bytes(dtype, tile_m, build.columns_value), 0, 3),
        ("value", weight_stages * tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("bias", tile_bytes(dtype, tile_m, tile_n), 0, 2),
        ("logsumexp", score_stages * tile_m * F32_BYTES, 0, 2),
        ("delta", weight_stages * tile_m * F32_BYTES, 0, 4),
        ("barriers", 2 * BARRIER_BYTES * (score_stages + weight_stages), 0, 4),
    )


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
