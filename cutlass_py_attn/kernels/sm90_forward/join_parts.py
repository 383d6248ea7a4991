"""Join parts: the partial results of query tiles whose keys several blocks share, and the kernel that joins them.

A part without keys has the logsumexp -inf, so that its output has no weight. There is one warp for each query row of a
shared tile: parts are few, and rows many.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import dependent_launch, logsumexp, params, tile_copy
from cutlass_py_attn.kernels.common.combine import VECTOR, Combine, PackedRow
from cutlass_py_attn.kernels.common.params import RowCoordinates
from cutlass_py_attn.kernels.common.softmax import QUAD
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import SharedEndScheduler, SplitKeysScheduler
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import COMBINE_WARPS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.problem.tensors import F32_BYTES


class JoinParts(Combine):
    """The combine kernel of a forward that shares query tiles. A row's number counts the shared tiles."""

    def __init__(self, build: Build, scheduler: SharedEndScheduler | SplitKeysScheduler) -> None:
        super().__init__(build)
        self.scheduler = scheduler

    def partial_index(self, p: Any, row: PackedRow, split: Any) -> Int64:
        """Returns the number of a split's partial result of a row, of shape (shared tiles * tile_m, splits)."""
        return Int64(row.row) * p.num_splits_key + split

    def store_part(
        self, p: Any, part: Int32, outputs: cute.Tensor, coordinates: cute.Tensor, lse: list[Float32]
    ) -> None:
        """Stores this thread's rows of a part: the normalised output, and the logsumexp in base 2.

        part: number of the shared tile, times the splits, plus the split
        outputs: (rows, columns); coordinates: (row, column) of each in the tile
        """
        splits, columns = p.num_splits_key, self.build.columns_value
        tile, split = part // splits, part % splits
        thread, _, _ = cute.arch.thread_idx()
        logsumexps = params.pointer(p.partial_logsumexp, Float32, F32_BYTES)
        for index, value in enumerate(lse):
            packed = PackedRow(0, 0, tile * self.build.tile_m + coordinates[index, 0][0])
            target = cute.make_tensor(logsumexps + self.partial_index(p, packed, split), tile_copy.ONE)
            tile_copy.store_predicated(target, 0, value * math.log2(math.e), thread % QUAD == 0)
            start = self.partial_output(p, packed, split)
            for column in range(0, cute.size(outputs, mode=[1]), 2):
                pair = cute.make_rmem_tensor(2, Float32)
                for i in range(2):
                    pair[i] = outputs[index, column + i]
                tile_copy.store_pair(pair, start, coordinates[index, column][1], columns, True)

    @cute.jit
    def run(self, p: Any):
        """Computes one row of a shared tile with each warp."""
        build = self.build
        dependent_launch.wait_for_previous(build, "combine")
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        number = block * COMBINE_WARPS + cute.arch.make_warp_uniform(thread // WARP_THREADS)
        shared = blocks * COMBINE_WARPS // build.tile_m
        if cutlass.const_expr(build.has("varlen")):
            if number // build.tile_m < self.scheduler.total(p):  # short sequences have fewer tiles
                self.join_row(p, number, shared)
        else:
            self.join_row(p, number, shared)

    @cute.jit
    def join_row(self, p: Any, number: Int32, shared: Int32):
        """Joins row `number` of the rows of `shared` tiles. All threads of a warp call this."""
        build, lane = self.build, cute.arch.lane_idx()
        work = self.scheduler.shared_tile(p, number // build.tile_m, shared)
        seqlen, query = work.seqlen, work.tile * build.tile_m + number % build.tile_m
        if query < seqlen.num_queries:
            row = PackedRow(0, 0, number)
            weights = self.weights(p, row, lane)
            target = RowCoordinates(seqlen.batch, work.head, seqlen.query_start + query)
            self.add_parts(p, row, target, weights, lane)
            if lane == 0:
                logsumexp.store(p, RowCoordinates(seqlen.index, work.head, query), weights.logsumexp())
        if query == seqlen.num_queries - 1:
            logsumexp.store_padding(p, seqlen.index, work.head, seqlen.num_queries, query + 1 + lane)

    @cute.jit
    def add_parts(self, p: Any, row: Any, target: Any, weights: Any, lane: Int32):
        """Adds the parts of a row with their weights, and stores the output at row `target`."""
        columns = self.build.columns_value
        start = self.partial_output(p, row, 0)
        for step in cutlass.range_constexpr(ceil_div(columns, WARP_THREADS * VECTOR)):
            column = (step * WARP_THREADS + lane) * VECTOR
            if column < columns:
                found = self.weighted_sum(start, column, weights, Int32(0), p.num_splits_key, 1)
                for pair in cutlass.range_constexpr(VECTOR // 2):
                    values = cute.make_rmem_tensor(2, Float32)
                    for i in cutlass.range_constexpr(2):
                        values[i] = found[2 * pair + i] * weights.inverse_sum
                    self.store_output(p, target, column + 2 * pair, values)
