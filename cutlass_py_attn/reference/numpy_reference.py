"""Reference: attention forward and backward in NumPy, in float64 or rounded as an eager framework rounds.

`precision="float64"` is the result that kernels are compared with. In the other precisions sums are float32, and every
intermediate that an eager framework would store is rounded to that type. testing/accuracy.py allows a kernel an error
relative to the error of such a result.

The layout is (batch, rows, num_heads, channels) (BMHK). The loops run over (sequence, head) and over blocks of queries,
so that memory grows with the number of rows, not with its square. For row i of a head:

    S_ij = softcap(scale <q_i, k_j>) + bias_ij - slope |i + Mk - Mq - j| + registered terms, -inf where masked
    logsumexp_i = log(exp(sink) + sum_j exp(S_ij))
    P_ij = exp(S_ij - logsumexp_i),  Z_ij = 1 / (1 - p) if dropout keeps the pair, else 0
    O_i = sum_j Z_ij P_ij v_j

Every score term is optional; score_terms/<term>.py has its formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.reference.score_mod import (
    CuSeqlens,
    HeadScoreMod,
    Layout,
    ReferenceScoreMod,
    SeqlenInfo,
    expect,
    of_head,
    part_of,
)
from cutlass_py_attn.score_terms.sinks import SINKS
from cutlass_py_attn.score_terms.softcap import SOFTCAP

__all__ = ["DTYPES", "QUERY_BLOCK", "Array", "CuSeqlens", "Gradients", "ReferenceScoreMod", "backward", "forward"]

Array = npt.NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# 256 rows of 4096 float64 scores are 8 MiB: the six arrays of that size fit any machine's memory, and the matrix
# products are still large enough for BLAS to be fast.
QUERY_BLOCK = 256
NO_SCORE_MOD = ReferenceScoreMod()


class Gradients(NamedTuple):
    """Gradients with the shapes of query, key, value, bias and sinks; None for a bias or sinks that were not given."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None


