"""Query gradient of a deterministic backward: key tiles add to a query tile in order.

The dQ warpgroup computes pieces of dQ and stages them in shared memory. Two adding warps take the query tiles in turn:
each waits for the semaphore of its query tile, issues the bulk reduction of every piece, waits until they are complete
in global memory, and releases the semaphore to the next key tile. These waits take longer than a query tile, and the
dQ warpgroup has no part in them.

    mbarrier of an adding warp   arrivals                               completes when
    full                         128 threads of the dQ warpgroup        a piece is staged
    empty                        the adding warp                        a piece has been read
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.kernels.sm90_backward.grad_query import DsK, GradQuerySm90, SumTarget
from cutlass_py_attn.kernels.sm90_backward.layout import ADDING_WARPS
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.launch.smem import BARRIER_BYTES
from cutlass_py_attn.problem.tensors import F32_BYTES


class OrderedGradQuery(GradQuerySm90):
    """The additions of one Build to dq_accum in order, through adding warps.

    Between tiles the dQ warpgroup carries the number of query tiles that it has computed.
    """

    def __init__(self, build: Build, barrier: int) -> None:
        super().__init__(build, barrier)
        self.piece_bytes = self.gemm.elements * F32_BYTES

    @cute.jit
    def init_barriers(self):
        """Initialises the mbarriers of the adding warps."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for warp in cutlass.range_constexpr(ADDING_WARPS):
                    cute.arch.mbarrier_init(self._full(warp), WARPGROUP_THREADS)
                    cute.arch.mbarrier_init(self._empty(warp), 1)

    def _full(self, warp: Any) -> cute.Pointer:
        first = self.build.buffer("barriers").bytes // BARRIER_BYTES - 2 * ADDING_WARPS
        return pipelines.first_barrier(self.build) + (first + warp)

    def _empty(self, warp: Any) -> cute.Pointer:
        return self._full(warp) + ADDING_WARPS

    def initial_state(self) -> Int32:
        """Returns what is carried to the first query tile."""
        return Int32(0)

    def add_tile(
        self, p: Any, target: SumTarget, operands: DsK, thread: Int32, release: Callable[[], None], state: Int32
    ) -> Int32:
        """Computes 7  dQ = dS K of one query tile and stages it. Returns what is carried to the next tile.

        release: called once dS has been read
        """
        for piece in self.gemm.pieces(operands, thread, release):
            # The piece before, of this query tile or of the tile before, has been read.
            tile, number = (state, piece.number - 1) if piece.number else (state - 1, self.gemm.count - 1)
            cute.arch.mbarrier_wait(self._empty(tile & 1), self._phase(tile >> 1, number))
            self.accum.store_shared(self.staging.pointer(), piece.r_dq, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(self._full(state & 1))
        return state + 1

    def finish_key_tile(self, p: Any, state: Int32, thread: Int32) -> Int32:
        """Does nothing: the adding warps complete what they add."""
        return state

    def finish(self) -> None:
        """Does nothing, for the same reason."""

    def _phase(self, tile: Int32, piece: int) -> Int32:
        """Returns the phase of a piece of an adding warp's tile."""
        return (tile * self.gemm.count + piece) & 1

    @cute.jit
    def add_staged(self, p: Any, target: SumTarget, warp: Int32, tile: Int32):
        """Adds the staged dQ of a query tile to its sum in turn; one adding warp calls this.

        tile: how many query tiles this warp has added before
        """
        self.acquire(p, target)
        start, stage = self.accum.pointer(p, target.index), self.staging.pointer()
        for piece in cutlass.range_constexpr(self.gemm.count):
            cute.arch.mbarrier_wait(self._full(warp), self._phase(tile, piece))
            with cute.arch.elect_one():
                self.staging.reduce(start + piece * self.gemm.elements, stage, self.piece_bytes)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self._empty(warp))
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.release(p, target)

    @cute.jit
    def acquire(self, p: Any, target: SumTarget):
        """Waits until the key tiles before this one have been added to a sum."""
        with cute.arch.elect_one():
            counter = params.pointer(p.dq_semaphore, Int32, 4) + Int32(target.index)
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            while seen < target.num_before:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()

    @cute.jit
    def release(self, p: Any, target: SumTarget):
        """Lets the next key tile add to a sum.

        A query tile that does not see the key tile has no place in the order; zeros are added to it.
        """
        if target.num_before >= 0:
            with cute.arch.elect_one():
                counter = params.pointer(p.dq_semaphore, Int32, 4) + Int32(target.index)
                cute.arch.fence_proxy("async.global")
                cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
