"""Typed JSON: dataclasses from JSON of unknown origin. ValueError says which value is not of the type of its field."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import reprlib
import types
import typing
from typing import Any, Final, TypeVar

MAX_DEPTH: Final = 64  # nested lists and objects; what this package writes has 12
_INT64: Final = range(-(2**63), 2**63)
_JSON_TYPES: Final[dict[Any, tuple[type, ...]]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}

T = TypeVar("T")


def parse(text: str | bytes) -> Any:
    """Returns the value of a JSON text; ValueError if it is damaged, or nested more than MAX_DEPTH deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} nested lists and objects") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _children(item)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_DEPTH} nested lists and objects")


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def read(cls: type[T], data: object, what: str) -> T:
    """Returns an instance of a dataclass from a JSON object that has every field and no other.

    what: the object's name in messages.
    """
    found = as_object(data, what)
    fields = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
    missing, unknown = sorted(set(fields) - found.keys()), sorted(found.keys() - set(fields))
    if missing or unknown:
        raise ValueError(f"{what}: missing fields {missing}, unknown fields {unknown}; written by another version")
    hints = field_types(cls)  # type: ignore[arg-type]  # mypy does not see that classes are hashable
    return cls(**{name: convert(found[name], hints[name], f"{what}.{name}") for name in fields})


def as_object(data: object, what: str) -> dict[str, Any]:
    """Returns the JSON object; ValueError if it is something else."""
    if not isinstance(data, dict):
        raise ValueError(_wrong(data, what, "an object"))
    return data


def convert(value: object, kind: Any, what: str) -> Any:
    """Returns a JSON value as the annotated type: int, float, str, bool, dict, a tuple, a dataclass, or that or None.

    An int has 64 bits. A float field keeps an int as it is.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (kind,) = (each for each in arguments if each is not types.NoneType)
        return None if value is None else convert(value, kind, what)
    if dataclasses.is_dataclass(kind):
        return read(typing.cast(type[Any], kind), value, what)
    if origin is dict:
        return as_object(value, what)
    if origin is tuple:
        return _tuple(value, arguments, what)
    if type(value) not in _JSON_TYPES[kind] or (isinstance(value, int) and value not in _INT64):
        raise ValueError(_wrong(value, what, {int: "an int of 64 bits"}.get(kind, f"a {kind.__name__}")))
    return value


def _tuple(value: object, arguments: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(_wrong(value, what, "a list"))
    kinds = itertools.repeat(arguments[0], len(value)) if arguments[-1] is Ellipsis else arguments
    if arguments[-1] is not Ellipsis and len(value) != len(arguments):
        raise ValueError(_wrong(value, what, f"a list of {len(arguments)}"))
    items = zip(value, kinds, strict=True)
    return tuple(convert(item, kind, f"{what}[{i}]") for i, (item, kind) in enumerate(items))


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the annotated type of every field of a dataclass."""
    return typing.get_type_hints(cls)


def _wrong(value: object, what: str, allowed: str) -> str:
    return f"{what} = {reprlib.repr(value)} ({type(value).__name__}): must be {allowed}"
