"""Driver functions with bound arguments: converted to C once and called many times at little host cost."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn.runtime import driver

_CUDA_VERSION: Final = 12000  # cuGetProcAddress returns the functions as this CUDA version declares them

_as_c_argument: Final = ctypes.c_void_p.from_param  # converts an address, a handle or a size


@functools.cache
def c_function(name: str, *argument_types: Any) -> Any:
    """Returns the driver function of that name as a ctypes function that returns a CUresult.

    argument_types: ctypes types of the arguments; none for a function that gets converted arguments, which costs
        less per call. Memory behind a pointer argument belongs to the caller.
    """
    pointer, _ = driver.call("cuGetProcAddress", name.encode(), _CUDA_VERSION, 0)
    function: Any = ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(int(pointer))
    function.__name__ = name
    return function


def bound_driver_call(name: str, *values: int) -> Callable[[], int]:
    """Returns a call of a driver function with these addresses, handles and sizes. The call returns a CUresult."""
    return functools.partial(c_function(name), *map(_as_c_argument, values))
