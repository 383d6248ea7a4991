"""Query gradient with one block per head: a block that processes all key tiles of a head sums dQ without atomics.

The first key tile that visits a query tile stores its dQ, the ones between add theirs, and the last one adds the sum
to its own dQ, which never leaves the registers, and writes the query gradient. A block has sums for one head, in a
workspace that it reuses for every head, so that they stay in the L2 cache: nothing is cleared before and no
postprocess follows. The additions of one key tile go to different sums; between two key tiles the block waits until all
copies of the first are complete. A sum is loaded into the staging buffer, and its load is issued before dS is waited
for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Boolean, Int32

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.dynamic_tiles import column_slice
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.quad_transpose import store_rows
from cutlass_py_attn.kernels.common.wgmma import row_view
from cutlass_py_attn.kernels.sm90_backward.grad_query import DsK, GradQueryGemm, Piece, SumStaging
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS
from cutlass_py_attn.launch.smem import BARRIER_BYTES
from cutlass_py_attn.problem.tensors import F32_BYTES


@dataclass(frozen=True)
class HeadSumTarget:
    """Where dQ of one query tile goes.

    work_tile, block: the key tile and the query tile
    sum: the sum of the query tile
    is_first, is_last: whether the key tile is the first or the last that visits the query tile
    adds_sum: whether a last key tile adds the sum of others
    """

    work_tile: WorkTile
    block: QueryBlock
    sum: cute.Pointer
    is_first: Boolean
    is_last: Boolean
    adds_sum: Boolean


class GradQueryPerHead:
    """The query gradient of one Build with one block per head.

    Between tiles it carries one Int32: the phase of the mbarrier of the sums that are loaded.
    """

    def __init__(self, build: Build, barrier: int) -> None:
        self.build = build
        self.accum = GradQueryAccum(build, WARPGROUP_THREADS)
        self.gemm = GradQueryGemm(build)
        self.staging = SumStaging(build, self.accum, barrier, tma.EVICT_LAST)

    @cute.jit
    def init_barrier(self):
        """Initialises the mbarrier of the sums that are loaded."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(self.mbarrier(), 1)

    def mbarrier(self) -> cute.Pointer:
        """Returns the mbarrier of the sums that are loaded: the one after those of the pipelines."""
        return pipelines.first_barrier(self.build) + (self.build.buffer("barriers").bytes // BARRIER_BYTES - 1)

    def initial_state(self) -> Int32:
        """Returns what is carried to the first query tile."""
        return Int32(0)

    def target(self, p: Any, work_tile: WorkTile, block: QueryBlock, thread: Int32, state: Int32) -> HeadSumTarget:
        """Returns where dQ of a query tile goes, and issues the load of the sum's first piece if that is needed."""
        build = self.build
        thread_block, _, _ = cute.arch.block_idx()
        head_of_group = block.head - work_tile.head * seqlen_info.group_size(build, p)
        tiles = ceil_div(p.num_queries, build.tile_m)
        index = (thread_block * seqlen_info.group_size(build, p) + head_of_group) * tiles + block.index
        query_tile = work_tile.band, block.index, build.tile_m, build.tile_n
        first, end = tile_order.key_tile_start(*query_tile), tile_order.key_tile_end(*query_tile)
        is_first, is_last = work_tile.tile == first, work_tile.tile == end - 1
        adds_sum = is_last & (work_tile.tile != first)
        target = HeadSumTarget(work_tile, block, self.accum.pointer(p, index), is_first, is_last, adds_sum)
        self.staging.wait_read()
        self.load_sum(target, 0, thread)
        return target

    @cute.jit
    def load_sum(self, target: Any, piece: cutlass.Constexpr, thread: Int32):
        """Issues the load of a piece of the sum into the staging buffer if this key tile adds the sum."""
        if (cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0) & target.adds_sum:
            size = self.gemm.elements * F32_BYTES
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.mbarrier(), size)
                stage = self.staging.pointer()
                source = target.sum + self.gemm.elements * piece
                hint = self.staging.cache_hint
                prim.cp_async_bulk_shared_cluster_global(stage, source, self.mbarrier(), size, l2_cache_hint=hint)

    def add_tile(
        self, p: Any, target: HeadSumTarget, operands: DsK, thread: Int32, release: Callable[[], None], state: Int32
    ) -> Int32:
        """Computes 7  dQ = dS K of one query tile and adds or writes it. Returns what is carried to the next tile.

        release: called once dS has been read
        """
        for piece in self.gemm.pieces(operands, thread, release):
            self.staging.wait_read()
            self.finish_piece(p, target, piece, piece.r_dq, thread, state ^ (piece.number % 2))
        return state ^ cutlass.select_(target.adds_sum, Int32(self.gemm.count % 2), Int32(0))

    @cute.jit
    def finish_piece(self, p: Any, target: Any, piece: Any, r_dq: cute.Tensor, thread: Int32, phase: Int32):
        """Writes a piece to the query gradient, or stores it in the sum, or adds it to the sum."""
        if target.is_last:
            if target.adds_sum:
                cute.arch.mbarrier_wait(self.mbarrier(), phase)
                self.add_sum(r_dq, thread)
                self.staging.sync()
                if cutlass.const_expr(piece.number + 1 < self.gemm.count):
                    self.load_sum(target, piece.number + 1, thread)
            self.store(p, target, piece, r_dq)
        else:
            self.staging.sync()
            offset = cute.size(r_dq) * self.accum.threads * piece.number
            self.staging.send(target.sum + offset, r_dq, thread, target.is_first)

    def add_sum(self, r_dq: cute.Tensor, thread: Int32) -> None:
        """Adds the piece of the sum in the staging buffer."""
        loaded = cute.make_rmem_tensor_like(r_dq)
        self.accum.load(self.staging.pointer(), loaded, thread)
        for i in range(cute.size(r_dq)):
            r_dq[i] = r_dq[i] + loaded[i]

    def store(self, p: Any, target: HeadSumTarget, piece: Piece, r_dq: cute.Tensor) -> None:
        """Scales a piece, converts it and writes it to the query gradient, from registers."""
        build, block, of = self.build, target.block, target.work_tile.seqlen
        r_dq.store(r_dq.load() * p.scale)
        query0 = block.index * build.tile_m + piece.row
        coordinates, rows = (of.batch, block.head, of.query_start + query0), of.num_queries - query0
        gradient = tile_copy.gmem_tile(build, p, "grad_query", coordinates, rows, build.head_dim)
        thread = params.read_register("tid.x") - WARPGROUP_THREADS
        converted = row_view(tile_copy.converted(r_dq, DTYPES[build.dtype]))
        columns = column_slice(gradient, piece.column, self.gemm.columns)
        store_rows(converted, row_view(piece.mma_dsk.coordinates(thread)), columns)

    def finish_key_tile(self, p: Any, state: Int32, thread: Int32) -> Int32:
        """Waits until all copies of a key tile are complete."""
        self.staging.wait_complete()
        return state

    def finish(self) -> None:
        """Waits until the last copies have read shared memory."""
        self.staging.wait_read()
