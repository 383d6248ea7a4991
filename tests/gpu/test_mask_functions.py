"""Mask functions on the GPU against float64: in guarded buffers, and through the public functions with NumPy arrays."""

from __future__ import annotations

import pytest

from cutlass_py_attn.runtime.driver import Device
from cutlass_py_attn.testing import check, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import suite

# `check.attend` passes neither sinks nor a gradient of logsumexp.
PLAIN = [case for case in suite.FUNCTIONS if not (case.spec.sinks or case.spec.grad_logsumexp)]


def name_of(case: Case) -> str:
    return case.line.replace(" ", "_")


@pytest.fixture(autouse=True)
def _on_this_gpu(gpu: Device) -> None:
    if gpu.compute_capability != (9, 0):
        pytest.skip(f"{gpu.name} does not run kernels with mask functions")


@pytest.mark.parametrize("case", suite.FUNCTIONS, ids=name_of)
def test_functions(case: Case, kernels: check.Kernels) -> None:
    found = guarded_check.check_case(case, guarded_check.expect(case), kernels)
    assert set(found) == set(guarded_check.results_of(case))


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_functions_of_a_call(case: Case, kernels: check.Kernels) -> None:
    check.assert_accurate(case, check.run(case, kernels))
