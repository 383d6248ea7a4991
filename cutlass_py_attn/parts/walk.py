"""Walk: the order in which a key tile of the Hopper backward meets the query tiles that see it, of all its heads.

Every function takes Python ints or traced integers, as in parts/schedule.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass_py_attn.parts.integers import choose
from cutlass_py_attn.plan import Build

if TYPE_CHECKING:
    from cutlass_py_attn.parts.items import Item

Place = tuple[Any, Any]  # query head and query tile; where a tile is worked in `blocks` of its rows, head and block


class Walk:
    """That of one Build: all tiles of a query head from the first to the last, then those of the next head that reads
    the key head."""

    def __init__(self, build: Build) -> None:
        self.is_grouped = build.has("grouped")

    def first(self, p: Any, item: Item, blocks: int = 1) -> Place:
        """The place of an item's first round."""
        return item.head * p.group if self.is_grouped else item.head, item.first * blocks

    def next(self, item: Item, head: Any, query_block: Any, blocks: int = 1) -> Place:
        """The place of the round after."""
        following = query_block + 1
        if not self.is_grouped:
            return head, following
        is_over = following == item.end * blocks
        return choose(is_over, head + 1, head), choose(is_over, item.first * blocks, following)
