"""Forwards whose rows exceed the maxima before a key tile by far, which is computed again, against float64."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check, suite
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels


@pytest.mark.parametrize("case", suite.SPECULATIVE, ids=lambda case: case.line.replace(" ", "_"))
def test_speculative(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
