"""Paged: the option `sequences` for a key/value cache in pages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cutlass_py_attn.problem.paging import Pages
from cutlass_py_attn.problem.scalars import FLAG, integer_of
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.refusals import Refusal, refuse

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

    def missing(self) -> list[Refusal]:
        """Returns a refusal of each value that is missing or of the wrong type."""
        found = [
            refuse(name, None, "must be an int32 array on the operands' device", "pass it")
            for name in _REQUIRED
            if getattr(self, name) is None
        ]
        given = self.max_seqlen_q
        if self.cu_seqlens_q is not None and integer_of(given) is None:
            remedy = "pass the most queries of a sequence"
            found.append(refuse("max_seqlen_q", given, "must be an int with cu_seqlens_q", remedy))
        if type(self.invariant) is not bool:
            found.append(FLAG.refusal("invariant", self.invariant))
        if self.cu_seqlens_q is None and given is not None:
            rule = "must be None without cu_seqlens_q, because query's shape says it"
            found.append(refuse("max_seqlen_q", given, rule, "leave it out"))
        return found

    def refusals(self, tokens: int | None, pool: tuple[int, int]) -> list[Refusal]:
        """Returns why the values of NumPy arrays are wrong; values on a device are not read.

        tokens: queries of all sequences, with cu_seqlens_q. pool: (pages, page_size).
        """
        found: list[Refusal] = []
        starts, table, lengths, indptr = self.cu_seqlens_q, self.page_table, self.seqused_k, self.page_indptr
        if _is_on_host(starts) and starts.ndim == 1 and tokens is not None:
            found += starts_refusals("cu_seqlens_q", starts, f"{tokens} queries", self.max_seqlen_q or 0)
        if not _is_on_host(table) or not _is_on_host(lengths):
            return found
        if table.ndim != (2 if indptr is None else 1) or lengths.ndim != 1:  # `Problem` refuses these shapes
            return found
        if indptr is None:
            rows = list(table.astype(np.int64))
        else:
            if not _is_on_host(indptr) or indptr.shape != (lengths.size + 1,):
                return found
            if wrong := starts_refusals("page_indptr", indptr, f"{table.size} entries of page_table"):
                return [*found, *wrong]
            rows = [table[first:last].astype(np.int64) for first, last in itertools.pairwise(indptr.astype(np.int64))]
        pages, page_size = pool
        for number, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=False)):
            most = row.size * page_size if pages else 0
            if not 0 <= length <= most:
                rule = f"must be from 0 to the {most} keys of the sequence's pages"
                found.append(refuse(f"seqused_k[{number}]", length, rule, "correct it"))
                continue
            used = row[: -(-length // page_size)]
            if ((used < 0) | (used >= pages)).any():
                rule = f"must be from 0 to {pages - 1}"
                found.append(refuse(f"pages of sequence {number} in page_table", used.tolist(), rule, "correct it"))
        return found


def starts_refusals(name: str, starts: np.ndarray[Any, Any], total: str, longest: int | None = None) -> list[Refusal]:
    """Returns why these are no starts of sequences; total: what they end in, such as "40 tokens".

    longest: length of the longest sequence as it was given; None for none
    """
    if not starts.size:
        return []
    steps = np.diff(starts.astype(np.int64))
    if starts[0] != 0 or (steps < 0).any() or starts[-1] > int(total.split()[0]):
        rule = f"must start with 0, never fall and end at most at the {total}"
        return [refuse(name, starts.tolist(), rule, "correct it")]
    if longest is not None and steps.size and steps.max() > longest:
        rule = f"must be at least the longest sequence, {steps.max()}"
        return [refuse(name.replace("cu_seqlens", "max_seqlen"), longest, rule, "raise it")]
    return []


def array_refusals(name: str, tensor: Tensor, shape: tuple[int, ...]) -> list[Refusal]:
    """Returns why this is no contiguous int32 array of that shape."""
    is_dense = len(tensor.shape) == 1 and (tensor.strides == (1,) or tensor.shape[0] <= 1)
    if tensor.dtype == "int32" and tensor.shape == shape and is_dense:
        return []
    rule = f"must be a contiguous int32 array of shape {shape}, and has strides {tensor.strides}"
    return [refuse(name, tensor, rule, "convert it")]


def layout_refusals(paged: Paged, tensors: dict[str, Tensor]) -> list[Refusal]:
    """Returns why arrays of lengths have a wrong shape, dtype or layout; Problem checks the table itself."""
    used = tensors.get("seqused_k")
    batch = used.shape[0] if used is not None and used.shape else 0
    return [
        refusal
        for name in ("seqused_k", *_OPTIONAL)
        if name in tensors
        for refusal in array_refusals(name, tensors[name], (batch,) if name == "seqused_k" else (batch + 1,))
    ]


def _is_on_host(array: object) -> bool:
    """Returns whether this is a NumPy array of integers, whose values can be checked."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "iu"
