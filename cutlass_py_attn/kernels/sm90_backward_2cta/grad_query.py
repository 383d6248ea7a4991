"""Query gradient of the 2-CTA backward: one block's columns of dQ = dS K, for the keys of both blocks of the cluster.

Vector reductions from registers add it to dq_accum: shared memory has no space to stage it.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.integers import smaller
from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.common import tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.wgmma import smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import grad_q
from cutlass_py_attn.kernels.sm90_backward.grad_query import GradQueryGemm, warpgroup_gemm
from cutlass_py_attn.kernels.sm90_backward_2cta.layout import first_cta_columns
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.launch.smem import swizzle_bytes


@dataclass(frozen=True)
class ClusterDs:
    """dS of one query tile in this block's shared memory: of its own keys, and of the other block's keys."""

    own: cute.Tensor
    other: cute.Tensor


class GradQuery2Cta:
    """The additions of one Build to dq_accum.

    barrier: named barrier of the warpgroup
    """

    def __init__(self, build: Build, barrier: int) -> None:
        self.build, self.barrier = build, int(barrier)
        self.accum = GradQueryAccum(build, WARPGROUP_THREADS)
        self.gemm = GradQueryGemm(build)

    @cute.jit
    def add_tile(self, target: cute.Pointer, s_ds: Any, rank: Int32, thread: Int32):
        """Computes 7  dQ = dS K of one query tile, this block's columns, and adds it to its sum, piece by piece."""
        columns = self.gemm.columns
        own_pieces = first_cta_columns(self.build) // columns
        first = rank * own_pieces
        for number in cutlass.range(smaller(self.build.columns // columns - first, own_pieces), unroll=1):
            self.add_piece(target, s_ds, first + number, number, thread)

    def add_piece(self, target: cute.Pointer, s_ds: ClusterDs, piece: Int32, own_piece: Int32, thread: Int32) -> None:
        """Adds one piece of columns.

        piece: its number among all pieces, which is its place in the key tile
        own_piece: its number among this block's pieces, which is its place in the columns of the other block's keys
        """
        build, columns, dtype = self.build, self.gemm.columns, DTYPES[self.build.dtype]
        base = tile_copy.smem_base(build)
        s_k, s_other_k = (
            smem_tile_at(
                base, build.buffer(name).offset, dtype, (build.tile_n, width), width=swizzle_bytes(build.columns)
            )
            for name, width in (("key", build.columns), ("other_key", first_cta_columns(build)))
        )
        spec = self.gemm.spec()
        mma_dsk = warpgroup_gemm(spec, build.dtype)
        mma_other_dsk = warpgroup_gemm(replace(spec, accumulate=True), build.dtype)
        r_dq = mma_dsk.accumulator(thread)
        keys = cute.local_tile(s_k, (build.tile_n, columns), (0, piece))
        grad_q.issue(mma_dsk, r_dq, grad_q.operands(mma_dsk, s_ds.own, keys, thread))
        keys = cute.local_tile(s_other_k, (build.tile_n, columns), (0, own_piece))
        grad_q.issue(mma_other_dsk, r_dq, grad_q.operands(mma_other_dsk, s_ds.other, keys, thread))
        mma_dsk.wait()
        self.accum.add(target + piece * self.gemm.elements, r_dq, thread)
        # Without a barrier the compiler would move additions past the next GEMM, and keep their values in registers.
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP_THREADS)
