"""Chunk schedule: how a fixed number of blocks shares the keys of sequences whose lengths are in device memory.

The keys of a sequence are cut at multiples of a chunk. A row is one tile of query rows of one key head of a sequence.
p.team_rows rows are a group, and as many blocks a team: the blocks of a team compute the rows of a group from the same
keys at the same time, because the heads of a key are neighbours in memory. The chunks of a group are numbered one after
another, then those of the next group, and so on through all sequences. Each team has a range of these numbers, and the
ranges differ by at most one chunk. So the grid depends on no length, and every block reads the same share of the cache.
A piece is what a block has of one row. A piece that is not the whole row leaves partial results in a slot of the
workspace, which the combine kernel joins in the order of the keys.

With p.fixed_chunks each chunk is a piece of its own: then the bits of a row depend on its own sequence alone.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.integers import choose, larger, log2, smaller
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.decode.layout import CUT_WORDS, SCHEDULE_WORDS
from cutlass_py_attn.launch import chunk_shares, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.chunk_shares import Shares
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS

# What is stored of the start of a team: its first chunk, the first chunk of the row that this belongs to, the row's
# sequence, group and number of chunks, and the chunks of all rows.
BEGIN, ROW_BEGIN, BATCH, GROUP, COUNT, TOTAL = range(6)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence that some of its queries see: `count` of them, at least one, from `first` on.

    start_tile, end_tile: key tiles [start, end) that some query sees.
    """

    first: Int32
    count: Int32
    start_tile: Int32
    end_tile: Int32


@dataclass(frozen=True)
class Place:
    """What a block has: the chunks [begin, end) of its team, of which it is member number `member`.

    groups, row_tiles: those of a sequence, of `ChunkSchedule`
    """

    begin: Int32
    end: Int32
    team: Int32
    member: Int32
    groups: Int32
    row_tiles: Int32


@dataclass(frozen=True)
class Piece:
    """What a block computes at once: some key tiles of one row.

    batch: number of the sequence. row0: first packed query row of the tile.
    slot: place of its partial results. is_whole: whether it has all keys of the row, and no partial results.
    is_first: whether it has the first keys of the row.
    start_tile, end_tile: its key tiles [start, end). count: its chunks. of_sequence: those of a row of its sequence.
    """

    seqlen: SeqlenInfo
    batch: Int32
    head_key: Int32
    row0: Int32
    slot: Int64
    is_whole: Any
    is_first: Any
    start_tile: Int32
    end_tile: Int32
    count: Int32
    of_sequence: Int32
    group: Int32
    first: Int32


