"""Query tile order: the order in which one key tile of the sm90 backward visits query tiles, over all query heads.

Every function takes Python ints or traced integers, as in launch/tile_order.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutlass_py_attn.integers import choose
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import QUERY_HEADS

if TYPE_CHECKING:
    from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile


@dataclass(frozen=True)
class QueryBlock:
    """The query block of one iteration: query head, and index of the block in the sequence."""

    head: Any
    index: Any


class QueryTileOrder:
    """Visits all query tiles of one query head, then those of the next query head of the same KV head (GQA).

    If work tiles are those of query heads, one query head is all.

    blocks: query blocks of a query tile; an iteration has one of them
    """

    def __init__(self, build: Build, blocks: int = 1) -> None:
        self.is_grouped = build.has("grouped") and build.variant != QUERY_HEADS
        self.blocks = blocks

    def num_tiles(self, p: Any, work_tile: WorkTile) -> Any:
        """Returns the number of query tiles that a work tile visits, over all query heads."""
        count = work_tile.end - work_tile.first
        return count * p.group if self.is_grouped else count

    def num_heads(self, p: Any) -> Any:
        """Returns the number of query heads of a work tile."""
        return p.group if self.is_grouped else 1

    def first(self, p: Any, work_tile: WorkTile) -> QueryBlock:
        """Returns the query block of the first iteration."""
        head = work_tile.head * p.group if self.is_grouped else work_tile.head
        return QueryBlock(head, work_tile.first * self.blocks)

    def first_of(self, p: Any, work_tile: WorkTile, skips: Any) -> QueryBlock:
        """Returns the query block of the first iteration, or of the second one if `skips` is 1 and not 0."""
        first = self.first(p, work_tile)
        second = self.next(work_tile, first)
        return QueryBlock(choose(skips == 1, second.head, first.head), choose(skips == 1, second.index, first.index))

    def visited(self, p: Any, block: QueryBlock) -> QueryBlock:
        """Returns the query block that the iteration of `block` visits."""
        return block

    def next(self, work_tile: WorkTile, block: QueryBlock) -> QueryBlock:
        """Returns the query block of the iteration after that of `block`."""
        following = block.index + 1
        if not self.is_grouped:
            return QueryBlock(block.head, following)
        is_last = following == work_tile.end * self.blocks
        return QueryBlock(
            choose(is_last, block.head + 1, block.head),
            choose(is_last, work_tile.first * self.blocks, following),
        )
