"""sm90 query gradient of variant key_registers: dQ^T = K^T dS^T, staged and added like dQ.

The dQ warpgroup loads K^T of a key tile into registers once, and its products read dS alone from shared memory. A piece
of dQ^T has all columns of dQ as its rows and some queries as its columns. The sum in memory has the order of its
registers; the postprocess kernel transposes it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.backward_parts.postprocess import BackwardPostprocess
from cutlass_py_attn.kernels.common import seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import Operands, RegisterOperand
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.common.wgmma import Wgmma, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import grad_q
from cutlass_py_attn.kernels.sm90_backward.grad_query import DsK, GradQueryGemm, GradQuerySm90, Piece, warpgroup_gemm
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec


class TransposedGradQueryGemm(GradQueryGemm):
    """dQ^T = K^T dS^T of one Build, a piece at a time: (columns, rows) = (columns, tile_n) (tile_n, rows)."""

    def spec(self) -> GemmSpec:
        """Returns the GEMM of one piece."""
        return replace(grad_q.spec(self.build).swap_ab("dQ^T = K^T dS^T"), m=self.columns, n=self.rows)

    def mma(self) -> Wgmma:
        """Returns the GEMM of one piece on the dQ warpgroup."""
        return warpgroup_gemm(self.spec(), self.build.dtype)

    def key_operand(self, s_k: cute.Tensor, thread: Int32) -> cute.Tensor:
        """Returns K^T of a key tile (tile_n, columns) in registers."""
        mma = self.mma()
        registers = mma.a_registers(thread)
        mma.load_a(transposed(s_k), registers, thread)
        return registers

    def pieces(self, operands: DsK, thread: Int32, release: Callable[[], None]) -> Iterator[Piece]:
        """Computes one piece after the other; calls `release` once dS has been read."""
        mma = self.mma()
        for number in range(self.count):
            s_ds = cute.local_tile(operands.s_ds, (self.rows, self.build.tile_n), (number, 0))
            r_dq = mma.accumulator(thread)
            grad_q.issue(mma, r_dq, Operands(RegisterOperand(operands.key), mma.b_operand(s_ds)))
            mma.wait()
            if number == self.count - 1:
                release()
            yield Piece(number, number * self.rows, 0, mma, r_dq)


class TransposedGradQuery(GradQuerySm90):
    """The additions of one Build to dq_accum, in the order of the accumulators of dQ^T."""

    gemm_type = TransposedGradQueryGemm


class TransposedPostprocess(BackwardPostprocess):
    """The conversion of these sums."""

    def __init__(self, build: Build, accum: GradQueryAccum, gemm: Callable[[GemmSpec, str], Any]) -> None:
        super().__init__(build, accum, gemm)
        self.product = TransposedGradQueryGemm(build)

    @cute.jit
    def run(self, p: Any):
        """Converts one sum."""
        build, dtype = self.build, DTYPES[self.build.dtype]
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, batch = cute.arch.block_idx()
        head, batch = head + p.first_head, batch + p.first_batch
        of = seqlen_info.create(build, p, batch)
        query0 = query_tile * build.tile_m
        if query0 < of.num_queries:
            base, mma = tile_copy.smem_symbol(), self.product.mma()
            s_dq = smem_tile_at(base, 0, dtype, (build.tile_m, build.columns))
            op = warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4)
            copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, dtype), mma.mma).get_slice(thread)
            start = self.accum.pointer(p, self.accum.tile_index(p, head, of.first_tile + query_tile))
            for number in cutlass.range_constexpr(self.product.count):
                values = mma.accumulator(thread)
                self.accum.load(start + number * self.product.elements, values, thread)
                values.store(values.load() * p.scale)
                part = cute.local_tile(s_dq, (self.product.rows, self.product.columns), (number, 0))
                r_dq = tile_copy.converted(values, dtype)
                cute.copy(copy, copy.retile(r_dq), copy.partition_D(transposed(part)))
            cute.arch.sync_threads()
            coordinates = (of.batch, head, of.query_start + query0)
            rows = of.num_queries - query0
            target = tile_copy.gmem_tile(build, p, "grad_query", coordinates, rows, build.head_dim)
            tile_copy.copy_s2g(thread, self.threads, s_dq, target)
