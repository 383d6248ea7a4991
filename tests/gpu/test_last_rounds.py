"""Forwards whose last rounds have a block for each query tile, against float64."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import suite


@pytest.mark.parametrize("case", suite.LAST_ROUNDS, ids=lambda case: case.line.replace(" ", "_"))
def test_last_rounds(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
