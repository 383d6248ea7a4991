"""Decode on the GPU: few queries against many keys, in guarded buffers and any layout, against float64."""

from __future__ import annotations

import pytest

from cutlass_py_attn.testing import check, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import decode_cases


@pytest.mark.parametrize("case", decode_cases.ALL, ids=lambda case: case.line.replace(" ", "_"))
def test_decode(case: Case, kernels: check.Kernels) -> None:
    """Two launches give the same bits, from a workspace full of ones."""
    guarded_check.check_decode(case, kernels)
