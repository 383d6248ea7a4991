"""Arrays: operands of any library are read in place, and results go back to the caller's library."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np

from cutlass_py_attn import driver
from cutlass_py_attn.errors import AttentionError, DriverError, NotSupported
from cutlass_py_attn.guests import BY_LIBRARY, Guest, guest_of
from cutlass_py_attn.guests import numpy_dtype as numpy_dtype
from cutlass_py_attn.problem import ITEM_BYTES, ROW_ALIGNMENT_BYTES, Tensor

_LIBRARIES: Final = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_CUDA, _CUDA_MANAGED = 2, 13  # DLDeviceType
_LEGACY_STREAM = 1  # DLPack and __cuda_array_interface__ forbid 0 for the default stream
_DLPACK_KINDS: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_TYPES: Final = {
    **{"float16": (2, 16), "float32": (2, 32), "bfloat16": (4, 16)},
    **{"int32": (0, 32), "int64": (0, 64)},
}
_TYPESTRS: Final = {"float16": "<f2", "float32": "<f4", "bfloat16": "<V2", "int32": "<i4", "int64": "<i8"}


class Array(NamedTuple):
    """One operand as read. `strides` in elements; `device` None is host memory; `owner` keeps it alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    library: str
    owner: Any

    @property
    def tensor(self) -> Tensor:
        """Shape, strides, dtype and alignment for a Problem; what the device copy has, for host memory."""
        if self.device is None:
            return Tensor.contiguous(self.shape, self.dtype)
        return Tensor(self.shape, self.strides, self.dtype, self.alignment)

    @property
    def alignment(self) -> int:
        """Of the address, in bytes, up to 16; 16 for what is copied from host memory."""
        bits = self.pointer | ROW_ALIGNMENT_BYTES
        return ROW_ALIGNMENT_BYTES if self.device is None else bits & -bits


def take(operands: Mapping[str, Any], stream: int) -> dict[str, Array]:
    """Read every operand in place; work put on `stream` afterwards sees what their producers wrote.

    Accepted: CUDA arrays with `__dlpack__` or `__cuda_array_interface__`, and NumPy arrays.
    NotSupported lists every objection: unreadable operands, host and device arrays mixed, several devices.
    """
    arrays: dict[str, Array] = {}
    reasons: list[str] = []
    ordered: set[tuple[Guest, int]] = set()  # whose stream ours has been put behind
    for name, value in operands.items():
        guest = guest_of(value)
        view = guest.view(value) if guest is not None else None
        if guest is not None and view is not None:
            arrays[name] = Array(*view, guest.library, value)
            if (guest, view[4]) not in ordered:
                ordered.add((guest, view[4]))
                _put_behind(guest.current_stream(view[4]), stream, view[4])
            continue
        try:
            arrays[name] = _take_one(name, value, stream)
        except NotSupported as error:
            reasons += error.reasons
    if len({array.device for array in arrays.values()}) > 1:
        places = {name: "host" if a.device is None else f"device {a.device}" for name, a in arrays.items()}
        listed = ", ".join(f"{name} on {place}" for name, place in places.items())
        reasons.append(f"{listed}: must all be on one device, or all NumPy arrays; move them together")
    if reasons:
        raise NotSupported(reasons)
    return arrays


def _put_behind(producer: int, stream: int, ordinal: int) -> None:
    """Work put on `stream` from now on starts after what the producer's stream holds."""
    producer, consumer = producer or _LEGACY_STREAM, stream or _LEGACY_STREAM
    if producer != consumer:
        with driver.device(ordinal).current():
            driver.wait_for(producer, consumer)


