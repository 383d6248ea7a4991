"""Combine: joins the partial outputs of the blocks that split the keys of a row (split-KV), by their logsumexps.

There is one block for each query row. Its warps divide the splits, the lanes of a warp divide the columns.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import logsumexp, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import COMBINE_WARPS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS

VECTOR = 4  # float32 columns that a lane loads at once
UNROLL = 4  # splits in flight at once


@dataclass(frozen=True)
class PackedRow:
    """One row of the packed queries of a key head: row = query * group + (query head - first head of the group)."""

    batch: Any
    head_key: Any
    row: Any


@dataclass(frozen=True)
class SplitWeights:
    """The weight of a split in a row is exp2(logsumexp - maximum) * inverse_sum.

    first: pointer to the base-2 logsumexp of split 0.
    maximum: largest logsumexp of all splits; 0 for a row without a visible key.
    total: sum of exp2(logsumexp - maximum) of all splits; 0 for a row without a visible key.
    """

    first: cute.Pointer
    maximum: Float32
    total: Float32
    inverse_sum: Float32

    def unnormalised(self, split: Int32) -> Float32:
        """Returns exp2(logsumexp - maximum) of a split."""
        return cute.math.exp2(cute.make_tensor(self.first + split, tile_copy.ONE)[0] - self.maximum, fastmath=True)

    def logsumexp(self) -> Float32:
        """Returns the natural logsumexp of the row; -inf without a visible key."""
        found = (self.maximum + cute.math.log2(self.total, fastmath=True)) * math.log(2.0)
        return cutlass.select_(self.total == 0.0, -Float32.inf, found)


class Combine:
    """The combine kernel of one Build, called from its kernel, and the addresses of the partial results."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]

    def partial_index(self, p: Any, row: PackedRow, split: Any) -> Int64:
        """Returns the number of a split's partial result of a row, of shape (batch, heads_key, rows, splits)."""
        group = seqlen_info.group_size(self.build, p)
        heads_key = p.num_heads // group
        number = (Int64(row.batch) * heads_key + row.head_key) * (p.num_queries * group) + row.row
        return number * p.num_splits_key + split

    def partial_output(self, p: Any, row: PackedRow, split: Any) -> cute.Pointer:
        """Returns the pointer to a split's output of a row, (columns_value,) float32."""
        offset = cute.assume(self.partial_index(p, row, split) * self.build.columns_value, divby=VECTOR)
        return params.pointer(p.partial_output, Float32) + offset

    def store_output(self, p: Any, row: RowCoordinates, column: Int32, values: cute.Tensor) -> None:
        """Stores two columns of a row of the output."""
        build = self.build
        as_vector = build.vector_bytes >= 2 * build.item_bytes
        start = params.row_pointer(build, p, "output", row)
        tile_copy.store_pair(tile_copy.converted(values, self.dtype), start, column, build.head_dim_value, as_vector)

    @cute.jit
    def run(self, p: Any):
        """Computes one row of the output."""
        build, group = self.build, seqlen_info.group_size(self.build, p)
        thread, _, _ = cute.arch.thread_idx()
        query, head, batch = cute.arch.block_idx()
        head, batch = head + p.first_head, batch + p.first_batch
        seqlen = seqlen_info.create(build, p, batch)
        head_key = head // group
        row = PackedRow(batch, head_key, query * group + (head - head_key * group))
        if query < seqlen.num_queries:
            target = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
            self.join(p, row, target, RowCoordinates(batch, head, query), thread)
        if query == 0:
            logsumexp.store_padding(p, batch, head, seqlen.num_queries, thread)

    @cute.jit
    def join(self, p: Any, row: Any, target: Any, statistics: Any, thread: Int32):
        """Joins the splits of a row, and stores the output at row `target` and the logsumexp at row `statistics`."""
        build, lane = self.build, thread % WARP_THREADS
        base = tile_copy.smem_symbol()
        layout = cute.make_layout((COMBINE_WARPS, build.columns_value), stride=(build.columns_value, 1))
        s_sums = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
        weights = self.weights(p, row, lane)
        self.add_splits(p, row, weights, s_sums, thread)
        cute.arch.sync_threads()
        column = thread * 2
        if column < build.columns_value:
            values = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range_constexpr(2):
                values[i] = self.sum_over_warps(s_sums, column + i)
            self.store_output(p, target, column, values)
        lse = weights.logsumexp()
        if thread == 0:
            logsumexp.store(p, statistics, lse)

    def weights(self, p: Any, row: PackedRow, lane: Int32) -> SplitWeights:
        """Returns the weights of a row's splits. All threads of a warp call this."""
        first = params.pointer(p.partial_logsumexp, Float32, 4) + self.partial_index(p, row, 0)
        maximum = self.maximum(first, p.num_splits_key, lane)
        # a row without a visible key subtracts 0, so that (-inf) - (-inf) never arises
        maximum = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
        total = self.sum_of_weights(first, maximum, p.num_splits_key, lane)
        inverse_sum = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total))
        return SplitWeights(first, maximum, total, inverse_sum)

    @cute.jit
    def maximum(self, first: cute.Pointer, splits: Int32, lane: Int32):
        """Returns the largest logsumexp of a row's splits."""
        found = -Float32.inf
        for split in cutlass.range(lane, splits, WARP_THREADS, unroll=1):
            found = cute.arch.fmax(found, cute.make_tensor(first + split, tile_copy.ONE)[0])
        return cute.arch.warp_reduction_max(found)

    @cute.jit
    def sum_of_weights(self, first: cute.Pointer, maximum: Float32, splits: Int32, lane: Int32):
        """Returns the sum of the weights of a row's splits, before normalisation."""
        found = Float32(0.0)
        for split in cutlass.range(lane, splits, WARP_THREADS, unroll=1):
            found = found + cute.math.exp2(cute.make_tensor(first + split, tile_copy.ONE)[0] - maximum, fastmath=True)
        return cute.arch.warp_reduction_sum(found)

    @cute.jit
    def add_splits(self, p: Any, row: Any, weights: Any, s_sums: cute.Tensor, thread: Int32):
        """Adds this warp's splits with their weights, into shared memory (warps, columns)."""
        columns = self.build.columns_value
        lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
        start = self.partial_output(p, row, 0)
        for step in cutlass.range_constexpr(ceil_div(columns, WARP_THREADS * VECTOR)):
            column = (step * WARP_THREADS + lane) * VECTOR
            if column < columns:
                found = self.weighted_sum(start, column, weights, warp, p.num_splits_key, COMBINE_WARPS)
                for i in cutlass.range_constexpr(VECTOR):
                    s_sums[warp, column + i] = found[i] * weights.inverse_sum

    @cute.jit
    def weighted_sum(self, start: Any, column: Int32, weights: Any, first: Int32, end: Int32, step: cutlass.Constexpr):
        """Returns the sum of VECTOR columns of every `step`th split from `first` on, with their weights.

        start: pointer to the first column of split 0
        """
        found = cute.make_rmem_tensor(VECTOR, Float32)
        found.fill(0.0)
        for split in cutlass.range(first, end, step, unroll=UNROLL):
            weight = weights.unnormalised(split)
            part = cute.make_rmem_tensor(VECTOR, Float32)
            source = start + cute.assume(split * self.build.columns_value + column, divby=VECTOR)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), part)
            found.store(found.load() + part.load() * weight)
        return found

    def sum_over_warps(self, s_sums: cute.Tensor, column: Int32) -> Float32:
        """Returns one column, summed over all warps."""
        found = s_sums[0, column]
        for warp in range(1, COMBINE_WARPS):
            found = found + s_sums[warp, column]
        return found
