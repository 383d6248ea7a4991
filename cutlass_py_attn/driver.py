"""Driver: the few CUDA driver calls this package makes, through cuda-python, each failure told in full.

Nothing here loads cuda-python before the first call. Addresses, streams, events and kernels are plain ints.
Streams are `CUstream` handles; 0 is the legacy default stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.errors import DoesNotFit, DriverError, NoDevice, NotSupported

_SHOWN_LENGTH: Final = 64

# What the driver's sentence leaves open, by CUresult.
_HINTS: Final = {
    2: "free memory on the device or use a smaller problem",
    201: "the stream belongs to no live context of this device",
    209: "the cubin was built for another architecture",
    400: "a stream, event or kernel handle is closed or belongs to another device",
}


@functools.cache
def bindings() -> Any:
    """The module cuda.bindings.driver; NoDevice when cuda-python is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoDevice(f"cuda-python is not installed ({error}): install cuda-bindings to launch kernels") from error
    return driver


@functools.cache
def initialise() -> None:
    """cuInit, once; NoDevice in one sentence when this machine has no usable driver or GPU."""
    cuda = bindings()
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        (code,) = cuda.cuInit(0)
    except DynamicLibNotFoundError as error:
        raise NoDevice("there is no NVIDIA driver (libcuda) on this machine: install one") from error
    if int(code):
        raise NoDevice(f"there is no usable GPU on this machine: cuInit(0): {_sentence(int(code))}")


def call(name: str, *arguments: Any, purpose: str = "") -> Any:
    """Driver function `name` of these arguments: None, its one result, or a tuple of its results.

    DriverError carries NVIDIA's name and sentence, the call with our arguments, and `purpose`.
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
    """The bindings' function of that name, looked up once."""
    initialise()
    return getattr(bindings(), name)


def put(purpose: str, name: str, *arguments: Any) -> None:
    """`call` for a function without results, with less in its way: what a launch needs goes through here."""
    (code,) = function(name)(*arguments)
    if code:
        raise failure(name, arguments, int(code), purpose)


