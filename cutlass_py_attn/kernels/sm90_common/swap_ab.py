"""Swap A/B: views of the accumulators of transposed scores, whose rows are keys and whose columns are queries."""

from dataclasses import dataclass

import cutlass.cute as cute


@dataclass(frozen=True)
class PairCoordinate:
    """An element of `column_pairs`: element of the pair, row of the thread, and pair."""

    element: int
    row: int
    pair: int


def swap_view(view: cute.Tensor) -> cute.Tensor:
    """Returns (rows, columns) of a transposed accumulator as (columns, rows)."""
    return cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0]))


def column_pairs(accumulator: cute.Tensor) -> cute.Tensor:
    """Returns an accumulator as (element of a pair of columns, row, pair of columns)."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, 2, cute.size(accumulator) // 4)))


def pair_coordinates(view: cute.Tensor) -> list[PairCoordinate]:
    """Returns every coordinate of `column_pairs`, the pairs slowest."""
    pairs = range(cute.size(view, mode=[2]))
    return [PairCoordinate(element, row, pair) for pair in pairs for element in range(2) for row in range(2)]
