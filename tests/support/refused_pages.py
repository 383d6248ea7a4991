"""Refused caches in pages: Problems and calls with wrong pools, tables and lengths, with the exact error texts."""

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
CORRECT = "correct it"


def paged_problem(pages: Any = PAGES, direction: str = "forward", **changes: Any) -> Problem:
    """Returns a problem with pages, some of whose fields are others."""
    return Problem(direction, **{**TENSORS, "pages": pages, **changes})


def of_problem(*reasons: str, **changes: Any) -> Refused:
    """Returns the check of a problem and the reasons that it raises."""
    return paged_problem(**changes).check, list(reasons)


def of_pages(*reasons: str, **changes: Any) -> Refused:
    """Returns the check of a problem with other pages and the reasons that it raises."""
    return of_problem(*reasons, pages=replace(PAGES, **changes))


def of_call(
    *reasons: str, table: Any = TABLE, lengths: Any = LENGTHS, query: Any = QUERY, pool: Any = POOLS, **options: Any
) -> Refused:
    """Returns a forward with pages and the reasons that it raises."""
    shapes = {"query": query, "key": pool, "value": pool}
    tensors = {name: Tensor.contiguous(shape, "float16") for name, shape in shapes.items()}
    return (lambda: called(given=tensors, sequences=Paged(table, lengths, **options))), list(reasons)


def tensor(*shape: int, dtype: str = "int32") -> Tensor:
    """Returns a dense array on the device."""
    return Tensor.contiguous(shape, dtype)


PACKED = (1, 6, 4, 32)
WIDE = Tensor((BATCH, MAX_PAGES), (10, 2), "int32", 2)

