"""Reference: attention forward and backward in NumPy, in float64 or as a framework would round it.

`precision="float64"` is the truth that kernels are measured against. The other precisions show what an
honest implementation loses: sums in float32, and every intermediate that an eager framework would store
is rounded to that type. How far such a result is from the truth is the yardstick of judge.py.

Layout is [batch, rows, heads, channels] (BMHK). Work proceeds by (batch, head) and by blocks of queries,
so that memory grows with rows, not with rows squared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.masks import Mask
from cutlass_py_attn.problem import Shape

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

    def load(self, tensor: Array, batch: int, head: int) -> Array:
        """One head of a BMHK tensor as a dense, rounded matrix [rows, channels]."""
        return self.round(np.ascontiguousarray(tensor[batch, :, head, :]))


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of query rows: which ones, how many keys they reach, and which of those are hidden."""

    rows: slice
    keys: slice
    hidden: Array | None


def forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Mask,
    scale: float | None = None,
    precision: str = "float64",
) -> tuple[Array, Array]:
    """softmax(scale Q K^T, masked) V and the logarithm of the softmax's denominator.

    query [B, Mq, H, D], key [B, Mk, H, D], value [B, Mk, H, Dv] in any float dtype; scale None means
    1/sqrt(D). precision is "float64", "float32", "float16" or "bfloat16" (see the module).

    Returns output [B, Mq, H, Dv] and logsumexp [B, H, ceil32(Mq)] (natural logarithm, of the scaled and
    masked scores), float64 for "float64" and float32 otherwise. Output holds values of the precision;
    logsumexp, which kernels keep in float32 for every input type, is not rounded further. A row without
    keys has output 0 and logsumexp -inf; the padding behind row Mq is +inf.

    Raises ValueError for ranks or sizes that do not fit together and for an unknown precision.
    """
    shape = _shape(query, key, value)
    arithmetic = _Arithmetic.of(precision)
    factor = _scale(scale, shape)
    output = np.zeros(shape.of("output"), arithmetic.sums)
    logsumexp = np.full(shape.logsumexp, np.inf, arithmetic.sums)
    logsumexp[:, :, : shape.num_queries] = -np.inf
    for batch, head in np.ndindex(shape.batch, shape.num_heads):
        q, k, v = (arithmetic.load(tensor, batch, head) for tensor in (query, key, value))
        k = arithmetic.round(k * arithmetic.sums.type(factor))
        for block in _blocks(mask, shape):
            weights, lse = _softmax(_scores(q, k, block, arithmetic), arithmetic)
            output[batch, block.rows, head] = arithmetic.round(weights @ v[block.keys])
            logsumexp[batch, head, block.rows] = lse
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
) -> tuple[Array, Array, Array]:
    """Gradients of sum(output * grad_output) with respect to query, key and value.

    Shapes, dtypes, scale and precision as in `forward`; grad_output and output are [B, Mq, H, Dv] and
    logsumexp is [B, H, ceil32(Mq)]. With P = exp(S - logsumexp) and delta = rowsum(grad_output * output):
    dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q (Dao et al. 2022,
    FlashAttention, appendix B.2).

    delta is always that of the output that is given: the caller chooses whose rounding it has, and a low
    precision should be given its own. In float64 P is that of the logsumexp given, and a row where that is
    -inf or +inf contributes nothing; a low precision imitates a framework that kept P, and computes it anew.
    A row without keys contributes nothing, whatever output and logsumexp hold for it.

    Returns (grad_query [B, Mq, H, D], grad_key [B, Mk, H, D], grad_value [B, Mk, H, Dv]), float64 for
    "float64" and float32 otherwise.

    Raises ValueError for ranks or sizes that do not fit together and for an unknown precision.
    """
    shape = _shape(query, key, value)
    for name, tensor in (("grad_output", grad_output), ("output", output)):
        _expect(name, tensor, shape.of(name))
    _expect("logsumexp", logsumexp, shape.logsumexp)
    arithmetic = _Arithmetic.of(precision)
    factor = _scale(scale, shape)
    grad_query, grad_key, grad_value = (
        np.zeros(shape.of(name), arithmetic.sums) for name in ("grad_query", "grad_key", "grad_value")
    )
    blocks = list(_blocks(mask, shape))
    for batch, head in np.ndindex(shape.batch, shape.num_heads):
        q, k, v, do, o = (arithmetic.load(tensor, batch, head) for tensor in (query, key, value, grad_output, output))
        lse = logsumexp[batch, head, : shape.num_queries].astype(arithmetic.sums)
        gradients = _backward_head((q, k, v, do, o), lse, blocks, factor, arithmetic)
        for whole, part in zip((grad_query, grad_key, grad_value), gradients, strict=True):
            whole[batch, :, head] = part
    return grad_query, grad_key, grad_value


