"""Tests of the stream of a call: without one, the kernels run on the current stream of the arrays' library."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward, mla_attention_forward
from cutlass_py_attn.api.serving import append_to_cache, merge_states
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.runtime import driver, lifetimes
from cutlass_py_attn.runtime.arrays import DeviceArray
from cutlass_py_attn.torch_ops.efficient import efficient_attention_forward
from tests.support import fake_libraries
from tests.support.fake_driver import FakeDriver
from tests.support.fake_libraries import CUPY_STREAM, TORCH_STREAM, Tensor, ndarray
from tests.support.fakes import InterfaceArray, aligned, artifact

SHAPE = (2, 5, 3, 8)
OPTIONS: dict[str, Any] = {"kernels": artifact}


class Parameter(Tensor):
    """A tensor of another class, which is read by DLPack."""

    __module__ = "torch.nn.parameter"

    def __dlpack__(self, *, stream: int) -> Any:
        self.asked = stream
        return DeviceArray(self.shape, "float32", 0, stream).__dlpack__(stream=-1)


def numba_array(shape: tuple[int, ...]) -> Any:
    """Returns an array with the interface that Numba has on its default stream."""
    kind = type("DeviceNDArray", (InterfaceArray,), {"__module__": "numba.cuda.cudadrv.devicearray"})
    return kind(aligned(shape, "f4"))


MAKERS: dict[str, tuple[Callable[[tuple[int, ...]], Any], int]] = {
    "torch": (Tensor, TORCH_STREAM),
    "torch.nn.Parameter": (Parameter, TORCH_STREAM),
    "cupy": (ndarray, CUPY_STREAM),
    "numba": (numba_array, 0),
    "numpy": (lambda shape: aligned(shape, "f4"), 0),
    "unknown library": (lambda shape: DeviceArray(shape, "float32", 0, 0x77), 0),
}


@pytest.mark.parametrize(("make", "stream"), MAKERS.values(), ids=MAKERS)
def test_without_a_stream_the_library_s_is_used(log: FakeDriver, make: Any, stream: int) -> None:
    for _ in range(3):  # validated, and then repeated if the library has a fast path
        output, logsumexp = attention_forward(*(make(SHAPE) for _ in range(3)), **OPTIONS)
        attention_backward(*(make(SHAPE) for _ in range(5)), make((2, 3, 32)), **OPTIONS)
    assert {call.stream for call in log.of("cuLaunchKernelEx")} == {stream}
    assert {call.numbers[1] for call in log.of("cuMemAllocAsync")} <= {stream}
    assert type(output) in (make if isinstance(make, type) else object, Tensor, DeviceArray, np.ndarray)
    assert logsumexp.shape == (2, 3, 32)


def appended(stream: Any = None) -> list[Tensor]:
    """Stores rows in a cache of torch and returns the operands."""
    operands = [Tensor((5, 2, 8)) for _ in range(2)] + [Tensor((4, 4, 2, 8)) for _ in range(2)]
    operands.append(Tensor((5,), "int64"))
    append_to_cache(*operands, **OPTIONS, stream=stream)
    return operands


def merged(stream: Any = None) -> list[Tensor]:
    """Merges partial results of torch and returns the operands."""
    operands = [Tensor(shape) for _ in range(2) for shape in (SHAPE, (2, 3, 32))]
    merge_states(*operands, **OPTIONS, stream=stream)
    return operands


def attended_to_latent_cache(stream: Any = None) -> list[Tensor]:
    """Attends to a latent cache of torch and returns the operands."""
    operands = [Tensor((1, 5, 2, 24)), Tensor((1, 9, 1, 24))]
    mla_attention_forward(*operands, head_dim_value=16, **OPTIONS, stream=stream)
    return operands


OTHER_CALLS = (appended, merged, attended_to_latent_cache)


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_other_functions_use_the_current_stream(log: FakeDriver, call: Callable[[Any], list[Tensor]]) -> None:
    for stream, expected in ((None, TORCH_STREAM), (None, TORCH_STREAM), (0x99, 0x99), (0, 0)):
        log.clear()
        call(stream)
        assert {each.stream for each in log.of("cuLaunchKernelEx")} == {expected}
        assert {each.numbers[1] for each in log.of("cuMemAllocAsync")} <= {expected}


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_other_functions_keep_every_operand(log: FakeDriver, call: Callable[[Any], list[Tensor]]) -> None:
    """Torch is told of its stream; for a handle, this package keeps the operands. Also when a call is repeated."""
    for _ in range(3):
        operands = call(fake_libraries.Stream(0x99))
        assert [each.recorded for each in operands] == [[0x99]] * len(operands)
        assert not any(each.recorded for each in call(None))
        assert lifetimes.kept == []
        log.busy(True)
        operands = call(0x99)
        (kept,) = lifetimes.kept
        assert {id(each) for each in operands} <= {id(each) for each in kept.operands}
        log.busy(False)
        lifetimes.release()


@pytest.mark.parametrize("make", [Tensor, ndarray], ids=["torch", "cupy"])
def test_its_own_stream_needs_no_wait(log: FakeDriver, make: Any) -> None:
    for _ in range(3):
        attention_forward(*(make(SHAPE) for _ in range(3)), **OPTIONS)
    assert not log.of("cuEventRecord")
    assert not log.of("cuStreamWaitEvent")


@pytest.mark.parametrize("make", [Tensor, ndarray], ids=["torch", "cupy"])
@pytest.mark.parametrize("stream", [0, 0x99, SimpleNamespace(ptr=0x99)], ids=["legacy", "int", "object"])
def test_a_given_stream_is_used(log: FakeDriver, make: Any, stream: Any) -> None:
    for _ in range(3):
        attention_forward(*(make(SHAPE) for _ in range(3)), **OPTIONS, stream=stream)
    assert {call.stream for call in log.of("cuLaunchKernelEx")} == {driver.stream_handle(stream)}


def test_a_repeated_call_follows_the_current_stream(log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = fake_libraries.install(monkeypatch)
    for handle in (0x10, 0x20, 0x10, 0):
        log.clear()
        with libraries.use_torch_stream(fake_libraries.Stream(handle)):
            attention_forward(*(Tensor(SHAPE) for _ in range(3)), **OPTIONS)
        assert [call.stream for call in log.of("cuLaunchKernelEx")] == [handle]


def test_query_s_library_decides(log: FakeDriver) -> None:
    """Operands of another library are waited for on their own stream."""
    attention_forward(Tensor(SHAPE), ndarray(SHAPE), ndarray(SHAPE), **OPTIONS)
    assert [call.stream for call in log.of("cuLaunchKernelEx")] == [TORCH_STREAM]
    assert next(call.numbers[1] for call in log.of("cuEventRecord")) == CUPY_STREAM
    assert [call.numbers[0] for call in log.of("cuStreamWaitEvent")] == [TORCH_STREAM]


def test_a_tensor_in_host_memory_is_refused_by_name(log: FakeDriver) -> None:
    with pytest.raises(NotSupported, match=r"query = .*torch.Tensor.*: must be in memory of .* is in 1;"):
        attention_forward(Tensor(SHAPE, is_cuda=False), Tensor(SHAPE), Tensor(SHAPE), **OPTIONS)


@pytest.mark.parametrize(("make", "stream"), list(MAKERS.values())[:3:2], ids=["torch", "cupy"])
def test_operators_use_the_current_stream_too(log: FakeDriver, make: Any, stream: int) -> None:
    operands = [make(SHAPE) for _ in range(3)]
    efficient_attention_forward(*operands, None, None, None, None, None, 0.0, 0, True, **OPTIONS)
    assert [call.stream for call in log.of("cuLaunchKernelEx")] == [stream]
