"""CUDA driver calls through cuda-python; each failure raises an error with the call and its arguments.

cuda-python is imported by the first call. Addresses, streams, events and kernels are plain ints. A stream is a
`CUstream` handle; 0 is the legacy default stream.

Timing uses the events of cuda.core. All other calls go to cuda.bindings.driver, for three reasons:
- Importing cuda.core takes 0.16 s more than importing the bindings, also in processes that only launch kernels.
- A cuda.core stream asks the driver for its context when it is created, so each launch would pay for it.
- cuda.core's errors name neither the function nor its arguments, nor its CUresult as a number.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.errors import DoesNotFit, DriverError, NoDevice, NotSupported
from cutlass_py_attn.problem.scalars import digits, integer_of
from cutlass_py_attn.refusals import refuse

CAPTURE_ERRORS: Final = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to ..._WRONG_THREAD
LOST_CONTEXT_ERRORS: Final = (4, 709)  # CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_CONTEXT_IS_DESTROYED
_NOT_INITIALIZED: Final = 3  # what cuInit returns in a forked child of a process that has used CUDA
_MAX_SHOWN_BYTES: Final = 64
_LAST_HANDLE: Final = 2**64 - 1

# The newest function that kernels are bound with, cuKernelGetParamInfo, came with CUDA 12.4. A driver of that version
# also runs the cubins: those of one CUDA major version run on every driver of it that knows the GPU.
MINIMUM_CUDA: Final = (12, 4)
MINIMUM_DRIVER: Final = "550.54.14"  # the first driver for Linux with that version

# Advice that NVIDIA's error text does not give, by CUresult.
_HINTS: Final = {
    2: "free memory on the device or use a smaller problem",
    200: f"the cubin is damaged, or the NVIDIA driver is too old for it, which needs {MINIMUM_DRIVER} or later",
    201: "the stream belongs to no live context of this device",
    209: "the cubin was built for another architecture",
    400: "a stream, event or kernel handle is closed or belongs to another device",
    500: "the cubin is of other kernels; compile or build them again",
    709: "the device's context was destroyed or reset, with every array and kernel in it; start a new process",
}

is_forked_child = False  # whether this process was forked from one that had used the driver


_FORKED: Final = (
    "this process was forked after its parent had used CUDA, which does not work in a forked child; start it with "
    "multiprocessing.get_context('spawn'), or fork before the first call"
)


class OldDriver(NoDevice):
    """The NVIDIA driver is older than MINIMUM_CUDA."""


class ForkedChild(NoDevice):
    """This process was forked from one that had used CUDA, which CUDA does not support."""

    def __init__(self, message: str = _FORKED) -> None:  # pickle passes the message
        super().__init__(message)


@functools.cache
def bindings() -> Any:
    """Returns the module cuda.bindings.driver; raises NoDevice when cuda-python is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoDevice(f"cuda-python is not installed ({error}): install cuda-bindings to launch kernels") from error
    return driver


@functools.cache
def initialise() -> None:
    """Calls cuInit once; raises NoDevice when this machine has no usable driver or GPU, or in a forked child."""
    if is_forked_child:
        raise ForkedChild
    cuda = bindings()
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        (code,) = cuda.cuInit(0)
    except DynamicLibNotFoundError as error:
        raise NoDevice("there is no NVIDIA driver (libcuda) on this machine: install one") from error
    if int(code) == _NOT_INITIALIZED:
        raise ForkedChild
    if int(code):
        raise NoDevice(f"there is no usable GPU on this machine: cuInit(0): {_error_text(int(code))}")
    _watch_forks()
    code, version = cuda.cuDriverGetVersion()
    if not int(code) and _major_minor(version) < MINIMUM_CUDA:
        raise OldDriver(
            "this machine's NVIDIA driver is for CUDA {}.{}: must be for CUDA {}.{} or later; ".format(
                *_major_minor(version), *MINIMUM_CUDA
            )
            + f"update it to version {MINIMUM_DRIVER} or later"
        )


