"""Bits ahead: dropout's bits of several tiles of the Hopper family, drawn at once while no product runs.

Products keep the ports of the registers busy: a thread that draws beside them takes twice as long, and they do. So each
thread that holds scores draws what it needs for its next tiles without products in between, and leaves its words in
shared memory, where nobody else reads them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cutlass_py_attn.parts import dropout, lengths, moves
from cutlass_py_attn.parts.integers import smaller
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import WORD_BYTES
from cutlass_py_attn.shared_memory import kept_bytes


class BitsAhead:
    """Words of bits of one Build. threads: those that hold scores; tiles: how many are drawn at once."""

    def __init__(self, build: Build, threads: int) -> None:
        self.build, self.threads = build, threads
        self.words, rest = divmod(kept_bytes(build), threads * WORD_BYTES)
        assert rest == 0, f"{build.tile_m} x {build.tile_n} bits are no whole words of {threads} threads"
        self.tiles = build.buffer("kept").bytes // kept_bytes(build)

    def registers(self) -> cute.Tensor:
        """A thread's words of one tile."""
        return cute.make_rmem_tensor(self.words, Uint32)

    def put(self, words: cute.Tensor, thread: Int32, number: Int32) -> None:
        """Leave a thread's words of tile `number` of those that are drawn at once."""
        ring = self._ring()
        for word in range(self.words):
            ring[thread, word, number] = words[word]

    def take(self, words: cute.Tensor, thread: Int32, number: Int32) -> None:
        """Read them."""
        ring = self._ring()
        for word in range(self.words):
            words[word] = ring[thread, word, number]

    def _ring(self) -> cute.Tensor:
        """[thread, word, tile]."""
        shape = self.threads, self.words, self.tiles
        return cute.make_tensor(moves.shared_pointer(self.build, "kept", Uint32), cute.make_layout(shape))


class RowBits(BitsAhead):
    """The bits of scores whose rows are queries, as `dropout.keep` wants them."""

    @cute.jit
    def of_tile(self, p: Any, item: Any, key_tile: Int32, where: cute.Tensor, thread: Int32):
        """A thread's bits of a key tile of an item; key tiles are asked for from the last to the first. `where` holds
        each element's (row, column) in the tile. All threads of a warp call this together."""
        number = (item.end - 1 - key_tile) % self.tiles
        if number == 0:
            self.draw(p, item, key_tile, where, thread)
        words = self.registers()
        self.take(words, thread, number)
        return dropout.Calls(where).bits(words)

    @cute.jit
    def draw(self, p: Any, item: Any, key_tile: Int32, where: cute.Tensor, thread: Int32):
        """The tiles from `key_tile` down, as many as there is room for."""
        build, stream, base = self.build, dropout.stream(p), lengths.first_word(p, item.of, item.head)
        for number in cutlass.range(smaller(key_tile + 1 - item.first, self.tiles), unroll=1):
            corner = item.tile * build.tile_m, (key_tile - number) * build.tile_n
            self.put(dropout.words(stream, where, corner, base, item.of.num_keys), thread, number)
