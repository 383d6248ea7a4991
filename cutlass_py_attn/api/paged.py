"""Paged: the option `sequences` for a key/value cache in pages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cutlass_py_attn.problem.paging import Pages
from cutlass_py_attn.problem.scalars import integer_of, shown
from cutlass_py_attn.problem.tensors import Tensor

_REQUIRED: Final = ("page_table", "seqused_k")
_OPTIONAL: Final = ("cu_seqlens_q", "page_indptr")


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """A key/value cache in pages: key and value are pools (pages, page_size, num_heads_key, head_dim) of any strides.

    page_table: (batch, max_pages) int32: key j of sequence b is row j % page_size of page
        page_table[b, j // page_size]. With page_indptr (entries,) int32, the rows of all sequences one after another.
    seqused_k: (batch,) int32, number of keys of each sequence, from 0 on. A sequence without keys has output 0 and
        logsumexp -inf.
    cu_seqlens_q: (batch + 1,) int32, ascending from 0: start of each sequence's queries in query (1, tokens, num_heads,
        head_dim). None for query (batch, num_queries, num_heads, head_dim).
    max_seqlen_q: at least the most queries of a sequence; an int with cu_seqlens_q, else None.
    page_indptr: (batch + 1,) int32, ascending from 0: start of each sequence's entries in page_table. None for a table
        with a row for each sequence.
    invariant: whether a sequence gets the same bits whatever other sequences are in the call. Few queries then take
        longer, because no block goes on where another one's share of the keys ends.

    page_size is a power of two. Entries of the table behind the last key of a sequence, and rows of a page behind it,
    may hold anything: no kernel uses them. The arrays are on the operands' device, where no host reads them: one
    captured CUDA graph serves all lengths and tables, and a length beyond the table is clamped. NumPy arrays may have
    any integer dtype, and their values are checked.
    """

    page_table: Any
    seqused_k: Any
    cu_seqlens_q: Any = None
    max_seqlen_q: int | None = None
    page_indptr: Any = None
    invariant: bool = False

    @property
    def lengths(self) -> tuple[object, ...]:
        """What decides a Problem besides the arrays."""
        return "paged", self.max_seqlen_q, self.cu_seqlens_q is None, self.page_indptr is None, self.invariant

    def arrays(self) -> dict[str, Any]:
        """Returns the arrays by name; NumPy arrays are converted to int32."""
        given = {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)}
        return {
            name: array.astype(np.int32) if isinstance(array, np.ndarray) and array.dtype.kind in "iu" else array
            for name, array in given.items()
            if array is not None
        }

    def normalised(self) -> Paged:
        """Returns the object with a Python int as max_seqlen_q."""
        number = integer_of(self.max_seqlen_q)
        return self if number is None else replace(self, max_seqlen_q=number)

    def pages(self, page_table: Tensor, batch: int) -> Pages:
        """Returns the Pages of a Problem, which has no arrays."""
        return Pages(
            page_table,
            batch,
            self.max_seqlen_q or 0,
            self.cu_seqlens_q is not None,
            self.page_indptr is not None,
            self.invariant,
        )

    def missing(self) -> list[str]:
        """Returns a reason for each value that is missing or of the wrong type."""
        found = [
            f"{name} is None: must be an int32 array on the operands' device; pass it"
            for name in _REQUIRED
            if getattr(self, name) is None
        ]
        given = self.max_seqlen_q
        if self.cu_seqlens_q is not None and integer_of(given) is None:
            found.append(
                f"max_seqlen_q = {shown(given)} with cu_seqlens_q: must be an int; pass the most queries of a sequence"
            )
        if type(self.invariant) is not bool:
            found.append(f"invariant = {shown(self.invariant)}: must be True or False; pass one of them")
        if self.cu_seqlens_q is None and given is not None:
            found.append(
                f"max_seqlen_q = {shown(given)} without cu_seqlens_q: must be None, because query's shape says it; "
                "leave it out"
            )
        return found

    def reasons(self, tokens: int | None, pool: tuple[int, int]) -> list[str]:
        """Returns why the values of NumPy arrays are wrong; values on a device are not read.

        tokens: queries of all sequences, with cu_seqlens_q. pool: (pages, page_size).
        """
        found: list[str] = []
        starts, table, lengths, indptr = self.cu_seqlens_q, self.page_table, self.seqused_k, self.page_indptr
        if _is_on_host(starts) and starts.ndim == 1 and starts.size and tokens is not None:
            steps = np.diff(starts.astype(np.int64))
            if starts[0] != 0 or (steps < 0).any() or starts[-1] > tokens:
                found.append(
                    f"cu_seqlens_q = {starts.tolist()}: must start with 0, never fall and end at most at the {tokens} "
                    "queries; correct it"
                )
            elif steps.size and steps.max() > (self.max_seqlen_q or 0):
                found.append(
                    f"max_seqlen_q = {self.max_seqlen_q}: must be at least the longest sequence, {steps.max()}; "
                    "raise it"
                )
        if not _is_on_host(table) or not _is_on_host(lengths):
            return found
        if table.ndim != (2 if indptr is None else 1) or lengths.ndim != 1:  # `Problem` refuses these shapes
            return found
        if indptr is None:
            rows = list(table.astype(np.int64))
        else:
            if not _is_on_host(indptr) or indptr.shape != (lengths.size + 1,):
                return found
            bounds = indptr.astype(np.int64)
            if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > table.size:
                return [
                    *found,
                    f"page_indptr = {indptr.tolist()}: must start with 0, never fall and end at most at the "
                    f"{table.size} entries of page_table; correct it",
                ]
            rows = [table[first:last].astype(np.int64) for first, last in itertools.pairwise(bounds)]
        pages, page_size = pool
        for number, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=False)):
            most = row.size * page_size if pages else 0
            if not 0 <= length <= most:
                found.append(
                    f"seqused_k[{number}] = {length}: must be from 0 to the {most} keys of the sequence's pages; "
                    "correct it"
                )
                continue
            used = row[: -(-length // page_size)]
            if ((used < 0) | (used >= pages)).any():
                found.append(
                    f"page_table of sequence {number} has pages {used.tolist()}: must be from 0 to {pages - 1}; "
                    "correct it"
                )
        return found


def layout_reasons(paged: Paged, tensors: dict[str, Tensor]) -> list[str]:
    """Returns why arrays of lengths have a wrong shape, dtype or layout; Problem checks the table itself."""
    used = tensors.get("seqused_k")
    batch = used.shape[0] if used is not None and used.shape else 0
    found = []
    for name in ("seqused_k", *_OPTIONAL):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        expected = (batch,) if name == "seqused_k" else (batch + 1,)
        is_dense = len(tensor.shape) == 1 and (tensor.strides == (1,) or tensor.shape[0] <= 1)
        if tensor.dtype != "int32" or tensor.shape != expected or not is_dense:
            found.append(
                f"{name} has shape {tensor.shape}, strides {tensor.strides} and dtype {tensor.dtype}: must be a "
                f"contiguous int32 array of shape {expected}; convert it"
            )
    return found


def _is_on_host(array: object) -> bool:
    """Returns whether this is a NumPy array of integers, whose values can be checked."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "iu"
