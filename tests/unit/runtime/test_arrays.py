"""Tests of arrays: operands of every library, output arrays, and errors that list every reason."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.errors import DriverError, NotSupported
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import arrays, dlpack, driver, output_checks
from cutlass_py_attn.runtime.arrays import Array, DeviceArray, OutputArrays, read_operands
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import DLPackArray, InterfaceArray, aligned
from tests.support.refusals import expect, expect_raised

SHAPE = (2, 5, 3, 8)
BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_device_array_by_dlpack_and_by_interface(driver_log: FakeDriver, dtype: str) -> None:
    made = DeviceArray(SHAPE, dtype, 0, 7)
    by_dlpack = read_operands({"x": made}, 7)["x"]
    interface = SimpleNamespace(dtype=dtype, __cuda_array_interface__=made.__cuda_array_interface__)
    by_interface = read_operands({"x": interface}, 7)["x"]
    for found in (by_dlpack, by_interface):
        assert found.tensor == Tensor.contiguous(SHAPE, dtype)
        assert (found.pointer, found.device, found.library) == (made.pointer, 0, "other")


def test_numpy_operand_is_described_as_its_device_copy(driver_log: FakeDriver) -> None:
    array = aligned(SHAPE, BF16)[:, ::2]
    found = read_operands({"x": array}, 0)["x"]
    assert (found.device, found.library, found.dtype) == (None, "numpy", "bfloat16")
    assert found.tensor == Tensor.contiguous(array.shape, "bfloat16"), "the device copy is dense"
    assert driver_log.calls == []


def test_swapped_byte_order_is_not_float32() -> None:
    assert read_operands({"x": np.zeros(SHAPE, ">f4")}, 0)["x"].dtype == ">f4"


def test_interface_strides_offset_and_bfloat16(driver_log: FakeDriver) -> None:
    whole = aligned((2, 6, 3, 16), BF16)
    found = read_operands({"x": InterfaceArray(whole[:, 1:, :, 8:])}, 0)["x"]
    assert found.strides == (288, 48, 16, 1)
    assert found.pointer == whole.ctypes.data + (48 + 8) * 2
    assert (found.dtype, found.tensor.alignment) == ("bfloat16", 16)
    assert read_operands({"x": InterfaceArray(whole[..., 1:])}, 0)["x"].tensor.alignment == 2


@pytest.mark.parametrize(("name", "kind"), [("float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("uint8", np.uint8)])
def test_bytes_of_e4m3(driver_log: FakeDriver, name: str, kind: Any) -> None:
    """By __cuda_array_interface__, whose typestr has no code for e4m3, and by DLPack's code 10."""
    array = aligned((2, 8), np.uint8).view(kind)
    found = arrays.read_operands({"x": InterfaceArray(array)}, 0)["x"]
    assert (found.dtype, found.strides) == (name, (8, 1))
    code, bits = dlpack.TYPE_CODES[name]
    assert (code, bits) == {"float8_e4m3fn": (10, 8), "uint8": (1, 8)}[name]
    assert dlpack.DLTensor(code=code, bits=bits, lanes=1).dtype == name
    assert arrays.numpy_dtype(name) == np.dtype(kind)


def test_two_opaque_bytes_are_not_bfloat16(driver_log: FakeDriver) -> None:
    array = InterfaceArray(aligned(SHAPE, BF16).view("V2"))
    assert read_operands({"x": array}, 0)["x"].dtype == "|V2"


def test_dlpack_foreign_types(driver_log: FakeDriver) -> None:
    made = DeviceArray(SHAPE, "float32", 0, 0)
    capsule = made.__dlpack__()
    pointer = dlpack.capsule_pointer(capsule, b"dltensor")
    tensor = dlpack.DLTensor.from_address(pointer)
    source = SimpleNamespace(__dlpack__=lambda stream: capsule)
    for code, bits, lanes, name in ((2, 64, 1, "float64"), (0, 32, 1, "int32"), (2, 16, 2, "float16x2")):
        tensor.code, tensor.bits, tensor.lanes = code, bits, lanes
        assert read_operands({"x": DLPackArray(source)}, 0)["x"].dtype == name


@pytest.mark.parametrize(("stream", "asked"), [(0, 1), (1, 1), (0x77, 0x77)])
def test_dlpack_producer_gets_the_stream(driver_log: FakeDriver, stream: int, asked: int) -> None:
    array = DLPackArray(DeviceArray(SHAPE, "float32", 0, 0x55))
    read_operands({"x": array}, stream)
    assert array.asked == asked
    assert driver_log.of("cuEventRecord")[-1].numbers[1] == 0x55
    assert driver_log.of("cuStreamWaitEvent")[-1].numbers[0] == asked


