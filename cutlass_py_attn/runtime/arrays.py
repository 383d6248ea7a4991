"""Arrays of any library: operands are read in place, and outputs are allocated in the caller's library."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np

from cutlass_py_attn.errors import AttentionError, DriverError, NoDevice, NotSupported
from cutlass_py_attn.problem.tensors import OPERAND_BYTES, ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import cuda_interface, dlpack, driver, lifetimes
from cutlass_py_attn.runtime.frameworks import CUPY, FRAMEWORKS, Framework, framework_of
from cutlass_py_attn.runtime.frameworks import numpy_dtype as numpy_dtype

_LIBRARIES: Final = {name: name for name in ("numpy", "cupy", "torch", "jax", "numba")} | {"jaxlib": "jax"}
_WAITING: Final = ("numpy", "jax")  # libraries for which a call waits until its results are complete
_LEGACY_STREAM = 1  # DLPack and __cuda_array_interface__ forbid 0 for the default stream


class Array(NamedTuple):
    """An operand.

    pointer: address in bytes. strides: in elements. device: ordinal; None for host memory.
    library: name of the library that owns the array. owner: object that keeps the memory alive.
    stream: handle of the stream in whose order the memory may be reused when the owner is gone; None if unknown.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None
    library: str
    owner: Any
    stream: int | None = None

    @property
    def source(self) -> Any:
        """The array as the caller passed it."""
        return self.owner[0] if isinstance(self.owner, tuple) else self.owner

    @property
    def tensor(self) -> Tensor:
        """Shape, strides, dtype and alignment for a Problem. A host array is described as its dense device copy."""
        if self.device is None:
            return Tensor.contiguous(self.shape, self.dtype)
        return Tensor(self.shape, self.strides, self.dtype, self.alignment)

    @property
    def alignment(self) -> int:
        """Alignment of the address (bytes), at most 16; 16 for a host array, whose device copy is aligned."""
        bits = self.pointer | ROW_ALIGNMENT_BYTES
        return ROW_ALIGNMENT_BYTES if self.device is None else bits & -bits


def launch_stream(query: Any, stream: object) -> int:
    """Returns the handle of the stream that a call is launched on.

    query: decides if `stream` is None: the current stream of torch or CuPy if it is their CUDA array, else the legacy
        default stream.

    NotSupported: the stream is captured, and the call cannot be part of a CUDA graph.
    """
    framework = framework_of(query) or FRAMEWORKS.get(_library(query))
    if stream is not None:
        handle = driver.stream_handle(stream)
    else:
        ordinal = None if framework is None else framework.ordinal(query)
        handle = 0 if framework is None or ordinal is None else framework.current_stream(ordinal)
    if framework is None:
        _refuse_capture(_library(query), handle)
    return handle


def _refuse_capture(library: str, stream: int) -> None:
    """Raises NotSupported if the stream is captured, for a call with arrays of this library."""
    try:
        is_captured = driver.is_capturing(stream)
    except NoDevice:  # reported when the call needs the device
        return
    if is_captured:
        reason = (
            "results are complete when the call returns"
            if library in _WAITING
            else "results of unknown libraries are allocated outside of the graph"
        )
        rule = f"must not be captured, nor forbidden by a capture, for arrays of library {library!r}, whose {reason}"
        remedy = "pass torch or CuPy arrays, or capture calls of a Bound"
        raise NotSupported(Refusal("stream", f"{stream:#x}", rule, remedy))


def read_operands(operands: Mapping[str, Any], stream: int) -> dict[str, Array]:
    """Reads address, shape, strides and dtype of every operand. Later work on `stream` waits for their producers.

    operands: CUDA arrays with `__dlpack__` or `__cuda_array_interface__`, or NumPy arrays.

    NotSupported lists every reason: unreadable operands, a mix of host and device arrays, several devices.
    """
    arrays: dict[str, Array] = {}
    refusals: list[Refusal] = []
    producers: dict[tuple[Framework, int], int] = {}  # streams that `stream` already waits for
    for name, value in operands.items():
        framework = framework_of(value)
        view = framework.view(value) if framework is not None else None
        if framework is not None and view is not None:
            ordinal = view[4]
            producer = producers.get((framework, ordinal))
            if producer is None:
                producer = producers[framework, ordinal] = framework.current_stream(ordinal)
                _order_after(producer, stream, ordinal)
            arrays[name] = Array(*view, framework.library, value, producer)
            continue
        try:
            # DLPack has no strides in bytes: a CuPy array that is not plain says itself what its strides are.
            read = _read_operand if framework is not CUPY else _read_interface
            arrays[name] = read(name, value, stream)
        except NotSupported as error:
            refusals += error.refusals
        except AttentionError:
            raise
        except Exception as error:  # an interface without an entry, or with one of another type
            rule = f"must be an array that can be read ({type(error).__name__}: {error})"
            refusals.append(refuse(name, value, rule, "convert it to a CUDA or NumPy array"))
    if len({array.device for array in arrays.values()}) > 1:
        devices = {name: "host" if a.device is None else f"device {a.device}" for name, a in arrays.items()}
        rule = "must all be on one device, or all NumPy arrays"
        refusals.append(refuse("devices", devices, rule, "move them together"))
    if refusals:
        raise NotSupported(refusals)
    return arrays


