"""Wide Hopper query gradient: a block's share of the columns of dQ = dS K, of its own and of the other block's keys.

It is added to the sum by vector reductions from registers: shared memory has no room to stage it.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.fused.hopper_grad_query import BARRIER, HopperGradQuery
from cutlass_py_attn.gemm import grad_q
from cutlass_py_attn.gemm.gemm import WARPGROUP_THREADS
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import tile_at
from cutlass_py_attn.parts.integers import smaller
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.shared_memory import shared_columns


class WideGradQuery(HopperGradQuery):
    """Where and how one wide Hopper Build sums the query gradient."""

    @cute.jit
    def add_half(self, target: cute.Pointer, both: tuple, rank: Int32, thread: Int32):
        """7  dQ = dS K of one query tile, a piece at a time; `both`: this block's dS and the other's."""
        columns = self.piece[1]
        here = shared_columns(self.build) // columns
        first = rank * here
        for number in cutlass.range(smaller(self.build.columns // columns - first, here), unroll=1):
            self.add_piece(target, both, (first + number, number), thread)

    def add_piece(self, target: cute.Pointer, both: tuple, at: tuple, thread: Int32) -> None:
        """One piece; `at`: its number, and that among this block's pieces."""
        build, (rows, columns), dtype = self.build, self.piece, DTYPES[self.build.dtype]
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        keys = [
            tile_at(base, build.buffer(name).offset, dtype, (build.tile_n, held), width=swizzle_bytes(build.columns))
            for name, held in (("key", build.columns), ("other_key", shared_columns(build)))
        ]
        spec = replace(grad_q.spec(build), m=rows, n=columns)
        products = self.product_of(spec), self.product_of(replace(spec, accumulate=True))
        r_dq = products[0].accumulator(thread)
        for product, ds, tile, number in zip(products, both, keys, at, strict=True):
            right = cute.local_tile(tile, (build.tile_n, columns), (0, number))
            product.issue(r_dq, Operands(product.a_operand(ds, thread), product.b_operand(transposed(right))))
        products[0].wait()
        self.add(target + at[0] * (rows * columns), r_dq, thread)
        # Without it the compiler would move additions behind the next product, and keep what they add.
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=WARPGROUP_THREADS)