@functools.cache
def _watch_forks() -> None:
    """Makes later forked children refuse the driver. To ask for the process in each call would cost a system call."""
    os.register_at_fork(after_in_child=_refuse_in_forked_child)


def _refuse_in_forked_child() -> None:
    global is_forked_child
    is_forked_child = True
    for cached in (initialise, function, device):  # the next use of each raises ForkedChild
        cached.cache_clear()


def call(name: str, *arguments: Any, purpose: str = "") -> Any:
    """Calls driver function `name`. Returns None, its only result, or a tuple of its results.

    DriverError states NVIDIA's error name and text, the call with its arguments, and `purpose`.
    """
    initialise()
    code, *results = _invoke(name, arguments)
    if code:
        raise failure(name, arguments, int(code), purpose)
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


@functools.cache
def function(name: str) -> Any:
    """Returns the bindings' function of that name; the lookup is cached."""
    initialise()
    return getattr(bindings(), name)


def call_without_result(purpose: str, name: str, *arguments: Any) -> None:
    """Calls a driver function that has no results. Costs less host time than `call`; launches use it."""
    (code,) = function(name)(*arguments)
    if code:
        raise failure(name, arguments, int(code), purpose)


def _invoke(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    driver_function = function(name)
    try:
        results: tuple[Any, ...] = driver_function(*arguments)
    except RuntimeError as error:  # the bindings look a function up when it is first called
        shown = _format_arguments(arguments)
        remedy = f"update it to version {MINIMUM_DRIVER} or later"
        raise DriverError(f"{name}({shown}): {error}; this NVIDIA driver does not have it; {remedy}") from error
    return results


def failure(name: str, arguments: tuple[Any, ...], code: int, purpose: str) -> DriverError:
    """Creates the error for a driver function that returned `code`."""
    reason = f" for {purpose}" if purpose else ""
    hint = f"; {_HINTS[code]}" if code in _HINTS else ""
    return DriverError(f"{name}({_format_arguments(arguments)}){reason}: {_error_text(code)}{hint}", code)


def _error_text(code: int) -> str:
    """Returns NVIDIA's name and text of a CUresult."""
    cuda = bindings()
    try:
        result = cuda.CUresult(code)
    except ValueError:
        return f"CUresult {code}, which is newer than this cuda-python"
    words = [
        text.decode()
        for error, text in (cuda.cuGetErrorName(result), cuda.cuGetErrorString(result))
        if not int(error) and text
    ]
    return ": ".join(words) or f"CUresult {code}"


def _format_arguments(arguments: tuple[Any, ...]) -> str:
    return ", ".join(_format_argument(argument) for argument in arguments)


def _format_argument(argument: Any) -> str:
    if isinstance(argument, bytes) and len(argument) > _MAX_SHOWN_BYTES:
        return f"{len(argument)} bytes"
    if hasattr(argument, "gridDimX"):
        grid = (argument.gridDimX, argument.gridDimY, argument.gridDimZ)
        block = (argument.blockDimX, argument.blockDimY, argument.blockDimZ)
        stream = hex(argument.hStream or 0)
        return f"grid {grid}, block {block}, shared memory {argument.sharedMemBytes}, stream {stream}"
    if hasattr(argument, "name"):
        return str(argument.name)
    if argument is None or isinstance(argument, (bytes, list, float)):
        return repr(argument)
    return hex(int(argument)) if int(argument) > 2**32 else str(int(argument))


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its primary context. `shared_memory_per_block` is the opt-in limit in bytes."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block: int
    handle: int
    context: int

    def current(self) -> _CurrentContext:
        """Context manager that makes the primary context current and restores the previous context on exit.

        If no context was current, none is current afterwards: `current_ordinal` decides where NumPy arrays go.
        """
        return _CurrentContext(self.context)


class _CurrentContext:
    """Result of `Device.current`. A class costs less than a generator, and every launch enters it."""

    __slots__ = ("_context", "_previous")

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        code, previous = function("cuCtxGetCurrent")()
        if code:
            raise failure("cuCtxGetCurrent", (), int(code), "")
        self._previous = int(previous)
        if self._previous != self._context:
            call("cuCtxSetCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        if self._previous != self._context:
            call("cuCtxSetCurrent", self._previous)


def device_count() -> int:
    """Returns the number of visible GPUs; raises NoDevice when there is no driver."""
    return int(call("cuDeviceGetCount"))


@functools.cache
def device(ordinal: int) -> Device:
    """Returns the GPU with this ordinal and retains its primary context; raises NoDevice when there is none."""
    count = device_count()
    if not 0 <= ordinal < count:
        visible = "1 visible GPU" if count == 1 else f"{count} visible GPUs"
        raise NoDevice(f"device = {digits(ordinal)}: this machine has {visible}, numbered from 0; pass one of them")
    handle = int(call("cuDeviceGet", ordinal))
    kinds = bindings().CUdevice_attribute

    def attribute(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), handle))

    return Device(
        ordinal=ordinal,
        name=call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        shared_memory_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        handle=handle,
        context=int(call("cuDevicePrimaryCtxRetain", handle)),
    )


