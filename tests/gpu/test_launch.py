"""Launch on the GPU: graphs, streams, and what a call says that cannot be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.errors import DriverError, NotSupported, Stale
from cutlass_py_attn.plan import planner
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import bind, bind_problem
from cutlass_py_attn.testing import check, device_memory
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels
from cutlass_py_attn.testing.device_memory import GuardedLaunch
from tests.gpu.test_laws import differing, operands_of

CASE = Case.parse("backward bf16_d128_q515_s640_b2_h3_causal_splits1 seed=5")
REPLAYS = 20
ELF_FLAGS = 48  # offset of e_flags; its second byte is the number of the target


def guarded_case(kernels: Kernels) -> GuardedLaunch:
    """CASE in guarded buffers."""
    return device_memory.guarded_launch(CASE.problem(), operands_of(CASE, CASE.arrays()), kernels)


def captured(launch: Callable[[int], None], stream: int) -> Any:
    """An executable graph of what `launch` puts on the stream."""
    cuda = driver.bindings()
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.call("cuStreamBeginCapture", stream, mode)
    launch(stream)
    graph = driver.call("cuStreamEndCapture", stream)
    return driver.call("cuGraphInstantiate", graph, 0)


@pytest.mark.parametrize("workspace", ["own", "pool"])
def test_graph_replays(workspace: str, kernels: Kernels) -> None:
    """A captured backward gives the direct launch's bits, every time, from fresh NaN."""
    with guarded_case(kernels) as guarded, device_memory.stream() as stream:
        expected = guarded.run()
        launch = guarded.launch if workspace == "own" else _from_pool(guarded)
        graph = captured(launch, stream)
        for _ in range(REPLAYS):
            guarded.reset()
            driver.call("cuGraphLaunch", graph, stream)
            driver.synchronise(stream)
            assert differing(expected, guarded.read()) == []
        driver.call("cuGraphExecDestroy", graph)


def _from_pool(guarded: GuardedLaunch) -> Callable[[int], None]:
    return lambda stream: guarded.bound(guarded.pointers, stream)


def test_capture_launches_nothing(kernels: Kernels) -> None:
    """Until the graph is launched the outputs stay NaN: a replay that did nothing would be seen."""
    with guarded_case(kernels) as guarded, device_memory.stream() as stream:
        guarded.reset()
        graph = captured(guarded.launch, stream)
        driver.call("cuCtxSynchronize")
        assert all((array != array).all() for array in guarded.read().values())
        driver.call("cuGraphExecDestroy", graph)


def test_two_streams_at_once(kernels: Kernels) -> None:
    """One Bound on two streams in turns, with buffers of its own for each, workspaces from the pool."""
    operands = [operands_of(case, case.arrays()) for case in (CASE, CASE.replace(seed=6))]
    guarded = [device_memory.guarded_launch(CASE.problem(), given, kernels) for given in operands]
    with guarded[0], guarded[1], device_memory.stream() as first, device_memory.stream() as second:
        expected = [each.run() for each in guarded]
        for each in guarded:
            each.reset()
        for _ in range(REPLAYS):
            for each, stream in zip(guarded, (first, second), strict=True):
                guarded[0].bound(each.pointers, stream)
        driver.call("cuCtxSynchronize")
        for each, results in zip(guarded, expected, strict=True):
            assert differing(results, each.read()) == []


class _Pointer:
    """A stream as CuPy shows it."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class _Protocol:
    """A stream as cuda.core shows it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@pytest.mark.parametrize("made", [int, _Pointer, _Protocol], ids=["int", "ptr", "__cuda_stream__"])
def test_streams_as_numbers_and_objects(made: Callable[[int], object], kernels: Kernels) -> None:
    """Waiting for the named stream alone is enough to read the results."""
    arrays = CASE.arrays()
    with guarded_case(kernels) as guarded, device_memory.stream() as stream:
        expected = guarded.run()
        guarded.reset()
        guarded.bound(guarded.pointers, made(stream), workspace=guarded.workspace)
        driver.synchronise(stream)
        assert differing(expected, guarded.read()) == []
        found = attention_forward(*_operands(arrays), mask=CASE.spec.mask, kernels=kernels, stream=made(stream))
    assert check.same_bits(found[0], attention_forward(*_operands(arrays), mask=CASE.spec.mask, kernels=kernels)[0])


def _operands(arrays: dict[str, Array]) -> list[Array]:
    return [arrays[name] for name in check.OPERANDS]


def test_something_else_than_a_stream(kernels: Kernels) -> None:
    arrays = CASE.arrays()
    with pytest.raises(NotSupported, match="stream = 'main'"):
        attention_forward(*_operands(arrays), mask=CASE.spec.mask, kernels=kernels, stream="main")


def test_plan_for_another_architecture(arch: str, kernels: Kernels) -> None:
    problem = CASE.problem()
    plan = planner.plan(problem, arch)
    made = kernels(plan.build)
    other = "sm_120" if arch != "sm_120" else "sm_80"
    plan = replace(plan, build=replace(plan.build, arch=other))  # the tile, and so the symbol, stays
    with pytest.raises(Stale, match=f"is built for {other}"):
        bind(replace(made, build=plan.build), plan, problem)


def test_cubin_of_another_architecture(arch: str, kernels: Kernels) -> None:
    """The driver's own sentence, from whichever call looks at the machine code first."""
    problem = CASE.problem()
    plan = planner.plan(problem, arch)
    made = kernels(plan.build)
    cubin = bytearray(made.cubin)
    cubin[ELF_FLAGS : ELF_FLAGS + 4] = bytes(80 if byte in (90, 100, 120) else byte for byte in cubin[48:52])
    assert bytes(cubin) != made.cubin
    with pytest.raises(DriverError, match=r"cuLibrary\w+\(.*CUDA_ERROR_NO_BINARY_FOR_GPU"):
        bind(replace(made, cubin=bytes(cubin)), plan, problem)


def test_out_of_memory_says_how_much(kernels: Kernels) -> None:
    """A workspace larger than any GPU is refused before anything is launched, and the GPU stays usable."""
    huge = CASE.replace(batch=64, num_heads=64, num_queries=2**20, num_keys=128, num_splits_key=None)
    bound = bind_problem(huge.problem(), kernels)
    with pytest.raises(DriverError, match=f"the workspace of {bound.plan.symbol} \\({bound.workspace_bytes} bytes\\)"):
        bound(dict.fromkeys(bound.tensor_names, 0x100))
    with guarded_case(kernels) as guarded:
        assert guarded.run()


def test_closed_stream(kernels: Kernels) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    stream.close()
    with guarded_case(kernels) as guarded, pytest.raises(NotSupported, match=": must be an open stream"):
        guarded.launch(stream)
