"""Tests of contexts: a call leaves the thread's current context as it was, also if there was none."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.serving import merge_states
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import aligned, artifact
from tests.support.threads import in_thread

SHAPE = (2, 5, 3, 8)


def current() -> int:
    """Returns the current context of this thread; 0 for none."""
    return int(driver.call("cuCtxGetCurrent"))


def in_fresh_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a thread without a current context, and raises its error."""

    def run() -> None:
        assert current() == 0
        work()

    in_thread(run)


def on_device(ordinal: int) -> list[DeviceArray]:
    """Returns query, key and value on this device."""
    return [DeviceArray(SHAPE, "float32", ordinal, 0) for _ in range(3)]


@pytest.mark.parametrize("previous", [0, 0xC0, 0xC1], ids=["none", "the device's", "another device's"])
def test_the_previous_context_is_restored(driver_log: FakeDriver, previous: int) -> None:
    driver.call("cuCtxSetCurrent", previous)
    with driver.device(0).current():
        assert current() == 0xC0
    assert current() == previous


def test_the_previous_context_is_restored_after_an_error(driver_log: FakeDriver) -> None:
    def fail() -> None:
        driver_log.fail("cuLaunchKernelEx", 700)
        with pytest.raises(DriverError, match="cuLaunchKernelEx"):
            attention_forward(*on_device(1), kernels=artifact, scale=0.25)
        assert current() == 0

    in_fresh_thread(fail)


def merged_on(ordinal: int) -> None:
    sizes = [(SHAPE, "float32"), ((2, 3, 32), "float32")]
    parts = [DeviceArray(*size, ordinal, 0) for _ in range(2) for size in sizes]
    merge_states(*parts, kernels=artifact, stream=0x77)


def test_no_context_is_current_after_a_merge_on_the_second_gpu(driver_log: FakeDriver) -> None:
    def work() -> None:
        for _ in range(3):
            merged_on(1)
            assert current() == 0
        gc.collect()
        assert current() == 0, "arrays were freed"

    in_fresh_thread(work)
    assert {launch.numbers[9] for launch in driver_log.of("cuLaunchKernelEx")} == {0xC1}


def test_numpy_arrays_stay_on_the_first_gpu_after_arrays_of_the_second(driver_log: FakeDriver) -> None:
    """The device of NumPy arrays is that of the current context, so no call may leave its own context current."""

    def work() -> None:
        operands = on_device(1)
        for _ in range(3):  # first call, launcher created, launcher reused
            attention_forward(*operands, kernels=artifact, stream=0x77)
            assert current() == 0
        del operands
        gc.collect()
        assert current() == 0, "arrays were freed"
        driver_log.clear()
        attention_forward(*(aligned(SHAPE, np.float32, seed) for seed in range(3)), kernels=artifact)
        assert current() == 0

    in_fresh_thread(work)
    (launch,) = driver_log.of("cuLaunchKernelEx")
    assert launch.numbers[9] == 0xC0
