"""kernels/sm90_mla/latent_codes.py: its machine code on whole problems, executed with all warp roles and barriers."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.block_emulator import emulate
from tests.support.machine_code import MachineCode

NUM_SMS = 2  # so that blocks share the keys of a sequence
# All of one kernel: sequences of an odd and an even number of tiles, of one key and of none, with NaN in every row that
# is not used; and whether asynchronous work ends at once.
RUNS = (
    ("n2x150u129,1x70u0,1x80u70_h3k1_full_paged16_mla_kv8_descaletile seed=3 layout=padded", False),
    ("n1x70u65,3x64u1_h5k1_full_paged32_mla_kv8_descaletile seed=4 inputs=needle table=csr", True),
)


def case_and_plan(line: str) -> tuple[Case, Plan]:
    case = Case.parse(f"forward bf16_d576v512_{line}")
    return case, planner.plan(case.problem(), "sm_90a", NUM_SMS)


@pytest.mark.parametrize(("line", "is_eager"), RUNS)
def test_decode(line: str, is_eager: bool, machine_code: MachineCode) -> None:
    case, plan = case_and_plan(line)
    _, of_kernel = case_and_plan(RUNS[0][0])
    assert plan.build == of_kernel.build
    made = machine_code(plan)
    expected = guarded_check.expect(case)
    found = emulate(case, plan, made.ptx, expected.arrays, is_eager=is_eager, seed=7)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert np.isfinite(found["output"][:, : case.spec.num_tokens[0]].astype(np.float32)).all()