def checked_ordinal(device: object) -> int:
    """Returns a caller's device as an int; NotSupported if it is no ordinal."""
    ordinal = integer_of(device)
    if ordinal is None or ordinal < 0:
        raise NotSupported(refuse("device", device, "must be the ordinal of a GPU, an int of at least 0", "pass it"))
    return ordinal


def stream_ordinal(stream: int) -> int:
    """Returns the ordinal of the device whose primary context owns `stream`, which is not a default stream."""
    context = int(call("cuStreamGetCtx", stream))
    for ordinal in range(device_count()):
        if device(ordinal).context == context:
            return ordinal
    raise DriverError(
        f"stream {stream:#x} belongs to no device's primary context: must belong to one; create it in that context"
    )


def current_ordinal() -> int:
    """Returns the ordinal of the device whose context is current in this thread; 0 when none is."""
    return int(call("cuCtxGetDevice")) if int(call("cuCtxGetCurrent")) else 0


def driver_version() -> tuple[int, int]:
    """Returns (major, minor) of the newest CUDA version that the driver supports."""
    return _major_minor(call("cuDriverGetVersion"))


def _major_minor(version: int) -> tuple[int, int]:
    """Returns (major, minor) of a version as cuDriverGetVersion returns it."""
    return int(version) // 1000, int(version) % 1000 // 10


def load_library(cubin: bytes, purpose: str = "") -> int:
    """Loads a cubin and returns its library. Never unloaded, because a pending launch may still need the code."""
    return int(call("cuLibraryLoadData", cubin, None, None, 0, None, None, 0, purpose=purpose))


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Context manager in which this thread may load kernels, allocate and free while a CUDA graph is captured.

    Without it such a call fails and invalidates the capture, that of another thread too if its mode is global.
    """
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", previous)


def get_kernel(library: int, symbol: str, purpose: str = "") -> int:
    """Returns the kernel with this symbol; DriverError names the symbol when the cubin does not have it."""
    return int(call("cuLibraryGetKernel", library, symbol.encode(), purpose=purpose))


def load_function(kernel: int, purpose: str = "") -> int:
    """Returns the kernel as a function of the current context. Loads its code now, not at the first launch."""
    return int(call("cuKernelGetFunction", kernel, purpose=purpose))


def parameter_sizes(kernel: int, count: int, purpose: str = "") -> tuple[int, ...]:
    """Returns the sizes (bytes) of the first `count` parameters, or of all if the kernel has fewer.

    The driver read the sizes from the cubin.
    """
    cuda = bindings()
    sizes: list[int] = []
    for index in range(count):  # memory checkers report a query beyond the last parameter as an error
        arguments = (kernel, index)
        code, *results = _invoke("cuKernelGetParamInfo", arguments)
        if int(code) == int(cuda.CUresult.CUDA_ERROR_INVALID_VALUE):
            break
        if int(code):
            raise failure("cuKernelGetParamInfo", arguments, int(code), purpose)
        sizes.append(int(results[1]))
    return tuple(sizes)


def allow_shared_memory(kernel: int, gpu: Device, dynamic_bytes: int, static_bytes: int, purpose: str = "") -> None:
    """Raises the kernel's limit of dynamic shared memory per block; raises DoesNotFit when the GPU has less."""
    limit = gpu.shared_memory_per_block
    if dynamic_bytes + static_bytes > limit:
        raise DoesNotFit(
            f"shared memory = {dynamic_bytes + static_bytes} bytes per block: {gpu.name} allows {limit}; "
            "plan for its architecture"
        )
    kind = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call("cuKernelSetAttribute", kind, dynamic_bytes, kernel, gpu.handle, purpose=purpose)


