"""Backward preprocess: delta = rowsum(dO O) - dlogsumexp, and the logsumexp in base 2, for rows of whole tiles.

The derivative of a row's logsumexp by a score of it is the weight P_ij, so that dS_ij = P_ij (dP_ij - delta_i) contains
the gradient of logsumexp, whose address is 0 if there is none. DELTA_LANES threads share a row and read neighbouring
vectors of it. Rows past the last query and rows without keys get a logsumexp of +inf, whether the forward left -inf or
+inf there, so that their weights become exp2(-inf) = 0.

The sm90 backward with dS^T in registers adds products to these numbers: it has -delta in place of delta, and variant
ds_registers also -logsumexp / scale in place of logsumexp, which the factor scale turns to -inf in such rows.

Where the main kernel of the sm90 family adds up dQ, each block also clears as many rows of the sums as it has rows, and
the first blocks clear the counters. All blocks clear the sums of key tiles whose queries blocks share.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div, larger, round_up
from cutlass_py_attn.kernels.backward_parts.layout import (
    dq_piece_columns,
    dq_pieces,
    shared_tile_layout,
    starts_from_logsumexp,
)
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import DELTA_LANES, DELTA_ROWS, ROW_THREADS, delta_clears_sums
from cutlass_py_attn.launch.variants import KEEPS_DS, SHARED_END

VECTOR = 4  # float32 that a thread clears at once


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
        if cutlass.const_expr(delta_clears_sums(build)):
            self.clear_sums(p, of, block, head)
        if cutlass.const_expr(SHARED_END in build.options):
            self.clear_shared_sums(p, block, head, batch)
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
                (p.delta, self.stored_delta(total, is_empty)),
                (p.logsumexp_log2, self.stored_logsumexp(p, lse, is_empty)),
            )
            for address, value in statistics:
                cute.make_tensor(params.pointer(address, Float32, 4) + index, cute.make_layout(1))[0] = value

    def stored_delta(self, total: Float32, is_empty: cutlass.Boolean) -> Float32:
        """Returns what is stored for delta; other libraries store NaN as the output of a row without keys."""
        delta = cutlass.select_(is_empty, Float32(0.0), total)
        return -delta if self.build.variant in KEEPS_DS else delta

    def stored_logsumexp(self, p: Any, lse: Float32, is_empty: cutlass.Boolean) -> Float32:
        """Returns what is stored for the logsumexp, in natural units in `lse`."""
        if starts_from_logsumexp(self.build):
            return -cutlass.select_(is_empty, Float32.inf, lse) / p.scale
        return cutlass.select_(is_empty, Float32.inf, lse * math.log2(math.e))

    @cute.jit
    def clear_sums(self, p: Any, of: Any, block: Int32, head: Int32):
        """Clears the block's share of the dQ sums of one head and sequence, and the counters."""
        build, pieces = self.build, dq_pieces(self.build)
        thread, _, _ = cute.arch.thread_idx()
        row0 = block * DELTA_ROWS
        if row0 < round_up(self.num_rows(of), build.tile_m):
            tile = Int64(head) * p.total_tiles + of.first_tile
            columns = pieces * dq_piece_columns(build)
            first = params.pointer(p.grad_query_accum, Float32) + (tile * build.tile_m + row0) * columns
            zeros = cute.make_rmem_tensor(VECTOR, Float32)
            zeros.fill(0.0)
            for step in cutlass.range_constexpr(ceil_div(DELTA_ROWS * columns, ROW_THREADS * VECTOR)):
                index = (step * ROW_THREADS + thread) * VECTOR
                if index < DELTA_ROWS * columns:
                    cute.autovec_copy(zeros, cute.make_tensor(first + index, cute.make_layout(VECTOR)))
            if cutlass.const_expr(build.deterministic):
                self.clear_semaphores(p, tile + row0 // build.tile_m, row0 % build.tile_m == 0)
        if (block == 0) & (head == 0) & (of.index == 0) & (thread == 0):
            self.clear_counter(p.tile_count_semaphore, Int64(0))

    @cute.jit
    def clear_shared_sums(self, p: Any, block: Int32, head: Int32, batch: Int32):
        """Clears the block's share of the sums of key tiles whose queries blocks share."""
        thread, _, _ = cute.arch.thread_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first = ((batch * p.num_heads + head) * blocks + block) * ROW_THREADS + thread
        threads = p.batch * p.num_heads * blocks * ROW_THREADS
        vectors = p.shared_key_tiles * (shared_tile_layout(self.build).total // VECTOR)
        zeros = cute.make_rmem_tensor(VECTOR, Float32)
        zeros.fill(0.0)
        for step in cutlass.range(ceil_div(vectors, threads), unroll=1):
            vector = step * threads + first
            if vector < vectors:
                start = params.pointer(p.shared_sums, Float32) + vector * VECTOR
                cute.autovec_copy(zeros, cute.make_tensor(start, cute.make_layout(VECTOR)))

    @cute.jit
    def clear_semaphores(self, p: Any, tile: Any, is_first: Any):
        """Clears the semaphores of query tile `tile`; `is_first` in the first block of the tile."""
        pieces = dq_pieces(self.build)
        thread, _, _ = cute.arch.thread_idx()
        if is_first & (thread < pieces):
            self.clear_counter(p.dq_semaphore, tile * pieces + thread)

    def clear_counter(self, address: Int64, index: Int64) -> None:
        """Sets an int32 of an array to zero."""
        cute.make_tensor(params.pointer(address, Int32, 4) + index, cute.make_layout(1))[0] = Int32(0)

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
