"""Backward postprocess: scales the float32 sums of dQ, converts them and writes them to grad_query."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute

from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.common import seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.dynamic_tiles import column_slice
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.component_gemms.products import grad_q
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import GemmSpec


class BackwardPostprocess:
    """The conversion of one Build's dq_accum; a block converts one sum.

    accum: the sums that the main kernel leaves
    gemm: returns the MmaSync or Wgmma whose accumulator has the order of a sum
    """

    def __init__(self, build: Build, accum: GradQueryAccum, gemm: Callable[[GemmSpec, str], Any]) -> None:
        self.build, self.accum, self.gemm = build, accum, gemm
        self.threads = accum.threads

    @cute.jit
    def run(self, p: Any):
        """Converts one sum."""
        build, dtype = self.build, DTYPES[self.build.dtype]
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        query_tile, sum_of_tile = block // self.accum.sums, block % self.accum.sums
        head, batch = head + p.first_head, batch + p.first_batch
        of = seqlen_info.create(build, p, batch)
        mma_dsk = self.gemm(replace(grad_q.spec(build), n=self.accum.columns), build.dtype)
        values = mma_dsk.accumulator(thread)
        query0 = query_tile * build.tile_m
        # A head dim split has sums past the last column, because a column block is added to as a whole.
        if (query0 < of.num_queries) & (sum_of_tile * self.accum.columns < build.head_dim):
            tile_index = self.accum.tile_index(p, head, of.first_tile + query_tile)
            index = tile_index * self.accum.sums + sum_of_tile
            self.accum.load(self.accum.pointer(p, index), values, thread)
            values.store(values.load() * p.scale)
            base = tile_copy.smem_symbol()
            s_dq = tile_copy.smem_tile(base, 0, dtype, build.tile_m, self.accum.columns)
            r_dq = tile_copy.converted(values, dtype)
            tile_copy.copy_r2s(thread, mma_dsk.mma, r_dq, s_dq, tile_copy.has_stmatrix(build))
            cute.arch.sync_threads()
            coordinates = (of.batch, head, of.query_start + query0)
            rows = of.num_queries - query0
            target = tile_copy.gmem_tile(build, p, "grad_query", coordinates, rows, build.head_dim)
            if cutlass.const_expr(self.accum.sums > 1):
                target = column_slice(target, sum_of_tile * self.accum.columns, self.accum.columns)
            tile_copy.copy_s2g(thread, self.threads, s_dq, target)
