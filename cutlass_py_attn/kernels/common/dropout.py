"""Dropout bits: which elements of a thread's scores dropout keeps, from the Philox stream of score_terms/dropout.py.

A Philox block is four words, one for each of four neighbouring columns of a row; in an accumulator two threads hold
those columns. A quad holds 8 columns of two rows, which is four blocks: each thread computes one block, and sends its
neighbour the half that the thread does not hold. Each word becomes one bit first, so that one shuffle moves eight
blocks.

    thread of the quad   computes the block of   holds, of each row
    0                    row r,     columns 0-3  columns 0, 1
    1                    row r + 8, columns 0-3  columns 2, 3
    2                    row r,     columns 4-7  columns 4, 5
    3                    row r + 8, columns 4-7  columns 6, 7

When rows do not start at a block (num_keys is not a multiple of 4), a thread computes the block of its first column,
and shifts bits in from the next block, which the thread two further has computed.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from cutlass_py_attn.integers import largest_divisor
from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.score_terms.philox import BLOCK_WORDS, KEY_STEPS, MULTIPLIERS, ROUNDS

NIBBLES = 8  # nibbles in a word of bits; a nibble is the four bits of one block
EIGHT = 8  # columns that a quad holds together (two blocks); also the distance of a thread's two rows
RUN_CALLS = 4  # Philox calls of `bits_of_16_words`, interleaved round by round to hide latency
ALL_BITS = 0xFFFFFFFF
EACH_NIBBLE = 0x11111111
LOW_PAIRS = 0x33333333  # the lower two bits of each nibble

Words = tuple[Uint32, Uint32, Uint32, Uint32]


class PhiloxStream:
    """A random stream.

    seed: (low, high) halves
    offset: index of the first word
    threshold: the smallest word that is kept
    """

    def __init__(self, seed: Int64, offset: Int64, threshold: Int32) -> None:
        self.seed = _uniform(Uint32(seed)), _uniform(Uint32(Uint64(seed) >> 32))
        self.offset = offset
        self.threshold = Uint32(threshold)


class PhiloxCalls:
    """Philox calls of a thread for its part of a tile, from the coordinates of a row view.

    pairs, row_step: pairs of rows in a word of bits, and their distance
    groups, column_step: groups of 8 columns in a word of bits, and their distance
    across, down: words side by side, and words below each other; the order is across first
    blocks: Philox blocks in a word of bits
    run, runs: blocks without a gap in the stream, and how many such runs a word has
    """

    def __init__(self, coordinates: cute.Tensor) -> None:
        (rows, pairs), (columns, groups) = coordinates.shape
        assert (rows, columns, *coordinates.layout((1, 1))) == (2, 2, EIGHT, 1), (
            f"no row view of an accumulator: {coordinates}"
        )
        self.row_step = coordinates.layout((2, 0))[0] if pairs > 1 else 0
        self.column_step = coordinates.layout((0, 2))[1] if groups > 1 else EIGHT
        assert self.row_step % BLOCK_WORDS == self.column_step % EIGHT == 0, (
            f"rows or columns are shared: {coordinates}"
        )
        self.groups = largest_divisor(groups, NIBBLES)
        self.pairs = largest_divisor(pairs, NIBBLES // self.groups)
        self.down, self.across = pairs // self.pairs, groups // self.groups
        self.blocks = self.pairs * self.groups
        self.run = self.groups if self.column_step == EIGHT else 1
        self.runs = self.blocks // self.run

    def bits(self, held: cute.Tensor) -> cute.Tensor:
        """Returns the words as a (rows x columns) tensor: each element is the word that has the element's bit."""
        shape = ((2, self.pairs, self.down), (2, self.groups, self.across))
        return cute.make_tensor(held.iterator, cute.make_layout(shape, stride=((0, 0, self.across), (0, 0, 1))))


def load_stream(p: Any) -> PhiloxStream:
    """Returns the stream of the parameter struct; all threads of a warp call this together.

    philox_seed and philox_offset are values. When an address is not 0, the int64 in device memory there is the seed, or
    is added to the offset.
    """
    seed = _value_or_at(p.philox_seed, p.philox_seed_address)
    offset = _value_or_at(Int64(0), p.philox_offset_address) + p.philox_offset
    return PhiloxStream(seed, offset, p.dropout_threshold)


