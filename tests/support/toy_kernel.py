"""Toy kernels with the parameters of a standalone component GEMM: one sound kernel, and one for each fault."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.launch.build import Build

GLOBAL = cutlass.AddressSpace.gmem
FAULTS = ("local_array", "spills", "static_memory", "other_block", "other_symbol", "other_struct", "raises")
LOCAL_ELEMENTS = 256
LIVE_VALUES = 320


@cute.native_struct
class Params:
    a: Int64
    b: Int64
    c: Int64
    tiles: Int32


@cute.native_struct
class LongerParams:
    a: Int64
    b: Int64
    c: Int64
    tiles: Int64
    more: Int64


@cute.kernel
def toy(params: Params, fault: cutlass.Constexpr):
    """Computes c[thread] = a[thread] + tiles, with the fault of that name."""
    thread, _, _ = cute.arch.thread_idx()
    source = cute.make_ptr(Float32, params.a, GLOBAL, assumed_align=16)
    target = cute.make_tensor(
        cute.make_ptr(Float32, params.c, GLOBAL, assumed_align=16), cute.make_layout(128 * LIVE_VALUES)
    )
    value = cute.make_tensor(source, cute.make_layout(1024))[thread] + Float32(params.tiles)
    if cutlass.const_expr(fault == "local_array"):
        # Registers have no run-time index, so an indexed array is stored in local memory.
        array = cute.make_rmem_tensor(LOCAL_ELEMENTS, Float32)
        array.fill(0.0)
        for index in cutlass.range(params.tiles, unroll=1):
            array[index * thread % LOCAL_ELEMENTS] = value
        value = array[thread % LOCAL_ELEMENTS]
    if cutlass.const_expr(fault == "spills"):
        # More values are live across a barrier than a thread has registers.
        values = cute.make_tensor(source, cute.make_layout(LIVE_VALUES * 1024))
        values_live = cute.make_rmem_tensor(LIVE_VALUES, Float32)
        for index in cutlass.range_constexpr(LIVE_VALUES):
            values_live[index] = values[thread + 1024 * index]
        cute.arch.sync_threads()
        for index in cutlass.range_constexpr(LIVE_VALUES):
            target[thread + 128 * index] = values_live[index]
    if cutlass.const_expr(fault == "static_memory"):
        shared = cute.make_tensor(cute.arch.alloc_smem(Float32, 1024, 16), cute.make_layout(1024))
        shared[thread] = value
        cute.arch.sync_threads()
        value = shared[1023 - thread]
    if cutlass.const_expr(fault == "raises"):
        raise ValueError("the toy refuses to be traced")
    target[thread] = value


@cute.kernel
def longer_toy(params: LongerParams):
    """The toy kernel with another parameter struct."""
    thread, _, _ = cute.arch.thread_idx()
    target = cute.make_ptr(Float32, params.c, GLOBAL, assumed_align=16)
    cute.make_tensor(target, cute.make_layout(1024))[thread] = Float32(params.tiles)


def trace(build: Build) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """Replaces registry.trace. `build.component_gemm` names the fault; "toy" has none."""
    fault = build.component_gemm
    symbol = "elsewhere" if fault == "other_symbol" else build.symbol
    threads = 2 * build.threads if fault == "other_block" else build.threads

    @cute.jit
    def host(a: Int64, b: Int64, c: Int64, tiles: Int32):
        toy.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        toy(Params(a=a, b=b, c=c, tiles=tiles), fault).launch(grid=(tiles, 1, 1), block=(threads, 1, 1))

    @cute.jit
    def longer_host(a: Int64, b: Int64, c: Int64, tiles: Int32):
        longer_toy.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        params = LongerParams(a=a, b=b, c=c, tiles=Int64(tiles), more=a)
        longer_toy(params).launch(grid=(tiles, 1, 1), block=(threads, 1, 1))

    arguments = (Int64(16), Int64(16), Int64(16), Int32(1))
    return (longer_host if fault == "other_struct" else host), arguments
