"""Layouts: how the tensors of the suite's problems lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.problem import ITEM_BYTES, ROW_ALIGNMENT_BYTES, Problem, Tensor


def _padded(tensor: Tensor) -> Tensor:
    """Gaps behind every row, every head and every sequence, as large as alignment lets them be small."""
    _, rows, heads, columns = tensor.shape
    step = ROW_ALIGNMENT_BYTES // ITEM_BYTES[tensor.dtype]
    head = round_up(columns, step) + step
    row = heads * head + step
    return Tensor(tensor.shape, ((rows + 3) * row, row, head, 1), tensor.dtype)


def _heads_first(tensor: Tensor) -> Tensor:
    """[batch, heads, rows, columns] in memory."""
    _, rows, heads, columns = tensor.shape
    return Tensor(tensor.shape, (heads * rows * columns, columns, rows * columns, 1), tensor.dtype)


def _packed(tensor: Tensor) -> Tensor:
    """A slice of [batch, rows, 3, heads, columns]; NaN lies where the two other slices would."""
    _, rows, heads, columns = tensor.shape
    row = 3 * heads * columns
    return Tensor(tensor.shape, (rows * row, row, columns, 1), tensor.dtype)


def shifted(tensor: Tensor) -> Tensor:
    """Dense, but starting at an odd element."""
    return replace(tensor, alignment=ITEM_BYTES[tensor.dtype])


# Of a dense BMHK tensor.
LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "dense": lambda tensor: tensor,
    "padded": _padded,
    "heads_first": _heads_first,
    "packed": _packed,
}


def of_problem(problem: Problem, layout: str) -> Problem:
    """The same problem with every tensor in that layout."""
    return problem.replace(**{name: LAYOUTS[layout](tensor) for name, tensor in problem.tensors().items()})
