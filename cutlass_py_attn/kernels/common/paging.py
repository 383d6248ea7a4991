"""Paging: how kernels find the keys of a sequence in the pages of a pool.

Key j of a sequence is row j % page_size of page `entry(..., j // page_size)`. The table, its bounds and the lengths are
in device memory, where no host checks them: what is read from them is clamped, so that a wrong value gives wrong rows
and no access outside of the table and the pools. Callers must not ask for the entry of a key behind the last one.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.integers import larger, log2, smaller
from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.problem.tensors import WORD_BYTES


@dataclass(frozen=True)
class PageRow:
    """The table's entries of one sequence.

    start: first entry, counted from the start of the table. count: number of entries.
    """

    start: Int64
    count: Int32


@cute.jit
def page_row(p: Any, index: Int32):
    """Returns the PageRow of sequence `index`."""
    start, count = Int64(index) * p.page_table_row, Int32(p.max_pages)
    if p.page_indptr != 0:
        first = smaller(larger(params.load_scalar(p.page_indptr, Int32, index), 0), p.table_entries)
        end = smaller(larger(params.load_scalar(p.page_indptr, Int32, index + 1), first), p.table_entries)
        start, count = Int64(first), Int32(end - first)
    return PageRow(start, count)


def num_keys(p: Any, index: Int32) -> Int32:
    """Returns the keys of sequence `index`: its length, at most what its pages hold."""
    length = larger(params.load_scalar(p.seqused_k, Int32, index), 0)
    return smaller(length, page_row(p, index).count * p.page_size)


def entry(p: Any, row: PageRow, number: Int32) -> Int32:
    """Returns page `number` of a sequence, clamped to the pool; it has that page."""
    return clamped(p, params.load_scalar(p.page_table, Int32, row.start + number))


def start_entry(p: Any, row: PageRow, number: Int32, is_needed: Any) -> Int32:
    """Starts loading page `number` of a sequence, which has that page if it is needed; else it may be anything.

    It is not clamped, see `clamped`, so that nothing waits for it before its use.
    """
    address = p.page_table + (row.start + number) * Int64(WORD_BYTES)
    (found,) = params.load_words(address, is_needed, 1, has_zeros=False)
    return Int32(found)


def clamped(p: Any, page: Int32) -> Int32:
    """Returns a page clamped to the pool."""
    return smaller(larger(page, 0), p.num_pages - 1)


def offset(p: Any, name: str, page: Int32, row: Int32, head: Int32) -> Int64:
    """Returns where a row of a page starts in pool `name` (elements); every product is 64 bits wide."""
    strides = (params.stride(p, name, axis) for axis in ("page", "row", "head"))
    return sum(
        (Int64(index) * stride for index, stride in zip((page, row, head), strides, strict=True)), start=Int64(0)
    )


def page_shift(p: Any) -> Int32:
    """Returns log2 of the page size, to shift rows by."""
    return log2(p.page_size)
