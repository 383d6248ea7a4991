"""Layouts: how the tensors of a test case are stored in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import (
    MASK_ARRAYS,
    OPERAND_BYTES,
    RANGE_EDGES,
    ROW_ALIGNMENT_BYTES,
    VISIBLE_BLOCKS,
    Tensor,
)


def _padded(tensor: Tensor) -> Tensor:
    """Gaps after every row, every head and every batch element, as small as alignment allows."""
    _, rows, heads, columns = tensor.shape
    step = ROW_ALIGNMENT_BYTES // OPERAND_BYTES[tensor.dtype]
    head = round_up(columns, step) + step
    row = heads * head + step
    return Tensor(tensor.shape, ((rows + 3) * row, row, head, 1), tensor.dtype)


def _heads_first(tensor: Tensor) -> Tensor:
    """(batch, heads, rows, columns) in memory."""
    _, rows, heads, columns = tensor.shape
    return Tensor(tensor.shape, (heads * rows * columns, columns, rows * columns, 1), tensor.dtype)


def _packed(tensor: Tensor) -> Tensor:
    """A slice of (batch, rows, 3, heads, columns); the two other slices hold NaN."""
    _, rows, heads, columns = tensor.shape
    row = 3 * heads * columns
    return Tensor(tensor.shape, (rows * row, row, columns, 1), tensor.dtype)


def _shifted(tensor: Tensor) -> Tensor:
    """Contiguous, from an address that is aligned to one element only."""
    return replace(tensor, alignment=OPERAND_BYTES[tensor.dtype])


# Of a contiguous (batch, rows, heads, columns) tensor.
LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "dense": lambda tensor: tensor,
    "padded": _padded,
    "heads_first": _heads_first,
    "packed": _packed,
    "shifted": _shifted,
}


def of_problem(problem: Problem, layout: str) -> Problem:
    """The same problem with every tensor in that layout."""
    return problem.replace(**{name: LAYOUTS[layout](tensor) for name, tensor in problem.tensors().items()})


def _interleaved(edge: Tensor) -> Tensor:
    """Every second element of each row."""
    return replace(edge, strides=tuple(2 * step for step in edge.strides))


def _rows_first(edge: Tensor) -> Tensor:
    """(rows, batch, heads) in memory."""
    batch, heads, _ = edge.shape
    return replace(edge, strides=(heads, 1, batch * heads))


def _unchanged(edge: Tensor) -> Tensor:
    return edge


# Of contiguous (batch, heads, rows) starts and ends of ranges of keys.
RANGE_LAYOUTS: Final[dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]] = {
    "dense": (_unchanged, _unchanged),
    "interleaved": (_interleaved, _interleaved),
    "rows_first": (_rows_first, _rows_first),
    "mixed": (_interleaved, _rows_first),
    "broadcast": (_unchanged, _unchanged),
}


def range_edges(problem: Problem, layout: str) -> dict[str, Tensor]:
    """The starts and ends of a problem's ranges of keys by name, {} for none; layout: a name of RANGE_LAYOUTS.

    With "broadcast" axes of size 1 have the problem's size and stride 0.
    """
    found = {}
    for name, place in zip(RANGE_EDGES, RANGE_LAYOUTS[layout], strict=True):
        edge: Tensor | None = getattr(problem, name)
        if edge is None:
            continue
        if layout == "broadcast":
            axes = zip(edge.shape, edge.strides, strict=True)
            steps = tuple(step if size > 1 else 0 for size, step in axes)
            found[name] = replace(edge, shape=problem.shape.range_edges, strides=steps)
        else:
            found[name] = place(edge)
    return found


def mask_arrays(problem: Problem, layout: str) -> dict[str, Tensor]:
    """The visible blocks and the arrays of a mask function by name; layout: a name of RANGE_LAYOUTS.

    With "interleaved" and "mixed" every second element is one of the array, with "rows_first" the last axis is the
    outermost one in memory.
    """
    found = {name: array for name in (VISIBLE_BLOCKS, *MASK_ARRAYS) if (array := getattr(problem, name)) is not None}
    if layout in ("interleaved", "mixed"):
        return {name: _interleaved(array) for name, array in found.items()}
    if layout == "rows_first":
        turned = {name: Tensor.contiguous(array.shape[::-1], array.dtype) for name, array in found.items()}
        return {name: replace(array, strides=turned[name].strides[::-1]) for name, array in found.items()}
    return found


def bias_tensor(spec: ProblemSpec, layout: str) -> Tensor:
    """The bias of a spec with size 1 in its broadcast axes.

    layout: "dense"; "padded" rows; "transposed" (queries innermost); "shifted" (aligned to one element only).
    """
    sizes = tuple(size if letter != "1" else 1 for letter, size in zip(spec.bias, spec.shape.bias, strict=True))
    tensor = Tensor.contiguous(sizes, spec.dtype)
    _, heads, queries, keys = tensor.shape
    if layout == "padded":
        row = -(-keys // 8) * 8 + 8
        return Tensor(tensor.shape, (heads * queries * row, queries * row, row, 1), tensor.dtype)
    if layout == "transposed":
        return Tensor(tensor.shape, (heads * keys * queries, keys * queries, 1, queries), tensor.dtype)
    return _shifted(tensor) if layout == "shifted" else tensor
