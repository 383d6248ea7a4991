"""Join parts: the partial results of query tiles whose keys several blocks share, and the kernel that joins them.

There is one block for each query row of a shared tile, as in the combine kernel of a decode.
"""

import math
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.common import logsumexp, params, tile_copy
from cutlass_py_attn.kernels.common.combine import Combine, PackedRow
from cutlass_py_attn.kernels.common.params import RowCoordinates
from cutlass_py_attn.kernels.common.softmax import QUAD
from cutlass_py_attn.kernels.sm90.tile_scheduler import SharedEndScheduler
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem.tensors import F32_BYTES


class JoinParts(Combine):
    """The combine kernel of a forward that shares its last query tiles. A row's number counts the shared tiles."""

    def __init__(self, build: Build, scheduler: SharedEndScheduler) -> None:
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
        """Computes one row of a shared tile."""
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        rows, _, _ = cute.arch.grid_dim()
        work = self.scheduler.shared_tile(p, number // build.tile_m, rows // build.tile_m)
        seqlen, query = work.seqlen, work.tile * build.tile_m + number % build.tile_m
        row = PackedRow(0, 0, number)
        if query < seqlen.num_queries:
            target = RowCoordinates(seqlen.batch, work.head, seqlen.query_start + query)
            self.join(p, row, target, RowCoordinates(seqlen.index, work.head, query), thread)
        if query == seqlen.num_queries - 1:
            logsumexp.store_padding(p, seqlen.index, work.head, seqlen.num_queries, query + 1 + thread)
