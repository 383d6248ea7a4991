"""Forward on the GPU: output and logsumexp of every covering case against float64."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import check
from cutlass_py_attn.testing.cases import Case
from tests.cases import covering_cases


@pytest.mark.parametrize("case", covering_cases.FORWARD, ids=lambda case: case.line.replace(" ", "_"))
def test_forward(case: Case, kernels: check.Kernels) -> None:
    check.assert_accurate(case, check.run(case, kernels))
