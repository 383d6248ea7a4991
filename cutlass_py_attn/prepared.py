"""Prepared: driver functions with their arguments, made ready once and called many times at little cost."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn import driver

_SINCE: Final = 12000  # CUDA version whose functions are meant

argument: Final = ctypes.c_void_p.from_param  # an address, a handle or a size, as C takes it


@functools.cache
def c_function(name: str, *kinds: Any) -> Any:
    """The driver function of that name as a C function that returns a CUresult; kinds: types of its arguments.

    Without kinds it takes what `argument` gives, which costs less. Whatever an address points to, the caller keeps.
    """
    pointer, _ = driver.call("cuGetProcAddress", name.encode(), _SINCE, 0)
    found: Any = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(int(pointer))
    found.__name__ = name
    return found


def prepared(name: str, *values: int) -> Callable[[], int]:
    """Calls the driver function of that name with these addresses, handles and sizes; gives its CUresult."""
    return functools.partial(c_function(name), *map(argument, values))
