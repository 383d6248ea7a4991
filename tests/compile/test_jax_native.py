"""The handler in C of XLA's calls: it launches what the handler in Python launches, without its interpreter lock."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from cutlass_py_attn.api.options import VariableLength  # noqa: E402
from cutlass_py_attn.jax import append_to_cache, attention, functions, handler, native_program, primitive, serving  # noqa: E402
from cutlass_py_attn.jax.payload import unpack  # noqa: E402
from cutlass_py_attn.plan import planner  # noqa: E402
from cutlass_py_attn.problem import spec  # noqa: E402
from cutlass_py_attn.problem.append import AppendProblem  # noqa: E402
from cutlass_py_attn.problem.merge import MergeProblem  # noqa: E402
from cutlass_py_attn.problem.problem import Problem  # noqa: E402
from cutlass_py_attn.problem.tensors import Tensor  # noqa: E402
from cutlass_py_attn.runtime import driver, tensor_maps  # noqa: E402
from tests.support import native_frames  # noqa: E402
from tests.support.any_problem import problems  # noqa: E402
from tests.support.fake_driver import FakeDriver  # noqa: E402
from tests.support.fakes import artifact  # noqa: E402
from tests.support.native_frames import TARGETS, Call, call_of, compared, launches_of_both, native_handler  # noqa: E402


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


def expect_both(log: FakeDriver, call: Call, by_python: list[int]) -> None:
    """Both handlers launch the same, and C leaves the first launch alone to Python."""
    by_python.clear()
    assert launches_of_both(log, call)
    assert by_python == [call.key]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_drawn_problems(log: FakeDriver, by_python: list[int], problem: Problem) -> None:
    problem = problem.replace(philox_on_device=bool(problem.dropout_p))
    assume(not problem.is_empty)
    plan = planner.plans_on(problem, (9, 0), 132)[0]
    expect_both(log, call_of(problem, plan), by_python)


def test_launches_of_no_plan(log: FakeDriver, by_python: list[int]) -> None:
    """Two launches with tensor maps, in another order, and a launch without overrides among some that have them."""
    problem = spec.parse("bf16_d128_s512_b2_h4_causal").problem("forward")
    plan = planner.plans_on(problem, (9, 0), 132)[0]
    (first,) = plan.launches
    second = replace(first, tensor_maps=first.tensor_maps[::-1])
    expect_both(log, call_of(problem, replace(plan, launches=(first, second))), by_python)
    problem = spec.parse("f32_d8_s3_b70000_h1_full").problem("forward")
    plan = planner.plans_on(problem, (9, 0), 132)[0]
    launches = (*plan.launches[::-1], replace(plan.launches[0], param_overrides=()))
    expect_both(log, call_of(problem, replace(plan, launches=launches)), by_python)


def tensor(*shape: int, dtype: str = "float16") -> Tensor:
    return Tensor.contiguous(shape, dtype)


ROWS = (
    AppendProblem(
        key=tensor(5, 2, 16),
        value=tensor(5, 2, 16),
        key_cache=tensor(3, 4, 2, 16),
        value_cache=tensor(3, 4, 2, 16),
        slots=tensor(5, dtype="int64"),
    ),
    AppendProblem.dense((5, 1, 160), (3, 4), "float16", head_dim_value=16, scales="tile"),
    MergeProblem(
        output_a=tensor(2, 5, 3, 8),
        logsumexp_a=tensor(2, 3, 32, dtype="float32"),
        output_b=tensor(2, 5, 3, 8),
        logsumexp_b=tensor(2, 3, 32, dtype="float32"),
        output=tensor(2, 5, 3, 8),
    ),
)


@pytest.mark.parametrize("problem", ROWS, ids=("append", "latent append", "merge"))
def test_appends_and_merges(log: FakeDriver, by_python: list[int], problem: AppendProblem | MergeProblem) -> None:
    """Their plans have no problem; a cache is operand and result, and so are the scales of a latent cache."""
    call = Call(unpack(serving.payload_of(serving._Call(problem, artifact, "sm_90", False))))
    expect_both(log, call, by_python)


def test_each_gpu_has_its_kernels(log: FakeDriver, by_python: list[int]) -> None:
    """One key on two GPUs: the stream's context decides, and is current while the kernels are launched."""
    problem = spec.parse("f16_d64_s100_b1_h2_full").problem("forward")
    calls = [
        call_of(problem, planner.plans_on(problem, *gpu)[0], ordinal)
        for ordinal, gpu in enumerate((((9, 0), 132), ((8, 6), 84)))
    ]
    handler._payloads[calls[0].key, 1] = calls[1].bound
    calls[1].key = calls[0].key
    for _ in range(2):
        for call in (*calls, calls[0]):
            log.clear()
            assert call.native(call.addresses(1)) == ""
            (launch,) = log.of("cuLaunchKernelEx")
            assert (launch.numbers[9], launch.stream) == (0xC0 + (call is calls[1]), call.stream)
            assert int(driver.call("cuCtxGetCurrent")) == 0, "the caller's context again"
    assert by_python == [calls[0].key] * 2


