"""Scales of key and value of 8-bit floats: their shapes and strides, and every reason to refuse them.

A number is its code times its scale. A scale is float32 and belongs to all keys, to a key head, to a key head of a
sequence, or to a row: one key of one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.problem.tensors import F32_BYTES, SCALE_AXES, SCALES, Tensor

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

ROW_RANK: Final = 3  # of an array with a scale for each row
QUERY_DTYPES: Final = ("float16", "bfloat16")


def row_shape(problem: Problem) -> tuple[int, int, int]:
    """Returns the shape of an array with a scale for each row of key: that of key without its columns."""
    first, rows, heads, _ = problem.key.shape
    return first, rows, heads


def shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes that a scale may have."""
    heads = problem.shape.num_heads_key
    return (), (1,), (heads,), (problem.shape.batch, heads), row_shape(problem)


def strides(problem: Problem, name: str) -> dict[str, int]:
    """Returns the strides (elements) of a scale along SCALE_AXES; 0 along an axis that it does not have."""
    scale = getattr(problem, name)
    first = "batch" if problem.pages is None else "page"
    axes = {0: (), 1: ("head",), 2: ("batch", "head"), ROW_RANK: (first, "row", "head")}[len(scale.shape)]
    found = dict.fromkeys(SCALE_AXES, 0) | dict(zip(axes, scale.steps, strict=True))
    return {f"{name}_{axis}": step for axis, step in found.items()}


def objections(problem: Problem) -> Iterator[str]:
    """Yields every reason to refuse key and value of 8-bit floats, and their scales."""
    given = problem.scales
    if not problem.has_e4m3_cache:
        for name in given:
            yield f"{name} is given, but key has dtype {problem.key.dtype}: only 8-bit floats have scales; leave it out"
        return
    if problem.query.dtype not in QUERY_DTYPES:
        yield (
            f"query has dtype {problem.query.dtype} with key of {problem.key.dtype}: must be one of "
            f"{', '.join(QUERY_DTYPES)}; cast it"
        )
    if problem.value.dtype != problem.key.dtype:
        yield (
            f"value has dtype {problem.value.dtype} but key has {problem.key.dtype}: both must agree; cast one of them"
        )
    if problem.direction == "backward":
        yield (
            f"direction = 'backward' with key of {problem.key.dtype}: must be forward, because 8-bit floats have no "
            "gradients; pass key and value of 16 bits"
        )
    for name in SCALES:
        allowed = "float32 " + ", ".join(map(str, shapes(problem)))
        if name not in given:
            yield f"{name} is missing: key and value of {problem.key.dtype} need {allowed}; pass it"
        else:
            yield from _scale_objections(problem, name, given[name], allowed)


def _scale_objections(problem: Problem, name: str, scale: Tensor, allowed: str) -> Iterator[str]:
    if scale.dtype != "float32" or scale.shape not in shapes(problem):
        yield f"{name} has shape {scale.shape} and dtype {scale.dtype}: must be {allowed}; reshape or cast it"
    elif scale.alignment < F32_BYTES:
        yield f"{name} is {scale.alignment}-byte aligned: must be aligned to its {F32_BYTES}-byte elements; copy it"
