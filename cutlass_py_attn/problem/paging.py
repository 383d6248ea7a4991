"""Paging: key and value in pages of a pool, found through a table; every reason to refuse a paged problem.

Key and value are pools (pages, page_size, num_heads_key, head_dim) of any strides. Key j of sequence b is row
j % page_size of page table[b, j // page_size]. The number of keys of each sequence is in device memory, so that a
captured CUDA graph serves lengths that grow. Bounds follow from shapes: a sequence has at most max_pages * page_size
keys, and none if the pools have no pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cutlass_py_attn.problem.scalars import digits, shown
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.score_terms import registry

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

FEATURE: Final = registry.PAGED  # in Problem.features
_LENGTHS_BYTES: Final = 4  # of one length, and of one entry of the table
_REFUSED: Final = ("bias", "dropout")  # score terms that no paged problem takes


@dataclass(frozen=True, slots=True)
class Pages:
    """The paged layout of key and value.

    page_table: int32 (batch, max_pages), the page of each page_size keys of a sequence; with `page_indptr` (entries,)
    batch: number of sequences
    max_seqlen_q: queries of the longest sequence, or more; 0 for query (batch, num_queries, num_heads, head_dim)
    cu_seqlens_q: whether query is (1, tokens, num_heads, head_dim), and an int32 array (batch + 1,) says where the
        queries of each sequence start
    page_indptr: whether an int32 array (batch + 1,) says where the table's entries of each sequence start
    invariant: whether the bits of a sequence's results must not depend on the other sequences of a call

    An int32 array seqused_k (batch,) says how many keys each sequence has, from 0 on.
    """

    page_table: Tensor
    batch: int
    max_seqlen_q: int = 0
    cu_seqlens_q: bool = False
    page_indptr: bool = False
    invariant: bool = False

    @property
    def max_pages(self) -> int:
        """Pages that one sequence has at most."""
        return self.page_table.shape[-1]

    @property
    def table_entries(self) -> int:
        """Entries of the table, of all sequences together."""
        return self.max_pages if self.page_indptr else self.batch * self.max_pages

    def arrays(self) -> dict[str, Tensor]:
        """Returns the arrays of this layout by name, besides the pools."""
        bounds = Tensor((self.batch + 1,), (1,), "int32", _LENGTHS_BYTES)
        found = {"page_table": self.page_table, "seqused_k": Tensor((self.batch,), (1,), "int32", _LENGTHS_BYTES)}
        if self.cu_seqlens_q:
            found["cu_seqlens_q"] = bounds
        if self.page_indptr:
            found["page_indptr"] = bounds
        return found


def kind_objections(pages: Any) -> Iterator[str]:
    """Yields what has the wrong type or rank, so that no other check can run."""
    if not isinstance(pages, Pages):
        yield f"pages = {shown(pages)}: must be a Pages object, or None; create one"
        return
    for name in ("batch", "max_seqlen_q"):
        number = getattr(pages, name)
        if type(number) is not int or number < 0:
            yield f"pages.{name} = {shown(number)}: must be an int of at least 0; correct it"
    for name in ("cu_seqlens_q", "page_indptr", "invariant"):
        if type(getattr(pages, name)) is not bool:
            yield f"pages.{name} = {shown(getattr(pages, name))}: must be True or False; pass one of them"
    table = pages.page_table
    if not isinstance(table, Tensor):
        yield f"page_table = {shown(table)}: must be a Tensor; create one with Tensor.contiguous"
        return
    has_bounds = pages.page_indptr is True
    rank = 1 if has_bounds else 2
    axes = "(entries,) with page_indptr" if has_bounds else "(batch, max_pages)"
    if len(table.shape) != rank or len(table.strides) != rank:
        yield (f"page_table has shape {table.shape} and strides {table.strides}: must be {rank}-D, {axes}; reshape it")


def objections(problem: Problem) -> Iterator[str]:
    """Yields every other reason to refuse the pages of a problem whose pages have no `kind_objections`."""
    pages = problem.pages
    if pages is None:
        return
    if problem.direction == "backward":
        yield "direction = 'backward' with pages: must be forward, because a cache has no gradients; leave pages None"
    if problem.sequences is not None:
        yield (
            "sequences and pages are given: must be one of the two, because pages have their own lengths; "
            "leave one None"
        )
    yield from _table_objections(pages)
    yield from _pool_objections(problem)
    batch, tokens = problem.query.shape[0], problem.query.shape[1]
    if pages.cu_seqlens_q:
        if batch != 1:
            yield (
                f"query has batch {batch} with cu_seqlens_q: must be 1; concatenate the queries in "
                "[1, tokens, heads, head_dim], or leave cu_seqlens_q out"
            )
        if not 0 <= pages.max_seqlen_q <= tokens:
            yield (
                f"max_seqlen_q = {digits(pages.max_seqlen_q)}: must be from 0 to the {tokens} queries; pass the most "
                "queries of a sequence"
            )
    elif batch != pages.batch:
        yield (
            f"query has batch {batch} and seqused_k {digits(pages.batch)} lengths: must be equal without "
            "cu_seqlens_q; pass a length for each sequence"
        )
    for name in _REFUSED:
        if name in problem.features:
            yield f"{name} with pages: must be absent, because no kernel of paged caches has it; leave it out"


def _table_objections(pages: Pages) -> Iterator[str]:
    table = pages.page_table
    if table.dtype != "int32":
        yield f"page_table has dtype {table.dtype}: must be int32; convert it"
    elif table.alignment < _LENGTHS_BYTES:
        yield f"page_table is {table.alignment}-byte aligned: must be aligned to its 4-byte entries; copy it"
    if table.shape[-1] > 1 and table.strides[-1] != 1:
        yield f"page_table has last stride {table.strides[-1]}: must be 1; copy it"
    if not pages.page_indptr and table.shape[0] != pages.batch:
        yield (
            f"page_table has shape {table.shape}: must have one row for each of the {digits(pages.batch)} lengths "
            "of seqused_k; slice it"
        )


def _pool_objections(problem: Problem) -> Iterator[str]:
    page_size = problem.key.shape[1]
    if page_size < 1 or page_size & (page_size - 1):
        yield (
            f"key has pages of {page_size} rows: the page size must be a power of two; pass key and value as "
            "[pages, page_size, heads, head_dim] by strides"
        )
