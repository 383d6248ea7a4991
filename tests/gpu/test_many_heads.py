"""Backward of many short heads, where the sm90 kernels run one block per head, against float64."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check, suite
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels


@pytest.mark.parametrize("case", suite.MANY_HEADS, ids=lambda case: case.line.replace(" ", "_"))
def test_many_heads(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
