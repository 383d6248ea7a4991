"""Gradient of the bias: the warp of the sm90 backward that writes dS of every query tile to grad_bias.

TMA stores dS from the shared memory in which the dQ warpgroup reads it. Its tensor map leaves out rows and columns past
the last query and key. Where the mask hides every score of a query tile, no dS is computed, and the warp writes zeros.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Int32

from cutlass_py_attn.integers import ceil_div, larger, smaller
from cutlass_py_attn.kernels.common import params, tile_copy, tma
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import bias_of
from cutlass_py_attn.kernels.sm90_backward.layout import stored_tiles
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock, QueryTileOrder
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS

CLEAR_UNROLL = 4  # rows that a thread clears in one step of the loop


class GradBiasStore:
    """The stores of one Build; all threads of one warp call the methods."""

    def __init__(self, build: Build, tile_order: QueryTileOrder) -> None:
        self.build, self.tile_order = build, tile_order
        self.vector = build.grad_bias_vector_bytes // build.item_bytes
        self.threads_of_row = build.tile_n // self.vector
        self.rows = WARP_THREADS // self.threads_of_row  # rows of a key tile that the warp clears at once

    def store(self, target: Any, work_tile: WorkTile, block: QueryBlock, stage: Int32) -> None:
        """Stores dS of a query tile from its stage, and waits until it has been read.

        target: tensor map of grad_bias
        """
        build = self.build
        tile_m, tile_n = stored_tiles(build)["grad_bias"]
        strips = tma.Strips.create(build, "ds", (tile_m, tile_n), stage)
        base = tile_copy.smem_base(build)
        key0, query0 = work_tile.tile * tile_n, block.index * tile_m
        with cute.arch.elect_one():
            for strip in range(strips.count):
                prim.cp_async_bulk_tensor_global_shared_cta(
                    target.get_ptr(),
                    base + strips.smem_offset(strip),
                    [key0 + strips.column(strip), Int32(query0), Int32(block.head), Int32(work_tile.seqlen.batch)],
                )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def clear_unvisited(self, p: Any, work_tile: WorkTile):
        """Writes zeros for the queries ahead of the first query tile that the key tile visits, and behind the last."""
        build = self.build
        if cutlass.const_expr(not build.form.sees_all):
            queries = work_tile.seqlen.num_queries
            first, end = work_tile.first * build.tile_m, work_tile.end * build.tile_m
            first_head = self.tile_order.first(p, work_tile).head
            for number in cutlass.range(self.tile_order.num_heads(p), unroll=1):
                head = first_head + number
                self.clear_rows(p, work_tile, head, Int32(0), smaller(first, queries))
                self.clear_rows(p, work_tile, head, end, queries)
            cute.arch.sync_warp()

    @cute.jit
    def clear_rows(self, p: Any, work_tile: WorkTile, head: Int32, first: Int32, end: Int32):
        """Writes zeros to the query rows [first, end) of the key tile."""
        lane = cute.arch.lane_idx()
        row = first + lane // self.threads_of_row
        key = work_tile.tile * self.build.tile_n + lane % self.threads_of_row * self.vector
        target = bias_of(self.build, p, "grad_bias", work_tile.seqlen, head, (row, key))
        step = params.assume_multiple(target.row_stride * self.rows, self.vector)
        zeros = cute.make_rmem_tensor(self.vector, DTYPES[self.build.dtype])
        zeros.fill(0.0)
        count = Int32(0)
        if target.columns > 0:
            count = larger(ceil_div(end - row, self.rows), 0)
        place = target.start
        for _ in cutlass.range(count, unroll=CLEAR_UNROLL):
            cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(self.vector)))
            place = place + step
