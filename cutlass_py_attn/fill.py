"""Fill: what no kernel writes, set on the stream before the kernels run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from cutlass_py_attn import driver
from cutlass_py_attn.problem import F32_BYTES, ITEM_BYTES, Problem, Tensor

_INFINITY: Final = 0x7F800000  # float32 bits
_MINUS_INFINITY: Final = 0xFF800000


def fill(problem: Problem, pointers: Mapping[str, int], stream: int) -> None:
    """What no kernel writes: all of an empty problem, and what lies outside every sequence.

    Zeros in the results; a logsumexp of -inf with +inf padding, or +inf where sequences have their own ends.
    """
    results = ("output",) if problem.direction == "forward" else tuple(f"grad_{name}" for name in problem.gradients)
    for name, tensor in (problem.tensors() | problem.vectors()).items():
        if name in results:
            clear(tensor, pointers[name], stream)
    batch, num_heads, padded = problem.shape.logsumexp
    rows, address = batch * num_heads, pointers["logsumexp"]
    if problem.direction == "forward" and rows * padded:
        driver.fill_words(address, padded * F32_BYTES, _INFINITY, padded, rows, stream)
        if problem.sequences is None:
            driver.fill_words(address, padded * F32_BYTES, _MINUS_INFINITY, problem.shape.num_queries, rows, stream)


def clear(tensor: Tensor, address: int, stream: int) -> None:
    """Zeros in every element and nowhere between them, in as few calls as the strides allow."""
    item = ITEM_BYTES[tensor.dtype]
    if 0 in tensor.shape:
        return
    axes = [(step * item, size) for size, step in zip(tensor.shape, tensor.strides, strict=True) if size > 1]
    address += sum((size - 1) * step for step, size in axes if step < 0)
    runs = [(item, 1)]  # (bytes from one to the next, how many), axes that follow each other in memory joined
    for step, size in sorted((abs(step), size) for step, size in axes):
        before, count = runs[-1]
        if step == before * count:
            runs[-1] = before, count * size
        else:
            runs.append((step, size))
    width = item * runs.pop(0)[1]
    runs.sort(key=lambda run: run[1])
    pitch, height = runs.pop() if runs else (width, 1)
    for index in itertools.product(*(range(count) for _, count in runs)):
        offset = sum(number * step for number, (step, _) in zip(index, runs, strict=True))
        driver.clear_rows(address + offset, pitch, width, height, stream)