def test_stream_waits_for_the_interface_s_producer(driver_log: FakeDriver) -> None:
    read_operands({"x": InterfaceArray(aligned(SHAPE, "f4"), stream=0x55)}, 0x77)
    assert driver_log.names == ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy"]
    driver_log.clear()
    read_operands({"x": InterfaceArray(aligned(SHAPE, "f4"), stream=None)}, 0x77)
    read_operands({"x": InterfaceArray(aligned(SHAPE, "f4"), stream=1)}, 0)
    assert driver_log.names == []
    with pytest.raises(NotSupported, match=r"x.__cuda_array_interface__\['stream'\] = 0"):
        read_operands({"x": InterfaceArray(aligned(SHAPE, "f4"), stream=0)}, 0)


def test_every_reason_is_listed(driver_log: FakeDriver) -> None:
    class Refuses:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("it requires grad")

    on_host, on_one = DLPackArray(None, (1, 0)), DLPackArray(DeviceArray(SHAPE, "float32", 0, 0), (2, 1))
    operands = {"a": [1.0], "b": on_host, "c": Refuses(), "d": on_one, "e": aligned(SHAPE, "f4")}
    expect_raised(
        lambda: read_operands(operands, 0),
        ["a: a CUDA array with __dlpack__", "b: DLPack device type 2, CUDA, or a NumPy array, and is in 1",
         "c: must export itself by DLPack (it requires grad)", "devices: must all be on one device"],
    )  # fmt: skip


def test_consumed_capsule_keeps_the_memory(driver_log: FakeDriver) -> None:
    made = DeviceArray(SHAPE, "float32", 0, 0)
    capsule = made.__dlpack__(stream=-1)
    assert driver_log.names == ["cuMemAlloc"], "-1 requests no wait"
    managed = dlpack.DLManagedTensor.from_address(dlpack.capsule_pointer(capsule, b"dltensor"))
    import ctypes

    ctypes.pythonapi.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
    ctypes.pythonapi.PyCapsule_SetName(capsule, b"used_dltensor")
    del made, capsule
    gc.collect()
    assert not driver_log.of("cuMemFree")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
    gc.collect()
    assert len(driver_log.of("cuMemFree")) == 1


def test_unused_capsule_frees_the_memory(driver_log: FakeDriver) -> None:
    made = DeviceArray(SHAPE, "float32", 0, 0)
    capsule = made.__dlpack__()
    del made
    gc.collect()
    assert not driver_log.of("cuMemFree")
    del capsule
    gc.collect()
    assert len(driver_log.of("cuMemFree")) == 1


def test_numpy_round_trip(driver_log: FakeDriver) -> None:
    given = aligned((2, 10, 3, 8), BF16)[:, ::2]
    gpu = driver.device(0)
    with gpu.current(), OutputArrays("numpy", gpu, 0x77) as outputs:
        source = outputs.operand("x", read_operands({"x": given}, 0x77)["x"])
        target = outputs.allocate("y", given.shape, "bfloat16")
        driver.copy_to_device(target, source, given.nbytes, 0x77)
        found = outputs.results()["y"]
    assert found.dtype == BF16
    assert np.array_equal(found, given)
    assert driver_log.names == [
        "cuMemAllocAsync", "cuMemcpyHtoDAsync", "cuMemAllocAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
        "cuStreamSynchronize", "cuMemFreeAsync", "cuMemFreeAsync",
    ]  # fmt: skip