def keep_bits(stream: Any, coordinates: cute.Tensor, tile_origin: tuple, base: Int64, num_keys: Int32) -> cute.Tensor:
    """Returns a bit for each element of a thread's scores, set if the element is kept; `is_kept` reads it."""
    return PhiloxCalls(coordinates).bits(packed_bits(stream, coordinates, tile_origin, base, num_keys))


@cute.jit
def packed_bits(stream: Any, coordinates: cute.Tensor, tile_origin: tuple, base: Int64, num_keys: Int32):
    """Returns the bits of a thread's scores, packed in 32-bit words.

    coordinates: (row, column) of each element in the tile
    tile_origin: first query and first key of the tile, a multiple of 8
    base: number of the first word of this sequence and head, from stream.offset on

    Element (i, j) takes word stream.offset + base + i * num_keys + j; elements outside the matrix have bits too. All
    threads of a warp call this together.
    """
    calls = PhiloxCalls(coordinates)
    count = calls.down * calls.across
    query0, key0 = tile_origin
    row, column = coordinates[0, 0]
    is_odd, half = (column >> 1) & 1, (column >> 2) & 1
    start = stream.offset + base
    starts_blocks = starts_block(start, num_keys)
    start = start + cute.arch.mul_wide(query0 + row + EIGHT * is_odd, num_keys) + (key0 + column - 2 * is_odd)
    row_distance = cute.arch.mul_wide(Int32(calls.row_step), num_keys)
    held = cute.make_rmem_tensor(count, Uint32)
    for i in cutlass.range(count, unroll=1):
        at = start + cute.arch.mul_wide(i // calls.across * (calls.pairs * calls.row_step), num_keys)
        at = at + i % calls.across * (calls.groups * calls.column_step)
        found = _blocks_from(stream, calls, at, row_distance)
        if not starts_blocks:
            found = _shifted_bits(stream, calls, found, at, row_distance, half)
        # Registers have no run-time index: the words pass through the last place to their own.
        for k in cutlass.range_constexpr(count - 1):
            held[k] = held[k + 1]
        held[count - 1] = _exchanged(found, is_odd)
    return held


def starts_block(start: Int64, num_keys: Int32) -> Boolean:
    """Returns whether every row starts at a Philox block; `start` is the first word of the first row."""
    return ((Int32(start) | num_keys) & (BLOCK_WORDS - 1)) == 0


@cute.jit
def bits_of_16_words(stream: Any, at: Int64, aligned: Boolean):
    """Returns a bit for each of 16 words from word `at` on, the first lowest; the upper 16 bits are undefined.

    aligned: whether `at` is the first word of a block
    """
    found = Uint32(0)
    for call, words in enumerate(_blocks_of(stream, [at + call * BLOCK_WORDS for call in range(RUN_CALLS)])):
        found = _with_bits(stream, found, words, 4 * call)
    if not aligned:
        behind = _block(stream, at + RUN_CALLS * BLOCK_WORDS) << Uint32(4 * RUN_CALLS)
        found = (behind | found) >> (Uint32(at) & Uint32(BLOCK_WORDS - 1))
    return found


def keep_bits_of_tile(
    build: Build, p: Any, coordinates: cute.Tensor, tile_origin: tuple, at: tuple
) -> cute.Tensor | None:
    """Returns `keep_bits` of a tile of scores at (sequence, query head); None without dropout."""
    if not build.has("dropout"):
        return None
    of, head = at
    return keep_bits(load_stream(p), coordinates, tile_origin, seqlen_info.first_dropout_word(p, of, head), of.num_keys)


def is_kept(bits: cute.Tensor, row: int, column: int) -> Boolean:
    """Returns whether dropout keeps element (row, column) of the row view."""
    (_, pairs, _), (_, groups, _) = bits.shape
    block = row // 2 % pairs * groups + column // 2 % groups
    return (bits[row, column] & Uint32(1 << (4 * block + 2 * (row % 2) + column % 2))) != Uint32(0)


@cute.jit
def _value_or_at(value: Int64, address: Int64):
    if address != 0:
        value = cute.make_tensor(params.pointer(address, Int64, 8), cute.make_layout(1))[0]
    return value


def load_uniform_stream(p: Any) -> PhiloxStream:
    """Returns `load_stream` with the offset in uniform registers, too."""
    found = load_stream(p)
    low, high = _uniform(Uint32(found.offset)), _uniform(Uint32(Uint64(found.offset) >> 32))
    found.offset = Int64(Uint64(high) << 32 | Uint64(low))
    return found


def _uniform(value: Uint32) -> Uint32:
    """Returns a value that is the same in all threads in a uniform register.

    The 18 round keys derived from the seed then take no registers of the threads. ptxas knows the result of a warp
    reduction to be uniform, but not a value read from memory.
    """
    return Uint32(cute.arch.warp_redux_sync(value, "or"))


@cute.jit
def _blocks_from(stream: Any, calls: Any, at: Int64, row_distance: Int64):
    """Returns the bits of the blocks of a word of bits; the first block has word `at` of the stream."""
    counters = [Uint64(_place(calls, at, row_distance, pair * calls.groups)) >> 2 for pair in range(calls.pairs)]
    found = Uint32(0)
    if _is_upper_half_constant(calls, counters):
        found = _blocks_near(stream, calls, counters)
    else:
        for i in cutlass.range(calls.blocks, unroll=1):
            found = found | _block(stream, _place(calls, at, row_distance, i)) << Uint32(4 * i)
    return found


def _place(calls: PhiloxCalls, at: Int64, row_distance: Int64, block: Any) -> Int64:
    """Returns the stream word of a block: the first block has word `at`, pairs of rows are `row_distance` apart."""
    return at + row_distance * (block // calls.groups) + block % calls.groups * calls.column_step


def _is_upper_half_constant(calls: PhiloxCalls, counters: list[Uint64]) -> Boolean:
    """Returns whether no counter of a word of bits carries into its upper half; once in 2**34 words one does."""
    widest = (calls.groups - 1) * calls.column_step // BLOCK_WORDS
    result = Boolean(True)
    for counter in counters:
        result = result & (Uint32(counter) <= Uint32(ALL_BITS - widest))
    return result


def _blocks_near(stream: PhiloxStream, calls: PhiloxCalls, counters: list[Uint64]) -> Uint32:
    """Returns the bits of the blocks of a word of bits: each pair starts at its counter, upper halves are constant."""
    found = Uint32(0)
    for pair, counter in enumerate(counters):
        begun = _begin(stream, Uint32(counter >> 32))
        for group in range(calls.groups):
            block = _finish(stream, Uint32(counter) + Uint32(group * calls.column_step // BLOCK_WORDS), begun)
            found = _with_bits(stream, found, block, 4 * (pair * calls.groups + group))
    return found


@cute.jit
def _shifted_bits(stream: Any, calls: Any, found: Uint32, at: Int64, row_distance: Int64, half: Int32):
    """Returns, in each nibble, the four bits from the thread's first word on, when blocks start before that word.

    The next block after columns 4-7 is the first block of the run's next group; after the last group no thread has
    computed it yet.
    """
    skipped = Uint32(at) & Uint32(BLOCK_WORDS - 1)  # one for all rows of a word, a multiple of 16 apart
    behind = cute.arch.shuffle_sync_bfly(found, offset=2) >> Uint32(4 * half)
    ends = Uint32(sum(15 << 4 * (run * calls.run + calls.run - 1) for run in range(calls.runs)))
    ends = ends & Uint32(-half)
    behind = (behind & ~ends) | (_blocks_behind(stream, calls, at, row_distance, half) & ends)
    stay = (Uint32(15) >> skipped) * Uint32(EACH_NIBBLE)
    return ((found >> skipped) & stay) | ((behind << (Uint32(4) - skipped)) & ~stay)


@cute.jit
def _blocks_behind(stream: Any, calls: Any, at: Int64, row_distance: Int64, half: Int32):
    """Returns the blocks behind the runs; the two threads that compute blocks of one row compute every other one."""
    found = Uint32(0)
    for i in cutlass.range((calls.runs + 1) // 2, unroll=1):
        run = 2 * i + half if cutlass.const_expr(calls.runs > 1) else 0 * i
        last = run * calls.run + (calls.run - 1)
        place = _place(calls, at, row_distance, last) + (EIGHT - BLOCK_WORDS * half)
        found = found | _block(stream, place) << Uint32(4 * last)
    if cutlass.const_expr(calls.runs > 1):
        found = found | cute.arch.shuffle_sync_bfly(found, offset=2)
    return found


def _exchanged(found: Uint32, is_odd: Int32) -> Uint32:
    """Turns nibbles of four columns of one row into nibbles of the thread's two columns of both rows, lower first."""
    other = cute.arch.shuffle_sync_bfly(found, offset=1)
    mine = Uint32(LOW_PAIRS) << Uint32(2 * is_odd)
    left = Uint32(2 + 28 * is_odd)  # rotates the two wanted bits to the other half of the nibble
    other = (other << left) | (other >> (Uint32(32) - left))
    return (found & mine) | (other & ~mine)


def _block(stream: PhiloxStream, at: Int64) -> Uint32:
    """Returns the bits of the block that has word `at`."""
    (words,) = _blocks_of(stream, [at])
    return _with_bits(stream, Uint32(0), words, 0)


def _blocks_of(stream: PhiloxStream, places: list[Int64]) -> list[Words]:
    """Returns the blocks that have these words; the rounds of all blocks are interleaved."""
    counters = [Uint64(place) >> 2 for place in places]
    found = [_second_round(stream, Uint32(it), _begin(stream, Uint32(it >> 32))) for it in counters]
    for number in range(2, ROUNDS):
        found = [_next_round(stream, number, words) for words in found]
    return found


def _with_bits(stream: PhiloxStream, bits: Uint32, words: Words, first: int) -> Uint32:
    """Returns `bits` with the words' bits from bit `first` on, which were 0."""
    for i, word in enumerate(words):
        # A predicated addition; selecting the bit or 0 and adding it would be two instructions.
        bits = Uint32(cutlass.select_(word >= stream.threshold, bits + Uint32(1 << (first + i)), bits))
    return bits


def _begin(stream: PhiloxStream, upper: Uint32) -> tuple[Uint32, Uint32]:
    """Returns what the upper half of the counter contributes to rounds 1 and 2: a part of word 2 and all of word 3.

    The lower half mixes with it only in round 3, because the two other words of the counter are 0.
    """
    high, low = _product(0, upper ^ _round_key(stream, 0)[0])
    return high ^ _round_key(stream, 1)[1], low


def _finish(stream: PhiloxStream, lower: Uint32, begun: tuple[Uint32, Uint32]) -> Words:
    """Returns the block whose counter has this lower half, and the upper half that `begun` was computed from."""
    words = _second_round(stream, lower, begun)
    for number in range(2, ROUNDS):
        words = _next_round(stream, number, words)
    return words


def _second_round(stream: PhiloxStream, lower: Uint32, begun: tuple[Uint32, Uint32]) -> Words:
    """Returns the words after two rounds."""
    high, low = _product(0, lower)
    c2, c3 = low ^ begun[0], begun[1]
    high, c1 = _product(1, high ^ _round_key(stream, 0)[1])
    return high ^ _round_key(stream, 1)[0], c1, c2, c3


def _next_round(stream: PhiloxStream, number: int, words: Words) -> Words:
    c0, c1, c2, c3 = words
    key0, key1 = _round_key(stream, number)
    high0, low0 = _product(0, c0)
    high1, low1 = _product(1, c2)
    return high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0


def _round_key(stream: PhiloxStream, number: int) -> tuple[Uint32, Uint32]:
    low, high = (half + Uint32(number * step & ALL_BITS) for half, step in zip(stream.seed, KEY_STEPS, strict=True))
    return low, high


def _product(which: int, value: Uint32) -> tuple[Uint32, Uint32]:
    """Returns the (high, low) words of the product with a Philox multiplier, in one instruction."""
    product = cute.arch.mul_wide(value, Uint32(MULTIPLIERS[which]))
    return Uint32(product >> 32), Uint32(product)
