"""Numbers of heads for which the sm90 family has kernels of its own, against float64: one block per head, few tiles."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import suite


@pytest.mark.parametrize("case", suite.MANY_HEADS, ids=lambda case: case.line.replace(" ", "_"))
def test_many_heads(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)


@pytest.mark.parametrize(
    "case", [*suite.MANY_TILES, *suite.DS_IN_REGISTERS, *suite.FEW_TILES], ids=lambda case: case.line.replace(" ", "_")
)
def test_many_and_few_tiles(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