def allocate(size: int, stream: int, purpose: str) -> int:
    """Allocates `size` > 0 bytes from the memory pool of the stream's device, in stream order."""
    code, address = function("cuMemAllocAsync")(size, stream)
    if code:
        raise failure("cuMemAllocAsync", (size, stream), int(code), f"{purpose} ({size} bytes)")
    return int(address)


def free(address: int, stream: int) -> None:
    """Frees memory of `allocate` in stream order."""
    call_without_result("", "cuMemFreeAsync", address, stream)


def allocate_now(size: int, purpose: str) -> int:
    """Allocates `size` > 0 bytes that belong to no stream; `free_now` waits for all work that uses them."""
    with relaxed_capture_mode():
        return int(call("cuMemAlloc", size, purpose=f"{purpose} ({size} bytes)"))


def free_now(address: int) -> None:
    """Frees memory of `allocate_now`, also while a CUDA graph is captured."""
    with relaxed_capture_mode():
        call("cuMemFree", address)


def memset_zero(address: int, size: int, stream: int) -> None:
    """Sets `size` bytes to zero, in stream order."""
    call_without_result("", "cuMemsetD8Async", address, 0, size, stream)


def memset_zero_rows(address: int, pitch: int, width: int, height: int, stream: int) -> None:
    """Sets `width` bytes to zero in each of `height` rows at a distance of `pitch` bytes, in stream order."""
    if height == 1:
        memset_zero(address, width, stream)
    else:
        call("cuMemsetD2D8Async", address, pitch, 0, width, height, stream)


def memset_words(address: int, pitch: int, word: int, width: int, height: int, stream: int) -> None:
    """Sets `width` 32-bit words in each of `height` rows at a distance of `pitch` bytes, in stream order."""
    call("cuMemsetD2D32Async", address, pitch, word, width, height, stream)


def copy_to_device(address: int, host: int, size: int, stream: int) -> None:
    """Copies `size` bytes from the host, in stream order. Host memory must stay valid until then."""
    call("cuMemcpyHtoDAsync", address, host, size, stream)


def copy_to_host(host: int, address: int, size: int, stream: int) -> None:
    """Copies `size` bytes to the host, in stream order; synchronise before reading them."""
    call("cuMemcpyDtoHAsync", host, address, size, stream)


def synchronise(stream: int) -> None:
    """Waits until all work on the stream is complete; reports the fault of an earlier kernel."""
    call("cuStreamSynchronize", stream)


def create_stream() -> int:
    """Creates a stream that does not synchronise with the legacy default stream."""
    return int(call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)))


def destroy_stream(stream: int) -> None:
    """Destroys a stream of `create_stream`; its pending work still completes."""
    call("cuStreamDestroy", stream)


def record_event(stream: int) -> int:
    """Returns a new event after all work that is on the stream now; `destroy_event` destroys it."""
    event = int(call("cuEventCreate", int(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING)))
    try:
        call("cuEventRecord", event, stream)
    except DriverError:
        call("cuEventDestroy", event)
        raise
    return event


def has_passed(event: int) -> bool:
    """Returns whether all work before the event is complete, or the device has failed; other calls report a failure.

    Allowed while a stream is captured, but not for an event on that stream.
    """
    with relaxed_capture_mode():
        (code,) = function("cuEventQuery")(event)
    return int(code) != int(bindings().CUresult.CUDA_ERROR_NOT_READY)


