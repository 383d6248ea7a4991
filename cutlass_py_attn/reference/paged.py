"""Paged reference: gathers the pages of a key/value cache, then computes the forward of variable lengths in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.reference import numpy_reference, quantization
from cutlass_py_attn.reference.numpy_reference import NO_SCORE_MOD, CuSeqlens, ReferenceScoreMod

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PageTable:
    """Where the keys of each sequence are in the pools (pages, page_size, num_heads_key, channels).

    page_table: (batch, max_pages) integers, or (entries,) with page_indptr. Entries behind the last key are not read.
    seqused_k: (batch,) integers, keys of each sequence
    cu_seqlens_q: (batch + 1,) integers, starts of the queries in (1, tokens, num_heads, channels); None for query
        (batch, num_queries, num_heads, channels)
    max_seqlen_q: most queries of a sequence, or more; 0 without cu_seqlens_q
    page_indptr: (batch + 1,) integers, where each sequence's entries start; None for a 2-D table
    """

    page_table: Array
    seqused_k: Array
    cu_seqlens_q: Array | None = None
    max_seqlen_q: int = 0
    page_indptr: Array | None = None

    def rows(self, number: int, page_size: int) -> tuple[Array, Array]:
        """Returns (page, row of the page) of each key of a sequence; ValueError for more keys than its pages have."""
        table = self.page_table
        entries = table[number] if self.page_indptr is None else table[slice(*self.page_indptr[number : number + 2])]
        length = int(self.seqused_k[number])
        if not 0 <= length <= entries.size * page_size:
            raise ValueError(f"seqused_k[{number}]: {length}, must be from 0 to {entries.size * page_size}")
        keys = np.arange(length)
        return entries[: -(-length // page_size)].astype(np.int64)[keys // page_size], keys % page_size


def forward(
    query: Array,
    key: Array,
    value: Array,
    table: PageTable,
    *,
    mask: Mask,
    scale: float | None = None,
    precision: str = "float64",
    score_mod: ReferenceScoreMod = NO_SCORE_MOD,
    scales: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array]:
    """Returns output in the shape of query, with the channels of value, and logsumexp, as `numpy_reference.forward`.

    key, value: pools (pages, page_size, num_heads_key, channels). ValueError for sizes that do not fit together.
    scales: of key and value of e4m3 codes, as Problem has them; None for other dtypes
    """
    count = len(table.seqused_k)
    rows = [table.rows(number, key.shape[1]) for number in range(count)]
    pages, places = (np.concatenate([*part, np.zeros(0, np.int64)]) for part in zip(*rows, strict=True)) if rows else (
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
    )  # fmt: skip
    lengths = np.array([each.size for each, _ in rows], np.int64)
    packed = query
    starts, longest = table.cu_seqlens_q, table.max_seqlen_q
    if starts is None:
        if query.shape[0] != count:
            raise ValueError(f"query: batch {query.shape[0]}, must be the {count} lengths of seqused_k")
        longest = query.shape[1]
        starts = np.arange(count + 1) * longest
        packed = query.reshape(1, -1, *query.shape[2:])
    bounds = CuSeqlens(
        cu_seqlens_q=starts,
        cu_seqlens_k=np.cumsum([0, *lengths]),
        max_seqlen_q=longest,
        max_seqlen_k=int(lengths.max(initial=0)),
    )
    rows_of = [tensor[pages, places][None] for tensor in (key, value)]
    if scales is not None:
        found = [scale[pages, places][None] if scale is not None and scale.ndim == 3 else scale for scale in scales]
        rows_of = [quantization.dequantise(*each, bounds.cu_seqlens_k) for each in zip(rows_of, found, strict=True)]
    output, logsumexp = numpy_reference.forward(
        packed,
        *rows_of,
        mask=mask,
        scale=scale,
        precision=precision,
        score_mod=replace(score_mod, cu_seqlens=bounds),
    )
    return output.reshape(*query.shape[:3], value.shape[3]), logsumexp
