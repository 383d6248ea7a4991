"""Standalone component GEMM on mma.sync: one GEMM as a kernel of its own, to localise a fault of a fused kernel.

There is one block for each tile. cp.async loads A (tiles, rows, columns) and B into shared memory, in the layout of the
fused kernels. The component GEMM executes once, and float32 C (tiles, m, n) is stored from registers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import MmaSync
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.component_gemms import products, standalone
from cutlass_py_attn.kernels.component_gemms.standalone import Params
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build


class StandaloneGemmSm80:
    """The kernel of one component GEMM's Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.component_gemm = products.BY_NAME[build.component_gemm]
        self.mma = MmaSync(self.component_gemm.spec(build), build.dtype)

    @cute.jit
    def __call__(self, *values):
        p = params.build_struct(Params, abi.COMPONENT_GEMM, values)
        params.set_entry_name(self.build, self.kernel)
        self.kernel(p).launch(grid=(p.tiles, 1, 1), block=(self.build.threads, 1, 1))

    @cute.kernel
    def kernel(self, p: Params):
        spec = self.mma.spec
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        base = tile_copy.smem_base(self.build)
        s_a = self.load(p.a, "a", spec.a_shape, base, tile, thread)
        s_b = self.load(p.b, "b", spec.b_shape, base, tile, thread)
        cute.arch.cp_async_commit_group()

        operands = self.component_gemm.operands(self.mma, s_a, s_b, thread)
        r_c = self.mma.accumulator(thread)
        if cutlass.const_expr(spec.accumulate):
            r_c.fill(0.0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.component_gemm.issue(self.mma, r_c, operands)
        standalone.store_c(p.c, tile, self.mma, r_c, thread)

    def load(
        self,
        address: Int64,
        name: str,
        shape: tuple[int, int],
        base: cute.Pointer,
        tile: Int32,
        thread: Int32,
    ) -> cute.Tensor:
        """Starts copying this block's tile of A or B into its buffer, and returns the tile in shared memory."""
        rows, columns = shape
        target = tile_copy.smem_tile(base, self.build.buffer(name).offset, self.dtype, rows, columns)
        start = standalone.tile_pointer(address, self.dtype, tile, rows * columns)
        source = tile_copy.GmemTile(start, Int64(columns), Int32(rows), columns, tile_copy.VECTOR_BYTES)
        tile_copy.copy_g2s(thread, self.build.threads, source, target)
        return target


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return StandaloneGemmSm80(build), params.example_arguments(abi.COMPONENT_GEMM)
