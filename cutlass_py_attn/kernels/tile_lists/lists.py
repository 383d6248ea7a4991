"""Lists: the second kernel of tile lists, which writes the tiles that each work tile visits."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cutlass_py_attn.integers import ceil_div, choose, larger
from cutlass_py_attn.kernels.common import dependent_launch, params
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.tile_lists import SIZE_WORDS, STATE_TILES, STATE_WORDS, hidden_key_tile

AT_ONCE = 4  # steps of 32 tiles whose states are loaded before the next ones
WARPS = ROW_THREADS // WARP_THREADS


class Lists:
    """Writes tile_entries and list_sizes. A warp has a list, and each lane one of 32 tiles at a time."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.is_forward = build.kind == "forward"

    @cute.jit
    def run(self, p: Any):
        """Writes the list of the warp."""
        dependent_launch.start_next(self.build, "lists")
        dependent_launch.wait_for_previous(self.build, "lists")
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number = block * WARPS + cute.arch.make_warp_uniform(thread // WARP_THREADS)
        query_tiles, key_tiles = self.tiles(p)
        of_head = query_tiles if cutlass.const_expr(self.is_forward) else key_tiles
        heads = p.ranges_heads if cutlass.const_expr(self.is_forward) else larger(p.ranges_heads // p.group, 1)
        if number < p.ranges_batch * heads * of_head:
            pair = number // of_head
            self.write(p, number, pair, number - pair * of_head)

    def tiles(self, p: Any) -> tuple[Int32, Int32]:
        """Returns the numbers of query tiles and of key tiles of a head."""
        return ceil_div(p.num_queries, self.build.tile_m), ceil_div(p.num_keys, self.build.tile_n)

    @cute.jit
    def write(self, p: Any, number: Int32, pair: Int32, tile: Int32):
        """Writes list `number`: that of a work tile of a pair of sequence and head."""
        lane = cute.arch.lane_idx()
        query_tiles, key_tiles = self.tiles(p)
        count = key_tiles if cutlass.const_expr(self.is_forward) else query_tiles
        partial, total = Int32(0), Int32(0)
        for chunk in cutlass.range(ceil_div(count, WARP_THREADS), unroll=AT_ONCE):
            visited, whole, _ = self.states(p, pair, tile, chunk * WARP_THREADS + lane, count)
            partial = partial + Int32(cute.arch.popc(visited & ~whole))
            total = total + Int32(cute.arch.popc(visited))
        begin = Int64(number) * count
        next_partial, next_whole = Int32(0), partial
        first = Int32(0)  # the tile of the first entry
        for chunk in cutlass.range(ceil_div(count, WARP_THREADS), unroll=AT_ONCE):
            visited, whole, visited_tile = self.states(p, pair, tile, chunk * WARP_THREADS + lane, count)
            hidden = visited & ~whole
            before = (Uint32(1) << Uint32(lane)) - Uint32(1)
            is_whole = (whole >> Uint32(lane)) & Uint32(1)
            is_visited = (visited >> Uint32(lane)) & Uint32(1)
            at_whole = next_whole + Int32(cute.arch.popc(whole & before))
            at_partial = next_partial + Int32(cute.arch.popc(hidden & before))
            at = choose(is_whole != Uint32(0), at_whole, at_partial)
            if is_visited != Uint32(0):
                params.store_scalar(p.tile_entries, Int32, begin + at, visited_tile)
                if at == 0:
                    first = visited_tile
            next_partial = next_partial + Int32(cute.arch.popc(hidden))
            next_whole = next_whole + Int32(cute.arch.popc(whole))
        first = Int32(cute.arch.warp_redux_sync(first, "max"))  # of the other lanes it is 0
        is_empty = total == 0
        key_tile = first if cutlass.const_expr(self.is_forward) else tile
        key_tile = choose(is_empty, Int32(hidden_key_tile(self.build)), key_tile)
        if lane == 0:
            if is_empty:
                params.store_scalar(p.tile_entries, Int32, begin, Int32(0))
            sizes = choose(is_empty, Int32(1), partial), choose(is_empty, Int32(1), total), key_tile
            for word in cutlass.range_constexpr(len(sizes)):
                params.store_scalar(p.list_sizes, Int32, Int64(number) * SIZE_WORDS + word, sizes[word])

    @cute.jit
    def states(self, p: Any, pair: Int32, tile: Int32, place: Int32, count: Int32):
        """Returns the words with a bit for each lane of visited and of whole tiles, and the tile of this lane.

        place: of the lane's tile in the order of the visit: the last key tile first, the first query tile first
        """
        if cutlass.const_expr(self.is_forward):
            visited_tile = count - 1 - place
            visited, whole = self.state(p, pair, tile, visited_tile, place < count)
        else:
            visited_tile = place
            visited, whole = Boolean(False), Boolean(True)
            heads = choose(p.ranges_heads > 1, p.group, 1)
            for head in cutlass.range(heads, unroll=1):
                of_head = self.state(p, pair * heads + head, place, tile, place < count)
                visited, whole = visited | of_head[0], whole & of_head[1]
        words = cute.arch.vote_ballot_sync(visited), cute.arch.vote_ballot_sync(visited & whole)
        return Uint32(words[0]), Uint32(words[1]), visited_tile

    @cute.jit
    def state(self, p: Any, number: Int32, query_tile: Int32, key_tile: Int32, is_tile: Boolean):
        """Returns whether a tile is visited, and whether it is whole; (False, False) for none."""
        query_tiles, key_tiles = self.tiles(p)
        visited, whole = Uint32(0), Uint32(0)
        if is_tile:
            first = (Int64(number) * query_tiles + query_tile) * ceil_div(key_tiles, STATE_TILES)
            place = (first + key_tile // STATE_TILES) * STATE_WORDS
            visited = Uint32(params.load_scalar(p.tile_states, Int32, place))
            whole = Uint32(params.load_scalar(p.tile_states, Int32, place + 1))
        bit = Uint32(1) << Uint32(key_tile % STATE_TILES)
        return (visited & bit) != Uint32(0), (whole & bit) != Uint32(0)
