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

from cutlass_py_attn.refusals import CHOOSE_FLAG, IS_FLAG, Refusal, is_on_host, refuse

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


def digits(number: int | tuple[int, ...]) -> str:
    """Returns an integer or a tuple of them as text. Python refuses to print one of thousands of digits."""
    try:
        return str(number)
    except ValueError:
        return "a number that cannot be printed"


def path_refusals(name: str, value: object) -> list[Refusal]:
    """Returns why this is no path of a file or a folder."""
    path: object = None
    with contextlib.suppress(Exception):  # __fspath__ is the caller's
        path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(path, str) and "\0" not in path:
        return []
    return [refuse(name, value, "must be a path, such as a str or a pathlib.Path", "pass one")]


@dataclass(frozen=True, slots=True)
class Scalar:
    """An option or a field that holds one number or one bool.

    read: returns the Python value of a given one; None for a value of another kind
    rule: what is allowed
    remedy: what to do
    default: value without the option; if it is None, None may be given too
    """

    read: Callable[[object], Any]
    rule: str
    remedy: str
    default: Any

    def normalised(self, value: object) -> Any:
        """Returns the Python value; a value of another kind as it is."""
        read = self.read(value)
        return value if read is None else read

    def refusals(self, name: str, value: object) -> list[Refusal]:
        """Returns why the value is of another kind; it is empty for a value that `normalised` converts."""
        if (value is None and self.default is None) or self.read(value) is not None:
            return []
        return [self.refusal(name, value)]

    def refusal(self, name: str, value: object) -> Refusal:
        """Returns the refusal of a value."""
        return refuse(name, value, self.rule, self.remedy)


FLAG: Final = Scalar(flag_of, IS_FLAG, CHOOSE_FLAG, False)
MIN_SCALE: Final = 1e-30  # times log2(e), the smallest factor of the exponent that the kernels do not raise
SCALE: Final = Scalar(
    number_of,
    f"must be 0, a number with a magnitude from {MIN_SCALE} to 2**127, or None for 1/sqrt(head_dim), because the "
    "kernels compute in float32",
    "correct it, or multiply query by a part of it",
    None,
)
SOFTCAP: Final = Scalar(number_of, "must be a number above 0 that float32 holds, or 0 for none", "pass a float", 0.0)
DROPOUT_P: Final = Scalar(number_of, "must be a probability from 0 to 1", "pass a float", 0.0)
SPLITS: Final = Scalar(integer_of, "must be an int of at least 1, or None to let the plan choose", "correct it", None)

# The fields of Problem that are scalars; the options of the same names are checked by the same rules.
SCALARS: Final[dict[str, Scalar]] = {
    "scale": SCALE,
    "softcap": SOFTCAP,
    "dropout_p": DROPOUT_P,
    "philox_on_device": FLAG,
    "value_in_key": FLAG,
    "deterministic": FLAG,
    "num_splits_key": SPLITS,
}


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
