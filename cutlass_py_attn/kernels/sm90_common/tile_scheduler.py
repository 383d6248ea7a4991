"""Persistent tile scheduler: the query tiles that a block of the sm90 forward computes, one after the other."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.integers import ceil_div, larger, smaller
from cutlass_py_attn.kernels.common import seqlen_info
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_ROWS
from cutlass_py_attn.launch.variants import CLUSTER
from cutlass_py_attn.problem.masks import Band
from cutlass_py_attn.problem.tensors import E4M3_BYTES
from cutlass_py_attn.score_terms import registry

# Far more tiles than fit in memory, for every 32nd sequence. Sequences with wrong bounds may overlap, and many long
# ones have more tiles than 32 bits count.
MAX_TILES_OF_LANE = 2**30 // WARP_THREADS


class Cursor(NamedTuple):
    """The sequence that a search for a tile number starts at, and how many tiles the sequences before it have."""

    sequence: Int32
    tiles_before: Int32


@dataclass(frozen=True)
class WorkTile:
    """One query tile of one head. In the backward one key tile of one head, with query tiles in place of key tiles.

    seqlen, band: its sequence and mask.
    head: query head; in the backward the head of key and value.
    tile: number of the tile in its sequence.
    first, end: its key tiles [first, end), at least one.
    part: number of the part, if blocks share the key tiles of a query tile; -1 for all key tiles. In the backward the
        number of the shared key tile; -1 for all query tiles.
    is_empty: whether the part has no key tile. It then computes the first one, and its result has no weight.
    partial_end, key_tile: with tile lists (launch/tile_lists.py), of which first and end are places: the place of the
        first whole tile, and the key tile as which tiles are masked.
    """

    seqlen: seqlen_info.SeqlenInfo
    band: Band
    head: Any
    tile: Any
    first: Any
    end: Any
    part: Any = -1
    is_empty: Any = False
    partial_end: Any = 0
    key_tile: Any = 0


class TileScheduler:
    """Persistent tile scheduler over the query tiles of all heads and sequences.

    A worker is a block, or a cluster. Every wave assigns one tile to each worker; `tile_order` says which. With
    variable lengths tiles are numbered sequence by sequence. A worker's numbers grow, so that the search for the
    sequence of a number continues from the `Cursor` of the number before.
    """

    def __init__(self, build: Build) -> None:
        self.build = build
        self.rows = build.tile_m * build.cluster  # query rows that a worker computes in a wave
        item_bytes = E4M3_BYTES if build.has(registry.KV8) else build.item_bytes
        self.bytes_of_key = item_bytes * (build.head_dim + build.head_dim_value)

    def initial_cursor(self, p: Any) -> Any:
        """Returns the cursor of this worker's first tile."""
        return Cursor(Int32(0), Int32(0))

    def next_cursor(self, p: Any, wave: Int32, cursor: Any) -> Any:
        """Returns the cursor of the tile after that of `wave`; cursor: what `work_tile` returned."""
        return cursor

    def num_waves(self, p: Any) -> Int32:
        """Returns the number of waves that have a tile for this worker. All threads of a warp call this."""
        return tile_order.num_rounds(self.total(p), *self.worker())

    def worker(self) -> tuple[Int32, Int32]:
        """Returns (worker index, worker count)."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        together = self.build.cluster
        return (block, blocks) if together == 1 else (block // together, blocks // together)

    @cute.jit
    def total(self, p: Any):
        """Returns the number of all tiles. All threads of a warp call this."""
        found = self.tiles_of_sequence(p, Int32(0))
        if cutlass.const_expr(self.build.has("varlen")):
            found = Int32(0)
            for step in cutlass.range(ceil_div(p.batch, WARP_THREADS), unroll=1):
                index = step * WARP_THREADS + cute.arch.lane_idx()
                if index < p.batch:
                    found = smaller(found + self.tiles_of_sequence(p, index), MAX_TILES_OF_LANE)
            found = Int32(cute.arch.warp_redux_sync(found, "add"))
        else:
            found = found * p.batch
        return found

    def tiles_of_sequence(self, p: Any, index: Int32) -> Int32:
        """Returns the number of query tiles of all heads of sequence `index`."""
        queries = p.num_queries
        if self.build.has("varlen"):
            _, queries = seqlen_info.query_rows(p, index)
        return ceil_div(queries, self.rows) * p.num_heads

    def work_tile(self, p: Any, wave: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns this worker's tile in `wave`, and the cursor for the next call."""
        number = self._number(p, wave)
        if not self.build.has("varlen"):
            return self._dense_tile(p, number), cursor
        return self._ragged_tile(p, number, cursor)

    def _ragged_tile(self, p: Any, number: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns tile `number` with variable lengths, and the cursor for the next call; cursor: where to search."""
        cursor = self.find(p, number, *cursor)
        seqlen = seqlen_info.create(self.build, p, cursor.sequence)
        tiles = ceil_div(seqlen.num_queries, self.rows)
        tile, head = self._in_mask_order(number - cursor.tiles_before, tiles, p.num_heads, p.num_heads)
        if not self.build.form.sees_all:
            # Every second sequence ends with its longest tiles, which balances the blocks if lengths differ.
            tile = cutlass.select_(cursor.sequence % 2 == 0, tile, tiles - 1 - tile)
        return self._create_tile(p, seqlen, head, tile), cursor

    def _number(self, p: Any, wave: Int32) -> Int32:
        """Returns the number of this worker's tile in `wave`."""
        return tile_order.work_tile_of_round(wave, *self.worker())

    @cute.jit
    def find(self, p: Any, number: Int32, index: Int32, before: Int32):
        """Returns the cursor of tile `number`, searching from the cursor (index, before)."""
        count = self.tiles_of_sequence(p, index)
        while number >= before + count:
            before = before + count
            index = index + 1
            count = self.tiles_of_sequence(p, index)
        return Cursor(index, before)

    def skipped_key_tiles(self, tile: WorkTile) -> Int32 | int:
        """Returns how many of the last key tiles of `tile` are loaded but not read by this block."""
        return 0

    def skipped_in_wave(self, p: Any, wave: Int32, waves: Int32, cursor: Cursor) -> Int32 | int:
        """Returns `skipped_key_tiles` of this worker's tile in `wave`; 0 if it has none."""
        return 0

    def _dense_tile(self, p: Any, number: Int32) -> WorkTile:
        tile, index = self._in_order(p, number, ceil_div(p.num_queries, self.rows), p.num_heads * p.batch)
        seqlen = seqlen_info.create(self.build, p, index // p.num_heads)
        return self._create_tile(p, seqlen, index % p.num_heads, tile)

    def _in_order(self, p: Any, number: Int32, tiles: Int32, heads: Int32) -> tuple[Int32, Int32]:
        """Returns (query tile, head) of tile `number`, where all sequences have `tiles` tiles a head."""
        if self.build.tile_m == WARPGROUP_ROWS and not self.build.form.sees_all:
            # For few tiles, most often one a block: finding the group of heads takes longer than the order saves.
            return tiles - 1 - number // heads, number % heads
        _, workers = self.worker()
        fitting = tile_order.heads_of_mixed_lengths(tile_order.heads_in_l2(p.num_keys, self.bytes_of_key), workers)
        return self._in_mask_order(number, tiles, heads, tile_order.static_group_heads(fitting, heads, workers))

    def _in_mask_order(self, number: Int32, tiles: Int32, heads: Int32, at_once: Int32) -> tuple[Int32, Int32]:
        """Returns (query tile, head) of tile `number`; with a mask the longest tiles of `at_once` heads come first."""
        if self.build.form.sees_all:
            return number % tiles, number // tiles
        return tile_order.longest_first_in_groups(number, tiles, heads, at_once)

    def _create_tile(self, p: Any, seqlen: seqlen_info.SeqlenInfo, head: Int32, tile: Int32) -> WorkTile:
        build = self.build
        band = seqlen_info.band(build, p, seqlen)
        shape = band, tile, self.rows, build.tile_n
        first = tile_order.key_tile_start(*shape)
        return WorkTile(seqlen, band, head, tile, first, larger(tile_order.key_tile_end(*shape), first + 1))


class LastRoundsScheduler(TileScheduler):
    """Tile scheduler whose last rounds have a block for each tile: the GPU starts one when another block has ended.

    Under a causal mask tiles take unequally long. The blocks of the last rounds fill the time that the persistent
    blocks, those with y = 0 in the grid, leave. All sequences have one length.
    """

    def num_waves(self, p: Any) -> Int32:
        """Returns the number of tiles of this block."""
        return Int32(tile_order.num_work_tiles_at(self.total(p), self._place()))

    def _number(self, p: Any, wave: Int32) -> Int32:
        return tile_order.work_tile_at(self.total(p), wave, self._place())

    def _place(self) -> tile_order.BlockPlace:
        block, row, _ = cute.arch.block_idx()
        blocks, rows, _ = cute.arch.grid_dim()
        return tile_order.BlockPlace(block, blocks, row, rows)


class SharedEndScheduler(TileScheduler):
    """Tile scheduler whose last query tiles, which are fewer than the blocks, are shared by all blocks.

    Each of p.num_splits_key blocks computes some of a tile's keys. All sequences have one length, and no mask makes
    tiles unequal.
    """

    def num_waves(self, p: Any) -> Int32:
        """Returns the number of tiles, or parts of one, of this block."""
        rounds, rest = self._rounds(p)
        return rounds + cutlass.select_(self.worker()[0] < rest * p.num_splits_key, Int32(1), Int32(0))

    def work_tile(self, p: Any, wave: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns this block's tile or part in `wave`, and the cursor."""
        tile, cursor = super().work_tile(p, wave, cursor)
        block, (rounds, rest) = self.worker()[0], self._rounds(p)
        is_part = (wave >= rounds) & (p.num_splits_key > 1)
        split = block // larger(rest, 1)
        first, end = tile_order.tiles_of_split(tile.first, tile.end, split, p.num_splits_key)
        return replace(
            tile,
            first=cutlass.select_(is_part, first, tile.first),
            end=cutlass.select_(is_part, end, tile.end),
            part=cutlass.select_(is_part, block % larger(rest, 1) * p.num_splits_key + split, Int32(-1)),
        ), cursor

    def shared_tile(self, p: Any, number: Int32, shared: Int32) -> WorkTile:
        """Returns one of the `shared` tiles at the end, with all of its key tiles."""
        return self._dense_tile(p, self.total(p) - shared + number)

    def _rounds(self, p: Any) -> tuple[Int32, Int32]:
        """Returns the rounds in which each block has a tile, and the tiles after them."""
        total, blocks = self.total(p), self.worker()[1]
        return total // blocks, total % blocks

    def _number(self, p: Any, wave: Int32) -> Int32:
        block, blocks = self.worker()
        rounds, rest = self._rounds(p)
        return wave * blocks + cutlass.select_(wave < rounds, block, block % larger(rest, 1))


class SplitKeysScheduler(TileScheduler):
    """Tile scheduler whose query tiles are all shared by p.num_splits_key blocks each, or by none.

    A mask or variable lengths may make the tiles unequal, so that some have fewer key tiles than parts.
    """

    def num_waves(self, p: Any) -> Int32:
        """Returns the number of parts of this block; all threads of a warp call this."""
        block, blocks = self.worker()
        return ceil_div(larger(self.total(p) * p.num_splits_key - block, 0), blocks)

    def work_tile(self, p: Any, wave: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns this block's part in `wave`, and the cursor for the next call."""
        block, blocks = self.worker()
        part = wave * blocks + block
        number, split = part // p.num_splits_key, part % p.num_splits_key
        tile, cursor = self.numbered_tile(p, number, cursor)
        first, end = tile_order.tiles_of_split(tile.first, tile.end, split, p.num_splits_key)
        is_empty = first >= end
        first = cutlass.select_(is_empty, tile.first, first)
        part = cutlass.select_(p.num_splits_key > 1, part, Int32(-1))
        return replace(tile, first=first, end=larger(end, first + 1), part=part, is_empty=is_empty), cursor

    def is_last_part(self, p: Any, work: WorkTile) -> Any:
        """Returns whether a part is the last of its tile, which has key tiles even if there are fewer than parts."""
        return (work.part < 0) | ((work.part + 1) % p.num_splits_key == 0)

    def _in_order(self, p: Any, number: Int32, tiles: Int32, heads: Int32) -> tuple[Int32, Int32]:
        """Returns (query tile, head) of tile `number`, which the kernel that joins parts numbers alike."""
        return self._in_mask_order(number, tiles, heads, heads)

    def shared_tile(self, p: Any, number: Int32, shared: Int32) -> WorkTile:
        """Returns tile `number` of the `shared` ones, which are all, with all of its key tiles."""
        return self.numbered_tile(p, number, self.initial_cursor(p))[0]

    def numbered_tile(self, p: Any, number: Int32, cursor: Cursor) -> tuple[WorkTile, Cursor]:
        """Returns tile `number` with all of its key tiles, and the cursor for the next call."""
        if self.build.has("varlen"):
            return self._ragged_tile(p, number, cursor)
        return self._dense_tile(p, number), cursor


class ClusterTileScheduler(TileScheduler):
    """Persistent tile scheduler whose workers are clusters of two blocks that load key and value tiles for both.

    Each wave assigns two neighbouring query tiles to a cluster, one for each block, with the key tiles of both.
    """

    def skipped_key_tiles(self, tile: WorkTile) -> Int32 | int:
        """Returns 1 if only the other block's query tile reads the last key tile, else 0.

        A block never skips more: it releases the key tile before the value tile, and the pipelines have few stages. A
        query tile past the last is computed like any other.
        """
        own_end = tile_order.key_tile_end(tile.band, tile.tile, self.build.tile_m, self.build.tile_n)
        return smaller(tile.end - larger(own_end, tile.first + 1), 1)

    def skipped_in_wave(self, p: Any, wave: Int32, waves: Int32, cursor: Cursor) -> Int32 | int:
        """Returns `skipped_key_tiles` of this cluster's tile in `wave`; 0 if it has none."""
        tile, _ = self.work_tile(p, wave, cursor)
        return cutlass.select_(wave < waves, self.skipped_key_tiles(tile), Int32(0))

    def _in_order(self, p: Any, number: Int32, tiles: Int32, heads: Int32) -> tuple[Int32, Int32]:
        """Returns (pair of query tiles, head) of pair `number`."""
        _, clusters = self.worker()
        return tile_order.long_short_pairs(number, tiles, heads, clusters)

    def _create_tile(self, p: Any, seqlen: seqlen_info.SeqlenInfo, head: Int32, tile: Int32) -> WorkTile:
        """Returns this block's tile of pair `tile`, with the key tiles of both blocks."""
        pair = super()._create_tile(p, seqlen, head, tile)
        return replace(pair, tile=CLUSTER * tile + cute.arch.block_idx_in_cluster())
