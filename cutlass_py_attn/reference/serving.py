"""NumPy reference of `append_to_cache` and `merge_states`.

The append computes in float32, as the kernels do, and gives the same bytes. Merges and sums compute in float64.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import ml_dtypes
import numpy as np

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.append import MAX_E4M3
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS
from cutlass_py_attn.problem.tensors import LSE_PADDING

Array = np.ndarray[Any, Any]

LEAST: Final = np.float32(2.0**-100)  # of the largest magnitude of a row: a smaller row has this one's scale
NAN_CODE: Final = 0x7F


@np.errstate(invalid="ignore")
def e4m3_codes(values: Array) -> Array:
    """Returns the e4m3 bytes of float32 numbers, as uint8.

    Round to nearest even, as ml_dtypes does; beyond 448, infinities too, to 448 with the sign; every NaN becomes 0x7F.
    """
    limited = np.clip(values, np.float32(-MAX_E4M3), np.float32(MAX_E4M3))
    codes = limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(NAN_CODE), codes)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def append(rows: Array, cache: Array, slots: Array, scale: Array | None) -> None:
    """Stores rows (tokens, num_heads_key, columns) in a cache (num_pages, page_size, num_heads_key, columns).

    slots: (tokens,); those outside of the cache are skipped.
    scale: None to store the rows as they are. (), (1,) or (num_heads_key,) float32 to divide by, or
        (num_pages, page_size, num_heads_key) float32 that receives each row's largest magnitude / 448; with a fourth
        axis, of tiles, that of each 128 columns of a row.
    """
    pages, page_size = cache.shape[:2]
    stored = (slots >= 0) & (slots < pages * page_size)
    rows, slots = rows[stored], slots[stored]
    place = slots // max(page_size, 1), slots % max(page_size, 1)
    if scale is None:
        cache[place] = rows
        return
    numbers = rows.astype(np.float32)
    if scale.ndim < 3:
        factor = np.broadcast_to(np.float32(1) / scale, rows.shape[1:2])[..., None]
    else:
        columns = rows.shape[2]
        width = columns if scale.ndim == 3 else SCALE_COLUMNS
        largest = np.fmax(np.fmax.reduceat(np.abs(numbers), np.arange(0, columns, width), axis=-1), LEAST)
        largest = np.minimum(largest, np.finfo(np.float32).max)
        scale[place] = (largest / np.float32(MAX_E4M3)).reshape(largest.shape[: scale.ndim - 1])
        factor = np.repeat(np.float32(MAX_E4M3) / largest, width, axis=-1)[..., :columns]
    cache.view(np.uint8)[place] = e4m3_codes(numbers * factor)


def merge(
    output_a: Array, logsumexp_a: Array, output_b: Array, logsumexp_b: Array, cu_seqlens_q: Array | None = None
) -> tuple[Array, Array]:
    """Returns output and logsumexp of two partial results, in float64.

    output_a, output_b: (batch, num_queries, num_heads, head_dim_value), or with cu_seqlens_q (1, tokens, ...).
    logsumexp_a, logsumexp_b: (batch, num_heads, ceil32(num_queries)), or with cu_seqlens_q (count, ...).

    Rows outside of every sequence are 0. The padding of logsumexp is +inf.
    """
    output = np.zeros(output_a.shape, np.float64)
    logsumexp = np.full(logsumexp_a.shape, np.inf)
    if cu_seqlens_q is None:
        places = [(batch, 0, output_a.shape[1]) for batch in range(output_a.shape[0])]
        assert logsumexp_a.shape[2] == round_up(output_a.shape[1], LSE_PADDING)
    else:
        bounds = [int(bound) for bound in cu_seqlens_q]
        places = [(0, start, end) for start, end in itertools.pairwise(bounds)]
    for number, (batch, start, end) in enumerate(places):
        parts = [
            (output_a[batch, start:end], logsumexp_a[number, :, : end - start]),
            (output_b[batch, start:end], logsumexp_b[number, :, : end - start]),
        ]
        output[batch, start:end], logsumexp[number, :, : end - start] = _merge_rows(*parts)
    return output, logsumexp


def add(output_a: Array, output_b: Array) -> Array:
    """Returns the sum of two partial gradients, in float64."""
    total: Array = output_a.astype(np.float64) + output_b.astype(np.float64)
    return total


@np.errstate(invalid="ignore", divide="ignore")
def _merge_rows(*parts: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merges outputs (rows, num_heads, columns) by their logsumexps (num_heads, rows)."""
    logs = [logsumexp.astype(np.float64) for _, logsumexp in parts]
    largest = np.maximum(*logs)
    largest = np.where(largest == -np.inf, 0.0, largest)
    weights = [np.exp(log - largest) for log in logs]
    total = weights[0] + weights[1]
    summed = np.zeros(parts[0][0].shape)
    for (output, _), weight in zip(parts, weights, strict=True):
        share = np.where(total == 0, 0.0, weight / total).T[:, :, None]
        summed = summed + np.where(share == 0, 0.0, output.astype(np.float64) * share)
    return summed, largest + np.log(total)
