"""Values that no kernel writes: results of an empty problem, and rows outside every sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, ITEM_BYTES, Tensor
from cutlass_py_attn.runtime import driver

_INFINITY: Final = 0x7F800000  # float32 bits
_MINUS_INFINITY: Final = 0xFF800000


def is_needed(problem: Problem | AppendProblem | MergeProblem) -> bool:
    """Returns whether results of the problem have values that no kernel writes."""
    if isinstance(problem, Problem):
        return problem.is_empty or problem.has_ragged_rows
    return isinstance(problem, MergeProblem) and problem.is_packed


def fill(problem: Problem | AppendProblem | MergeProblem, pointers: Mapping[str, int], stream: int) -> None:
    """Sets every result to its value for a row without keys, in stream order. Kernels overwrite the other rows.

    Output and gradients become 0. In a dense problem, logsumexp becomes -inf with +inf padding. With variable
    lengths, all of logsumexp becomes +inf, because the padding of each sequence starts at its own length.
    """
    if not isinstance(problem, Problem):
        if isinstance(problem, MergeProblem):
            clear(problem.output, pointers["output"], stream)
        return
    results = ("output",) if problem.direction == "forward" else tuple(f"grad_{name}" for name in problem.gradients)
    for name, tensor in (problem.tensors() | problem.vectors()).items():
        if name in results:
            clear(tensor, pointers[name], stream)
    batch, num_heads, padded = problem.shape.logsumexp
    rows, address = batch * num_heads, pointers["logsumexp"]
    if problem.direction == "forward" and rows * padded:
        driver.memset_words(address, padded * F32_BYTES, _INFINITY, padded, rows, stream)
        if not problem.has_ragged_rows:
            driver.memset_words(address, padded * F32_BYTES, _MINUS_INFINITY, problem.shape.num_queries, rows, stream)


def clear(tensor: Tensor, address: int, stream: int) -> None:
    """Sets every element of a strided tensor to zero and leaves the bytes between elements unchanged.

    Adjacent axes are merged, so that the number of driver calls is small.
    """
    item_bytes = ITEM_BYTES[tensor.dtype]
    if 0 in tensor.shape:
        return
    axes = [(stride * item_bytes, size) for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1]
    address += sum((size - 1) * stride for stride, size in axes if stride < 0)
    merged = [(item_bytes, 1)]  # (stride in bytes, size), innermost axis first
    for stride, size in sorted((abs(stride), size) for stride, size in axes):
        inner_stride, inner_size = merged[-1]
        if stride == inner_stride * inner_size:
            merged[-1] = inner_stride, inner_size * size
        else:
            merged.append((stride, size))
    width = item_bytes * merged.pop(0)[1]
    merged.sort(key=lambda axis: axis[1])
    pitch, height = merged.pop() if merged else (width, 1)
    for index in itertools.product(*(range(size) for _, size in merged)):
        offset = sum(number * stride for number, (stride, _) in zip(index, merged, strict=True))
        driver.memset_zero_rows(address + offset, pitch, width, height, stream)
