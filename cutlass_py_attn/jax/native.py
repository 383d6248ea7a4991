"""Native handler: connects the XLA FFI handler in C with the one in Python, which launches each call once before it.

The C function needs no interpreter lock, so a busy thread of Python does not delay it. It asks Python for three things:
to load and launch a call whose program it does not have, to launch a call that has no program (`native_program`), and
for the text of a driver's error.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from typing import Final

from cutlass_py_attn.jax import handler, native_program
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.driver_calls import c_function

# In the order of native_handler.c.
_FUNCTIONS: Final = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuStreamGetCtx",
    "cuMemsetD8Async",
    "cuMemsetD2D32Async",
    "cuLaunchKernelEx",
)
_WHY_BYTES: Final = 256

_pointer: Final = ctypes.c_void_p
_LAUNCH: Final = ctypes.CFUNCTYPE(_pointer, _pointer)
_REPORT: Final = ctypes.CFUNCTYPE(_pointer, _pointer, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)


class NativeHandler:
    """The handler of a loaded library. function: the XLA_FFI_Handler for CUDA, which XLA keeps.

    Keep the object as long as the process lives: `function` calls functions in Python that it owns.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.function = library.cutlass_py_attn_execute
        self.function.restype, self.function.argtypes = _pointer, (_pointer,)
        self._open = library.cutlass_py_attn_open
        self._open.restype, self._open.argtypes = None, (_pointer, ctypes.c_int)
        self._add = library.cutlass_py_attn_add
        number, size = ctypes.c_uint64, ctypes.c_size_t
        self._add.argtypes = number, number, _pointer, size, ctypes.c_char_p, size
        self._forget = library.cutlass_py_attn_forget
        self._forget.restype = None
        self._lock = threading.Lock()
        self._seen: set[tuple[int, int]] = set()  # calls that have been launched by Python
        self._is_open = False
        self._callbacks = _LAUNCH(self._launch), _REPORT(_report)  # which C calls
        addresses = (ctypes.cast(callback, _pointer) for callback in self._callbacks)
        set_python = library.cutlass_py_attn_set_python
        set_python.restype, set_python.argtypes = None, (_pointer, _pointer)
        set_python(*addresses)

    def forget(self) -> None:
        """Lets the next launch of every call go to Python, as in a forked child, where it raises ForkedChild."""
        self._forget()
        self._seen.clear()

    def _launch(self, frame: int) -> int | None:
        """XLA_FFI_Handler of a call without a program: launches it, and adds its program."""
        try:
            key_and_ordinal, call, addresses = handler.launch(frame)
            with self._lock:
                if key_and_ordinal not in self._seen:
                    self._seen.add(key_and_ordinal)
                    self._add_program(key_and_ordinal[0], call, addresses)
        except Exception as error:  # no exception may reach the C caller
            return handler.error_of(handler.api_of(frame), error)
        return None

    def _add_program(self, key: int, call: handler.BoundPayload, addresses: list[int]) -> None:
        program = native_program.program_of(call, addresses)
        if program is None:
            return
        devices = handler.device_count()
        if not self._is_open:
            functions = [ctypes.cast(c_function(name), _pointer).value for name in _FUNCTIONS]
            self._open((_pointer * len(functions))(*functions), devices)
            os.register_at_fork(after_in_child=self.forget)
            self._is_open = True
        place = call.bound.device.context if devices > 1 else 0
        why = ctypes.create_string_buffer(_WHY_BYTES)
        if not self._add(key, place, program.ctypes.data, program.size, why, _WHY_BYTES):
            warnings.warn(
                f"{call.bound.plan.symbol} is launched by the handler in Python, because the one in C refuses its "
                f"program: {why.value.decode()}",
                stacklevel=2,
            )


def _report(api: int, function: int, code: int, symbol: bytes) -> int:
    """Creates the XLA_FFI_Error of a driver function, by its number in _FUNCTIONS, that returned `code`."""
    return handler.error_of(api, driver.failure(_FUNCTIONS[function], (), code, symbol.decode()))