def destroy_event(event: int) -> None:
    """Destroys an event of `record_event`."""
    call("cuEventDestroy", event)


def is_capturing(stream: int) -> bool:
    """Returns whether the stream is captured, or is the legacy stream while a capture forbids its use."""
    code, status = function("cuStreamIsCapturing")(stream)
    return int(code) in CAPTURE_ERRORS if code else bool(int(status))


def order_streams(producer: int, consumer: int) -> None:
    """Makes later work on stream `consumer` wait for all work that is on stream `producer` now."""
    if producer == consumer:
        return
    event = int(call("cuEventCreate", int(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING)))
    try:
        call("cuEventRecord", event, producer)
        call("cuStreamWaitEvent", consumer, event, 0)
    finally:
        call("cuEventDestroy", event)


class StreamTimer:
    """Times work on a stream: call `start`, launch the work, call `stop`, then read `milliseconds`.

    Both events are created before the work, so that no allocation delays the second record.
    """

    def __init__(self, stream: int) -> None:
        initialise()
        core = importlib.import_module("cuda.core")
        options = core.EventOptions(timing_enabled=True)
        with _core_errors("creating two events"):
            self._stream = core.Stream.from_handle(stream)
            self._start, self._stop = (self._stream.record(options=options) for _ in range(2))

    def start(self) -> None:
        """Records the first event on the stream."""
        with _core_errors("recording an event"):
            self._stream.record(self._start)

    def stop(self) -> None:
        """Records the second event on the stream."""
        with _core_errors("recording an event"):
            self._stream.record(self._stop)

    def milliseconds(self) -> float:
        """Waits for the second event and returns the time between the two (ms)."""
        with _core_errors("timing between two events"):
            self._stop.sync()
            return float(self._stop - self._start)


@contextmanager
def _core_errors(purpose: str) -> Iterator[None]:
    """Raises DriverError in place of cuda.core's errors."""
    try:
        yield
    except Exception as error:  # cuda.core has no public base class of its errors
        raise DriverError(f"cuda.core, {purpose}: {error}") from error


def stream_handle(stream: object) -> int:
    """Returns the CUstream handle of `stream` as an int; raises NotSupported when `stream` is not a stream.

    stream: None for the legacy default stream (0), an int handle, an object with `__cuda_stream__` (cuda.core), or
        one with the handle in `ptr` (CuPy), `cuda_stream` (torch) or `handle` (Numba).
    """
    try:
        handle: Any = getattr(stream, "cuda_stream", stream)  # fast path for torch streams and ints
        if type(handle) is int and 0 <= handle <= _LAST_HANDLE:
            return handle
        handle = 0 if stream is None else stream
        has_protocol = hasattr(handle, "__cuda_stream__")
    except Exception as error:  # an attribute that raises whatever it likes
        raise NotSupported(refuse("stream", stream, f"must be a stream ({error})", "pass one, or None")) from error
    if has_protocol:
        protocol = handle.__cuda_stream__
        try:
            handle = (protocol() if callable(protocol) else protocol)[1]
        except Exception as error:  # a closed stream has no handle
            rule = f"must be an open stream ({error})"
            raise NotSupported(refuse("stream", stream, rule, "pass one, or None for the default")) from error
    else:
        names = ("ptr", "cuda_stream", "handle")
        handle = next((getattr(handle, name) for name in names if hasattr(handle, name)), handle)
    if isinstance(handle, ctypes.c_void_p):  # Numba's handle; NULL reads as None
        handle = handle.value or 0
    elif hasattr(handle, "getPtr"):  # the bindings' CUstream, Numba's handle where it uses them
        handle = int(handle)
    number = integer_of(handle)
    if number is not None and 0 <= number <= _LAST_HANDLE:
        return number
    rule = (
        "must be None (the default stream), a CUstream handle as int, or an object with __cuda_stream__, ptr, "
        "cuda_stream or handle"
    )
    raise NotSupported(refuse("stream", stream, rule, "pass one of them"))
