"""Quantised operands: query, key and value as e4m3 codes, and the factors that say what a code of 1 is worth.

The true value of an operand is code * factor. A factor belongs to the whole operand, to a head of key and value, or to
one of these heads in one batch element; that of query to the query heads of the group that reads the key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.problem.tensors import F32_BYTES, FLOAT8, ITEM_BYTES, OPERANDS, Tensor

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

SCALES: Final = tuple(f"{name}_scale" for name in OPERANDS)
OUTPUT_DTYPES: Final = ("bfloat16", "float16")  # of the output of e4m3 operands; the first is the default


def output_dtype(operands: str) -> str:
    """Returns the default dtype of the output, for the operands' dtype."""
    return OUTPUT_DTYPES[0] if operands == FLOAT8 else operands


def scale_shapes(batch: int, num_heads_key: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes that the factors of an operand may have."""
    return (), (1,), (num_heads_key,), (batch, num_heads_key)


def scale_strides(tensor: Tensor, num_heads_key: int) -> tuple[int, int]:
    """Returns the strides (elements) of an operand's factors along batch and key head; 0 for an axis without factors.

    (1,) is one factor for all heads.
    """
    if len(tensor.shape) == 2:
        return num_heads_key, 1
    return 0, int(tensor.shape == (num_heads_key,) and num_heads_key > 1)


def dtype_objections(problem: Problem) -> Iterator[str]:
    """Yields why an operand of e4m3 is refused."""
    for name in OPERANDS:
        tensor = getattr(problem, name)
        if tensor.dtype == FLOAT8 and problem.direction != "forward":
            yield f"{name} has dtype {FLOAT8}: must be one of {', '.join(ITEM_BYTES)} in a backward; dequantise it"
    if problem.dtype == FLOAT8 and problem.output.dtype in {*ITEM_BYTES} - {*OUTPUT_DTYPES}:
        allowed = " or ".join(OUTPUT_DTYPES)
        yield f"output has dtype {problem.output.dtype}: must be {allowed} for {FLOAT8} operands; pass such an array"


def scale_objections(problem: Problem) -> Iterator[str]:
    """Yields why the factors of the operands are refused."""
    shapes = scale_shapes(problem.shape.batch, problem.shape.num_heads_key)
    allowed = ", ".join(str(shape) for shape in dict.fromkeys(shapes))
    for name in SCALES:
        tensor = getattr(problem, name)
        if tensor is None:
            continue
        if problem.dtype != FLOAT8:
            yield f"{name} is given, but query has dtype {problem.dtype}: only {FLOAT8} has factors; leave it out"
        elif tensor.dtype != "float32" or tensor.shape not in shapes:
            yield (
                f"{name} has shape {tensor.shape} and dtype {tensor.dtype}: must be float32 {allowed}, for the whole "
                "operand, each key head, or each batch and key head; reshape or cast it"
            )
        elif not tensor.is_contiguous or tensor.alignment < F32_BYTES:
            yield f"{name} is strided or misaligned: must be contiguous and {F32_BYTES}-byte aligned; copy it"
