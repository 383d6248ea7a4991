"""Ranges: the first kernel of tile lists, which cuts ranges of keys and finds the states of all tiles."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8

from cutlass_py_attn.integers import ceil_div, larger, round_up, smaller
from cutlass_py_attn.kernels.common import dependent_launch, params, tile_copy
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.tile_lists import ROWS_PADDING, STATE_TILES, STATE_WORDS
from cutlass_py_attn.problem.masks import Band, Form
from cutlass_py_attn.problem.tensors import (
    BLOCK_AXES,
    RANGE_AXES,
    RANGE_EDGES,
    RANGE_WORDS,
    VISIBLE_BLOCKS,
    WORD_BYTES,
)

WARPS = ROW_THREADS // WARP_THREADS
ROWS_AT_ONCE = 4  # rows of shared memory that are compared before the next ones


class Ranges:
    """Writes key_ranges and tile_states. A block has a query tile, and a thread of it key tiles."""

    def __init__(self, build: Build) -> None:
        self.build = build

    @cute.jit
    def run(self, p: Any):
        """Computes the ranges of the block's query tile, and the states of all key tiles."""
        build = self.build
        block, _, _ = cute.arch.block_idx()
        tiles = ceil_div(p.num_queries, build.tile_m)
        number = block // tiles
        tile = block - number * tiles
        rows_in_smem = cute.recast_ptr(tile_copy.smem_symbol(), dtype=Int32)
        ranges = cute.make_tensor(rows_in_smem, cute.make_layout((RANGE_WORDS, build.tile_m)))
        edges = cute.make_tensor(rows_in_smem + build.tile_m * RANGE_WORDS, cute.make_layout((RANGE_WORDS, WARPS)))
        dependent_launch.start_next(build, "ranges")
        least, most = self.cut(p, number, tile, ranges)
        least, most = self.joined(edges, least, most)
        self.find_states(p, number, tile, ranges, least, most)

    @cute.jit
    def cut(self, p: Any, number: Int32, tile: Int32, ranges: cute.Tensor):
        """Writes the ranges of the rows of a query tile to memory and to `ranges`, in shared memory.

        Returns the first key that a row of this thread sees, and one past the last.
        """
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        padded = round_up(p.num_queries, ROWS_PADDING)
        least, most = p.num_keys, Int32(0)
        for step in cutlass.range_constexpr(ceil_div(build.tile_m, ROW_THREADS)):
            row = step * ROW_THREADS + thread
            query = tile * build.tile_m + row
            if row < build.tile_m:
                start, end = self.keys_of(p, number, query)
                ranges[0, row], ranges[1, row] = start, end
                least, most = smaller(least, cutlass.select_(start < end, start, p.num_keys)), larger(most, end)
                if query < padded:
                    place = (Int64(number) * padded + query) * RANGE_WORDS
                    self.store_pair(p.key_ranges, place, start, end)
        return least, most

    @cute.jit
    def joined(self, edges: cute.Tensor, least: Int32, most: Int32):
        """Returns the least and the most of all threads of the block; edges: in shared memory, of each warp."""
        thread, _, _ = cute.arch.thread_idx()
        least, most = cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(most, "max")
        if thread % WARP_THREADS == 0:
            edges[0, thread // WARP_THREADS], edges[1, thread // WARP_THREADS] = least, most
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            least, most = smaller(least, edges[0, warp]), larger(most, edges[1, warp])
        return least, most

    @cute.jit
    def find_states(self, p: Any, number: Int32, tile: Int32, ranges: cute.Tensor, least: Int32, most: Int32):
        """Writes the states of all key tiles of a query tile, whose rows see keys from `least` to before `most`."""
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        tiles = ceil_div(p.num_queries, build.tile_m)
        rows = smaller(p.num_queries - tile * build.tile_m, build.tile_m)
        key_tiles = ceil_div(p.num_keys, build.tile_n)
        words = ceil_div(key_tiles, STATE_TILES)
        first = (Int64(number) * tiles + tile) * words
        for step in cutlass.range(ceil_div(key_tiles, ROW_THREADS), unroll=1):
            key_tile = step * ROW_THREADS + thread
            visited, whole = Boolean(False), Boolean(False)
            first_key = step * (ROW_THREADS * build.tile_n)
            if (first_key < most) & (first_key + ROW_THREADS * build.tile_n > least):
                first_of_tile = key_tile * build.tile_n
                visited, whole = self.state(ranges, rows, first_of_tile)
                visited = visited & self.may_see(p, number, tile * build.tile_m, first_of_tile)
            masks = tuple(
                cute.arch.vote_ballot_sync(is_set & (key_tile < key_tiles)) for is_set in (visited, visited & whole)
            )
            word = key_tile // STATE_TILES
            if (thread % WARP_THREADS == 0) & (word < words):
                self.store_pair(p.tile_states, (first + word) * STATE_WORDS, Int32(masks[0]), Int32(masks[1]))

    def store_pair(self, address: Int64, place: Int64, first: Int32, second: Int32) -> None:
        """Stores two int32 at an even place of an array."""
        target = params.pointer(address, Int32, 2 * WORD_BYTES) + params.assume_multiple(place, 2)
        words = cute.make_tensor(target, cute.make_layout(2))
        words[0], words[1] = first, second

    @cute.jit
    def keys_of(self, p: Any, number: Int32, query: Int32):
        """Returns the first key that a query sees, and one past the last: (0, 0) for none, or a row past the end."""
        batch, head = number // p.ranges_heads, number % p.ranges_heads
        row = smaller(query, p.num_queries - 1)
        start, end = Int32(0), p.num_keys
        if p.key_start != 0:
            start, end = (self.element(p, name, RANGE_AXES, (batch, head, row), Int32) for name in RANGE_EDGES)
        diagonal = p.bottom_right * (p.num_keys - p.num_queries)
        band = Band(Form("local"), diagonal - p.window_left, diagonal + p.window_right, p.num_queries, p.num_keys)
        start = larger(start, band.key_start(query))
        end = smaller(end, band.key_end(query))
        sees = (start < end) & (query < p.num_queries)
        return cutlass.select_(sees, start, Int32(0)), cutlass.select_(sees, end, Int32(0))

    def element(self, p: Any, name: str, axes: tuple[str, ...], place: tuple[Any, ...], dtype: Any) -> Any:
        """Loads an element of an array with strides."""
        offset = Int64(0)
        for index, axis in zip(place, axes, strict=True):
            offset = offset + Int64(index) * params.stride(p, name, axis)
        return params.load_scalar(getattr(p, name), dtype, offset)

    @cute.jit
    def may_see(self, p: Any, number: Int32, query: Int32, key: Int32):
        """Returns whether queries of the block of `query` may see keys of the block of `key`."""
        is_visible = key < p.num_keys
        if (p.visible_blocks != 0) & is_visible:
            batch, head = number // p.ranges_heads, number % p.ranges_heads
            head = head // p.mask_block_heads
            place = batch, head, query // p.mask_block_rows, key // p.mask_block_columns
            is_visible = self.element(p, VISIBLE_BLOCKS, BLOCK_AXES, place, Uint8) != Uint8(0)
        return is_visible

    @cute.jit
    def state(self, ranges: cute.Tensor, rows: Int32, first: Int32):
        """Returns whether some of the rows sees a key of the tile that begins with key `first`, and whether all do."""
        visited, whole = Boolean(False), Boolean(True)
        end = first + self.build.tile_n
        for row in cutlass.range(rows, unroll=ROWS_AT_ONCE):
            row_start, row_end = ranges[0, row], ranges[1, row]
            visited = visited | ((row_start < end) & (row_end > first))
            whole = whole & (row_start <= first) & (row_end >= end)
        return visited, whole