def _backward_head(
    operands: tuple[Array, ...], lse: Array, blocks: list[_Block], factor: float, arithmetic: _Arithmetic
) -> tuple[Array, Array, Array]:
    """The three gradients of one (batch, head); operands are query, key, value, grad_output, output."""
    q, k, v, do, o = operands
    scale = arithmetic.sums.type(factor)
    scaled_k = arithmetic.round(k * scale)
    grad_q, grad_k, grad_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for block in blocks:
        scores = _scores(q, scaled_k, block, arithmetic)
        grad_rows = do[block.rows]
        grad_weights = arithmetic.round(grad_rows @ v[block.keys].T)
        weights = _softmax(scores, arithmetic)[0] if arithmetic.is_eager else _weights(scores, lse[block.rows])
        delta = (grad_rows * o[block.rows]).sum(axis=1, keepdims=True)
        # Others store NaN as the output of a row without keys; 0 * NaN must not reach the gradients.
        delta[~weights.any(axis=1)] = 0
        grad_scores = arithmetic.round(weights * (grad_weights - delta))
        grad_v[block.keys] += weights.T @ grad_rows
        grad_q[block.rows] = grad_scores @ scaled_k[block.keys]
        grad_k[block.keys] += grad_scores.T @ q[block.rows]
    grad_k = arithmetic.round(arithmetic.round(grad_k) * scale)
    return arithmetic.round(grad_q), grad_k, arithmetic.round(grad_v)


def _blocks(mask: Mask, shape: Shape) -> Iterator[_Block]:
    """Blocks of query rows that see at least one key; keys behind the last one seen are left out."""
    keys = np.arange(shape.num_keys)[None, :]
    for start in range(0, shape.num_queries, QUERY_BLOCK):
        rows = np.arange(start, min(start + QUERY_BLOCK, shape.num_queries))[:, None]
        seen = np.broadcast_to(mask.sees(rows, keys, shape.num_queries, shape.num_keys), (rows.size, keys.size))
        reached = np.flatnonzero(seen.any(axis=0))
        if reached.size == 0:
            continue
        seen = seen[:, : reached[-1] + 1]
        hidden = None if seen.all() else ~seen
        yield _Block(slice(start, start + rows.size), slice(0, int(reached[-1]) + 1), hidden)


def _scores(q: Array, scaled_k: Array, block: _Block, arithmetic: _Arithmetic) -> Array:
    """Scaled scores of one block, -inf where the mask hides the key."""
    scores = arithmetic.round(q[block.rows] @ scaled_k[block.keys].T)
    if block.hidden is not None:
        scores[block.hidden] = -np.inf
    return scores


def _softmax(scores: Array, arithmetic: _Arithmetic) -> tuple[Array, Array]:
    """Row-wise softmax and logsumexp [rows]; a row of -inf has weights 0 and logsumexp -inf."""
    top = scores.max(axis=1, keepdims=True)
    # Subtracting -inf from -inf would make the NaN that rows without keys must not have.
    top[np.isneginf(top)] = 0
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    weights /= np.where(total == 0, 1, total)
    return arithmetic.round(weights), lse


def _weights(scores: Array, lse: Array) -> Array:
    """exp(scores - logsumexp), 0 on rows whose logsumexp is infinite."""
    weights: Array = np.exp(scores - np.where(np.isneginf(lse), np.inf, lse)[:, None])
    return weights


def _scale(scale: float | None, shape: Shape) -> float:
    return 1.0 / math.sqrt(shape.head_dim) if scale is None else float(scale)


def _shape(query: Array, key: Array, value: Array) -> Shape:
    """The six sizes; ValueError when the three tensors do not fit together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name}: shape {tensor.shape} has rank {tensor.ndim}, must have rank 4 (BMHK)")
    batch, num_queries, num_heads, head_dim = query.shape
    shape = Shape(batch, num_queries, key.shape[1], num_heads, head_dim, value.shape[3])
    if head_dim == 0:
        raise ValueError(f"query: shape {query.shape} has no channels, must have at least one")
    _expect("key", key, shape.of("key"))
    _expect("value", value, shape.of("value"))
    return shape


def _expect(name: str, tensor: Array, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tensor.shape} does not fit the other tensors, must be {shape}")
