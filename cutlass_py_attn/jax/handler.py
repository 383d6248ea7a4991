"""XLA FFI handler of the custom call, in Python through ctypes, so that the package needs no C compiler.

native.py has another handler, in C: it launches a call after this one has loaded and launched it once.

XLA calls `_execute` with an XLA_FFI_CallFrame each time it launches the call on a stream. If XLA captures a CUDA
graph, it calls the handler once and replays the graph. The structs are those of XLA's C header
xla/ffi/api/c_api.h, API version 0. Later versions append fields only, so the offsets below stay valid. The handler
declares version 0.1.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.jax.payload import Payload, unpack
from cutlass_py_attn.runtime import driver, fill
from cutlass_py_attn.runtime.binding import Bound, bind

TARGET: Final = "cutlass_py_attn"
KEY, PAYLOAD, PHILOX, WORKSPACE = "key", "payload", "philox", "workspace"

_FRAME_WORDS: Final = ctypes.c_uint64 * 21  # the words of a call frame that are read here
_API_VERSION: Final = (0, 1)
_METADATA_VERSION, _METADATA_TRAITS = 24, 32  # byte offsets in XLA_FFI_Metadata
_GRAPH_COMPATIBLE: Final = 1  # every call launches the same kernels, so XLA may capture it in a CUDA graph
_ERROR_CREATE, _STREAM_GET = 48, 80  # byte offsets of function pointers in XLA_FFI_Api
_BUFFER_DATA: Final = 24  # byte offset in XLA_FFI_Buffer
_INTERNAL: Final = 13  # XLA_FFI_Error_Code

_FUNCTION: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_function: Final = functools.cache(_FUNCTION)
_word: Final = ctypes.c_uint64.from_address

_payloads: dict[tuple[int, int], BoundPayload] = {}
_payloads_lock = threading.Lock()


class _StreamArguments(ctypes.Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


class _ErrorArguments(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class BoundPayload:
    """A payload bound to one GPU. names: of the call's buffers, in order."""

    def __init__(self, payload: Payload, ordinal: int) -> None:
        self.problem = payload.problem
        self.names = (*payload.operands, *payload.results)
        self.bound: Bound = bind(payload.artifact, payload.plan, payload.problem, ordinal)

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Launches the kernels on the stream. addresses: of the buffers, in order."""
        pointers = dict(zip(self.names, addresses, strict=True))  # results behind operands
        workspace = pointers.pop(WORKSPACE, None)
        if PHILOX in pointers:
            start = pointers.pop(PHILOX)
            pointers |= {"philox_seed": start, "philox_offset": start + 8}
        if self.problem is not None and self.problem.has_ragged_rows:
            with self.bound.device.current():
                fill.fill(self.problem, pointers, stream)
        self.bound(pointers, stream, workspace=workspace)


def _execute(frame: int) -> int | None:
    """XLA_FFI_Handler for CUDA: returns None, or the address of an XLA_FFI_Error."""
    words = _FRAME_WORDS.from_address(frame)
    if words[1]:  # XLA passes an extension when it registers the handler, and asks for its metadata
        _describe(words[1])
        return None
    try:
        launch(frame)
    except Exception as error:  # no exception may reach the C caller
        return error_of(words[2], error)
    return None


def launch(frame: int) -> tuple[tuple[int, int], BoundPayload, list[int]]:
    """Launches the call of a frame. Returns its key and the GPU's ordinal, its payload, and its buffers' addresses."""
    words = _FRAME_WORDS.from_address(frame)
    stream = _stream(words[2], words[3])
    addresses = [_word(_word(words[9] + 8 * i).value + _BUFFER_DATA).value for i in range(words[7])]
    addresses += [_word(_word(words[14] + 8 * i).value + _BUFFER_DATA).value for i in range(words[12])]
    key = _word(_word(_word(words[20]).value + 8).value).value  # attributes are sorted by name
    key_and_ordinal = key, _ordinal(stream)
    call = _payloads.get(key_and_ordinal) or _load(key_and_ordinal, words)
    call(addresses, stream)
    return key_and_ordinal, call, addresses


def api_of(frame: int) -> int:
    """Returns the address of the XLA_FFI_Api of a frame."""
    address: int = _FRAME_WORDS.from_address(frame)[2]
    return address


def error_of(api: int, error: Exception) -> int:
    """Creates the XLA_FFI_Error of an exception and returns its address."""
    name = "" if isinstance(error, AttentionError) else f"{type(error).__name__}: "
    return _error(api, f"{TARGET}: {name}{error}")


def _refuse(frame: int) -> int | None:
    """XLA_FFI_Handler for the CPU platform: always returns an error."""
    words = _FRAME_WORDS.from_address(frame)
    if words[1]:
        _describe(words[1])
        return None
    return _error(
        words[2],
        f"{TARGET}: the operands are in host memory: must be on a CUDA device; move them there, or pass "
        'backend="reference", which computes on the CPU in NumPy float64',
    )


def _describe(extension: int) -> None:
    """Writes the XLA_FFI_Metadata of an XLA_FFI_Metadata_Extension."""
    metadata = _word(extension + 24).value
    version = (ctypes.c_int * 2).from_address(metadata + _METADATA_VERSION)
    version[0], version[1] = _API_VERSION
    ctypes.c_uint32.from_address(metadata + _METADATA_TRAITS).value = _GRAPH_COMPATIBLE


def _stream(api: int, context: int) -> int:
    """Returns the handle of the stream on which XLA runs the call."""
    arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, context, None)
    if _function(_word(api + _STREAM_GET).value)(ctypes.addressof(arguments)):
        raise RuntimeError("XLA has no stream for this call")
    return arguments.stream or 0


def _error(api: int, message: str) -> int:
    """Creates an XLA_FFI_Error and returns its address."""
    text = message.encode()
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _INTERNAL)
    error: int = _function(_word(api + _ERROR_CREATE).value)(ctypes.addressof(arguments))
    return error


def _ordinal(stream: int) -> int:
    """Returns the ordinal of the stream's device; the driver is asked only if there are several."""
    return driver.stream_ordinal(stream) if device_count() > 1 else 0


