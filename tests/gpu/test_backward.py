"""Backward on the GPU: the three gradients of every covering case against float64."""

from __future__ import annotations

import pytest

from tests.gpu import cases, check


@pytest.mark.parametrize("case", cases.BACKWARD, ids=lambda case: case.line.replace(" ", "_"))
def test_backward(case: cases.Case, kernels: check.Kernels) -> None:
    check.expect(case, check.run(case, kernels))