def _take_one(name: str, value: Any, stream: int) -> Array:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.name if value.dtype.isnative else value.dtype.str
        contiguous = Tensor.contiguous(value.shape, dtype)
        return Array(value.ctypes.data, value.shape, contiguous.strides, dtype, None, "numpy", value)
    if hasattr(value, "__dlpack_device__"):
        return _from_dlpack(name, value, stream)
    if hasattr(value, "__cuda_array_interface__"):
        return _from_interface(name, value, stream)
    raise NotSupported(
        f"{name} is a {_type_name(value)}: must be a CUDA array with __dlpack__ or "
        "__cuda_array_interface__, or a NumPy array; convert it"
    )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _library(value: object) -> str:
    return _LIBRARIES.get(type(value).__module__.split(".")[0], "other")


def _from_dlpack(name: str, value: Any, stream: int) -> Array:
    kind, ordinal = (int(number) for number in value.__dlpack_device__())
    if kind not in (_CUDA, _CUDA_MANAGED):
        raise NotSupported(
            f"{name} is a {_type_name(value)} in memory of DLPack device type {kind}: must be in CUDA memory "
            f"({_CUDA}) or a NumPy array; move it to the GPU"
        )
    try:
        with driver.device(ordinal).current():
            capsule = value.__dlpack__(stream=stream or _LEGACY_STREAM)
    except AttentionError:
        raise
    except Exception as error:  # whatever the library raises: BufferError, TypeError, RuntimeError ...
        raise NotSupported(
            f"{name} is a {_type_name(value)} that does not export itself by DLPack ({error}); "
            "pass a plain array of values"
        ) from error
    # The capsule stays unconsumed: its own destructor gives the memory back when `owner` goes.
    seen = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    shape = tuple(seen.shape[: seen.ndim])
    strides = tuple(seen.strides[: seen.ndim]) if seen.strides else Tensor.contiguous(shape, "").strides
    names = {code: dtype for dtype, code in _DLPACK_TYPES.items()}
    fallback = f"{_DLPACK_KINDS.get(seen.code, f'dlpack code {seen.code} ')}{seen.bits}"
    dtype = names.get((seen.code, seen.bits), fallback) if seen.lanes == 1 else f"{fallback}x{seen.lanes}"
    pointer = (seen.data or 0) + seen.byte_offset
    return Array(pointer, shape, strides, dtype, ordinal, _library(value), (value, capsule))


