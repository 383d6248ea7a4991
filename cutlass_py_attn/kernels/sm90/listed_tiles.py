"""Listed tiles: the schedulers of mask form "ranges", which read the tiles and their order from lists in memory.

launch/tile_lists.py says what the lists contain. A work tile visits entries [first, end) of its list; those before
partial_end need a mask.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.integers import smaller
from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.sm90.key_tile_scheduler import KeyTileScheduler
from cutlass_py_attn.kernels.sm90.query_tile_order import QueryBlock, QueryTileOrder
from cutlass_py_attn.kernels.sm90.tile_scheduler import TileScheduler, WorkTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS
from cutlass_py_attn.problem.tensors import WORD_BYTES

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


class ListedTileScheduler(TileScheduler):
    """Persistent tile scheduler over the work list of a forward."""

    def initial_cursor(self, p: Any) -> Record:
        """Returns the record of this worker's first tile."""
        return self.next_cursor(p, Int32(-1), None)

    def next_cursor(self, p: Any, wave: Int32, cursor: Any) -> Record:
        """Loads the record of the tile after that of `wave`; if there is none, the last record of all."""
        return record(p, smaller(self._number(p, wave + 1), self.total(p) - 1))

    def work_tile(self, p: Any, wave: Int32, cursor: Any) -> tuple[WorkTile, Any]:
        """Returns the work tile of a record, and the record."""
        return work_tile_of(self.build, p, cursor), cursor


class ListedKeyTileScheduler(KeyTileScheduler):
    """Dynamic scheduler over the work list of a backward.

    The first word of a record in shared memory is the key tile as which its tiles are masked.
    """

    def numbered_tile(self, p: Any, number: Int32, cursor: Any) -> tuple[WorkTile, Any]:
        """Returns the work tile of that number, and the cursor, which is not used."""
        return work_tile_of(self.build, p, record(p, number)), cursor

    def read_record(self, p: Any, record: Int32) -> WorkTile:
        """Returns the work tile of a record in shared memory."""
        words = self._record(record)
        return replace(super().read_record(p, record), partial_end=words[5], tile=words[6])

    def _words(self, work_tile: WorkTile) -> tuple[Any, ...]:
        _, *others = super()._words(work_tile)
        return work_tile.key_tile, *others, work_tile.partial_end, work_tile.tile


class ListedQueryTileOrder(QueryTileOrder):
    """Visits the query tiles of a list, for one query head after the other; the index of a QueryBlock is a place."""

    def visited(self, p: Any, block: QueryBlock) -> QueryBlock:
        """Returns the query tile at a place."""
        return QueryBlock(block.head, entry(p, block.index))