def _order_after(producer: int, stream: int, ordinal: int) -> None:
    """Makes later work on `stream` wait for the work that is on stream `producer` now."""
    producer, consumer = producer or _LEGACY_STREAM, stream or _LEGACY_STREAM
    if producer != consumer:
        with driver.device(ordinal).current():
            driver.order_streams(producer, consumer)


def _read_operand(name: str, value: Any, stream: int) -> Array:
    """Reads an operand by NumPy's attributes, DLPack or the CUDA array interface."""
    if isinstance(value, np.ma.MaskedArray):
        rule = "must be a plain NumPy array, because its mask would be ignored"
        raise NotSupported(refuse(name, value, rule, "fill the masked elements with filled()"))
    if isinstance(value, np.ndarray):
        dtype = value.dtype.name if value.dtype.isnative else value.dtype.str
        contiguous = Tensor.contiguous(value.shape, dtype)
        return Array(value.ctypes.data, value.shape, contiguous.strides, dtype, None, "numpy", value)
    if hasattr(value, "__dlpack_device__"):
        return _read_dlpack(name, value, stream)
    if cuda_interface.is_offered(value):
        return _read_interface(name, value, stream)
    rule = "must be a CUDA array with __dlpack__ or __cuda_array_interface__, or a NumPy array"
    raise NotSupported(refuse(name, value, rule, "convert it"))


def _library(value: object) -> str:
    """Returns the name of the array's library; "other" for one that this package does not know."""
    return _LIBRARIES.get(type(value).__module__.split(".")[0], "other")


def _read_dlpack(name: str, value: Any, stream: int) -> Array:
    device_type, ordinal = _dlpack_device(name, value)
    if device_type not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        rule = f"must be in memory of DLPack device type {dlpack.CUDA}, CUDA, or a NumPy array, and is in {device_type}"
        raise NotSupported(refuse(name, value, rule, "move it to the GPU"))
    try:
        with driver.device(ordinal).current():
            capsule = value.__dlpack__(stream=stream or _LEGACY_STREAM)
    except AttentionError:
        raise
    except Exception as error:  # the library decides the type: BufferError, TypeError, RuntimeError ...
        raise _no_dlpack(name, value, error) from error
    tensor = dlpack.read_capsule(capsule)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else Tensor.contiguous(shape, "").strides
    pointer = (tensor.data or 0) + tensor.byte_offset
    library = _library(value)
    if isinstance(value, DeviceArray):
        reused_on: int | None = stream  # after every stream, so after this one
    else:
        reused_on = FRAMEWORKS[library].current_stream(ordinal) if library in FRAMEWORKS else None
    return Array(pointer, shape, strides, tensor.dtype, ordinal, library, (value, capsule), reused_on)


def _dlpack_device(name: str, value: Any) -> tuple[int, int]:
    """Returns DLPack's device type and ordinal."""
    try:
        device_type, ordinal = map(int, value.__dlpack_device__())
    except Exception as error:  # the library decides the type
        raise _no_dlpack(name, value, error) from error
    return device_type, ordinal


def _no_dlpack(name: str, value: Any, error: Exception) -> NotSupported:
    return NotSupported(refuse(name, value, f"must export itself by DLPack ({error})", "pass a plain array of values"))


def _read_interface(name: str, value: Any, stream: int) -> Array:
    pointer, shape, strides, dtype, producer = cuda_interface.read(name, value)
    attribute = driver.bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    ordinal = int(driver.call("cuPointerGetAttribute", attribute, pointer)) if pointer else driver.current_ordinal()
    if producer is not None:
        _order_after(producer, stream, ordinal)
    library = _library(value)
    if producer is None and library == "numba":
        producer = 0  # Numba's default stream
    return Array(pointer, shape, strides, dtype, ordinal, library, value, producer)


