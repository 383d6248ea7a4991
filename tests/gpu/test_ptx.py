"""PTX on the GPU: sm_80 kernels that the driver compiles for this GPU are right as well.

They take other paths than the sm_90 cubins: no stmatrix, and scalar instead of vector reductions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn import driver, launch, planner
from cutlass_py_attn.problem import Tensor
from tests.gpu import cases, check, memory
from tests.gpu.check import Kernels
from tests.gpu.test_laws import operands_of


@pytest.mark.parametrize("case", cases.PTX_CASES, ids=lambda case: case.line.replace(" ", "_"))
def test_ptx_of_an_older_target(
    case: cases.Case, kernels: Kernels, gpu: driver.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = case.problem()
    plan = planner.plan(problem, cases.PTX_ARCH, gpu.num_sms)
    made = kernels(plan.build)
    # bind takes cubins, which run on their own generation only; the driver takes PTX in the same place.
    monkeypatch.setattr(launch, "_runs_on", lambda *_: True)
    bound = launch.bind(replace(made, cubin=made.ptx.encode() + b"\0"), plan, problem)
    arrays = check.make(case)
    operands = operands_of(case, arrays) if case.direction == "backward" else arrays
    tensors = {**problem.tensors(), "logsumexp": Tensor.contiguous(problem.shape.logsumexp, "float32")}
    given = {name: array for name, array in operands.items() if name in tensors}
    with memory.Placed(bound, tensors, given) as placed:
        found = placed.run()
    check.expect(case, check.verdicts(case, arrays, found))
