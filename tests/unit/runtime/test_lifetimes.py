"""Tests of lifetimes: operands live until a launch on another stream than their library's has read them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.runtime import driver, lifetimes
from cutlass_py_attn.runtime.arrays import DeviceArray
from cutlass_py_attn.score_terms.dropout import Dropout
from cutlass_py_attn.torch_ops.efficient import efficient_attention_forward
from tests.support.fake_driver import FakeDriver
from tests.support.fake_libraries import CUPY_STREAM, TORCH_STREAM, ExternalStream, Stream, Tensor, ndarray
from tests.support.fakes import InterfaceArray, aligned, artifact

SHAPE = (2, 5, 3, 8)
SIDE = 0x99
OPTIONS: dict[str, Any] = {"kernels": artifact}


def interface_array(shape: tuple[int, ...], stream: int | None = None, module: str = "cuda.core") -> Any:
    """Returns an array with the interface, of a class in this module."""
    kind = type("Buffer", (InterfaceArray,), {"__module__": module})
    return kind(aligned(shape, "f4"), stream)


def launched(make: Callable[[tuple[int, ...]], Any], **options: Any) -> list[weakref.ref[Any]]:
    """Launches a forward, drops its operands and results, and returns references to the operands."""
    operands = [make(SHAPE) for _ in range(3)]
    attention_forward(*operands, **OPTIONS, **options)
    return [weakref.ref(array) for array in operands]


def alive(references: list[weakref.ref[Any]]) -> bool:
    """Returns whether all the arrays live; fails if only some do."""
    gc.collect()
    found = {reference() is not None for reference in references}
    assert len(found) == 1
    return found.pop()


# Arrays whose allocator must wait for a launch on SIDE, and cannot be told.
KEPT: dict[str, tuple[Callable[[tuple[int, ...]], Any], Any]] = {
    "CuPy": (ndarray, SIDE),
    "torch, int": (Tensor, SIDE),
    "torch, stream of another library": (Tensor, ExternalStream(SIDE)),
    "numba": (lambda shape: interface_array(shape, module="numba.cuda"), SIDE),
    "numba, array bound to a stream": (lambda shape: interface_array(shape, 0x77, "numba.cuda"), None),
    "unknown library": (interface_array, SIDE),
    "unknown library, default stream": (interface_array, None),
    "unknown library, other stream": (lambda shape: interface_array(shape, 0x77), None),
}


@pytest.mark.parametrize(("make", "stream"), KEPT.values(), ids=KEPT)
def test_operands_are_kept_until_the_launch_is_complete(log: FakeDriver, make: Any, stream: Any) -> None:
    log.busy(True)
    references = launched(make, stream=stream)
    assert alive(references)
    record = log.of("cuEventRecord")[-1]
    assert record.numbers[1] == (0 if stream is None else SIDE)
    own_calls = [name for name in log.names if name in ("cuLaunchKernelEx", "cuEventRecord")]
    assert own_calls[-2:] == ["cuLaunchKernelEx", "cuEventRecord"]
    later = launched(make, stream=stream)
    assert alive(references), "the first launch is still running"
    log.busy(False)
    lifetimes.release()
    assert not alive(references)
    assert not alive(later)
    assert len(log.of("cuEventDestroy")) == len(log.of("cuEventCreate"))


# Arrays of which nothing has to be kept: their memory is reused in the order of the launch's stream, or after it.
FREE: dict[str, tuple[Callable[[tuple[int, ...]], Any], Any]] = {
    "torch": (Tensor, None),
    "torch, its stream": (Tensor, TORCH_STREAM),
    "CuPy": (ndarray, None),
    "CuPy, its stream": (ndarray, CUPY_STREAM),
    "numba": (lambda shape: interface_array(shape, module="numba.cuda"), None),
    "numba, legacy stream": (lambda shape: interface_array(shape, module="numba.cuda"), 1),
    "numba, bound stream": (lambda shape: interface_array(shape, SIDE, "numba.cuda"), SIDE),
    "unknown library, its stream": (lambda shape: interface_array(shape, SIDE), SIDE),
    "results of this package": (lambda shape: DeviceArray(shape, "float32", 0, 0x77), SIDE),
    "NumPy": (lambda shape: aligned(shape, "f4"), SIDE),
}


@pytest.mark.parametrize(("make", "stream"), FREE.values(), ids=FREE)
def test_other_operands_are_not_kept(log: FakeDriver, make: Any, stream: Any) -> None:
    log.busy(True)
    assert not alive(launched(make, stream=stream))
    assert lifetimes.kept == []


@pytest.mark.parametrize("same", [False, True], ids=["another stream", "the current stream"])
def test_torch_s_allocator_is_told_of_every_operand(log: FakeDriver, same: bool) -> None:
    """Of the caller's arrays for results too, which the kernels write."""
    stream = Stream(TORCH_STREAM if same else SIDE)
    bounds = [Tensor((3,), "int32") for _ in range(2)]
    operands = [Tensor((1, 5, 3, 8)) for _ in range(5)]
    logsumexp, bias, target = Tensor((2, 3, 32)), Tensor((1, 3, 1, 1)), Tensor((1, 5, 3, 8))
    seeds = [Tensor((1,), "int64") for _ in range(2)]
    found = attention_backward(
        *operands,
        logsumexp,
        **OPTIONS,
        stream=stream,
        bias=bias,
        dropout=Dropout(0.5, *seeds),
        sequences=VariableLength(*bounds, 5, 5),
        out=Gradients(query=target),
    )
    given = [*bounds, *operands, logsumexp, bias, target, *seeds]
    assert [array.recorded for array in given] == [[] if same else [SIDE]] * len(given)
    assert found.key.recorded == [], "allocated on the launch's stream"
    assert lifetimes.kept == []


