"""Kept bits: which weights dropout keeps, for transposed scores.

A Philox call gives the words of four neighbouring keys of a query, but a thread of a transposed accumulator holds one
of the four. A warp holds 16 keys: each lane draws the bits of those for one query in every 32, four calls, and gathers
the bits of its own keys from the lanes that have its queries.

    bit of a thread's word    8 (row + 2 (eight // 4 % 2)) + 7 - 2 (eight % 4) - side, a word for every 64 queries
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.parts import dropout, lengths, params
from cutlass_py_attn.parts.bits_ahead import BitsAhead
from cutlass_py_attn.parts.integers import smaller
from cutlass_py_attn.parts.walk import Walk
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import KEPT_KEYS, KEPT_QUERIES

EACH_BYTE = 0x01010101
PAIRS, PLACES = 4, 8  # of columns that neighbouring lanes hold of every 8; bits of a byte, a column each


class KeptBits(BitsAhead):
    """The bits of one Build's tiles. before: threads of the block before those that hold scores; threads: those."""

    def __init__(self, build: Build, before: int, threads: int) -> None:
        super().__init__(build, threads)
        self.before, self.walk = before, Walk(build)

    @cute.jit
    def find(self, p: Any, stream: Any, found: cute.Tensor, item: Any, tile: tuple, which: tuple):
        """A thread's words of round `which` (number, how many the item has) at (query head, query tile); of a round
        behind the last none. All threads of a warp call this together."""
        turn, turns = which
        if turn < turns:
            number = turn % self.tiles
            if number == 0:
                self.draw(p, stream, item, tile, smaller(turns - turn, self.tiles))
            self.take(found, params.fresh("tid.x") - self.before, number)

    @cute.jit
    def draw(self, p: Any, stream: Any, item: Any, tile: tuple, rounds: Int32):
        """A thread's words of so many rounds, the first at (query head, query tile)."""
        head, query_tile = tile
        thread = params.fresh("tid.x") - self.before
        for number in cutlass.range(rounds, unroll=1):
            words = self.registers()
            for word in cutlass.range_constexpr(self.words):
                words[word] = self.word(p, stream, (item.of, head), (query_tile, item.tile), thread, word)
            self.put(words, thread, number)
            head, query_tile = self.walk.next(item, head, query_tile)

    def word(self, p: Any, stream: Any, of_head: tuple, tile: tuple, thread: Int32, number: int) -> Uint32:
        """A thread's word for 64 queries of the tile (query tile, key tile); a warp calls this."""
        lane, group = thread % WARP_THREADS, thread // WARP_THREADS
        corner = tile[0] * self.build.tile_m, tile[1] * self.build.tile_n + group * KEPT_KEYS
        query = lane + number * KEPT_QUERIES
        first, second = (self.bits(p, stream, of_head, corner, query + row) for row in (0, WARP_THREADS))
        return gathered((first & Uint32(0xFFFF)) | (second << 16), lane)

    def bits(self, p: Any, stream: Any, of_head: tuple, corner: tuple, query: Int32) -> Uint32:
        """The bits of the 16 keys at `corner` of a query of the tile."""
        of, head = of_head
        start = stream.offset + lengths.first_word(p, of, head) + corner[1]
        at = start + cute.arch.mul_wide(corner[0] + query, of.num_keys)
        return dropout.run_bits(stream, at, dropout.is_aligned(start, of.num_keys))


def gathered(bits: Uint32, lane: Int32) -> Uint32:
    """Bits of 16 keys of queries `lane` and 32 + `lane` become those of this lane's two keys of 16 queries."""
    row, pair = lane // PAIRS, lane % PAIRS
    wanted, mine = Uint32(EACH_BYTE) << Uint32(row), Uint32(0)
    for place in range(PLACES):
        other = cute.arch.shuffle_sync(bits, place // 2 * PLACES + 2 * pair + place % 2)
        mine = ((mine << 1) | (mine >> 31)) | (other & wanted)
    return (mine >> Uint32(row)) | (mine << Uint32(32 - row))


def is_kept(found: cute.Tensor, side: int, row: int, eight: int) -> Any:
    """Whether an element of the accumulator is kept."""
    place = 8 * (row + 2 * (eight // 4 % 2)) + 7 - 2 * (eight % 4) - side
    return (found[eight // 8] & Uint32(1 << place)) != Uint32(0)


def mask(found: cute.Tensor, row: int, eight: int) -> Uint32:
    """Ones in the halves of a pair of columns that are kept."""
    low = found[eight // 8] << 2 * (eight % 4)
    # A byte in a selector with 8 added is its sign, eight times; four more mean the other word.
    sign = 8 + row + 2 * (eight // 4 % 2)
    return permuted(low, low << 1, Uint32(0x11 * sign + 0x1100 * (sign + 4)))


def permuted(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Four bytes of two words."""
    text = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[low, high, selector])