class DeviceArray:
    """A dense row-major array in device memory, with DLPack and `__cuda_array_interface__`.

    Callers whose library is unknown get their results as DeviceArrays. Pass one to the library's from_dlpack or
    asarray.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.stream = stream
        self.nbytes = math.prod(shape) * OPERAND_BYTES[dtype]
        _free_deferred()
        # Not from the stream's memory pool: the array may outlive the stream, and be in use on streams that it does
        # not know. cuMemFree waits for all of them.
        self.pointer = driver.allocate_now(self.nbytes, f"a result {shape} {dtype}") if self.nbytes else 0
        if self.pointer:
            weakref.finalize(self, _free, device, self.pointer).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": cuda_interface.TYPESTRS[self.dtype],
            "data": (self.pointer, False),
            "strides": None,
            "stream": self.stream or _LEGACY_STREAM,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> Any:
        """Returns an unversioned DLPack capsule, whatever version is requested; the standard allows that.

        stream: the consumer's stream, which will wait for this array's stream; -1 for no wait.
        """
        if stream != -1:
            with driver.device(self.device).current():
                driver.order_streams(self.stream or _LEGACY_STREAM, stream or _LEGACY_STREAM)
        strides = Tensor.contiguous(self.shape, self.dtype).strides
        return dlpack.export_capsule(self, self.pointer, self.shape, strides, self.dtype, self.device)


# Frees that a capture forbade: (device, address). A finalizer may run at any point of a thread, so it takes no lock.
_deferred_frees: collections.deque[tuple[int, int]] = collections.deque()


def _free(ordinal: int, pointer: int) -> None:
    """Frees device memory. The last reference may be dropped in another library's thread, and during a capture."""
    try:
        with driver.device(ordinal).current():
            driver.free_now(pointer)
    except driver.ForkedChild:
        return  # the memory is the parent's
    except DriverError as error:
        if error.code in driver.CAPTURE_ERRORS:
            _deferred_frees.append((ordinal, pointer))
        elif error.code not in driver.LOST_CONTEXT_ERRORS:  # with a context goes its memory
            raise


def _free_deferred() -> None:
    """Repeats the frees that a capture forbade."""
    with contextlib.suppress(IndexError):  # another thread repeats them too
        for _ in range(len(_deferred_frees)):
            _free(*_deferred_frees.popleft())


