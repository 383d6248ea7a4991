"""Standalone component GEMM on wgmma: one GEMM as a kernel of its own, with tiles loaded by TMA.

There is one block for each tile, as in standalone_sm80.py. One thread issues the copies of both tiles, strip by strip,
and an mbarrier counts their bytes. Then every warpgroup computes its rows of C.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.experimental.primitives as prim
from cutlass import GridConstant, Int32, Int64

from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.tma import SWIZZLES
from cutlass_py_attn.kernels.common.wgmma import Wgmma, smem_tile_at
from cutlass_py_attn.kernels.component_gemms import products, standalone
from cutlass_py_attn.kernels.component_gemms.standalone import Params
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import swizzle_bytes


class StandaloneGemmSm90:
    """The kernel of one component GEMM's Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.component_gemm = products.BY_NAME[build.component_gemm]
        self.mma = Wgmma(self.component_gemm.spec(build), build.dtype)

    @cute.jit
    def __call__(self, *values):
        p = params.build_struct(Params, abi.COMPONENT_GEMM, values)
        spec = self.mma.spec
        maps = (self.placeholder_map(p.a, spec.a_shape), self.placeholder_map(p.b, spec.b_shape))
        params.set_entry_name(self.build, self.kernel)
        self.kernel(*maps, p).launch(grid=(p.tiles, 1, 1), block=(self.build.threads, 1, 1))

    def placeholder_map(self, address: Int64, shape: tuple[int, int]) -> tensor_maps.TensorMap:
        """Returns a tensor map for tracing: the launch passes the map of the plan, and the kernel reads 128 bytes."""
        rows, columns = shape
        width = swizzle_bytes(columns)
        view = cute.make_tensor(params.pointer(address, self.dtype), cute.make_layout(shape, stride=(columns, 1)))
        box = (rows, width // 2)
        return tensor_maps.create_tensor_map_tiled_from_view(view, box_dims=box, swizzle=SWIZZLES[width])

    @cute.kernel
    def kernel(
        self,
        map_a: GridConstant[tensor_maps.TensorMap],
        map_b: GridConstant[tensor_maps.TensorMap],
        p: Params,
    ):
        build, spec = self.build, self.mma.spec
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = tile_copy.smem_base(build)
        s_a = smem_tile_at(base, build.buffer("a").offset, self.dtype, spec.a_shape)
        s_b = smem_tile_at(base, build.buffer("b").offset, self.dtype, spec.b_shape)
        barrier = cute.recast_ptr((base + build.buffer("barrier").offset).align(8), dtype=Int64)

        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                tile_bytes = build.buffer("a").bytes + build.buffer("b").bytes
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, tile_bytes)
                self.load(map_a, "a", spec.a_shape, base, tile, barrier)
                self.load(map_b, "b", spec.b_shape, base, tile, barrier)

        operands = self.component_gemm.operands(self.mma, s_a, s_b, thread)
        r_c = self.mma.accumulator(thread)
        if cutlass.const_expr(spec.accumulate):
            r_c.fill(0.0)
        cute.arch.mbarrier_wait(barrier, 0)
        self.component_gemm.issue(self.mma, r_c, operands)
        self.mma.wait()
        standalone.store_c(p.c, tile, self.mma, r_c, thread)

    def load(
        self,
        source: Any,
        name: str,
        shape: tuple[int, int],
        base: cute.Pointer,
        tile: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Issues the copies of one tile, one strip as wide as the swizzle at a time. One thread calls this."""
        rows, columns = shape
        width = swizzle_bytes(columns)
        for strip in range(columns * 2 // width):
            target = (base + (self.build.buffer(name).offset + strip * rows * width)).align(128)
            coordinates = [Int32(strip * width // 2), tile * rows]
            prim.cp_async_bulk_tensor_shared_cta_global(target, source.get_ptr(), coordinates, barrier)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return StandaloneGemmSm90(build), params.example_arguments(abi.COMPONENT_GEMM)
