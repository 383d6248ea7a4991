"""Wide heads of the sm90 forward: the columns of each warpgroup, the chunks of keys and values, and shared memory.

A key or value tile is loaded in chunks of columns, which are the stages of one ring in the order of their use:

    K 0 | K 1, V 0 | K 2, V 1 | ... | V last

All chunks of K are read by the warpgroup that computes S of the key tile, a chunk of V by the warpgroup with its
columns of O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch.build import WIDE_COLUMN_MULTIPLE, Buffer, Build
from cutlass_py_attn.launch.smem import BARRIER_BYTES, first_that_fits, stack, tile_bytes
from cutlass_py_attn.problem.tensors import F32_BYTES

REGISTERS: Final = (24, 240)  # of a thread of the warpgroup that loads, and of those that compute
WARPGROUPS: Final = 2  # that compute
STATISTICS: Final = 3  # of a row: maximum, factor of O, sum; one of each for each warpgroup
CHUNK_STRIPS: Final = 2  # of 64 columns in a chunk of keys or values
BACKWARD_CHUNK_STRIPS: Final = 2  # of 64 columns in a chunk of the backward
# If three strips are the columns of a warpgroup, one product of that width reads P once, and chunks are as wide.
WIDE_CHUNK_STRIPS: Final = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """Columns [first, first + columns) of a key or value tile."""

    first: int
    columns: int

    @property
    def strips(self) -> int:
        """Strips of columns, each of which TMA copies at once."""
        return self.columns // WIDE_COLUMN_MULTIPLE


def value_columns(build: Build) -> tuple[int, int]:
    """Returns the columns of O that each warpgroup computes: half of the strips, or the first one more."""
    first = ceil_div(build.columns_value // WIDE_COLUMN_MULTIPLE, WARPGROUPS) * WIDE_COLUMN_MULTIPLE
    return first, build.columns_value - first


def chunk_columns(build: Build) -> int:
    """Returns the columns of a stage of the ring; the last chunk of a tile may have fewer."""
    if build.kind == "backward":
        return WIDE_COLUMN_MULTIPLE * BACKWARD_CHUNK_STRIPS
    strips = value_columns(build)[0] // WIDE_COLUMN_MULTIPLE
    return WIDE_COLUMN_MULTIPLE * (WIDE_CHUNK_STRIPS if strips == WIDE_CHUNK_STRIPS else CHUNK_STRIPS)


def key_chunks(build: Build) -> tuple[Chunk, ...]:
    """Returns the chunks of a key tile."""
    return chunks_of(0, build.columns, chunk_columns(build))


def value_chunks(build: Build) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Returns the chunks of a value tile for each warpgroup."""
    first, second = value_columns(build)
    width = chunk_columns(build)
    return chunks_of(0, first, width), chunks_of(first, second, width)


def chunks_of(start: int, columns: int, width: int) -> tuple[Chunk, ...]:
    """Returns the chunks of columns [start, start + columns), each of up to `width` columns."""
    return tuple(Chunk(start + first, min(width, columns - first)) for first in range(0, columns, width))


def chunks_of_tile(build: Build) -> int:
    """Returns the chunks of a key tile and its value tile."""
    return len(key_chunks(build)) + sum(map(len, value_chunks(build)))


def first_key_chunk(build: Build, key_tile: Any) -> Any:
    """Returns the number of the first chunk of K of the key tile `key_tile` > 0, counted from the first chunk of all.

    Before it are K of the key tiles before, and V of all of these but the last. That of key tile 0 is number 0.
    """
    return len(key_chunks(build)) + (key_tile - 1) * chunks_of_tile(build)


def first_value_chunk(build: Build, key_tile: Any, warpgroup: int, *, is_last: bool) -> Any:
    """Returns the number of the first chunk of V of a key tile that a warpgroup reads.

    is_last: whether no key tile follows; else K of the next one comes before it
    """
    before = sum(len(chunks) for chunks in value_chunks(build)[:warpgroup])
    return first_key_chunk(build, key_tile + 1) + (0 if is_last else len(key_chunks(build))) + before


def ring_stages(build: Build) -> int:
    """Returns the stages of the ring of chunks, as the shared-memory map has them."""
    return build.buffer("ring").bytes // _stage_bytes(build)


def _stage_bytes(build: Build) -> int:
    return tile_bytes(build.dtype, build.tile_n, chunk_columns(build))


def forward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the wide forward, with chunks of up to `query_stages` key and value tiles, if so many fit."""
    most = build.query_stages * chunks_of_tile(build)
    maps = {stages: _forward_with(build, stages) for stages in range(most, 0, -1)}
    return maps[first_that_fits(build, maps.items())]


def _forward_with(build: Build, stages: int) -> tuple[Buffer, ...]:
    """Places the query tile, the ring, P of two key tiles, the row statistics, and the barriers.

    Barriers: an empty one and a full one of each warpgroup for each stage, and one for the query tile.
    """
    dtype, tile_m, tile_n = build.dtype, build.tile_m, build.tile_n
    return stack(
        ("query", tile_bytes(dtype, tile_m, build.columns), 0, 1),
        ("ring", stages * _stage_bytes(build), 0, 3),
        ("p", WARPGROUPS * tile_bytes(dtype, tile_m, tile_n), 2, 3),
        ("row_statistics", STATISTICS * WARPGROUPS * tile_m * F32_BYTES, 2, 4),
        ("barriers", BARRIER_BYTES * ((WARPGROUPS + 1) * stages + 1), 0, 3),
    )


def registers(build: Build) -> tuple[int, ...]:
    """Returns the registers per thread of each role: loads, computes."""
    return REGISTERS
