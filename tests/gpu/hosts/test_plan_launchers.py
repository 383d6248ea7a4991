"""Launchers on the GPU: kernel by kernel and as a graph they give the same bits, whatever changes between calls."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest

from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.plan_launchers import GraphLauncher, Launcher, StreamLauncher
from cutlass_py_attn.testing import device_memory
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels
from cutlass_py_attn.testing.device_memory import GuardedLaunch
from tests.cases import suite
from tests.gpu.test_laws import differing, operands_of
from tests.support.threads import in_thread

LAUNCHERS: list[type[Launcher]] = [StreamLauncher, GraphLauncher]
ROUNDS = 4
LATE_BYTES = 1 << 30
LATE_TIMES = 40  # 40 GiB to write: some milliseconds on any GPU


@functools.cache
def operands(case: Case) -> dict[str, Array]:
    """What the case reads; the reference that it takes is slow."""
    return operands_of(case, case.arrays())


def guarded(case: Case, kernels: Kernels, seed: int, launcher_type: type[Launcher] = GraphLauncher) -> GuardedLaunch:
    """The case with other numbers for each seed, in buffers of their own."""
    case = case.replace(seed=seed)
    found = device_memory.guarded_launch(case.problem(), operands(case), kernels)
    found.bound.launcher_type = launcher_type
    return found


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
@pytest.mark.parametrize("case", suite.LAUNCHERS.values(), ids=suite.LAUNCHERS)
def test_same_bits_as_kernel_by_kernel(case: Case, launcher_type: type[Launcher], kernels: Kernels) -> None:
    """One Bound in turns on two sets of arrays; first calls on a stream are launched kernel by kernel, anew."""
    with (
        guarded(case, kernels, 5, launcher_type) as first,
        guarded(case, kernels, 6) as second,
        device_memory.stream() as stream,
    ):
        expected = [each.run() for each in (first, second)]
        for _ in range(ROUNDS):
            for each, results in zip((first, second), expected, strict=True):
                each.reset()
                first.bound(each.pointers, stream, workspace=each.workspace)
                driver.synchronise(stream)
                assert differing(results, each.read()) == []
        assert type(first.bound._launchers[stream]) is launcher_type


@pytest.mark.device_memory(gib=2)
@pytest.mark.parametrize("launcher_type", LAUNCHERS)
@pytest.mark.parametrize("case", suite.LAUNCHERS.values(), ids=suite.LAUNCHERS)
def test_calls_behind_late_work_keep_their_addresses(
    case: Case, launcher_type: type[Launcher], kernels: Kernels
) -> None:
    """Many calls wait on a stream that is busy: each writes to the arrays of its own, and no call waits."""
    sets = [guarded(case, kernels, seed, launcher_type) for seed in range(5, 9)]
    busy = driver.allocate_now(LATE_BYTES, "late work")
    try:
        with device_memory.stream() as stream:
            bound = sets[0].bound
            expected = []
            for each in sets:
                each.reset()
                bound(each.pointers, stream, workspace=each.workspace)
                driver.synchronise(stream)
                expected.append(each.read())
            for each in sets:
                each.reset()
            for _ in range(LATE_TIMES):
                driver.memset_zero(busy, LATE_BYTES, stream)
            start = time.perf_counter()
            for each in sets:
                bound(each.pointers, stream, workspace=each.workspace)
            called = time.perf_counter() - start
            driver.synchronise(stream)
            waited = time.perf_counter() - start
            for each, results in zip(sets, expected, strict=True):
                assert differing(results, each.read()) == []
            assert called < waited / 2, "a call waited for the stream"
    finally:
        driver.free_now(busy)
        for each in sets:
            each.__exit__(None, None, None)


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
@pytest.mark.parametrize("case", suite.LAUNCHERS.values(), ids=suite.LAUNCHERS)
def test_no_context_and_another_one(
    case: Case, launcher_type: type[Launcher], kernels: Kernels, gpu: driver.Device
) -> None:
    """In a thread without a context, and under one of somebody else's, the stream's device is used."""
    with (
        guarded(case, kernels, 5, launcher_type) as ours,
        guarded(case, kernels, 6) as other,
        device_memory.stream() as stream,
    ):
        expected = [each.run() for each in (ours, other)]
        for _ in range(2):
            ours.launch(stream)
        foreign = driver.call("cuCtxCreate", None, 0, gpu.handle)
        driver.call("cuCtxSetCurrent", gpu.context)

        def work(context: Any) -> None:
            driver.call("cuCtxSetCurrent", context)
            for each in (other, ours):
                ours.bound(each.pointers, stream, workspace=each.workspace)
            driver.call("cuStreamSynchronize", stream)

        for context in (0, foreign):
            for each in (ours, other):
                each.reset()
            in_thread(functools.partial(work, context))
            with gpu.current():
                driver.synchronise(stream)
            for each, results in zip((ours, other), expected, strict=True):
                assert differing(results, each.read()) == []
        driver.call("cuCtxDestroy", foreign)


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_several_streams_and_threads(launcher_type: type[Launcher], kernels: Kernels) -> None:
    """Threads with streams and arrays of their own share one Bound."""
    case = suite.LAUNCHERS["backward"]
    sets = [guarded(case, kernels, seed, launcher_type) for seed in range(5, 8)]
    streams = [driver.create_stream() for _ in sets]
    try:
        expected = [each.run() for each in sets]
        for each in sets:
            each.reset()

        def work(number: int) -> None:
            for _ in range(ROUNDS * 10):
                sets[0].bound(sets[number].pointers, streams[number], workspace=sets[number].workspace)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        driver.call("cuCtxSynchronize")
        for each, results in zip(sets, expected, strict=True):
            assert differing(results, each.read()) == []
    finally:
        for stream in streams:
            driver.destroy_stream(stream)
        for each in sets:
            each.__exit__(None, None, None)


def test_tensor_maps_start_with_their_address(kernels: Kernels, gpu: driver.Device) -> None:
    """On this driver no map has to be encoded again when its array is another one."""
    if gpu.compute_capability[0] != 9:
        pytest.skip("only kernels for Hopper have tensor maps")
    with guarded(suite.LAUNCHERS["forward"], kernels, 5) as found:
        found.run()
        params = found.bound._params
        assert params._tensor_maps
        assert not params._reencoded_maps
