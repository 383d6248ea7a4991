"""Backward of wide heads: every gradient against float64, and the same bits in every launch."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, same_bits
from cutlass_py_attn.testing.device_memory import guarded_launch
from tests.cases import suite

LAUNCHES = 20  # a race that shows in one of them is found


@pytest.mark.parametrize("case", suite.WIDE_BACKWARD, ids=lambda case: case.line.replace(" ", "_"))
def test_gradients_are_accurate_and_repeatable(case: Case, kernels: Kernels) -> None:
    expected = guarded_check.expect(case)
    found = guarded_check.check_case(case, expected, kernels)
    with guarded_launch(case.problem(), expected.arrays, kernels) as guarded:
        assert guarded.bound.plan.build.variant == "wide"
        for _ in range(LAUNCHES):
            again = guarded.run()
            assert all(same_bits(found[name], again[name]) for name in found)
