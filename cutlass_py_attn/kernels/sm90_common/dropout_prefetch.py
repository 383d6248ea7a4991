"""Dropout prefetch of the sm90 family: the mask bits of several tiles, computed while no GEMM is in flight.

The GEMMs occupy the register file's ports. Philox rounds that run beside them take twice as long, and slow them down as
much. Each consumer thread therefore computes the bits of its next tiles between GEMMs and stores its words in shared
memory. No other thread reads them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cutlass_py_attn.integers import smaller
from cutlass_py_attn.kernels.common import dropout, seqlen_info, tile_copy
from cutlass_py_attn.kernels.sm90_common.layout import dropout_tile_bytes
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import WORD_BYTES


class DropoutPrefetch:
    """Words of dropout mask bits in shared memory.

    threads: consumer threads, which hold scores.
    tiles: score tiles whose bits are computed at once.
    """

    def __init__(self, build: Build, threads: int) -> None:
        self.build, self.threads = build, threads
        self.words, rest = divmod(dropout_tile_bytes(build), threads * WORD_BYTES)
        assert rest == 0, f"tile {build.tile_m} x {build.tile_n}: its bits are not whole words of {threads} threads"
        self.tiles = build.buffer("dropout_bits").bytes // dropout_tile_bytes(build)

    def registers(self) -> cute.Tensor:
        """Returns uninitialised registers for a thread's words of one tile."""
        return cute.make_rmem_tensor(self.words, Uint32)

    def store_words(self, words: cute.Tensor, thread: Int32, tile: Int32) -> None:
        """Stores a thread's words of tile `tile` of those computed at once."""
        s_words = self._smem_words()
        for word in range(self.words):
            s_words[thread, word, tile] = words[word]

    def load_words(self, words: cute.Tensor, thread: Int32, tile: Int32) -> None:
        """Loads a thread's words of tile `tile` of those computed at once."""
        s_words = self._smem_words()
        for word in range(self.words):
            words[word] = s_words[thread, word, tile]

    def _smem_words(self) -> cute.Tensor:
        """Returns the words in shared memory, (threads, words, tiles)."""
        shape = self.threads, self.words, self.tiles
        return cute.make_tensor(tile_copy.smem_pointer(self.build, "dropout_bits", Uint32), cute.make_layout(shape))


class RowDropout(DropoutPrefetch):
    """Dropout mask bits of scores whose rows are queries, in the form of `dropout.keep_bits`."""

    @cute.jit
    def tile_bits(self, p: Any, work: Any, key_tile: Int32, coordinates: cute.Tensor, thread: Int32):
        """Returns a thread's mask bits of a key tile of a work tile. All threads of a warp call this.

        key_tile: descends from the last key tile of the work tile, one a call.
        coordinates: (row, column) of the thread's scores in the tile.
        """
        tile = (work.end - 1 - key_tile) % self.tiles
        if tile == 0:
            self.compute(p, work, key_tile, coordinates, thread)
        words = self.registers()
        self.load_words(words, thread, tile)
        return dropout.PhiloxCalls(coordinates).bits(words)

    @cute.jit
    def compute(self, p: Any, work: Any, key_tile: Int32, coordinates: cute.Tensor, thread: Int32):
        """Computes and stores the words of `key_tile` and the key tiles before it, at most `tiles`."""
        build, stream = self.build, dropout.load_stream(p)
        base = seqlen_info.first_dropout_word(p, work.seqlen, work.head)
        for tile in cutlass.range(smaller(key_tile + 1 - work.first, self.tiles), unroll=1):
            tile_origin = work.tile * build.tile_m, (key_tile - tile) * build.tile_n
            words = dropout.packed_bits(stream, coordinates, tile_origin, base, work.seqlen.num_keys)
            self.store_words(words, thread, tile)