device_count: Final = functools.cache(driver.device_count)  # constant while the process lives


def _load(key_and_ordinal: tuple[int, int], words: Any) -> BoundPayload:
    """Binds the call's payload to the stream's GPU, once per payload and GPU."""
    with _payloads_lock:
        if key_and_ordinal not in _payloads:
            attributes = dict(_attributes(words))
            array = attributes[PAYLOAD]  # XLA_FFI_Array: type, size, data
            size, data = _word(array + 8).value, _word(array + 16).value
            payload = unpack(ctypes.string_at(data, size))
            _payloads[key_and_ordinal] = BoundPayload(payload, key_and_ordinal[1])
        return _payloads[key_and_ordinal]


def _attributes(words: Any) -> list[tuple[str, int]]:
    """Returns (name, address of the value) of every attribute, in order."""
    attributes = []
    for i in range(words[17]):
        span = _word(words[19] + 8 * i).value  # XLA_FFI_ByteSpan: data, length
        name = ctypes.string_at(_word(span).value, _word(span + 8).value).decode()
        attributes.append((name, _word(words[20] + 8 * i).value))
    return attributes


# Never freed: XLA calls them as long as the process lives.
_handlers: Final[dict[str, Callable[[int], int | None]]] = {"CUDA": _FUNCTION(_execute), "cpu": _FUNCTION(_refuse)}


def register(register_target: Callable[..., None], capsule: Callable[[Any], Any], native: Any = None) -> None:
    """Registers the handlers.

    register_target: jax.ffi.register_ffi_target. capsule: jax.ffi.pycapsule. native: the C function that is the handler
    for CUDA; None for the one in Python.
    """
    for platform, handler in _handlers.items():
        chosen = native if native is not None and platform == "CUDA" else handler
        register_target(TARGET, capsule(chosen), platform=platform)
