"""e4m3 reference: keys and values of 8-bit floats as the numbers that they stand for, and rows as codes and scales."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

from cutlass_py_attn.problem.append import MAX_E4M3
from cutlass_py_attn.reference.serving import LEAST, e4m3_codes

Array = np.ndarray[Any, Any]

DTYPE: Final = np.dtype(ml_dtypes.float8_e4m3fn)
ROW, BATCH, HEAD, TENSOR = "row", "batch", "head", "tensor"  # what has a scale: each row, and so on


def numbers(codes: Array) -> Array:
    """Returns codes, of float8_e4m3fn or as their bytes in uint8, as float64 numbers without their scale."""
    return codes.view(DTYPE).astype(np.float64)


def dequantise(codes: Array, scale: Array, first_rows: Array | None = None) -> Array:
    """Returns keys or values (batch, rows, heads, columns) of codes in float64: each code times its scale.

    scale: () or (1,), (heads,), (batch, heads), or (batch, rows, heads).
    first_rows: (count + 1,), the first row of each sequence in codes (1, tokens, heads, columns); a scale (count,
        heads) then is that of a sequence. None if each batch element is a sequence.
    """
    factor = scale.astype(np.float64)
    if factor.ndim == 2 and first_rows is not None:
        owners = np.searchsorted(first_rows, np.arange(codes.shape[1]), side="right") - 1
        factor = factor[np.clip(owners, 0, max(len(factor) - 1, 0))][None]
    elif factor.ndim == 2:
        factor = factor[:, None]
    return numbers(codes) * (factor if factor.ndim == 0 or factor.shape == (1,) else factor[..., None])


def quantise(rows: Array, scale: Array) -> Array:
    """Returns rows (batch, rows, heads, columns) as codes; scale: () or of a shape (..., heads) that broadcasts."""
    with np.errstate(invalid="ignore", over="ignore"):
        return e4m3_codes(rows.astype(np.float32) / scale[..., None]).view(DTYPE)


def scale_of(rows: Array, axes: tuple[int, ...]) -> Array:
    """Returns the largest magnitude of rows (batch, rows, heads, columns) over some axes, / 448; NaN does not count."""
    largest = np.fmax.reduce(np.abs(rows.astype(np.float32)), axis=axes, initial=LEAST)
    return (largest / np.float32(MAX_E4M3)).astype(np.float32)
