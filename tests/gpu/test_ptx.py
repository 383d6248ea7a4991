"""PTX on the GPU: sm_80 kernels that the driver compiles for this GPU are right as well.

They take other paths than the sm_90 cubins: no stmatrix, and scalar instead of vector reductions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import binding, driver
from cutlass_py_attn.testing import check, device_memory
from cutlass_py_attn.testing.cases import PTX_ARCH, Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import covering_cases
from tests.gpu.test_laws import operands_of


@pytest.mark.parametrize("case", covering_cases.PTX_CASES, ids=lambda case: case.line.replace(" ", "_"))
def test_ptx_of_an_older_target(
    case: Case, kernels: Kernels, gpu: driver.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = case.problem()
    plan = planner.plan(problem, PTX_ARCH, gpu.num_sms)
    made = kernels(plan.build)
    # bind takes cubins, which run on their own generation only; the driver takes PTX in the same place.
    monkeypatch.setattr(binding, "_runs_on", lambda *_: True)
    bound = binding.bind(replace(made, cubin=made.ptx.encode() + b"\0"), plan, problem)
    arrays = case.arrays()
    operands = operands_of(case, arrays) if case.direction == "backward" else arrays
    tensors = {**problem.tensors(), "logsumexp": Tensor.contiguous(problem.shape.logsumexp, "float32")}
    given = {name: array for name, array in operands.items() if name in tensors}
    with device_memory.GuardedLaunch(bound, tensors, given) as guarded:
        found = guarded.run()
    check.assert_accurate(case, check.results(case, arrays, found))
