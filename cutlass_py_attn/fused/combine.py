"""Combine: joins what the blocks of a decode that share the keys have of each row, by their logsumexps.

There is a block for each query row. Its warps take turns with the splits, its lanes share the columns.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.parts import lengths, moves, params
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import COMBINE_WARPS
from cutlass_py_attn.problem import F32_BYTES

VECTOR = 4  # float32 columns that a lane reads at once
UNROLL = 4  # splits on their way at once


class Combine:
    """The combine kernel of one Build, called from its kernel, and where the parts lie."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]

    def part(self, p: Any, at: tuple[Any, Any, Any], split: Any) -> Int64:
        """Number of a split's part of the row at (batch, head of key, row) among all."""
        batch, head_key, row = at
        group = lengths.group_of(self.build, p)
        heads_key = p.num_heads // group
        number = (Int64(batch) * heads_key + head_key) * (p.num_queries * group) + row
        return number * p.num_splits_key + split

    def partial_row(self, p: Any, at: tuple[Any, Any, Any], split: Any) -> cute.Pointer:
        """Where a split's output of a row starts."""
        offset = cute.assume(self.part(p, at, split) * self.build.columns_value, divby=VECTOR)
        return params.pointer(p.partial_output, Float32) + offset

    def store(self, p: Any, at: tuple[Any, Any, Any], column: Int32, values: cute.Tensor) -> None:
        """Write two columns of the output's row at (batch, head, row)."""
        build = self.build
        at_once = build.access_bytes >= 2 * build.item_bytes
        start = params.rows(build, p, "output", at)
        moves.store_pair(moves.converted(values, self.dtype), start, column, build.head_dim_value, at_once)

    @cute.jit
    def run(self, p: Any):
        """One row of the output."""
        build, group = self.build, lengths.group_of(self.build, p)
        thread, _, _ = cute.arch.thread_idx()
        query, head, batch = cute.arch.block_idx()
        head, batch = head + p.first_head, batch + p.first_batch
        of = lengths.sequence(build, p, batch)
        lane = thread % WARP_THREADS
        head_key = head // group
        row = (batch, head_key, query * group + (head - head_key * group))
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        layout = cute.make_layout((COMBINE_WARPS, build.columns_value), stride=(build.columns_value, 1))
        shared = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
        if query < of.num_queries:
            first = params.pointer(p.partial_logsumexp, Float32, 4) + self.part(p, row, 0)
            maximum = self.largest(first, p.num_splits_key, lane)
            # a row that has seen no key subtracts 0, so that (-inf) - (-inf) never arises
            maximum = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
            total = self.total(first, maximum, p.num_splits_key, lane)
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            self.add_own(p, row, (first, maximum, inverse), shared, thread)
            cute.arch.sync_threads()
            column = thread * 2
            if column < build.columns_value:
                values = cute.make_rmem_tensor(2, Float32)
                for i in cutlass.range_constexpr(2):
                    values[i] = self.over_warps(shared, column + i)
                self.store(p, (of.batch, head, of.query_start + query), column, values)
            lse = (maximum + cute.math.log2(total, fastmath=True)) * math.log(2.0)
            lse = cutlass.select_(empty, -Float32.inf, lse)
            if thread == 0:
                store_logsumexp(p, (batch, head, query), lse)
        if query == 0:
            store_padding(p, (batch, head), of.num_queries, thread)

    @cute.jit
    def largest(self, first: cute.Pointer, splits: Int32, lane: Int32):
        """The largest logsumexp of a row."""
        found = -Float32.inf
        for split in cutlass.range(lane, splits, WARP_THREADS, unroll=1):
            found = cute.arch.fmax(found, cute.make_tensor(first + split, moves.ONE)[0])
        return cute.arch.warp_reduction_max(found)

    @cute.jit
    def total(self, first: cute.Pointer, maximum: Float32, splits: Int32, lane: Int32):
        """The sum of all splits' weights."""
        found = Float32(0.0)
        for split in cutlass.range(lane, splits, WARP_THREADS, unroll=1):
            found = found + cute.math.exp2(cute.make_tensor(first + split, moves.ONE)[0] - maximum, fastmath=True)
        return cute.arch.warp_reduction_sum(found)

    @cute.jit
    def add_own(self, p: Any, row: tuple, weighing: tuple, shared: cute.Tensor, thread: Int32):
        """The splits of this warp, weighed and added, to shared memory."""
        columns = self.build.columns_value
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        first, maximum, inverse = weighing
        start = self.partial_row(p, row, 0)
        for turn in cutlass.range_constexpr(ceil_div(columns, WARP_THREADS * VECTOR)):
            column = (turn * WARP_THREADS + lane) * VECTOR
            if column < columns:
                found = cute.make_rmem_tensor(VECTOR, Float32)
                found.fill(0.0)
                for split in cutlass.range(warp, p.num_splits_key, COMBINE_WARPS, unroll=UNROLL):
                    weight = cute.math.exp2(cute.make_tensor(first + split, moves.ONE)[0] - maximum, fastmath=True)
                    part = cute.make_rmem_tensor(VECTOR, Float32)
                    source = start + cute.assume(split * columns + column, divby=VECTOR)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), part)
                    found.store(found.load() + part.load() * weight)
                for i in cutlass.range_constexpr(VECTOR):
                    shared[warp, column + i] = found[i] * inverse

    def over_warps(self, shared: cute.Tensor, column: Int32) -> Float32:
        """One column, over all warps."""
        found = shared[0, column]
        for warp in range(1, COMBINE_WARPS):
            found = found + shared[warp, column]
        return found


def store_logsumexp(p: Any, at: tuple[Any, Any, Any], value: Float32) -> None:
    """Write the logsumexp at (batch, head, query)."""
    batch, head, query = at
    start = lengths.logsumexp_start(p, batch, head) + query
    cute.make_tensor(params.pointer(p.logsumexp, Float32, F32_BYTES) + start, moves.ONE)[0] = value


@cute.jit
def store_padding(p: Any, at: tuple, num_queries: Int32, thread: Int32):
    """+inf from the last query of (batch, head) to the padding's end."""
    batch, head = at
    if (thread >= num_queries) & (thread < lengths.padded(num_queries)):
        store_logsumexp(p, (batch, head, thread), Float32.inf)
