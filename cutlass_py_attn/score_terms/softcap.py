"""Softcap: scores become softcap * tanh(scale Q K^T / softcap), bounded by the softcap (Gemma Team 2024, Gemma 2).

With t = tanh(scale Q K^T / softcap) the derivative by the scaled product is 1 - t^2. The backward keeps it from S to dS
and multiplies dS by it, except for the gradient of a bias, which is added behind the softcap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem
    from cutlass_py_attn.problem.tensors import Shape

Array = npt.NDArray[Any]

MAX_SOFTCAP = 2.0**127  # times log2(e) it still is a float32
MIN_SOFTCAP = 2.0**-126  # the smallest normal float32: the kernels divide by the softcap
LOG2_E = math.log2(math.e)


class Softcap(ScoreTerm):
    """The softcap of the scores; Problem.softcap is 0 for none."""

    name = "softcap"
    field = "softcap"
    struct = StructFields(factors=("softcap",))
    tile_tables = ("softcap", "score_mod")  # its derivative stays in registers from S to dS
    needs_registers_sm90 = False
    scales_products = True
    has_derivative = True
    meanings = (("softcap", "bound of the scores: softcap * tanh(scale Q K^T / softcap)"),)

    def is_present(self, problem: Problem) -> bool:
        return problem.softcap != 0

    def refusals(self, problem: Problem) -> Iterator[Refusal]:
        softcap = problem.softcap
        is_allowed = isinstance(softcap, Real) and (softcap == 0 or MIN_SOFTCAP <= float(softcap) <= MAX_SOFTCAP)
        if not is_allowed:
            yield refuse("softcap", softcap, "must be a number above 0 that float32 holds, or 0 for none", "correct it")

    def numbers(self, problem: Problem) -> dict[str, float]:
        return {"softcap": problem.softcap}

    def example(self, shape: Shape) -> dict[str, Any]:
        return {"softcap": 1.0}

    def modify_scores(self, row: Any, operand: Any) -> None:
        tanh = row.tanh(row.values * (row.p.scale / row.p.softcap))
        row.set_derivative(1.0 - tanh * tanh)
        row.values = tanh * (row.p.softcap * LOG2_E)

    def reference_capped(self, scores: Array, softcap: Any, rounded: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Returns the capped scores and their derivative; `rounded` rounds to what a framework would store."""
        tanh = rounded(np.tanh(rounded(scores / softcap)))
        return rounded(tanh * softcap), 1 - tanh * tanh


SOFTCAP = Softcap()
