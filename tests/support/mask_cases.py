"""Mask cases: drawn masks, and the definition of each mask pair by pair, independent of the package's code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window

WINDOWS = st.none() | st.sampled_from([1, 3, 300]) | st.integers(1, 60)
EDGES = st.none() | st.sampled_from([0, 1, 3, 300]) | st.integers(0, 60)
MASKS = st.one_of(
    st.just(Full()),
    st.builds(Causal, WINDOWS),
    st.builds(CausalBottomRight, WINDOWS),
    st.builds(Window, EDGES, EDGES),
)


def visible(mask: Mask, num_queries: int, num_keys: int) -> npt.NDArray[np.bool_]:
    """Returns which key each query sees, (num_queries, num_keys) bool, from the definitions."""
    i, j = np.arange(num_queries)[:, None], np.arange(num_keys)[None, :]
    moved = i + num_keys - num_queries
    found: Any = np.ones((num_queries, num_keys), np.bool_)
    match mask:
        case CausalBottomRight(window):
            found &= j <= moved
            found &= True if window is None else j > moved - window
        case Causal(window):
            found &= j <= i
            found &= True if window is None else j > i - window
        case Window(left, right):
            found &= True if left is None else j >= moved - left
            found &= True if right is None else j <= moved + right
        case _:
            assert isinstance(mask, Full)
    return found


class Int32(int):
    """An int that asserts that its sums, differences and products stay in 32 bits, as in the kernels."""

    def __new__(cls, value: int) -> Int32:
        assert -(2**31) <= value < 2**31, f"{value} does not fit 32 bits"
        return super().__new__(cls, value)

    def __add__(self, other: int) -> Int32:
        return Int32(int(self) + int(other))

    def __sub__(self, other: int) -> Int32:
        return Int32(int(self) - int(other))

    def __mul__(self, other: int) -> Int32:
        return Int32(int(self) * int(other))

    def __floordiv__(self, other: int) -> Int32:
        return Int32(int(self) // int(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Int32:
        return Int32(int(other) - int(self))
