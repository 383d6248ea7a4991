"""Pairs: the kernel of tile lists that computes a mask function, for every pair that ranges of keys do not hide."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cutlass_py_attn.integers import ceil_div, smaller
from cutlass_py_attn.kernels.common import dependent_launch, params, tile_copy
from cutlass_py_attn.kernels.common.key_ranges import load_int32, range_place
from cutlass_py_attn.kernels.common.mask_function import MaskFunction
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import PAIR_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.tile_lists import STATE_TILES, STATE_WORDS
from cutlass_py_attn.problem.tensors import RANGE_WORDS

WARPS = PAIR_THREADS // WARP_THREADS
ROWS_AT_ONCE = 4  # rows that are computed before a warp asks whether the tile is decided


class Pairs:
    """Writes tile_states anew. A block has a word of them, and each warp tiles of it."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.function = MaskFunction(build)
        self.rows = self.function.at_once(ROWS_AT_ONCE)

    @cute.jit
    def run(self, p: Any):
        """Computes the states of the tiles of the block's word."""
        build = self.build
        dependent_launch.start_next(build, "pairs")
        dependent_launch.wait_for_previous(build, "pairs")
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP_THREADS)
        tiles, words = ceil_div(p.num_queries, build.tile_m), ceil_div(ceil_div(p.num_keys, build.tile_n), STATE_TILES)
        row = number // words
        place = row // tiles
        first_query = (row - place * tiles) * build.tile_m
        batch, head = place // p.ranges_heads, place % p.ranges_heads
        state = load_int32(p.tile_states, Int64(number) * STATE_WORDS, STATE_WORDS)
        visited, whole = Uint32(state[0]), Uint32(state[1])
        own_visited, own_whole = Uint32(0), Uint32(0)
        for step in cutlass.range(STATE_TILES // WARPS, unroll=1):
            tile = step * WARPS + warp
            bit = Uint32(1) << Uint32(tile)
            if (visited & bit) != Uint32(0):
                first_key = ((number - row * words) * STATE_TILES + tile) * build.tile_n
                some, every = self.state(p, batch, head, first_query, first_key, (whole & bit) != Uint32(0))
                own_visited = own_visited | cutlass.select_(some, bit, Uint32(0))
                own_whole = own_whole | cutlass.select_(every, bit, Uint32(0))
        self.store(p, number, thread, warp, (own_visited, own_whole))

    @cute.jit
    def state(self, p: Any, batch: Int32, head: Int32, first_query: Int32, first_key: Int32, is_whole: Boolean):
        """Returns whether some query of a tile sees a key of it, and whether all do; a warp computes it.

        is_whole: whether ranges of keys hide no pair of the tile
        """
        build = self.build
        lane = cute.arch.lane_idx()
        rows = smaller(p.num_queries - first_query, build.tile_m)
        some, every = Boolean(False), is_whole
        row = Int32(0)
        while (row < rows) & ((some == Boolean(False)) | every):
            for index in cutlass.range_constexpr(self.rows):
                query = smaller(first_query + row + index, p.num_queries - 1)
                words = load_int32(p.key_ranges, range_place(p, batch, head, query), RANGE_WORDS)
                for part in cutlass.range_constexpr(build.tile_n // WARP_THREADS):
                    key = first_key + part * WARP_THREADS + lane
                    seen = self.function.sees(p, batch, head, query, key) & (key >= words[0]) & (key < words[1])
                    some, every = some | seen, every & seen
            some, every = cute.arch.vote_any_sync(some), cute.arch.vote_all_sync(every)
            row = row + self.rows
        return some, every

    @cute.jit
    def store(self, p: Any, number: Int32, thread: Int32, warp: Int32, own: tuple[Uint32, Uint32]):
        """Stores the word of a block, of the bits of its warps."""
        words = cute.make_tensor(
            cute.recast_ptr(tile_copy.smem_symbol(), dtype=Int32), cute.make_layout((STATE_WORDS, WARPS))
        )
        if thread % WARP_THREADS == 0:
            for word in cutlass.range_constexpr(STATE_WORDS):
                words[word, warp] = Int32(own[word])
        cute.arch.sync_threads()
        if thread < STATE_WORDS:
            total = Int32(0)
            for index in cutlass.range_constexpr(WARPS):
                total = total | words[thread, index]
            params.store_scalar(p.tile_states, Int32, Int64(number) * STATE_WORDS + thread, total)
