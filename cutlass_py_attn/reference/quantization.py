"""Quantisation in NumPy: arrays as e4m3 codes with factors of the largest magnitudes, their values, and rotations.

Every factor belongs to a group of elements: a whole array, a head of key and value (in query, the heads of its group),
or such a head in one batch element or sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.append import MAX_E4M3
from cutlass_py_attn.reference.serving import e4m3_codes

Array = npt.NDArray[Any]
Rows = Sequence[tuple[int, slice]]  # (index along the batch axis, rows) of each batch element or sequence

GRANULARITIES: Final = ("tensor", "head", "batch_head")
LEAST: Final = np.float32(2.0**-100)  # of the largest magnitude of a group: a smaller group has this one's factor


def dense_rows(array: Array) -> Rows:
    """Returns the rows of every batch element of (batch, rows, heads, columns)."""
    return [(number, slice(None)) for number in range(array.shape[0])]


def factors_of(array: Array, granularity: str, num_heads_key: int, rows: Rows) -> Array:
    """Returns float32 factors, the largest magnitude of a group / 448: (1,), (heads,) or (len(rows), heads).

    array: (batch, rows, heads, columns); its heads are a multiple of num_heads_key. Infinities count as float32's
        largest number, NaN as nothing.
    """
    magnitudes: Array = np.abs(array.astype(np.float32))
    magnitudes = np.fmin(np.where(np.isnan(magnitudes), 0, magnitudes), np.finfo(np.float32).max)
    groups = magnitudes.reshape(*array.shape[:2], num_heads_key, -1)
    largest = np.zeros((len(rows), num_heads_key), np.float32)
    for index, (batch, part) in enumerate(rows):
        largest[index] = groups[batch, part].max(axis=(0, 2), initial=0)
    if granularity == "head":
        largest = largest.max(axis=0, initial=0)
    elif granularity == "tensor":
        largest = largest.max(initial=0).reshape(1)
    return (np.maximum(largest, LEAST) / np.float32(MAX_E4M3)).astype(np.float32)


def quantise(array: Array, factors: Array | None, rows: Rows) -> Array:
    """Returns the e4m3 codes of array / factors, saturated; None for factors of 1."""
    numbers: Array = array.astype(np.float32)
    if factors is not None:
        numbers = numbers / _spread(factors, array.shape, rows).astype(np.float32)
    return e4m3_codes(numbers).view(ml_dtypes.float8_e4m3fn)


def dequantise(codes: Array, factors: Array | None, rows: Rows) -> Array:
    """Returns codes * factors in float64; None for factors of 1."""
    values = codes.astype(np.float64)
    return values if factors is None else values * _spread(factors, codes.shape, rows)


def _spread(factors: Array, shape: tuple[int, ...], rows: Rows) -> Array:
    """Returns the factor of every (batch, row, head), with an axis for the columns, in float64.

    Rows outside of every sequence have the factor 1.
    """
    batch, length, heads, _ = shape
    found = np.ones((batch, length, heads), np.float64)
    values = np.asarray(factors, np.float64)
    if values.ndim < 2:
        found[:] = np.repeat(values, heads // values.size) if values.ndim else values
    else:
        for index, (number, part) in enumerate(rows):
            found[number, part] = np.repeat(values[index], heads // values.shape[1])
    return found[..., None]


def rotate(array: Array) -> Array:
    """Returns float32 rows times an orthogonal matrix of signs, which spreads outliers over the columns.

    Products of two rotated rows are those of the rows. The matrix is block-diagonal: Hadamard matrices, of the largest
    power of two that divides the columns, with some columns negated.
    """
    numbers = array.astype(np.float32)
    columns = numbers.shape[-1]
    size = columns & -columns
    signs = np.where(np.random.default_rng(columns).random(columns) < 0.5, -1, 1).astype(np.float32)
    blocks = (numbers * signs).reshape(*numbers.shape[:-1], columns // size, size)
    width = 1
    while width < size:
        pairs = blocks.reshape(*blocks.shape[:-1], size // (2 * width), 2, width)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        blocks = np.stack([low + high, low - high], axis=-2).reshape(blocks.shape)
        width *= 2
    return (blocks / np.float32(math.sqrt(size))).reshape(numbers.shape)
