"""Listed tile scheduler of the sm90 forward: the work tiles of mask form "ranges", from a list in memory."""

from typing import Any

from cutlass import Int32

from cutlass_py_attn.integers import smaller
from cutlass_py_attn.kernels.sm90_common.listed_tiles import Record, record, work_tile_of
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import TileScheduler, WorkTile


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
