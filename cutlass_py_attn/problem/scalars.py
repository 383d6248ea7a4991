"""Scalars: numbers of Python, NumPy and JAX, and 0-d arrays on the host, as Python numbers; given values as text.

A caller's numbers are converted before anything compares, hashes or stores them, so that 7, numpy.int64(7) and
jax.numpy.int32(7) are one value, and that 7.0 or True is never taken for 7.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, TypeVar

import numpy as np

_HOST_DEVICE_TYPES: Final = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost
_MAX_SHOWN: Final = 80  # characters of a given value in an error
_PLAIN: Final = frozenset((int, bool, str, type(None)))

T = TypeVar("T")


def integer_of(value: object) -> int | None:
    """Returns an integer of any library as an int; None for anything else, and for an array on a device."""
    if type(value) is int:
        return value
    with contextlib.suppress(Exception):  # the library of an array decides the type of its errors
        if _is_host_scalar(value, ("int",)) if hasattr(value, "dtype") else not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    return None


def number_of(value: object) -> float | None:
    """Returns a number of any library as a float; None for anything else, for a number beyond the floats, and for an
    array on a device.
    """
    if type(value) is float:
        return value
    with contextlib.suppress(Exception):
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if _is_host_scalar(value, ("int", "float")) if hasattr(value, "dtype") else is_number:
            return float(value)  # type: ignore[arg-type]
    return None


def flag_of(value: object) -> bool | None:
    """Returns a bool of any library as a bool; None for anything else, numbers included."""
    if type(value) is bool:
        return value
    with contextlib.suppress(Exception):
        if hasattr(value, "dtype") and _is_host_scalar(value, ("bool",)):
            return bool(value)
    return None


def _is_host_scalar(value: Any, kinds: tuple[str, ...]) -> bool:
    """Returns whether this is a 0-d array of such a dtype whose value the host may read.

    JAX computes scalars on its default device, so a JAX array may be anywhere. A traced one has no value yet.
    """
    if tuple(value.shape) != ():
        return False
    dtype = getattr(value.dtype, "name", str(value.dtype))
    is_jax = type(value).__module__.split(".")[0] in ("jax", "jaxlib")
    return any(kind in dtype for kind in kinds) and (is_jax or is_on_host(value))


def is_on_host(array: Any) -> bool:
    """Returns whether an array is in host memory, as NumPy's are."""
    if isinstance(array, (np.generic, np.ndarray)):
        return True
    return int(array.__dlpack_device__()[0]) in _HOST_DEVICE_TYPES


def shown(value: object) -> str:
    """Returns a given value for an error: its repr and its type. An array has shape and dtype in place of the repr."""
    kind = type(value)
    if value is None or kind is bool:
        return repr(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if isinstance(shape, tuple) and dtype is not None and not isinstance(value, np.generic):
            on_device = hasattr(value, "__dlpack_device__") and not is_on_host(value)
            text = f"array of shape {tuple(shape)} and dtype {dtype}{' on a device' if on_device else ''}"
        else:
            text = " ".join(repr(value).split())
    except Exception:  # Python refuses to print integers of thousands of digits
        text = "a value that cannot be printed"
    text = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
    return f"{text} ({name})"


def digits(number: int | tuple[int, ...]) -> str:
    """Returns an integer or a tuple of them as text. Python refuses to print one of thousands of digits."""
    try:
        return str(number)
    except ValueError:
        return "a number that cannot be printed"


def path_objections(name: str, value: object) -> list[str]:
    """Returns why this is no path of a file or a folder."""
    path: object = None
    with contextlib.suppress(Exception):  # __fspath__ is the caller's
        path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and "\0" not in path:
        return []
    return [f"{name} = {shown(value)}: must be a path, such as a str or a pathlib.Path; pass one"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """An option or a field that holds one number or one bool.

    read: returns the Python value of a given one; None for a value of another kind
    allowed: what is allowed, and what to do
    default: value without the option; if it is None, None may be given too
    """

    read: Callable[[object], Any]
    allowed: str
    default: Any

    def normalised(self, value: object) -> Any:
        """Returns the Python value; a value of another kind as it is."""
        read = self.read(value)
        return value if read is None else read

    def objections(self, name: str, value: object) -> list[str]:
        """Returns why the value is of another kind; it is empty for a value that `normalised` converts."""
        if (value is None and self.default is None) or self.read(value) is not None:
            return []
        return [f"{name} = {shown(value)}: {self.allowed}"]


_FLAG: Final = "must be True or False; pass one of them"
MIN_SCALE: Final = 1e-30  # times log2(e), the smallest factor of the exponent that the kernels do not raise
SCALE: Final = (
    f"must be 0, a number with a magnitude from {MIN_SCALE} to 2**127, or None for 1/sqrt(head_dim), because the "
    "kernels compute in float32; correct it, or multiply query by a part of it"
)
SPLITS: Final = "must be an int of at least 1, or None to let the plan choose; correct it"

# The fields of Problem that are scalars; the options of the same names are checked by the same rules.
SCALARS: Final[dict[str, Scalar]] = {
    "scale": Scalar(number_of, SCALE, None),
    "softcap": Scalar(number_of, "must be a number that float32 holds, or 0 to switch it off; pass a float", 0.0),
    "dropout_p": Scalar(number_of, "must be a probability from 0 to 1; pass a float", 0.0),
    "philox_on_device": Scalar(flag_of, _FLAG, False),
    "value_in_key": Scalar(flag_of, _FLAG, False),
    "deterministic": Scalar(flag_of, _FLAG, False),
    "num_splits_key": Scalar(integer_of, SPLITS, None),
}
PACKED: Final = Scalar(flag_of, _FLAG, False)


def with_python_numbers(item: T) -> T:
    """Returns a dataclass whose integers, also those in its tuples, are Python ints; `item` itself if they are."""
    fields: Any = item
    changes = {}
    for field in dataclasses.fields(fields):
        value = getattr(item, field.name)
        converted = python_value(value)
        if converted is not value:
            changes[field.name] = converted
    return dataclasses.replace(fields, **changes) if changes else item


def python_value(value: Any) -> Any:
    """Returns integers and bools of any library, also those in a tuple, as Python values; other values as given."""
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        is_plain = all([type(part) in _PLAIN for part in value])
        return value if is_plain else tuple([python_value(part) for part in value])
    read = integer_of(value)
    if read is None:
        read = flag_of(value)
    return value if read is None else read
