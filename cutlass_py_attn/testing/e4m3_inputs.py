"""e4m3 inputs: the operands of a test case as codes and scales, and the numbers that these stand for.

Rows of a cache that no key uses have NaN as their codes and as their scales. A scale of several rows is that of the
largest magnitude among them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import BATCH_HEAD, ROW, granularity
from cutlass_py_attn.problem.tensors import E4M3, OPERANDS, Tensor
from cutlass_py_attn.reference import quantization

Array = npt.NDArray[Any]


def codes(problem: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the codes and scales of the operands that have codes, by name; none for other problems.

    arrays: the operands as numbers, NaN in unused rows of pages, and the arrays that say which rows a sequence has.
    """
    found: dict[str, Array] = {}
    if problem.key_rope is not None:
        return _latent_codes(problem, arrays)
    for name in _coded(problem):
        rows = arrays[name]
        if name != "query" and problem.has_e4m3_cache and (unused := _unused(problem, arrays)) is not None:
            rows = np.where(unused[None, :, None, None], rows.dtype.type(np.nan), rows)
        tensor, scale = getattr(problem, f"{name}_scale"), None
        if tensor is not None:
            scale = found[f"{name}_scale"] = _scale(problem, name, tensor, rows, arrays)
        found[name] = quantization.quantise(rows, _by_row(problem, name, scale, arrays))
    return found


def dequantised(problem: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the arrays with the numbers of the operands in float64 in place of their codes."""
    if problem.key_rope is not None:
        key = quantization.dequantise_latent(arrays["key"], arrays["key_scale"], arrays["key_rope"])
        return arrays | {"key": key, "value": key[..., : problem.shape.head_dim_value]}
    found = {
        name: quantization.dequantise(arrays[name], _by_row(problem, name, arrays.get(f"{name}_scale"), arrays))
        for name in _coded(problem)
    }
    return arrays | found


def _latent_codes(problem: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the codes and scales of a latent cache, and its columns of 16 bits. A scale of unused rows is NaN."""
    rows, columns = arrays["key"], problem.key.shape[3]
    found, scale = quantization.quantise_latent(rows[..., :columns])
    unused = np.isnan(rows.astype(np.float32)).all(axis=3)
    scale[unused] = np.nan
    return {"key": found, "value": found, "key_scale": scale, "key_rope": rows[..., columns:]}


def _coded(problem: Problem) -> list[str]:
    return [name for name in OPERANDS if getattr(problem, name).dtype in E4M3]


def _scale(problem: Problem, name: str, tensor: Tensor, rows: Array, arrays: dict[str, Array]) -> Array:
    """Returns the scale of an operand, in the shape that the problem has."""
    grain, heads = granularity(tensor), problem.shape.num_heads_key
    if grain not in (BATCH_HEAD, ROW):
        return quantization.scales_of(rows, grain, heads).reshape(tensor.shape)
    by_row = quantization.scales_of(rows, ROW, heads)
    if grain == ROW:
        return np.where(np.isnan(rows.astype(np.float32)).all(axis=3), np.float32(np.nan), by_row)
    owners = _owners(problem, name, arrays)
    found = np.full(tensor.shape, np.nan, np.float32)  # that of a sequence without rows
    for number in range(len(found)):
        if (owners == number).any():
            found[number] = by_row[owners == number].max(axis=0)
    return found


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


def _by_row(problem: Problem, name: str, scale: Array | None, arrays: dict[str, Array]) -> Array | None:
    """Returns a scale, that of a sequence as one of each of its rows; 1 for rows of no sequence."""
    if scale is None or scale.ndim != 2:
        return scale
    owners = _owners(problem, name, arrays)
    with_none = np.concatenate([scale, np.ones((1, scale.shape[1]), scale.dtype)])
    return with_none[owners]


def _owners(problem: Problem, name: str, arrays: dict[str, Array]) -> Array:
    """Returns the number of the sequence of each row of an operand, (batch, rows); -1 for rows of none."""
    shape = getattr(problem, name).shape[:2]
    starts = arrays.get("cu_seqlens_q" if name == "query" else "cu_seqlens_k")
    if problem.pages is not None and name != "query":
        found = np.full(shape, -1)
        for number, length in enumerate(arrays["seqused_k"].tolist()):
            first = arrays["page_indptr"][number] if "page_indptr" in arrays else None
            table = arrays["page_table"][number] if first is None else arrays["page_table"][first:]
            found[table[: -(-length // shape[1])]] = number
        return found
    if starts is not None:
        owners = np.searchsorted(starts, np.arange(shape[1]), side="right") - 1
        return np.where(owners < len(starts) - 1, owners, -1)[None]
    return np.broadcast_to(np.arange(shape[0])[:, None], shape)
