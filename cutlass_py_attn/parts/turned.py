"""Turned: products that give C transposed, and views of their accumulators, whose rows are C's columns."""

from dataclasses import replace

import cutlass.cute as cute

from cutlass_py_attn.gemm.gemm import Gemm


def turned(spec: Gemm) -> Gemm:
    """The product that gives C transposed: A and B change places."""
    return replace(spec, m=spec.n, n=spec.m, a_transposed=spec.b_transposed, b_transposed=spec.a_transposed)


def turned_view(view: cute.Tensor) -> cute.Tensor:
    """Rows x columns of a transposed accumulator as columns x rows."""
    return cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0]))


def by_columns(accumulator: cute.Tensor) -> cute.Tensor:
    """(side of a pair of columns, row, pair of columns)."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, 2, cute.size(accumulator) // 4)))


def places(view: cute.Tensor) -> list[tuple[int, int, int]]:
    """Every (side, row, pair of columns), pairs of columns slowest."""
    return [(side, row, eight) for eight in range(cute.size(view, mode=[2])) for side in range(2) for row in range(2)]
