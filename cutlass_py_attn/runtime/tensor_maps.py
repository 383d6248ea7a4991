"""Tensor maps: encodes CUtensorMaps in our own host memory, and finds out whether an address can be overwritten.

Addresses are stored as words in place: four of them take 0.12 us on an H200 host, four calls of
cuTensorMapReplaceAddress 1.3 us, and a bound backward became 1.5 us slower with the calls.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.plan import TensorMap
from cutlass_py_attn.problem.tensors import FLOAT8, OPERAND_BYTES
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.driver_calls import c_function

_FLIPPED_BITS: Final = 0x7FFFFFFFFF00  # bits in which a second, aligned address differs from the first


@functools.cache
def _encode_function() -> Any:
    """Returns cuTensorMapEncodeTiled as a C function. The bindings' wrapper cannot write to memory of ours."""
    pointer, uint32 = ctypes.c_void_p, ctypes.c_uint32
    return c_function("cuTensorMapEncodeTiled", pointer, uint32, uint32, pointer, *[pointer] * 4, *[uint32] * 4)


def encode(slot: int, address: int, spec: TensorMap, dtype: str) -> None:
    """Writes a CUtensorMap of 128 bytes to host memory.

    slot: host address of the CUtensorMap, 64-byte aligned.
    address: device address of the array.
    spec: sizes, strides, box and swizzle.
    dtype: element type of the array.
    """
    cuda = driver.bindings()
    types = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32", FLOAT8: "UINT8"}
    element = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{types[dtype]}")
    rank = len(spec.sizes)
    swizzle = f"{spec.swizzle_bytes}B" if spec.swizzle_bytes else "NONE"
    arguments = (
        slot,
        int(element),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*spec.sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * OPERAND_BYTES[dtype] for stride in spec.strides)),
        (ctypes.c_uint32 * rank)(*spec.box),
        (ctypes.c_uint32 * rank)(*(1 for _ in range(rank))),
        int(cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
        int(cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    code = _encode_function()(*arguments)
    if code:
        raise driver.failure("cuTensorMapEncodeTiled", (slot, address), code, f"{spec} of {dtype}")


def starts_with_address(slot: int, address: int, spec: TensorMap, dtype: str) -> bool:
    """Returns whether another address can be written over the first 8 bytes of the encoded map in `slot`.

    NVIDIA does not document the bytes of a CUtensorMap. The function encodes a map of another address and compares:
    the first 8 bytes must be the address, and the other 120 bytes must be equal.
    """
    memory = ctypes.create_string_buffer(2 * abi.TENSOR_MAP_BYTES)
    other_slot = -(-ctypes.addressof(memory) // abi.TENSOR_MAP_BYTES) * abi.TENSOR_MAP_BYTES
    other_address = address ^ _FLIPPED_BITS
    try:
        encode(other_slot, other_address, spec, dtype)
    except DriverError:
        return False
    (start, rest), (other_start, other_rest) = (
        (ctypes.c_uint64.from_address(place).value, ctypes.string_at(place + 8, abi.TENSOR_MAP_BYTES - 8))
        for place in (slot, other_slot)
    )
    return (start, other_start) == (address, other_address) and rest == other_rest
