"""Paged inputs: a cache in pages for a test case, with NaN in every row and 2**30 in every entry that is not used."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference.paged import PageTable
from cutlass_py_attn.reference.score_mod import SeqlenInfo

Array = npt.NDArray[Any]

UNUSED_ENTRY: Final = 1 << 30  # in the table behind the last key: as an offset it leads far outside of every pool


def lengths(spec: ProblemSpec) -> list[tuple[int, int]]:
    """Returns (queries, keys that are used) of each sequence."""
    if not spec.sequences:
        return [(spec.num_queries, spec.num_keys)] * spec.batch
    return [(each.num_queries, each.num_keys if each.used_keys is None else each.used_keys) for each in spec.sequences]


def packed_sequences(spec: ProblemSpec) -> list[SeqlenInfo]:
    """Returns the rows of each sequence in (1, tokens, heads, columns) tensors of all queries and all used keys."""
    found, query, key = [], 0, 0
    for number, (queries, keys) in enumerate(lengths(spec)):
        found.append(SeqlenInfo(number, 0, slice(query, query + queries), slice(key, key + keys)))
        query, key = query + queries, key + keys
    return found


def entries(spec: ProblemSpec) -> list[int]:
    """Returns the entries of each sequence in a table with page_indptr: its pages, and one more that is not used."""
    return [-(-keys // spec.page_size) + 1 for _, keys in lengths(spec)]


def csr_table(spec: ProblemSpec) -> Tensor:
    """Returns the layout of a table with page_indptr."""
    return Tensor.contiguous((sum(entries(spec)),), "int32")


def paged(spec: ProblemSpec, pages: int, key: Array, value: Array, rng: np.random.Generator) -> dict[str, Array]:
    """Returns the pools of packed keys and values, (pages, page_size, heads, columns), and the table by name.

    key, value: (1, used keys of all sequences, heads, columns). No page is used twice, and the pages are in any order.
    """
    size = spec.page_size
    order = rng.permutation(pages).astype(np.int32)
    pools = {name: np.full((pages, size, *rows.shape[2:]), np.nan, rows.dtype)
             for name, rows in (("key", key), ("value", value))}  # fmt: skip
    table = np.full((spec.batch, spec.max_pages), UNUSED_ENTRY, np.int32)
    taken = 0
    for number, sequence in enumerate(packed_sequences(spec)):
        count = -(-sequence.num_keys // size)
        table[number, :count] = order[taken : taken + count]
        taken += count
        places = np.arange(sequence.num_keys)
        for name, rows in (("key", key), ("value", value)):
            pools[name][table[number, places // size], places % size] = rows[0, sequence.keys]
    used = np.array([keys for _, keys in lengths(spec)], np.int32)
    return {**pools, "page_table": table, "seqused_k": used}


def as_csr(spec: ProblemSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the arrays with page_indptr in place of a table with rows."""
    counts = entries(spec)
    wide = np.pad(arrays["page_table"], ((0, 0), (0, 1)), constant_values=UNUSED_ENTRY)
    rows = [row[:count] for row, count in zip(wide, counts, strict=True)]
    flat = np.concatenate([*rows, np.zeros(0, np.int32)]).astype(np.int32)
    return {**arrays, "page_table": flat, "page_indptr": np.cumsum([0, *counts]).astype(np.int32)}


def page_table(arrays: dict[str, Array], max_seqlen_q: int) -> PageTable:
    """Returns the table for the reference."""
    return PageTable(
        page_table=arrays["page_table"],
        seqused_k=arrays["seqused_k"],
        cu_seqlens_q=arrays.get("cu_seqlens_q"),
        max_seqlen_q=max_seqlen_q,
        page_indptr=arrays.get("page_indptr"),
    )
