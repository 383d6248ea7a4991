"""Dropout: which elements of a thread's scores are kept, from the random stream of philox.py.

A Philox block is four words and serves four neighbouring columns of a row, but two threads hold those in an
accumulator. A quad holds 8 columns of two rows, which is four blocks: each thread makes one, and gives its
neighbour the half that it does not hold. Words become bits first, so that one shuffle moves eight blocks.

    thread of the quad   makes the block of      holds, of each row
    0                    row r,     columns 0-3  columns 0, 1
    1                    row r + 8, columns 0-3  columns 2, 3
    2                    row r,     columns 4-7  columns 4, 5
    3                    row r + 8, columns 4-7  columns 6, 7

Where rows do not start at a block (num_keys not a multiple of 4), a thread makes the block that its first
column lies in, and moves bits down from the block behind it, which the thread two further has made.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from cutlass_py_attn.parts import lengths, params
from cutlass_py_attn.parts.integers import largest_part
from cutlass_py_attn.philox import BLOCK_WORDS, KEY_STEPS, MULTIPLIERS, ROUNDS
from cutlass_py_attn.plan import Build

NIBBLES = 8  # of a word of bits; a nibble is the four bits of one block
EIGHT = 8  # columns of two blocks, which a quad holds together; also what two rows of a thread are apart
RUN_CALLS = 4  # Philox calls of `run_bits`, a round of all before the next
ALL_BITS = 0xFFFFFFFF
EACH_NIBBLE = 0x11111111
LOW_PAIRS = 0x33333333  # the lower two bits of each nibble

Words = tuple[Uint32, Uint32, Uint32, Uint32]


class Stream:
    """A random stream: its seed as (low, high) halves, the offset of its first word, the smallest word kept."""

    def __init__(self, seed: Int64, offset: Int64, threshold: Int32) -> None:
        self.seed = _uniform(Uint32(seed)), _uniform(Uint32(Uint64(seed) >> 32))
        self.offset = offset
        self.threshold = Uint32(threshold)


class Calls:
    """Which Philox calls a thread makes for its part of a tile, from the coordinates of a row view.

    A word of bits covers `pairs` of rows, `row_step` apart, by `groups` of 8 columns, `column_step` apart.
    Words go `across` the thread's columns first, then `down` its rows.
    """

    def __init__(self, where: cute.Tensor) -> None:
        (rows, pairs), (columns, groups) = where.shape
        assert (rows, columns, *where.layout((1, 1))) == (2, 2, EIGHT, 1), f"no row view of an accumulator: {where}"
        self.row_step = where.layout((2, 0))[0] if pairs > 1 else 0
        self.column_step = where.layout((0, 2))[1] if groups > 1 else EIGHT
        assert self.row_step % BLOCK_WORDS == self.column_step % EIGHT == 0, f"rows or columns are shared: {where}"
        self.groups = largest_part(groups, NIBBLES)
        self.pairs = largest_part(pairs, NIBBLES // self.groups)
        self.down, self.across = pairs // self.pairs, groups // self.groups
        self.blocks = self.pairs * self.groups
        # A run is what lies without a gap in the stream.
        self.run = self.groups if self.column_step == EIGHT else 1
        self.runs = self.blocks // self.run

    def bits(self, held: cute.Tensor) -> cute.Tensor:
        """The words of bits as a (rows x columns) tensor: each element is the word with that element's bit."""
        shape = ((2, self.pairs, self.down), (2, self.groups, self.across))
        return cute.make_tensor(held.iterator, cute.make_layout(shape, stride=((0, 0, self.across), (0, 0, 1))))


def stream(p: Any) -> Stream:
    """The stream that the struct's fields name; all threads of a warp call this together.

    philox_seed and philox_offset are values. Where an address is not 0, the int64 in device memory there is the
    seed, or is added to the offset.
    """
    seed = _value_or_at(p.philox_seed, p.philox_seed_address)
    offset = _value_or_at(Int64(0), p.philox_offset_address) + p.philox_offset
    return Stream(seed, offset, p.dropout_threshold)


def keep_bits(stream: Any, where: cute.Tensor, corner: tuple, base: Int64, num_keys: Int32) -> cute.Tensor:
    """A bit for each element of a thread's scores, set where the element is kept; for `keep`."""
    return Calls(where).bits(words(stream, where, corner, base, num_keys))


