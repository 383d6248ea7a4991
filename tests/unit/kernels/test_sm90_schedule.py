"""Tests of the order of steps of the sm90 backward."""

from __future__ import annotations

import pytest

from cutlass_py_attn import plan_backward
from cutlass_py_attn.kernels.sm90_backward.schedule import schedule_of
from cutlass_py_attn.problem.spec import parse


@pytest.mark.parametrize(
    ("name", "variant", "pending"),
    [
        ("bf16_d128_s8192_b4_h16_causal_softcap4", "", {"dk": 2, "dp": 1, "dv": 2}),
        ("bf16_d128_s8192_b4_h16_causal", "ds_registers", {"dk": 0, "dp": 1, "dv": 0}),
        ("bf16_d128_s8192_b4_h16_causal_bias", "ds_registers", {"dk": 0, "dp": 1, "dv": 0}),
        ("bf16_d64_s8192_b4_h16_causal", "key_registers", {"dk": 0, "dp": 0, "dv": 0}),
    ],
)
def test_gemms_in_flight_during_each_wait(name: str, variant: str, pending: dict[str, int]) -> None:
    build = plan_backward(parse(name).problem("backward"), "sm_90a").build
    schedule = schedule_of(build)
    assert build.variant == variant
    assert {gemm: schedule.pending(gemm) for gemm in pending} == pending


def test_explain_has_the_steps_in_order() -> None:
    text = plan_backward(parse("bf16_d64_s8192_b4_h16_causal").problem("backward"), "sm_90a").explain()
    assert "issue dv, issue dp, finish dp" in text
