"""Tiles of the split-D and decode kernels: at run-time offsets of shared memory, and column slices of tiles."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.layout import copy_groups
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, Operands
from cutlass_py_attn.kernels.common.tile_copy import GmemTile
from cutlass_py_attn.launch.build import COLUMN_MULTIPLE, Build
from cutlass_py_attn.launch.smem import row_elements

TILE_ALIGNMENT_BYTES = 512  # tiles start at a multiple of it: the swizzle of narrow tiles repeats after 512 bytes


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor: (batch, head, first row), and how many rows exist from there."""

    coordinates: tuple[Any, Any, Any]
    count: Any

    def advance(self, rows: Any) -> "Rows":
        """Returns the rows that start `rows` rows further."""
        batch, head, row = self.coordinates
        return Rows((batch, head, row + rows), self.count - rows)


def smem_tile_at(offset: Any, build: Build, dtype: Any, rows: int, columns: int) -> cute.Tensor:
    """Returns a tile at `offset` bytes of the block's shared memory; the offset may be a run-time value."""
    if not isinstance(offset, int):
        offset = cute.assume(offset, divby=TILE_ALIGNMENT_BYTES)
    return tile_copy.smem_tile(tile_copy.smem_base(build), offset, dtype, rows, columns)


def smem_columns_at(offset: Any, build: Build, rows: int, tile_columns: int, columns: tuple[Any, int]) -> cute.Tensor:
    """Returns columns of the tile at `offset`, which has `tile_columns` of them.

    columns: (first, count). 16-bit slices must have the swizzle of the tile: its column blocks are stored one after
    the other, each with all rows.
    """
    first, count = columns
    dtype = params.DTYPES[build.dtype]
    if dtype is not Float32:
        return smem_tile_at(offset + first * (rows * build.item_bytes), build, dtype, rows, count)
    tile = smem_tile_at(offset, build, dtype, rows, tile_columns)
    start = tile.iterator + cute.assume(Int32(first), divby=COLUMN_MULTIPLE)
    return cute.make_tensor(start, cute.make_layout((rows, count), stride=(row_elements(build.dtype, tile_columns), 1)))


def column_slice(tile: GmemTile, column: Any, width: int) -> GmemTile:
    """Returns `width` columns of a tile in global memory from `column` on, a multiple of `width`.

    The slice has fewer columns where the rows of the tile end.
    """
    item_bytes = tile.start.dtype.width // 8
    if isinstance(tile.column_stride, int):
        offset = params.assume_multiple(Int32(column), tile.vector_bytes // item_bytes)
    else:
        offset = Int64(column) * tile.column_stride
    divides = isinstance(tile.columns, int) and tile.columns % width == 0
    columns = width if divides else tile.columns - column
    return replace(tile, start=tile.start + offset, columns=columns)


def copy_rows_g2s(thread: Int32, build: Build, source: GmemTile, offset: Any, shape: tuple[int, int]) -> None:
    """Starts copying a tile of `shape`, which may have fewer rows than the block copies at once.

    Groups of threads then copy column slices side by side.
    """
    rows, columns = shape
    groups = copy_groups(build, rows, columns)
    threads, width = build.threads // groups, columns // groups
    first = thread // threads * width
    tile = smem_columns_at(offset, build, rows, columns, (first, width))
    tile_copy.copy_g2s(thread % threads, threads, column_slice(source, first, width), tile)


@dataclass(frozen=True)
class OperandSlice:
    """View of an MMA operand that starts at k-step `first_k`: a GEMM over a part of k reads a tile with all of k.

    A column slice of the tile does not work, because a part may be narrower than the 64 columns of the swizzle.
    """

    operand: Any
    first_k: int

    def fragment(self, k: int) -> cute.Tensor:
        """Returns the registers of k-step `k` of the slice."""
        return self.operand.fragment(self.first_k + k)


class AccumulatingMma(MmaSync):
    """A float32 GEMM that adds to its accumulator inside the tensor cores, unlike MmaSync, which sums apart from it."""

    def issue(self, accumulator: cute.Tensor, operands: Operands) -> None:
        """Computes C += A B over all of k."""
        self._multiply_all(accumulator, operands)