ALL: dict[str, Refused] = {
    "no Pages": of_problem("pages = 5 (int): must be a Pages object, or None; create one", pages=5),
    "pages of other kinds": of_pages(
        f"pages.batch = -3 (int): must be an int of at least 0; {CORRECT}",
        f"pages.max_seqlen_q = '1' (str): must be an int of at least 0; {CORRECT}",
        "pages.cu_seqlens_q = 1 (int): must be True or False; pass one of them",
        "page_table = 7 (int): must be a Tensor; create one with Tensor.contiguous",
        batch=-3, max_seqlen_q="1", cu_seqlens_q=1, page_table=7,
    ),
    "a table of one axis": of_pages(
        "page_table has shape (15,) and strides (1,): must be 2-D, (batch, max_pages); reshape it",
        page_table=tensor(15),
    ),
    "a table of two axes with page_indptr": of_pages(
        "page_table has shape (3, 5) and strides (5, 1): must be 1-D, (entries,) with page_indptr; reshape it",
        page_indptr=True,
    ),
    "a table of another dtype": of_pages(
        "page_table has dtype int64: must be int32; convert it", page_table=tensor(BATCH, MAX_PAGES, dtype="int64")
    ),
    "a table of any strides": of_pages(
        "page_table is 2-byte aligned: must be aligned to its 4-byte entries; copy it",
        "page_table has last stride 2: must be 1; copy it",
        page_table=WIDE,
    ),
    "rows of a table": of_pages(
        "page_table has shape (4, 5): must have one row for each of the 3 lengths of seqused_k; slice it",
        page_table=tensor(4, MAX_PAGES),
    ),
    "a backward": of_problem(
        "direction = 'backward' with pages: must be forward, because a cache has no gradients; leave pages None",
        direction="backward", grad_output=TENSORS["query"], grad_query=TENSORS["query"],
    ),
    "two kinds of sequences": of_problem(
        "sequences and pages are given: must be one of the two, because pages have their own lengths; leave one None",
        sequences=Sequences(3, 2, 5),
    ),
    "a page size": of_problem(
        "key has pages of 12 rows: the page size must be a power of two; pass key and value as "
        "[pages, page_size, heads, head_dim] by strides",
        key=tensor(POOL, 12, 2, 32, dtype="float16"), value=tensor(POOL, 12, 2, 32, dtype="float16"),
    ),
    "pages without rows": of_problem(
        "key has pages of 0 rows: the page size must be a power of two; pass key and value as "
        "[pages, page_size, heads, head_dim] by strides",
        key=tensor(POOL, 0, 2, 32, dtype="float16"), value=tensor(POOL, 0, 2, 32, dtype="float16"),
    ),
    "keys in pools without pages": of_call(
        "seqused_k[0] = 80: must be from 0 to the 0 keys of the sequence's pages; correct it",
        "seqused_k[2] = 33: must be from 0 to the 0 keys of the sequence's pages; correct it",
        pool=(0, PAGE_SIZE, 2, 32),
    ),
    "pools of two sizes": of_problem(
        "value has shape (19, 16, 2, 32): must be (20, 16, 2, 32) to match query (3, 2, 4, 32), key (20, 16, 2, 32) "
        "and value (19, 16, 2, 32); reshape it",
        value=tensor(19, PAGE_SIZE, 2, 32, dtype="float16"),
    ),
    "batch of query": of_problem(
        "query has batch 2 and seqused_k 3 lengths: must be equal without cu_seqlens_q; pass a length for each "
        "sequence",
        query=tensor(2, 2, 4, 32, dtype="float16"), output=tensor(2, 2, 4, 32, dtype="float16"),
    ),
    "packed queries of several batches": of_pages(
        "query has batch 3 with cu_seqlens_q: must be 1; concatenate the queries in [1, tokens, heads, head_dim], or "
        "leave cu_seqlens_q out",
        "max_seqlen_q = 7: must be from 0 to the 2 queries; pass the most queries of a sequence",
        cu_seqlens_q=True, max_seqlen_q=7,
    ),
    "terms that no kernel has": of_problem(
        "bias with pages: must be absent, because no kernel of paged caches has it; leave it out",
        "dropout with pages: must be absent, because no kernel of paged caches has it; leave it out",
        bias=tensor(1, 1, 1, 80, dtype="float16"), dropout_p=0.1,
    ),
    "nothing": of_call(
        "page_table is None: must be an int32 array on the operands' device; pass it",
        "seqused_k is None: must be an int32 array on the operands' device; pass it",
        table=None, lengths=None,
    ),
    "max_seqlen_q without cu_seqlens_q": of_call(
        "max_seqlen_q = 2 (int) without cu_seqlens_q: must be None, because query's shape says it; leave it out",
        max_seqlen_q=2,
    ),
    "cu_seqlens_q without max_seqlen_q": of_call(
        "max_seqlen_q = None with cu_seqlens_q: must be an int; pass the most queries of a sequence",
        cu_seqlens_q=np.array([0, 2, 4, 6]), query=PACKED,
    ),
    "invariant of another kind": of_call(
        "invariant = 1 (int): must be True or False; pass one of them", invariant=1
    ),
    "lengths of another dtype and rank": of_call(
        "seqused_k has shape (3, 1), strides (1, 1) and dtype int64: must be a contiguous int32 array of shape (3,); "
        "convert it",
        table=tensor(BATCH, MAX_PAGES), lengths=tensor(3, 1, dtype="int64"),
    ),
    "lengths of any strides": of_call(
        "seqused_k has shape (3,), strides (2,) and dtype int32: must be a contiguous int32 array of shape (3,); "
        "convert it",
        table=tensor(BATCH, MAX_PAGES), lengths=Tensor((3,), (2,), "int32"),
    ),
    "lengths beyond the table": of_call(
        f"seqused_k[0] = 81: must be from 0 to the 80 keys of the sequence's pages; {CORRECT}",
        f"seqused_k[1] = -1: must be from 0 to the 80 keys of the sequence's pages; {CORRECT}",
        lengths=np.array([81, -1, 33]),
    ),
    "pages beyond the pool": of_call(
        f"page_table of sequence 0 has pages [20, 1]: must be from 0 to 19; {CORRECT}",
        table=np.array([[20, 1, 2, 3, 4], [0, 0, 0, 0, 99], [7, -1, 6, 0, -1]]), lengths=np.array([30, 0, 16]),
    ),
    "starts of queries": of_call(
        f"cu_seqlens_q = [0, 4, 2, 9]: must start with 0, never fall and end at most at the 6 queries; {CORRECT}",
        cu_seqlens_q=np.array([0, 4, 2, 9]), max_seqlen_q=4, query=PACKED,
    ),
    "the longest sequence": of_call(
        "max_seqlen_q = 2: must be at least the longest sequence, 3; raise it",
        cu_seqlens_q=np.array([0, 1, 3, 6]), max_seqlen_q=2, query=PACKED,
    ),
    "starts of entries": of_call(
        "page_indptr = [0, 3, 2, 9]: must start with 0, never fall and end at most at the 9 entries of page_table; "
        f"{CORRECT}",
        table=np.arange(9), page_indptr=np.array([0, 3, 2, 9]),
    ),
}  # fmt: skip
