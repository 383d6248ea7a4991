"""e4m3 inputs: keys and values of a test case as codes and scales, and the numbers that these stand for.

Rows of a cache that no key uses have NaN as their codes and as their scales. A scale of several rows is that of the
largest magnitude among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import SCALES
from cutlass_py_attn.reference import e4m3

Array = npt.NDArray[Any]

NAMES = ("key", "value")


def codes(problem: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the codes and scales of key and value by name.

    arrays: key and value as numbers, NaN in unused rows, and the arrays that say which rows a sequence has.
    """
    found: dict[str, Array] = {}
    unused = _unused(problem, arrays)
    for name in NAMES:
        rows = arrays[name]
        if unused is not None:
            rows = np.where(unused[None, :, None, None], rows.dtype.type(np.nan), rows)
        scale = _scale(problem, name, rows, arrays)
        found[f"{name}_scale"] = scale
        found[name] = e4m3.quantise(rows, _of_rows(problem, scale, rows, arrays))
    return found


def scales(arrays: dict[str, Array]) -> tuple[Array, Array] | None:
    """Returns the scales of key and value; None without."""
    key_scale, value_scale = (arrays.get(name) for name in SCALES)
    return None if key_scale is None or value_scale is None else (key_scale, value_scale)


def dequantised(arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the arrays with the numbers of key and value, without pages, in place of their codes."""
    found = scales(arrays)
    if found is None:
        return arrays
    rows = {name: e4m3.dequantise(arrays[name], scale, arrays.get("cu_seqlens_k"))
            for name, scale in zip(NAMES, found, strict=True)}  # fmt: skip
    return arrays | rows


def _scale(problem: Problem, name: str, rows: Array, arrays: dict[str, Array]) -> Array:
    """Returns the scale of an operand, in the shape that the problem has."""
    shape = getattr(problem, f"{name}_scale").shape
    if len(shape) == 3:
        scale = e4m3.scale_of(rows, (3,))
        return np.where(np.isnan(rows.astype(np.float32)).all(axis=3), np.float32(np.nan), scale)
    if len(shape) == 2:
        by_row = e4m3.scale_of(rows, (3,))
        owners = _owners(problem, rows, arrays)
        found = np.full(shape, np.nan, np.float32)  # that of a sequence without keys
        for number in range(shape[0]):
            if (owners == number).any():
                found[number] = by_row[owners == number].max(axis=0)
        return found
    return e4m3.scale_of(rows, (0, 1, 3) if shape == rows.shape[2:3] else (0, 1, 2, 3)).reshape(shape)


def _unused(problem: Problem, arrays: dict[str, Array]) -> Array | None:
    """Returns which rows of key no sequence uses, (tokens,); None for all but variable lengths without pages."""
    if problem.pages is not None or problem.sequences is None:
        return None
    starts = arrays["cu_seqlens_k"]
    used = arrays.get("seqused_k", np.diff(starts))
    found = np.ones(problem.key.shape[1], np.bool_)
    for start, count in zip(starts[:-1].tolist(), used.tolist(), strict=True):
        found[start : start + count] = False
    return found


def _of_rows(problem: Problem, scale: Array, rows: Array, arrays: dict[str, Array]) -> Array:
    """Returns the scale of each row, in a shape that broadcasts to (batch, rows, heads)."""
    if scale.ndim != 2:
        return scale
    owners = _owners(problem, rows, arrays)
    return np.where(owners[..., None] < 0, np.float32(1), scale[np.clip(owners, 0, max(len(scale) - 1, 0))])


def _owners(problem: Problem, rows: Array, arrays: dict[str, Array]) -> Array:
    """Returns the number of the sequence of each row, (batch, rows); -1 for rows of none."""
    shape = rows.shape[:2]
    if problem.pages is not None:
        found = np.full(shape, -1)
        for number, length in enumerate(arrays["seqused_k"].tolist()):
            start = arrays["page_indptr"][number] if "page_indptr" in arrays else None
            table = arrays["page_table"][number] if start is None else arrays["page_table"][start:]
            found[table[: -(-length // shape[1])]] = number
        return found
    if "cu_seqlens_k" in arrays:
        owners = np.searchsorted(arrays["cu_seqlens_k"], np.arange(shape[1]), side="right") - 1
        return owners[None]
    return np.broadcast_to(np.arange(shape[0])[:, None], shape)
