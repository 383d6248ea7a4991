"""Value transpose: tiles of V (keys x columns) of 8-bit numbers, stored again as V^T (columns x keys).

wgmma reads 8-bit operands K-major only, and the k of O = P V are the keys. A warp turns 32 keys x 16 columns at a time,
by ldmatrix.trans, which moves pairs of bytes, a byte permutation, and stmatrix. The order in V^T is:

    keys      of 16, byte 4 t + 2 b + e is key 8 b + 2 t + e: the order of a row of scores in registers
    columns   of 16, row g is column 2 g and row 8 + g is column 2 g + 1: eight rows of a store are neighbours
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.kernels.common import tile_copy
from cutlass_py_attn.kernels.sm90_e4m3.layout import FIRST_TRANSPOSING_WARP, TRANSPOSING_WARPS
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.smem import swizzle_bytes

VECTOR_BYTES = 16
KEYS, COLUMNS = 32, 16  # that a warp turns at a time
AT_ONCE = 2  # of these whose loads are in flight
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # of two words, for a byte permutation


@dataclass(frozen=True)
class SwizzledTile:
    """A tile of bytes in shared memory, as strips of columns that each have all rows.

    width: bytes of a strip's rows, and of its swizzle
    """

    rows: int
    width: int

    @staticmethod
    def create(rows: int, columns: int) -> "SwizzledTile":
        """Returns a tile as TMA writes and wgmma reads it."""
        return SwizzledTile(rows, swizzle_bytes(columns, 1))

    def strip_offset(self, column: int) -> int:
        """Returns the offset of the strip with `column` (bytes)."""
        return column // self.width * self.rows * self.width

    def vector(self, column: int) -> int:
        """Returns the number of the 16-byte vector of `column` in its strip."""
        return column % self.width // VECTOR_BYTES

    def swizzle(self, row: Int32) -> Int32:
        """Returns what is combined by exclusive or with the number of a vector in `row`."""
        rows_of_line = 128 // self.width
        return row // rows_of_line % (self.width // VECTOR_BYTES)


class ValueTranspose:
    """Stores tiles of V transposed; `TRANSPOSING_WARPS` warps call it, each for its share of the keys."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.keys = build.tile_n // TRANSPOSING_WARPS
        self.source = SwizzledTile.create(build.tile_n, build.columns_value)
        self.target = SwizzledTile.create(build.columns_value, build.tile_n)

    def warp(self) -> Int32:
        """Returns the number of this warp among those that transpose."""
        thread, _, _ = cute.arch.thread_idx()
        return cute.arch.make_warp_uniform(thread // WARP_THREADS) - FIRST_TRANSPOSING_WARP

    def store(self, source_stage: Int32, target_stage: Int32) -> None:
        """Stores this warp's keys of a stage of V in a stage of V^T. All threads of a warp call this."""
        build, source, target = self.build, self.source, self.target
        tile_bytes = build.tile_n * build.columns_value
        base = tile_copy.smem_base(build)
        read_from = Int32((base + build.buffer("value").offset).toint()) + source_stage * tile_bytes
        write_to = Int32((base + build.buffer("value_transposed").offset).toint()) + target_stage * tile_bytes
        lane, warp = cute.arch.lane_idx(), self.warp()
        matrix, row = lane // 8, lane % 8
        # Keys of a block are rows `matrix * 8 + row`, columns of its transpose rows `matrix % 2 * 8 + row`: rows of a
        # matrix have consecutive numbers from a multiple of 8 on, so that their swizzle is that of `row`.
        first_key = warp * self.keys
        read_from = read_from + (first_key + matrix * 8 + row) * source.width
        write_to = write_to + (matrix % 2 * 8 + row) * target.width
        key_vector = (first_key // VECTOR_BYTES + matrix // 2) ^ target.swizzle(row)
        value_swizzle = source.swizzle(row)
        blocks = [
            (key, column) for key in range(0, self.keys, KEYS) for column in range(0, build.columns_value, COLUMNS)
        ]
        for first in range(0, len(blocks), AT_ONCE):
            turned = []
            for key, column in blocks[first : first + AT_ONCE]:
                vector = (value_swizzle ^ source.vector(column)) * VECTOR_BYTES
                turned.append(load_pairs(read_from + (key * source.width + source.strip_offset(column)) + vector))
            for (key, column), words in zip(blocks[first : first + AT_ONCE], turned, strict=True):
                vector = (key_vector ^ (key // VECTOR_BYTES)) * VECTOR_BYTES
                store_matrices(write_to + column * target.width + vector, split_pairs(words))


def load_pairs(address: Int32) -> list[Int32]:
    """Loads four 8 x 8 matrices of 16-bit pairs transposed; `address`: a row of one of them, by lane."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    words: Any = cute.arch.inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[Int32(address)])
    return [Int32(word) for word in words]


def split_pairs(words: list[Int32]) -> list[Int32]:
    """Returns, for each two words of pairs of two columns, a word of either column."""
    found = []
    for low, high in zip(words[::2], words[1::2], strict=True):
        found += [Int32(cute.arch.prmt(low, high, pattern)) for pattern in (EVEN_BYTES, ODD_BYTES)]
    return found


def store_matrices(address: Int32, words: list[Int32]) -> None:
    """Stores four 8 x 8 matrices of 16-bit pairs; `address`: a row of one of them, by lane."""
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[Int32(address), *words])