class ChunkSchedule:
    """The schedule of the kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        # The element of the schedule's buffer with a block's first sequence; the sums of warps are before it.
        self.found = SCHEDULE_WORDS - 2 if build.warps > SCHEDULE_WORDS // 2 else SCHEDULE_WORDS // 2

    def row_tiles(self, p: Any) -> Int32:
        """Returns the tiles of the query rows of one key head, for the most queries of a sequence."""
        rows = p.num_queries * seqlen_info.group_size(self.build, p)
        return (rows + (self.build.tile_m - 1)) // self.build.tile_m

    def groups(self, p: Any) -> Int32:
        """Returns the groups of rows of a sequence. Shifts: divisions would delay the first loads of a block."""
        heads_key = p.num_heads // seqlen_info.group_size(self.build, p)
        return (heads_key * self.row_tiles(p)) >> log2(p.team_rows)

    def place_of(self, p: Any, block: Int32) -> tuple[Int32, Int32]:
        """Returns the team of a block, and which member of it the block is."""
        return block >> log2(p.team_rows), block & (p.team_rows - 1)

    def chunks(self, p: Any, batch: Int32) -> Chunks:
        """Returns the chunks of a sequence."""
        build = self.build
        seqlen = seqlen_info.create(build, p, batch)
        band = seqlen_info.band(build, p, seqlen)
        tiles = band, Int32(0), p.num_queries, build.tile_n
        start, end = tile_order.key_tile_start(*tiles), tile_order.key_tile_end(*tiles)
        shift = log2(p.chunk_tiles)
        first = start >> shift
        count = larger(((end + (p.chunk_tiles - 1)) >> shift) - first, 1)
        return Chunks(first, count, start, end)

    def shares(self, p: Any, total: Int32) -> Shares:
        """Returns the shares of the teams in a number of chunks."""
        return chunk_shares.shares(total, p.num_teams, p.least_chunks)

    def starts(self, p: Any) -> cute.Tensor:
        """Returns the workspace array of how many chunks the sequences before each have, with p.fixed_chunks."""
        return cute.make_tensor(params.pointer(p.schedule, Int32, 4), cute.make_layout(p.batch + 1))

    def cut(self, p: Any, team: Int32) -> cute.Tensor:
        """Returns what the workspace says of the start of a team, without p.fixed_chunks: elements BEGIN to TOTAL."""
        start = params.pointer(p.schedule, Int32, 4) + team * CUT_WORDS
        return cute.make_tensor(start, cute.make_layout(CUT_WORDS))

    def slot(self, p: Any, begin: Int32, team: Int32, member: Int32, chunk: Int32) -> Int64:
        """Returns the slot of a piece that starts at a chunk, of a member of a team that starts at `begin`."""
        number = choose(p.fixed_chunks != 0, chunk, chunk_shares.slot_of_team(team, chunk == begin))
        return Int64(number) * p.team_rows + member

    @cute.jit
    def piece(self, p: Any, place: Any, chunk: Int32, batch: Int32, start: Int32):
        """Returns the Piece of a block that starts at a chunk of a sequence.

        start: chunks of a row of each sequence before this one
        """
        chunks = self.chunks(p, batch)
        inside = chunk - start * place.groups
        group = inside // chunks.count
        first = inside - group * chunks.count
        row = group * p.team_rows + place.member
        count = smaller(place.end - chunk, chunks.count - first)
        if p.fixed_chunks != 0:
            count = Int32(1)
        seqlen = seqlen_info.create(self.build, p, batch)
        head_key, row0 = row // place.row_tiles, row % place.row_tiles * self.build.tile_m
        slot = self.slot(p, place.begin, place.team, place.member, chunk)
        is_whole, is_first = count == chunks.count, first == 0
        tile = (chunks.first + first) * p.chunk_tiles
        start_tile = larger(tile, chunks.start_tile)
        end_tile = smaller(tile + count * p.chunk_tiles, chunks.end_tile)
        keys = start_tile, end_tile
        return Piece(seqlen, batch, head_key, row0, slot, is_whole, is_first, *keys, count, chunks.count, group, first)

    @cute.jit
    def find_share(self, p: Any, block: Int32, team: Int32, thread: Int32):
        """Returns the first chunk of a team and the one past its last; the first's sequence, and the chunks before
        that sequence, and the chunks of all. With fixed chunks, block 0 stores the chunks before every sequence."""
        build = self.build
        layout = cute.make_layout(SCHEDULE_WORDS)
        s_found = cute.make_tensor(tile_copy.smem_pointer(build, "schedule", Int32), layout)
        starts = self.starts(p)
        stores = (block == 0) & (p.fixed_chunks != 0)
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        each = (p.batch + (build.threads - 1)) // build.threads  # consecutive sequences of a thread
        own = Int32(0)
        for i in cutlass.range(each, unroll=1):
            batch = thread * each + i
            if batch < p.batch:
                own = own + self.chunks(p, batch).count
        total = inclusive_sum(own, lane)
        if lane == WARP_THREADS - 1:
            s_found[warp] = total
        cute.arch.sync_threads()
        before, everything = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(build.warps):
            before = before + cutlass.select_(warp > i, s_found[i], Int32(0))
            everything = everything + s_found[i]
        groups = self.groups(p)
        shares = self.shares(p, everything * groups)
        begin, end = shares.begin(team), shares.begin(team + 1)
        start = before + total - own
        for i in cutlass.range(each, unroll=1):
            batch = thread * each + i
            if batch < p.batch:
                following = start + self.chunks(p, batch).count
                if stores:
                    starts[batch] = start
                if (start * groups <= begin) & (begin < following * groups):
                    s_found[self.found] = batch
                    s_found[self.found + 1] = start
                start = following
        if stores & (thread == 0):
            starts[p.batch] = everything
        cute.arch.sync_threads()
        return begin, end, s_found[self.found], s_found[self.found + 1], everything * groups

    @cute.jit
    def store_cut(self, p: Any, place: Any, total: Int32, piece: Any):
        """Stores for the combine kernel which row the start of a team cuts. piece: its first one."""
        cut = self.cut(p, place.team)
        cut[BEGIN], cut[ROW_BEGIN], cut[TOTAL] = place.begin, place.begin - piece.first, total
        cut[BATCH], cut[GROUP], cut[COUNT] = piece.batch, piece.group, piece.of_sequence

    @cute.jit
    def store_no_cut(self, p: Any, team: Int32, begin: Int32):
        """Stores for the combine kernel that a team has no chunks."""
        cut = self.cut(p, team)
        cut[BEGIN], cut[ROW_BEGIN] = begin, begin


@cute.jit
def inclusive_sum(value: Int32, lane: Int32):
    """Returns the sum of a value over this lane and those before it."""
    total = value
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, offset=1 << step, mask_and_clamp=0)
        total = total + cutlass.select_(lane >= (1 << step), other, Int32(0))
    return total
