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

from cutlass_py_attn.problem.scalars import digits
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.refusals import CHOOSE_FLAG, IS_FLAG, Refusal, alignment_refusal, refuse
from cutlass_py_attn.score_terms import registry

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

FEATURE: Final = registry.PAGED  # in Problem.features
_LENGTHS_BYTES: Final = 4  # of one length, and of one entry of the table


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


def kind_refusals(pages: Any) -> Iterator[Refusal]:
    """Yields what has the wrong type or rank, so that no other check can run."""
    if not isinstance(pages, Pages):
        yield refuse("pages", pages, "must be a Pages object, or None", "create one")
        return
    for name in ("batch", "max_seqlen_q"):
        number = getattr(pages, name)
        if type(number) is not int or number < 0:
            yield refuse(f"pages.{name}", number, "must be an int of at least 0", "correct it")
    for name in ("cu_seqlens_q", "page_indptr", "invariant"):
        if type(getattr(pages, name)) is not bool:
            yield refuse(f"pages.{name}", getattr(pages, name), IS_FLAG, CHOOSE_FLAG)
    table = pages.page_table
    if not isinstance(table, Tensor):
        yield refuse("page_table", table, "must be a Tensor", "create one with Tensor.contiguous")
        return
    has_bounds = pages.page_indptr is True
    axes = "1-D, (entries,) with page_indptr" if has_bounds else "2-D, (batch, max_pages)"
    wrong = [field for field in ("shape", "strides") if len(getattr(table, field)) != (1 if has_bounds else 2)]
    for field in wrong[:1]:
        yield refuse(f"page_table.{field}", getattr(table, field), f"must be {axes}", "reshape it")


def refusals(problem: Problem) -> Iterator[Refusal]:
    """Yields every other reason to refuse the pages of a problem whose pages have no `kind_refusals`."""
    pages = problem.pages
    if pages is None:
        return
    if problem.direction == "backward":
        rule = "must be forward with pages, because a cache has no gradients"
        yield refuse("direction", problem.direction, rule, "leave pages None")
    if problem.sequences is not None:
        rule = "must be None with pages, which have their own lengths"
        yield refuse("sequences", problem.sequences, rule, "leave one of both None")
    yield from _table(pages)
    page_size = problem.key.shape[1]
    if page_size < 1 or page_size & (page_size - 1):
        remedy = "pass key and value as [pages, page_size, heads, head_dim] by strides"
        yield refuse("page_size", page_size, "must be a power of two", remedy)
    batch, tokens = problem.query.shape[0], problem.query.shape[1]
    if pages.cu_seqlens_q:
        if batch != 1:
            remedy = "concatenate the queries in [1, tokens, heads, head_dim], or leave cu_seqlens_q out"
            yield refuse("batch of query", batch, "must be 1 with cu_seqlens_q", remedy)
        if not 0 <= pages.max_seqlen_q <= tokens:
            rule = f"must be from 0 to the {tokens} queries"
            yield refuse("max_seqlen_q", pages.max_seqlen_q, rule, "pass the most queries of a sequence")
    elif batch != pages.batch:
        rule = f"must be that of seqused_k, {digits(pages.batch)}, without cu_seqlens_q"
        yield refuse("batch of query", batch, rule, "pass a length for each sequence")
    for name, given in (("bias", problem.bias), ("dropout_p", problem.dropout_p)):
        if given:
            yield refuse(name, given, "must be absent with pages, because no kernel of these has it", "leave it out")


def _table(pages: Pages) -> Iterator[Refusal]:
    table = pages.page_table
    if table.dtype != "int32":
        yield refuse("page_table.dtype", table.dtype, "must be int32", "convert it")
    elif table.alignment < _LENGTHS_BYTES:
        yield alignment_refusal("page_table", table.alignment, _LENGTHS_BYTES)
    if table.shape[-1] > 1 and table.strides[-1] != 1:
        yield refuse("page_table.strides", table.strides, "the last must be 1", "copy it")
    if not pages.page_indptr and table.shape[0] != pages.batch:
        rule = f"must have one row for each of the {digits(pages.batch)} lengths of seqused_k"
        yield refuse("page_table.shape", table.shape, rule, "slice it")
