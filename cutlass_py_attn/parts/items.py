"""Items: the query tiles that a block which stays on its SM takes in turn, of sequences of one length or of several."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.hopper import CLUSTER, cluster
from cutlass_py_attn.masks import Band
from cutlass_py_attn.parts import lengths, params, schedule
from cutlass_py_attn.parts.integers import ceil_div, larger, smaller
from cutlass_py_attn.plan import Build

Cursor = tuple[Int32, Int32]


@dataclass(frozen=True)
class Item:
    """One query tile of one head: its sequence and mask, and its key tiles [first, end), at least one; in the backward
    one key tile and its query tiles."""

    of: lengths.Sequence
    band: Band
    head: Any
    tile: Any
    first: Any
    end: Any


class Items:
    """The query tiles of one Build. Sequences of several lengths have theirs behind each other, each its own number of
    them; a block passes over the sequences as its numbers grow, and a cursor says where it is."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.rows = build.tile_m * cluster(build)  # query rows of an item
        self.bytes_of_key = build.item_bytes * (build.head_dim + build.head_dim_value)

    def start(self) -> Cursor:
        """(sequence, items of the sequences before it) of the first item."""
        return Int32(0), Int32(0)

    def turns(self, p: Any) -> Int32:
        """How many this block takes; all threads of a warp call this together."""
        return schedule.turns(self.total(p), *self.who())

    def who(self) -> tuple[Int32, Int32]:
        """The number of who takes items, and how many do so: blocks, or clusters of them."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        together = cluster(self.build)
        return (block, blocks) if together == 1 else (block // together, blocks // together)

    @cute.jit
    def total(self, p: Any):
        """The number of all items."""
        found = self.items_of(p, Int32(0))
        if cutlass.const_expr(self.build.has("varlen")):
            found = Int32(0)
            for step in cutlass.range(ceil_div(p.batch, WARP_THREADS), unroll=1):
                index = step * WARP_THREADS + cute.arch.lane_idx()
                if index < p.batch:
                    found = found + self.items_of(p, index)
            found = Int32(cute.arch.warp_redux_sync(found, "add"))
        else:
            found = found * p.batch
        return found

    def items_of(self, p: Any, index: Int32) -> Int32:
        """Query tiles of all heads of sequence `index`."""
        queries = p.num_queries
        if self.build.has("varlen"):
            start, end = (params.scalar(p.cu_seqlens_q, Int32, index + edge) for edge in (0, 1))
            queries = end - start
        return ceil_div(queries, self.rows) * p.num_heads

    def take(self, p: Any, turn: Int32, cursor: Cursor) -> tuple[Item, Cursor]:
        """The item of this block's turn, and the cursor behind it."""
        number = schedule.number_of(turn, *self.who())
        if not self.build.has("varlen"):
            return self._dense(p, number), cursor
        cursor = self.find(p, number, *cursor)
        index, before = cursor
        of = lengths.sequence(self.build, p, index)
        tiles = ceil_div(of.num_queries, self.rows)
        tile, head = self._place(number - before, tiles, p.num_heads, p.num_heads)
        if self.build.mask != "full":
            # Every second sequence ends with its longest tiles: lengths of all kinds leave blocks more equal shares.
            tile = cutlass.select_(index % 2 == 0, tile, tiles - 1 - tile)
        return self._item(p, of, head, tile), cursor

    @cute.jit
    def find(self, p: Any, number: Int32, index: Int32, before: Int32):
        """The cursor of item `number`, from one that is not behind it."""
        count = self.items_of(p, index)
        while number >= before + count:
            before = before + count
            index = index + 1
            count = self.items_of(p, index)
        return index, before

    def unseen(self, item: Item) -> Int32 | int:
        """How many of the item's key tiles, the last ones, come for another block alone."""
        return 0

    def _dense(self, p: Any, number: Int32) -> Item:
        tile, rest = self._dealt(p, number, ceil_div(p.num_queries, self.rows), p.num_heads * p.batch)
        return self._item(p, lengths.sequence(self.build, p, rest // p.num_heads), rest % p.num_heads, tile)

    def _dealt(self, p: Any, number: Int32, tiles: Int32, heads: Int32) -> tuple[Int32, Int32]:
        """(query tile, head) of an item where all sequences have as many tiles."""
        _, blocks = self.who()
        fitting = schedule.mixed_heads(schedule.heads_at_once(p.num_keys, self.bytes_of_key), blocks)
        return self._place(number, tiles, heads, schedule.heads_dealt(fitting, heads, blocks))

    def _place(self, number: Int32, tiles: Int32, heads: Int32, at_once: Int32) -> tuple[Int32, Int32]:
        """(query tile, head); where a mask makes tiles unequal, the longest come first."""
        if self.build.mask == "full":
            return number % tiles, number // tiles
        return schedule.longest_of_groups(number, tiles, heads, at_once)

    def _item(self, p: Any, of: lengths.Sequence, head: Int32, tile: Int32) -> Item:
        build = self.build
        band = lengths.band(build, p, of)
        where = band, tile, self.rows, build.tile_n
        first = schedule.key_tile_start(*where)
        return Item(of, band, head, tile, first, larger(schedule.key_tile_end(*where), first + 1))


class PairedItems(Items):
    """The query tiles of one Build whose blocks load keys and values for a cluster: it takes two neighbouring tiles at
    once, with the key tiles of both."""

    def unseen(self, item: Item) -> Int32 | int:
        """The one, if any, that only the cluster's other tile sees. Never more: its key goes back before its value, and
        the rings hold few; a query tile behind the last is worked as any other."""
        own = schedule.key_tile_end(item.band, item.tile, self.build.tile_m, self.build.tile_n)
        return smaller(item.end - larger(own, item.first + 1), 1)

    def _dealt(self, p: Any, number: Int32, tiles: Int32, heads: Int32) -> tuple[Int32, Int32]:
        """(pair of query tiles, head) of an item."""
        _, clusters = self.who()
        return schedule.paired(number, tiles, heads, clusters)

    def _item(self, p: Any, of: lengths.Sequence, head: Int32, tile: Int32) -> Item:
        """This block's of a pair, with the key tiles of both."""
        return replace(super()._item(p, of, head, tile), tile=CLUSTER * tile + cute.arch.block_idx_in_cluster())
