"""Kept bits: which weights dropout keeps, for transposed scores.

A Philox call gives the words of four neighbouring keys of a query, but a thread of a transposed accumulator holds one
of the four. A warp holds 16 keys: each lane has the bits of those for one query in every 32, four calls, and gathers
the bits of its own keys from the lanes that have its queries. The first 32 of every 64 queries are drawn by warps that
have nothing else to do and come through shared memory, the others by the warps that hold the scores.

    pipe    full: arrivals              empty: arrivals                 slots
    kept    32 threads of one warp      all threads that hold scores    one for each drawing warp

    bit of a thread's word    8 (row + 2 (eight // 4 % 2)) + 7 - 2 (eight % 4) - side, a word for every 64 queries
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint16, Uint32

from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.parts import dropout, lengths, moves, params, pipes
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import KEPT_KEYS, KEPT_QUERIES

EACH_BYTE = 0x01010101
PAIRS, PLACES = 4, 8  # of columns that neighbouring lanes hold of every 8; bits of a byte, a column each


class KeptBits:
    """The bits of one Build's tiles. walk: the kernel, which says what tiles a block takes; readers: threads that hold
    scores."""

    def __init__(self, build: Build, walk: Any, readers: int) -> None:
        self.build, self.walk, self.readers = build, walk, readers
        self.words = build.tile_m // KEPT_QUERIES

    def make_pipe(self, barriers: cute.Pointer) -> None:
        """Its barriers, from this one on."""
        self.pipe = pipes.handed_over(self.build.query_stages, WARP_THREADS, self.readers, barriers)

    def registers(self) -> cute.Tensor:
        """A thread's words of one tile."""
        return cute.make_rmem_tensor(self.words, Uint32)

    @cute.jit
    def draw(self, p: Any, warp: Int32):
        """Warp number `warp`, from 0, of the drawing ones: the bits of the tiles whose slot has this number."""
        (at,) = pipes.states(pipeline.PipelineUserType.Producer, self.build.query_stages)
        (at_k,) = pipes.states(pipeline.PipelineUserType.Consumer, self.build.key_stages)
        stream, lane, ring = dropout.uniform_stream(p), cute.arch.lane_idx(), self.ring()
        key_tile = self.walk.next_tile(at_k)
        while key_tile >= 0:
            item = self.walk.items.read(p, self.walk.record(at_k))
            self.walk.pipe_k.consumer_release(at_k)  # nothing but the record was wanted
            at_k.advance()
            head, query_tile = self.walk.first_place(p, item)
            for _ in cutlass.range(self.walk.rounds(p, item.first, item.end), unroll=1):
                if at.index == warp:
                    self.pipe.producer_acquire(at)
                    for group in cutlass.range(cute.size(ring, mode=[1]), unroll=1):
                        corner = self.corner((item.of, head, query_tile, key_tile), group)
                        for word in cutlass.range_constexpr(self.words):
                            bits = self.bits(p, stream, (item.of, head), corner, lane + word * KEPT_QUERIES)
                            ring[lane, group, word, at.index] = Uint16(bits)
                    self.pipe.producer_commit(at)
                at.advance()
                head, query_tile = self.walk.next_place(item, head, query_tile)
            key_tile = self.walk.next_tile(at_k)

    def corner(self, tile: tuple, group: Int32) -> tuple[Int32, Int32]:
        """The first query of a tile, and the first key of one of its groups of 16."""
        _, _, query_tile, key_tile = tile
        return query_tile * self.build.tile_m, key_tile * self.build.tile_n + group * KEPT_KEYS

    def bits(self, p: Any, stream: Any, of_head: tuple, corner: tuple, query: Int32) -> Uint32:
        """The bits of the 16 keys at `corner` of a query of the tile."""
        of, head = of_head
        start = stream.offset + lengths.first_word(p, of, head) + corner[1]
        at = start + cute.arch.mul_wide(corner[0] + query, of.num_keys)
        return dropout.run_bits(stream, at, dropout.is_aligned(start, of.num_keys))

    @cute.jit
    def find_next(self, p: Any, stream: Any, found: cute.Tensor, tile: tuple, at: Any, is_there: Any):
        """`find` where the tile is there."""
        if is_there:
            self.find(p, stream, found, tile, at)

    @cute.jit
    def find(self, p: Any, stream: Any, found: cute.Tensor, tile: tuple, at: Any):
        """A thread's words of the tile at (sequence, query head, query tile, key tile), whose slot is at `at`; all
        threads of a warp call this together."""
        thread = params.fresh("tid.x") - self.walk.before
        lane, group = thread % WARP_THREADS, thread // WARP_THREADS
        corner = self.corner(tile, group)
        self.pipe.consumer_wait(at)
        ring = self.ring()
        for word in cutlass.range_constexpr(self.words):
            found[word] = Uint32(ring[lane, group, word, at.index])
        cute.arch.mbarrier_arrive(self.pipe.sync_object_empty.get_barrier(at.index))
        for word in cutlass.range_constexpr(self.words):
            query = lane + (word * KEPT_QUERIES + WARP_THREADS)
            found[word] = found[word] | (self.bits(p, stream, tile[:2], corner, query) << 16)
        for word in cutlass.range_constexpr(self.words):
            found[word] = gathered(found[word], lane)

    def ring(self) -> cute.Tensor:
        """[query of 32, group of 16 keys, 64 queries, slot]."""
        shape = WARP_THREADS, self.build.tile_n // KEPT_KEYS, self.words, self.build.query_stages
        return cute.make_tensor(moves.shared_pointer(self.build, "kept", Uint16), cute.make_layout(shape))


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