def test_operands_of_several_libraries(log: FakeDriver) -> None:
    """Each is protected by what its own library has."""
    log.busy(True)
    query, key, value = Tensor(SHAPE), ndarray(SHAPE), DeviceArray(SHAPE, "float32", 0, 0)
    attention_forward(query, key, value, **OPTIONS, stream=Stream(SIDE))
    assert query.recorded == [SIDE]
    (entry,) = lifetimes.kept
    assert entry.operands == (key,)


def test_operands_of_a_failed_call_are_kept(log: FakeDriver) -> None:
    """Another kernel of the call, or a memset, may be running."""
    log.busy(True)
    log.fail("cuLaunchKernelEx", 701)
    query = ndarray(SHAPE)
    reference = weakref.ref(query)
    with pytest.raises(DriverError, match="cuLaunchKernelEx"):
        attention_forward(query, query, query, **OPTIONS, stream=SIDE)
    del query
    assert alive([reference])


def test_the_first_error_is_the_one_to_report(log: FakeDriver) -> None:
    log.fail("cuEventRecord", 700)  # the wait for CuPy's stream, before the launch
    with pytest.raises(DriverError, match="cuEventRecord"):
        launched(ndarray, stream=SIDE)
    assert len(log.of("cuEventDestroy")) == len(log.of("cuEventCreate"))


def test_an_event_that_fails_keeps_nothing(log: FakeDriver) -> None:
    """After a fault of the device no event is ever complete, and other calls report the fault."""
    log.busy(True)
    references = launched(ndarray, stream=SIDE)
    log.fail("cuEventQuery", 700)
    lifetimes.release()
    assert not alive(references)


@pytest.mark.parametrize("make", [Tensor, ndarray], ids=["torch", "cupy"])
def test_later_calls_release_the_operands(log: FakeDriver, make: Any) -> None:
    """A validated call and a call from the cache alike."""
    for _ in range(2):
        log.busy(True)
        references = launched(make, stream=SIDE)
        assert alive(references)
        log.busy(False)
        launched(make)
        assert not alive(references)


@pytest.mark.parametrize("make", [Tensor, ndarray], ids=["torch", "cupy"])
def test_a_captured_stream_keeps_nothing(log: FakeDriver, make: Any) -> None:
    """A graph reads its operands at every launch: only the caller knows how long."""
    driver.call("cuStreamBeginCapture", SIDE, driver.bindings().CUstreamCaptureMode(0))
    assert not alive(launched(make, stream=SIDE))
    assert lifetimes.kept == []
    assert driver.call("cuStreamEndCapture", SIDE), "the capture is valid"
    assert len(log.of("cuEventRecord")) == 1, "the wait for the producers alone"


@pytest.mark.parametrize("stream", [Stream(SIDE), SIDE], ids=["torch stream", "int"])
def test_operators_protect_what_the_caller_passed(log: FakeDriver, stream: Any) -> None:
    """They make the launch's stream current, so that only they know that it was not."""
    log.busy(True)
    operands = [Tensor(SHAPE) for _ in range(3)]
    bias, on_host = Tensor((1, 3, 5, 5)), Tensor((), is_cuda=False)
    efficient_attention_forward(
        *operands, bias, None, None, None, None, 0.0, 0, True, **OPTIONS, stream=stream, philox_seed=on_host
    )
    assert on_host.recorded == []
    if stream == SIDE:
        (entry,) = lifetimes.kept
        assert set(map(id, entry.operands)) == set(map(id, (*operands, bias)))
    else:
        assert [array.recorded for array in (*operands, bias)] == [[SIDE]] * 4
    references = [weakref.ref(array) for array in operands]
    entry = None
    del operands
    assert alive(references) == (stream == SIDE)


def test_operators_of_cupy(log: FakeDriver) -> None:
    log.busy(True)
    operands = [ndarray(SHAPE) for _ in range(3)]
    efficient_attention_forward(*operands, None, None, None, None, None, 0.0, 0, True, **OPTIONS, stream=SIDE)
    (entry,) = lifetimes.kept
    assert set(map(id, entry.operands)) == set(map(id, operands))
