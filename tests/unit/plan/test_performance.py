"""Tests of the estimate of a plan, and of the changes that it names for slow ones."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from cutlass_py_attn import PerformanceWarning
from cutlass_py_attn.plan import performance, planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor
from tools.tuning import cliffs

LATENT = "bf16_d576v512_q1_s8192_b64_h128k1_full"
# (problem, direction, microseconds on an H200): of docs/data and docs/paged.md.
MEASURED = (
    ("bf16_d128_s8192_b4_h16_full", "forward", 2730),
    ("bf16_d128_s8192_b4_h16_causal", "forward", 1450),
    ("bf16_d128_s8192_b4_h16_full", "backward", 7822),
    ("bf16_d64_s8192_b4_h32_causal", "backward", 4673),
    ("bf16_d256_s8192_b4_h8_full", "forward", 2628),
    ("bf16_d512_s8192_b1_h16_full", "forward", 3205),
    ("bf16_d512_s8192_b1_h16_full", "backward", 13418),
    ("f32_d128_s2048_b4_h16_full", "forward", 2162),
    ("f32_d64_s8192_b1_h32_causal", "backward", 12446),
    ("e4m3_d128_s8192_b4_h16_full", "forward", 2316),
    ("bf16_d128_q1_s8192_b64_h32k8_full", "forward", 485),
    ("bf16_d128_q1_s8192_b64_h32k8_full_paged16_kv8", "forward", 259),
    (f"{LATENT}_mla", "forward", 251),
    (f"{LATENT}_paged64_mla", "forward", 270),
)


def plan_of(name: str, direction: str = "forward", arch: str = "sm_90a") -> Plan:
    """Returns the plan of a problem by name."""
    return planner.plan(parse(name).problem(direction), arch)


@pytest.mark.parametrize(("name", "direction", "measured"), MEASURED)
def test_the_estimate_is_near_what_was_measured(name: str, direction: str, measured: float) -> None:
    assert measured / 1.3 < performance.estimated_time(plan_of(name, direction)) < 1.3 * measured


@pytest.mark.parametrize(
    ("name", "direction", "arch", "words", "factors"),
    [
        (f"{LATENT}_paged1_mla", "forward", "sm_90a", "latent cache in pages of at least 16 rows", (60, 200)),
        (f"{LATENT}_paged8_mla", "forward", "sm_90a", "mla_attention_forward", (60, 200)),
        (LATENT, "forward", "sm_90a", "a latent cache whose value is the first 512 columns of key", (60, 200)),
        (f"{LATENT}_sinks_mla", "forward", "sm_90a", "and no sinks: pass it to mla_attention_forward", (60, 200)),
        (f"{LATENT}_mla", "forward", "sm_80", "the 128 heads of a group as queries of one head", (20, 100)),
        ("bf16_d128_q1_s8192_b64_h128k1_full", "forward", "sm_90a", "128 heads of a group as queries", (10, 100)),
        ("bf16_d128_q1_s8192_b64_h128k1_full_sinks", "forward", "sm_90a", "keys in pages", (10, 60)),
        ("bf16_d63_q1_s16384_b4_h2_full", "forward", "sm_90a", "rows of 16 bytes", (3, 40)),
        ("bf16_d128_q128_s16384_b1_h8_full_dropout0.1", "forward", "sm_90a", "no dropout", (4, 12)),
        ("bf16_d128_q1_s16384_b4_h8_full_bias", "forward", "sm_80", "no bias, which no decode kernel takes", (3, 40)),
        ("f32_d128_s2048_b4_h16_full", "forward", "sm_90a", "bfloat16 or float16", (8, 16)),
        ("f32_d128_s2048_b4_h16_full", "backward", "sm_80", "bfloat16 or float16", (3, 9)),
    ],
)
def test_a_slow_plan_names_the_change(
    name: str, direction: str, arch: str, words: str, factors: tuple[int, int]
) -> None:
    plan = plan_of(name, direction, arch)
    found = performance.slow_road(plan)
    assert found is not None
    assert words in found.remedy
    assert factors[0] < found.factor < factors[1]
    assert plan.explain().splitlines()[-1] == f"slow: {plan.symbol} is {found}"


@pytest.mark.parametrize(("name", "direction"), [row[:2] for row in MEASURED if not row[0].startswith("f32")])
def test_a_well_served_plan_names_nothing(name: str, direction: str) -> None:
    plan = plan_of(name, direction)
    assert (performance.slow_road(plan), performance.advice(plan)) == (None, "")
    assert "slow:" not in plan.explain()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_a_launch_takes_is_no_reason_to_change_a_small_call(direction: str) -> None:
    for name in ("f32_d64_s64_b1_h4_full", "bf16_d63_s100_b2_h4_causal", "bf16_d64_s0_b1_h1_full"):
        assert performance.slow_road(plan_of(name, direction)) is None


def test_a_bias_of_single_elements_is_slow_in_a_backward() -> None:
    problem = parse("bf16_d128_s4096_b4_h16_full_bias").problem("backward")
    narrow = problem.replace(bias=Tensor(problem.bias.shape, problem.bias.strides, "bfloat16", 2))
    found = performance.slow_road(planner.plan(narrow, "sm_90a"))
    assert found is not None
    assert found.remedy.startswith("rows of the bias aligned to 4 bytes")
    assert performance.slow_road(planner.plan(problem, "sm_90a")) is None


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_every_cliff_of_drawn_problems_is_named(arch: str) -> None:
    """A cliff is found by planning the problem again with one property changed, which the rule does not do."""
    rng = random.Random(38)
    found = [cliff for cliff in (cliffs.cliff_of(cliffs.draw(rng), arch) for _ in range(40)) if cliff is not None]
    assert len(found) >= 3
    assert [cliff for cliff in found if not cliff.said and cliff.factor > cliffs.SURE_FACTOR] == []


def test_the_warning_points_at_the_line_of_the_user_and_is_given_once_there() -> None:
    plan = plan_of(f"{LATENT}_paged1_mla")
    inside = {"__name__": "cutlass_py_attn.api.attention", "performance": performance, "plan": plan}
    exec("def call(): performance.warn(plan)", inside)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("default")
        for _ in range(3):
            inside["call"]()
    (warning,) = given
    assert (warning.category, warning.filename) == (PerformanceWarning, __file__)
    assert re.search(r"estimated to be \d+ times as fast with a latent cache", str(warning.message))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        performance.warn(plan_of(f"{LATENT}_mla"))
    assert given == []


def test_a_notice_is_given_once_also_as_an_error() -> None:
    notice = performance.Notice(plan_of(f"{LATENT}_paged1_mla"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PerformanceWarning):
            notice.give()
        notice.give()
