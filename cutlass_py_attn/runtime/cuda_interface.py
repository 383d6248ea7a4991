"""The CUDA array interface, version 3: reads a producer's dictionary and refuses what would be read wrongly."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.tensors import E4M3, E4M3_BYTES, Tensor
from cutlass_py_attn.refusals import Refusal, refuse

TYPESTRS: Final = {"float16": "<f2", "float32": "<f4", "bfloat16": "<V2", "int32": "<i4", "int64": "<i8"}
_INTERFACE: Final = "__cuda_array_interface__"
_REQUIRED: Final = ("data", "shape", "typestr")
_TYPESTR: Final = re.compile(r"[<>|=][a-zA-Z]([1-9]\d*)")


class Interface(NamedTuple):
    """What an array's dictionary says. strides: in elements. stream: its producer's handle; None for no wait."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    stream: int | None


def is_offered(value: Any) -> bool:
    """Returns whether the object has the interface, also if reading it fails."""
    try:
        return hasattr(value, "__cuda_array_interface__")
    except Exception:  # a property that raises: `read` reports it
        return True


def is_read_only(value: Any) -> bool:
    """Returns whether the object's interface says that its memory must not be written."""
    try:
        return bool(value.__cuda_array_interface__["data"][1])
    except Exception:  # no such interface
        return False


def read(name: str, value: Any) -> Interface:
    """Reads the interface of operand `name`; NotSupported lists every reason."""
    entries = _entries(name, value)
    if refusals := [*_refusals(f"{name}.{_INTERFACE}", entries)]:
        raise NotSupported(refusals)
    typestr, shape = entries["typestr"], tuple(map(operator.index, entries["shape"]))
    item_bytes, strides = _item_bytes(typestr), entries.get("strides")
    if strides is None:
        steps = Tensor.contiguous(shape, typestr).strides
    else:
        steps = tuple(operator.index(stride) // item_bytes for stride in strides)
    stream = entries.get("stream")
    return Interface(
        operator.index(entries["data"][0]),
        shape,
        steps,
        _dtype(value, typestr),
        None if stream is None else operator.index(stream),
    )


def _entries(name: str, value: Any) -> Mapping[str, Any]:
    try:
        entries = value.__cuda_array_interface__
    except Exception as error:  # the library decides the type
        rule = f"must export itself by {_INTERFACE} ({error})"
        raise NotSupported(refuse(name, value, rule, "pass a plain array of values")) from error
    if not isinstance(entries, Mapping):
        raise NotSupported(refuse(f"{name}.{_INTERFACE}", entries, "must be a dict", "correct it"))
    return entries


def _refusals(name: str, entries: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yields what is wrong with the entries. name: what the interface is called."""
    missing = [entry for entry in _REQUIRED if entry not in entries]
    if missing:
        rule = f"must have data, shape and typestr, and lacks {', '.join(missing)}"
        yield refuse(name, [*entries], rule, "add them")
    if entries.get("mask") is not None:
        rule = "must be None, because every element is read"
        yield refuse(f"{name}['mask']", entries["mask"], rule, "fill the masked elements")
    data, shape, typestr = (entries.get(entry) for entry in _REQUIRED)
    if "data" in entries and not (isinstance(data, tuple) and len(data) == 2 and _is_integer(data[0])):
        yield refuse(f"{name}['data']", data, "must be (address, read-only)", "correct it")
    is_shape = _are_integers(shape) and all(operator.index(size) >= 0 for size in shape or ())
    if "shape" in entries and not is_shape:
        yield refuse(f"{name}['shape']", shape, "must be ints from 0 in a tuple", "correct it")
    is_typestr = isinstance(typestr, str) and _TYPESTR.fullmatch(typestr)
    if "typestr" in entries and not is_typestr:
        yield refuse(f"{name}['typestr']", typestr, "must be NumPy's, such as '<f2'", "correct it")
    stream = entries.get("stream")
    if stream is not None and not (_is_integer(stream) and operator.index(stream)):
        yield refuse(f"{name}['stream']", stream, "must be 1, 2, a handle or None", "correct it")
    if is_shape and is_typestr:
        yield from _strides(f"{name}['strides']", entries.get("strides"), shape, _item_bytes(str(typestr)))


def _strides(name: str, strides: Any, shape: Any, item_bytes: int) -> Iterator[Refusal]:
    if strides is None:
        return
    if not _are_integers(strides) or len(strides) != len(shape):
        yield refuse(name, strides, f"must be None or {len(shape)} ints, one for each axis", "correct it")
    elif any(size > 1 and stride % item_bytes for size, stride in zip(shape, strides, strict=True)):
        yield refuse(name, tuple(strides), f"must be multiples of its {item_bytes}-byte elements", "copy it")


def _item_bytes(typestr: str) -> int:
    match = _TYPESTR.fullmatch(typestr)
    return int(match[1]) if match else 0


def _dtype(value: object, typestr: str) -> str:
    """Returns the dtype's name.

    The interface has no codes for bfloat16 and float8_e4m3fn; the array's dtype tells them apart.
    """
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if typestr in ("|V2", "<V2") and name == "bfloat16":
        return name
    if _item_bytes(typestr) == E4M3_BYTES and name == E4M3[0]:
        return name
    try:
        dtype = np.dtype(typestr)
    except TypeError:
        return typestr
    return dtype.name if dtype.isnative and dtype.kind != "V" else typestr


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _are_integers(values: object) -> bool:
    return isinstance(values, (tuple, list)) and all(map(_is_integer, values))
