"""Quantisation in NumPy: arrays as e4m3 codes and scales of the largest magnitudes, the numbers of codes, rotations.

Arrays are (batch, rows, heads, columns). Every scale belongs to a group of elements, see problem/quantization.py: the
scale of a key head, in query, to the heads that read it. With variable lengths, where arrays are (1, tokens, heads,
columns), `first_rows` (count + 1,) has the first row of each sequence, and a scale (count, num_heads_key) is that of a
sequence.
"""

from __future__ import annotations

import math
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.append import MAX_E4M3
from cutlass_py_attn.problem.quantization import BATCH_HEAD, HEAD, ROW, SCALE_COLUMNS, TENSOR
from cutlass_py_attn.reference.serving import LEAST, e4m3_codes

Array = npt.NDArray[Any]

DTYPE: Final = np.dtype(ml_dtypes.float8_e4m3fn)


def dequantise(codes: Array, scale: Array | None, first_rows: Array | None = None) -> Array:
    """Returns codes, of float8_e4m3fn or as their bytes in uint8, times their scales in float64.

    scale: () or (1,), (num_heads_key,), (batch or count, num_heads_key), or (batch, rows, num_heads_key); None for 1.
    """
    numbers = codes.view(DTYPE).astype(np.float64)
    return numbers if scale is None else numbers * of_rows(scale, codes.shape, first_rows)


def dequantise_latent(codes: Array, scale: Array, rope: Array) -> Array:
    """Returns the rows of a latent cache in float64: codes times the scale of their tile of columns, then rope.

    codes: (batch, rows, num_heads_key, columns); scale: the same with tiles of 128 columns, the last may be narrower;
    rope: the same with the columns behind the codes.
    """
    numbers = codes.view(DTYPE).astype(np.float64) * of_tiles(scale, codes.shape[-1])
    return np.concatenate([numbers, rope.astype(np.float64)], axis=-1)


def quantise_latent(rows: Array) -> tuple[Array, Array]:
    """Returns the e4m3 codes of latent rows, and the float32 scales of their tiles of columns.

    A scale is the largest magnitude of its tile / 448; infinities count as float32's largest number, NaN as nothing.
    """
    starts = range(0, rows.shape[-1], SCALE_COLUMNS)
    tiles = [scales_of(rows[..., first : first + SCALE_COLUMNS], ROW, rows.shape[2]) for first in starts]
    scale = np.stack(tiles, axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = rows.astype(np.float32) / of_tiles(scale, rows.shape[-1]).astype(np.float32)
    return e4m3_codes(numbers).view(DTYPE), scale


def of_tiles(scale: Array, columns: int) -> Array:
    """Returns the scale of each column in float64, from those of tiles of columns."""
    return np.repeat(np.asarray(scale, np.float64), SCALE_COLUMNS, axis=-1)[..., :columns]


def quantise(array: Array, scale: Array | None, first_rows: Array | None = None) -> Array:
    """Returns the e4m3 codes of array / scale, saturated; scale: as in `dequantise`."""
    numbers: Array = array.astype(np.float32)
    if scale is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = numbers / of_rows(scale, array.shape, first_rows).astype(np.float32)
    return e4m3_codes(numbers).view(DTYPE)


def scales_of(array: Array, granularity: str, num_heads_key: int, first_rows: Array | None = None) -> Array:
    """Returns float32 scales, the largest magnitude of each group / 448: (1,), (num_heads_key,), (batch or count,
    num_heads_key), or (batch, rows, num_heads_key).

    granularity: a member of problem.quantization.GRANULARITIES. Heads are a multiple of num_heads_key. Infinities count
    as float32's largest number, NaN as nothing.
    """
    magnitudes: Array = np.abs(array.astype(np.float32))
    magnitudes = np.fmin(np.where(np.isnan(magnitudes), 0, magnitudes), np.finfo(np.float32).max)
    by_row = magnitudes.reshape(*array.shape[:2], num_heads_key, -1).max(axis=3, initial=LEAST)
    if granularity == TENSOR:
        by_row = by_row.max(initial=LEAST).reshape(1)
    elif granularity == HEAD:
        by_row = by_row.max(axis=(0, 1), initial=LEAST)
    elif granularity == BATCH_HEAD:
        parts = list(by_row) if first_rows is None else np.split(by_row[0], first_rows[1:])[:-1]
        largest = [part.max(axis=0, initial=LEAST) for part in parts]
        by_row = np.array(largest, np.float32).reshape(len(parts), num_heads_key)
    else:
        assert granularity == ROW, granularity
    return (by_row / np.float32(MAX_E4M3)).astype(np.float32)


def of_rows(scale: Array, shape: tuple[int, ...], first_rows: Array | None = None) -> Array:
    """Returns the scale of every (batch, row, head) of an array of that shape in float64, in a shape that broadcasts.

    Rows behind the last sequence have the scale 1.
    """
    found = np.asarray(scale, np.float64)
    if found.size == 1 and found.ndim < 2:
        return found.reshape(1, 1, 1, 1)
    if found.ndim == 1:
        found = found[None, None]
    elif found.ndim == 2 and first_rows is None:
        found = found[:, None]
    elif found.ndim == 2:
        owners = np.searchsorted(np.asarray(first_rows), np.arange(shape[1]), side="right") - 1
        found = np.concatenate([found, np.ones((1, found.shape[1]))])[owners][None]
    return np.repeat(found, shape[2] // found.shape[2], axis=2)[..., None]


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
