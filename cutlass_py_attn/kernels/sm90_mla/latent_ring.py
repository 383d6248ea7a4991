"""Latent ring: both slots of latent tiles in shared memory, which one warp fills by TMA.

An e4m3 cache is converted on its way: the warps of latent_codes.py fill the slots, each its rows of every chunk.

Chunks of a tile have a full barrier each, so that S starts with the first columns. The halves of a slot have an empty
barrier each, so that the next tile's first columns are on their way while the other half is still multiplied.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int32, Uint32

from cutlass_py_attn.kernels.common import tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.common.tma import EVICT_FIRST
from cutlass_py_attn.kernels.common.wgmma import smem_tile_at
from cutlass_py_attn.kernels.sm90_common.paged_loads import PagedLoads, box_coordinates
from cutlass_py_attn.kernels.sm90_common.pipelines import first_barrier
from cutlass_py_attn.kernels.sm90_mla.layout import (
    CHUNKS,
    HALVES,
    P_STRIP,
    SLOTS,
    STRIP_COLUMNS,
    VALUE_STRIPS,
    WARPGROUPS,
)
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.score_terms import registry

ROW_BYTES = 128  # of a row of a strip
VECTOR_BYTES = 16


@dataclass(frozen=True)
class LatentTile:
    """A latent tile of one sequence: its head, its first row, and the page of this lane's box if rows are in pages."""

    head: Any
    row: Any
    page: Any


