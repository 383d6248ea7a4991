"""Listed key tiles of the sm90 backward: key tiles of mask form "ranges", and their query tiles, in lists in memory."""

from dataclasses import replace
from typing import Any

from cutlass import Int32

from cutlass_py_attn.kernels.sm90_backward.key_tile_scheduler import KeyTileScheduler
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock, QueryTileOrder
from cutlass_py_attn.kernels.sm90_common.listed_tiles import entry, record, work_tile_of
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile


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
