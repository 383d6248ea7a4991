"""Tests of __cuda_array_interface__ and masked arrays: what would be read or written wrongly is refused by name."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.runtime import cuda_interface
from cutlass_py_attn.runtime.arrays import DeviceArray, read_operands
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact
from tests.support.refusals import expect

SHAPE = (2, 5, 3, 8)


class Exporter:
    """An array with the interface of aligned float16 memory, some entries changed or "left out"."""

    def __init__(self, **changes: Any) -> None:
        self.array = aligned(SHAPE, "f2")
        entries = {**InterfaceArray(self.array).__cuda_array_interface__, **changes}
        self.__cuda_array_interface__ = {key: value for key, value in entries.items() if value != "left out"}


class Raises:
    """An array that cannot export itself."""

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("it requires grad")


def refusals_of(value: Any) -> tuple[Refusal, ...]:
    """Returns why `value` is refused as operand x."""
    with pytest.raises(NotSupported) as caught:
        read_operands({"x": value}, 0)
    return caught.value.refusals


@pytest.mark.parametrize(
    ("changes", "entry", "rule"),
    [
        ({"strides": (240, 48, 33, 2)}, "strides", "multiples of its 2-byte elements"),
        ({"strides": (240, 48, 16, 1)}, "strides", "multiples of its 2-byte elements"),
        ({"strides": (48, 16, 2)}, "strides", "None or 4 ints"),
        ({"strides": 2}, "strides", "None or 4 ints"),
        ({"mask": InterfaceArray(np.ones(SHAPE, bool))}, "mask", "None, because every element is read"),
        ({"stream": 0}, "stream", "1, 2, a handle or None"),
        ({"stream": "main"}, "stream", "1, 2, a handle or None"),
        ({"data": "left out"}, "", "data, shape and typestr, and lacks data"),
        ({"shape": "left out", "typestr": "left out"}, "", "and lacks shape, typestr"),
        ({"data": None}, "data", "(address, read-only)"),
        ({"data": (4096,)}, "data", "(address, read-only)"),
        ({"data": ("0x10", False)}, "data", "(address, read-only)"),
        ({"shape": (2, -5, 3, 8)}, "shape", "ints from 0"),
        ({"shape": 240}, "shape", "ints from 0"),
        ({"typestr": "half"}, "typestr", "NumPy's, such as '<f2'"),
        ({"typestr": None}, "typestr", "NumPy's, such as '<f2'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_what_an_interface_may_not_say(driver_log: FakeDriver, changes: dict[str, Any], entry: str, rule: str) -> None:
    field = "x.__cuda_array_interface__" + (f"[{entry!r}]" if entry else "")
    expect(refusals_of(Exporter(**changes)), [f"{field}: {rule}"])
    assert driver_log.calls == []


def test_every_wrong_entry_is_listed(driver_log: FakeDriver) -> None:
    found = refusals_of(Exporter(strides=(240, 48, 33, 2), mask=[1], stream=0, data=None))
    assert len(found) == 4


def test_interface_that_is_no_dictionary_or_raises(driver_log: FakeDriver) -> None:
    expect(refusals_of(SimpleNamespace(__cuda_array_interface__=[1])), ["x.__cuda_array_interface__: a dict"])
    expect(refusals_of(Raises()), ["x: export itself by __cuda_array_interface__ (it requires grad)"])


def test_strides_of_axes_of_size_one_do_not_count(driver_log: FakeDriver) -> None:
    value = Exporter(shape=(1, 5, 3, 8), strides=(33, 48, 16, 2))
    assert read_operands({"x": value}, 0)["x"].strides[1:] == (24, 8, 1)


@pytest.mark.parametrize(("typestr", "dtype"), [("<c8", "complex64"), ("|b1", "bool"), (">f4", ">f4"), ("|V2", "|V2")])
def test_dtypes_have_numpy_s_names(driver_log: FakeDriver, typestr: str, dtype: str) -> None:
    assert read_operands({"x": Exporter(typestr=typestr, strides=None)}, 0)["x"].dtype == dtype


def test_cupy_strides_are_not_rounded(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    class ndarray(Exporter):  # noqa: N801
        dtype, shape, strides = np.dtype("f2"), SHAPE, (240, 48, 33, 2)
        data = SimpleNamespace(ptr=4096, device_id=0)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    cuda = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=0))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=ndarray, cuda=cuda))
    found = refusals_of(ndarray(strides=(240, 48, 33, 2)))
    expect(found, ["x.__cuda_array_interface__['strides']: multiples of its 2-byte elements"])


@pytest.mark.parametrize(
    ("value", "is_read_only"),
    [(Exporter(data=(4096, True)), True), (Exporter(data=(4096, False)), False), (Raises(), False), (object(), False)],
    ids=["read-only", "writable", "raises", "no interface"],
)
def test_only_an_interface_makes_an_array_read_only(value: Any, is_read_only: bool) -> None:
    assert cuda_interface.is_read_only(value) == is_read_only


def test_numpy_masked_arrays(driver_log: FakeDriver) -> None:
    masked = np.ma.masked_array(aligned(SHAPE, "f4"), mask=False)
    plain = aligned(SHAPE, "f4")
    for backend in ("auto", "reference"):
        with pytest.raises(NotSupported, match=r"query = .*MaskedArray.*: must be a plain NumPy array"):
            attention_forward(masked, plain, plain, backend=backend, kernels=artifact)
    assert not driver_log.of("cuLaunchKernelEx")


class Both(DeviceArray):
    """A device array with DLPack, whose interface says that the memory is read-only."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, "data": (self.pointer, True)}


@pytest.mark.parametrize(
    "frozen",
    [lambda: Exporter(data=(aligned(SHAPE, "f2").ctypes.data, True)), lambda: Both(SHAPE, "float16", 0, 0)],
    ids=["interface", "interface beside DLPack"],
)
def test_read_only_arrays_are_read_and_never_written(driver_log: FakeDriver, frozen: Any) -> None:
    operand, target = frozen(), frozen()
    output, _ = attention_forward(operand, operand, operand, kernels=artifact)
    assert output is not operand
    driver_log.clear()
    with pytest.raises(NotSupported, match=r"output = .*: must be writable, and is read-only; leave it out"):
        attention_forward(operand, operand, operand, kernels=artifact, out=target)
    logsumexp = InterfaceArray(aligned((2, 3, 32), "f4"))
    with pytest.raises(NotSupported) as caught:
        attention_backward(
            *[operand] * 5, logsumexp, kernels=artifact, out=Gradients(query=target, key=frozen()), scale="no"
        )
    assert [refusal.field for refusal in caught.value.refusals] == ["scale", "grad_query", "grad_key"]
    assert not driver_log.of("cuLaunchKernelEx")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_read_only_numpy_arrays_are_never_written(driver_log: FakeDriver, backend: str) -> None:
    operand, target = aligned(SHAPE, "f4"), aligned(SHAPE, "f4")
    operand.flags.writeable = target.flags.writeable = False
    with pytest.raises(NotSupported, match=r"output = .*: must be writable, and is read-only; leave it out"):
        attention_forward(operand, operand, operand, kernels=artifact, out=target, backend=backend)
    attention_forward(operand, operand, operand, kernels=artifact, backend=backend)
