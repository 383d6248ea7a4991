"""Kernels with options of their tiles, against float64: key tiles computed again, tiles that blocks share, biases."""

from __future__ import annotations

import pytest

from cutlass_py_attn.problem.tensors import FLOAT8
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import suite

CASES = (
    *(*suite.SPECULATIVE, *suite.SHARED_END, *suite.SHARED_QUERIES),
    *(*suite.FEW_QUERY_TILES, *suite.FEW_KEY_TILES),
    *(*suite.BIAS_BACKWARD, *suite.GRAD_BIAS, *suite.GRAD_BIAS_SUMS),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line.replace(" ", "_"))
def test_options(case: Case, kernels: Kernels, gpu: driver.Device) -> None:
    if case.spec.dtype == FLOAT8 and gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} has no wgmma of e4m3 operands")
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
