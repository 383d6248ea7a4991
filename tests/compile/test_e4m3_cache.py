"""The Hopper forward over e4m3 caches: registers and instructions of the tiles that the planner has."""

from __future__ import annotations

import re

import pytest

from cutlass_py_attn.kernels.sm90_e4m3_cache.layout import VECTOR_CODES, registers, rows_of_thread, vectors_of_row
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import parse
from tests.support.machine_code import MachineCode


@pytest.mark.parametrize(
    "name",
    [
        "bf16_d128_q2048_s8192_b8_h32k8_causal_br_paged16_kv8_descalehead",
        "f16_d64_q2048_s8192_b8_h32k8_causal_br_kv8_descalerow",
    ],
)
def test_machine_code(name: str, machine_code: MachineCode) -> None:
    """`compile` refuses spills, and ptxas remarks that wgmma instructions are serialised.

    A thread loads the codes of a key tile before the loop, and of a value and a key tile in it. TMA loads the query
    tile alone.
    """
    plan = planner.plan(parse(name).problem("forward"), "sm_90a", 132)
    build, made = plan.build, machine_code(plan)
    (kernel,) = made.kernels
    assert kernel.spill_bytes == kernel.frame_bytes == 0
    assert [int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", made.ptx)] == [
        *registers(build)
    ]
    rows = rows_of_thread(build)
    key, value = (rows * vectors_of_row(build, columns) for columns in (build.columns, build.columns_value))
    assert len(re.findall(r"ld\.global\.v4\.b32", made.ptx)) == 2 * key + value
    assert made.ptx.count("cvt.rn.f16x2.e4m3x2") == (key + value) * VECTOR_CODES // 2
    assert made.ptx.count("cp.async.bulk.tensor") == build.columns * 2 // 128
    has_scales = "cp.async.ca.shared.global" in made.ptx
    assert has_scales == build.has("kv8row")
