"""Backward of grouped heads, whose blocks add dK and dV of query heads in float32, against float64."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import grouped_cases


@pytest.mark.parametrize("case", grouped_cases.GROUPED, ids=lambda case: case.line.replace(" ", "_"))
def test_grouped(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
