"""What the standalone component GEMMs of both families share: parameters, the module of the GEMM, the store of C."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.launch import abi

Params = params.struct_type("ComponentGemmParams", abi.COMPONENT_GEMM)


def tile_pointer(address: Int64, dtype: Any, tile: Int32, elements: int) -> cute.Pointer:
    """Returns the pointer to tile number `tile` of an array of tiles of `elements` each, a multiple of 16 bytes."""
    return params.pointer(address, dtype) + cute.assume(Int64(tile) * elements, divby=128 // dtype.width)


def store_c(address: Int64, tile: Int32, mma: Any, values: cute.Tensor, thread: Int32) -> None:
    """Stores this thread's partition of C, (m, n) float32, two columns at a time."""
    m, n = mma.spec.m, mma.spec.n
    target = cute.make_tensor(tile_pointer(address, Float32, tile, m * n), cute.make_layout((m, n), stride=(n, 1)))
    cute.autovec_copy(values, mma.mma.get_slice(thread).partition_C(target))
