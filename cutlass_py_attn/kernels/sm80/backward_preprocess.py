"""Backward preprocess: delta = rowsum(dO O) - dlogsumexp, and the logsumexp in base 2, for rows of whole tiles.

The derivative of a row's logsumexp by a score of it is the weight P_ij, so that dS_ij = P_ij (dP_ij - delta_i) contains
the gradient of logsumexp, whose address is 0 if there is none. DELTA_LANES threads share a row and read neighbouring
vectors of it. Rows past the last query and rows without keys get a logsumexp of +inf, whether the forward left -inf or
+inf there, so that their weights become exp2(-inf) = 0.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cutlass_py_attn.integers import larger, round_up
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.entry_points import DELTA_LANES, DELTA_ROWS


@dataclass(frozen=True)
class OutputRow:
    """One row of O and of dO in global memory."""

    output: cute.Pointer
    grad_output: cute.Pointer


class BackwardPreprocess:
    """The row statistics of one backward Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.vector = build.vector_bytes // build.item_bytes  # elements of one load

    @cute.jit
    def run(self, p: Any):
        """Computes DELTA_ROWS rows, one for each DELTA_LANES threads of the block."""
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        head, batch = head + p.first_head, batch + p.first_batch
        of = seqlen_info.create(build, p, batch)
        row, lane = block * DELTA_ROWS + thread // DELTA_LANES, thread % DELTA_LANES
        total, lse = Float32(0.0), Float32.inf
        if row < of.num_queries:
            lse = params.load_scalar(p.logsumexp, Float32, seqlen_info.logsumexp_offset(p, batch, head) + row)
            coordinates = (of.batch, head, of.query_start + row)
            rows = OutputRow(*(params.row_pointer(build, p, name, coordinates) for name in ("output", "grad_output")))
            whole, rest = divmod(build.head_dim_value // self.vector, DELTA_LANES)
            for step in cutlass.range(whole, unroll=4):
                total = total + self.dot(p, rows, step * DELTA_LANES + lane)
            if lane < rest:
                total = total + self.dot(p, rows, whole * DELTA_LANES + lane)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=DELTA_LANES)
        if (lane == 0) & (row < round_up(self.num_rows(of), build.tile_m)):
            is_empty = (lse == -Float32.inf) | (lse == Float32.inf)
            if (p.grad_logsumexp != 0) & (row < of.num_queries):
                index = seqlen_info.logsumexp_offset(p, batch, head) + row
                total = total - params.load_scalar(p.grad_logsumexp, Float32, index)
            index = (Int64(head) * p.total_tiles + of.first_tile) * build.tile_m + row
            statistics = (
                # Other libraries store NaN as the output of a row without keys.
                (p.delta, cutlass.select_(is_empty, Float32(0.0), total)),
                (p.logsumexp_log2, cutlass.select_(is_empty, Float32.inf, lse * math.log2(math.e))),
            )
            for address, value in statistics:
                cute.make_tensor(params.pointer(address, Float32, 4) + index, cute.make_layout(1))[0] = value

    def num_rows(self, of: seqlen_info.SeqlenInfo) -> Any:
        """Returns the rows of a sequence whose statistics the main kernel may read: one tile at least with varlen."""
        return larger(of.num_queries, 1) if self.build.has("varlen") else of.num_queries

    def dot(self, p: Any, rows: OutputRow, index: Any) -> Float32:
        """Returns the dot product of vector `index` of both rows, in float32."""
        count = self.vector
        step = params.stride(p, "grad_output", "column") if tile_copy.copies_elements(self.build) else count
        r_o, r_do = cute.make_rmem_tensor(count, self.dtype), cute.make_rmem_tensor(count, self.dtype)
        for start, width, values in ((rows.output, count, r_o), (rows.grad_output, step, r_do)):
            source = start + params.assume_multiple(Int64(index) * width, count)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
        product = r_o.load().to(Float32) * r_do.load().to(Float32)
        return product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
