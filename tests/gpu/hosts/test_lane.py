"""Lanes on the GPU: the same bits one by one and as a graph, whatever changes between the calls."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn import driver, planner
from cutlass_py_attn.lane import Direct, Graph, Lane
from cutlass_py_attn.plan import Build
from tests.gpu import check, memory
from tests.gpu.cases import ARCH, Case, Variant
from tests.gpu.check import Array, Kernels
from tests.gpu.memory import Placed
from tests.gpu.test_laws import differing, operands_of

# All repeatable to the bit: a deterministic backward, and a wide one, by clusters, with one tile of keys.
CASES = {
    "forward": Case("forward", Variant("bfloat16", 128, 128, "causal"), 1, 2, 515, 640, "gaussian", 5),
    "backward": Case(
        "backward", Variant("bfloat16", 128, 128, "causal", deterministic=True), 1, 2, 515, 640, "gaussian", 5
    ),
    "wide backward": Case("backward", Variant("bfloat16", 192, 192, "causal"), 1, 2, 515, 64, "gaussian", 5),
}
LANES: list[type[Lane]] = [Direct, Graph]
ROUNDS = 4
LATE_BYTES = 1 << 30
LATE_TIMES = 40  # 40 GiB to write: some milliseconds on any GPU


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """The kernels of the cases, and what stands in for them."""
    return [planner.builds(case.problem(), arch) for case in CASES.values()]


@functools.cache
def operands(case: Case) -> dict[str, Array]:
    """What the case reads; the reference that it takes is slow."""
    return operands_of(case, check.make(case))


def placed(case: Case, kernels: Kernels, seed: int, lanes: type[Lane] = Graph) -> Placed:
    """The case with other numbers for each seed, in buffers of their own."""
    case = replace(case, seed=seed)
    found = memory.placed(case.problem(), operands(case), kernels)
    found.bound.lanes = lanes
    return found


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits_as_kernel_by_kernel(case: Case, lanes: type[Lane], kernels: Kernels) -> None:
    """One Bound in turns on two sets of arrays; first calls on a stream are launched kernel by kernel, anew."""
    with placed(case, kernels, 5, lanes) as first, placed(case, kernels, 6) as second, memory.stream() as stream:
        expected = [each.run() for each in (first, second)]
        for _ in range(ROUNDS):
            for each, results in zip((first, second), expected, strict=True):
                each.reset()
                first.bound(each.pointers, stream, workspace=each.workspace)
                driver.synchronise(stream)
                assert differing(results, each.read()) == []
        assert type(first.bound._lanes[stream]) is lanes


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_calls_behind_late_work_keep_their_addresses(case: Case, lanes: type[Lane], kernels: Kernels) -> None:
    """Many calls wait on a stream that is busy: each writes to the arrays of its own, and no call waits."""
    sets = [placed(case, kernels, seed, lanes) for seed in range(5, 9)]
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


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_context_and_another_one(case: Case, lanes: type[Lane], kernels: Kernels, gpu: driver.Device) -> None:
    """In a thread without a context, and under one of somebody else's, the stream's device is used."""
    with placed(case, kernels, 5, lanes) as ours, placed(case, kernels, 6) as other, memory.stream() as stream:
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


@pytest.mark.parametrize("lanes", LANES)
def test_several_streams_and_threads(lanes: type[Lane], kernels: Kernels) -> None:
    """Threads with streams and arrays of their own share one Bound."""
    case = CASES["backward"]
    sets = [placed(case, kernels, seed, lanes) for seed in range(5, 8)]
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
        packing = found.bound._packing
        assert packing._maps
        assert not packing._encoded_anew