def test_operands_are_kept_until_the_stream_was_waited_for(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(arrays.lifetimes, "keep", lambda foreign, *_: kept.append([source for _, source in foreign]))
    array = InterfaceArray(aligned(SHAPE, "f2"))
    for waits in (False, True):
        with OutputArrays("numpy", driver.device(0), 0x77) as outputs:
            outputs.operand("x", read_operands({"x": array}, 0x77)["x"])
            outputs.allocate("y", SHAPE, "float16")
            if waits:
                outputs.results()
    assert kept == [[array]]


def test_an_array_is_writable_and_not_freed_when_the_process_ends(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may be gone by then."""
    finalizers = []

    class Noted(arrays.weakref.finalize):  # type: ignore[name-defined, type-arg, misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            finalizers.append(self)

    monkeypatch.setattr(arrays.weakref, "finalize", Noted)
    made = DeviceArray(SHAPE, "float32", 0, 7)
    assert [each.atexit for each in finalizers] == [False]
    assert made.__cuda_array_interface__ == {
        "shape": SHAPE, "typestr": "<f4", "data": (made.pointer, False), "strides": None, "stream": 7, "version": 3,
    }  # fmt: skip


def test_copies_are_freed_after_an_error(driver_log: FakeDriver) -> None:
    gpu = driver.device(0)
    array = read_operands({"x": aligned(SHAPE, "f4")}, 0)["x"]
    driver_log.fail("cuMemcpyHtoDAsync", 700)
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync"), OutputArrays("numpy", gpu, 0) as outputs:
        outputs.operand("x", array)
    assert len(driver_log.of("cuMemFreeAsync")) == 1


@pytest.mark.parametrize("release", [13, 14])
def test_cupy_outputs_are_allocated_on_the_call_s_stream(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch, release: int
) -> None:
    seen: list[Any] = []

    def place(*arguments: int) -> Any:
        seen.append(arguments)
        return nullcontext()

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        return SimpleNamespace(shape=shape, dtype=dtype, data=SimpleNamespace(ptr=0x5000))

    def from_external(stream: Any) -> Any:
        return place(*reversed(stream.__cuda_stream__()))

    kind = SimpleNamespace(from_external=from_external) if release >= 14 else SimpleNamespace()
    cuda = SimpleNamespace(
        Device=place, ExternalStream=place, Stream=kind, get_current_stream=lambda _: SimpleNamespace(ptr=0x66)
    )
    fake = SimpleNamespace(cuda=cuda, empty=empty)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with OutputArrays("cupy", driver.device(0), 0x77) as outputs:
        assert outputs.allocate("y", SHAPE, "bfloat16") == 0x5000
        assert outputs.results()["y"].dtype == BF16
    assert sorted(seen) == [(0,), (0x77, 0)]
    with OutputArrays("cupy", driver.device(0), 0x66) as outputs:
        outputs.allocate("y", SHAPE, "bfloat16")
    assert len(seen) == 2, "CuPy is on that stream already"
    assert driver_log.calls == []


@pytest.mark.parametrize("stream", [0, 0x77])
def test_torch_outputs_are_allocated_on_the_call_s_stream(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch, stream: int
) -> None:
    seen: list[Any] = []

    def enter(chosen: Any) -> Any:
        seen.append(chosen)
        return nullcontext()

    cuda = SimpleNamespace(
        ExternalStream=lambda handle, device: (handle, device),
        default_stream=lambda device: (0, device),
        stream=enter,
        current_stream=lambda ordinal: SimpleNamespace(cuda_stream=0x66),
    )
    fake = SimpleNamespace(
        cuda=cuda,
        device=lambda kind, ordinal: f"{kind}:{ordinal}",
        empty=lambda shape, dtype, device: SimpleNamespace(made=(shape, dtype, device), data_ptr=lambda: 0x6000),
        float16="torch.float16",
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    with OutputArrays("torch", driver.device(0), stream) as outputs:
        assert outputs.allocate("y", SHAPE, "float16") == 0x6000
        assert outputs.results()["y"].made == (SHAPE, "torch.float16", "cuda:0")
    assert seen == [(stream, "cuda:0")]
    with OutputArrays("torch", driver.device(0), 0x66) as outputs:
        outputs.allocate("y", SHAPE, "float16")
    assert len(seen) == 1, "torch is on that stream already"
    assert driver_log.calls == []


def test_jax_outputs_wait_and_go_by_dlpack(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda array: ("jax", array)))
    monkeypatch.setitem(sys.modules, "jax", fake)
    outputs = OutputArrays("jax", driver.device(0), 0x77)
    outputs.allocate("y", SHAPE, "bfloat16")
    library, made = outputs.results()["y"]
    assert library == "jax"
    assert made.__dlpack_device__() == (2, 0)
    assert driver_log.names == ["cuMemAlloc", "cuStreamSynchronize"]


def test_library_follows_from_the_type() -> None:
    assert arrays._library(np.zeros(1)) == "numpy"
    named = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})
    assert arrays._library(named()) == "jax"
    assert arrays._library(object()) == "other"


def test_null_pointer_of_an_empty_array_is_aligned() -> None:
    assert Array(0, (0, 5, 3, 8), (120, 24, 8, 1), "float16", 0, "other", None).tensor.alignment == 16


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_of_every_protocol(driver_log: FakeDriver, dtype: str) -> None:
    host = aligned((3,), dtype)
    made = DeviceArray((3,), "float32", 0, 0)
    capsule = made.__dlpack__()
    tensor = dlpack.DLTensor.from_address(dlpack.capsule_pointer(capsule, b"dltensor"))
    tensor.code, tensor.bits = 0, np.dtype(dtype).itemsize * 8
    by_dlpack = DLPackArray(SimpleNamespace(__dlpack__=lambda stream: capsule))
    for given in (host, InterfaceArray(host), by_dlpack):
        assert read_operands({"x": given}, 0)["x"].tensor.dtype == dtype
    assert read_operands({"x": InterfaceArray(aligned((), dtype))}, 0)["x"].shape == ()


def test_caller_s_device_arrays_as_outputs(driver_log: FakeDriver) -> None:
    by_interface, by_dlpack = InterfaceArray(aligned(SHAPE, "f4")), DeviceArray(SHAPE, "float32", 0, 0)
    operands = read_operands({"x": by_interface, "y": by_dlpack}, 0)
    outputs = OutputArrays("other", driver.device(0), 0)
    addresses = [outputs.use(name, array) for name, array in operands.items()]
    assert addresses == [by_interface.array.ctypes.data, by_dlpack.pointer]
    assert outputs.results() == {"x": by_interface, "y": by_dlpack}


def test_caller_s_numpy_arrays_as_outputs(driver_log: FakeDriver) -> None:
    """Strided arrays change in their elements alone; an element that no kernel writes keeps its value."""
    whole, dense = np.ones((2, 10, 3, 8), "f4"), np.ones(SHAPE, "f4")
    part, untouched = whole[:, ::2], np.full(SHAPE, 7, "f4")
    values = aligned(SHAPE, "f4")
    gpu = driver.device(0)
    with gpu.current(), OutputArrays("numpy", gpu, 0x77) as outputs:
        given = {"part": part, "dense": dense, "untouched": untouched}
        addresses = {name: outputs.use(name, array) for name, array in read_operands(given, 0x77).items()}
        for name in ("part", "dense"):
            driver.copy_to_device(addresses[name], values.ctypes.data, values.nbytes, 0x77)
        found = outputs.results()
    assert [found[name] is array for name, array in given.items()] == [True] * 3
    np.testing.assert_array_equal(part, values)
    np.testing.assert_array_equal(dense, values)
    assert (whole[:, 1::2] == 1).all()
    assert (untouched == 7).all()
    assert len(driver_log.of("cuMemFreeAsync")) == 3


def test_read_only_arrays_are_refused(driver_log: FakeDriver) -> None:
    frozen = aligned(SHAPE, "f4")
    frozen.flags.writeable = False
    jax_array = Array(0x1000, SHAPE, (120, 24, 8, 1), "float32", 0, "jax", (None, None))
    for array in (read_operands({"x": frozen}, 0)["x"], jax_array):
        expect(output_checks.refusals({"x": array}, ["x"]), ["x: must be writable"])


PACKED = (2, 5, 3, 4, 8)
NAMES = ("a", "b", "c")


def test_packed_numpy_outputs(driver_log: FakeDriver) -> None:
    gpu = driver.device(0)
    with gpu.current(), OutputArrays("numpy", gpu, 0) as outputs:
        addresses = outputs.allocate_packed(NAMES, PACKED, "bfloat16")
        found = outputs.results()
    assert [addresses[name] - addresses["a"] for name in NAMES] == [0, 4 * 8 * 2, 2 * 4 * 8 * 2]
    assert list(found) == list(NAMES)
    assert {id(part.base) for part in found.values()} == {id(found["a"].base)}
    assert [part.shape for part in found.values()] == [(2, 5, 4, 8)] * 3
    assert len(driver_log.of("cuMemAllocAsync")) == 1


def test_jax_array_is_sliced_after_the_kernels(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = np.arange(np.prod(PACKED)).reshape(PACKED)
    fake = SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda array: made))
    monkeypatch.setitem(sys.modules, "jax", fake)
    outputs = OutputArrays("jax", driver.device(0), 0x77)
    outputs.allocate_packed(NAMES, PACKED, "bfloat16")
    assert not driver_log.of("cuStreamSynchronize")
    for i, part in enumerate(outputs.results().values()):
        np.testing.assert_array_equal(part, made[:, :, i])
    assert len(driver_log.of("cuStreamSynchronize")) == 1


def test_packed_needs_a_known_library(driver_log: FakeDriver) -> None:
    with pytest.raises(NotSupported, match=r"packed = True: .* arrays of an unknown library"):
        OutputArrays("other", driver.device(0), 0).allocate_packed(NAMES, PACKED, "float16")
