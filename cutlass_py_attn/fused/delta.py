"""Delta: delta = rowsum(dO O), and the logsumexp in base 2, for every query row of whole tiles.

Eight threads share a row and read it side by side. Rows past the end and rows without keys get a
logsumexp of +inf, whichever of -inf, +inf the forward left there, so that their weights become exp2(-inf) = 0.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cutlass_py_attn.parts import lengths, moves, params
from cutlass_py_attn.parts.integers import larger, round_up
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import DELTA_LANES, DELTA_ROWS


class Delta:
    """The row statistics of one Build, called from its kernel."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.vector = build.access_bytes // build.item_bytes  # elements that a thread reads at once

    @cute.jit
    def run(self, p: Any):
        """One row for each eight threads of the block."""
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        head, batch = head + p.first_head, batch + p.first_batch
        of = lengths.sequence(build, p, batch)
        row, lane = block * DELTA_ROWS + thread // DELTA_LANES, thread % DELTA_LANES
        total, lse = Float32(0.0), Float32.inf
        if row < of.num_queries:
            lse = params.scalar(p.logsumexp, Float32, lengths.logsumexp_start(p, batch, head) + row)
            at = (of.batch, head, of.query_start + row)
            rows = params.rows(build, p, "output", at), params.rows(build, p, "grad_output", at)
            whole, rest = divmod(build.head_dim_value // self.vector, DELTA_LANES)
            for step in cutlass.range(whole, unroll=4):
                total = total + self.dot(p, rows, step * DELTA_LANES + lane)
            if lane < rest:
                total = total + self.dot(p, rows, whole * DELTA_LANES + lane)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=DELTA_LANES)
        if (lane == 0) & (row < round_up(self.rows(of), build.tile_m)):
            empty = (lse == -Float32.inf) | (lse == Float32.inf)
            target = (Int64(head) * p.total_tiles + of.first_tile) * build.tile_m + row
            statistics = (
                (p.delta, cutlass.select_(empty, Float32(0.0), total)),  # others store NaN as the output of such a row
                (p.logsumexp_log2, cutlass.select_(empty, Float32.inf, lse * math.log2(math.e))),
            )
            for address, value in statistics:
                cute.make_tensor(params.pointer(address, Float32, 4) + target, cute.make_layout(1))[0] = value

    def rows(self, of: lengths.Sequence) -> Any:
        """Rows of a sequence that the main kernel may read the statistics of: of one tile at least."""
        return larger(of.num_queries, 1) if self.build.has("varlen") else of.num_queries

    def dot(self, p: Any, rows: tuple[cute.Pointer, cute.Pointer], index: Any) -> Float32:
        """Sum of products of vector `index` of the rows of O and dO, in float32."""
        count, (output, grad) = self.vector, rows
        step = params.stride(p, "grad_output", "column") if moves.by_element(self.build) else count
        a, b = cute.make_rmem_tensor(count, self.dtype), cute.make_rmem_tensor(count, self.dtype)
        for start, width, values in ((output, count, a), (grad, step, b)):
            source = start + params.multiple(Int64(index) * width, count)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
        product = a.load().to(Float32) * b.load().to(Float32)
        return product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
