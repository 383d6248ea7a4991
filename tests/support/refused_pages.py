"""Refused caches in pages: Problems and calls with wrong pools, tables and lengths, with what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.problem.paging import Pages
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Sequences, Tensor
from tests.support.requests import called

Refused = tuple[Callable[[], Any], list[str]]

BATCH, MAX_PAGES, POOL, PAGE_SIZE = 3, 5, 20, 16
QUERY, POOLS = (BATCH, 2, 4, 32), (POOL, PAGE_SIZE, 2, 32)
SHAPES = {"query": QUERY, "key": POOLS, "value": POOLS, "output": QUERY}
TENSORS = {name: Tensor.contiguous(shape, "float16") for name, shape in SHAPES.items()}
PAGES = Pages(Tensor.contiguous((BATCH, MAX_PAGES), "int32"), BATCH)
TABLE = np.arange(BATCH * MAX_PAGES).reshape(BATCH, MAX_PAGES)
LENGTHS = np.array([80, 0, 33])


def paged_problem(pages: Any = PAGES, direction: str = "forward", **changes: Any) -> Problem:
    """Returns a problem with pages, some of whose fields are others."""
    return Problem(direction, **{**TENSORS, "pages": pages, **changes})


def of_problem(*expected: str, **changes: Any) -> Refused:
    """Returns the check of a problem and what it refuses."""
    return paged_problem(**changes).check, list(expected)


def of_pages(*expected: str, **changes: Any) -> Refused:
    """Returns the check of a problem with other pages and what it refuses."""
    return of_problem(*expected, pages=replace(PAGES, **changes))


def of_call(
    *expected: str, table: Any = TABLE, lengths: Any = LENGTHS, query: Any = QUERY, pool: Any = POOLS, **options: Any
) -> Refused:
    """Returns a forward with pages and what it refuses."""
    shapes = {"query": query, "key": pool, "value": pool}
    tensors = {name: Tensor.contiguous(shape, "float16") for name, shape in shapes.items()}
    return (lambda: called(given=tensors, sequences=Paged(table, lengths, **options))), list(expected)


def tensor(*shape: int, dtype: str = "int32") -> Tensor:
    """Returns a dense array on the device."""
    return Tensor.contiguous(shape, dtype)


PACKED = (1, 6, 4, 32)
WIDE = Tensor((BATCH, MAX_PAGES), (10, 2), "int32", 2)

ALL: dict[str, Refused] = {
    "no Pages": of_problem("pages: a Pages object, or None", pages=5),
    "pages of other kinds": of_pages(
        "pages.batch: at least 0", "pages.max_seqlen_q: an int of at least 0", "pages.cu_seqlens_q: True or False",
        "page_table: a Tensor",
        batch=-3, max_seqlen_q="1", cu_seqlens_q=1, page_table=7,
    ),
    "a table of one axis": of_pages("page_table.shape: 2-D, (batch, max_pages)", page_table=tensor(15)),
    "a table of two axes with page_indptr": of_pages(
        "page_table.shape: 1-D, (entries,) with page_indptr", page_indptr=True
    ),
    "a table of another dtype": of_pages(
        "page_table.dtype: int32", page_table=tensor(BATCH, MAX_PAGES, dtype="int64")
    ),
    "a table of any strides": of_pages(
        "page_table.alignment: the 4 bytes", "page_table.strides: the last must be 1", page_table=WIDE
    ),
    "rows of a table": of_pages(
        "page_table.shape: one row for each of the 3 lengths of seqused_k", page_table=tensor(4, MAX_PAGES)
    ),
    "a backward": of_problem(
        "direction: forward with pages",
        direction="backward", grad_output=TENSORS["query"], grad_query=TENSORS["query"],
    ),
    "two kinds of sequences": of_problem("sequences: None with pages", sequences=Sequences(3, 2, 5)),
    **{
        f"pages of {size} rows": of_problem(
            "page_size: a power of two",
            key=tensor(POOL, size, 2, 32, dtype="float16"), value=tensor(POOL, size, 2, 32, dtype="float16"),
        )
        for size in (12, 0)
    },
    "keys in pools without pages": of_call(
        "seqused_k[0]: from 0 to the 0 keys", "seqused_k[2]: from 0 to the 0 keys", pool=(0, PAGE_SIZE, 2, 32)
    ),
    "pools of two sizes": of_problem(
        "value.shape: (20, 16, 2, 32) to match query", value=tensor(19, PAGE_SIZE, 2, 32, dtype="float16")
    ),
    "batch of query": of_problem(
        "batch of query: that of seqused_k, 3, without cu_seqlens_q",
        query=tensor(2, 2, 4, 32, dtype="float16"), output=tensor(2, 2, 4, 32, dtype="float16"),
    ),
    "packed queries of several batches": of_pages(
        "batch of query: 1 with cu_seqlens_q", "max_seqlen_q: from 0 to the 2 queries",
        cu_seqlens_q=True, max_seqlen_q=7,
    ),
    "terms that no kernel has": of_problem(
        "bias: absent with pages", "dropout_p: absent with pages",
        bias=tensor(1, 1, 1, 80, dtype="float16"), dropout_p=0.1,
    ),
    "nothing": of_call("page_table: an int32 array", "seqused_k: an int32 array", table=None, lengths=None),
    "max_seqlen_q without cu_seqlens_q": of_call("max_seqlen_q: None without cu_seqlens_q", max_seqlen_q=2),
    "cu_seqlens_q without max_seqlen_q": of_call(
        "max_seqlen_q: an int with cu_seqlens_q", cu_seqlens_q=np.array([0, 2, 4, 6]), query=PACKED
    ),
    "invariant of another kind": of_call("invariant: True or False", invariant=1),
    "lengths of another dtype and rank": of_call(
        "seqused_k: int32 array of shape (3,), and has strides (1, 1)",
        table=tensor(BATCH, MAX_PAGES), lengths=tensor(3, 1, dtype="int64"),
    ),
    "lengths of any strides": of_call(
        "seqused_k: contiguous int32 array of shape (3,), and has strides (2,)",
        table=tensor(BATCH, MAX_PAGES), lengths=Tensor((3,), (2,), "int32"),
    ),
    "lengths beyond the table": of_call(
        "seqused_k[0]: from 0 to the 80 keys", "seqused_k[1]: from 0 to the 80 keys", lengths=np.array([81, -1, 33])
    ),
    "pages beyond the pool": of_call(
        "pages of sequence 0 in page_table: from 0 to 19",
        table=np.array([[20, 1, 2, 3, 4], [0, 0, 0, 0, 99], [7, -1, 6, 0, -1]]), lengths=np.array([30, 0, 16]),
    ),
    "starts of queries": of_call(
        "cu_seqlens_q: start with 0, never fall and end at most at the 6 queries",
        cu_seqlens_q=np.array([0, 4, 2, 9]), max_seqlen_q=4, query=PACKED,
    ),
    "the longest sequence": of_call(
        "max_seqlen_q: at least the longest sequence, 3",
        cu_seqlens_q=np.array([0, 1, 3, 6]), max_seqlen_q=2, query=PACKED,
    ),
    "starts of entries": of_call(
        "page_indptr: start with 0, never fall and end at most at the 9 entries of page_table",
        table=np.arange(9), page_indptr=np.array([0, 3, 2, 9]),
    ),
}  # fmt: skip
