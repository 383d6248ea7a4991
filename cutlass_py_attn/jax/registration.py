"""Registration: the handlers of the custom call, which XLA keeps as long as the process lives.

XLA looks a handler up when it loads a program, also one of jax.export, of which this package learns nothing. So the
handlers are registered, and the one in C is compiled if it is not cached, when `cutlass_py_attn.jax` is imported.
"""

from __future__ import annotations

import functools

import jax

from cutlass_py_attn.jax import handler, native, native_library


@functools.cache
def register() -> native.NativeHandler | None:
    """Registers the handlers once, and returns the native one, if `native_library` chooses it.

    The result lives as long as the process: its C function calls functions in Python that it owns.
    """
    library = native_library.choice().library
    chosen = None if library is None else native.NativeHandler(library)
    function = None if chosen is None else chosen.function
    handler.register(jax.ffi.register_ffi_target, jax.ffi.pycapsule, function)
    return chosen
