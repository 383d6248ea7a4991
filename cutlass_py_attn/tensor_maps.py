"""Tensor maps: CUtensorMaps in memory of ours, encoded once and moved to another array in place."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from cutlass_py_attn import driver
from cutlass_py_attn.plan import TensorMap
from cutlass_py_attn.problem import ITEM_BYTES

_SINCE: Final = 12000  # CUDA version that brought cuTensorMapEncodeTiled


@functools.cache
def _encode_function() -> Any:
    """cuTensorMapEncodeTiled as a C function: unlike the bindings' wrapper it writes where we say."""
    pointer, _ = driver.call("cuGetProcAddress", b"cuTensorMapEncodeTiled", _SINCE, 0)
    address, number = ctypes.c_void_p, ctypes.c_uint32
    arguments = (address, number, number, address, *[address] * 4, *[number] * 4)
    return ctypes.CFUNCTYPE(number, *arguments)(int(pointer))


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


def mover(slot: int) -> functools.partial[tuple[Any]]:
    """Points the encoded map in `slot`, in place, at the address it is called with; gives the bindings' code."""
    mapped = driver.bindings().CUtensorMap(_ptr=slot)
    return functools.partial(driver.function("cuTensorMapReplaceAddress"), mapped)
