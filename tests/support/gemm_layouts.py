"""Layouts of the GEMMs: @cute.jit functions without a kernel, which the DSL compiles for the CPU.

They write the layouts of the component GEMMs and of kernels/common/tile_copy.py into NumPy arrays. This file has no
`from __future__ import annotations`, because the DSL reads annotations as types.
"""

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import BFloat16, Float32, Int8, Int32
from cutlass.base_dsl.compiler import GPUArch
from cutlass.cute.runtime import make_ptr

from cutlass_py_attn.kernels.common import mma_sync, tile_copy, wgmma


def run(function, shape, *constants, arch="sm_90a"):
    """Returns the int32 array that `function` fills."""
    out = np.full(shape, -1, np.int32)
    pointer = make_ptr(Int32, out.ctypes.data, cutlass.AddressSpace.generic, assumed_align=16)
    cute.compile[GPUArch(arch)](function, pointer, *constants)(pointer)
    return out


@cute.jit
def tile_offsets(out: cute.Pointer, is_float32: cutlass.Constexpr, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """Writes the element offset of (row, column, stage) in tile_copy.smem_tile."""
    dtype = Float32 if cutlass.const_expr(is_float32) else BFloat16
    layout = tile_copy.smem_tile(cute.recast_ptr(out, dtype=Int8), 0, dtype, rows, columns, 2).layout
    target = cute.make_tensor(out, cute.make_layout((rows, columns, 2), stride=(columns * 2, 2, 1)))
    for row in range(rows):
        for column in range(columns):
            for stage in range(2):
                target[row, column, stage] = Int32(layout((row, column, stage)))


@cute.jit
def wgmma_offsets(out: cute.Pointer, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """Writes the element offset of (row, column, stage) in wgmma.smem_tile_at, before the pointer's swizzle."""
    layout = wgmma.smem_layout(rows, columns, BFloat16, 2).outer
    target = cute.make_tensor(out, cute.make_layout((rows, columns, 2), stride=(columns * 2, 2, 1)))
    for row in range(rows):
        for column in range(columns):
            for stage in range(2):
                target[row, column, stage] = Int32(layout((row, column, stage)))


def write_pairs(target, thread, registers, operand):
    """Writes (row, column) of each register of an accumulator, and of the operand in the same registers."""
    for i in range(cute.size(operand)):
        for axis in range(2):
            target[thread, i, 0, axis] = Int32(registers[i][axis])
            target[thread, i, 1, axis] = Int32(operand[i][axis])


def wgmma_pairs(target, thread, first, second):
    """Writes the accumulator of `first` as A of `second`, and A as `second` expects it."""
    c = wgmma.Wgmma(first, "bfloat16").coordinates(thread)
    mma = wgmma.Wgmma(second, "bfloat16")._tiled_mma(in_registers=True)
    a = mma.get_slice(thread).partition_A(cute.make_identity_tensor((second.m, second.k)))
    write_pairs(target, thread, cute.make_tensor(c.iterator, wgmma.as_a_operand(c.layout)), a)


def mma_pairs(target, thread, first, second, dtype):
    """Writes the same for mma.sync."""
    view = mma_sync._as_tf32_operand if dtype == "float32" else mma_sync._as_16_bit_operand
    c = mma_sync.MmaSync(first, dtype).coordinates(thread)
    mma = mma_sync.MmaSync(second, dtype).mma
    a = mma.get_slice(thread).partition_A(cute.make_identity_tensor((second.m, second.k)))
    write_pairs(target, thread, cute.make_tensor(c.iterator, view(c.layout)), a)


def pairs_tensor(out, spec):
    """Returns the output array as (thread, register, which, axis)."""
    registers = spec.accumulator_registers
    layout = cute.make_layout((spec.threads, registers, 2, 2), stride=(registers * 4, 4, 2, 1))
    return cute.make_tensor(out, layout)


@cute.jit
def wgmma_relayout(out: cute.Pointer, first: cutlass.Constexpr, second: cutlass.Constexpr):
    """Writes the accumulator of `first` as A of `second`, and A as `second` expects it, for all threads."""
    target = pairs_tensor(out, first)
    for thread in range(first.threads):
        wgmma_pairs(target, thread, first, second)


@cute.jit
def mma_relayout(out: cute.Pointer, first: cutlass.Constexpr, second: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """Writes the same for mma.sync."""
    target = pairs_tensor(out, first)
    for thread in range(first.threads):
        mma_pairs(target, thread, first, second, dtype)


def write_rows(target, thread, spec):
    """Writes (row, column) of each element of one thread's row view."""
    view = wgmma.row_view(wgmma.Wgmma(spec, "bfloat16").coordinates(thread))
    for i in range(cute.size(view, mode=[0])):
        for j in range(cute.size(view, mode=[1])):
            for axis in range(2):
                target[thread, i, j, axis] = Int32(view[i, j][axis])


@cute.jit
def wgmma_rows(out: cute.Pointer, spec: cutlass.Constexpr, rows: cutlass.Constexpr):
    """Writes (row, column) of each element of wgmma.row_view, which has `rows` rows a thread."""
    columns = spec.n // 4
    shape, stride = (spec.threads, rows, columns, 2), (rows * columns * 2, columns * 2, 2, 1)
    target = cute.make_tensor(out, cute.make_layout(shape, stride=stride))
    for thread in range(spec.threads):
        write_rows(target, thread, spec)
