"""Paged copy: rows of keys or values from pages to shared memory by cp.async, for pages of any size.

A warp's lanes hold the entries of the table for the rows that its team copies. If a page has at least BLOCK_ROWS rows,
each block of so many rows is in one page, and its lanes have the same entry. If not, lane l has the entry of row l.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cutlass_py_attn.kernels.common import paging, params, tile_copy
from cutlass_py_attn.kernels.common.paging import PageRow
from cutlass_py_attn.kernels.common.tile_copy import GmemTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.smem import threads_of_row

BLOCK_ROWS = 16


@dataclass(frozen=True)
class PagedRows:
    """Rows [key0, num_keys) of a sequence and a key head that a team copies.

    entry: this lane's entry of the table, see `PagedCopy.entry`, clamped to the pool.
    """

    head_key: Int32
    key0: Int32
    num_keys: Int32
    entry: Int32


class PagedCopy:
    """Copies of one Build: `rows` rows by the `threads` threads of a team; rows is at most the lanes of a warp."""

    def __init__(self, build: Build, rows: int, threads: int) -> None:
        assert rows <= WARP_THREADS, f"rows = {rows}: a lane has the entry of one row"
        assert rows % BLOCK_ROWS == 0, f"rows = {rows}: must be whole blocks of {BLOCK_ROWS} rows"
        self.build, self.num_rows, self.threads = build, rows, threads

    def entry(self, p: Any, row: PageRow, shift: Int32, key0: Int32, end: Int32, lane: Int32) -> Int32:
        """Starts loading this lane's entry for rows from key0 on; it may be anything if its row is not before `end`.

        shift: log2 of the page size. The entry is not clamped: see `paging.start_entry`.
        """
        row_of_lane = lane % self.num_rows
        of_block = row_of_lane // BLOCK_ROWS * BLOCK_ROWS
        key = key0 + cutlass.select_(p.page_size >= BLOCK_ROWS, of_block, row_of_lane)
        return paging.start_entry(p, row, key >> shift, key < end)

    @cute.jit
    def copy(self, p: Any, name: cutlass.Constexpr, member: Int32, rows: Any, columns: cutlass.Constexpr, tile: Any):
        """Starts copying `columns` columns of the rows into a tile; rows behind the last key become zero."""
        if p.page_size >= BLOCK_ROWS:
            self.copy_blocks(p, name, member, rows, columns, tile)
        else:
            self.copy_single_rows(p, name, member, rows, columns, tile)

    def copy_blocks(self, p: Any, name: str, member: Int32, rows: PagedRows, columns: int, tile: Any) -> None:
        """Does `copy` for blocks of rows of one page each."""
        blocks = self.num_rows // BLOCK_ROWS
        for block in range(blocks):
            page = cute.arch.shuffle_sync(rows.entry, block * BLOCK_ROWS) if blocks > 1 else rows.entry
            key = rows.key0 + block * BLOCK_ROWS
            start = self.pointer(p, name, paging.offset(p, name, page, key & (p.page_size - 1), rows.head_key))
            row_stride = params.stride(p, name, "row")
            source = GmemTile(start, row_stride, rows.num_keys - key, columns, self.build.vector_bytes)
            part = cute.local_tile(tile, (BLOCK_ROWS, cute.size(tile, mode=[1])), (block, 0)) if blocks > 1 else tile
            tile_copy.copy_g2s(member, self.threads, source, part)

    def pointer(self, p: Any, name: str, offset: Any) -> cute.Pointer:
        """Returns the pointer to a row of a pool."""
        build = self.build
        base = params.pointer(getattr(p, name), params.DTYPES[build.dtype], build.vector_bytes)
        return base + params.assume_multiple(offset, build.vector_bytes // build.item_bytes)

    @cute.jit
    def copy_single_rows(
        self, p: Any, name: cutlass.Constexpr, member: Int32, rows: Any, columns: cutlass.Constexpr, tile: Any
    ):
        """Does `copy` for rows of several pages: the lane that holds the entry of a row passes it on."""
        build = self.build
        dtype, vector_bytes = params.DTYPES[build.dtype], build.vector_bytes
        vector = vector_bytes // build.item_bytes
        mode = LoadCacheMode.GLOBAL if cutlass.const_expr(vector_bytes == 16) else LoadCacheMode.ALWAYS
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), dtype, num_bits_per_copy=vector_bytes * 8)
        chunk = threads_of_row(cute.size(tile, mode=[1]) * build.item_bytes, vector_bytes)
        lanes = cute.make_layout((self.threads // chunk, chunk), stride=(chunk, 1))
        copy = cute.make_tiled_copy_tv(atom, lanes, cute.make_layout((1, vector))).get_slice(member)
        part = copy.partition_D(tile)
        shape = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
        coordinates = copy.partition_S(cute.make_identity_tensor(shape))
        for i in cutlass.range_constexpr(cute.size(part, mode=[1])):
            row = coordinates[(0, 0), i, 0][0]
            page = cute.arch.shuffle_sync(rows.entry, row)
            key = rows.key0 + row
            offset = paging.offset(p, name, page, key & (p.page_size - 1), rows.head_key)
            for j in cutlass.range_constexpr(cute.size(part, mode=[2])):
                column = coordinates[(0, 0), i, j][1]
                in_bounds = cute.make_rmem_tensor(cute.make_layout(1), Boolean)
                in_bounds[0] = (key < rows.num_keys) & (column < columns)
                source = self.pointer(p, name, offset + column)
                values = cute.make_tensor(source, cute.make_layout(((vector, 1),)))
                cute.copy(atom, values, part[None, i, j], pred=in_bounds)
