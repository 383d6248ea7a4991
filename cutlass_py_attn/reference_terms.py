"""Reference terms: what decides attention beside Q, K, V and a mask, and which rows form a sequence.

`Terms` and `Lengths` are what a caller of reference.py gives. `Layout` is the problem they describe, checked, as
a list of sequences; `HeadTerms` is what they say of one head of one sequence. Nothing here rounds: in which
precision a term is added is the business of reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.problem import LSE_PADDING

Array = npt.NDArray[Any]
Keep = Callable[[int, int, int, int], Array]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lengths:
    """Sequences of various lengths, one behind the other in tensors [1, total rows, heads, channels].

    cu_seqlens_q, cu_seqlens_k: integers [n + 1]; sequence b has the query rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] - 1, and the key rows likewise. Rows outside of every sequence are never read.
    seqused_k: integers [n]; sequence b has that many keys from cu_seqlens_k[b] on, wherever the next one starts.
    max_seqlen_q, max_seqlen_k: no sequence is longer; they are the sizes of logsumexp and bias.
    """

    cu_seqlens_q: Array
    cu_seqlens_k: Array
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What changes the scores S = scale Q K^T, the softmax and its weights; the default changes nothing.

    B is the batch, or the number n of sequences where `lengths` is given; Mq and Mk are then its maxima. H is
    the number of query heads. Indices i and j count inside the sequence. In the order in which they apply:

    softcap: S becomes softcap * tanh(S / softcap) (Gemma Team 2024, Gemma 2, section 2); 0 leaves it.
    bias: [B or 1, H or 1, Mq or 1, Mk or 1], any float dtype, added to S; -inf hides a pair.
    alibi_slopes: float32 [H] or [B, H]; -slope * |i + Mk - Mq - j| is added to S, with the lengths of the
        sequence (Press et al. 2022, ALiBi, with the distance measured to both sides).
    sinks: float32 [H]; one more score in the softmax of every row of the head, without a value (Xiao et al.
        2024, StreamingLLM, as learned logits). It counts in logsumexp.
    keep: keep(b, head, num_queries, num_keys) is the boolean [num_queries, num_keys] of the weights of one
        head of sequence b that dropout keeps; num_queries and num_keys are that sequence's own.
    dropout_p: probability of dropping, in [0, 1], read as float32; what is kept is multiplied by 1 / (1 - p).
    lengths: variable length; None for tensors in which every batch is one sequence.
    """

    bias: Array | None = None
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    keep: Keep | None = None
    dropout_p: float = 0.0
    lengths: Lengths | None = None

    @property
    def kept_factor(self) -> float:
        """1 / (1 - p), made in double from float32(p) and rounded to float32; 0 where everything is dropped."""
        left = 1.0 - float(np.float32(self.dropout_p))
        return float(np.float32(1.0 / left)) if left > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: its number, its batch in the tensors and its rows there."""

    number: int
    batch: int
    queries: slice
    keys: slice

    @property
    def num_queries(self) -> int:
        """Rows of queries."""
        return int(self.queries.stop - self.queries.start)

    @property
    def num_keys(self) -> int:
        """Rows of keys."""
        return int(self.keys.stop - self.keys.start)


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked problem: its sequences, how many query heads share a key head (group), and the results' shapes."""

    sequences: tuple[Sequence, ...]
    num_heads: int
    group: int
    head_dim: int
    output: tuple[int, ...]
    logsumexp: tuple[int, ...]

    @staticmethod
    def of(query: Array, key: Array, value: Array, terms: Terms) -> Layout:
        """The layout of query [B, Mq, H, D], key [B, Mk, Hk, D], value [B, Mk, Hk, Dv] under these terms.

        Raises ValueError, naming what was given and what must be, for anything that does not fit together.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.ndim != 4:
                raise ValueError(f"{name}: shape {tensor.shape} has rank {tensor.ndim}, must have rank 4 (BMHK)")
        batch, num_queries, num_heads, head_dim = query.shape
        num_keys, num_heads_key = key.shape[1:3]
        if head_dim == 0:
            raise ValueError(f"query: shape {query.shape} has no channels, must have at least one")
        expect("key", key, (batch, num_keys, num_heads_key, head_dim))
        expect("value", value, (batch, num_keys, num_heads_key, value.shape[3]))
        if num_heads_key != num_heads and (num_heads_key == 0 or num_heads % num_heads_key):
            raise ValueError(f"key: {num_heads_key} heads, must be a divisor of query's {num_heads}")
        output = (batch, num_queries, num_heads, value.shape[3])
        sequences = tuple(
            Sequence(number, number, slice(0, num_queries), slice(0, num_keys)) for number in range(batch)
        )
        if terms.lengths is not None:
            sequences = _packed(terms.lengths, batch, num_queries, num_keys)
            num_queries, num_keys = terms.lengths.max_seqlen_q, terms.lengths.max_seqlen_k
        logsumexp = (len(sequences), num_heads, round_up(num_queries, LSE_PADDING))
        _check(terms, (len(sequences), num_heads, num_queries, num_keys))
        group = num_heads // num_heads_key if num_heads_key else 1
        return Layout(sequences, num_heads, group, head_dim, output, logsumexp)


@dataclass(frozen=True, slots=True, eq=False)
class HeadTerms:
    """The terms of one head of one sequence.

    bias is [num_queries or 1, num_keys or 1] or longer, keep boolean [num_queries, num_keys]. offset is the
    diagonal key of query 0, for ALiBi. None stands for a term that is not there, and 0 for no softcap.
    """

    softcap: float
    bias: Array | None
    slope: float | None
    offset: int
    sink: float | None
    keep: Array | None
    kept_factor: float

    @staticmethod
    def of(terms: Terms, sequence: Sequence, head: int) -> HeadTerms:
        """What `terms` say; ValueError when keep returns another shape than the sequence's."""
        size = (sequence.num_queries, sequence.num_keys)
        keep = None if terms.keep is None else terms.keep(sequence.number, head, *size)
        if keep is not None and keep.shape != size:
            raise ValueError(f"keep: returned shape {keep.shape} for sequence {sequence.number}, must be {size}")
        slopes = terms.alibi_slopes
        return HeadTerms(
            softcap=float(terms.softcap),
            bias=None if terms.bias is None else of_head(terms.bias, sequence.number, head),
            slope=None if slopes is None else float(of_head(np.atleast_2d(slopes), sequence.number, head)),
            offset=size[1] - size[0],
            sink=None if terms.sinks is None else float(terms.sinks[head]),
            keep=keep,
            kept_factor=terms.kept_factor,
        )

    def alibi(self, rows: slice, keys: slice, dtype: np.dtype[Any]) -> Array | None:
        """What ALiBi adds to the scores of these rows and keys, in that dtype; None without slopes."""
        if self.slope is None:
            return None
        diagonal = np.arange(rows.start, rows.stop)[:, None] + self.offset
        distance = np.abs(diagonal - np.arange(keys.start, keys.stop)[None, :])
        return distance.astype(dtype) * dtype.type(-self.slope)

    def multiplier(self, rows: slice, keys: slice, dtype: np.dtype[Any]) -> Array | None:
        """What dropout multiplies the weights of these rows and keys with, in that dtype; None without dropout."""
        if self.keep is None:
            return None
        return self.keep[rows, keys].astype(dtype) * dtype.type(self.kept_factor)


