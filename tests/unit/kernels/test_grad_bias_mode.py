"""Tests of the gradient of the bias: which problems have it written by the main kernel of the sm90 family."""

from __future__ import annotations

from typing import Any

import pytest

from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor

OF_SM80 = "full gradient of the bias "


def planned_family(problem: Problem) -> str:
    return planner.plans_on(problem, (9, 0))[0].build.family


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("bf16_d128_s4096_b4_h16_full_biasgrad", "ds_registers"),
        ("f16_d128_s4096_b4_h16_causal_biasbhqkgrad", "ds_registers"),
        ("bf16_d96_q1000_s1008_b4_h16_causal_br_bias11qkgrad", "ds_registers"),
        ("bf16_d64_s4096_b4_h16_causal_window100_biasgrad", ""),
        ("bf16_d64_s1000_b4_h16_full_biasgrad_alibi_sinks_deterministic", ""),
        ("bf16_d128_s1024_b2_h16k4_causal_biasgrad", "query_heads"),
        ("bf16_d128_s128_b64_h4_full_biasgrad", "per_head"),
        ("bf16_d192v128_s1024_b1_h4_causal_biasgrad", ""),
        ("bf16_d128_s1024_b4_h16_full_biasgrad_dropout0.1", ""),
    ],
)
def test_the_main_kernel_of_sm90_writes_it(name: str, variant: str) -> None:
    problem = spec.parse(name).problem("backward")
    assert sm90_choice.unsupported_features(problem) == ()
    build = planner.plans_on(problem, (9, 0))[0].build
    assert (build.family, build.variant, build.maps_grad_bias) == ("sm90", variant, True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bf16_d128_n260,300_h4_causal_biasgrad", "of variable lengths"),
        ("bf16_d128_s1020_b4_h16_full_biasgrad", "with rows aligned to less than 16 bytes"),
    ],
)
def test_other_gradients_are_of_sm80(name: str, reason: str) -> None:
    problem = spec.parse(name).problem("backward")
    assert OF_SM80 + reason in sm90_choice.unsupported_features(problem)
    assert planned_family(problem) == "sm80"


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((4 * 100 * 112, 100 * 112, 112, 1), ()),
        ((-4 * 100 * 112, 100 * 112, 112, 1), (f"{OF_SM80}with strides of 0 or less",)),
    ],
)
def test_a_tensor_map_steps_forward(strides: tuple[int, ...], expected: tuple[str, ...]) -> None:
    given: dict[str, Any] = {"grad_bias": Tensor((2, 4, 100, 104), strides, "bfloat16")}
    problem = spec.parse("bf16_d128_q100_s104_b2_h4_full_biasbhqkgrad").problem("backward").replace(**given)
    assert sm90_choice.unsupported_features(problem) == expected


def test_narrow_heads_are_faster_in_the_sm80_kernels() -> None:
    problem = spec.parse("bf16_d32_s2048_b4_h16_full_biasgrad").problem("backward")
    assert sm90_choice.unsupported_features(problem) == ()
    assert planned_family(problem) == "sm80"
