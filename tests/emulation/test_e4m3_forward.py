"""kernels/sm90/e4m3_forward.py: its machine code on whole problems, executed with all warp roles and barriers."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.plan import planner
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.block_emulator import emulate
from tests.support.gemm_emulator import compiled

NUM_SMS = 1  # so that a block computes several work tiles
# All of one kernel, with two heads, each of a query tile and two key tiles, and whether asynchronous work ends at once.
RUNS = (
    ("forward e4m3_d64_q100_s140_b1_h2_causal_br_descalebatch seed=2", False),
    ("forward e4m3_d64_q100_s140_b1_h2_causal_br_scale0.3 inputs=zero_scores layout=padded", True),
)


@pytest.mark.parametrize(("line", "is_eager"), RUNS)
def test_forward(line: str, is_eager: bool) -> None:
    case = Case.parse(line)
    expected = guarded_check.expect(case)
    plan = planner.plan_forward(case.problem(), "sm_90a", NUM_SMS)
    found = emulate(case, plan, compiled(plan).ptx, expected.arrays, is_eager=is_eager, seed=7)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert np.isfinite(found["output"].astype(np.float32)).all()
