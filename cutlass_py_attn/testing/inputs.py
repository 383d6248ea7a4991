"""Inputs: seeded families of query, key, value and grad_output, each of which shows another kind of fault.

`gaussian` spreads the weight over all keys, so a wrong row or element hides in the sum. `needle` gives each row exactly
two keys that matter. `integers` makes every product exact. `gaussian_x3` sharpens the softmax. With `equal_keys` all
weights of a row are equal and the query gradient cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.masks import Mask
from cutlass_py_attn.problem.tensors import ITEM_BYTES, Shape
from cutlass_py_attn.reference.numpy_reference import DTYPES

Array = npt.NDArray[Any]
Tensors = tuple[Array, Array, Array, Array]

NAMES = ("query", "key", "value", "grad_output")
# Size of the terms of a gradient relative to gaussian inputs (query or key, value and grad_output multiply): the
# factor of the absolute floor of accuracy.compare.
MAGNITUDE = {"gaussian": 1.0, "gaussian_x3": 27.0, "integers": 1.0, "needle": 4.0, "equal_keys": 1.0}
ZERO_SHARE = 0.8
# Scaled scores of the two keys of a needle row exceed the mean of the others by at least this much.
NEEDLE_SCORE = 16.0
NEEDLE_FACTOR = 2.0
ROW_BLOCK = 256


def make(family: str, shape: Shape, dtype: str, mask: Mask, seed: int) -> Tensors:
    """Returns (query, key, value, grad_output) of one family; the same arguments always give the same bits.

    Shapes are (batch, num_queries, num_heads, head_dim) and so on, as `shape.of` has them.
    dtype: "float16", "bfloat16" or "float32". Only `needle` reads the mask; it assumes the scale 1 / sqrt(head_dim).
    Raises ValueError for an unknown family or dtype.
    """
    return draw(family, shape, dtype, mask, np.random.default_rng(seed))


def draw(family: str, shape: Shape, dtype: str, mask: Mask, rng: np.random.Generator) -> Tensors:
    """Returns `make`'s tensors from the random numbers of `rng`."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: must be one of {', '.join(FAMILIES)}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(ITEM_BYTES)}")
    query, key, value, grad_output = FAMILIES[family](shape, mask, rng)
    target = DTYPES[dtype]
    return query.astype(target), key.astype(target), value.astype(target), grad_output.astype(target)


def _gaussian(shape: Shape, mask: Mask, rng: np.random.Generator) -> Tensors:
    query, key, value, grad_output = (rng.standard_normal(shape.of(name), dtype=np.float32) for name in NAMES)
    return query, key, value, grad_output


def _gaussian_x3(shape: Shape, mask: Mask, rng: np.random.Generator) -> Tensors:
    query, key, value, grad_output = _gaussian(shape, mask, rng)
    return 3 * query, 3 * key, 3 * value, 3 * grad_output


def _integers(shape: Shape, mask: Mask, rng: np.random.Generator) -> Tensors:
    def sparse(name: str) -> Array:
        values = rng.integers(-2, 3, shape.of(name)).astype(np.float32)
        values[rng.random(values.shape, dtype=np.float32) < ZERO_SHARE] = 0
        return values

    return sparse("query"), sparse("key"), sparse("value"), sparse("grad_output")


def _needle(shape: Shape, mask: Mask, rng: np.random.Generator) -> Tensors:
    """Keys are vectors of signs. A query is the sum of two keys, so both have the same score."""
    _, _, value, grad_output = _gaussian(shape, mask, rng)
    key = rng.choice(np.array([-1, 1], np.float32), shape.of("key"))
    query = np.zeros(shape.of("query"), np.float32)
    if shape.num_keys == 0:
        return query, key, value, grad_output
    draws = rng.random((shape.batch, shape.num_heads, shape.num_queries))
    last, earlier = _two_keys(shape, mask, draws)
    factor = max(NEEDLE_FACTOR, NEEDLE_SCORE / math.sqrt(shape.head_dim))
    for batch, head in np.ndindex(shape.batch, shape.num_heads):
        rows = key[batch, :, head]
        query[batch, :, head] = factor * (rows[last] + rows[earlier[batch, head]])
    return query, key, value, grad_output


def _two_keys(shape: Shape, mask: Mask, draws: Array) -> tuple[Array, Array]:
    """Returns the last visible key of each row (num_queries), and an earlier one (batch, num_heads, num_queries).

    draws: random numbers in [0, 1) that choose the earlier key. A row with a single visible key gets it twice; a row
    without visible keys gets key 0.
    """
    last = np.zeros(shape.num_queries, np.int64)
    earlier = np.zeros(draws.shape, np.int64)
    for start in range(0, shape.num_queries, ROW_BLOCK):
        rows = np.arange(start, min(start + ROW_BLOCK, shape.num_queries))
        keys = np.arange(shape.num_keys)[None, :]
        seen = mask.sees(rows[:, None], keys, shape.num_queries, shape.num_keys)
        counts = seen.sum(axis=1)
        some = counts > 0
        rows, counts = rows[some], counts[some]
        columns = np.nonzero(seen)[1]
        ends = np.cumsum(counts)
        last[rows] = columns[ends - 1]
        rank = (draws[:, :, rows] * np.maximum(counts - 1, 1)).astype(np.int64)
        earlier[:, :, rows] = columns[ends - counts + rank]
    return last, earlier


def _equal_keys(shape: Shape, mask: Mask, rng: np.random.Generator) -> Tensors:
    query, key, value, grad_output = _gaussian(shape, mask, rng)
    key[:, 1:] = key[:, :1]
    return query, key, value, grad_output


FAMILIES: dict[str, Callable[[Shape, Mask, np.random.Generator], Tensors]] = {
    "gaussian": _gaussian,
    "gaussian_x3": _gaussian_x3,
    "integers": _integers,
    "needle": _needle,
    "equal_keys": _equal_keys,
}
