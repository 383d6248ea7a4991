"""Forward on the GPU: output and logsumexp of every covering case against float64."""

from __future__ import annotations

import pytest

from tests.gpu import cases, check


@pytest.mark.parametrize("case", cases.FORWARD, ids=lambda case: case.line.replace(" ", "_"))
def test_forward(case: cases.Case, kernels: check.Kernels) -> None:
    check.expect(case, check.run(case, kernels))
