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
from cutlass_py_attn.problem import LSE_PADDING


class Delta:
    """The row statistics of one Build, called from its kernel."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]

    @cute.jit
    def run(self, p: Any):
        """One row for each eight threads of the block."""
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        head, batch = head + p.first_head, batch + p.first_batch
        of = lengths.sequence(build, p, batch)
        row, lane = block * DELTA_ROWS + thread // DELTA_LANES, thread % DELTA_LANES
        total = Float32(0.0)
        if row < of.num_queries:
            at = (of.batch, head, of.query_start + row)
            output, grad = params.rows(build, p, "output", at), params.rows(build, p, "grad_output", at)
            vector = build.access_bytes // build.item_bytes
            step = params.stride(p, "grad_output", "column") if cutlass.const_expr(moves.by_element(build)) else vector
            for index in cutlass.range(lane, build.head_dim_value // vector, DELTA_LANES, unroll=4):
                total = total + self.dot(output + index * vector, grad + index * step, vector)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=DELTA_LANES)
        if (lane == 0) & (row < round_up(self.rows(of), build.tile_m)):
            lse = Float32.inf
            if row < of.num_queries:
                group = Int64(batch) * p.num_heads + head
                lse = params.scalar(p.logsumexp, Float32, group * round_up(p.num_queries, LSE_PADDING) + row)
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

    def dot(self, left: cute.Pointer, right: cute.Pointer, count: int) -> Float32:
        """Sum of products of `count` elements, in float32."""
        a, b = cute.make_rmem_tensor(count, self.dtype), cute.make_rmem_tensor(count, self.dtype)
        cute.autovec_copy(cute.make_tensor(left, cute.make_layout(count)), a)
        cute.autovec_copy(cute.make_tensor(right, cute.make_layout(count)), b)
        product = a.load().to(Float32) * b.load().to(Float32)
        return product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