@pytest.fixture
def call(log: FakeDriver) -> Call:
    """A call with tensor maps, a workspace and a program."""
    problem = spec.parse("bf16_d128_s512_b2_h4k2_causal").problem("backward")
    found = call_of(problem, planner.plans_on(problem, (9, 0), 132)[0])
    assert found.native(found.addresses(1)) == ""
    log.clear()
    return found


def test_threads_launch_calls_of_their_own(log: FakeDriver, call: Call, by_python: list[int]) -> None:
    expected: list[tuple[Any, ...]] = []
    for number in range(8):
        assert call.native(call.addresses(number)) == ""
    expected = sorted(compared(log))
    log.clear()
    with ThreadPoolExecutor(8) as pool:
        rounds = [pool.submit(call.native, call.addresses(number)) for number in range(8) for _ in range(10)]
    assert {each.result() for each in rounds} == {""}
    assert sorted(compared(log)) == sorted(10 * expected)
    assert by_python == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (1, "cutlass_py_attn: the call has no key; trace the program again"),
        (2, "cutlass_py_attn: the call has no key; trace the program again"),
        (3, r"cutlass_py_attn: \d+ operands and \d+ results: must be \d+ buffers; trace the program again"),
        (4, r"cutlass_py_attn: \d+ operands and -1 results: must be \d+ buffers; trace the program again"),
        (5, "no stream"),
    ],
)
def test_wrong_frames_are_errors(log: FakeDriver, call: Call, what: int, text: str) -> None:
    assert re.fullmatch(text, call.native(call.addresses(1), what))
    assert compared(log) == []


def test_wrong_buffers_are_errors(log: FakeDriver, call: Call) -> None:
    addresses = call.addresses(1)
    for wrong in (addresses[:-1], [*addresses, addresses[0]]):
        assert "buffers; trace the program again" in call.native(wrong)
    for first in (0, addresses[0] + 8):
        assert re.fullmatch(
            rf"cutlass_py_attn: buffer 0 is at {first:#x}: must be a device address, 16-byte aligned",
            call.native([first, *addresses[1:]]),
        )
    assert compared(log) == []


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuMemsetD8Async", "cuStreamGetCtx", "cuCtxSetCurrent"])
def test_errors_of_the_driver_are_those_of_python(log: FakeDriver, name: str) -> None:
    """A text with NVIDIA's words, the kernel and a hint; the handler works again afterwards."""
    problem = spec.parse("f32_d64_s700_t5000_h2_full_deterministic").problem("backward")
    call = call_of(problem, planner.plans_on(problem, (9, 0), 132)[0])
    assert call.native(call.addresses(1)) == ""
    log.fail(name, 2)
    symbol = re.escape(call.payload.plan.launches[0].symbol) if name == "cuLaunchKernelEx" else ""
    expected = (
        rf"cutlass_py_attn: {name}\(\){' for ' * bool(symbol)}{symbol}: CUDA_ERROR_OUT_OF_MEMORY: .*; free memory .*"
    )
    assert re.fullmatch(expected, call.native(call.addresses(1)))
    log.clear()
    assert call.native(call.addresses(1)) == ""
    assert len(log.of("cuLaunchKernelEx")) == len(call.payload.plan.launches)