@dataclass(frozen=True, slots=True)
class _Arithmetic:
    """Types of a precision: `sums` is the type of sums, `stored` the type that intermediates are rounded to."""

    sums: np.dtype[Any]
    stored: np.dtype[Any]

    @staticmethod
    def create(precision: str) -> _Arithmetic:
        """Returns the types of a precision; ValueError for an unknown one."""
        if precision not in DTYPES:
            raise ValueError(f"precision {precision!r}: must be one of {', '.join(DTYPES)}")
        sums = DTYPES["float64" if precision == "float64" else "float32"]
        return _Arithmetic(sums, DTYPES[precision])

    @property
    def is_eager(self) -> bool:
        """Whether results are rounded as an eager framework rounds them."""
        return self.stored != DTYPES["float64"]

    def round(self, values: Array) -> Array:
        """Returns the nearest values of the stored type, in the type of the sums."""
        if self.stored == self.sums:
            return values.astype(self.sums, copy=False)
        # A float16 that overflows becomes infinite, as on a GPU: NumPy's warning says nothing new.
        with np.errstate(over="ignore"):
            return values.astype(self.sums, copy=False).astype(self.stored).astype(self.sums)

    def load(self, tensor: Array, batch: int, rows: slice, head: int) -> Array:
        """Returns rows of one head of a BMHK tensor as a dense, rounded (rows, channels) matrix."""
        return self.round(np.ascontiguousarray(tensor[batch, rows, head, :]))


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of query rows, and the keys from the first to the last that any of its rows sees.

    rows, keys: index ranges inside the sequence
    edge: key positions, relative to the first of `keys`, that some row of the block does not see
    hidden: (rows, edge) bool, which of them each row does not see; None for no edge
    """

    rows: slice
    keys: slice
    edge: Array
    hidden: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """Operands of the backward: whole tensors, or one head as (rows, channels) matrices and (rows,) logsumexp.

    grad_logsumexp: laid out like logsumexp; None for 0.
    """

    query: Array
    grad_output: Array
    output: Array
    key: Array
    value: Array
    logsumexp: Array
    grad_logsumexp: Array | None

    def of_head(self, sequence: SeqlenInfo, head: int, group: int, arithmetic: _Arithmetic) -> _Operands:
        """Returns one head of one sequence, rounded; logsumexp, which a framework keeps in float32, is not."""

        def load(tensor: Array, rows: slice, its_head: int) -> Array:
            return arithmetic.load(tensor, sequence.batch, rows, its_head)

        rows = sequence.index, head, slice(0, sequence.num_queries)
        grad_logsumexp = None if self.grad_logsumexp is None else self.grad_logsumexp[rows].astype(arithmetic.sums)
        return _Operands(
            load(self.query, sequence.queries, head),
            load(self.grad_output, sequence.queries, head),
            load(self.output, sequence.queries, head),
            load(self.key, sequence.keys, head // group),
            load(self.value, sequence.keys, head // group),
            self.logsumexp[rows].astype(arithmetic.sums),
            grad_logsumexp,
        )


def forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask | ArrayMask,
    scale: float | None = None,
    precision: str = "float64",
    score_mod: ReferenceScoreMod = NO_SCORE_MOD,
) -> tuple[Array, Array]:
    """Returns softmax(modified and masked scale Q K^T) V, and the logarithm of the softmax's denominator.

    query: (B, Mq, H, D) of any float dtype
    key, value: (B, Mk, Hk, D) and (B, Mk, Hk, Dv); Hk divides H, and query head h reads key head h // (H / Hk)
    scale: factor of Q K^T; None for 1/sqrt(D)
    precision: "float64", "float32", "float16" or "bfloat16", as in the module's docstring
    score_mod: score terms; with cu_seqlens B is 1, and n sequences of at most max_seqlen_q queries share the rows

    output is (B, Mq, H, Dv), logsumexp (B or n, H, ceil32(Mq or max_seqlen_q)); both are float64 for "float64" and
    float32 otherwise. logsumexp is a natural logarithm, without dropout. Output holds values of the precision;
    logsumexp, which kernels keep in float32 for every input type, is not rounded further. A row whose scores are all
    hidden or -inf has output 0, and logsumexp -inf or its sink. Behind the last row of a sequence logsumexp is +inf.
    Rows outside of every sequence have output 0.

    Raises ValueError for ranks, sizes or score terms that do not fit together, and for an unknown precision.
    """
    layout = Layout.create(query, key, value, score_mod)
    arithmetic = _Arithmetic.create(precision)
    factor = arithmetic.sums.type(_scale(scale, layout))
    output = np.zeros(layout.output, arithmetic.sums)
    logsumexp = np.full(layout.logsumexp, np.inf, arithmetic.sums)
    for sequence, head, blocks in _heads(mask, layout):
        rows = output[sequence.batch, sequence.queries, head]
        lse = logsumexp[sequence.index, head, : sequence.num_queries]
        lse[:] = -np.inf if score_mod.sinks is None else score_mod.sinks[head]
        if not blocks:
            continue
        terms = HeadScoreMod.create(score_mod, sequence, head)
        q = arithmetic.load(query, sequence.batch, sequence.queries, head)
        k, v = (arithmetic.load(x, sequence.batch, sequence.keys, head // layout.group) for x in (key, value))
        k = arithmetic.round(k * factor)
        for block in blocks:
            scores, _ = _scores(q, k, block, terms, arithmetic)
            weights, lse[block.rows] = _softmax(scores, terms.sink, arithmetic)
            multiplier = terms.multiplier(block.rows, block.keys, arithmetic.sums)
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
    mask: Mask | ArrayMask,
    scale: float | None = None,
    precision: str = "float64",
    score_mod: ReferenceScoreMod = NO_SCORE_MOD,
    grad_logsumexp: Array | None = None,
) -> Gradients:
    """Returns the gradients of sum(output * grad_output) with respect to query, key, value, bias and sinks.

    With `grad_logsumexp`, which has the shape of logsumexp, those of sum(output * grad_output) + sum(logsumexp *
    grad_logsumexp), without the padding.

    Shapes, dtypes, scale, precision and score_mod are as in `forward`; grad_output and output are (B, Mq, H, Dv), and
    logsumexp is as `forward` returns it. With P and Z of the module's docstring and delta = rowsum(dO * O) -
    grad_logsumexp

        dV = (Z P)^T dO,   dS = P * (Z * dO V^T - delta),   dbias = dS,   dsink = -sum_i exp(sink - logsumexp_i) delta_i
        dT = dS * d(score)/d(scale Q K^T),   dQ = scale dT K,   dK = scale dT^T Q

    (Dao et al. 2022, FlashAttention, appendix B.2; the score terms by the chain rule). dK and dV are sums over the
    query heads that share a key head, dbias over every axis where bias has size 1, dsink over all sequences.

    delta is that of the given output: a caller in low precision passes the output of that precision. In float64 P
    follows from the given logsumexp, and a row where logsumexp is -inf or +inf contributes nothing. A low precision
    computes P again, as a framework that stored P has it. A row whose scores are all hidden or -inf contributes
    nothing, whatever output and logsumexp hold for it.

    The gradients have the shapes of their tensors and are 0 where no visible pair of a sequence reaches; float64 for
    "float64" and float32 otherwise.

    Raises ValueError for ranks, sizes or score terms that do not fit together, and for an unknown precision.
    """
    layout = Layout.create(query, key, value, score_mod)
    for name, tensor in (("grad_output", grad_output), ("output", output)):
        expect(name, tensor, layout.output)
    expect("logsumexp", logsumexp, layout.logsumexp)
    if grad_logsumexp is not None:
        expect("grad_logsumexp", grad_logsumexp, layout.logsumexp)
    arithmetic = _Arithmetic.create(precision)
    factor = arithmetic.sums.type(_scale(scale, layout))
    grad_query, grad_key, grad_value = (np.zeros(tensor.shape, arithmetic.sums) for tensor in (query, key, value))
    grad_bias, grad_sinks = (
        None if term is None else np.zeros(term.shape, arithmetic.sums) for term in (score_mod.bias, score_mod.sinks)
    )
    operands = _Operands(query, grad_output, output, key, value, logsumexp, grad_logsumexp)
    for sequence, head, blocks in _heads(mask, layout):
        if grad_sinks is not None and grad_logsumexp is not None:
            unseen = np.ones(sequence.num_queries, bool)
            for block in blocks:
                unseen[block.rows] = False
            # The logsumexp of a row without keys is the sink.
            grad_sinks[head] += grad_logsumexp[sequence.index, head, : sequence.num_queries][unseen].sum()
        if not blocks:
            continue
        subject = operands.of_head(sequence, head, layout.group, arithmetic)
        terms = HeadScoreMod.create(score_mod, sequence, head)
        bias = None if grad_bias is None else of_head(grad_bias, sequence.index, head)
        parts = _backward_head(subject, terms, blocks, bias, factor, arithmetic)
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
    terms: HeadScoreMod,
    blocks: list[_Block],
    grad_bias: Array | None,
    scale: Any,
    arithmetic: _Arithmetic,
) -> Gradients:
    """Returns the gradients of one head; dbias is added to grad_bias (rows or 1, keys or 1) instead."""
    q, v = head.query, head.value
    scaled_k = arithmetic.round(head.key * scale)
    grad_q, grad_k, grad_v = (np.zeros_like(operand) for operand in (q, head.key, v))
    grad_sink = np.zeros((), arithmetic.sums)
    for block in blocks:
        scores, derivative = _scores(q, scaled_k, block, terms, arithmetic)
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
        if head.grad_logsumexp is not None:
            delta -= head.grad_logsumexp[block.rows, None]
        # Some libraries store NaN as the output of a row without keys; 0 * NaN must not reach the gradients.
        empty = ~weights.any(axis=1)
        delta[empty] = 0
        if terms.sink is not None and head.grad_logsumexp is not None:  # the logsumexp of such a row is the sink
            delta[empty, 0] -= np.where(np.isfinite(lse), head.grad_logsumexp[block.rows], 0)[empty]
        grad_scores = arithmetic.round(weights * (grad_weights - delta))
        if terms.sink is not None:
            sink_weights = SINKS.reference_weight(terms.sink, np.where(np.isfinite(lse), lse, np.inf), arithmetic.sums)
            sink_weights = arithmetic.round(sink_weights)
            grad_sink -= arithmetic.round(sink_weights * delta[:, 0]).sum()
        if grad_bias is not None:
            part = part_of(grad_bias, block.rows, block.keys)
            part += grad_scores.sum(axis=tuple(axis for axis in (0, 1) if grad_bias.shape[axis] == 1), keepdims=True)
        if derivative is not None:
            grad_scores = arithmetic.round(grad_scores * derivative)
        grad_v[block.keys] += kept.T @ grad_rows
        grad_q[block.rows] = grad_scores @ scaled_k[block.keys]
        grad_k[block.keys] += grad_scores.T @ q[block.rows]
    grad_k = arithmetic.round(arithmetic.round(grad_k) * scale)
    return Gradients(arithmetic.round(grad_q), grad_k, arithmetic.round(grad_v), None, grad_sink)


def _heads(mask: Mask | ArrayMask, layout: Layout) -> Iterator[tuple[SeqlenInfo, int, list[_Block]]]:
    """Yields every head of every sequence, with the blocks of that head."""
    for sequence in layout.sequences:
        num_queries, num_keys = sequence.num_queries, sequence.num_keys
        arrays = None if isinstance(mask, Mask) else mask.resolved(layout.num_heads, num_queries, num_keys)
        if isinstance(mask, Mask):
            sees = functools.partial(mask.sees, num_queries=num_queries, num_keys=num_keys)
            blocks = list(_blocks(sees, num_queries, num_keys))
        for head in range(layout.num_heads):
            if arrays is not None:
                sees = functools.partial(arrays.reach, sequence.index, head)
                blocks = list(_blocks(sees, num_queries, num_keys))
            yield sequence, head, blocks


def _blocks(sees: Callable[[Array, Array], Array], num_queries: int, num_keys: int) -> Iterator[_Block]:
    """Yields the blocks of query rows that see at least one key; sees: whether a query sees a key."""
    keys = np.arange(num_keys)[None, :]
    for start in range(0, num_queries, QUERY_BLOCK):
        rows = np.arange(start, min(start + QUERY_BLOCK, num_queries))[:, None]
        seen = np.broadcast_to(sees(rows, keys), (rows.size, keys.size))
        reached = np.flatnonzero(seen.any(axis=0))
        if reached.size == 0:
            continue
        inside = slice(int(reached[0]), int(reached[-1]) + 1)
        # Only the edge is stored: with a causal mask it is a square on the diagonal, however many keys there are.
        edge = np.flatnonzero(~seen[:, inside].all(axis=0))
        hidden = ~seen[:, inside][:, edge] if edge.size else None
        yield _Block(slice(start, start + rows.size), inside, edge, hidden)


def _scores(
    q: Array, scaled_k: Array, block: _Block, terms: HeadScoreMod, arithmetic: _Arithmetic
) -> tuple[Array, Array | None]:
    """Returns the scores of one block, -inf where masked, and d(score)/d(scale Q K^T); None for a derivative of 1."""
    scores = arithmetic.round(q[block.rows] @ scaled_k[block.keys].T)
    derivative = None
    if terms.softcap:
        softcap = arithmetic.sums.type(terms.softcap)
        scores, derivative = SOFTCAP.reference_capped(scores, softcap, arithmetic.round)
    added = terms.sum_of_added(block.rows, block.keys, arithmetic.sums, arithmetic.round)
    if added is not None:
        scores = arithmetic.round(scores + added)
    if block.hidden is not None:
        scores[:, block.edge] = np.where(block.hidden, -np.inf, scores[:, block.edge])
    return scores, derivative


def _softmax(scores: Array, sink: float | None, arithmetic: _Arithmetic) -> tuple[Array, Array]:
    """Returns the row-wise softmax and logsumexp (rows,); a row of -inf has weights 0, logsumexp -inf or the sink."""
    top = scores.max(axis=1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, arithmetic.sums.type(sink))
    # Subtracting -inf from -inf would make the NaN that rows without keys must not have.
    top[np.isneginf(top)] = 0
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    if sink is not None:
        total += SINKS.reference_weight(sink, top, arithmetic.sums)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    weights /= np.where(total == 0, 1, total)
    return arithmetic.round(weights), lse


def _weights(scores: Array, lse: Array) -> Array:
    """Returns exp(scores - logsumexp), 0 on rows whose logsumexp is infinite or whose scores are all -inf."""
    off = np.isinf(lse)
    unknown = np.flatnonzero(np.isnan(lse))
    off[unknown] = np.isneginf(scores[unknown]).all(axis=1)
    weights: Array = np.exp(scores - np.where(off, np.inf, lse)[:, None])
    return weights


def _scale(scale: float | None, layout: Layout) -> float:
    return 1.0 / math.sqrt(layout.head_dim) if scale is None else float(scale)
