"""Streams on the GPU: the current stream by default, operands that die after the call, and captures by others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import torch_ops
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.runtime import binding, driver, lifetimes
from cutlass_py_attn.runtime.arrays import DeviceArray
from cutlass_py_attn.testing import check, device_memory
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from tests.gpu import test_arrays
from tests.gpu.test_arrays import DELAY_ELEMENTS, DELAY_PASSES, Library
from tests.support.refusals import expect_among
from tests.support.threads import in_thread

# Of suite.TORCH_OPS, whose kernels every folder of prebuilt kernels has.
CASE = Case.parse("backward f16_d64_q72_s136_b2_h4_causal seed=3")
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Streams:
    """What a library does with streams. new: creates one. entered: context in which it is the current one."""

    library: Library
    new: Callable[[], Any]
    entered: Callable[[Any], Any]
    empty_like: Callable[[Any], Any]
    address: Callable[[Any], int]


def _torch() -> Streams:
    torch = pytest.importorskip("torch")
    library = test_arrays._library("torch")
    return Streams(library, torch.cuda.Stream, torch.cuda.stream, torch.empty_like, lambda array: array.data_ptr())


def _cupy() -> Streams:
    cupy = pytest.importorskip("cupy")
    library = test_arrays._library("cupy")

    def new() -> Any:
        return cupy.cuda.Stream(non_blocking=True)

    return Streams(library, new, lambda stream: stream, cupy.empty_like, lambda array: array.data.ptr)


@pytest.fixture(params=[_torch, _cupy], ids=["torch", "cupy"])
def streams(request: pytest.FixtureRequest) -> Streams:
    """torch and CuPy."""
    found: Streams = request.param()
    return found


class Busy:
    """Work of some ten milliseconds on the library's current stream."""

    def __init__(self, library: Library) -> None:
        self._array = library.to_device(np.ones(DELAY_ELEMENTS, np.float32))
        self()  # so that no library compiles anything later on
        driver.call("cuCtxSynchronize")

    def __call__(self) -> None:
        for _ in range(DELAY_PASSES):
            self._array *= 1.0001


def is_done(stream: object) -> bool:
    """Returns whether all work on the stream is complete."""
    code = driver.function("cuStreamQuery")(driver.stream_handle(stream))[0]
    assert int(code) in (0, int(driver.bindings().CUresult.CUDA_ERROR_NOT_READY))
    return int(code) == 0


def arrays_and_expected(kernels: Kernels) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the operands of CASE and its results."""
    arrays = CASE.arrays()
    return arrays, check.attend(CASE, arrays, kernels)


@pytest.mark.parametrize("way", ["stream", "int", "operator"])
@pytest.mark.parametrize("protected", [True, False], ids=["protected", "without protection"])
def test_temporary_operands_of_another_stream(
    streams: Streams, way: str, protected: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else gets the memory of operands that died while the launch still waits.

    Without protection the allocator gives it away at once: the test would notice.
    """
    library, side = streams.library, streams.new()
    arrays, expected = arrays_and_expected(kernels)
    on_device = {name: library.to_device(arrays[name]) for name in check.OPERANDS}
    stream = driver.stream_handle(side) if way == "int" else side
    busy = Busy(library)
    if not protected:
        monkeypatch.setattr(lifetimes, "keep", lambda *_: None)

    def launched() -> tuple[Any, list[int]]:
        query, key, value = (array + 0 for array in on_device.values())  # temporaries of the current stream
        addresses = [streams.address(array) for array in (query, key, value)]
        if way == "operator":
            output, *_ = torch_ops.efficient_attention_forward(
                query, key, value, None, None, None, None, None, 0.0, 1, stream=stream, kernels=kernels
            )
        else:
            output, _ = attention_forward(query, key, value, mask=CASE.spec.mask, stream=stream, kernels=kernels)
        return output, addresses

    def poisoned() -> list[Any]:
        others = [streams.empty_like(on_device[name]) for name in (*check.OPERANDS, *check.OPERANDS)]
        for other in others:
            other[...] = float("nan")
        return others

    launched()  # binds the kernels; after this nothing is compiled
    poisoned()
    driver.call("cuCtxSynchronize")
    lifetimes.release()
    given_away = 0
    for _ in range(ROUNDS):
        with streams.entered(side):
            busy()
        output, addresses = launched()
        others = poisoned()
        assert not is_done(side), "the launch must still wait"
        given_away += len(set(addresses) & {streams.address(other) for other in others})
        driver.call("cuCtxSynchronize")
        if protected:
            assert same_bits(library.to_host(output), expected["output"])
        del others, output
    lifetimes.release()
    assert lifetimes.kept == []
    assert (given_away == 0) is protected


def test_a_result_array_that_the_caller_drops(streams: Streams, kernels: Kernels) -> None:
    """The kernels write to `out` after its last reference has gone."""
    library, side = streams.library, streams.new()
    arrays, _ = arrays_and_expected(kernels)
    query, key, value = (library.to_device(arrays[name]) for name in check.OPERANDS)
    busy = Busy(library)
    options: dict[str, Any] = {"mask": CASE.spec.mask, "stream": side, "kernels": kernels}
    attention_forward(query, key, value, out=streams.empty_like(query), **options)
    driver.call("cuCtxSynchronize")
    with streams.entered(side):
        busy()
    target = streams.empty_like(query)
    address = streams.address(target)
    attention_forward(query, key, value, out=target, **options)
    del target
    others = [streams.empty_like(query) for _ in range(3)]
    assert not is_done(side), "the launch must still wait"
    assert address not in [streams.address(other) for other in others]
    driver.call("cuCtxSynchronize")