def _invoke(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    found = function(name)
    try:
        results: tuple[Any, ...] = found(*arguments)
    except RuntimeError as error:  # the bindings look functions up on first use
        raise DriverError(f"{name}({_shown(arguments)}): {error}; this driver lacks it: update it") from error
    return results


def failure(name: str, arguments: tuple[Any, ...], code: int, purpose: str) -> DriverError:
    """The error of a driver function that returned `code`."""
    reason = f" for {purpose}" if purpose else ""
    hint = f"; {_HINTS[code]}" if code in _HINTS else ""
    return DriverError(f"{name}({_shown(arguments)}){reason}: {_sentence(code)}{hint}", code)


def _sentence(code: int) -> str:
    """NVIDIA's name and sentence of a CUresult."""
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


def _shown(arguments: tuple[Any, ...]) -> str:
    return ", ".join(_shown_one(argument) for argument in arguments)


def _shown_one(argument: Any) -> str:
    if isinstance(argument, bytes) and len(argument) > _SHOWN_LENGTH:
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

    def current(self) -> _Current:
        """A context manager: the primary context is current; the one that was current comes back afterwards.

        Where none was current ours stays: other libraries set their own, and the next call is cheaper.
        """
        return _Current(self.context)


class _Current:
    """What `Device.current` gives: a class, and no generator, for it is in the way of every call."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: int) -> None:
        self._context = context

    def __enter__(self) -> None:
        code, before = function("cuCtxGetCurrent")()
        if code:
            raise failure("cuCtxGetCurrent", (), int(code), "")
        self._before = int(before)
        if self._before != self._context:
            call("cuCtxSetCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        if self._before not in (0, self._context):
            call("cuCtxSetCurrent", self._before)


def device_count() -> int:
    """Number of visible GPUs; NoDevice when there is no driver."""
    return int(call("cuDeviceGetCount"))


@functools.cache
def device(ordinal: int) -> Device:
    """The GPU of that ordinal, its primary context retained; NoDevice when there is none."""
    count = device_count()
    if not 0 <= ordinal < count:
        raise NoDevice(f"device = {ordinal}: this machine has {count} visible GPUs, numbered from 0")
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


def ordinal_of(stream: int) -> int:
    """Ordinal of the device whose primary context this stream, not a default one, belongs to."""
    context = int(call("cuStreamGetCtx", stream))
    for ordinal in range(device_count()):
        if device(ordinal).context == context:
            return ordinal
    raise DriverError(f"stream {stream:#x} belongs to no device's primary context; use a stream of the primary context")


def current_ordinal() -> int:
    """Ordinal of the device whose context is current in this thread; 0 when none is."""
    return int(call("cuCtxGetDevice")) if int(call("cuCtxGetCurrent")) else 0


def driver_version() -> tuple[int, int]:
    """(major, minor) of the newest CUDA that the driver serves."""
    version = int(call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def load_library(cubin: bytes) -> int:
    """Load a cubin, for good: unloading could take the code from under a pending launch."""
    return int(call("cuLibraryLoadData", cubin, None, None, 0, None, None, 0))


@contextmanager
def outside_capture() -> Iterator[None]:
    """For loading kernels while this thread records a CUDA graph: what is called inside is not part of it."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def get_kernel(library: int, symbol: str) -> int:
    """The kernel of that symbol; DriverError names it when the cubin has none."""
    return int(call("cuLibraryGetKernel", library, symbol.encode()))


def loaded(kernel: int) -> int:
    """The kernel as a function of the current context, its code on the device: else the first launch loads it."""
    return int(call("cuKernelGetFunction", kernel))


def parameter_sizes(kernel: int, count: int) -> tuple[int, ...]:
    """Bytes of the first `count` parameters, as the driver read them from the cubin; fewer when it has fewer."""
    cuda = bindings()
    sizes: list[int] = []
    for index in range(count):  # asking for one too many would be reported as an error by memory checkers
        arguments = (kernel, index)
        code, *found = _invoke("cuKernelGetParamInfo", arguments)
        if int(code) == int(cuda.CUresult.CUDA_ERROR_INVALID_VALUE):
            break
        if int(code):
            raise failure("cuKernelGetParamInfo", arguments, int(code), "")
        sizes.append(int(found[1]))
    return tuple(sizes)


def allow_shared_memory(kernel: int, gpu: Device, dynamic_bytes: int, static_bytes: int) -> None:
    """Let `kernel` take this much dynamic shared memory a block; DoesNotFit when the GPU has less."""
    limit = gpu.shared_memory_per_block
    if dynamic_bytes + static_bytes > limit:
        raise DoesNotFit(
            f"shared memory = {dynamic_bytes + static_bytes} bytes a block: {gpu.name} allows {limit}; "
            "plan for its architecture"
        )
    kind = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call("cuKernelSetAttribute", kind, dynamic_bytes, kernel, gpu.handle)


def allocate(size: int, stream: int, purpose: str) -> int:
    """`size` > 0 bytes from the pool of the stream's device, in stream order."""
    code, address = function("cuMemAllocAsync")(size, stream)
    if code:
        raise failure("cuMemAllocAsync", (size, stream), int(code), f"{purpose} ({size} bytes)")
    return int(address)


def free(address: int, stream: int) -> None:
    """Give stream-ordered memory back once the stream's earlier work is done."""
    put("", "cuMemFreeAsync", address, stream)


def allocate_now(size: int, purpose: str) -> int:
    """`size` > 0 bytes that outlive every stream; `free_now` waits for all use of them."""
    return int(call("cuMemAlloc", size, purpose=f"{purpose} ({size} bytes)"))


def free_now(address: int) -> None:
    """Free memory of `allocate_now`."""
    call("cuMemFree", address)


def clear(address: int, size: int, stream: int) -> None:
    """Set `size` bytes to zero, in stream order."""
    put("", "cuMemsetD8Async", address, 0, size, stream)


def clear_rows(address: int, pitch: int, width: int, height: int, stream: int) -> None:
    """Set `width` bytes to zero in each of `height` rows that lie `pitch` bytes apart, in stream order."""
    if height == 1:
        clear(address, width, stream)
    else:
        call("cuMemsetD2D8Async", address, pitch, 0, width, height, stream)


def fill_words(address: int, pitch: int, word: int, width: int, height: int, stream: int) -> None:
    """Set `width` 32-bit words in each of `height` rows that lie `pitch` bytes apart, in stream order."""
    call("cuMemsetD2D32Async", address, pitch, word, width, height, stream)


def copy_to_device(address: int, host: int, size: int, stream: int) -> None:
    """Copy `size` bytes from the host, in stream order; they must live until the stream has read them."""
    call("cuMemcpyHtoDAsync", address, host, size, stream)


def copy_to_host(host: int, address: int, size: int, stream: int) -> None:
    """Copy `size` bytes to the host, in stream order; synchronise before reading them."""
    call("cuMemcpyDtoHAsync", host, address, size, stream)


def synchronise(stream: int) -> None:
    """Wait until the stream has done everything; a fault of an earlier kernel comes up here."""
    call("cuStreamSynchronize", stream)


def new_stream() -> int:
    """A stream that does not wait for the legacy default stream."""
    return int(call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)))


