"""Transposed dropout: dropout's mask bits for transposed scores, generated for several query tiles at once.

A Philox call gives the words of four neighbouring keys of one query, but a thread of a transposed accumulator holds one
of these keys. A warp holds 16 keys: each lane generates the bits of all 16 for one query in every 32 by four calls, and
gathers the bits of its own keys from the lanes that have its queries.

A thread has one 32-bit word for every 64 queries. The bit of an element of `swap_ab.column_pairs` is
8 (row + 2 (pair // 4 % 2)) + 7 - 2 (pair % 4) - element.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cutlass_py_attn.integers import smaller
from cutlass_py_attn.kernels.common import dropout, params, seqlen_info
from cutlass_py_attn.kernels.sm90_backward.layout import DROPOUT_WORD_KEYS, DROPOUT_WORD_QUERIES
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryTileOrder
from cutlass_py_attn.kernels.sm90_common.dropout_prefetch import DropoutPrefetch
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.swap_ab import PairCoordinate
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS

EACH_BYTE = 0x01010101
PAIRS = 4  # of columns, of every 8: one for each lane of a quad
COLUMNS = 8  # one for each bit of a byte


class TransposedDropout(DropoutPrefetch):
    """Dropout mask bits of one Build's query tiles.

    before: threads of the block ahead of the consumer warps
    threads: consumer threads
    """

    def __init__(self, build: Build, before: int, threads: int) -> None:
        super().__init__(build, threads)
        self.before, self.order = before, QueryTileOrder(build)

    @cute.jit
    def load(
        self, p: Any, stream: Any, bits: cute.Tensor, work_tile: Any, block: Any, iteration: Int32, iterations: Int32
    ):
        """Loads a thread's words of one iteration into `bits`; none past the last iteration.

        The words of several iterations are generated at once. All threads of a warp call this.
        """
        if iteration < iterations:
            number = iteration % self.tiles
            if number == 0:
                self.generate(p, stream, work_tile, block, smaller(iterations - iteration, self.tiles))
            self.load_words(bits, params.read_register("tid.x") - self.before, number)

    @cute.jit
    def generate(self, p: Any, stream: Any, work_tile: Any, block: Any, count: Int32):
        """Generates a thread's words of `count` iterations, the first at `block`, and stores them to shared memory."""
        thread = params.read_register("tid.x") - self.before
        for number in cutlass.range(count, unroll=1):
            words = self.registers()
            tile = ScoreTile(work_tile.seqlen, work_tile.band, block.head, block.index, work_tile.tile)
            for word in cutlass.range_constexpr(self.words):
                words[word] = self.word(p, stream, tile, thread, word)
            self.store_words(words, thread, number)
            block = self.order.next(work_tile, block)

    def word(self, p: Any, stream: Any, tile: ScoreTile, thread: Int32, number: int) -> Uint32:
        """Returns a thread's word for the 64 queries of a tile with this number. All threads of a warp call this."""
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        query0, key0 = tile.origin(self.build)
        origin = query0, key0 + warp * DROPOUT_WORD_KEYS
        query = lane + number * DROPOUT_WORD_QUERIES
        first, second = (self.key_bits(p, stream, tile, origin, query + row) for row in (0, WARP_THREADS))
        return _gather((first & Uint32(0xFFFF)) | (second << 16), lane)

    def key_bits(self, p: Any, stream: Any, tile: ScoreTile, origin: tuple[Int32, Int32], query: Int32) -> Uint32:
        """Returns the bits of the 16 keys at `origin` for one query of the tile."""
        start = stream.offset + seqlen_info.first_dropout_word(p, tile.seqlen, tile.head) + origin[1]
        word = start + cute.arch.mul_wide(origin[0] + query, tile.seqlen.num_keys)
        return dropout.bits_of_16_words(stream, word, dropout.starts_block(start, tile.seqlen.num_keys))


def _gather(bits: Uint32, lane: Int32) -> Uint32:
    """Exchanges the bits of 16 keys of queries `lane` and 32 + `lane` for those of this lane's two keys, 16 queries."""
    row, pair = lane // PAIRS, lane % PAIRS
    wanted, gathered = Uint32(EACH_BYTE) << Uint32(row), Uint32(0)
    for column in range(COLUMNS):
        other = cute.arch.shuffle_sync(bits, column // 2 * COLUMNS + 2 * pair + column % 2)
        gathered = ((gathered << 1) | (gathered >> 31)) | (other & wanted)
    return (gathered >> Uint32(row)) | (gathered << Uint32(32 - row))


def is_kept(bits: cute.Tensor, element: PairCoordinate) -> Any:
    """Returns whether dropout keeps an element of the accumulator."""
    bit = 8 * (element.row + 2 * (element.pair // 4 % 2)) + 7 - 2 * (element.pair % 4) - element.element
    return (bits[element.pair // 8] & Uint32(1 << bit)) != Uint32(0)


def pair_mask(bits: cute.Tensor, row: int, pair: int) -> Uint32:
    """Returns a mask of two 16-bit halves, with ones for the elements of a pair that dropout keeps."""
    low = bits[pair // 8] << 2 * (pair % 4)
    # prmt: a selector with 8 added replicates the sign bit of a byte; byte numbers from 4 on are of the other word.
    sign = 8 + row + 2 * (pair // 4 % 2)
    return _permute_bytes(low, low << 1, Uint32(0x11 * sign + 0x1100 * (sign + 4)))


def _permute_bytes(low: Uint32, high: Uint32, selector: Uint32) -> Uint32:
    """Returns four bytes of two words, selected by prmt."""
    text = "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[low, high, selector])
