"""Copies of tiles of key and value from pages to shared memory with cp.async, for pages of any size."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cutlass_py_attn.kernels.common import paging, params, tile_copy
from cutlass_py_attn.kernels.common.paging import PageRow
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.launch.build import Build


@dataclass(frozen=True)
class PagedTile:
    """A tile of key or value of one sequence and head, in pages.

    start: pointer to the first column of row 0 of page 0
    page_stride, row_stride: elements from one page, or row of a page, to the next
    pages: the table's entries of the sequence
    first_row: row of the sequence where the tile starts
    rows, columns: how many exist from `first_row` and `start` on; the tile may end before or after them
    vector_bytes: alignment of the rows
    """

    start: cute.Pointer
    page_stride: Any
    row_stride: Any
    pages: PageRow
    first_row: Any
    rows: Any
    columns: Any
    vector_bytes: int


def paged_tile(
    build: Build, p: Any, name: str, seqlen: SeqlenInfo, head: Int32, first_row: Int32, columns: int, dtype: Any = None
) -> PagedTile:
    """Returns the tile of key or value `name` that starts at row `first_row` of a sequence.

    dtype: of its elements, None for that of the build.
    """
    dtype = DTYPES[build.dtype] if dtype is None else dtype
    pool = params.pointer(getattr(p, name), dtype, build.vector_bytes)
    vector = build.vector_bytes * 8 // dtype.width
    start = pool + params.assume_multiple(Int64(head) * params.stride(p, name, "head"), vector)
    strides = params.stride(p, name, "page"), params.stride(p, name, "row")
    pages, rows_left = paging.page_row(p, seqlen.index), seqlen.num_keys - first_row
    return PagedTile(start, *strides, pages, first_row, rows_left, columns, build.vector_bytes)


def column_slice(tile: PagedTile, column: Any, width: int) -> PagedTile:
    """Returns `width` columns of a tile from `column` on, a multiple of `width`; fewer where its rows end."""
    item_bytes = tile.start.dtype.width // 8
    start = tile.start + params.assume_multiple(Int32(column), tile.vector_bytes // item_bytes)
    return replace(tile, start=start, columns=width if tile.columns % width == 0 else tile.columns - column)


def copy_g2s(p: Any, thread: Int32, threads: int, source: PagedTile, tile: cute.Tensor) -> None:
    """Starts copying a tile to shared memory, without commit. Elements outside the source become zero."""
    if source.vector_bytes * 8 < 32:
        _load_elements(p, thread, threads, source, tile)
    else:
        _load_vectors(p, thread, threads, source, tile)


@cute.jit
def prefetch_entry(p: Any, seqlen: Any, row: Int32):
    """Starts loading the table's entry of a row into L1, so that `copy_g2s` of that row waits less."""
    if (row >= 0) & (row < seqlen.num_keys):  # only such entries are used
        number = paging.page_row(p, seqlen.index).start + (row >> paging.page_shift(p))
        entry = params.pointer(p.page_table, Int32, 4) + number
        cute.arch.inline_ptx("prefetch.global.L1 [{$r0}];", read_only_args=[entry])


@cute.jit
def _load_vectors(p: Any, thread: Int32, threads: cutlass.Constexpr, source: Any, tile: cute.Tensor):
    """Loads with cp.async, `vector_bytes` at a time; each thread reads the table's entries of its own rows."""
    dtype, columns = tile.element_type, cute.size(tile, mode=[1])
    vector = source.vector_bytes * 8 // dtype.width
    atom = tile_copy.cp_async_atom(dtype, source.vector_bytes)
    copy = tile_copy.tiled_copy(atom, threads, columns, dtype, source.vector_bytes).get_slice(thread)
    tile_part = copy.partition_D(tile)
    coordinates = copy.partition_S(cute.make_identity_tensor((cute.size(tile, mode=[0]), columns)))
    column_steps = cute.size(tile_part, mode=[2])
    # The columns of a thread are equally far apart, and all of them are in the same rows.
    layout = cute.make_layout(((vector, 1), column_steps), stride=((1, 0), columns // column_steps))
    in_bounds = cute.make_rmem_tensor(cute.make_layout((1, column_steps)), Boolean)
    for i in cutlass.range_constexpr(cute.size(tile_part, mode=[1])):
        row, column = coordinates[(0, 0), i, 0]
        offset = row_offset(p, source, row) + column
        for j in cutlass.range_constexpr(column_steps):
            in_bounds[0, j] = row < source.rows
            if cutlass.const_expr(not (isinstance(source.columns, int) and source.columns >= columns)):
                in_bounds[0, j] = in_bounds[0, j] & (coordinates[(0, 0), i, j][1] < source.columns)
        part = cute.make_tensor(source.start + params.assume_multiple(offset, vector), layout)
        cute.copy(atom, part, tile_part[None, i, None], pred=in_bounds)


@cute.jit
def _load_elements(p: Any, thread: Int32, threads: cutlass.Constexpr, source: Any, tile: cute.Tensor):
    """Loads through registers, one element at a time, because cp.async copies at least four bytes."""
    rows, columns = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    for step in cutlass.range(rows * columns // threads, unroll=tile_copy.ELEMENT_UNROLL):
        index = step * threads + thread
        row, column = index // columns, index % columns
        value = tile.element_type(0.0)
        if (row < source.rows) & (column < source.columns):
            value = cute.make_tensor(source.start + (row_offset(p, source, row) + column), tile_copy.ONE)[0]
        tile[row, column] = value


@cute.jit
def row_offset(p: Any, source: Any, row: Int32):
    """Returns the offset of a tile's row from `start` (elements); 0 for a row outside the source."""
    offset = Int64(0)
    if row < source.rows:
        key = source.first_row + row
        page = paging.entry(p, source.pages, key >> paging.page_shift(p))
        offset = Int64(page) * source.page_stride + Int64(key & (p.page_size - 1)) * source.row_stride
    return offset
