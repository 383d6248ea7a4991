"""Score modification of the reference: score terms, sinks, dropout and variable lengths of one call.

A caller of numpy_reference.py passes `ReferenceScoreMod` and `CuSeqlens`. `Layout` is the checked problem as a list of
sequences, and `HeadScoreMod` holds the terms of one head of one sequence. The formulas of the terms are in their files,
score_terms/<term>.py. Nothing here rounds: numpy_reference.py decides in which precision a term is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.tensors import LSE_PADDING, Shape
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.dropout import DROPOUT
from cutlass_py_attn.score_terms.term import ScoreTerm

Array = npt.NDArray[Any]
Keep = Callable[[int, int, int, int], Array]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CuSeqlens:
    """Sequences of various lengths, one behind the other in tensors (1, total rows, num_heads, channels).

    cu_seqlens_q, cu_seqlens_k: (count + 1,) integers; sequence b has the query rows cu_seqlens_q[b] to
        cu_seqlens_q[b + 1] - 1, and the key rows likewise. Rows outside of every sequence are never read.
    max_seqlen_q, max_seqlen_k: length of the longest sequence, or more; the sizes of logsumexp and bias
    seqused_k: (count,) integers, how many keys sequence b uses from cu_seqlens_k[b] on; None for all
    """

    cu_seqlens_q: Array
    cu_seqlens_k: Array
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceScoreMod:
    """What changes the scores S = scale Q K^T, the softmax and its weights; the default changes nothing.

    B is the batch size, or the number of sequences when `cu_seqlens` is given; Mq and Mk are then its maxima. H is the
    number of query heads. Indices i and j count inside the sequence. The terms apply in this order:

    softcap: S becomes softcap * tanh(S / softcap); 0 for none
    bias: (B or 1, H or 1, Mq or 1, Mk or 1) of any float dtype, added to S; -inf hides a pair
    alibi_slopes: (H,) or (B, H) float32; -slope * |i + Mk - Mq - j| is added to S, with the lengths of the sequence
    score_terms: arrays of registered terms by name; each term adds to S
    sinks: (H,) float32; one more score in the softmax of every row of the head, without a value. It counts in
        logsumexp.
    keep: function of (b, head, num_queries, num_keys) that returns which weights of one head of sequence b dropout
        keeps, (num_queries, num_keys) bool; num_queries and num_keys are those of the sequence
    dropout_p: probability that a weight is dropped, in [0, 1], read as float32; kept weights are multiplied by
        1 / (1 - dropout_p)
    cu_seqlens: the variable-length layout; None when every batch is one sequence
    """

    bias: Array | None = None
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    keep: Keep | None = None
    dropout_p: float = 0.0
    cu_seqlens: CuSeqlens | None = None
    score_terms: Mapping[str, Array] = field(default_factory=dict)

    def array(self, term: ScoreTerm) -> Array | None:
        """Returns the array of a term; None without it."""
        found: Array | None = getattr(self, term.field) if term.field else self.score_terms.get(term.name)
        return found


@dataclass(frozen=True, slots=True)
class SeqlenInfo:
    """One sequence: its index, its batch in the tensors and its rows there."""

    index: int
    batch: int
    queries: slice
    keys: slice

    @property
    def num_queries(self) -> int:
        """Number of query rows."""
        return int(self.queries.stop - self.queries.start)

    @property
    def num_keys(self) -> int:
        """Number of key rows."""
        return int(self.keys.stop - self.keys.start)


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked problem.

    sequences: every sequence
    num_heads: query heads
    group: query heads that share one key head
    head_dim: columns of query and key
    output, logsumexp: shapes of the results
    """

    sequences: tuple[SeqlenInfo, ...]
    num_heads: int
    group: int
    head_dim: int
    output: tuple[int, ...]
    logsumexp: tuple[int, ...]

    @staticmethod
    def create(query: Array, key: Array, value: Array, score_mod: ReferenceScoreMod) -> Layout:
        """Returns the layout of query (B, Mq, H, D), key (B, Mk, Hk, D) and value (B, Mk, Hk, Dv).

        Raises ValueError for shapes that do not fit together; it says what was given and what is allowed.
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
            SeqlenInfo(number, number, slice(0, num_queries), slice(0, num_keys)) for number in range(batch)
        )
        if score_mod.cu_seqlens is not None:
            sequences = _packed(score_mod.cu_seqlens, batch, num_queries, num_keys)
            num_queries, num_keys = score_mod.cu_seqlens.max_seqlen_q, score_mod.cu_seqlens.max_seqlen_k
        logsumexp = (len(sequences), num_heads, round_up(num_queries, LSE_PADDING))
        _check(score_mod, (len(sequences), num_heads, num_queries, num_keys))
        group = num_heads // num_heads_key if num_heads_key else 1
        return Layout(sequences, num_heads, group, head_dim, output, logsumexp)


@dataclass(frozen=True, slots=True, eq=False)
class HeadScoreMod:
    """The score terms of one head of one sequence.

    softcap: 0 for none
    added: terms that add to the scores, each with its operand of this head
    sink: logit of the head; None for none
    keep: (num_queries, num_keys) bool, which weights dropout keeps; None without dropout
    dropout_p: probability that a weight is dropped
    num_queries, num_keys: lengths of the sequence
    """

    softcap: float
    added: tuple[tuple[ScoreTerm, Any], ...]
    sink: float | None
    keep: Array | None
    dropout_p: float
    num_queries: int
    num_keys: int

    @staticmethod
    def create(score_mod: ReferenceScoreMod, sequence: SeqlenInfo, head: int) -> HeadScoreMod:
        """Returns the terms of one head; ValueError when `keep` returns another shape than the sequence's."""
        size = (sequence.num_queries, sequence.num_keys)
        keep = None if score_mod.keep is None else score_mod.keep(sequence.index, head, *size)
        if keep is not None and keep.shape != size:
            raise ValueError(f"keep: returned shape {keep.shape} for sequence {sequence.index}, must be {size}")
        added = tuple(
            (term, term.reference_operand(array, sequence.index, head))
            for term in registry.terms()
            if term.modifies_scores and not term.scales_products and (array := score_mod.array(term)) is not None
        )
        return HeadScoreMod(
            softcap=float(score_mod.softcap),
            added=added,
            sink=None if score_mod.sinks is None else float(score_mod.sinks[head]),
            keep=keep,
            dropout_p=score_mod.dropout_p,
            num_queries=size[0],
            num_keys=size[1],
        )

    def sum_of_added(
        self, rows: slice, keys: slice, dtype: np.dtype[Any], rounded: Callable[[Array], Array]
    ) -> Array | None:
        """Returns what all terms add to the scores of these rows and keys; None when no term adds anything."""
        tile = ScoreTile(rows, keys, self.num_queries, self.num_keys, dtype, rounded)
        total: Array | None = None
        for term, operand in self.added:
            part = term.reference_added(tile, operand)
            total = part if total is None else total + part
        return total

    def multiplier(self, rows: slice, keys: slice, dtype: np.dtype[Any]) -> Array | None:
        """Returns what dropout multiplies the weights of these rows and keys by; None without dropout."""
        return None if self.keep is None else DROPOUT.reference_multiplier(self.keep[rows, keys], self.dropout_p, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTile:
    """A block of scores, as score terms see it: some rows and some keys of one head.

    rows, key_range: query indices and key indices inside the sequence
    num_queries, num_keys: lengths of the sequence
    dtype: type in which the scores are summed
    rounded: rounds an array to what a framework would store, and keeps `dtype`
    """

    rows: slice
    key_range: slice
    num_queries: int
    num_keys: int
    dtype: np.dtype[Any]
    rounded: Callable[[Array], Array]

    @property
    def queries(self) -> Array:
        """Query indices of the rows, (rows, 1) int64."""
        return np.arange(self.rows.start, self.rows.stop)[:, None]

    @property
    def keys(self) -> Array:
        """Key indices of the columns, (1, keys) int64."""
        return np.arange(self.key_range.start, self.key_range.stop)[None, :]

    def part_of(self, matrix: Array) -> Array:
        """Returns the part of a (num_queries or 1, num_keys or 1) matrix that belongs to this tile."""
        return part_of(matrix, self.rows, self.key_range)


def of_head(tensor: Array, number: int, head: int) -> Array:
    """Returns tensor[sequence, head] as a view; an axis of size 1 broadcasts."""
    part: Array = tensor[number if tensor.shape[0] > 1 else 0, head if tensor.shape[1] > 1 else 0]
    return part


def part_of(matrix: Array, rows: slice, keys: slice) -> Array:
    """Returns these rows and keys of a matrix as a view; an axis of size 1 stays whole."""
    part: Array = matrix[rows if matrix.shape[0] > 1 else slice(None), keys if matrix.shape[1] > 1 else slice(None)]
    return part


def expect(name: str, tensor: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the tensor has that shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tensor.shape} does not fit the other tensors, must be {shape}")


def _check(score_mod: ReferenceScoreMod, sizes: tuple[int, int, int, int]) -> None:
    """Raises ValueError for a term that does not fit sizes (sequences, heads, queries, keys) or is out of range."""
    number, num_heads, num_queries, num_keys = sizes
    shape = Shape(number, num_queries, num_keys, num_heads, 1, 1)
    bias = score_mod.bias
    if bias is not None and (bias.ndim != 4 or any(a not in (1, b) for a, b in zip(bias.shape, sizes, strict=True))):
        raise ValueError(f"bias: shape {bias.shape}, must be {sizes}, or 1 in some of its places")
    for term in registry.terms():
        array = score_mod.array(term) if term.vector is not None else None
        if array is not None and term.vector is not None and array.shape not in term.vector.shapes(shape):
            allowed = " or ".join(str(item) for item in term.vector.shapes(shape))
            raise ValueError(f"{term.vector.name}: shape {array.shape}, must be {allowed}")
    if unknown := sorted(set(score_mod.score_terms) - set(registry.registered())):
        raise ValueError(f"score_terms: {', '.join(unknown)} must be registered terms")
    if not 0 <= score_mod.softcap < math.inf:
        raise ValueError(f"softcap {score_mod.softcap}: must be a finite number of at least 0")
    if not 0 <= score_mod.dropout_p <= 1:
        raise ValueError(f"dropout_p {score_mod.dropout_p}: must be from 0 to 1")
    if score_mod.dropout_p and score_mod.keep is None:
        raise ValueError(f"dropout_p {score_mod.dropout_p}: keep must say which weights are kept")


def _packed(lengths: CuSeqlens, batch: int, num_queries: int, num_keys: int) -> tuple[SeqlenInfo, ...]:
    """Returns the sequences of packed tensors of these rows; ValueError for lengths that do not fit."""
    if batch != 1:
        raise ValueError(f"query: batch {batch}, must be 1 with cu_seqlens")
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
        sequence = SeqlenInfo(number, 0, queries, keys)
        if sequence.num_queries > lengths.max_seqlen_q:
            raise ValueError(f"max_seqlen_q {lengths.max_seqlen_q}: sequence {number} has {sequence.num_queries} rows")
        if used > lengths.max_seqlen_k:
            raise ValueError(f"max_seqlen_k {lengths.max_seqlen_k}: sequence {number} has {used} keys")
        sequences.append(sequence)
    return tuple(sequences)


def _starts(name: str, values: Array, rows: int) -> list[int]:
    """Returns the starts of the sequences and the end of the last; ValueError unless they rise within the rows."""
    starts = _integers(name, values)
    if not starts or sorted(starts) != starts or starts[0] < 0 or starts[-1] > rows:
        raise ValueError(f"{name}: {starts}, must be one number or more that rise from 0 to at most {rows}")
    return starts


def _integers(name: str, values: Array) -> list[int]:
    """Returns the values as ints; ValueError unless they are a vector of integers."""
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name}: {values.dtype} {values.shape}, must be a vector of integers")
    return [int(value) for value in values]