class LatentRing:
    """The ring of one Build. Its barriers are the plan's: full ones of each slot, then empty ones."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.strip_bytes = build.tile_n * ROW_BYTES
        self.slot_bytes = build.tile_n * build.columns * build.item_bytes
        self.is_paged = build.has("paged")
        self.full_arrivals = WARPGROUP_WARPS if build.has(registry.KV8) else 1  # warps that fill a chunk
        self.paged_loads = PagedLoads(build)

    def create(self) -> None:
        """Initialises the barriers. One thread calls this."""
        for slot in range(SLOTS):
            for chunk in range(len(CHUNKS)):
                cute.arch.mbarrier_init(self.full(slot, chunk), self.full_arrivals)
            for half in range(WARPGROUPS):
                cute.arch.mbarrier_init(self._empty(slot, half), WARPGROUP_WARPS)

    def tiles(self) -> cute.Tensor:
        """Returns both slots in shared memory, (rows, columns, slots)."""
        build, base = self.build, tile_copy.smem_symbol()
        shape = build.tile_n, build.columns
        return smem_tile_at(base, build.buffer("ring").offset, DTYPES[build.dtype], shape, SLOTS)

    def p_tile(self, slot: int) -> cute.Tensor:
        """Returns P of a slot's tile in shared memory, (queries, rows of the tile), in the place of the last strip."""
        build, base = self.build, tile_copy.smem_symbol()
        offset = build.buffer("ring").offset + slot * self.slot_bytes + P_STRIP * self.strip_bytes
        return smem_tile_at(base, offset, DTYPES[build.dtype], (build.tile_m, build.tile_n))

    def lane_page(self, p: Any, pages: Any, seqlen: SeqlenInfo, boxes: Any, tile: Int32) -> Int32:
        """Returns the page of this lane's box of a latent tile; 0 without pages."""
        return self.paged_loads.lane_page(p, pages, seqlen, boxes, tile) if self.is_paged else Int32(0)

    @cute.jit
    def load(self, p: Any, source: Any, slot: cutlass.Constexpr, use: Int32, tile: Any, seqlen: Any, boxes: Any):
        """Loads a latent tile into a slot, half by half as they become empty. One warp calls this.

        use: how many tiles the slot has had before. Rows outside of a page's sequence are those of its pages.
        """
        for half in cutlass.range_constexpr(WARPGROUPS):
            chunks = HALVES[slot][half]
            cute.arch.mbarrier_wait(self._empty(slot, half), (use & 1) ^ 1)
            with cute.arch.elect_one():
                for chunk in cutlass.range_constexpr(len(chunks)):
                    count = len(CHUNKS[chunks[chunk]]) * self.strip_bytes
                    cute.arch.mbarrier_arrive_and_expect_tx(self.full(slot, chunks[chunk]), count)
            if cutlass.const_expr(self.is_paged):
                for box in cutlass.range(boxes.count, unroll=1):
                    page = cute.arch.shuffle_sync(tile.page, box)
                    row = box << boxes.shift
                    with cute.arch.elect_one():
                        self.issue(source, slot, chunks, row, box_coordinates(p, tile.row + row, tile.head, page))
            else:
                with cute.arch.elect_one():
                    self.issue(source, slot, chunks, Int32(0), (tile.row, tile.head, seqlen.batch))

    def issue(self, source: Any, slot: int, chunks: tuple[int, ...], row: Any, coordinates: tuple) -> None:
        """Issues the copies of a box that starts at `row` of the tile. One thread calls this.

        coordinates: of the box in the tensor map, without the column
        """
        base = tile_copy.smem_symbol()
        for chunk in chunks:
            for strip in CHUNKS[chunk]:
                offset = self.build.buffer("ring").offset + slot * self.slot_bytes + strip * self.strip_bytes
                prim.cp_async_bulk_tensor_shared_cta_global(
                    base + cute.assume(offset + row * ROW_BYTES, divby=1024),
                    source.get_ptr(),
                    [Int32(strip * STRIP_COLUMNS), *map(Int32, coordinates)],
                    self.full(slot, chunk),
                    l2_cache_hint=EVICT_FIRST,  # a step reads the cache once
                )

    def wait(self, slot: int, chunk: int, use: Int32) -> None:
        """Waits for a chunk of the tile that is number `use` of its slot."""
        cute.arch.mbarrier_wait(self.full(slot, chunk), use & 1)

    def wait_empty(self, slot: Int32, half: int, use: Int32) -> None:
        """Waits until a half of a slot is empty. use: how many tiles the slot has had before."""
        cute.arch.mbarrier_wait(self._empty(slot, half), (use & 1) ^ 1)

    def mark_full(self, slot: Int32, chunk: int) -> None:
        """Marks a chunk full for the rows of one warp. All its threads call this, after a fence and `sync_warp`."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full(slot, chunk))

    def release(self, slot: int, half: int) -> None:
        """Releases a half of a slot. All threads of a warpgroup call this."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self._empty(slot, half))

    @cute.jit
    def clear_rows(self, slot: cutlass.Constexpr, first: Int32, thread: Int32):
        """Sets the rows of a slot from `first` on to zero where they are values. All threads of a warpgroup call it.

        Rows behind the last key may hold NaN, which a weight of 0 does not hide.
        """
        base = tile_copy.smem_symbol()
        zeros = cute.make_rmem_tensor(VECTOR_BYTES // 4, Uint32)
        zeros.fill(0)
        vectors = VALUE_STRIPS * ROW_BYTES // VECTOR_BYTES  # of a row
        for index in cutlass.range(thread, (self.build.tile_n - first) * vectors, WARPGROUP_THREADS, unroll=1):
            row, vector = first + index // vectors, index % vectors
            strip, vector = vector // (ROW_BYTES // VECTOR_BYTES), vector % (ROW_BYTES // VECTOR_BYTES)
            start = self.build.buffer("ring").offset + slot * self.slot_bytes
            offset = start + strip * self.strip_bytes + row * ROW_BYTES + vector * VECTOR_BYTES
            place = cute.recast_ptr((base + offset).align(VECTOR_BYTES), dtype=Uint32)
            cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(VECTOR_BYTES // 4)))

    def full(self, slot: Any, chunk: int) -> cute.Pointer:
        """Returns the full barrier of a chunk of a slot."""
        return first_barrier(self.build) + (slot * len(CHUNKS) + chunk)

    def _empty(self, slot: Any, half: int) -> cute.Pointer:
        return first_barrier(self.build) + (SLOTS * len(CHUNKS) + slot * WARPGROUPS + half)
