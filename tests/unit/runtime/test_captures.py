"""Tests of captures: nothing that this package does outside of a captured stream breaks the capture.

The fake driver has the rules of cuThreadExchangeStreamCaptureMode: an unsafe call fails and invalidates the capture.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.errors import DriverError, NotSupported
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray
from cutlass_py_attn.runtime.binding import bind
from tests.support.fake_driver import FakeDriver
from tests.support.fake_libraries import CUPY_STREAM, TORCH_STREAM, Tensor, ndarray
from tests.support.fakes import InterfaceArray, addresses, aligned, artifact, plan_of
from tests.support.threads import in_thread

SHAPE = (2, 5, 3, 8)
CAPTURED = 0x40
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
MODES = pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread local", "relaxed"])


@contextmanager
def captured(mode: int, stream: int = CAPTURED) -> Iterator[None]:
    """A capture that must be valid at its end."""
    driver.call("cuStreamBeginCapture", stream, driver.bindings().CUstreamCaptureMode(mode))
    yield
    assert driver.call("cuStreamEndCapture", stream)


def here(work: Callable[[], None]) -> None:
    """Runs `work` in this thread."""
    work()


THREADS = pytest.mark.parametrize("run", [here, in_thread])


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemFree", "cuEventQuery"])
def test_an_unsafe_call_breaks_a_capture(log: FakeDriver, name: str) -> None:
    """So that the other tests can fail."""
    driver.call("cuStreamBeginCapture", CAPTURED, driver.bindings().CUstreamCaptureMode(THREAD_LOCAL))
    in_thread(lambda: driver.free_now(driver.allocate_now(16, "another thread's array")))
    with pytest.raises(DriverError, match=name):
        driver.call(name, 16)
    with pytest.raises(DriverError, match="cuStreamEndCapture"):
        driver.call("cuStreamEndCapture", CAPTURED)


@MODES
@THREADS
def test_a_device_array_dies(log: FakeDriver, mode: int, run: Callable[[Callable[[], None]], None]) -> None:
    arrays = [DeviceArray(SHAPE, "float32", 0, 0x77) for _ in range(2)]

    def drop() -> None:
        arrays.pop()
        gc.collect()

    with captured(mode):
        run(drop)
        assert len(log.of("cuMemFree")) == 1
    drop()
    assert len(log.of("cuMemFree")) == 2
    assert int(driver.call("cuThreadExchangeStreamCaptureMode", driver.bindings().CUstreamCaptureMode(0))) == 0


def test_a_free_that_the_driver_refuses_is_repeated(log: FakeDriver) -> None:
    array = DeviceArray(SHAPE, "float32", 0, 0x77)
    address = array.pointer
    log.fail("cuMemFree", 900)
    del array
    gc.collect()
    assert [call.numbers[0] for call in log.of("cuMemFree")] == [address]
    DeviceArray(SHAPE, "float32", 0, 0x77)
    assert [call.numbers[0] for call in log.of("cuMemFree")][:2] == [address] * 2


@MODES
@THREADS
def test_a_call_on_another_stream(log: FakeDriver, mode: int, run: Callable[[Callable[[], None]], None]) -> None:
    """Its kernels are loaded, its results allocated and dropped, and a launcher is created."""

    def call() -> None:
        operands = [DeviceArray(SHAPE, "float32", 0, 0x77) for _ in range(3)]
        for _ in range(3):
            attention_forward(*operands, kernels=artifact, stream=0x77, scale=0.5 + mode + 3 * (run is here))

    with captured(mode):
        run(call)
    assert len(log.of("cuLaunchKernelEx")) == 3
    assert len(log.of("cuLibraryLoadData")) <= 1


@MODES
def test_kernels_are_loaded(log: FakeDriver, mode: int) -> None:
    problem, plan = plan_of("backward", scale=0.125 + mode)
    made = artifact(plan.build)
    made = replace(made, cubin=made.cubin + b"\nanother cubin, which was not loaded before: %d\n" % mode)
    with captured(mode):
        bind(made, plan, problem)
    assert len(log.of("cuLibraryLoadData")) == 1


@MODES
@THREADS
def test_a_launcher_dies(log: FakeDriver, mode: int, run: Callable[[Callable[[], None]], None]) -> None:
    problem, plan = plan_of("backward", arch="sm_90a")
    bounds = [bind(artifact(plan.build), plan, problem)]
    for _ in range(2):
        bounds[0](addresses(bounds[0].tensor_names), 0x10)
    log.clear()

    def drop() -> None:
        bounds.clear()
        gc.collect()

    with captured(mode):
        run(drop)
    calls = [call for call in log.calls if call.name in ("cuThreadExchangeStreamCaptureMode", "cuGraphExecDestroy")]
    position = [call.name for call in calls].index("cuGraphExecDestroy")
    assert calls[position - 1].numbers[0] == RELAXED


@MODES
@pytest.mark.parametrize(("make", "stream"), [(Tensor, TORCH_STREAM), (ndarray, CUPY_STREAM)], ids=["torch", "cupy"])
def test_torch_and_cupy_arrays_are_captured(log: FakeDriver, mode: int, make: Any, stream: int) -> None:
    operands = [make(SHAPE) for _ in range(3)]
    with captured(mode, stream):
        for _ in range(3):
            attention_forward(*operands, kernels=artifact)
    assert [call.stream for call in log.of("cuLaunchKernelEx")] == [stream] * 3


UNKNOWN = "results of unknown libraries are allocated outside of the graph"
COMPLETE = "results are complete when the call returns"


@MODES
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: aligned(SHAPE, "f4"), COMPLETE),
        (lambda: InterfaceArray(aligned(SHAPE, "f4")), UNKNOWN),
        (lambda: DeviceArray(SHAPE, "float32", 0, CAPTURED), UNKNOWN),
        (lambda: type("ArrayImpl", (InterfaceArray,), {"__module__": "jaxlib._jax"})(aligned(SHAPE, "f4")), COMPLETE),
    ],
    ids=["NumPy", "interface", "DeviceArray", "JAX"],
)
def test_other_arrays_are_refused_on_a_captured_stream(log: FakeDriver, mode: int, make: Any, text: str) -> None:
    operands = [make() for _ in range(3)]
    with captured(mode):
        with pytest.raises(NotSupported) as caught:
            attention_forward(*operands, kernels=artifact, stream=CAPTURED)
        (refusal,) = caught.value.refusals
        assert (refusal.field, refusal.value) == ("stream", "0x40")
        assert text in refusal.rule
        assert "torch or CuPy arrays" in refusal.remedy
    assert not {"cuMemAllocAsync", "cuMemcpyHtoDAsync", "cuLaunchKernelEx"} & set(log.names)
    attention_forward(*(aligned(SHAPE, "f4") for _ in range(3)), kernels=artifact, stream=CAPTURED)


def test_the_legacy_stream_beside_a_capture_that_forbids_it(log: FakeDriver) -> None:
    """The driver says so with an error in place of a status; any other error is left to the launch."""
    operands = [aligned(SHAPE, "f4") for _ in range(3)]
    log.fail("cuStreamIsCapturing", 906)
    with pytest.raises(NotSupported, match="stream = 0x0: must not be captured, nor forbidden by a capture"):
        attention_forward(*operands, kernels=artifact)
    log.fail("cuStreamIsCapturing", 201)
    attention_forward(*operands, kernels=artifact)
    assert len(log.of("cuLaunchKernelEx")) == 1


def test_events_of_kept_operands_are_asked_in_a_capture(log: FakeDriver) -> None:
    attention_forward(*(ndarray(SHAPE) for _ in range(3)), kernels=artifact, stream=0x99)
    with captured(GLOBAL, CUPY_STREAM):
        attention_forward(*(ndarray(SHAPE) for _ in range(3)), kernels=artifact)
    assert len(log.of("cuEventQuery")) == 1