def destroy_stream(stream: int) -> None:
    """Destroy a stream of `new_stream`; its pending work still completes."""
    call("cuStreamDestroy", stream)


def wait_for(producer: int, consumer: int) -> None:
    """Work put on `consumer` from now on starts after the work that `producer` holds now."""
    if producer == consumer:
        return
    event = int(call("cuEventCreate", int(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING)))
    try:
        call("cuEventRecord", event, producer)
        call("cuStreamWaitEvent", consumer, event, 0)
    finally:
        call("cuEventDestroy", event)


class Event:
    """A point in a stream that can be timed against another; destroyed with the object."""

    def __init__(self) -> None:
        self.handle = int(call("cuEventCreate", int(bindings().CUevent_flags.CU_EVENT_DEFAULT)))

    def record(self, stream: int) -> None:
        """Put the event behind the stream's work so far."""
        call("cuEventRecord", self.handle, stream)

    def milliseconds_since(self, start: Event) -> float:
        """Time from `start` to this event; waits for this event."""
        call("cuEventSynchronize", self.handle)
        return float(call("cuEventElapsedTime", start.handle, self.handle))

    def __del__(self) -> None:
        if handle := getattr(self, "handle", 0):
            call("cuEventDestroy", handle)


def stream_handle(stream: object) -> int:
    """The CUstream of `stream` as an int; NotSupported when it is no stream.

    None is the legacy default stream (0). Else an int handle, an object with `__cuda_stream__`
    (cuda.core), or one with the handle in `ptr` (CuPy), `cuda_stream` (torch) or `handle` (Numba).
    """
    handle = getattr(stream, "cuda_stream", stream)  # torch's, and a number, without detours
    if type(handle) is int and handle >= 0:
        return handle
    found: Any = 0 if stream is None else stream
    if hasattr(found, "__cuda_stream__"):
        protocol = found.__cuda_stream__
        try:
            found = (protocol() if callable(protocol) else protocol)[1]
        except Exception as error:  # a closed stream has no handle to give
            kind = type(stream).__name__
            raise NotSupported(
                f"stream of type {kind}: {error}; pass an open stream, or None for the default"
            ) from error
    else:
        names = ("ptr", "cuda_stream", "handle")
        found = next((getattr(found, name) for name in names if hasattr(found, name)), found)
    if isinstance(found, ctypes.c_void_p):  # Numba's handle; NULL reads as None
        found = found.value or 0
    elif hasattr(found, "getPtr"):  # the bindings' CUstream, Numba's handle where it uses them
        found = int(found)
    if hasattr(found, "__index__") and not isinstance(found, bool) and int(found) >= 0:
        return int(found)
    raise NotSupported(
        f"stream = {stream!r}: must be None (the default stream), a CUstream handle as int, or an object "
        "with __cuda_stream__, ptr, cuda_stream or handle"
    )
