"""Quantisation of query, key and value to e4m3 codes, of NumPy arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from cutlass_py_attn.api.unknown_options import refuses_unknown_options
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.quantization import GRANULARITIES
from cutlass_py_attn.problem.scalars import FLAG, flag_of, integer_of
from cutlass_py_attn.reference import quantization
from cutlass_py_attn.refusals import Refusal, one_of, refuse

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_ALLOWED = f"of {', '.join(_DTYPES)} without a mask"


@refuses_unknown_options()
def quantize_e4m3(
    array: Any,
    *,
    granularity: str = "batch_head",
    num_heads_key: int | None = None,
    cu_seqlens: Any = None,
    rotate: bool = False,
) -> tuple[Any, Any]:
    """Rounds an operand to e4m3 codes and returns (codes, scales), such that codes * scales is about the operand.

    array: (batch, rows, heads, columns) NumPy array of float16, bfloat16, float32 or float64; pools of a paged cache
        are (pages, page_size, num_heads_key, columns).
    granularity: elements that share a scale, the largest of their magnitudes / 448: "tensor", scales (1,); "head",
        scales (num_heads_key,); "batch_head", scales (batch, num_heads_key); "row", which only key and value of an e4m3
        cache may have, scales (batch, rows, num_heads_key).
    num_heads_key: heads of key and value, for query; the query heads of one of these share its scale. None for the
        heads of the array.
    cu_seqlens: (count + 1,) integers, where sequences of variable length start; "batch_head" then gives scales
        (count, num_heads_key). None for rows of one length.
    rotate: whether rows are multiplied by an orthogonal matrix of signs, a randomised Hadamard transform. It spreads
        a single large element over its row, so that the scale of its group grows less. It adds errors where a column
        is large in all rows, which e4m3 holds as exactly as small ones. Rotate query and key, both or neither: of an
        e4m3 cache, `rotate_rows` rotates the query.

    codes are float8_e4m3fn, rounded to nearest even; scales are float32. Pass them to `attention_forward` as query and
    query_scale, and so on. NotSupported lists every wrong argument.
    """
    heads = array.shape[2] if isinstance(array, np.ndarray) and array.ndim == 4 else 0
    of_key = heads if num_heads_key is None else integer_of(num_heads_key)
    refusals = _refusals(array, granularity, (num_heads_key, of_key), cu_seqlens, rotate)
    if refusals:
        raise NotSupported(refusals)
    assert of_key is not None
    starts = None if cu_seqlens is None else np.asarray(cu_seqlens)
    numbers = quantization.rotate(array) if flag_of(rotate) else array
    scales = quantization.scales_of(numbers, granularity, of_key, starts)
    return quantization.quantise(numbers, scales, starts), scales


def _refusals(
    array: Any, granularity: Any, heads: tuple[Any, int | None], cu_seqlens: Any, rotate: Any
) -> list[Refusal]:
    """Returns why the arguments are refused. heads: num_heads_key as given, and as an int."""
    if not _is_array_of(array, 4):
        allowed = f"a NumPy array (batch, rows, heads, columns) {_ALLOWED}"
        return [refuse("array", array, f"must be {allowed}", "convert it")]
    if not array.size:
        return [refuse("array", array, "must have an element, for a scale is of the largest", "pass rows")]
    refusals = []
    given, of_key = heads
    if not isinstance(granularity, str) or granularity not in GRANULARITIES:
        refusals.append(refuse("granularity", granularity, one_of(GRANULARITIES), "choose one"))
    if of_key is None or of_key < 1 or array.shape[2] % of_key:
        rule = f"must be an int that divides the {array.shape[2]} heads of the array, or None for all of them"
        refusals.append(refuse("num_heads_key", given, rule, "correct it"))
    refusals += FLAG.refusals("rotate", rotate)
    if cu_seqlens is not None:
        bounds = _bounds_of(cu_seqlens)
        is_list = bounds.ndim == 1 and bounds.size > 0 and bounds.dtype.kind in "iu" and array.shape[0] == 1
        if not is_list or bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > array.shape[1]:
            rule = (
                f"must be ascending integers from 0 to at most the {array.shape[1]} rows of an array with batch 1, "
                f"which has batch {array.shape[0]}"
            )
            refusals.append(refuse("cu_seqlens", cu_seqlens, rule, "correct it"))
    return refusals


def _is_array_of(array: Any, axes: int | None = None) -> bool:
    """Whether this is a plain NumPy array of a known dtype. axes: their number; None for at least one."""
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray) or array.dtype.name not in _DTYPES:
        return False
    return array.ndim == axes or (axes is None and array.ndim > 0)


def _bounds_of(cu_seqlens: Any) -> np.ndarray[Any, Any]:
    """Returns the lengths as a NumPy array, an empty one for what is none or has a mask."""
    with contextlib.suppress(Exception):  # the library of an array decides the type of its errors
        if not isinstance(cu_seqlens, np.ma.MaskedArray):
            return np.asarray(cu_seqlens)
    return np.empty(0)


def rotate_rows(array: Any) -> Any:
    """Returns the rows of an operand times the orthogonal matrix of `quantize_e4m3(rotate=True)`, in their dtype.

    array: (..., columns) NumPy array of float16, bfloat16, float32 or float64.

    Rotate query and key alike: their products stay, but for rounding. Keys are rotated before they are appended to an
    e4m3 cache, and the query of 16 bits before each call. NotSupported: another array.
    """
    if not _is_array_of(array):
        allowed = f"a NumPy array (..., columns) {_ALLOWED}"
        raise NotSupported(refuse("array", array, f"must be {allowed}", "convert it"))
    return quantization.rotate(array).astype(array.dtype) if array.size else array.copy()
