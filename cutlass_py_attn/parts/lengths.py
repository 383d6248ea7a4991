"""Lengths: which rows of the tensors belong to a sequence, dense or of variable length."""

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64

from cutlass_py_attn.masks import Band
from cutlass_py_attn.parts import params
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import LSE_PADDING


@dataclass(frozen=True)
class Sequence:
    """One sequence of the batch.

    index: its number. batch: its index along the tensors' batch axis. query_start, key_start: its first row in
    them. stored_keys: rows of key that belong to it; the last of them may lie behind num_keys and be unused.
    first_tile: its first query tile in the workspace of one head.
    """

    index: Any
    batch: Any
    query_start: Any
    key_start: Any
    num_queries: Any
    num_keys: Any
    stored_keys: Any
    first_tile: Any


def sequence(build: Build, p: Any, index: Int32) -> Sequence:
    """Sequence `index`, from the sizes of the struct or from cu_seqlens_q, cu_seqlens_k and seqused_k."""
    if not build.has("varlen"):
        first_tile = index * ceil_div(p.num_queries, build.tile_m)
        return Sequence(index, index, 0, 0, p.num_queries, p.num_keys, p.num_keys, first_tile)
    query_start, query_end, key_start, key_end = (
        params.scalar(bounds, Int32, index + end) for bounds in (p.cu_seqlens_q, p.cu_seqlens_k) for end in (0, 1)
    )
    stored = key_end - key_start
    used = params.scalar(p.seqused_k, Int32, index) if build.has("seqused") else stored
    first_tile = query_start // build.tile_m + index
    return Sequence(index, 0, query_start, key_start, query_end - query_start, used, stored, first_tile)


def band(build: Build, p: Any, of: Sequence) -> Band:
    """The mask of one sequence."""
    if build.mask == "full":
        return Band("full", 0, 0, of.num_queries, of.num_keys)
    diagonal = p.bottom_right * (of.num_keys - of.num_queries)
    return Band(build.mask, diagonal - p.window_left, diagonal + p.window_right, of.num_queries, of.num_keys)


def key_head(build: Build, p: Any, head: Int32) -> Int32:
    """The head of key and value that a query head reads."""
    return head // p.group if build.has("grouped") else head


def group_of(build: Build, p: Any) -> Any:
    """Query heads that share a head of key and value."""
    return p.group if build.has("grouped") else 1


def logsumexp_start(p: Any, batch: Int32, head: Int32) -> Int64:
    """Where the rows of (batch, head) start in logsumexp, in elements: [batch, heads, queries with padding]."""
    return (Int64(batch) * p.num_heads + head) * padded(p.num_queries)


def padded(num_queries: Any) -> Any:
    """Rows of logsumexp for so many queries."""
    return round_up(num_queries, LSE_PADDING)


def first_word(p: Any, of: Sequence, head: Int32) -> Int64:
    """Number of dropout's first random word of this sequence and query head, from philox_offset on.

    Heads lie num_queries * num_keys words apart, those of the longest sequences, in the forward and the backward.
    """
    return (Int64(of.index) * p.num_heads + head) * p.num_queries * p.num_keys
