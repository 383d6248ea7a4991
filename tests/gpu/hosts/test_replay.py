"""Graphs of a Bound on the GPU: the same bits as kernel by kernel, whatever changes between the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn import driver
from cutlass_py_attn.launch import Bound
from tests.gpu import check, memory
from tests.gpu.cases import Case, Variant
from tests.gpu.check import Kernels
from tests.gpu.memory import Placed
from tests.gpu.test_laws import differing, operands_of

# All repeatable to the bit: a deterministic backward, and a wide one, by clusters, with one tile of keys.
CASES = {
    "forward": Case("forward", Variant("bfloat16", 128, 128, "causal"), 2, 3, 515, 640, "gaussian", 5),
    "backward": Case(
        "backward", Variant("bfloat16", 128, 128, "causal", deterministic=True), 2, 3, 515, 640, "gaussian", 5
    ),
    "wide backward": Case("backward", Variant("bfloat16", 192, 192, "causal"), 2, 3, 515, 64, "gaussian", 5),
}
ROUNDS = 4
LATE_BYTES = 1 << 30
LATE_TIMES = 40  # 40 GiB to write: some milliseconds on any GPU


def placed(case: Case, kernels: Kernels, seed: int) -> Placed:
    """The case with other numbers for each seed, in buffers of their own."""
    case = replace(case, seed=seed)
    return memory.placed(case.problem(), operands_of(case, check.make(case)), kernels)


def one_by_one(bound: Bound) -> Callable[..., None]:
    """The same Bound without graphs."""
    bound._new_replay = lambda *_: None  # type: ignore[method-assign]
    return bound


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits_as_kernel_by_kernel(case: Case, kernels: Kernels) -> None:
    """One Bound in turns on two sets of arrays, of which the second call on is a graph with other addresses."""
    with placed(case, kernels, 5) as first, placed(case, kernels, 6) as second, memory.stream() as stream:
        plain = one_by_one(second.bound)
        expected = []
        for each in (first, second):
            each.reset()
            plain(each.pointers, stream, workspace=each.workspace)
            driver.synchronise(stream)
            expected.append(each.read())
        for _ in range(ROUNDS):
            for each, results in zip((first, second), expected, strict=True):
                each.reset()
                first.bound(each.pointers, stream, workspace=each.workspace)
                driver.synchronise(stream)
                assert differing(results, each.read()) == []
        assert stream in first.bound._replays
        assert stream not in second.bound._replays


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calls_behind_late_work_keep_their_addresses(case: Case, kernels: Kernels) -> None:
    """Many graphs wait on a stream that is busy: each writes to the arrays of its own call, and no call waits."""
    sets = [placed(case, kernels, seed) for seed in range(5, 9)]
    busy = driver.allocate_now(LATE_BYTES, "late work")
    try:
        with memory.stream() as stream:
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
                driver.clear(busy, LATE_BYTES, stream)
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


def test_no_context_and_another_one(kernels: Kernels, gpu: driver.Device) -> None:
    """In a thread without a context, and under one of somebody else's, the stream's device is used."""
    case = CASES["backward"]
    with placed(case, kernels, 5) as ours, placed(case, kernels, 6) as other, memory.stream() as stream:
        expected = [each.run() for each in (ours, other)]
        for _ in range(2):
            ours.launch(stream)
        foreign = driver.call("cuCtxCreate", None, 0, gpu.handle)
        driver.call("cuCtxSetCurrent", gpu.context)
        failures: list[BaseException] = []

        def work(context: Any) -> None:
            try:
                driver.call("cuCtxSetCurrent", context)
                for each in (other, ours):
                    ours.bound(each.pointers, stream, workspace=each.workspace)
                driver.call("cuStreamSynchronize", stream)
            except BaseException as error:
                failures.append(error)

        for context in (0, foreign):
            for each in (ours, other):
                each.reset()
            thread = threading.Thread(target=work, args=(context,))
            thread.start()
            thread.join()
            with gpu.current():
                driver.synchronise(stream)
            assert failures == []
            for each, results in zip((ours, other), expected, strict=True):
                assert differing(results, each.read()) == []
        driver.call("cuCtxDestroy", foreign)


def test_several_streams_and_threads(kernels: Kernels) -> None:
    """Threads with streams and arrays of their own share one Bound."""
    case = CASES["backward"]
    sets = [placed(case, kernels, seed) for seed in range(5, 8)]
    streams = [driver.new_stream() for _ in sets]
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
    with placed(CASES["forward"], kernels, 5) as found:
        found.run()
        assert found.bound._packing._maps
        assert not found.bound._packing._encoded_anew
