"""Listed tiles: what kernels of mask form "ranges" read of the lists of tiles and of the ranges in memory.

launch/tile_lists.py says what the lists contain. A work tile visits entries [first, end) of its list; those before
partial_end need a mask.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS, ROWS_PADDING, list_of
from cutlass_py_attn.problem.tensors import RANGE_WORDS, WORD_BYTES

VECTOR_WORDS = 4  # of a record that are loaded at once


class Record(NamedTuple):
    """The record of a work tile in the work list; a cursor of the forward's scheduler."""

    tile: Int32
    head: Int32
    batch: Int32
    first: Int32
    partial_end: Int32
    end: Int32
    key_tile: Int32


def load_int32(address: Int64, place: Any, count: int) -> cute.Tensor:
    """Loads `count` int32 from a place in an array in global memory that is a multiple of `count`, 2 or 4."""
    start = params.pointer(address, Int32, count * WORD_BYTES) + params.assume_multiple(Int64(place), count)
    words = cute.make_rmem_tensor(count, Int32)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(count)), words)
    return words


def record(p: Any, number: Int32) -> Record:
    """Loads the record of a work tile."""
    first = Int64(number) * RECORD_WORDS
    low, high = (load_int32(p.work_list, first + half, VECTOR_WORDS) for half in (0, VECTOR_WORDS))
    return Record(low[0], low[1], low[2], low[3], high[0], high[1], high[2])


def entry(p: Any, place: Int32) -> Int32:
    """Loads the number of a tile."""
    return params.load_scalar(p.tile_entries, Int32, place)


def work_tile_of(build: Build, p: Any, found: Record) -> WorkTile:
    """Returns the work tile of a record."""
    seqlen = seqlen_info.create(build, p, found.batch)
    band = seqlen_info.band(build, p, seqlen)
    tile = WorkTile(seqlen, band, found.head, found.tile, found.first, found.end)
    return replace(tile, partial_end=found.partial_end, key_tile=found.key_tile)


def range_place(p: Any, batch: Int32, head: Int32, query: Any) -> Int64:
    """Returns where the range of a query starts in key_ranges (elements)."""
    of_head = Int64(list_of(batch, head, p.ranges_batch, p.ranges_heads)) * round_up(p.num_queries, ROWS_PADDING)
    return (of_head + query) * RANGE_WORDS