@cute.jit
def words(stream: Any, where: cute.Tensor, corner: tuple, base: Int64, num_keys: Int32):
    """The words that hold the bits of a thread's scores.

    `where` holds each element's (row, column) in the tile, `corner` the tile's first query and key, a multiple
    of 8. Element (i, j) takes word stream.offset + base + i * num_keys + j. All threads of a warp call this
    together. Elements outside the matrix get bits too.
    """
    calls = Calls(where)
    count = calls.down * calls.across
    query0, key0 = corner
    row, column = where[0, 0]
    is_odd, half = (column >> 1) & 1, (column >> 2) & 1
    start = stream.offset + base
    starts_blocks = is_aligned(start, num_keys)
    start = start + cute.arch.mul_wide(query0 + row + EIGHT * is_odd, num_keys) + (key0 + column - 2 * is_odd)
    row_distance = cute.arch.mul_wide(Int32(calls.row_step), num_keys)
    held = cute.make_rmem_tensor(count, Uint32)
    for i in cutlass.range(count, unroll=1):
        at = start + cute.arch.mul_wide(i // calls.across * (calls.pairs * calls.row_step), num_keys)
        at = at + i % calls.across * (calls.groups * calls.column_step)
        found = _blocks_from(stream, calls, at, row_distance)
        if not starts_blocks:
            found = _moved_down(stream, calls, found, at, row_distance, half)
        # Registers have no run-time index: the words pass through the last place to their own.
        for k in cutlass.range_constexpr(count - 1):
            held[k] = held[k + 1]
        held[count - 1] = _exchanged(found, is_odd)
    return held


def is_aligned(start: Int64, num_keys: Int32) -> Boolean:
    """Whether rows start at a block, the first with word `start`."""
    return ((Int32(start) | num_keys) & (BLOCK_WORDS - 1)) == 0


@cute.jit
def run_bits(stream: Any, at: Int64, aligned: Boolean):
    """A bit for each of 16 words of the stream from word `at` on, the first lowest; above them are bits of others.

    aligned: `at` is the first word of a block.
    """
    found = Uint32(0)
    for call, words in enumerate(_blocks_of(stream, [at + call * BLOCK_WORDS for call in range(RUN_CALLS)])):
        found = _with_bits(stream, found, words, 4 * call)
    if not aligned:
        behind = _block(stream, at + RUN_CALLS * BLOCK_WORDS) << Uint32(4 * RUN_CALLS)
        found = (behind | found) >> (Uint32(at) & Uint32(BLOCK_WORDS - 1))
    return found


def kept(build: Build, p: Any, where: cute.Tensor, corner: tuple, at: tuple) -> cute.Tensor | None:
    """`keep_bits` of a tile of scores at (sequence, query head); None without dropout."""
    if not build.has("dropout"):
        return None
    of, head = at
    return keep_bits(stream(p), where, corner, lengths.first_word(p, of, head), of.num_keys)


def keep(bits: cute.Tensor, row: int, column: int) -> Boolean:
    """Whether element (row, column) of the row view is kept."""
    (_, pairs, _), (_, groups, _) = bits.shape
    block = row // 2 % pairs * groups + column // 2 % groups
    return (bits[row, column] & Uint32(1 << (4 * block + 2 * (row % 2) + column % 2))) != Uint32(0)


@cute.jit
def _value_or_at(value: Int64, address: Int64):
    if address != 0:
        value = cute.make_tensor(params.pointer(address, Int64, 8), cute.make_layout(1))[0]
    return value


def uniform_stream(p: Any) -> Stream:
    """`stream` with the offset in uniform registers, too."""
    found = stream(p)
    low, high = _uniform(Uint32(found.offset)), _uniform(Uint32(Uint64(found.offset) >> 32))
    found.offset = Int64(Uint64(high) << 32 | Uint64(low))
    return found


def _uniform(value: Uint32) -> Uint32:
    """The value, which is the same in all threads, in a uniform register: there the 18 round keys cost no others.

    What a reduction gives is uniform to ptxas; what was read from memory may not be.
    """
    return Uint32(cute.arch.warp_redux_sync(value, "or"))


@cute.jit
def _blocks_from(stream: Any, calls: Any, at: Int64, row_distance: Int64):
    """Bits of a word's blocks, the first of which has word `at` of the stream."""
    counters = [Uint64(_place(calls, at, row_distance, pair * calls.groups)) >> 2 for pair in range(calls.pairs)]
    found = Uint32(0)
    if _is_upper_half_constant(calls, counters):
        found = _blocks_near(stream, calls, counters)
    else:
        for i in cutlass.range(calls.blocks, unroll=1):
            found = found | _block(stream, _place(calls, at, row_distance, i)) << Uint32(4 * i)
    return found


def _place(calls: Calls, at: Int64, row_distance: Int64, block: Any) -> Int64:
    """Word that a block of a word of bits is made for: the first has word `at`, rows of pairs lie apart so."""
    return at + row_distance * (block // calls.groups) + block % calls.groups * calls.column_step


def _is_upper_half_constant(calls: Calls, counters: list[Uint64]) -> Boolean:
    """Whether the upper halves of the pairs' counters stay as they are; once in 2**34 words they do not."""
    widest = (calls.groups - 1) * calls.column_step // BLOCK_WORDS
    result = Boolean(True)
    for counter in counters:
        result = result & (Uint32(counter) <= Uint32(ALL_BITS - widest))
    return result


def _blocks_near(stream: Stream, calls: Calls, counters: list[Uint64]) -> Uint32:
    """Bits of a word's blocks, where each pair starts at its counter and the upper halves are constant."""
    found = Uint32(0)
    for pair, counter in enumerate(counters):
        begun = _begin(stream, Uint32(counter >> 32))
        for group in range(calls.groups):
            block = _finish(stream, Uint32(counter) + Uint32(group * calls.column_step // BLOCK_WORDS), begun)
            found = _with_bits(stream, found, block, 4 * (pair * calls.groups + group))
    return found


@cute.jit
def _moved_down(stream: Any, calls: Any, found: Uint32, at: Int64, row_distance: Int64, half: Int32):
    """`found`, whose blocks start before their words, as the four bits from the word on in each nibble.

    Behind columns 4-7 lies the first block of the run's next group, or behind its last a block nobody has made.
    """
    skipped = Uint32(at) & Uint32(BLOCK_WORDS - 1)  # the same in all rows of a word: they are a multiple of 16 apart
    behind = cute.arch.shuffle_sync_bfly(found, offset=2) >> Uint32(4 * half)
    ends = Uint32(sum(15 << 4 * (run * calls.run + calls.run - 1) for run in range(calls.runs)))
    ends = ends & Uint32(-half)
    behind = (behind & ~ends) | (_blocks_behind(stream, calls, at, row_distance, half) & ends)
    stay = (Uint32(15) >> skipped) * Uint32(EACH_NIBBLE)
    return ((found >> skipped) & stay) | ((behind << (Uint32(4) - skipped)) & ~stay)


@cute.jit
def _blocks_behind(stream: Any, calls: Any, at: Int64, row_distance: Int64, half: Int32):
    """The blocks behind the runs; the two threads that make blocks of one row take turns."""
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
    """Nibbles of one row's four columns become nibbles of this thread's two columns of both rows, lower row first."""
    other = cute.arch.shuffle_sync_bfly(found, offset=1)
    mine = Uint32(LOW_PAIRS) << Uint32(2 * is_odd)
    left = Uint32(2 + 28 * is_odd)  # rotates the two wanted bits to the other half of the nibble
    other = (other << left) | (other >> (Uint32(32) - left))
    return (found & mine) | (other & ~mine)


def _block(stream: Stream, at: Int64) -> Uint32:
    """Bits of the block that has word `at`."""
    (words,) = _blocks_of(stream, [at])
    return _with_bits(stream, Uint32(0), words, 0)


def _blocks_of(stream: Stream, places: list[Int64]) -> list[Words]:
    """The blocks that have these words; a round of all, then the next."""
    counters = [Uint64(place) >> 2 for place in places]
    found = [_second_round(stream, Uint32(it), _begin(stream, Uint32(it >> 32))) for it in counters]
    for number in range(2, ROUNDS):
        found = [_next_round(stream, number, words) for words in found]
    return found


def _with_bits(stream: Stream, bits: Uint32, words: Words, first: int) -> Uint32:
    """`bits` with the words' bits from bit `first` on, which were 0."""
    for i, word in enumerate(words):
        # An addition under a predicate: as a choice between the bit and 0 it would be two instructions.
        bits = Uint32(cutlass.select_(word >= stream.threshold, bits + Uint32(1 << (first + i)), bits))
    return bits


def _begin(stream: Stream, upper: Uint32) -> tuple[Uint32, Uint32]:
    """What the upper half of the counter does in rounds 1 and 2: a part of word 2 and all of word 3.

    The lower half meets it only in round 3, because the two other words of the counter are 0.
    """
    high, low = _product(0, upper ^ _round_key(stream, 0)[0])
    return high ^ _round_key(stream, 1)[1], low


def _finish(stream: Stream, lower: Uint32, begun: tuple[Uint32, Uint32]) -> Words:
    """The block whose counter has this lower half, and the upper half of `begun`."""
    words = _second_round(stream, lower, begun)
    for number in range(2, ROUNDS):
        words = _next_round(stream, number, words)
    return words


def _second_round(stream: Stream, lower: Uint32, begun: tuple[Uint32, Uint32]) -> Words:
    """The words behind two rounds."""
    high, low = _product(0, lower)
    c2, c3 = low ^ begun[0], begun[1]
    high, c1 = _product(1, high ^ _round_key(stream, 0)[1])
    return high ^ _round_key(stream, 1)[0], c1, c2, c3


def _next_round(stream: Stream, number: int, words: Words) -> Words:
    c0, c1, c2, c3 = words
    key0, key1 = _round_key(stream, number)
    high0, low0 = _product(0, c0)
    high1, low1 = _product(1, c2)
    return high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0


def _round_key(stream: Stream, number: int) -> tuple[Uint32, Uint32]:
    low, high = (half + Uint32(number * step & ALL_BITS) for half, step in zip(stream.seed, KEY_STEPS, strict=True))
    return low, high


def _product(which: int, value: Uint32) -> tuple[Uint32, Uint32]:
    """(high, low) word of the product with a multiplier: one instruction."""
    product = cute.arch.mul_wide(value, Uint32(MULTIPLIERS[which]))
    return Uint32(product >> 32), Uint32(product)
