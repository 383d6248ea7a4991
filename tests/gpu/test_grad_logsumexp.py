"""Gradients of functions of output and logsumexp on the GPU, against float64: kernels of the other backward tests."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.guarded_check import check_case, expect
from tests.cases import suite

# Dense and packed, every family of kernels, with sinks, whose gradient has that of logsumexp too.
CASES = [
    case.replace(grad_logsumexp=True)
    for case in (*suite.VARIABLE_LENGTH, *suite.WRONG_LENGTHS, *suite.LONG_DROPOUT, suite.LAUNCHERS["2-CTA backward"])
    if case.direction == "backward"
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line.replace(" ", "_"))
def test_gradients_of_output_and_logsumexp(case: Case, kernels: check.Kernels) -> None:
    check_case(case, expect(case), kernels)
