"""Key tile schedulers of the sm90 backward: which key tile a block computes next.

The producer warp takes a number from a counter in global memory, finds its key tile, and writes a record of it to
shared memory. The other warps read the record after they have waited for the key tile. There are two records for each
stage of the key: the next record is written while dK and dV of the work tile before are still being stored. The last
record says that no work tile is left.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.integers import ceil_div, larger
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.sm90_backward.layout import WORK_TILE_WORDS
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import Cursor, TileScheduler, WorkTile
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import CLUSTER
from cutlass_py_attn.problem.tensors import F32_BYTES

NONE_LEFT = -1  # in place of a key tile
NO_PART = -1  # in place of the number of a shared tile
PART_WORD = 5  # of a record


class KeyTileScheduler(TileScheduler):
    """Dynamic scheduler over key tiles: each block takes the next one when it is done."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        columns = build.columns + build.columns_value
        self.bytes_of_query = build.item_bytes * columns + F32_BYTES * build.columns

    def num_heads(self, p: Any) -> Any:
        """Returns the number of heads whose key tiles are work tiles."""
        return p.num_heads // p.group

    def queries_of_head(self, p: Any, num_queries: Int32) -> Any:
        """Returns the query rows that the key tiles of one head read, of sequences with so many queries."""
        return num_queries * p.group

    def tiles_of_sequence(self, p: Any, index: Int32) -> Int32:
        """Returns the number of key tiles of all heads of sequence `index`."""
        keys = p.num_keys
        if self.build.has("varlen"):
            _, keys = seqlen_info.key_rows(p, index)
        return ceil_div(keys, self.build.tile_n) * self.num_heads(p)

    def first_number(self, p: Any) -> Int32:
        """Returns the number of a block's first work tile.

        With a semaphore even the first number comes from the counter. Each block then waits only for work tiles that
        running blocks took before, in whichever order the GPU starts the blocks.
        """
        block, _ = self.worker()
        return self._increment(p) if self.build.deterministic else block

    def next_number(self, p: Any, number: Int32) -> Int32:
        """Returns the number of a block's work tile after `number`."""
        _, blocks = self.worker()
        return self._increment(p) if self.build.deterministic else blocks + self._increment(p)

    @cute.jit
    def _increment(self, p: Any):
        """Increments the counter; returns its value before, in all threads of a warp."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = params.pointer(p.tile_count_semaphore, Int32, 4)
            number = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(number, 0)

    def numbered_tile(self, p: Any, number: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns the work tile of that number, and the cursor for the next call."""
        build, heads = self.build, self.num_heads(p)
        if not build.has("varlen"):
            first = seqlen_info.create(build, p, Int32(0))
            tile, rest = self._tile_and_head(p, number, first, heads * p.batch)
            return self._key_tile(p, seqlen_info.create(build, p, rest // heads), rest % heads, tile), cursor
        cursor = self.find(p, number, *cursor)
        index, tiles_before = cursor
        of = seqlen_info.create(build, p, index)
        tile, head = self._tile_and_head(p, number - tiles_before, of, heads)
        return self._key_tile(p, of, head, tile), cursor

    def _tile_and_head(self, p: Any, number: Int32, of: seqlen_info.SeqlenInfo, heads: Int32) -> tuple[Int32, Int32]:
        """Returns (key tile, head) of a number among those of `heads` heads with the lengths of `of`."""
        build, tiles = self.build, ceil_div(of.stored_keys, self.build.tile_n)
        fitting = tile_order.heads_in_l2(self.queries_of_head(p, of.num_queries), self.bytes_of_query)
        if build.deterministic:
            return tile_order.deterministic_key_tile_at(number, tiles, heads, fitting)
        _, blocks = self.worker()
        counted = tile_order.dynamic_group_heads(fitting, heads, tiles, blocks)
        return tile_order.key_tile_at(build.form, number, tiles, heads, counted)

    def _key_tile(self, p: Any, of: seqlen_info.SeqlenInfo, head: Int32, tile: Int32) -> WorkTile:
        """Returns the work tile of a key tile."""
        build = self.build
        band = seqlen_info.band(build, p, of)
        return WorkTile(of, band, head, tile, *tile_order.nonempty_query_tiles(band, tile, build.tile_m, build.tile_n))

    def write_record(self, record: Int32, work_tile: WorkTile | None) -> None:
        """Writes the record of a work tile, or that none is left. All threads of a warp call this."""
        words = self._record(record)
        with cute.arch.elect_one():
            for word, value in enumerate((NONE_LEFT,) if work_tile is None else self._words(work_tile)):
                words[word] = Int32(value)
        cute.arch.sync_warp()

    def read_key_tile(self, record: Int32) -> Int32:
        """Returns the key tile of a record; below 0 if no work tile is left."""
        return self._record(record)[0]

    def read_record(self, p: Any, record: Int32) -> WorkTile:
        """Returns the work tile of a record."""
        words = self._record(record)
        tile, head, first, end, index = (words[word] for word in range(5))
        of = (
            seqlen_info.create(self.build, p, index)
            if not self.build.has("varlen")
            else self._read_sequence(words, index)
        )
        return WorkTile(of, seqlen_info.band(self.build, p, of), head, tile, first, end)

    def _words(self, work_tile: WorkTile) -> tuple[Any, ...]:
        of = work_tile.seqlen
        always = work_tile.tile, work_tile.head, work_tile.first, work_tile.end, of.index
        if not self.build.has("varlen"):
            return always
        return *always, of.query_start, of.key_start, of.num_queries, of.num_keys, of.stored_keys, of.first_tile

    def _read_sequence(self, words: cute.Tensor, index: Int32) -> seqlen_info.SeqlenInfo:
        return seqlen_info.SeqlenInfo(index, 0, *(words[word] for word in range(5, WORK_TILE_WORDS - 1)))

    def _record(self, record: Int32) -> cute.Tensor:
        first = tile_copy.smem_pointer(self.build, "work_tiles", Int32) + record * WORK_TILE_WORDS
        return cute.make_tensor(first.align(16), cute.make_layout(WORK_TILE_WORDS))


class SharedEndKeyTileScheduler(KeyTileScheduler):
    """Dynamic scheduler whose last p.shared_key_tiles key tiles are shared by p.num_splits_query blocks each.

    Each of these blocks computes some of a tile's queries. All sequences have one length, and no mask makes tiles
    unequal. The numbers behind those of whole tiles count parts: first the first part of every shared tile.
    """

    def total(self, p: Any) -> Int32:
        """Returns the number of whole tiles and parts."""
        return super().total(p) + p.shared_key_tiles * (p.num_splits_query - 1)

    def numbered_tile(self, p: Any, number: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns the whole tile or part of that number, and the cursor for the next call."""
        whole, shared = super().total(p) - p.shared_key_tiles, larger(p.shared_key_tiles, 1)
        part = number - whole
        is_part = part >= 0
        tile, cursor = super().numbered_tile(p, cutlass.select_(is_part, whole + part % shared, number), cursor)
        first, end = tile_order.tiles_of_split(tile.first, tile.end, part // shared, p.num_splits_query)
        return replace(
            tile,
            first=cutlass.select_(is_part, first, tile.first),
            end=cutlass.select_(is_part, end, tile.end),
            part=cutlass.select_(is_part, part % shared, Int32(NO_PART)),
        ), cursor

    def read_record(self, p: Any, record: Int32) -> WorkTile:
        """Returns the work tile or part of a record."""
        return replace(super().read_record(p, record), part=self._record(record)[PART_WORD])

    def _words(self, work_tile: WorkTile) -> tuple[Any, ...]:
        return *super()._words(work_tile), work_tile.part


class QueryHeadScheduler(KeyTileScheduler):
    """Dynamic scheduler over the key tiles of every query head."""

    def num_heads(self, p: Any) -> Any:
        """Returns the number of query heads."""
        return p.num_heads

    def queries_of_head(self, p: Any, num_queries: Int32) -> Any:
        """Returns the query rows of one query head."""
        return num_queries


class PerHeadScheduler(KeyTileScheduler):
    """Static scheduler for one block per head: all key tiles of a head, first to last, then those of another head.

    All heads have as many key tiles, so blocks need no counter.
    """

    def first_number(self, p: Any) -> Int32:
        """Returns the number of the first key tile of a block's first head."""
        block, _ = self.worker()
        return block * self._tiles(p)

    def next_number(self, p: Any, number: Int32) -> Int32:
        """Returns the number of the next key tile of the head, or of the first one of the block's next head."""
        _, blocks = self.worker()
        return tile_order.next_per_head_tile(number, self._tiles(p), blocks)

    def _tile_and_head(self, p: Any, number: Int32, of: seqlen_info.SeqlenInfo, heads: Int32) -> tuple[Int32, Int32]:
        tiles = self._tiles(p)
        return number % tiles, number // tiles

    def _tiles(self, p: Any) -> Int32:
        return ceil_div(p.num_keys, self.build.tile_n)


class ClusterKeyTileScheduler(KeyTileScheduler):
    """Static scheduler for clusters of two blocks: each cluster takes two neighbouring key tiles at once.

    Both blocks of a cluster compute the same assignment, so no communication is needed.
    """

    def has_work(self, p: Any, wave: Int32) -> Any:
        """Returns whether this cluster has a pair of key tiles in `wave`; recomputed for each, to save registers."""
        pairs = ceil_div(p.num_keys, CLUSTER * self.build.tile_n) * (p.num_heads // p.group) * p.batch
        return tile_order.work_tile_of_round(wave, *self.worker()) < pairs

    def block_tile(self, p: Any, wave: Int32, rank: Int32) -> WorkTile:
        """Returns the work tile of the block with this rank, with the query tiles that either block visits."""
        build, heads = self.build, p.num_heads // p.group
        cluster, clusters = self.worker()
        number = tile_order.work_tile_of_round(wave, cluster, clusters)
        tiles = ceil_div(p.num_keys, CLUSTER * build.tile_n)
        fitting = tile_order.heads_in_l2(p.num_queries * p.group, self.bytes_of_query)
        at_once = tile_order.static_group_heads(fitting, heads * p.batch, clusters)
        pair, rest = tile_order.key_tile_at(build.form, number, tiles, heads * p.batch, at_once)
        of = seqlen_info.create(build, p, rest // heads)
        band = seqlen_info.band(build, p, of)
        visited = tile_order.nonempty_query_tiles(band, pair, build.tile_m, CLUSTER * build.tile_n)
        return WorkTile(of, band, rest % heads, CLUSTER * pair + rank, *visited)
