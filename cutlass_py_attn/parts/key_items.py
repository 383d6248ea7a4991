"""Key items: the key tiles that the blocks of a Hopper backward take, each block the next one as it gets done.

The warp that loads takes a number from a counter, finds the key tile that it stands for, and leaves a record of it in
shared memory, where the other warps of the block find it once the key tile is there. Records have two places: while
the next one is written, dK and dV of the item before are still being stored. The last record says that none is left.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.hopper import CLUSTER
from cutlass_py_attn.parts import lengths, moves, params, schedule
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.parts.items import Cursor, Item, Items
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES
from cutlass_py_attn.shared_memory import RECORD_WORDS

NONE_LEFT = -1  # in place of a key tile


class KeyItems(Items):
    """The key tiles of one Build."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        columns = build.columns + build.columns_value
        self.bytes_of_query = build.item_bytes * columns + F32_BYTES * build.columns

    def items_of(self, p: Any, index: Int32) -> Int32:
        """Key tiles of all key heads of sequence `index`."""
        keys = p.num_keys
        if self.build.has("varlen"):
            start, end = (params.scalar(p.cu_seqlens_k, Int32, index + edge) for edge in (0, 1))
            keys = end - start
        return ceil_div(keys, self.build.tile_n) * (p.num_heads // p.group)

    def first_number(self, p: Any) -> Int32:
        """The number of a block's first item. Where blocks wait for each other, even this one comes from the counter:
        then each waits only for items that running blocks took before, in whichever order the GPU starts them."""
        block, _ = self.who()
        return self.counted(p) if self.build.deterministic else block

    def next_number(self, p: Any, number: Int32) -> Int32:
        """The number of a block's item behind that one."""
        _, blocks = self.who()
        return self.counted(p) if self.build.deterministic else blocks + self.counted(p)

    @cute.jit
    def counted(self, p: Any):
        """One more from the counter, for all threads of a warp."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = params.pointer(p.started, Int32, 4)
            number = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(number, 0)

    def item(self, p: Any, number: Int32, cursor: Cursor) -> tuple[Item, Cursor]:
        """The item of that number, and the cursor behind it."""
        build, heads = self.build, p.num_heads // p.group
        if not build.has("varlen"):
            tile, rest = self._place_of(p, number, lengths.sequence(build, p, Int32(0)), heads * p.batch)
            return self._item_of(p, lengths.sequence(build, p, rest // heads), rest % heads, tile), cursor
        cursor = self.find(p, number, *cursor)
        index, before = cursor
        of = lengths.sequence(build, p, index)
        tile, head = self._place_of(p, number - before, of, heads)
        return self._item_of(p, of, head, tile), cursor

    def _place_of(self, p: Any, number: Int32, of: lengths.Sequence, heads: Int32) -> tuple[Int32, Int32]:
        """(key tile, head) of an item among those of `heads` heads."""
        build, tiles = self.build, ceil_div(of.stored_keys, self.build.tile_n)
        fitting = schedule.heads_at_once(of.num_queries * p.group, self.bytes_of_query)
        if build.deterministic:
            return schedule.key_tile_in_turn(number, tiles, heads, fitting)
        _, blocks = self.who()
        counted = schedule.heads_counted(fitting, heads, tiles, blocks)
        return schedule.key_tile_of(build.mask, number, tiles, heads, counted)

    def _item_of(self, p: Any, of: lengths.Sequence, head: Int32, tile: Int32) -> Item:
        """The item of a key tile."""
        build = self.build
        band = lengths.band(build, p, of)
        return Item(of, band, head, tile, *schedule.some_query_tiles(band, tile, build.tile_m, build.tile_n))

    def tell(self, slot: Int32, item: Item | None) -> None:
        """Leave the record of an item, or that none is left; a warp calls this."""
        record = self._record(slot)
        with cute.arch.elect_one():
            for word, value in enumerate((NONE_LEFT,) if item is None else self._words(item)):
                record[word] = Int32(value)
        cute.arch.sync_warp()

    def tile(self, slot: Int32) -> Int32:
        """The key tile of the item there, below 0 where none is left."""
        return self._record(slot)[0]

    def read(self, p: Any, slot: Int32) -> Item:
        """The item there."""
        record = self._record(slot)
        tile, head, first, end, index = (record[word] for word in range(5))
        of = lengths.sequence(self.build, p, index) if not self.build.has("varlen") else self._sequence(record, index)
        return Item(of, lengths.band(self.build, p, of), head, tile, first, end)

    def _words(self, item: Item) -> tuple[Any, ...]:
        of = item.of
        found = item.tile, item.head, item.first, item.end, of.index
        if not self.build.has("varlen"):
            return found
        return *found, of.query_start, of.key_start, of.num_queries, of.num_keys, of.stored_keys, of.first_tile

    def _sequence(self, record: cute.Tensor, index: Int32) -> lengths.Sequence:
        return lengths.Sequence(index, 0, *(record[word] for word in range(5, RECORD_WORDS - 1)))

    def _record(self, slot: Int32) -> cute.Tensor:
        first = moves.shared_pointer(self.build, "items", Int32) + slot * RECORD_WORDS
        return cute.make_tensor(first.align(16), cute.make_layout(RECORD_WORDS))


class HeadItems(KeyItems):
    """The key tiles of one Build whose blocks take all of a head, from the first to the last, and then those of another
    head: all heads have as many, and blocks need no counter to share them."""

    def first_number(self, p: Any) -> Int32:
        """The first key tile of a block's first head."""
        block, _ = self.who()
        return block * self._tiles(p)

    def next_number(self, p: Any, number: Int32) -> Int32:
        """The next key tile of the head, or the first of the block's next head."""
        _, blocks = self.who()
        return schedule.next_of_heads(number, self._tiles(p), blocks)

    def _place_of(self, p: Any, number: Int32, of: lengths.Sequence, heads: Int32) -> tuple[Int32, Int32]:
        tiles = self._tiles(p)
        return number % tiles, number // tiles

    def _tiles(self, p: Any) -> Int32:
        return ceil_div(p.num_keys, self.build.tile_n)


class PairedKeyItems(KeyItems):
    """The key tiles of one Build whose blocks run in clusters of two. Each cluster takes two neighbouring ones at once,
    which are dealt out beforehand: both blocks know them without a word."""

    def is_left(self, p: Any, turn: Int32) -> Any:
        """Whether this cluster has a turn of that number, from 0: asked anew for each, which keeps no register."""
        pairs = ceil_div(p.num_keys, CLUSTER * self.build.tile_n) * (p.num_heads // p.group) * p.batch
        return schedule.number_of(turn, *self.who()) < pairs

    def taken(self, p: Any, turn: Int32, rank: Int32) -> Item:
        """The item of the block with this rank in the cluster's turn, with the query tiles of both."""
        build, heads = self.build, p.num_heads // p.group
        cluster, clusters = self.who()
        number = schedule.number_of(turn, cluster, clusters)
        tiles = ceil_div(p.num_keys, CLUSTER * build.tile_n)
        fitting = schedule.heads_at_once(p.num_queries * p.group, self.bytes_of_query)
        at_once = schedule.heads_dealt(fitting, heads * p.batch, clusters)
        pair, rest = schedule.key_tile_of(build.mask, number, tiles, heads * p.batch, at_once)
        of = lengths.sequence(build, p, rest // heads)
        band = lengths.band(build, p, of)
        visited = schedule.some_query_tiles(band, pair, build.tile_m, CLUSTER * build.tile_n)
        return Item(of, band, rest % heads, CLUSTER * pair + rank, *visited)
