"""Backward grid: the key tiles of a block of the mma.sync backward, and the query tiles that each key tile visits.

The grid is (splits, key heads, batch). Special registers are read again at each use: what is derived from them is
recomputed, not kept in registers across the main loop.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build


@dataclass(frozen=True)
class QueryTileRange:
    """Query tiles [start, end)."""

    start: Any
    end: Any


@dataclass(frozen=True)
class KeyTileWork:
    """One key tile and the query tiles that it visits.

    seqlen: the sequence
    key_tile: index of the key tile in the sequence
    query_tiles: query tiles with a visible (query, key) pair
    iterations: iterations of the main loop: the query tiles of every query head that reads the key head
    """

    seqlen: seqlen_info.SeqlenInfo
    key_tile: Any
    query_tiles: QueryTileRange
    iterations: Any


@dataclass(frozen=True)
class QueryTile:
    """The query tile of one iteration: sequence, query head, index in the sequence."""

    seqlen: seqlen_info.SeqlenInfo
    head: Any
    index: Any


class BackwardGrid:
    """The grid of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        # With GQA a block has few, long key tiles: the longest key tiles of all heads start first, not those of one
        # head after the other.
        self.longest_first = build.has("grouped") and build.form.grows

    def split(self) -> Int32:
        """Returns the index of this block among the blocks of its batch and key head."""
        if not self.longest_first:
            return params.read_register("ctaid.x")
        return self._start_index() // params.read_register("nctaid.y")

    def key_head(self, p: Any) -> Int32:
        """Returns the key head of this block."""
        if not self.longest_first:
            return params.read_register("ctaid.y") + p.first_head
        heads = params.read_register("nctaid.y")
        return self._start_index() % heads + p.first_head

    def work(self, p: Any, seqlen: seqlen_info.SeqlenInfo, key_tile: Int32) -> KeyTileWork:
        """Returns what a key tile of a sequence visits."""
        tiles = seqlen_info.band(self.build, p, seqlen), key_tile, self.build.tile_m, self.build.tile_n
        start = tile_order.query_tile_start(*tiles)
        query_tiles = QueryTileRange(start, larger(tile_order.query_tile_end(*tiles), start))
        return KeyTileWork(seqlen, key_tile, query_tiles, self.iterations(p, query_tiles))

    def iterations(self, p: Any, tiles: QueryTileRange) -> Int32:
        """Returns the iterations over a range of query tiles, for every query head that reads the key head."""
        count = tiles.end - tiles.start
        return count * p.group if self.build.has("grouped") else count

    def query_tile(self, p: Any, seqlen: seqlen_info.SeqlenInfo, tiles: QueryTileRange, iteration: Int32) -> QueryTile:
        """Returns the query tile of one iteration; recomputed in each iteration rather than kept in registers."""
        head, batch = self.key_head(p), params.read_register("ctaid.z") + p.first_batch
        if not self.build.has("varlen"):
            seqlen = seqlen_info.create(self.build, p, batch)
        if not self.build.has("grouped"):
            return QueryTile(seqlen, head, tiles.start + iteration)
        count = larger(tiles.end - tiles.start, 1)
        return QueryTile(seqlen, head * p.group + iteration // count, tiles.start + iteration % count)

    def _start_index(self) -> Int32:
        """Returns the index of this block in the order of starting."""
        return params.read_register("ctaid.y") * params.read_register("nctaid.x") + params.read_register("ctaid.x")
