"""Refusals: why a value that a caller gave is refused, as data, and the writer of the sentences that say so."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

_HOST_DEVICE_TYPES: Final = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost
_MAX_SHOWN: Final = 80  # characters of a given value in an error
IS_FLAG: Final = "must be True or False"
CHOOSE_FLAG: Final = "pass one of them"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a value is refused. It holds text alone: no array lives longer for it, and every refusal pickles.

    field: what was given, as the caller names it, such as "scale" or "key.shape"; "" for what is no argument
    value: what it was, as `shown` writes it
    rule: what is allowed; for what is no argument, the whole reason
    remedy: what to do
    """

    field: str
    value: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        """The refusal as one sentence: what was given, what is allowed and what to do."""
        return f"{self.field} = {self.value}: {self.rule}; {self.remedy}" if self.field else self.rule

    @property
    def name(self) -> str:
        """The argument that `field` belongs to, such as "key"."""
        return re.split(r"[^a-z_0-9]", self.field.rpartition(" ")[2], maxsplit=1)[0]

    def renamed(self, change: Callable[[str], str]) -> Refusal:
        """Returns the refusal with other names in its texts."""
        return Refusal(*map(change, (self.field, self.value, self.rule, self.remedy)))


def refuse(field: str, value: object, rule: str, remedy: str) -> Refusal:
    """Returns the refusal of a value."""
    return Refusal(field, shown(value), rule, remedy)


def sentence(text: str) -> Refusal:
    """Returns a refusal that is about no single argument: the whole sentence is its rule."""
    return Refusal("", "", text, "")


def alignment_refusal(name: str, alignment: int, item: int) -> Refusal:
    """Returns the refusal of an address that is no multiple of the `item` bytes of an element."""
    rule = f"its address must be a multiple of the {item} bytes of an element (of 16 is fastest)"
    return refuse(f"{name}.alignment", alignment, rule, "copy it")


def one_of(choices: Iterable[str]) -> str:
    """Returns the rule of a choice."""
    return f"must be one of {', '.join(choices)}"


def shown(value: object) -> str:
    """Returns a given value for an error: its repr and its type. An array has shape and dtype in place of the repr.

    None, bools, tuples of ints, such as a shape, and arrays that this package describes have no type.
    """
    kind = type(value)
    if value is None or kind is bool:
        return repr(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if isinstance(shape, tuple) and dtype is not None and not _is_numpy(value, "generic"):
            on_device = hasattr(value, "__dlpack_device__") and not is_on_host(value)
            text = f"array of shape {tuple(shape)} and dtype {dtype}{' on a device' if on_device else ''}"
            if kind.__module__.startswith(f"{__package__}."):
                return text
        else:
            text = " ".join(repr(value).split())
    except Exception:  # Python refuses to print integers of thousands of digits
        text = "a value that cannot be printed"
    text = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
    return text if _is_tuple_of_ints(value) else f"{text} ({name})"


def _is_tuple_of_ints(value: object) -> bool:
    return type(value) is tuple and bool(value) and all(type(part) is int for part in value)


def is_on_host(array: Any) -> bool:
    """Returns whether an array is in host memory, as NumPy's are."""
    if _is_numpy(array, "generic", "ndarray"):
        return True
    return int(array.__dlpack_device__()[0]) in _HOST_DEVICE_TYPES


def _is_numpy(value: object, *kinds: str) -> bool:
    """Returns whether this is of one of NumPy's classes; it imports nothing, as command line help needs no NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, tuple(getattr(numpy, kind) for kind in kinds))
