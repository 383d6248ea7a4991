"""Kept ring: the bits of the weights that dropout keeps, drawn by warps that have nothing else to do.

A Philox call gives the bits of four neighbouring keys, which four threads of a transposed accumulator hold. So the
bits pass through shared memory: warps draw whole tiles in turn, 32 keys of a query in each word, and every thread that
holds scores gathers its own bits there.

    pipe    full: arrivals              empty: arrivals                 slots
    kept    32 threads of one warp      all threads that hold scores    one for each drawing warp
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32

from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.parts import dropout, lengths, moves, pipes
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import KEPT_KEYS, kept_slots

EIGHTS = 8  # pairs of columns, eight columns apart, whose bits a thread's word holds
ROWS_OF_WARP = 16  # keys that a warp's part of the accumulator has
EACH_BYTE = 0x01010101


class KeptRing:
    """The bits of one Build. walk: the kernel, which says what tiles a block takes. readers: threads that hold scores."""

    def __init__(self, build: Build, walk: Any, readers: int) -> None:
        self.build, self.walk, self.readers = build, walk, readers
        self.slots = kept_slots(build)

    def make_pipe(self, barriers: cute.Pointer) -> None:
        """Its barriers, from this one on."""
        self.pipe = pipes.handed_over(self.slots, WARP_THREADS, self.readers, barriers)

    @cute.jit
    def draw(self, p: Any, warp: Int32):
        """Warp number `warp`, from 0, of the drawing ones: the bits of the tiles whose slot has this number."""
        (at,) = pipes.states(pipeline.PipelineUserType.Producer, self.slots)
        stream = dropout.stream(p)
        for mine in cutlass.range(self.walk.turns(p), unroll=1):
            item = self.walk.work(p, mine)
            of, _, key_tile, first, end = item
            head, query_tile = self.walk.first_place(p, item)
            for _ in cutlass.range(self.walk.rounds(p, first, end), unroll=1):
                if at.index == warp:
                    self.pipe.producer_acquire(at)
                    corner = query_tile * self.build.tile_m, key_tile * self.build.tile_n
                    self.draw_tile(p, stream, (of, head), corner, at.index)
                    self.pipe.producer_commit(at)
                at.advance()
                head, query_tile = self.walk.next_place(item, head, query_tile)

    @cute.jit
    def draw_tile(self, p: Any, stream: Any, of_head: tuple, corner: tuple, slot: Int32):
        """The bits of one tile of scores; a word of each lane at a time."""
        of, head = of_head
        rows = self.build.tile_m
        start = stream.offset + lengths.first_word(p, of, head) + corner[1]
        is_aligned = dropout.is_aligned(start, of.num_keys)
        ring, lane = self.ring(), cute.arch.lane_idx()
        for step in cutlass.range(rows * (self.build.tile_n // KEPT_KEYS) // WARP_THREADS, unroll=1):
            place = step * WARP_THREADS + lane
            query, word = place % rows, place // rows
            at = start + cute.arch.mul_wide(corner[0] + query, of.num_keys) + word * KEPT_KEYS
            ring[query, word, slot] = dropout.run_bits(stream, at, is_aligned)

    def read(self, at: Any, thread: Int32) -> list[Uint32]:
        """The bits of this thread's scores in the slot at `at`, which is given back; `is_kept` and `mask` read them.

        Bit 8 (row + 2 side) + 7 - eight of the word of eight times eight columns.
        """
        self.pipe.consumer_wait(at)
        warp, row, pair = thread // WARP_THREADS, thread % WARP_THREADS // 4, thread % 4
        half = Uint32(cutlass.select_(warp % 2 == 0, Int32(0x5410), Int32(0x7632)))
        wanted = Uint32(EACH_BYTE) << Uint32(row)
        first = self.ring().iterator + cute.crd2idx((2 * pair, warp // 2, at.index), self.ring().layout)
        pairs = cute.make_layout((2, self.build.tile_m // 8), stride=(1, 8))
        found = cute.make_rmem_tensor(cute.make_layout(pairs.shape), Uint32)
        cute.autovec_copy(cute.make_tensor(first.align(8), pairs), found)
        cute.arch.mbarrier_arrive(self.pipe.sync_object_empty.get_barrier(at.index))
        bits = []
        for start in range(0, self.build.tile_m // 8, EIGHTS):
            word = Uint32(0)
            for eight in range(start, start + EIGHTS):
                word = (word << 1) | (word >> 31)
                word = word | (permuted(found[0, eight], found[1, eight], half) & wanted)
            bits.append((word >> Uint32(row)) | (word << Uint32(32 - row)))
        return bits

    def ring(self) -> cute.Tensor:
        """[query, word of 32 keys, slot]."""
        layout = cute.make_layout((self.build.tile_m, self.build.tile_n // KEPT_KEYS, self.slots))
        return cute.make_tensor(moves.shared_pointer(self.build, "kept", Uint32), layout)


def is_kept(bits: list[Uint32], side: int, row: int, eight: int) -> Any:
    """Whether an element of the accumulator is kept."""
    place = 8 * (row + 2 * side) + 7 - eight % EIGHTS
    return (bits[eight // EIGHTS] & Uint32(1 << place)) != Uint32(0)


def mask(bits: list[Uint32], row: int, eight: int) -> Uint32:
    """Ones in the half of a pair of columns that is kept."""
    # A byte in a selector with 8 added is its sign, eight times.
    word = bits[eight // EIGHTS] << eight % EIGHTS
    return permuted(word, word, Uint32(0xBB99 if row else 0xAA88))


def permuted(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Four bytes of two words."""
    text = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[low, high, selector])
