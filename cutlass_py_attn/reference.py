"""Reference: attention forward and backward in NumPy, in float64 or as a framework would round it.

`precision="float64"` is the truth that kernels are measured against. The other precisions show what an
honest implementation loses: sums in float32, and every intermediate that an eager framework would store
is rounded to that type. How far such a result is from the truth is the yardstick of judge.py.

Layout is [batch, rows, heads, channels] (BMHK). Work proceeds by (sequence, head) and by blocks of queries,
so that memory grows with rows, not with rows squared. With scale, mask and `Terms`, per row i of a head:

    S_ij = softcap(scale <q_i, k_j>) + bias_ij - slope |i + Mk - Mq - j|, -inf where the mask hides j
    logsumexp_i = log(exp(sink) + sum_j exp(S_ij))
    P_ij = exp(S_ij - logsumexp_i),  Z_ij = 1 / (1 - p) if dropout keeps the pair, else 0
    O_i = sum_j Z_ij P_ij v_j

Every term is optional: without it its place in the formula is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.masks import Mask
from cutlass_py_attn.reference_terms import HeadTerms, Layout, Lengths, Sequence, Terms, expect, of_head, part_of

__all__ = ["DTYPES", "QUERY_BLOCK", "Array", "Gradients", "Lengths", "Terms", "backward", "forward"]

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# 256 rows of 4096 float64 scores are 8 MiB: the half dozen arrays of that size stay far from main memory's
# limits, and the matrix products are still large enough for BLAS.
QUERY_BLOCK = 256
NO_TERMS = Terms()


class Gradients(NamedTuple):
    """Gradients with the shapes of query, key, value, bias and sinks; None for a term that was not given."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """In which type sums are made, and to which type results are rounded."""

    sums: np.dtype[Any]
    stored: np.dtype[Any]

    @staticmethod
    def of(precision: str) -> _Arithmetic:
        if precision not in DTYPES:
            raise ValueError(f"precision {precision!r}: must be one of {', '.join(DTYPES)}")
        sums = DTYPES["float64" if precision == "float64" else "float32"]
        return _Arithmetic(sums, DTYPES[precision])

    @property
    def is_eager(self) -> bool:
        """Whether this imitates a framework in a low precision, and is not the truth."""
        return self.stored != DTYPES["float64"]

    def round(self, values: Array) -> Array:
        """The nearest values of the stored type, kept in the type of the sums."""
        if self.stored == self.sums:
            return values.astype(self.sums, copy=False)
        # A float16 that overflows becomes infinite, here as on a GPU: not worth a warning.
        with np.errstate(over="ignore"):
            return values.astype(self.sums, copy=False).astype(self.stored).astype(self.sums)

    def load(self, tensor: Array, batch: int, rows: slice, head: int) -> Array:
        """Rows of one head of a BMHK tensor as a dense, rounded matrix [rows, channels]."""
        return self.round(np.ascontiguousarray(tensor[batch, rows, head, :]))


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of query rows and the keys between the first and the last that they see.

    Some rows do not see all of `edge`, indices into keys: hidden is boolean [rows, edge], None for no edge.
    """

    rows: slice
    keys: slice
    edge: Array
    hidden: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """What the backward reads: whole tensors, or one head with rows [rows, channels] and logsumexp [rows]."""

    query: Array
    grad_output: Array
    output: Array
    key: Array
    value: Array
    logsumexp: Array

    def of_head(self, sequence: Sequence, head: int, group: int, arithmetic: _Arithmetic) -> _Operands:
        """One head of one sequence, rounded; logsumexp, which a framework keeps in float32, is not."""

        def load(tensor: Array, rows: slice, its_head: int) -> Array:
            return arithmetic.load(tensor, sequence.batch, rows, its_head)

        return _Operands(
            load(self.query, sequence.queries, head),
            load(self.grad_output, sequence.queries, head),
            load(self.output, sequence.queries, head),
            load(self.key, sequence.keys, head // group),
            load(self.value, sequence.keys, head // group),
            self.logsumexp[sequence.number, head, : sequence.num_queries].astype(arithmetic.sums),
        )


def forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask,
    scale: float | None = None,
    precision: str = "float64",
    terms: Terms = NO_TERMS,
) -> tuple[Array, Array]:
    """softmax(scale Q K^T, changed by the terms and masked) V, and the logarithm of the softmax's denominator.

    query [B, Mq, H, D], key [B, Mk, Hk, D], value [B, Mk, Hk, Dv] in any float dtype; Hk divides H, and query
    head h reads key head h // (H / Hk). scale None means 1/sqrt(D). precision is "float64", "float32",
    "float16" or "bfloat16" (see the module). terms: see `Terms`; with lengths B is 1, and n sequences with at
    most max_seqlen_q queries each share the rows.

    Returns output [B, Mq, H, Dv] and logsumexp [B or n, H, ceil32(Mq or max_seqlen_q)] (natural logarithm,
    of the changed and masked scores, without dropout), float64 for "float64" and float32 otherwise. Output
    holds values of the precision; logsumexp, which kernels keep in float32 for every input type, is not
    rounded further. A row whose scores are all hidden or -inf has output 0, and logsumexp -inf or its sink;
    behind a sequence's last row logsumexp is +inf. Rows outside of every sequence have output 0.

    Raises ValueError for ranks, sizes or terms that do not fit together and for an unknown precision.
    """
    layout = Layout.of(query, key, value, terms)
    arithmetic = _Arithmetic.of(precision)
    factor = arithmetic.sums.type(_scale(scale, layout))
    output = np.zeros(layout.output, arithmetic.sums)
    logsumexp = np.full(layout.logsumexp, np.inf, arithmetic.sums)
    for sequence, head, blocks in _heads(mask, layout):
        rows = output[sequence.batch, sequence.queries, head]
        lse = logsumexp[sequence.number, head, : sequence.num_queries]
        lse[:] = -np.inf if terms.sinks is None else terms.sinks[head]
        if not blocks:
            continue
        here = HeadTerms.of(terms, sequence, head)
        q = arithmetic.load(query, sequence.batch, sequence.queries, head)
        k, v = (arithmetic.load(x, sequence.batch, sequence.keys, head // layout.group) for x in (key, value))
        k = arithmetic.round(k * factor)
        for block in blocks:
            scores, _ = _scores(q, k, block, here, arithmetic)
            weights, lse[block.rows] = _softmax(scores, here.sink, arithmetic)
            multiplier = here.multiplier(block.rows, block.keys, arithmetic.sums)
            if multiplier is not None:
                weights = arithmetic.round(weights * multiplier)
            rows[block.rows] = arithmetic.round(weights @ v[block.keys])
    return output, logsumexp


def backward(
    grad_output: Array,
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    logsumexp: Array,
    *,
    mask: Mask,
    scale: float | None = None,
    precision: str = "float64",
    terms: Terms = NO_TERMS,
) -> Gradients:
    """Gradients of sum(output * grad_output) with respect to query, key, value, bias and sinks.

    Shapes, dtypes, scale, precision and terms as in `forward`; grad_output and output are [B, Mq, H, Dv] and
    logsumexp is as `forward` returns it. With P and Z as in the module and delta = rowsum(grad_output * output):
    dV = (Z P)^T dO, dS = P * (Z * dO V^T - delta), dbias = dS, dsink = -sum_i exp(sink - logsumexp_i) delta_i,
    and with dT = dS (1 - tanh^2(scale Q K^T / softcap)) for the scaled scores, dQ = scale dT K and
    dK = scale dT^T Q (Dao et al. 2022, FlashAttention, appendix B.2; the rest by the chain rule). dK and dV
    are sums over the query heads that share a key head, dbias over every axis where bias has size 1, dsink
    over all sequences.

    delta is always that of the output that is given: the caller chooses whose rounding it has, and a low
    precision should be given its own. In float64 P is that of the logsumexp given, and a row where that is
    -inf or +inf contributes nothing; a low precision imitates a framework that kept P, and computes it anew.
    A row whose scores are all hidden or -inf contributes nothing, whatever output and logsumexp hold for it.

    Returns gradients with the shapes of their tensors (see `Gradients`), 0 where no visible pair of a sequence
    reaches, float64 for "float64" and float32 otherwise.

    Raises ValueError for ranks, sizes or terms that do not fit together and for an unknown precision.
    """
    layout = Layout.of(query, key, value, terms)
    for name, tensor in (("grad_output", grad_output), ("output", output)):
        expect(name, tensor, layout.output)
    expect("logsumexp", logsumexp, layout.logsumexp)
    arithmetic = _Arithmetic.of(precision)
    factor = arithmetic.sums.type(_scale(scale, layout))
    grad_query, grad_key, grad_value = (np.zeros(tensor.shape, arithmetic.sums) for tensor in (query, key, value))
    grad_bias, grad_sinks = (
        None if term is None else np.zeros(term.shape, arithmetic.sums) for term in (terms.bias, terms.sinks)
    )
    operands = _Operands(query, grad_output, output, key, value, logsumexp)
    for sequence, head, blocks in _heads(mask, layout):
        if not blocks:
            continue
        subject = operands.of_head(sequence, head, layout.group, arithmetic)
        here = HeadTerms.of(terms, sequence, head)
        bias = None if grad_bias is None else of_head(grad_bias, sequence.number, head)
        parts = _backward_head(subject, here, blocks, bias, factor, arithmetic)
        grad_query[sequence.batch, sequence.queries, head] = parts.query
        grad_key[sequence.batch, sequence.keys, head // layout.group] += parts.key
        grad_value[sequence.batch, sequence.keys, head // layout.group] += parts.value
        if grad_sinks is not None:
            grad_sinks[head] += parts.sinks
    # A framework stores each head's gradients, and then the sum over the heads of a group.
    grad_key, grad_value = arithmetic.round(grad_key), arithmetic.round(grad_value)
    grad_bias = None if grad_bias is None else arithmetic.round(grad_bias)
    return Gradients(grad_query, grad_key, grad_value, grad_bias, grad_sinks)


def _backward_head(
    head: _Operands,
    terms: HeadTerms,
    blocks: list[_Block],
    grad_bias: Array | None,
    scale: Any,
    arithmetic: _Arithmetic,
) -> Gradients:
    """The gradients of one head; dbias is added to grad_bias [rows or 1, keys or 1], not returned."""
    q, v = head.query, head.value
    scaled_k = arithmetic.round(head.key * scale)
    grad_q, grad_k, grad_v = (np.zeros_like(operand) for operand in (q, head.key, v))
    grad_sink = np.zeros((), arithmetic.sums)
    for block in blocks:
        scores, tanh = _scores(q, scaled_k, block, terms, arithmetic)
        grad_rows = head.grad_output[block.rows]
        grad_weights = arithmetic.round(grad_rows @ v[block.keys].T)
        lse = head.logsumexp[block.rows]
        if arithmetic.is_eager:
            weights, lse = _softmax(scores, terms.sink, arithmetic)
        else:
            weights = _weights(scores, lse)
        kept = weights
        multiplier = terms.multiplier(block.rows, block.keys, arithmetic.sums)
        if multiplier is not None:
            kept = arithmetic.round(weights * multiplier)
            grad_weights = arithmetic.round(grad_weights * multiplier)
        delta = (grad_rows * head.output[block.rows]).sum(axis=1, keepdims=True)
        # Others store NaN as the output of a row without keys; 0 * NaN must not reach the gradients.
        empty = ~weights.any(axis=1)
        delta[empty] = 0
        grad_scores = arithmetic.round(weights * (grad_weights - delta))
        if terms.sink is not None:
            sink_weights = arithmetic.round(np.exp(arithmetic.sums.type(terms.sink) - np.where(empty, np.inf, lse)))
            grad_sink -= arithmetic.round(sink_weights * delta[:, 0]).sum()
        if grad_bias is not None:
            part = part_of(grad_bias, block.rows, block.keys)
            part += grad_scores.sum(axis=tuple(axis for axis in (0, 1) if grad_bias.shape[axis] == 1), keepdims=True)
        if tanh is not None:
            grad_scores = arithmetic.round(grad_scores * (1 - tanh * tanh))
        grad_v[block.keys] += kept.T @ grad_rows
        grad_q[block.rows] = grad_scores @ scaled_k[block.keys]
        grad_k[block.keys] += grad_scores.T @ q[block.rows]
    grad_k = arithmetic.round(arithmetic.round(grad_k) * scale)
    return Gradients(arithmetic.round(grad_q), grad_k, arithmetic.round(grad_v), None, grad_sink)


def _heads(mask: Mask, layout: Layout) -> Iterator[tuple[Sequence, int, list[_Block]]]:
    """Every head of every sequence, with the blocks of that sequence."""
    for sequence in layout.sequences:
        blocks = list(_blocks(mask, sequence.num_queries, sequence.num_keys))
        for head in range(layout.num_heads):
            yield sequence, head, blocks


def _blocks(mask: Mask, num_queries: int, num_keys: int) -> Iterator[_Block]:
    """Blocks of query rows that see at least one key; keys before the first and behind the last are left out."""
    keys = np.arange(num_keys)[None, :]
    for start in range(0, num_queries, QUERY_BLOCK):
        rows = np.arange(start, min(start + QUERY_BLOCK, num_queries))[:, None]
        seen = np.broadcast_to(mask.sees(rows, keys, num_queries, num_keys), (rows.size, keys.size))
        reached = np.flatnonzero(seen.any(axis=0))
        if reached.size == 0:
            continue
        inside = slice(int(reached[0]), int(reached[-1]) + 1)
        # Only the edge is kept: of a causal mask it is a square on the diagonal, however many keys there are.
        edge = np.flatnonzero(~seen[:, inside].all(axis=0))
        hidden = ~seen[:, inside][:, edge] if edge.size else None
        yield _Block(slice(start, start + rows.size), inside, edge, hidden)


def _scores(
    q: Array, scaled_k: Array, block: _Block, terms: HeadTerms, arithmetic: _Arithmetic
) -> tuple[Array, Array | None]:
    """Scores of one block, -inf where the mask hides the key; and with a softcap tanh(scaled scores / softcap)."""
    scores = arithmetic.round(q[block.rows] @ scaled_k[block.keys].T)
    tanh = None
    if terms.softcap:
        softcap = arithmetic.sums.type(terms.softcap)
        tanh = arithmetic.round(np.tanh(arithmetic.round(scores / softcap)))
        scores = arithmetic.round(tanh * softcap)
    added = terms.alibi(block.rows, block.keys, arithmetic.sums)
    if terms.bias is not None:
        bias = arithmetic.round(part_of(terms.bias, block.rows, block.keys))
        added = bias if added is None else bias + added
    if added is not None:
        scores = arithmetic.round(scores + added)
    if block.hidden is not None:
        scores[:, block.edge] = np.where(block.hidden, -np.inf, scores[:, block.edge])
    return scores, tanh


def _softmax(scores: Array, sink: float | None, arithmetic: _Arithmetic) -> tuple[Array, Array]:
    """Row-wise softmax and logsumexp [rows]; a row of -inf has weights 0, and logsumexp -inf or its sink."""
    top = scores.max(axis=1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, arithmetic.sums.type(sink))
    # Subtracting -inf from -inf would make the NaN that rows without keys must not have.
    top[np.isneginf(top)] = 0
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    if sink is not None:
        total += np.exp(arithmetic.sums.type(sink) - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    weights /= np.where(total == 0, 1, total)
    return arithmetic.round(weights), lse


def _weights(scores: Array, lse: Array) -> Array:
    """exp(scores - logsumexp), 0 on rows whose logsumexp is infinite and on rows of -inf, whatever it is there."""
    off = np.isinf(lse)
    unknown = np.flatnonzero(np.isnan(lse))
    off[unknown] = np.isneginf(scores[unknown]).all(axis=1)
    weights: Array = np.exp(scores - np.where(off, np.inf, lse)[:, None])
    return weights


def _scale(scale: float | None, layout: Layout) -> float:
    return 1.0 / math.sqrt(layout.head_dim) if scale is None else float(scale)
