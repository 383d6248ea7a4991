"""The handler in C of XLA's calls: it launches what the handler in Python launches, without its interpreter lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from cutlass_py_attn.jax import handler  # noqa: E402
from cutlass_py_attn.plan import planner  # noqa: E402
from cutlass_py_attn.problem import spec  # noqa: E402
from cutlass_py_attn.problem.problem import Problem  # noqa: E402
from cutlass_py_attn.problem.tensors import DIRECTIONS  # noqa: E402
from tests.support.any_problem import problems  # noqa: E402
from tests.support.fake_driver import FakeDriver  # noqa: E402
from tests.support.native_frames import Call, call_of, compared, native_handler  # noqa: E402

MANY = "_causal_window64_biassum_dropout0.1_softcap30_alibi_sinks"
CASES = (
    "bf16_d128_s512_b2_h4_causal",
    "bf16_d128_s512_b2_h4k2_causal",
    "f16_d64v32_s512_b2_h4k2_full",
    "bf16_d256_s512_b1_h2_causal",
    "f32_d96_s200_b2_h3_causal",
    "bf16_d128_s700_t5000_h4k2_causal",
    "f32_d64_s700_t5000_h2_full_deterministic",
    f"bf16_d128_s1000_b2_h4k2{MANY}",
    "f16_d72_s512_b2_h4_window_left30_right9",
    "bf16_d128_s8192_b1_h4_causal",
    "f32_d8_s3_b70000_h1_full",
    "f32_d8_s3_b1_h70000_full",
    "bf16_d512_s512_b1_h2_full",
)
FORWARDS = (
    "bf16_d128_q1_s8192_b4_h32k8_full",
    "f16_d128_q1_s8192_b4_h8_full",
    "bf16_d128_q1_s8192_b4_h32k8_full_paged16",
    "bf16_d128_q8_s8192_b4_h32k4_full_paged16",
    "bf16_d128_q512_s4096_b2_h32k8_causal_br_paged128",
    "bf16_d128_n512x512,256_h32k8_causal_br_paged16",
)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the key of every call that the handler in C leaves to Python."""
    found: list[int] = []
    launch = handler.launch

    def counted(frame: int) -> Any:
        result = launch(frame)
        found.append(result[0][0])
        return result

    monkeypatch.setattr(handler, "launch", counted)
    return found


@pytest.fixture
def log(driver_log: FakeDriver) -> Iterator[FakeDriver]:
    """The fake driver for addresses without memory."""
    native_handler()
    driver_log.without_memory(True)
    yield driver_log
    driver_log.without_memory(False)


def as_in_jax(problem: Problem) -> Problem:
    return problem.replace(philox_on_device=True) if "dropout" in problem.features else problem


def expect_the_same(log: FakeDriver, call: Call, by_python: list[int]) -> None:
    """The first launch is Python's, and later ones are those of C, with other addresses too."""
    by_python.clear()
    log.clear()
    assert call.native(call.addresses(1)) == ""
    first = compared(log)
    assert first
    log.clear()
    assert call.native(call.addresses(1)) == ""
    assert compared(log) == first
    log.clear()
    call.python(call.addresses(2))
    second = compared(log)
    log.clear()
    assert call.native(call.addresses(2)) == ""
    assert compared(log) == second
    assert second != first
    assert by_python == [call.key]


@pytest.mark.parametrize(
    ("case", "direction"),
    [*((case, direction) for case in CASES for direction in DIRECTIONS), *((case, "forward") for case in FORWARDS)],
)
def test_it_launches_what_python_launches(log: FakeDriver, by_python: list[int], case: str, direction: str) -> None:
    problem = as_in_jax(spec.parse(case).problem(direction))
    for plan in planner.plans_on(problem, (9, 0), 132):
        expect_the_same(log, call_of(problem, plan), by_python)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(log: FakeDriver, by_python: list[int], problem: Problem) -> None:
    problem = as_in_jax(problem)
    assume(not problem.is_empty)
    plan = planner.plans_on(problem, (9, 0), 132)[0]
    expect_the_same(log, call_of(problem, plan), by_python)
