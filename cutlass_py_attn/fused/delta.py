"""Delta: delta = rowsum(dO O), and the logsumexp in base 2, for every query row of whole tiles.

Eight threads share a row and read 128 bytes of it at a time. Rows past the end and rows without keys get a
logsumexp of +inf, whichever of -inf, +inf the forward left there, so that their weights become exp2(-inf) = 0.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.gemm.mma_sync import DTYPES
from cutlass_py_attn.parts import params
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import DELTA_LANES, DELTA_ROWS
from cutlass_py_attn.problem import LSE_PADDING

VECTOR_BYTES = 16


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
        row, lane = block * DELTA_ROWS + thread // DELTA_LANES, thread % DELTA_LANES
        total = Float32(0.0)
        if row < p.num_queries:
            output = params.slice_at(
                p.output, self.dtype, (batch, p.output_batch), (head, p.output_head), (row, p.output_row)
            )
            grad = params.slice_at(
                p.grad_output,
                self.dtype,
                (batch, p.grad_output_batch),
                (head, p.grad_output_head),
                (row, p.grad_output_row),
            )
            vector = VECTOR_BYTES // build.item_bytes
            vectors = build.head_dim_value // vector
            for step in cutlass.range_constexpr(ceil_div(vectors, DELTA_LANES)):
                index = lane + step * DELTA_LANES
                if index < vectors:
                    total = total + self.dot(output + index * vector, grad + index * vector, vector)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=DELTA_LANES)
        if lane == 0:
            self.store(p, batch, head, row, total)

    def dot(self, left: cute.Pointer, right: cute.Pointer, count: int) -> Float32:
        """Sum of products of `count` elements, in float32."""
        a, b = cute.make_rmem_tensor(count, self.dtype), cute.make_rmem_tensor(count, self.dtype)
        cute.autovec_copy(cute.make_tensor(left, cute.make_layout(count)), a)
        cute.autovec_copy(cute.make_tensor(right, cute.make_layout(count)), b)
        product = a.load().to(Float32) * b.load().to(Float32)
        return product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    @cute.jit
    def store(self, p: Any, batch: Int32, head: Int32, row: Int32, total: Float32):
        """Write delta and the base-2 logsumexp of one row."""
        group = Int64(batch) * p.num_heads + head
        lse = Float32.inf
        if row < p.num_queries:
            source = params.pointer(p.logsumexp, Float32, 4) + group * round_up(p.num_queries, LSE_PADDING) + row
            lse = cute.make_tensor(source, cute.make_layout(1))[0]
        empty = lse == -Float32.inf
        target = group * p.query_tiles * self.build.tile_m + row
        statistics = (
            (p.delta, total),
            (p.logsumexp_log2, cutlass.select_(empty, Float32.inf, lse * math.log2(math.e))),
        )
        for address, value in statistics:
            cute.make_tensor(params.pointer(address, Float32, 4) + target, cute.make_layout(1))[0] = value
