"""Handler: XLA's side of the custom call, in Python through ctypes, so that nothing has to be compiled to use it.

XLA calls `_execute` with an XLA_FFI_CallFrame each time it puts the call on a stream, or once where it records a
CUDA graph and replays that. The structs are those of XLA's C header xla/ffi/api/c_api.h, API version 0; they only
ever grow at their ends, so the offsets below hold for every later version, and 0.1 is what we declare to speak.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn import driver, fill
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.jax.payload import Payload, unpack
from cutlass_py_attn.launch import Bound, bind

TARGET: Final = "cutlass_py_attn"
KEY, PAYLOAD, PHILOX, WORKSPACE = "key", "payload", "philox", "workspace"

_WORDS: Final = ctypes.c_uint64 * 21  # of a call frame: all that is read here
_SPEAKS: Final = (0, 1)  # the API version
_METADATA_VERSION, _METADATA_TRAITS = 24, 32  # byte offsets in XLA_FFI_Metadata
_GRAPH_COMPATIBLE: Final = 1  # every call puts the same kernels on the stream: may be recorded into a CUDA graph
_ERROR_CREATE, _STREAM_GET = 48, 80  # byte offsets of function pointers in XLA_FFI_Api
_BUFFER_DATA: Final = 24  # byte offset in XLA_FFI_Buffer
_INTERNAL: Final = 13  # XLA_FFI_Error_Code

_FUNCTION: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_function: Final = functools.cache(_FUNCTION)
_word: Final = ctypes.c_uint64.from_address

_ready: dict[tuple[int, int], _Ready] = {}
_ready_lock = threading.Lock()


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


class _Ready:
    """A payload bound to one GPU, and the names of its buffers."""

    def __init__(self, payload: Payload, ordinal: int) -> None:
        self.problem = payload.problem
        self.names = (*payload.operands, *payload.results)
        with driver.outside_capture():
            self.bound: Bound = bind(payload.artifact, payload.plan, payload.problem, ordinal)

    def __call__(self, addresses: list[int], stream: int) -> None:
        """Put the kernels on the stream."""
        pointers = dict(zip(self.names, addresses, strict=True))
        workspace = pointers.pop(WORKSPACE, None)
        if PHILOX in pointers:
            start = pointers.pop(PHILOX)
            pointers |= {"philox_seed": start, "philox_offset": start + 8}
        if self.problem.sequences is not None:
            with self.bound.device.current():
                fill.fill(self.problem, pointers, stream)
        self.bound(pointers, stream, workspace=workspace)


def _execute(frame: int) -> int | None:
    """XLA_FFI_Handler: None when all went well, else an XLA_FFI_Error."""
    words = _WORDS.from_address(frame)
    if words[1]:  # an extension comes when the handler is registered, and asks what it is
        _describe(words[1])
        return None
    try:
        stream = _stream(words[2], words[3])
        addresses = [_word(_word(words[9] + 8 * i).value + _BUFFER_DATA).value for i in range(words[7])]
        addresses += [_word(_word(words[14] + 8 * i).value + _BUFFER_DATA).value for i in range(words[12])]
        key = _word(_word(_word(words[20]).value + 8).value).value  # attributes are sorted by name
        place = key, _ordinal(stream)
        call = _ready.get(place) or _load(place, words)
        call(addresses, stream)
    except Exception as error:  # nothing may pass through C
        name = "" if isinstance(error, AttentionError) else f"{type(error).__name__}: "
        return _error(words[2], f"{TARGET}: {name}{error}")
    return None


def _refuse(frame: int) -> int | None:
    """The handler where there is no GPU to run on."""
    words = _WORDS.from_address(frame)
    if words[1]:
        _describe(words[1])
        return None
    return _error(
        words[2],
        f"{TARGET}: the operands are in host memory: must be on a CUDA device; move them there, or pass "
        'backend="reference", which computes on the CPU in NumPy float64',
    )


def _describe(extension: int) -> None:
    """Fill the XLA_FFI_Metadata behind an XLA_FFI_Metadata_Extension."""
    metadata = _word(extension + 24).value
    version = (ctypes.c_int * 2).from_address(metadata + _METADATA_VERSION)
    version[0], version[1] = _SPEAKS
    ctypes.c_uint32.from_address(metadata + _METADATA_TRAITS).value = _GRAPH_COMPATIBLE


def _stream(api: int, context: int) -> int:
    arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, context, None)
    if _function(_word(api + _STREAM_GET).value)(ctypes.addressof(arguments)):
        raise RuntimeError("XLA has no stream for this call")
    return arguments.stream or 0


def _error(api: int, message: str) -> int:
    text = message.encode()
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _INTERNAL)
    made: int = _function(_word(api + _ERROR_CREATE).value)(ctypes.addressof(arguments))
    return made


def _ordinal(stream: int) -> int:
    return driver.ordinal_of(stream) if _devices() > 1 else 0


_devices: Final = functools.cache(driver.device_count)  # stays as it is while the process lives


def _load(place: tuple[int, int], words: Any) -> _Ready:
    """Bind the call's payload to the stream's GPU, once for both."""
    with _ready_lock:
        if place not in _ready:
            attributes = dict(_attributes(words))
            array = attributes[PAYLOAD]  # XLA_FFI_Array: type, size, data
            size, data = _word(array + 8).value, _word(array + 16).value
            _ready[place] = _Ready(unpack(ctypes.string_at(data, size)), place[1])
        return _ready[place]


def _attributes(words: Any) -> list[tuple[str, int]]:
    """(name, address of the value) of every attribute, in order."""
    found = []
    for i in range(words[17]):
        span = _word(words[19] + 8 * i).value  # XLA_FFI_ByteSpan: data, length
        name = ctypes.string_at(_word(span).value, _word(span + 8).value).decode()
        found.append((name, _word(words[20] + 8 * i).value))
    return found


# Kept for good: XLA calls them as long as the process lives.
_handlers: Final[dict[str, Callable[[int], int | None]]] = {"CUDA": _FUNCTION(_execute), "cpu": _FUNCTION(_refuse)}


def register(register_target: Callable[..., None], capsule: Callable[[Any], Any]) -> None:
    """Make the target known to XLA: jax.ffi.register_ffi_target and jax.ffi.pycapsule are passed in."""
    for platform, handler in _handlers.items():
        register_target(TARGET, capsule(handler), platform=platform)
