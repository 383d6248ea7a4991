"""Tensor maps: CUtensorMaps in memory of ours, encoded once and moved to another array in place."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from cutlass_py_attn import abi, driver
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.plan import TensorMap
from cutlass_py_attn.prepared import c_function
from cutlass_py_attn.problem import ITEM_BYTES

_FLIPPED: Final = 0x7FFFFFFFFF00  # bits of an address that tell another from it


@functools.cache
def _encode_function() -> Any:
    """cuTensorMapEncodeTiled as a C function: unlike the bindings' wrapper it writes where we say."""
    address, number = ctypes.c_void_p, ctypes.c_uint32
    return c_function("cuTensorMapEncodeTiled", address, number, number, address, *[address] * 4, *[number] * 4)


def encode(slot: int, address: int, recipe: TensorMap, dtype: str) -> None:
    """Write the 128-byte CUtensorMap of `recipe` over the array at `address` to the 64-byte aligned `slot`.

    dtype: element type of the array.
    """
    cuda = driver.bindings()
    types = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT32"}
    element = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{types[dtype]}")
    rank = len(recipe.sizes)
    swizzle = f"{recipe.swizzle_bytes}B" if recipe.swizzle_bytes else "NONE"
    arguments = (
        slot,
        int(element),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*recipe.sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * ITEM_BYTES[dtype] for stride in recipe.strides)),
        (ctypes.c_uint32 * rank)(*recipe.box),
        (ctypes.c_uint32 * rank)(*(1 for _ in range(rank))),
        int(cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
        int(cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    code = _encode_function()(*arguments)
    if code:
        raise driver.failure("cuTensorMapEncodeTiled", (slot, address), code, f"{recipe} of {dtype}")


def starts_with_address(slot: int, address: int, recipe: TensorMap, dtype: str) -> bool:
    """Whether the encoded map in `slot` is its array's address, in the first 8 bytes, and 120 that do not depend on it.

    NVIDIA does not say what is in a CUtensorMap. Where it is as it seems, another address can simply be written.
    """
    memory = ctypes.create_string_buffer(2 * abi.TENSOR_MAP_BYTES)
    other = -(-ctypes.addressof(memory) // abi.TENSOR_MAP_BYTES) * abi.TENSOR_MAP_BYTES
    try:
        encode(other, address ^ _FLIPPED, recipe, dtype)
    except DriverError:
        return False
    (start, rest), (other_start, other_rest) = (
        (ctypes.c_uint64.from_address(place).value, ctypes.string_at(place + 8, abi.TENSOR_MAP_BYTES - 8))
        for place in (slot, other)
    )
    return (start, other_start) == (address, address ^ _FLIPPED) and rest == other_rest
