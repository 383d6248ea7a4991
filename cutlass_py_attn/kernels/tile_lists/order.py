"""Order: the third kernel of tile lists, which writes the record of every work tile to its place in the work list."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.integers import ceil_div, choose, larger
from cutlass_py_attn.kernels.common import dependent_launch, params
from cutlass_py_attn.launch import tile_lists
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS, SIZE_WORDS

AT_ONCE = 16  # lengths that are loaded before they are compared


class Order:
    """Writes work_list. A thread has a record, whose place it finds by counting the longer lists of its slice."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.is_forward = build.kind == "forward"

    @cute.jit
    def run(self, p: Any):
        """Writes the record of the thread."""
        build = self.build
        dependent_launch.start_next(build, "order")
        dependent_launch.wait_for_previous(build, "order")
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number = block * ROW_THREADS + thread
        query_tiles, key_tiles = ceil_div(p.num_queries, build.tile_m), ceil_div(p.num_keys, build.tile_n)
        tiles, count = (query_tiles, key_tiles) if cutlass.const_expr(self.is_forward) else (key_tiles, query_tiles)
        heads = p.num_heads if cutlass.const_expr(self.is_forward) else p.num_heads // p.group
        pairs = p.batch * heads
        if number < pairs * tiles:
            together = tile_lists.pairs_together(build, p, tiles, pairs, p.device_sms)
            here = tile_lists.slice_of(number, tiles, pairs, together)
            pair = here.first_pair + here.pair
            batch = pair // heads
            head = pair - batch * heads
            tile = tile_lists.tile_at(build, here.first_place + here.place, tiles)
            own = self.list_of(p, batch, head) * tiles + tile
            partial, total, key_tile = (self.size(p, own, word) for word in range(3))
            begin = own * count
            words = tile, head, batch, begin, begin + partial, begin + total, key_tile
            rank = here.place * here.pairs + here.pair
            last = here.first + here.places * here.pairs
            if tile_lists.is_sorted(build, last, pairs * tiles, p.device_sms):
                rank = self.rank(p, here, tiles, heads, total)
            target = Int64(here.first + rank) * RECORD_WORDS
            for word in cutlass.range_constexpr(len(words)):
                params.store_scalar(p.work_list, Int32, target + word, words[word])

    @cute.jit
    def rank(self, p: Any, here: tile_lists.Slice, tiles: Int32, heads: Int32, total: Int32):
        """Returns how many records of the slice come before that of the thread: longer ones, then those ahead of it.

        total: length of the thread's list. If all pairs have the same lists, those of one pair are compared.
        """
        is_shared = p.ranges_batch * p.ranges_heads == 1
        compared, copies = choose(is_shared, 1, here.pairs), choose(is_shared, here.pairs, 1)
        own_pair = choose(is_shared, 0, here.pair)
        before = Int32(0)
        for index in cutlass.range(compared, unroll=1):
            pair = here.first_pair + index
            batch = pair // heads
            first = self.list_of(p, batch, pair - batch * heads) * tiles
            for place in cutlass.range(here.places, unroll=AT_ONCE):
                other = self.size(p, first + tile_lists.tile_at(self.build, here.first_place + place, tiles), 1)
                is_ahead = (place < here.place) | ((place == here.place) & (index < own_pair))
                is_before = (other > total) | ((other == total) & is_ahead)
                before = before + cutlass.select_(is_before, Int32(1), Int32(0))
        return before * copies + choose(is_shared, here.pair, 0)

    def list_of(self, p: Any, batch: Int32, head: Int32) -> Int32:
        """Returns the number of the lists of a head of a sequence."""
        heads = p.ranges_heads if self.is_forward else larger(p.ranges_heads // p.group, 1)
        return tile_lists.list_of(batch, head, p.ranges_batch, heads)

    def size(self, p: Any, number: Int32, word: int) -> Int32:
        """Loads a word of the sizes of a list."""
        return params.load_scalar(p.list_sizes, Int32, Int64(number) * SIZE_WORDS + word)