class OutputArrays:
    """Device addresses of one call's operands, and its output arrays in the library of the caller.

    A context manager; enter it with the device's context current. Host operands are copied to the device, and host
    outputs back; the device copies are freed on exit. For JAX, `results` waits for the stream, because JAX frees its
    buffers on streams of its own. Operands whose memory may be reused earlier are kept alive (`lifetimes`).

    given_stream: the stream as the caller passed it; `stream` is its handle.
    """

    def __init__(self, library: str, gpu: driver.Device, stream: int, given_stream: object = None) -> None:
        self._library = library
        self._gpu = gpu
        self._stream = stream
        self._given_stream = given_stream
        self._is_complete = False  # whether the stream was waited for
        self._operands: list[Array] = []  # in device memory
        self._outputs: dict[str, Any] = {}
        self._device_copies: list[int] = []
        self._host_operands: list[np.ndarray[Any, Any]] = []  # kept alive until the stream has read them
        self._host_outputs: list[tuple[np.ndarray[Any, Any], int]] = []  # host array, address of its device copy
        self._packed: tuple[tuple[str, ...], DeviceArray] | None = None  # names of the slices, and their array
        self._caller_outputs: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []  # array, its dense copy
        self._framework = FRAMEWORKS.get(library)
        self._framework_stream: AbstractContextManager[Any] | None = None  # if the framework uses another stream

    def __enter__(self) -> OutputArrays:
        if self._framework is not None and self._framework.current_stream(self._gpu.ordinal) != self._stream:
            self._framework_stream = self._framework.use_stream(self._stream, self._gpu.ordinal)
            self._framework_stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._framework_stream is not None:
            self._framework_stream.__exit__(kind, error, trace)
        # After an error the driver may reject these calls too; the first error is the one to report.
        with contextlib.suppress(DriverError) if error else contextlib.nullcontext():
            if not self._is_complete:
                self._keep_operands()
        with contextlib.suppress(DriverError) if error else contextlib.nullcontext():
            for address in self._device_copies:
                driver.free(address, self._stream)

    def _keep_operands(self) -> None:
        """Keeps the arrays alive whose memory may be reused without a wait for the stream."""
        stream = self._stream or _LEGACY_STREAM
        foreign = [
            (array.library, array.source)
            for array in self._operands
            if array.stream is None or (array.stream or _LEGACY_STREAM) != stream
        ]
        lifetimes.keep(foreign, self._stream, self._given_stream, self._gpu)

    def operand(self, name: str, array: Array) -> int:
        """Returns the device address of an operand. Copies a host operand to the device."""
        if array.device is not None:
            self._operands.append(array)
            return array.pointer
        dense = np.ascontiguousarray(array.owner)
        copy = self._allocate_copy(name, dense)
        if dense.nbytes:
            self._host_operands.append(dense)
            driver.copy_to_device(copy, dense.ctypes.data, dense.nbytes, self._stream)
        return copy

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """Allocates an uninitialised output and returns its device address."""
        output: Any
        if self._framework is not None:
            output, address = self._framework.empty(shape, dtype, self._gpu.ordinal)
        elif self._library == "numpy":
            host = output = np.empty(shape, numpy_dtype(dtype))
            address = self._allocate_copy(name, host)
            self._host_outputs.append((host, address))
        else:
            output = DeviceArray(shape, dtype, self._gpu.ordinal, self._stream)
            address = output.pointer
        self._outputs[name] = output
        return address

    def use(self, name: str, array: Array) -> int:
        """Returns the device address of an output for which the caller passed an array; see `output_checks`."""
        self._outputs[name] = array.source
        if array.device is not None:
            self._operands.append(array)
            return array.pointer
        dense = np.ascontiguousarray(array.owner)  # copied to the device too: kernels may skip elements
        copy = self._allocate_copy(name, dense)
        if dense.nbytes:
            driver.copy_to_device(copy, dense.ctypes.data, dense.nbytes, self._stream)
        self._host_outputs.append((dense, copy))
        self._caller_outputs.append((array.owner, dense))
        return copy

    def allocate_packed(self, names: Sequence[str], shape: tuple[int, ...], dtype: str) -> dict[str, int]:
        """Allocates one array and returns the device address of each output, which is a slice [:, :, i] of it."""
        first = self.allocate("packed", shape, dtype)
        packed = self._outputs.pop("packed")
        if self._library == "jax":
            # JAX arrays have no views: `results` slices the array when the kernels are complete.
            self._packed = tuple(names), packed
        elif hasattr(packed, "__getitem__"):
            self._outputs |= {name: packed[:, :, i] for i, name in enumerate(names)}
        else:
            rule = "must be False for arrays of an unknown library, which may not support slices"
            raise NotSupported(refuse("packed", True, rule, "pass NumPy, CuPy, torch or JAX arrays, or leave it False"))
        slice_bytes = math.prod(shape[3:]) * numpy_dtype(dtype).itemsize
        return {name: first + i * slice_bytes for i, name in enumerate(names)}

    def results(self) -> dict[str, Any]:
        """Returns every output by name, as arrays of the caller's library."""
        for array, address in self._host_outputs:
            if array.nbytes:
                driver.copy_to_host(array.ctypes.data, address, array.nbytes, self._stream)
        if self._library in _WAITING:
            driver.synchronise(self._stream)
            self._is_complete = True
        for target, dense in self._caller_outputs:
            if not np.shares_memory(target, dense):
                np.copyto(target, dense)
        if self._library == "jax":
            return self._jax_results()
        return self._outputs

    def _jax_results(self) -> dict[str, Any]:
        from_dlpack = sys.modules["jax"].dlpack.from_dlpack
        results = {
            name: from_dlpack(output) if isinstance(output, DeviceArray) else output
            for name, output in self._outputs.items()
        }
        if self._packed is not None:
            names, array = self._packed
            packed = from_dlpack(array)
            results |= {name: packed[:, :, i] for i, name in enumerate(names)}
        return results

    def _allocate_copy(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Allocates device memory for a host array; 0 for an empty array."""
        if not array.nbytes:
            return 0
        self._device_copies.append(driver.allocate(array.nbytes, self._stream, f"the device copy of {name}"))
        return self._device_copies[-1]
