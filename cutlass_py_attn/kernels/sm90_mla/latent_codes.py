"""Latent codes: e4m3 rows of a latent cache, which one warpgroup converts on their way to the slots of the ring.

Each of its warps has 16 rows of every latent tile: no page has fewer. Codes go from global memory to registers, where
half of a tile is always on its way, and from there to shared memory as 16-bit numbers, code times scale, as TMA would
have swizzled them. The columns of the rotary embedding have 16 bits in the cache, and TMA copies them.

A warp converts two rows of one half of the columns at a time. The eight lanes that store together have four vectors of
either row, which the swizzle keeps in different banks:

    lane % 4        16 of the 64 codes of a strip
    lane // 4 % 2   row
    lane // 8       strip of the half
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Float16, Float32, Int32, Int64, Uint32

from cutlass_py_attn.integers import choose
from cutlass_py_attn.kernels.common import e4m3, paging, params, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.tma import EVICT_FIRST
from cutlass_py_attn.kernels.sm90_common.paged_loads import NO_PAGE, box_coordinates
from cutlass_py_attn.kernels.sm90_mla.latent_ring import ROW_BYTES, VECTOR_BYTES, LatentRing
from cutlass_py_attn.kernels.sm90_mla.layout import (
    P_STRIP,
    ROPE_CHUNK,
    SLOTS,
    STRIP_COLUMNS,
    VALUE_CHUNKS,
    VALUE_STRIPS,
    WARP_ROWS,
    WARPGROUPS,
)
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS

LANE_CODES = 16  # of one load
WORD_CODES = 4
HALF_STRIPS = VALUE_STRIPS // WARPGROUPS
HALF_COLUMNS = HALF_STRIPS * STRIP_COLUMNS
HALF_SCALES = HALF_COLUMNS // SCALE_COLUMNS
STEP_ROWS = 2  # that a warp loads at a time
HALF_STEPS = WARP_ROWS // STEP_ROWS
CODES_AHEAD = HALF_STEPS  # loads of a lane that are on their way: half of a tile
WORDS = LANE_CODES // WORD_CODES


@dataclass(frozen=True)
class LatentRows:
    """The rows that a warp has of a latent tile.

    row: the first one in its sequence
    page: their page; NO_PAGE behind the last key, and without pages
    count: how many there are, up to the end of the tile or of the sequence; 0 or less for none
    """

    row: Any
    page: Any
    count: Any


class LatentCodes:
    """The codes of one Build. The warps of the producer warpgroup call every method, all threads of a warp."""

    def __init__(self, build: Build, ring: LatentRing) -> None:
        self.build, self.ring = build, ring
        self.dtype = DTYPES[build.dtype]
        self.is_paged = build.has("paged")

    @cute.jit
    def load(self, p: Any, rope: Any, piece: Any, first: Int32, tiles: Int32, uses0: Int32, uses1: Int32):
        """Loads the latent tiles of a piece; uses0, uses1: tiles that each slot has had before."""
        tile_n, num_keys = self.build.tile_n, piece.seqlen.num_keys
        row = first * tile_n + cute.arch.warp_idx() * WARP_ROWS
        words = cute.make_rmem_tensor(CODES_AHEAD * WORDS, Uint32)
        page, next_page = self.page(p, piece, row), self.page(p, piece, row + tile_n)
        rows = LatentRows(row, page, num_keys - row)
        start = self.codes_start(p, piece, rows)
        for step in cutlass.range_constexpr(CODES_AHEAD):
            self.load_step(p, start, rows.count, step, words)
        scale0, scale1 = self.load_scales(p, piece, rows)
        for number in cutlass.range(tiles, unroll=1):
            slot = number % SLOTS
            use = choose(slot == 0, uses0, uses1) + number // SLOTS
            far_page = self.page(p, piece, row + 2 * tile_n)
            self.ring.wait_empty(slot, 0, use)
            if slot == 1:
                self.load_rope(p, rope, piece, slot, row, page)
            for i in cutlass.range_constexpr(HALF_STEPS):
                self.store_step(slot, i, words, self.scale_of(i, scale0, scale1))
                self.load_step(p, start, num_keys - row, i + HALF_STEPS, words)
            self.mark_full(slot, 0)
            next_row = row + tile_n
            next_rows = LatentRows(next_row, next_page, choose(number + 1 < tiles, num_keys - next_row, 0))
            start = self.codes_start(p, piece, next_rows)
            next0, next1 = self.load_scales(p, piece, next_rows)
            self.ring.wait_empty(slot, 1, use)
            if slot == 0:
                self.load_rope(p, rope, piece, slot, row, page)
            for i in cutlass.range_constexpr(HALF_STEPS):
                self.store_step(slot, HALF_STEPS + i, words, self.scale_of(HALF_STEPS + i, scale0, scale1))
                self.load_step(p, start, next_rows.count, i, words)
            self.mark_full(slot, 1)
            row, page, next_page, scale0, scale1 = next_row, next_page, far_page, next0, next1

    def mark_full(self, slot: Int32, half: int) -> None:
        """Marks this warp's rows of the chunks of a half full, after its stores."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for chunk in VALUE_CHUNKS[half]:
            self.ring.mark_full(slot, chunk)

    @cute.jit
    def page(self, p: Any, piece: Any, row: Int32):
        """Returns the page of the rows from `row` of a sequence on. The table is not read behind the last key."""
        found = Int32(NO_PAGE)
        if cutlass.const_expr(self.is_paged):  # noqa: SIM102
            if row < piece.seqlen.num_keys:
                found = paging.entry(p, paging.page_row(p, piece.batch), row >> paging.page_shift(p))
        return found

    def row_offset(self, p: Any, name: str, piece: Any, rows: LatentRows) -> Int64:
        """Returns where the first row starts in `name`, key or key_scale (elements)."""
        if self.is_paged:
            return paging.offset(p, name, rows.page, rows.row & (p.page_size - 1), piece.head_key)
        indices = {"batch": piece.seqlen.batch, "row": rows.row, "head": piece.head_key}
        offsets = (Int64(index) * params.stride(p, name, axis) for axis, index in indices.items())
        return sum(offsets, start=Int64(0))

    def codes_start(self, p: Any, piece: Any, rows: LatentRows) -> Int64:
        """Returns the address of this lane's codes of the first rows and the first half of the columns."""
        lane = cute.arch.lane_idx()
        column = lane // 8 * STRIP_COLUMNS + lane % 4 * LANE_CODES
        return p.key + self.row_offset(p, "key", piece, rows) + Int64(lane // 4 % STEP_ROWS) * p.key_row + column

    def load_step(self, p: Any, start: Int64, count: Int32, step: int, words: cute.Tensor) -> None:
        """Starts loading this lane's codes of a step of a tile; zeros behind the last row."""
        half, first = step // HALF_STEPS, step % HALF_STEPS * STEP_ROWS
        is_row = first + cute.arch.lane_idx() // 4 % STEP_ROWS < count
        text = (
            "{ .reg .pred is_row; setp.ne.s32 is_row, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; "
            "mov.b32 {$w3}, 0; @is_row ld.global.nc.L1::no_allocate.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}]; }"
        )
        found = cute.arch.inline_ptx(
            text,
            write_only_types=[Uint32] * WORDS,
            read_only_args=[start + Int64(first) * p.key_row + half * HALF_COLUMNS, Int32(is_row)],
        )
        for word in range(WORDS):
            words[step % CODES_AHEAD * WORDS + word] = Uint32(found[word])

    @cute.jit
    def load_scales(self, p: Any, piece: Any, rows: Any):
        """Returns this lane's two scales of its row, lane // 2, of the four: 0 behind the last row."""
        scale0, scale1 = Float32(0.0), Float32(0.0)
        lane = cute.arch.lane_idx()
        if lane // 2 < rows.count:
            first = self.row_offset(p, "key_scale", piece, rows) + Int64(lane // 2) * p.key_scale_row
            first = first + Int64(lane % 2 * HALF_SCALES) * p.key_scale_tile
            scale0 = params.load_scalar(p.key_scale, Float32, first)
            scale1 = params.load_scalar(p.key_scale, Float32, first + p.key_scale_tile)
        return scale0, scale1

    def scale_of(self, step: int, scale0: Float32, scale1: Float32) -> Float32:
        """Returns the scale of this lane's codes of a step; scale0, scale1: as `load_scales` returns them."""
        lane = cute.arch.lane_idx()
        half, first = step // HALF_STEPS, step % HALF_STEPS * STEP_ROWS
        owner = 2 * (first + lane // 4 % STEP_ROWS) + half
        found = [cute.arch.shuffle_sync(scale, owner) for scale in (scale0, scale1)]
        return choose(lane // 8 < SCALE_COLUMNS // STRIP_COLUMNS, found[0], found[1])

    def store_step(self, slot: Int32, step: int, words: cute.Tensor, scale: Float32) -> None:
        """Converts this lane's codes of a step, and stores them in a slot."""
        half, first = step // HALF_STEPS, step % HALF_STEPS * STEP_ROWS
        halves = cute.make_rmem_tensor(LANE_CODES // 2, Uint32)
        for word in range(WORDS):
            low, high = e4m3.to_f16(self.build.arch, words[step % CODES_AHEAD * WORDS + word])
            halves[2 * word], halves[2 * word + 1] = low, high
        numbers = cute.make_rmem_tensor(LANE_CODES, self.dtype)
        numbers.store((cute.recast_tensor(halves, Float16).load().to(Float32) * scale).to(self.dtype))
        vectors = cute.make_tensor(
            cute.recast_ptr(numbers.iterator, dtype=Uint32), cute.make_layout((WORDS, 2), stride=(1, WORDS))
        )
        lane = cute.arch.lane_idx()
        row = lane // 4 % STEP_ROWS
        base = tile_copy.smem_symbol() + self.build.buffer("ring").offset
        strip = slot * self.ring.slot_bytes + (lane // 8 + half * HALF_STRIPS) * self.ring.strip_bytes
        of_row = strip + (cute.arch.warp_idx() * WARP_ROWS + row) * ROW_BYTES + first * ROW_BYTES
        place = (lane % 4 * 2) ^ row ^ (first % 8)
        for vector in range(2):
            target = (base + (of_row + (place ^ vector) * VECTOR_BYTES)).align(VECTOR_BYTES)
            cute.autovec_copy(
                vectors[None, vector], cute.make_tensor(cute.recast_ptr(target, dtype=Uint32), cute.make_layout(WORDS))
            )

    @cute.jit
    def load_rope(self, p: Any, rope: Any, piece: Any, slot: Int32, row: Int32, page: Int32):
        """Issues the copy of the warp's rows of the rotary embedding; rows behind the array become zeros."""
        coordinates = (row, piece.head_key, piece.seqlen.batch)
        if cutlass.const_expr(self.is_paged):
            coordinates = box_coordinates(p, row, piece.head_key, page)
        base = tile_copy.smem_symbol() + self.build.buffer("ring").offset
        offset = slot * self.ring.slot_bytes + cute.arch.warp_idx() * (WARP_ROWS * ROW_BYTES)
        with cute.arch.elect_one():
            barrier = self.ring.full(slot, ROPE_CHUNK)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, WARP_ROWS * ROW_BYTES)
            prim.cp_async_bulk_tensor_shared_cta_global(
                base + cute.assume(offset + P_STRIP * self.ring.strip_bytes, divby=1024),
                rope.get_ptr(),
                [Int32(0), *map(Int32, coordinates)],
                barrier,
                l2_cache_hint=EVICT_FIRST,
            )


assert WARP_THREADS == 2 * WARP_ROWS  # lanes have two of the four scales of a row each
