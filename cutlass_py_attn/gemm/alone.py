"""Alone: a room as a kernel of its own on mma.sync; it localises a fault that the fused kernels only show.

One block for each tile: A [tiles, rows, columns] and B come by cp.async into shared memory laid out as in the
fused kernels, the room's product runs once, and float32 C [tiles, m, n] is written from registers.
"""

import importlib
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.gemm.mma_sync import MmaSync
from cutlass_py_attn.parts import moves, params
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.plan import Build

Params = params.struct("RoomParams", abi.ROOM)


class Room:
    """One room of a Build, as both shells hold it."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.room = importlib.import_module(f"cutlass_py_attn.gemm.{build.room}")
        self.spec = self.room.spec(build)
        self.dtype = DTYPES[build.dtype]


class Alone(Room):
    """The kernel of one room's Build."""

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.ROOM, values)
        params.name_entry(self.build, self.kernel)
        self.kernel(p).launch(grid=(p.tiles, 1, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Params):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_a = self.load(p.a, "a", spec.a_shape, base, tile, thread)
        s_b = self.load(p.b, "b", spec.b_shape, base, tile, thread)
        cute.arch.cp_async_commit_group()

        product = MmaSync(spec, self.build.dtype)
        parts = self.room.operands(product, s_a, s_b, thread)
        r_c = product.accumulator(thread)
        if cutlass.const_expr(spec.accumulate):
            r_c.fill(0.0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.room.issue(product, r_c, parts)
        write_c(p.c, tile, product, r_c, thread)

    def load(
        self,
        address: Int64,
        name: str,
        shape: tuple[int, int],
        base: cute.Pointer,
        tile: Int32,
        thread: Int32,
    ) -> cute.Tensor:
        """Start copying this block's tile of A or B into its buffer."""
        rows, columns = shape
        target = moves.shared_tile(base, self.build.buffer(name).offset, self.dtype, rows, columns)
        start = tile_at(address, self.dtype, tile, rows * columns)
        source = moves.Source(start, Int64(columns), Int32(rows), columns, moves.VECTOR_BYTES)
        moves.load_tile(thread, self.build.threads, source, target)
        return target


def tile_at(address: Int64, dtype: Any, tile: Int32, elements: int) -> cute.Pointer:
    """Tile number `tile` of an array of tiles with that many elements, a multiple of 16 bytes."""
    return params.pointer(address, dtype) + cute.assume(Int64(tile) * elements, divby=128 // dtype.width)


def write_c(address: Int64, tile: Int32, product: Any, values: cute.Tensor, thread: Int32) -> None:
    """Write this thread's part of C, two columns at a time: what lies side by side in its registers."""
    m, n = product.spec.m, product.spec.n
    target = cute.make_tensor(tile_at(address, Float32, tile, m * n), cute.make_layout((m, n), stride=(n, 1)))
    cute.autovec_copy(values, product.mma.get_slice(thread).partition_C(target))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernel, and arguments to compile it with."""
    return Alone(build), params.representative(abi.ROOM)
