"""Tests of launchers: which plans use a graph, and that every launch gets the parameters of its call."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import threading

import numpy as np
import pytest

from cutlass_py_attn.errors import DriverError, NotSupported
from cutlass_py_attn.plan.plan import TensorMap
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.runtime import driver, tensor_maps
from cutlass_py_attn.runtime.binding import Bound, bind
from cutlass_py_attn.runtime.plan_launchers import GraphLauncher, Launcher, StreamLauncher
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import SHAPE, addresses, aligned, artifact, decode, plan_of

STREAM = 0x10
LAUNCHERS: list[type[Launcher]] = [StreamLauncher, GraphLauncher]


def bound_of(direction: str, arch: str = "sm_90", launcher_type: type[Launcher] = GraphLauncher) -> Bound:
    problem, plan = plan_of(direction, arch=arch, shape=dataclasses.replace(SHAPE, head_dim_value=64))
    bound = bind(artifact(plan.build), plan, problem)
    bound.launcher_type = launcher_type
    return bound


def warm(
    log: FakeDriver, direction: str = "forward", arch: str = "sm_90", launcher_type: type[Launcher] = GraphLauncher
) -> tuple[Bound, dict[str, int]]:
    """Returns a Bound with a launcher on STREAM, and the addresses in its parameters; clears the log."""
    bound = bound_of(direction, arch, launcher_type)
    given = addresses(bound.tensor_names)
    for _ in range(2):
        bound(given, STREAM)
    log.clear()
    return bound, given


def launched(log: FakeDriver, bound: Bound, name: str) -> list[float]:
    """Returns the value of this struct field in each logged launch."""
    return [decode(bound.plan.build, call.parameters)[name] for call in log.of("cuLaunchKernelEx")]


def test_several_kernels_are_a_graph(driver_log: FakeDriver) -> None:
    for direction, launcher_type in (("forward", StreamLauncher), ("backward", GraphLauncher)):
        problem, plan = plan_of(direction, arch="sm_90a")
        assert bind(artifact(plan.build), plan, problem).launcher_type is launcher_type


@pytest.mark.parametrize("space", [False, True], ids=["the same workspace", "others"])
def test_stream_launcher_launches_as_the_first_call_did(driver_log: FakeDriver, space: bool) -> None:
    bound, given = warm(driver_log, "backward", "sm_90", StreamLauncher)
    memory = [aligned((bound.workspace_bytes,), np.uint8) for _ in range(2)]
    spaces = [array.ctypes.data for array in memory]
    found = []
    for number in range(4):
        driver_log.clear()
        bound(given, STREAM, workspace=spaces[number % 2 * space])
        assert driver_log.names == ["cuMemsetD8Async", *["cuLaunchKernelEx"] * 3]
        (cleared,) = driver_log.of("cuMemsetD8Async")
        assert cleared.numbers[:4] == (spaces[number % 2 * space], 0, bound.plan.workspace.zero_bytes, STREAM)
        found.append([(c.text, c.grid, c.parameters, c.stream) for c in driver_log.of("cuLaunchKernelEx")])
    assert (found[0] == found[1]) is not space
    assert found[0] == found[2]


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_the_memset_clears_the_workspace_of_its_call(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    """Also if the operands have moved, or have not, since the last call."""
    bound, given = warm(driver_log, "backward", "sm_90", launcher_type)
    memory = [aligned((bound.workspace_bytes,), np.uint8) for _ in range(2)]
    moved = {**given, "query": 0x9000}
    for operands, number in ((given, 0), (given, 1), (moved, 0), (moved, 0), (given, 1)):
        for array in memory:
            array[...] = 0xCD
        driver_log.clear()
        bound(operands, STREAM, workspace=memory[number].ctypes.data)
        (cleared,) = driver_log.of("cuMemsetD8Async")
        assert cleared.numbers[0] == memory[number].ctypes.data
        assert len(driver_log.of("cuGraphLaunch")) == (launcher_type is GraphLauncher)
        zeros = bound.plan.workspace.zero_bytes
        assert not memory[number][:zeros].any()
        assert (memory[number][zeros:] == 0xCD).all()
        assert (memory[1 - number] == 0xCD).all(), "the workspace of another call"


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_dependent_launches_may_start_early(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    """The first kernel of a call waits for the stream; those behind it wait for each other themselves."""
    bound, given = warm(driver_log, "backward", "sm_90a", launcher_type)
    assert [launch.is_dependent for launch in bound.plan.launches] == [False, True, True]
    bound(given, STREAM)
    assert [call.is_dependent for call in driver_log.of("cuLaunchKernelEx")] == [False, True, True]
    assert len(driver_log.of("cuGraphLaunch")) == (launcher_type is GraphLauncher)


def test_a_graph_has_programmatic_edges_between_dependent_launches(driver_log: FakeDriver) -> None:
    bound = bound_of("backward", "sm_90a")
    for _ in range(2):
        bound(addresses(bound.tensor_names), STREAM)
    edges = [call.numbers[:4] for call in driver_log.of("cuGraphAddDependencies")]
    assert edges == [(1, 1, 1, 1)] * 2, "(count, from the node before, programmatic port, programmatic type)"
    assert [call.numbers[0] for call in driver_log.of("cuGraphAddKernelNode")] == [0] * 3


def test_portable_backwards_wait_for_each_other_at_the_launch(driver_log: FakeDriver) -> None:
    """The kernels of the sm80 family wait for nothing themselves."""
    bound, given = warm(driver_log, "backward", "sm_90", GraphLauncher)
    bound(given, STREAM)
    assert not any(call.is_dependent for call in driver_log.of("cuLaunchKernelEx"))
    assert driver_log.of("cuGraphAddDependencies") == []


def test_a_bound_keeps_the_launchers_of_few_streams(driver_log: FakeDriver) -> None:
    bound = bound_of("forward")
    given = addresses(bound.tensor_names)
    for stream in range(0x10, 0x30):
        for _ in range(3):
            bound(given, stream)
    assert [call.stream for call in driver_log.of("cuLaunchKernelEx")] == [s for s in range(0x10, 0x30) for _ in "abc"]
    assert len(driver_log.of("cuGraphInstantiateWithFlags")) == 32
    assert len(driver_log.of("cuGraphExecDestroy")) == 16
    driver_log.clear()
    bound(given, 0x2F)
    assert driver_log.names == ["cuGraphLaunch", "cuLaunchKernelEx"]
    driver_log.clear()
    bound(given, 0x10)
    assert driver_log.of("cuGraphLaunch") == [], "a dropped stream starts with a first call"


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_streams_do_not_share_addresses(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    bound, first = warm(driver_log, launcher_type=launcher_type)
    second = {name: address + 0x100000 for name, address in first.items()}
    for _ in range(3):
        bound(second, STREAM + 1)
    driver_log.clear()
    bound(first, STREAM)
    bound(second, STREAM + 1)
    assert launched(driver_log, bound, "key") == [first["key"], second["key"]]
    assert driver_log.of("cuGraphExecKernelNodeSetParams") == [], "each launcher keeps its parameters"


def test_a_captured_stream_records_the_kernels(driver_log: FakeDriver) -> None:
    bound, given = warm(driver_log)
    mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    for stream in (STREAM, STREAM + 1):
        driver_log.clear()
        driver.call("cuStreamBeginCapture", stream, mode)
        for _ in range(3):
            bound(given, stream)
        driver.call("cuStreamEndCapture", stream)
        assert driver_log.names == ["cuStreamBeginCapture", *["cuLaunchKernelEx"] * 3, "cuStreamEndCapture"]


@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuGraphExecKernelNodeSetParams"])
def test_a_failed_graph_raises_and_is_created_again(driver_log: FakeDriver, name: str) -> None:
    bound, given = warm(driver_log)
    moved = {**given, "query": 0x9000}
    driver_log.fail(name, 400)
    with pytest.raises(DriverError, match=f"{name}.*for {bound.plan.symbol}: CUDA_ERROR_INVALID_HANDLE"):
        bound(moved, STREAM)
    driver_log.clear()
    for _ in range(3):
        bound(moved, STREAM)
    assert launched(driver_log, bound, "query") == [0x9000] * 3
    assert len(driver_log.of("cuGraphInstantiateWithFlags")) == 1
    assert len(driver_log.of("cuGraphLaunch")) == 3


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("launcher_type", LAUNCHERS)
@pytest.mark.parametrize("context", [0, 0xC1], ids=["none", "another"])
def test_the_device_s_context_is_used(
    driver_log: FakeDriver, direction: str, launcher_type: type[Launcher], context: int
) -> None:
    """Whatever context is current: the addresses may change, the launcher stays, and a graph stays a graph."""
    bound, given = warm(driver_log, direction, "sm_90a", launcher_type)
    (launcher,) = bound._launchers.values()
    memory = aligned((bound.workspace_bytes,), np.uint8)
    space = memory.ctypes.data if bound.workspace_bytes else None
    for moved in (given, {**given, "query": 0x9000}, given):
        driver_log.clear()
        driver.call("cuCtxSetCurrent", context)
        bound(moved, STREAM, workspace=space)
        launches = driver_log.of("cuLaunchKernelEx")
        assert len(driver_log.of("cuGraphLaunch")) == (launcher_type is GraphLauncher)
        assert int(driver.call("cuCtxGetCurrent")) == context
        is_foreign = launcher_type is StreamLauncher and context  # a kernel knows its context by itself
        assert {call.numbers[9] for call in launches} == {context if is_foreign else 0xC0}
        assert set(launched(driver_log, bound, "query")) == {moved["query"]}
        assert len(launches) == len(bound.plan.launches)
    assert list(bound._launchers.values()) == [launcher]
    driver.call("cuCtxSetCurrent", 0xC0)
    driver_log.clear()
    bound(given, STREAM, workspace=space)
    assert len(driver_log.of("cuGraphLaunch")) == (launcher_type is GraphLauncher)


@pytest.mark.parametrize("context", [0, 0xC1], ids=["none", "another"])
def test_a_graph_is_destroyed_in_its_context(driver_log: FakeDriver, context: int) -> None:
    bound, _ = warm(driver_log)
    driver.call("cuCtxSetCurrent", context)
    del bound
    gc.collect()
    assert len(driver_log.of("cuGraphExecDestroy")) == len(driver_log.of("cuGraphDestroy")) == 1
    assert int(driver.call("cuCtxGetCurrent")) == context


def test_default_streams_need_the_device_s_context(driver_log: FakeDriver) -> None:
    bound = bound_of("forward")
    given = addresses(bound.tensor_names)
    driver.call("cuCtxSetCurrent", 0xC0)
    for _ in range(2):
        bound(given)
    driver_log.clear()
    driver.call("cuCtxSetCurrent", 0xC1)
    bound(given)
    assert len(driver_log.of("cuGraphLaunch")) == 1
    assert [call.numbers[9] for call in driver_log.of("cuLaunchKernelEx")] == [0xC0]
    driver.call("cuCtxSetCurrent", 0xC0)
    bound(given)
    assert len(driver_log.of("cuGraphLaunch")) == 2


@pytest.mark.parametrize("stream", [0, 1, 2, 3], ids=["default", "legacy", "per thread", "created"])
@pytest.mark.parametrize("context", [0, 0xC1], ids=["none", "another"])
def test_stream_launchers_change_the_context_for_default_streams_alone(
    driver_log: FakeDriver, stream: int, context: int
) -> None:
    """A default stream is that of the current context; a created stream belongs to its own."""
    bound = bound_of("forward", launcher_type=StreamLauncher)
    given = addresses(bound.tensor_names)
    for _ in range(2):
        bound(given, stream)
    driver.call("cuCtxSetCurrent", context)
    driver_log.clear()
    bound(given, stream)
    is_created = stream > 2
    (launch,) = driver_log.of("cuLaunchKernelEx")
    assert launch.numbers[9] == (context if is_created and context else 0xC0)
    assert len(driver_log.of("cuCtxSetCurrent")) == (0 if is_created and context else 2)
    driver.call("cuCtxSetCurrent", 0xC0)
    driver_log.clear()
    bound(given, stream)
    assert driver_log.of("cuCtxSetCurrent") == []


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_a_launcher_refuses_invalid_addresses(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    bound, given = warm(driver_log, "backward", "sm_90a", launcher_type)
    for wrong in ({"query": 0}, {"key": 0x1008}, {"value": -16}, {"output": 1 << 64}):
        with pytest.raises(NotSupported, match=f"{next(iter(wrong))} = .*: must be a device address"):
            bound({**given, **wrong}, STREAM)
    for space in (0, 0x11, -16):
        with pytest.raises(NotSupported, match=r"workspace = .*: must be a device address"):
            bound(given, STREAM, workspace=space)
    assert driver_log.of("cuLaunchKernelEx") == []
    bound(given, STREAM)
    assert set(launched(driver_log, bound, "query")) == {given["query"]}


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
@pytest.mark.parametrize("wrong", [{"query": 0}, {"key": 0x1008}])
def test_a_launcher_refuses_invalid_addresses_beside_another_workspace(
    driver_log: FakeDriver, launcher_type: type[Launcher], wrong: dict[str, int]
) -> None:
    bound, given = warm(driver_log, "backward", "sm_90a", launcher_type)
    with pytest.raises(NotSupported, match=f"{next(iter(wrong))} = .*: must be a device address"):
        bound({**given, **wrong}, STREAM, workspace=0xABC00)
    assert driver_log.of("cuLaunchKernelEx") == driver_log.of("cuGraphLaunch") == []


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_logsumexp_needs_four_byte_alignment(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    bound, given = warm(driver_log, launcher_type=launcher_type)
    bound({**given, "logsumexp": 0x9004}, STREAM)
    assert launched(driver_log, bound, "logsumexp") == [0x9004]
    with pytest.raises(NotSupported, match="logsumexp = 0x9002: must be a device address, 4-byte aligned"):
        bound({**given, "logsumexp": 0x9002}, STREAM)


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_numpy_integers_as_addresses(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    bound, given = warm(driver_log, launcher_type=launcher_type)
    bound({**given, "value": np.uint64(0x9000)}, STREAM)
    assert launched(driver_log, bound, "value") == [0x9000]
    with pytest.raises(NotSupported, match=r"value = 4096.0 \(float\): must be a device address"):
        bound({**given, "value": 4096.0}, STREAM)


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_threads_do_not_share_addresses(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    """Four threads on two streams: every launch has the addresses of one call, and no launch is lost."""
    bound = bound_of("forward", launcher_type=launcher_type)
    base = addresses(bound.tensor_names)
    rounds, threads = 50, 4

    def work(number: int) -> None:
        for i in range(rounds):
            shift = 0x100000 * (number * rounds + i)
            bound({name: address + shift for name, address in base.items()}, STREAM + number % 2)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    structs = [decode(bound.plan.build, call.parameters) for call in driver_log.of("cuLaunchKernelEx")]
    shifts = [{struct[name] - address for name, address in base.items()} for struct in structs]
    assert all(len(shift) == 1 for shift in shifts)
    assert {shift.pop() for shift in shifts} == {0x100000 * number for number in range(threads * rounds)}
    assert len(structs) == threads * rounds


SPEC = TensorMap("a", (128, 64), (128,), (64, 32), 128)


def test_a_map_without_a_plain_address_is_encoded_each_time(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tensor_maps.encode

    def hidden(slot: int, address: int, spec: TensorMap, dtype: str) -> None:
        encode(slot, address, spec, dtype)
        ctypes.c_uint64.from_address(slot + 64).value = address >> 8

    monkeypatch.setattr(tensor_maps, "encode", hidden)
    bound, given = warm(driver_log, "forward", "sm_90a")
    bound({**given, "key": 0x9000}, STREAM)
    assert len(driver_log.of("cuTensorMapEncodeTiled")) == 3
    words = np.frombuffer(driver_log.of("cuLaunchKernelEx")[-1].parameters, "<u8")
    assert [words[16], words[24]] == [0x9000, 0x90]


@pytest.mark.parametrize("failing", [False, True])
def test_starts_with_address(driver_log: FakeDriver, failing: bool) -> None:
    memory = (ctypes.c_char * 256)()
    slot = -(-ctypes.addressof(memory) // 128) * 128
    tensor_maps.encode(slot, 0x1000, SPEC, "bfloat16")
    if failing:
        driver_log.fail("cuTensorMapEncodeTiled", 1)
    assert tensor_maps.starts_with_address(slot, 0x1000, SPEC, "bfloat16") is not failing
    ctypes.c_uint64.from_address(slot).value = 0x2000
    assert not tensor_maps.starts_with_address(slot, 0x1000, SPEC, "float16") or failing


@pytest.mark.parametrize("launcher_type", LAUNCHERS)
def test_launches_of_a_split_grid_have_their_own_offsets(driver_log: FakeDriver, launcher_type: type[Launcher]) -> None:
    """A grid of more than 65535 heads is split over several launches, by both launchers."""
    shape = Shape(1, 16, 16, 70000, 64, 64)
    problem, plan = plan_of("forward", shape=shape)
    bound = bind(artifact(plan.build), plan, problem)
    bound.launcher_type = launcher_type
    given = addresses(bound.tensor_names)
    found = []
    for _ in range(3):
        driver_log.clear()
        bound(given, STREAM)
        structs = [decode(plan.build, call.parameters) for call in driver_log.of("cuLaunchKernelEx")]
        found.append([(struct["first_head"], struct["first_batch"]) for struct in structs])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(plan.launches) > 1
