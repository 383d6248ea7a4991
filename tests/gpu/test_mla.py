"""Keys that contain the values on the GPU, in guarded buffers: two launches of a case give the same bits."""

from __future__ import annotations

import pytest

from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import mla_cases


@pytest.mark.parametrize("case", mla_cases.CASES, ids=lambda case: case.line.replace(" ", "_"))
def test_latent_caches(case: Case, kernels: check.Kernels) -> None:
    build = guarded_check.check_repeated(case, kernels)
    assert build.reads_value_in_key or driver.device(0).compute_capability != (9, 0)
