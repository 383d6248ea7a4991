"""Alone on Hopper: a room as a kernel of its own on wgmma, with tiles that TMA brings.

One block for each tile, like alone.py. One thread asks for both tiles, strip by strip, and a barrier in
shared memory counts their bytes; then every warpgroup multiplies its rows.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.experimental.primitives as prim
from cutlass import GridConstant, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.gemm.alone import Params, Room, write_c
from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.gemm.wgmma import Wgmma, tile_at
from cutlass_py_attn.parts import params
from cutlass_py_attn.parts.tma import SWIZZLES
from cutlass_py_attn.plan import Build


class AloneHopper(Room):
    """The kernel of one room's Build."""

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.ROOM, values)
        maps = (self.tensor_map(p.a, self.spec.a_shape), self.tensor_map(p.b, self.spec.b_shape))
        params.name_entry(self.build, self.kernel)
        self.kernel(*maps, p).launch(grid=(p.tiles, 1, 1), block=(self.build.threads, 1, 1))

    def tensor_map(self, address: Int64, shape: tuple[int, int]) -> tensor_maps.TensorMap:
        """A stand-in: the launch passes the map of the plan's recipe, and the kernel sees 128 bytes."""
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
        build, spec = self.build, self.spec
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_a = tile_at(base, build.buffer("a").offset, self.dtype, spec.a_shape)
        s_b = tile_at(base, build.buffer("b").offset, self.dtype, spec.b_shape)
        barrier = cute.recast_ptr((base + build.buffer("barrier").offset).align(8), dtype=Int64)

        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                both = build.buffer("a").bytes + build.buffer("b").bytes
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, both)
                self.load(map_a, "a", spec.a_shape, base, tile, barrier)
                self.load(map_b, "b", spec.b_shape, base, tile, barrier)

        product = Wgmma(spec, build.dtype)
        parts = self.room.operands(product, s_a, s_b, thread)
        r_c = product.accumulator(thread)
        if cutlass.const_expr(spec.accumulate):
            r_c.fill(0.0)
        cute.arch.mbarrier_wait(barrier, 0)
        self.room.issue(product, r_c, parts)
        product.wait()
        write_c(p.c, tile, product, r_c, thread)

    def load(
        self,
        source: Any,
        name: str,
        shape: tuple[int, int],
        base: cute.Pointer,
        tile: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Ask for one tile, a strip as wide as the swizzle at a time; one thread calls this."""
        rows, columns = shape
        width = swizzle_bytes(columns)
        for strip in range(columns * 2 // width):
            target = (base + (self.build.buffer(name).offset + strip * rows * width)).align(128)
            corner = [Int32(strip * width // 2), tile * rows]
            prim.cp_async_bulk_tensor_shared_cta_global(target, source.get_ptr(), corner, barrier)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernel, and arguments to compile it with."""
    return AloneHopper(build), params.representative(abi.ROOM)
