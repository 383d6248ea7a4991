"""Walk: the order in which a key tile of the Hopper backward meets the query tiles that see it, of all its heads.

Every function takes Python ints or traced integers, as in parts/schedule.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass_py_attn.hopper import cluster
from cutlass_py_attn.parts.integers import choose
from cutlass_py_attn.plan import Build

if TYPE_CHECKING:
    from cutlass_py_attn.parts.items import Item

Place = tuple[Any, Any]  # query head and query tile; where a tile is worked in `blocks` of its rows, head and block


class Walk:
    """That of one Build: all tiles of a query head from the first to the last, then those of the next head."""

    def __init__(self, build: Build) -> None:
        self.is_grouped = build.has("grouped")

    def first(self, p: Any, item: Item, blocks: int = 1) -> Place:
        """The place of an item's first round."""
        return item.head * p.group if self.is_grouped else item.head, item.first * blocks

    def next(self, p: Any, item: Item, head: Any, query_block: Any, blocks: int = 1) -> Place:
        """The place of the round after."""
        following = query_block + 1
        if not self.is_grouped:
            return head, following
        is_over = following == item.end * blocks
        return choose(is_over, head + 1, head), choose(is_over, item.first * blocks, following)


class GroupWalk(Walk):
    """That of one Build with grouped heads: one tile of every query head, from the last tile to the first. Key tiles
    that start together meet the same tiles together, which the L2 cache then holds, and each begins with another head,
    so that they add to different sums. The blocks of a cluster walk alike."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.together = cluster(build)

    def first(self, p: Any, item: Item, blocks: int = 1) -> Place:
        return self._first_head(p, item), (item.end - 1) * blocks

    def next(self, p: Any, item: Item, head: Any, query_block: Any, blocks: int = 1) -> Place:
        following = choose(head + 1 == (item.head + 1) * p.group, item.head * p.group, head + 1)
        back = choose(following == self._first_head(p, item), 2 * blocks - 1, blocks - 1)
        if blocks == 1:
            return following, query_block - back
        is_over = (query_block + 1) % blocks == 0
        return choose(is_over, following, head), choose(is_over, query_block - back, query_block + 1)

    def _first_head(self, p: Any, item: Item) -> Any:
        number = item.tile if self.together == 1 else item.tile // self.together
        return item.head * p.group + number % p.group


def walk(build: Build) -> Walk:
    """That of a Build. Blocks that take turns at a query tile go upwards, behind those that started before them."""
    return GroupWalk(build) if build.has("grouped") and not build.deterministic else Walk(build)
