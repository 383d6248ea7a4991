"""Streamed: what the streamed forward and backward share: tiles at run-time places, parts of rows."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.gemm.mma_sync import MmaSync, Operands
from cutlass_py_attn.parts import moves, params
from cutlass_py_attn.parts.moves import Source
from cutlass_py_attn.plan import COLUMN_MULTIPLE, Build
from cutlass_py_attn.shared_memory import row_elements
from cutlass_py_attn.streams import copies_side_by_side

PLACE_BYTES = 512  # every tile starts at a multiple of it, after which the swizzle of narrow tiles repeats


def tile_at(offset: Any, dtype: Any, rows: int, columns: int) -> cute.Tensor:
    """A tile at `offset` bytes, a number known when it runs, of the block's shared memory."""
    if not isinstance(offset, int):
        offset = cute.assume(offset, divby=PLACE_BYTES)
    base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
    return moves.shared_tile(base, offset, dtype, rows, columns)


def part_at(offset: Any, build: Build, rows: int, whole: int, columns: tuple[Any, int]) -> cute.Tensor:
    """`columns` (first, width) of a tile of `whole` columns; in 16 bits both must be laid out in one way.

    The blocks of columns that the swizzle works on lie one behind the other, each with all rows.
    """
    first, width = columns
    dtype = params.DTYPES[build.dtype]
    if dtype is not Float32:
        return tile_at(offset + first * (rows * build.item_bytes), dtype, rows, width)
    start = tile_at(offset, dtype, rows, whole).iterator + cute.assume(Int32(first), divby=COLUMN_MULTIPLE)
    return cute.make_tensor(start, cute.make_layout((rows, width), stride=(row_elements(build.dtype, whole), 1)))


def from_column(source: Source, column: Any, width: int) -> Source:
    """`width` columns of the source's rows from `column` on, a multiple of `width`; fewer where a row ends."""
    item_bytes = source.start.dtype.width // 8
    if isinstance(source.column, int):
        offset = params.multiple(Int32(column), source.access // item_bytes)
    else:
        offset = Int64(column) * source.column
    whole = isinstance(source.columns, int) and source.columns % width == 0
    columns = width if whole else source.columns - column
    return Source(source.start + offset, source.row, source.rows, columns, source.access, source.column)


def load_rows(thread: Int32, build: Build, source: Source, offset: Any, shape: tuple[int, int]) -> None:
    """Start copying a tile of `shape` that may have fewer rows than all threads copy at once."""
    rows, columns = shape
    groups = copies_side_by_side(build, rows, columns)
    threads, width = build.threads // groups, columns // groups
    first = thread // threads * width
    tile = part_at(offset, build, rows, columns, (first, width))
    moves.load_tile(thread % threads, threads, from_column(source, first, width), tile)


class Later:
    """An operand from k step `first` on: a product over a part of k reads a tile that holds all of it.

    A view of the tile's columns would not do: the swizzle of 64 columns reaches across a part of them.
    """

    def __init__(self, operand: Any, first: int) -> None:
        self.operand, self.first = operand, first

    def fetch(self, k: int) -> cute.Tensor:
        """Registers of k step `k`."""
        return self.operand.fetch(self.first + k)


class Chain(MmaSync):
    """A product that goes on where the one before it ended, inside the tensor cores."""

    def issue(self, accumulator: cute.Tensor, parts: Operands) -> None:
        """C += A B over all of k."""
        for k in range(self.spec.k // self.spec.instruction[2]):
            self._multiply(accumulator, parts.a.fetch(k), parts.b.fetch(k))