def _from_interface(name: str, value: Any, stream: int) -> Array:
    seen = value.__cuda_array_interface__
    pointer = int(seen["data"][0])
    kinds = driver.bindings().CUpointer_attribute
    ordinal_of = kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    ordinal = int(driver.call("cuPointerGetAttribute", ordinal_of, pointer)) if pointer else driver.current_ordinal()
    dtype = _interface_dtype(value, seen["typestr"])
    shape = tuple(int(size) for size in seen["shape"])
    if seen.get("strides") is None:
        strides = Tensor.contiguous(shape, dtype).strides
    else:
        item_bytes = int(seen["typestr"][2:])
        strides = tuple(int(stride) // item_bytes for stride in seen["strides"])
    producer = seen.get("stream")
    if producer == 0:
        raise NotSupported(f"{name} has stream 0 in __cuda_array_interface__: must be 1, 2, a handle or None")
    if producer is not None:
        _put_behind(int(producer), stream, ordinal)
    return Array(pointer, shape, strides, dtype, ordinal, _library(value), value)


def _interface_dtype(value: object, typestr: str) -> str:
    """The interface has no name for bfloat16 but two opaque bytes; then the array's own dtype decides."""
    names = {text: dtype for dtype, text in _TYPESTRS.items() if dtype != "bfloat16"}
    if typestr in ("|V2", "<V2") and str(getattr(value, "dtype", "")) in ("bfloat16", "torch.bfloat16"):
        return "bfloat16"
    return names.get(typestr, typestr)


class DeviceArray:
    """Device memory of this package, dense row-major, as DLPack and `__cuda_array_interface__` show it.

    What callers get whose library we do not know. Pass it to the library's from_dlpack or asarray.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.stream = stream
        self.nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        # Not from the stream's pool: the array may outlive the stream, and cuMemFree waits for every user.
        self.pointer = driver.allocate_now(self.nbytes, f"a result {shape} {dtype}") if self.nbytes else 0
        if self.pointer:
            weakref.finalize(self, _free, device, self.pointer).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": _TYPESTRS[self.dtype],
            "data": (self.pointer, False),
            "strides": None,
            "stream": self.stream or _LEGACY_STREAM,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> Any:
        """An unversioned DLPack capsule, whatever version is asked for: consumers must take it.

        stream: the consumer's; it will wait for ours. -1 for no waiting.
        """
        if stream != -1:
            with driver.device(self.device).current():
                driver.wait_for(self.stream or _LEGACY_STREAM, stream or _LEGACY_STREAM)
        return _export(self)


def _free(ordinal: int, pointer: int) -> None:
    """The last reference may go in a thread of another library, where no context is current."""
    with driver.device(ordinal).current():
        driver.free_now(pointer)


class Exchange:
    """One call's traffic: host operands go to the device, results go to the library that the call came from.

    A context manager, to be entered with the device's context current. NumPy callers' device copies live
    until it closes. JAX callers wait for the stream in `results`: JAX frees its buffers on hidden streams.
    """

    def __init__(self, library: str, gpu: driver.Device, stream: int) -> None:
        self._library = library
        self._gpu = gpu
        self._stream = stream
        self._made: dict[str, Any] = {}
        self._copies: list[int] = []
        self._kept: list[np.ndarray[Any, Any]] = []  # until the stream has read them
        self._host: list[tuple[np.ndarray[Any, Any], int]] = []
        self._sliced: tuple[tuple[str, ...], DeviceArray] | None = None
        self._targets: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._guest = BY_LIBRARY.get(library)
        self._entered: AbstractContextManager[Any] | None = None  # our stream, where the guest is on another

    def __enter__(self) -> Exchange:
        if self._guest is not None and self._guest.current_stream(self._gpu.ordinal) != self._stream:
            self._entered = self._guest.on(self._stream, self._gpu.ordinal)
            self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered is not None:
            self._entered.__exit__(kind, error, trace)
        if not self._copies:
            return
        # After an error the driver may refuse these too; the first error is the one to report.
        with contextlib.suppress(DriverError) if error else contextlib.nullcontext():
            for address in self._copies:
                driver.free(address, self._stream)

    def address(self, name: str, array: Array) -> int:
        """Where the kernels read this operand."""
        if array.device is not None:
            return array.pointer
        dense = np.ascontiguousarray(array.owner)
        copy = self._device_copy(name, dense)
        if dense.nbytes:
            self._kept.append(dense)
            driver.copy_to_device(copy, dense.ctypes.data, dense.nbytes, self._stream)
        return copy

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """Where the kernels write result `name`; its values are undefined until they do."""
        made: Any
        if self._guest is not None:
            made, address = self._guest.empty(shape, dtype, self._gpu.ordinal)
        elif self._library == "numpy":
            host = made = np.empty(shape, numpy_dtype(dtype))
            address = self._device_copy(name, host)
            self._host.append((host, address))
        else:
            made = DeviceArray(shape, dtype, self._gpu.ordinal, self._stream)
            address = made.pointer
        self._made[name] = made
        return address

    def into(self, name: str, array: Array) -> int:
        """Where the kernels write result `name`, which the caller gave an array for."""
        if array.library == "jax" or not getattr(getattr(array.owner, "flags", None), "writeable", True):
            raise NotSupported(f"{name} is an array that cannot be written: must be a writable one; leave it out")
        self._made[name] = array.owner[0] if isinstance(array.owner, tuple) else array.owner
        if array.device is not None:
            return array.pointer
        dense = np.ascontiguousarray(array.owner)  # what the kernels leave out stays as it is
        copy = self._device_copy(name, dense)
        if dense.nbytes:
            driver.copy_to_device(copy, dense.ctypes.data, dense.nbytes, self._stream)
        self._host.append((dense, copy))
        self._targets.append((array.owner, dense))
        return copy

    def empty_slices(self, names: Sequence[str], shape: tuple[int, ...], dtype: str) -> dict[str, int]:
        """Where the kernels write results that are the slices [:, :, i] of one new array of that shape."""
        first = self.empty("slices", shape, dtype)
        whole = self._made.pop("slices")
        if self._library == "jax":
            # JAX arrays have no views: its slices are taken once the kernels are done.
            self._sliced = tuple(names), whole
        elif hasattr(whole, "__getitem__"):
            self._made |= {name: whole[:, :, i] for i, name in enumerate(names)}
        else:
            raise NotSupported(
                "packed: the operands' library is unknown, and slices need one that can slice; pass NumPy, CuPy, "
                "torch or JAX arrays, or leave packed False"
            )
        step = math.prod(shape[3:]) * numpy_dtype(dtype).itemsize
        return {name: first + i * step for i, name in enumerate(names)}

    def results(self) -> dict[str, Any]:
        """Every result by name, as arrays of the caller's library."""
        for array, address in self._host:
            if array.nbytes:
                driver.copy_to_host(array.ctypes.data, address, array.nbytes, self._stream)
        if self._library in ("numpy", "jax"):
            driver.synchronise(self._stream)
        for target, dense in self._targets:
            if not np.shares_memory(target, dense):
                np.copyto(target, dense)
        if self._library == "jax":
            return self._jax_results()
        return self._made

    def _jax_results(self) -> dict[str, Any]:
        take = sys.modules["jax"].dlpack.from_dlpack
        made = {name: take(made) if isinstance(made, DeviceArray) else made for name, made in self._made.items()}
        if self._sliced is not None:
            names, whole = self._sliced
            packed = take(whole)
            made |= {name: packed[:, :, i] for i, name in enumerate(names)}
        return made

    def _device_copy(self, name: str, array: np.ndarray[Any, Any]) -> int:
        if not array.nbytes:
            return 0
        self._copies.append(driver.allocate(array.nbytes, self._stream, f"the device copy of {name}"))
        return self._copies[-1]


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor; `context` is the key of `_exported`."""

    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_exported: dict[int, tuple[Any, ...]] = {}
_next_key = itertools.count(1)

# Functions of our own: the attributes of ctypes.pythonapi are the whole process's, and others set their types too.
_capsule_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_new: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)

# These two run while the capsule dies, so they take its bare address: a reference would revive it.
_dying_is_valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_dying_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _delete(managed: int) -> None:
    """DLPack's deleter: let go of the array behind a DLManagedTensor."""
    _exported.pop(_Managed.from_address(managed).context, None)


def _destroy(capsule: int) -> None:
    """The capsule's destructor: a consumer renames the capsule and deletes by itself, else we do."""
    if _dying_is_valid(capsule, b"dltensor"):
        _delete(_dying_pointer(capsule, b"dltensor"))


# Kept for good: consumers call them as long as the process lives.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)


def _export(array: DeviceArray) -> Any:
    """A "dltensor" capsule over the array, which lives until the capsule's consumer deletes the tensor."""
    rank = len(array.shape)
    shape = (ctypes.c_int64 * rank)(*array.shape)
    strides = (ctypes.c_int64 * rank)(*Tensor.contiguous(array.shape, array.dtype).strides)
    code, bits = _DLPACK_TYPES[array.dtype]
    tensor = _DLTensor(array.pointer, _CUDA, array.device, rank, code, bits, 1, shape, strides, 0)
    key = next(_next_key)
    managed = _Managed(tensor, key, ctypes.cast(_deleter, ctypes.c_void_p))
    _exported[key] = (array, managed, shape, strides)
    return _capsule_new(ctypes.addressof(managed), b"dltensor", ctypes.cast(_destructor, ctypes.c_void_p))
