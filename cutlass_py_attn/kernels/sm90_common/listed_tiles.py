"""Listed tiles: what kernels of mask form "ranges" read of the lists of tiles in memory.

launch/tile_lists.py says what the lists contain. A work tile visits entries [first, end) of its list; those before
partial_end need a mask.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from cutlass import Int32, Int64

from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.common.key_ranges import load_int32
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS

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
