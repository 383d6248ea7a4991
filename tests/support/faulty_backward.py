"""Faulty backward: a NumPy emulation of the five-GEMM kernel, with faults that can be switched on.

One head at a time, tiles of 64 queries and 128 keys, operands of every product rounded as a tensor core
would take them. Without a fault it is what an honest kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.masks import Mask

Array = npt.NDArray[Any]

TILE_M = 64
TILE_N = 128
FAULTY_TILE = 3
NAMES = ("output", "dq", "dk", "dv")

FAULTS = (
    "logsumexp + 0.01",
    "delta zero in one row",
    "mask off by one in one row",
    "mask off by one in every row",
    "dq: one tile added twice",
    "dq: one tile lost",
    "stage reused: q of the previous tile",
    "dk scaled by 1.01",
    "one row of dk never written",
    "two rows of dv swapped",
    "dq + 0.01 on one element",
)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a kernel stores operands and multiplies: `store` rounds, `product` is a matrix product."""

    store: Callable[[Array], Array]
    product: Callable[[Array, Array], Array]
    dtype: np.dtype[Any]


def _stored_as(dtype: np.dtype[Any]) -> Arithmetic:
    return Arithmetic(lambda x: x.astype(dtype).astype(np.float32), np.matmul, dtype)


def _tf32(values: Array) -> Array:
    """The values with 10 bits of mantissa, rounded to nearest: what a TF32 tensor core reads."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept: Array = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return kept


def _one_tf32(left: Array, right: Array) -> Array:
    return _tf32(left) @ _tf32(right)


def _three_tf32(left: Array, right: Array) -> Array:
    """Leading parts times leading parts, plus the two mixed products; the product of the rests is dropped."""
    left_high, right_high = _tf32(left), _tf32(right)
    left_rest, right_rest = _tf32(left - left_high), _tf32(right - right_high)
    total: Array = left_high @ right_rest + left_rest @ right_high + left_high @ right_high
    return total


def _float32(values: Array) -> Array:
    return values.astype(np.float32)


def _exact(values: Array) -> Array:
    return values.astype(np.float64)


ARITHMETICS: dict[str, Arithmetic] = {
    "bfloat16": _stored_as(np.dtype(ml_dtypes.bfloat16)),
    "float16": _stored_as(np.dtype(np.float16)),
    "one tf32": Arithmetic(_float32, _one_tf32, np.dtype(np.float32)),
    "three tf32": Arithmetic(_float32, _three_tf32, np.dtype(np.float32)),
    "exact": Arithmetic(_exact, np.matmul, np.dtype(np.float64)),
}


@dataclass(frozen=True, slots=True)
class Head:
    """Operands of one head [rows, channels], with the scores' mask and scale."""

    query: Array
    key: Array
    value: Array
    grad_output: Array
    seen: Array
    scale: float


def run(tensors: tuple[Array, ...], mask: Mask, arithmetic: str, fault: str = "") -> dict[str, Array]:
    """output, dq, dk, dv [1, rows, 1, channels] of a one-head problem, in the arithmetic's dtype.

    tensors are query, key, value, grad_output [1, rows, 1, channels].
    """
    if fault and fault not in FAULTS:
        raise ValueError(f"fault {fault!r}: must be one of {', '.join(FAULTS)}")
    how = ARITHMETICS[arithmetic]
    query, key, value, grad_output = (how.store(tensor[0, :, 0]) for tensor in tensors)
    seen = mask.materialise(query.shape[0], key.shape[0])
    head = Head(query, key, value, grad_output, seen, float(query.shape[1]) ** -0.5)
    output, lse = _forward(head, how)
    results = (output, *_backward(head, output, lse, how, fault))
    return {name: r.astype(how.dtype)[None, :, None] for name, r in zip(NAMES, results, strict=True)}


def _forward(head: Head, how: Arithmetic) -> tuple[Array, Array]:
    scores = np.where(head.seen, how.product(head.query, head.key.T) * head.query.dtype.type(head.scale), -np.inf)
    top = scores.max(axis=1, keepdims=True)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    output = how.product(how.store(weights), head.value) / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return how.store(output), top + np.log(total)


def _backward(head: Head, output: Array, lse: Array, how: Arithmetic, fault: str) -> tuple[Array, Array, Array]:
    delta = (output * head.grad_output).sum(axis=1, keepdims=True)
    lse = np.where(np.isneginf(lse), np.inf, lse) + lse.dtype.type(0.01 if fault == "logsumexp + 0.01" else 0)
    if fault == "delta zero in one row":
        delta[FAULTY_TILE * TILE_M] = 0
    grad_query, grad_key, grad_value = (np.zeros_like(x) for x in (head.query, head.key, head.value))
    for n in range(0, len(head.key), TILE_N):
        for m in range(0, len(head.query), TILE_M):
            rows, keys = slice(m, m + TILE_M), slice(n, n + TILE_N)
            seen = _seen(head, rows, keys, fault)
            if not seen.any():
                continue
            weights, grad_scores = _tile(head, (rows, keys, seen), (lse, delta), how)
            is_faulty = m == FAULTY_TILE * TILE_M
            is_stale = is_faulty and fault == "stage reused: q of the previous tile"
            source = slice(m - TILE_M, m) if is_stale else rows
            grad_query[rows] += _query_part(how.product(grad_scores, head.key[keys]), is_faulty and n == 0, fault)
            grad_key[keys] += how.product(grad_scores.T, head.query[source])
            grad_value[keys] += how.product(weights.T, head.grad_output[rows])
    if fault == "dk scaled by 1.01":
        grad_key *= np.float32(1.01)
    if fault == "one row of dk never written":
        grad_key[TILE_N - 1] = 0
    if fault == "two rows of dv swapped":
        grad_value[[5, 6]] = grad_value[[6, 5]]
    return grad_query, grad_key, grad_value


def _tile(
    head: Head, place: tuple[slice, slice, Array], rows_data: tuple[Array, Array], how: Arithmetic
) -> tuple[Array, Array]:
    """The stored weights and the stored gradient of the scores of one tile."""
    (rows, keys, seen), (lse, delta) = place, rows_data
    scale = lse.dtype.type(head.scale)
    scores = how.product(head.query[rows], head.key[keys].T) * scale
    weights = np.exp(np.where(seen, scores - lse[rows], -np.inf))
    grad_weights = how.product(head.grad_output[rows], head.value[keys].T)
    return how.store(weights), how.store(weights * (grad_weights - delta[rows]) * scale)


def _seen(head: Head, rows: slice, keys: slice, fault: str) -> Array:
    """The mask of one tile, as a kernel with the fault sees it."""
    seen = head.seen[rows, keys].copy()
    if fault == "mask off by one in one row" and (rows.start, keys.start) == (FAULTY_TILE * TILE_M, TILE_N):
        last = np.flatnonzero(seen[0])
        seen[0, last[-1] if last.size else 0] ^= True
    if fault == "mask off by one in every row":
        # The next query's row of the same mask is one key longer under a causal mask.
        longer = np.concatenate([head.seen[1:], np.ones_like(head.seen[:1])])
        seen = longer[rows, keys]
    return seen


def _query_part(part: Array, is_faulty: bool, fault: str) -> Array:
    """What one tile adds to dq."""
    if not is_faulty:
        return part
    if fault == "dq: one tile added twice":
        return 2 * part
    if fault == "dq: one tile lost":
        return 0 * part
    if fault == "dq + 0.01 on one element":
        part[0, 0] += np.float32(0.01)
    return part