def of_head(tensor: Array, number: int, head: int) -> Array:
    """tensor[sequence, head], a view; an axis of size 1 is the same for all."""
    part: Array = tensor[number if tensor.shape[0] > 1 else 0, head if tensor.shape[1] > 1 else 0]
    return part


def part_of(matrix: Array, rows: slice, keys: slice) -> Array:
    """These rows and keys of a matrix, a view; an axis of size 1 stays whole."""
    part: Array = matrix[rows if matrix.shape[0] > 1 else slice(None), keys if matrix.shape[1] > 1 else slice(None)]
    return part


def expect(name: str, tensor: Array, shape: tuple[int, ...]) -> None:
    """ValueError unless the tensor has that shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tensor.shape} does not fit the other tensors, must be {shape}")


def _check(terms: Terms, sizes: tuple[int, int, int, int]) -> None:
    """ValueError for a term that does not fit sizes [sequences, heads, queries, keys] or is out of range."""
    number, num_heads = sizes[:2]
    bias, slopes, sinks = terms.bias, terms.alibi_slopes, terms.sinks
    if bias is not None and (bias.ndim != 4 or any(a not in (1, b) for a, b in zip(bias.shape, sizes, strict=True))):
        raise ValueError(f"bias: shape {bias.shape}, must be {sizes}, or 1 in some of its places")
    if slopes is not None and slopes.shape not in ((num_heads,), (number, num_heads)):
        raise ValueError(f"alibi_slopes: shape {slopes.shape}, must be {(num_heads,)} or {(number, num_heads)}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks: shape {sinks.shape}, must be {(num_heads,)}")
    if not 0 <= terms.softcap < math.inf:
        raise ValueError(f"softcap {terms.softcap}: must be a finite number of at least 0")
    if not 0 <= terms.dropout_p <= 1:
        raise ValueError(f"dropout_p {terms.dropout_p}: must be from 0 to 1")
    if terms.dropout_p and terms.keep is None:
        raise ValueError(f"dropout_p {terms.dropout_p}: keep must say which weights are kept")


def _packed(lengths: Lengths, batch: int, num_queries: int, num_keys: int) -> tuple[Sequence, ...]:
    """The sequences of packed tensors with so many rows; ValueError for lengths that do not fit."""
    if batch != 1:
        raise ValueError(f"query: batch {batch}, must be 1 where lengths are given")
    query_starts = _starts("cu_seqlens_q", lengths.cu_seqlens_q, num_queries)
    key_starts = _starts("cu_seqlens_k", lengths.cu_seqlens_k, num_keys)
    if len(key_starts) != len(query_starts):
        raise ValueError(f"cu_seqlens_k: {len(key_starts)} entries, must be {len(query_starts)} as cu_seqlens_q")
    num_used = [stop - start for start, stop in pairwise(key_starts)]
    if lengths.seqused_k is not None:
        num_used = _integers("seqused_k", lengths.seqused_k)
        if len(num_used) != len(key_starts) - 1:
            raise ValueError(f"seqused_k: {len(num_used)} entries, must be {len(key_starts) - 1}")
    sequences = []
    for number, used in enumerate(num_used):
        queries = slice(query_starts[number], query_starts[number + 1])
        keys = slice(key_starts[number], key_starts[number] + used)
        if used < 0 or keys.stop > num_keys:
            raise ValueError(f"seqused_k: {used} keys from row {keys.start} on, must lie within {num_keys} rows")
        sequence = Sequence(number, 0, queries, keys)
        if sequence.num_queries > lengths.max_seqlen_q:
            raise ValueError(f"max_seqlen_q {lengths.max_seqlen_q}: sequence {number} has {sequence.num_queries} rows")
        if used > lengths.max_seqlen_k:
            raise ValueError(f"max_seqlen_k {lengths.max_seqlen_k}: sequence {number} has {used} keys")
        sequences.append(sequence)
    return tuple(sequences)


def _starts(name: str, values: Array, rows: int) -> list[int]:
    """The starts of the sequences and the end of the last; ValueError unless they rise within the rows."""
    starts = _integers(name, values)
    if not starts or sorted(starts) != starts or starts[0] < 0 or starts[-1] > rows:
        raise ValueError(f"{name}: {starts}, must be one number or more that rise from 0 to at most {rows}")
    return starts


def _integers(name: str, values: Array) -> list[int]:
    """The values as ints; ValueError unless they are a vector of integers."""
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name}: {values.dtype} {values.shape}, must be a vector of integers")
    return [int(value) for value in values]
