"""MLA decode of the sm90 family: slots of latent tiles, the order in which their columns are loaded, shared memory.

A latent row is a key of 576 columns, and its first 512 columns are the value. A latent tile, 64 rows, fills one of two
slots of shared memory as nine strips of 64 columns. The tiles of a row of work alternate between the slots:

    slot    S = Q K^T, softmax     O += P V, columns 0 to 255    O += P V, columns 256 to 511
    0       warpgroup 0            warpgroup 0, P in registers   warpgroup 1, P in shared memory
    1       warpgroup 1            warpgroup 0, P in shared memory    warpgroup 1, P in registers

The last strip is no part of the value: P takes its place. A half of a slot is what one warpgroup is the last to read.
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.kernels.decode.layout import SCHEDULE_WORDS
from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.smem import BARRIER_BYTES, stack, tile_bytes
from cutlass_py_attn.launch.variants import MLA_HEAD_DIMS
from cutlass_py_attn.problem.tensors import F32_BYTES, WORD_BYTES
from cutlass_py_attn.score_terms import registry

REGISTERS: Final = (40, 232)  # of a thread of the producer, which finds pieces and pages, and of those that compute
CODES_REGISTERS: Final = (72, 216)  # the same of an e4m3 cache, whose codes the producer converts
WARPGROUPS: Final = 2  # that compute; each has half of the columns of O
SLOTS: Final = 2
STRIP_COLUMNS: Final = 64  # 128 bytes, the width of the swizzle
STRIPS: Final = MLA_HEAD_DIMS[0] // STRIP_COLUMNS
VALUE_STRIPS: Final = MLA_HEAD_DIMS[1] // STRIP_COLUMNS
CHUNKS: Final = ((0, 1), (2, 3), (4, 5), (6, 7), (8,))  # strips with one full barrier
VALUE_CHUNKS: Final = ((0, 1), (2, 3))  # of the columns of O of each warpgroup
P_STRIP: Final = STRIPS - 1
# An e4m3 cache: kernels/sm90_mla/latent_codes.py.
ROPE_COLUMNS: Final = MLA_HEAD_DIMS[0] - MLA_HEAD_DIMS[1]  # of the rotary embedding, which have 16 bits
ROPE_CHUNK: Final = len(CHUNKS) - 1
WARP_ROWS: Final = 16  # of a latent tile that one warp of the producer converts
# Chunks of each half of each slot, in the order of their loads and their use: warpgroup i releases half i.
HALVES: Final = (((0, 1), (2, 3, 4)), ((0, 1, 4), (2, 3)))
STATISTICS: Final = 3  # of a row: maximum, factor of O, sum; one of each for each warpgroup


def forward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map: the query tile, both slots, the row statistics, the barriers, and the words of the schedule.

    Barriers: a full one for each chunk and an empty one for each half of each slot.
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    return stack(
        ("query", tile_bytes(dtype, tile_m, build.columns), 0, 1),
        ("ring", SLOTS * tile_bytes(dtype, tile_n, build.columns), 0, 3),
        ("row_statistics", STATISTICS * WARPGROUPS * tile_m * F32_BYTES, 2, 4),
        ("barriers", BARRIER_BYTES * SLOTS * (len(CHUNKS) + WARPGROUPS), 0, 3),
        ("schedule", SCHEDULE_WORDS * WORD_BYTES, 0, 0),
    )


def registers(build: Build) -> tuple[int, ...]:
    """Returns the registers per thread of each role: loads, computes."""
    return CODES_REGISTERS if build.has(registry.KV8_TILE) else REGISTERS
