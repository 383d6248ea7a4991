"""Problems for tests, and calls of the two functions up to the validated Problem, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cutlass_py_attn.api.attention import problem_of
from cutlass_py_attn.api.options import BackwardOptions, ForwardOptions, VariableLength, check_options
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.runtime import arrays
from cutlass_py_attn.runtime.arrays import Array

SHAPE = Shape(batch=2, num_queries=40, num_keys=50, num_heads=3, head_dim=16, head_dim_value=24)
LENGTHS = Shape(2, 25, 30, 3, 16, 24, tokens=(40, 50))  # two concatenated sequences
FLOAT32 = ("alibi_slopes", "sinks", "grad_sinks")


def dense(direction: str = "forward", dtype: str = "float16", base: Shape = SHAPE, **sizes: Any) -> Problem:
    """Returns a contiguous problem of `base` with some sizes changed."""
    given = {name: getattr(base, name) for name in base.__dataclass_fields__}
    if base.group == 1:
        del given["num_heads_key"]  # by default equal to num_heads
    return Problem.dense(direction, Shape(**(given | sizes)), dtype)


def changed(name: str, direction: str = "forward", base: Shape = SHAPE, **fields: Any) -> Problem:
    """Returns the dense float16 problem with some fields of tensor `name` changed."""
    problem = dense(direction, base=base)
    old: Tensor = getattr(problem, name)
    new: dict[str, Any] = {
        "shape": old.shape,
        "strides": old.strides,
        "dtype": old.dtype,
        "alignment": old.alignment,
    } | fields
    return problem.replace(**{name: Tensor(**new)})


def with_terms(direction: str = "forward", base: Shape = SHAPE, **terms: Any) -> Problem:
    """Returns the dense float16 problem with more fields; a tuple is the shape of a contiguous tensor."""
    made = {
        name: Tensor.contiguous(value, "float32" if name in FLOAT32 else "float16")
        if isinstance(value, tuple)
        else value
        for name, value in terms.items()
    }
    return dense(direction, base=base).replace(**made)


def array_of(tensor: Tensor) -> Array:
    """Returns a device array with this layout, at an address with exactly this alignment."""
    return Array(4096 + tensor.alignment, tensor.shape, tensor.strides, tensor.dtype, 0, "other", None)


def lengths(**changes: Any) -> VariableLength:
    """Returns two sequences of 15 and 25 queries, and of 30 and 20 keys."""
    given: dict[str, Any] = {"cu_seqlens_q": np.array([0, 15, 40]), "cu_seqlens_k": np.array([0, 30, 50])}
    return VariableLength(**(given | {"max_seqlen_q": 25, "max_seqlen_k": 30} | changes))


def called(
    direction: str = "forward", given: Mapping[str, Any] | None = None, base: Shape = SHAPE, **options: Any
) -> Problem:
    """Returns the Problem of a call with float16 operands.

    given: Tensors or NumPy arrays in place of some operands, or for `out`. Options may hold Tensors in place of arrays.
    """
    problem = dense(direction, base=base)
    names = ("query", "key", "value") if direction == "forward" else ("grad_output", "query", "key", "value", "output")
    operands: dict[str, Any] = {name: getattr(problem, name) for name in names}
    if direction == "backward":
        operands["logsumexp"] = Tensor.contiguous(problem.shape.logsumexp, "float32")
    checked = check_options(options, ForwardOptions if direction == "forward" else BackwardOptions)
    operands |= checked.arrays() | dict(given or {})
    inputs = {
        name: array_of(value) if isinstance(value, Tensor) else arrays.read_operands({name: value}, 0)[name]
        for name, value in operands.items()
    }
    return problem_of(direction, inputs, checked)[0]
