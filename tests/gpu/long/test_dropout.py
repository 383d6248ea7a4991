"""Dropout over more tiles than the sm90 kernels hold mask bits for at once, on the GPU."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import suite


@pytest.mark.expected_seconds(3)  # the reference on the CPU
@pytest.mark.parametrize("case", suite.LONG_DROPOUT, ids=lambda case: case.line.replace(" ", "_"))
def test_bits_of_more_tiles(case: Case, kernels: Kernels) -> None:
    guarded_check.check_case(case, guarded_check.expect(case), kernels)
