"""Tests of the fast paths of torch and CuPy: views, stream order, and validation once per layout."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api import attention, calls
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.runtime import arrays, frameworks
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact

SHAPE = (2, 5, 3, 8)


class Tensor:
    """A torch tensor over host memory."""

    def __init__(self, array: Any, name: str, **changes: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, f"torch.{name}"
        self.is_cuda, self.requires_grad = changes.get("is_cuda", True), changes.get("requires_grad", False)
        self.is_negative, self.is_sparse = changes.get("is_negative", False), changes.get("is_sparse", False)

    def is_neg(self) -> bool:
        return self.is_negative

    def data_ptr(self) -> int:
        if self.is_sparse:
            raise RuntimeError("no storage")
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def get_device(self) -> int:
        return 0


class ndarray:  # noqa: N801
    """A CuPy array over host memory."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype, self.strides = array.shape, array.dtype, array.strides
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=0)


@pytest.fixture
def libraries(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A torch on stream 0x66 and a CuPy on the legacy one."""
    torch = SimpleNamespace(Tensor=Tensor, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: 0x66))
    cuda = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=0))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=ndarray, cuda=cuda))
    return driver_log


def test_views(libraries: FakeDriver) -> None:
    array = aligned((2, 5, 6, 8), ml_dtypes.bfloat16)[:, :, ::2]
    strides = (240, 48, 16, 1)
    for value, library in ((Tensor(array, "bfloat16"), "torch"), (ndarray(array), "cupy")):
        stream = 0x66 if library == "torch" else 0
        found = arrays.read_operands({"x": value}, stream)["x"]
        assert found == (array.ctypes.data, SHAPE, strides, "bfloat16", 0, library, value, stream)
    assert libraries.calls == []


@pytest.mark.parametrize(
    ("stream", "producer"), [(0x66, 1), (0, 0x66), (1, 0x66)], ids=["torch's", "legacy", "legacy by its number"]
)
def test_the_stream_waits_once_for_each_framework(libraries: FakeDriver, stream: int, producer: int) -> None:
    """torch is on 0x66 and CuPy on the legacy stream, which DLPack calls 1; the same stream needs no wait."""
    made = aligned(SHAPE, "f4")
    given = {"a": Tensor(made, "float32"), "b": Tensor(made, "float32"), "c": ndarray(made), "d": ndarray(made)}
    arrays.read_operands(given, stream)
    assert [call.numbers[1] for call in libraries.of("cuEventRecord")] == [producer]
    assert [call.numbers[0] for call in libraries.of("cuStreamWaitEvent")] == [stream or 1]


@pytest.mark.parametrize("changes", [{"is_cuda": False}, {"requires_grad": True}, {"is_negative": True},
                                     {"is_sparse": True}, {}])  # fmt: skip
def test_arrays_that_are_not_plain_take_the_dlpack_path(libraries: FakeDriver, changes: dict[str, bool]) -> None:
    name = "float32" if changes else "float64"
    value = Tensor(aligned(SHAPE, "f4" if changes else "f8"), name, **changes)
    assert frameworks.framework_of(value) is frameworks.TORCH
    assert frameworks.TORCH.view(value) is None
    with pytest.raises(NotSupported, match="must be a CUDA array with __dlpack__"):
        arrays.read_operands({"x": value}, 0)


def test_other_classes_of_these_names_are_no_framework_s(libraries: FakeDriver) -> None:
    assert frameworks.framework_of(np.zeros(3)) is None
    assert frameworks.framework_of(type("Tensor", (), {})()) is None
    assert isinstance(frameworks.framework_of(ndarray(np.zeros(3))), type(frameworks.CUPY))


def test_calls_of_one_layout_are_validated_once(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls._prepared.clear()
    validated: list[Any] = []
    real = attention.problem_of

    def problem_of(direction: str, *rest: Any) -> Any:
        validated.append(direction)
        return real(direction, *rest)

    monkeypatch.setattr(attention, "problem_of", problem_of)
    query, key, value = (aligned(SHAPE, "f4", seed) for seed in range(3))
    for mask, operands, count in (
        (Causal(), (query, key, value), 1),
        (Causal(), (key, query, value), 1),
        (Full(), (query, key, value), 2),
        (Full(), (query, key, value), 2),
        (Full(), (query, key, aligned((2, 5, 3, 16), "f4")), 3),
        (Full(), (query, key, aligned((2, 5, 3, 9), "f4")[..., 1:]), 4),
        (Full(), (query, key, value.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)), 5),
    ):
        attention_forward(*map(InterfaceArray, operands), mask=mask, kernels=artifact, stream=0x77)
        assert len(validated) == count
    output = InterfaceArray(query)
    logsumexp = InterfaceArray(aligned((2, 3, 32), "f4"))
    for gradients in (("query", "key"), ["query", "key"], ("value",)):
        options: dict[str, Any] = {"gradients": gradients, "kernels": artifact}
        attention_backward(*[output] * 5, logsumexp, **options)
    assert validated[5:] == ["backward", "backward"]


def test_every_call_raises_for_a_wrong_problem(driver_log: FakeDriver) -> None:
    query = InterfaceArray(aligned(SHAPE, "f4"))
    other = InterfaceArray(aligned((2, 5, 2, 8), "f4"))
    for _ in range(2):
        with pytest.raises(NotSupported, match=r"num_heads = 3 .* of the 2 heads of key"):
            attention_forward(query, other, other, kernels=artifact)


def test_number_of_prepared_calls_is_limited(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    calls._prepared.clear()
    monkeypatch.setattr(calls._prepared, "size", 2)
    for rows in (4, 5, 6):
        array = InterfaceArray(aligned((1, rows, 2, 8), "f4"))
        attention_forward(array, array, array, kernels=artifact)
    assert len(calls._prepared) == 2
