"""Sequence lengths: which rows of the tensors belong to a sequence, dense or of variable length.

cu_seqlens_q, cu_seqlens_k and seqused_k are in device memory, where no host checks them. What is read from them is
clamped to the tensors: a wrong value gives wrong rows, and no access outside of the tensors, the results or the
workspace.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64

from cutlass_py_attn.integers import ceil_div, larger, round_up, smaller
from cutlass_py_attn.kernels.common import paging, params
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Band, Form
from cutlass_py_attn.problem.tensors import LSE_PADDING


@dataclass(frozen=True)
class SeqlenInfo:
    """The rows of one sequence of the batch.

    index: number of the sequence in the batch.
    batch: index along the tensors' batch axis; 0 with variable lengths.
    query_start, key_start: first row of the sequence in the tensors; 0 without variable lengths. key_start is 0 if the
        keys are in pages.
    num_queries, num_keys: lengths that attention uses.
    stored_keys: key rows of the sequence in memory; with seqused_k the rows from num_keys on are unused.
    first_tile: number of its first query tile in the workspace of one head.
    """

    index: Any
    batch: Any
    query_start: Any
    key_start: Any
    num_queries: Any
    num_keys: Any
    stored_keys: Any
    first_tile: Any


def create(build: Build, p: Any, index: Int32) -> SeqlenInfo:
    """Returns the SeqlenInfo of sequence `index`, from the struct's sizes or cu_seqlens_q, cu_seqlens_k, seqused_k."""
    if build.has("paged"):
        return _paged(build, p, index)
    if not build.has("varlen"):
        first_tile = index * ceil_div(p.num_queries, build.tile_m)
        return SeqlenInfo(index, index, 0, 0, p.num_queries, p.num_keys, p.num_keys, first_tile)
    query_start, num_queries = query_rows(p, index)
    key_start, stored = key_rows(p, index)
    used = stored
    if build.has("seqused"):
        used = smaller(larger(params.load_scalar(p.seqused_k, Int32, index), 0), stored)
    first_tile = query_start // build.tile_m + index
    return SeqlenInfo(index, 0, query_start, key_start, num_queries, used, stored, first_tile)


def _paged(build: Build, p: Any, index: Int32) -> SeqlenInfo:
    """Returns the SeqlenInfo of a sequence whose keys are in pages, see kernels/common/paging.py."""
    batch, query_start, num_queries, first_tile = index, 0, p.num_queries, index * ceil_div(p.num_queries, build.tile_m)
    if build.has("varlen"):
        batch, (query_start, num_queries) = 0, query_rows(p, index)
        first_tile = query_start // build.tile_m + index
    num_keys = paging.num_keys(p, index)
    return SeqlenInfo(index, batch, query_start, 0, num_queries, num_keys, num_keys, first_tile)


def query_rows(p: Any, index: Int32) -> tuple[Int32, Int32]:
    """Returns the first query row of sequence `index`, with variable lengths, and how many rows it has."""
    return _rows(p.cu_seqlens_q, index, p.tokens_q, p.num_queries)


def key_rows(p: Any, index: Int32) -> tuple[Int32, Int32]:
    """Returns the first stored key row of sequence `index`, with variable lengths, and how many rows it has."""
    return _rows(p.cu_seqlens_k, index, p.tokens_k, p.num_keys)


def _rows(bounds: Int64, index: Int32, tokens: Int32, longest: Int32) -> tuple[Int32, Int32]:
    """Returns (start, count) of the rows between two bounds; start + count <= tokens and 0 <= count <= longest.

    No sum or difference is taken before both of its numbers are clamped, so that none leaves 32 bits.
    """
    start, end = (params.load_scalar(bounds, Int32, index + edge) for edge in (0, 1))
    start = smaller(larger(start, 0), tokens)
    end = smaller(larger(end, start), tokens)
    return start, smaller(end - start, longest)


def band(build: Build, p: Any, seqlen: SeqlenInfo) -> Band:
    """Returns the mask of one sequence; one without edges where ranges say what queries see."""
    if build.form.sees_all or build.form.has_ranges:
        return Band(Form("full"), 0, 0, seqlen.num_queries, seqlen.num_keys)
    diagonal = p.bottom_right * (seqlen.num_keys - seqlen.num_queries)
    low, high = diagonal - p.window_left, diagonal + p.window_right
    return Band(build.form, low, high, seqlen.num_queries, seqlen.num_keys)


def key_head(build: Build, p: Any, head: Int32) -> Int32:
    """Returns the head of key and value that query head `head` reads."""
    return head // p.group if build.has("grouped") else head


def group_size(build: Build, p: Any) -> Any:
    """Returns the number of query heads that share a head of key and value."""
    return p.group if build.has("grouped") else 1


def logsumexp_offset(p: Any, batch: Int32, head: Int32) -> Int64:
    """Returns the offset of (batch, head) in logsumexp (elements), shape (batch, num_heads, padded queries) float32."""
    return (Int64(batch) * p.num_heads + head) * padded_rows(p.num_queries)


def padded_rows(num_queries: Any) -> Any:
    """Returns the rows of logsumexp for `num_queries` queries, a multiple of the padding."""
    return round_up(num_queries, LSE_PADDING)


def first_dropout_word(p: Any, seqlen: SeqlenInfo, head: Int32) -> Int64:
    """Returns the number of the first random word of this sequence and query head, counted from philox_offset.

    Consecutive heads are num_queries * num_keys words apart. These are the sizes of the longest sequences, in the
    forward and the backward alike.
    """
    return (Int64(seqlen.index) * p.num_heads + head) * p.num_queries * p.num_keys
