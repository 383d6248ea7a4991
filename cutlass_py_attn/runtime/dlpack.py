"""DLPack capsules through ctypes: reads the tensor of a producer's capsule, and exports device memory as a capsule."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, Final

CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
CAPSULE_NAME: Final = b"dltensor"
KINDS: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLDataTypeCode
TYPE_CODES: Final = {
    **{"float16": (2, 16), "float32": (2, 32), "bfloat16": (4, 16)},
    **{"int32": (0, 32), "int64": (0, 64), "uint8": (1, 8), "bool": (6, 8), "float8_e4m3fn": (10, 8)},
}
_DTYPES: Final = {code: dtype for dtype, code in TYPE_CODES.items()}


class DLTensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @property
    def dtype(self) -> str:
        """Name of the dtype, such as "float16"; a name that this package does not support for other types."""
        fallback = f"{KINDS.get(self.code, f'dlpack code {self.code} ')}{self.bits}"
        return _DTYPES.get((self.code, self.bits), fallback) if self.lanes == 1 else f"{fallback}x{self.lanes}"


class DLManagedTensor(ctypes.Structure):
    """DLPack's DLManagedTensor; `manager_ctx` is a key of `_exported`."""

    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# Prototypes of our own: the attributes of ctypes.pythonapi are shared by the process, and others set their types too.
capsule_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_new: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# The destructor calls these two with the capsule's bare address: a reference would revive the dying capsule.
_address_is_valid: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_address_pointer: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_exported: dict[int, tuple[Any, ...]] = {}  # objects that exported tensors keep alive
_next_key = itertools.count(1)


def read_capsule(capsule: Any) -> DLTensor:
    """Returns the tensor of a capsule, which stays unconsumed: its destructor frees the tensor with the capsule."""
    return ctypes.cast(capsule_pointer(capsule, CAPSULE_NAME), ctypes.POINTER(DLTensor)).contents


def export_capsule(
    owner: object, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
) -> Any:
    """Creates an unversioned capsule over CUDA memory. `owner` lives until the consumer deletes the tensor.

    pointer: device address. strides: in elements. device: ordinal.
    """
    rank = len(shape)
    shape_array = (ctypes.c_int64 * rank)(*shape)
    strides_array = (ctypes.c_int64 * rank)(*strides)
    code, bits = TYPE_CODES[dtype]
    tensor = DLTensor(pointer, CUDA, device, rank, code, bits, 1, shape_array, strides_array, 0)
    key = next(_next_key)
    managed = DLManagedTensor(tensor, key, ctypes.cast(_c_deleter, ctypes.c_void_p))
    _exported[key] = (owner, managed, shape_array, strides_array)
    return _capsule_new(ctypes.addressof(managed), CAPSULE_NAME, ctypes.cast(_c_destructor, ctypes.c_void_p))


def _delete(managed: int) -> None:
    """DLPack's deleter: releases the owner of the DLManagedTensor at this address."""
    _exported.pop(DLManagedTensor.from_address(managed).manager_ctx, None)


def _destroy(capsule: int) -> None:
    """Destructor of the capsule at this address. A consumer renames the capsule and calls the deleter itself."""
    if _address_is_valid(capsule, CAPSULE_NAME):
        _delete(_address_pointer(capsule, CAPSULE_NAME))


# Never freed: consumers call them as long as the process lives.
_c_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_c_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)