def test_without_a_stream_the_current_one_is_used(streams: Streams, kernels: Kernels) -> None:
    """Forward and backward are behind the work of the current stream, and nothing is on the default stream."""
    library, side = streams.library, streams.new()
    arrays, expected = arrays_and_expected(kernels)
    on_device = {name: library.to_device(array) for name, array in arrays.items()}
    options: dict[str, Any] = {"mask": CASE.spec.mask, "kernels": kernels}
    late = streams.empty_like(on_device["query"])
    busy = Busy(library)

    def attend() -> dict[str, Any]:
        late[...] = on_device["query"]
        rest = late, on_device["key"], on_device["value"]
        output, logsumexp = attention_forward(*rest, **options)
        gradients = attention_backward(
            on_device["grad_output"], *rest, output, logsumexp, num_splits_key=CASE.spec.num_splits_key, **options
        )
        return {"output": output, "grad_key": gradients.key, "grad_value": gradients.value}

    for _ in range(3):  # validated; cached; by a launcher
        with streams.entered(side):
            attend()
        driver.call("cuCtxSynchronize")
        late[...] = 0
        driver.call("cuCtxSynchronize")
        with streams.entered(side):
            busy()
            found = attend()
        assert is_done(0), "something was launched on the default stream"
        assert not is_done(side), "the stream was waited for"
        driver.synchronise(driver.stream_handle(side))
        for name, array in found.items():
            assert same_bits(library.to_host(array), expected[name]), name


def test_torch_graph_without_a_stream(kernels: Kernels) -> None:
    """torch makes the captured stream current, so that the call becomes part of the graph."""
    torch = pytest.importorskip("torch")
    library = test_arrays._library("torch")
    arrays, expected = arrays_and_expected(kernels)
    query, key, value = (library.to_device(arrays[name]) for name in check.OPERANDS)
    options: dict[str, Any] = {"mask": CASE.spec.mask, "kernels": kernels}
    with torch.cuda.stream(torch.cuda.Stream()):
        attention_forward(query, key, value, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = attention_forward(query, key, value, **options)
    for _ in range(2):
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(library.to_host(output), expected["output"])


MODES = pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
KINDS = pytest.mark.parametrize("flags", ["NON_BLOCKING", "DEFAULT"])


@contextmanager
def captured(mode: str, flags: str) -> Iterator[int]:
    """A stream that is captured; its graph, a memset, must be valid and run."""
    cuda = driver.bindings()
    stream = int(driver.call("cuStreamCreate", int(getattr(cuda.CUstream_flags, f"CU_STREAM_{flags}"))))
    memory = driver.allocate_now(4096, "the capture's memory")
    gc.collect()  # what earlier tests left of other libraries: freeing it would end the capture
    driver.call("cuCtxSynchronize")
    driver.call("cuStreamBeginCapture", stream, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}"))
    try:
        yield stream
        driver.memset_zero(memory, 4096, stream)
    finally:
        graph = driver.call("cuStreamEndCapture", stream)
    launchable = driver.call("cuGraphInstantiate", graph, 0)
    driver.call("cuGraphLaunch", launchable, stream)
    driver.synchronise(stream)
    driver.call("cuGraphExecDestroy", launchable)
    driver.call("cuGraphDestroy", graph)
    driver.free_now(memory)
    driver.destroy_stream(stream)


@MODES
@KINDS
@pytest.mark.parametrize("run", [lambda work: work(), in_thread], ids=["this thread", "another thread"])
def test_a_device_array_dies_in_a_capture(mode: str, flags: str, run: Callable[[Callable[[], None]], None]) -> None:
    arrays = [DeviceArray((1 << 20,), "float32", 0, 0) for _ in range(3)]

    def drop() -> None:
        arrays.pop()
        gc.collect()

    with captured(mode, flags):
        run(drop)
        run(drop)
    drop()


@MODES
@KINDS
def test_calls_beside_a_capture(mode: str, flags: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded, a launcher is created and dies, and results are allocated, on another stream."""
    monkeypatch.setattr(binding, "_libraries", {})
    arrays = CASE.arrays()
    with device_memory.stream() as stream:
        operands = [_device_array(arrays[name], stream) for name in check.OPERANDS]
        with captured(mode, flags):
            for _ in range(3):
                attention_forward(*operands, mask=CASE.spec.mask, kernels=kernels, stream=stream)
            bound = binding.bind_problem(CASE.problem(), kernels)
            del bound
            gc.collect()


def _device_array(array: Array, stream: int) -> DeviceArray:
    made = DeviceArray(array.shape, array.dtype.name, 0, stream)
    driver.copy_to_device(made.pointer, array.ctypes.data, array.nbytes, stream)
    driver.synchronise(stream)
    return made


@MODES
@KINDS
def test_numpy_arrays_are_refused_in_a_capture(mode: str, flags: str, kernels: Kernels) -> None:
    arrays = CASE.arrays()
    operands = [arrays[name] for name in check.OPERANDS]
    with captured(mode, flags) as stream, pytest.raises(NotSupported) as caught:
        attention_forward(*operands, mask=CASE.spec.mask, kernels=kernels, stream=stream)
    expect_among(caught.value.refusals, "stream: must not be captured")