def test_an_error_of_the_first_launch_is_not_the_last(log: FakeDriver, by_python: list[int]) -> None:
    problem = spec.parse("f16_d40_s100_b1_h2_full").problem("forward")
    call = call_of(problem, planner.plans_on(problem, (9, 0), 132)[0])
    log.fail("cuLaunchKernelEx", 2)
    assert "cuLaunchKernelEx" in call.native(call.addresses(1))
    for _ in range(2):
        assert call.native(call.addresses(1)) == ""
    assert by_python == [call.key]


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(tensor_maps, "starts_with_address", lambda *_: False), (native_program, "MAX_MAPS", 2)],
    ids=["addresses cannot be overwritten", "too many"],
)
def test_tensor_maps_that_c_cannot_write_stay_with_python(
    log: FakeDriver, by_python: list[int], monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(module, name, value)
    problem = spec.parse("bf16_d128_s512_b2_h4_causal").problem("forward")
    call = call_of(problem, planner.plans_on(problem, (9, 0), 132)[0])
    assert len(call.payload.plan.launches[0].tensor_maps) == 3
    for _ in range(3):
        assert call.native(call.addresses(1)) == ""
    assert by_python == [call.key] * 3


def test_a_program_that_c_refuses_stays_with_python(
    log: FakeDriver, by_python: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one warning, for the call itself is right."""
    monkeypatch.setattr(native_program, "FORMAT", 1)
    problem = spec.parse("f16_d48_s100_b1_h2_full").problem("forward")
    call = call_of(problem, planner.plans_on(problem, (9, 0), 132)[0])
    with pytest.warns(UserWarning, match=r"the one in C refuses its program: format at word 1 of \d+") as caught:
        errors = [call.native(call.addresses(1)) for _ in range(3)]
    assert (errors, len(caught)) == ([""] * 3, 1)
    assert by_python == [call.key] * 3
    assert len(log.of("cuLaunchKernelEx")) == 3


def test_a_forked_child_is_refused(log: FakeDriver, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    native_handler().forget()  # what a child does
    monkeypatch.setattr(driver, "is_forked_child", True)
    assert call.native(call.addresses(1)).startswith("cutlass_py_attn: this process was forked after its parent")
    assert compared(log) == []


# In programs that XLA runs: its CPU client calls the handler for CUDA, with a made-up stream


@pytest.fixture(params=["native", "python"])
def target(request: pytest.FixtureRequest, driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> str:
    """The handler that launches."""
    native_handler().forget()
    monkeypatch.setattr(handler, "_payloads", {})
    for module in (primitive, serving):
        monkeypatch.setattr(module, "TARGET", TARGETS[request.param])
        module._traced.clear_cache() if module is serving else functions._traced.clear_cache()
    return str(request.param)


def draw(seed: int, *shape: int, dtype: str = "bfloat16") -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_a_training_step(target: str, driver_log: FakeDriver, by_python: list[int]) -> None:
    """Both directions, with dropout, whose seed is on the device; later steps need no Python."""
    attend = functools.partial(attention, kernels=artifact, dropout_p=0.25, dropout_key=jax.random.key(0))
    step = jax.jit(jax.value_and_grad(lambda *arrays: attend(*arrays).astype("float32").sum(), (0, 1, 2)))
    arrays = [draw(seed, 2, 33, 4, 64) for seed in range(3)]
    for _ in range(3):
        jax.block_until_ready(step(*arrays))
    launches = driver_log.of("cuLaunchKernelEx")
    symbols = [call.text for call in launches]
    assert len(symbols) % 3 == 0
    assert symbols == 3 * symbols[: len(symbols) // 3]
    assert symbols[0].startswith("fwd_")
    assert symbols[-1].startswith("bwd_")
    assert {call.stream for call in launches} == {0x77}
    assert len(by_python) == (2 if target == "native" else 6)


def test_rows_outside_of_sequences_and_donated_caches(target: str, driver_log: FakeDriver) -> None:
    """Values and addresses that the handlers write: the fake driver's kernels write nothing."""
    starts = jnp.array([0, 5, 13], jnp.int32)
    run = jax.jit(functools.partial(attention, kernels=artifact, sequences=VariableLength(starts, starts, 8, 8)))
    for _ in range(2):
        output = run(*(draw(seed, 1, 13, 4, 8) for seed in range(3)))
        assert not np.asarray(output, "float32").any()
    step = jax.jit(functools.partial(append_to_cache, kernels=artifact), donate_argnames=("key_cache", "value_cache"))
    caches = [jnp.ones((3, 4, 2, 16), "float16") for _ in range(2)]
    for _ in range(2):
        driver_log.clear()
        before = [array.unsafe_buffer_pointer() for array in caches]
        rows = [draw(seed, 5, 2, 16, dtype="float16") for seed in range(2)]
        caches = jax.block_until_ready(step(*rows, *caches, jnp.array([3, -1, 11, 0, 12], jnp.int32)))
        (launch,) = driver_log.of("cuLaunchKernelEx")
        words = np.frombuffer(launch.parameters[: len(launch.parameters) // 8 * 8], np.uint64).tolist()
        assert set(before) <= set(words)


def test_an_error_reaches_the_caller(target: str, driver_log: FakeDriver) -> None:
    run = jax.jit(functools.partial(attention, kernels=artifact))
    arrays = [draw(seed, 1, 40, 1, 32, dtype="float16") for seed in range(3)]
    jax.block_until_ready(run(*arrays))
    driver_log.fail("cuLaunchKernelEx", 2)
    errors = jax.errors.JaxRuntimeError, ValueError  # the second where JAX calls a compiled program directly
    with pytest.raises(errors, match=r"cutlass_py_attn: cuLaunchKernelEx.*CUDA_ERROR_OUT_OF_MEMORY"):
        jax.block_until_ready(run(*arrays))
    jax.block_until_ready(run(*arrays))


def test_a_busy_thread_does_not_delay_a_launch(target: str, driver_log: FakeDriver) -> None:
    """One thread holds Python's lock, in C, until XLA's thread has launched: the handler in Python cannot."""
    run = jax.jit(functools.partial(attention, kernels=artifact))
    arrays = [draw(seed, 1, 24, 1, 16, dtype="float16") for seed in range(3)]
    jax.block_until_ready(run(*arrays))
    driver_log.clear()
    frames = native_frames.frames()
    frames.frames_close()
    holding_the_lock = ctypes.PyDLL(frames._name)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: jax.block_until_ready(run(*arrays)))
        assert frames.frames_wait(20000), "the call reaches its handler"
        assert holding_the_lock.frames_pass(20000 if target == "native" else 200) == (target == "native")
        running.result()
    assert len(driver_log.of("cuLaunchKernelEx")) == 1
