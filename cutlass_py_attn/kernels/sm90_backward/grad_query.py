"""sm90 query gradient: one warpgroup computes dQ = dS K of every query tile and adds it to dq_accum in global memory.

The addition goes through shared memory: one bulk reduction for each piece of a tile. Vector reductions from registers
would wait in the same queue as the other warpgroups' shared-memory accesses, and delay those. With query blocks, where
shared memory is the bottleneck, reductions from registers are faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
from cutlass import Float32, Int32

from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.wgmma import Wgmma
from cutlass_py_attn.kernels.component_gemms.products import grad_q
from cutlass_py_attn.kernels.sm90_backward.layout import grad_query_bytes, grad_query_piece, staged_pieces
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS, GemmSpec
from cutlass_py_attn.problem.tensors import F32_BYTES


@dataclass(frozen=True)
class DsK:
    """The operands of dQ = dS K: dS of a query tile in shared memory, and the `key_operand` of the key tile."""

    s_ds: cute.Tensor
    key: cute.Tensor


@dataclass(frozen=True)
class Piece:
    """A piece of dQ of one query tile.

    number: in the order of dq_accum
    row, column: its first row and column in the query tile
    r_dq: its accumulator
    """

    number: int
    row: int
    column: int
    mma_dsk: Wgmma
    r_dq: cute.Tensor


@dataclass(frozen=True)
class SumTarget:
    """The sum of a query tile: its index, and how many key tiles are added before this one."""

    index: Any
    num_before: Any


def warpgroup_gemm(spec: GemmSpec, dtype: str) -> Wgmma:
    """Returns a GEMM of dQ on one warpgroup."""
    return Wgmma(replace(spec, warps=(WARPGROUP_WARPS, 1)), dtype)


class GradQueryGemm:
    """dQ = dS K of one Build, a piece at a time: a thread has no registers for a whole query tile."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.rows, self.columns = grad_query_piece(build)
        self.elements = self.rows * self.columns  # of a piece
        self.row_pieces, self.column_pieces = build.tile_m // self.rows, build.columns // self.columns
        self.count = self.row_pieces * self.column_pieces

    def spec(self) -> GemmSpec:
        """Returns the GEMM of one piece."""
        return replace(grad_q.spec(self.build), m=self.rows, n=self.columns)

    def key_operand(self, s_k: cute.Tensor, thread: Int32) -> cute.Tensor:
        """Returns a key tile in shared memory as `pieces` reads it; called once for each key tile."""
        return s_k

    def pieces(self, operands: DsK, thread: Int32, release: Callable[[], None]) -> Iterator[Piece]:
        """Computes one piece after the other; calls `release` once dS has been read."""
        mma_dsk = warpgroup_gemm(self.spec(), self.build.dtype)
        for number in range(self.count):
            i, j = divmod(number, self.column_pieces)
            s_ds = cute.local_tile(operands.s_ds, (self.rows, self.build.tile_n), (i, 0))
            s_k = cute.local_tile(operands.key, (self.build.tile_n, self.columns), (0, j))
            r_dq = mma_dsk.accumulator(thread)
            grad_q.issue(mma_dsk, r_dq, grad_q.operands(mma_dsk, s_ds, s_k, thread))
            mma_dsk.wait()
            if number == self.count - 1:
                release()
            yield Piece(number, i * self.rows, j * self.columns, mma_dsk, r_dq)


class SumStaging:
    """Bulk copies of pieces from registers through shared memory to their sums.

    barrier: named barrier of the warpgroup
    cache_hint: L2 policy of the copies; None for the default
    """

    def __init__(self, build: Build, accum: GradQueryAccum, barrier: int, cache_hint: int | None = None) -> None:
        self.build, self.accum, self.barrier, self.cache_hint = build, accum, int(barrier), cache_hint
        self.is_used = grad_query_bytes(build) > 0

    def pointer(self) -> cute.Pointer:
        """Returns the staging buffer."""
        return tile_copy.smem_pointer(self.build, "staging", Float32)

    @cute.jit
    def send(
        self, target: cute.Pointer, values: cute.Tensor, thread: Int32, is_first: Any, index: cutlass.Constexpr = 0
    ):
        """Copies a piece to its sum; its place in the staging buffer must be free.

        is_first: whether the sum has no value yet and the piece is stored, not added; None to add always
        index: of the place
        """
        stage = self.pointer() + index * cute.size(values) * self.accum.threads
        warp = cute.arch.make_warp_uniform(thread // WARP_THREADS)
        self.accum.store_shared(stage, values, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        if warp == 0:
            size = cute.size(values) * self.accum.threads * F32_BYTES
            with cute.arch.elect_one():
                self._issue(target, stage, size, is_first)
            cute.arch.cp_async_bulk_commit_group()

    def _issue(self, target: cute.Pointer, stage: cute.Pointer, size: int, is_first: Any) -> None:
        """Issues the bulk copy of `send`; one thread calls this."""
        if is_first is None:
            self.reduce(target, stage, size)
        else:
            self._store_or_reduce(target, stage, size, is_first)

    @cute.jit
    def _store_or_reduce(
        self, target: cute.Pointer, stage: cute.Pointer, size: cutlass.Constexpr, is_first: cutlass.Boolean
    ):
        if is_first:
            prim.cp_async_bulk_global_shared_cta(target, stage, size, l2_cache_hint=self.cache_hint)
        else:
            self.reduce(target, stage, size)

    def reduce(self, target: cute.Pointer, stage: cute.Pointer, size: int) -> None:
        """Issues a bulk reduction of `size` bytes; one thread calls this."""
        kind = prim.CpReduceType.F32
        prim.cp_reduce_async_bulk_global_shared_cta(target, stage, size, type=kind, l2_cache_hint=self.cache_hint)

    def wait_read(self, pending: int = 0) -> None:
        """Waits until all but the last `pending` copies that this thread issued have read shared memory.

        All threads call this although one issues: in a branch, the wait would cost the whole kernel its uniform
        registers.
        """
        if self.is_used:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    def wait_complete(self) -> None:
        """Waits until all copies are complete in global memory; syncs the warpgroup."""
        if self.is_used:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        self.sync()

    def sync(self) -> None:
        """Syncs the threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=WARPGROUP_THREADS)


class GradQuerySm90:
    """The additions of one Build to dq_accum, in the order of one warpgroup's accumulator.

    Between tiles it carries one Int32: the index of the sum whose semaphore must still be released; below 0 for none.

    gemm_type: the GEMM of its pieces
    """

    gemm_type = GradQueryGemm

    def __init__(self, build: Build, barrier: int) -> None:
        self.build = build
        self.accum = GradQueryAccum(build, WARPGROUP_THREADS)
        self.gemm = self.gemm_type(build)
        self.staged = staged_pieces(build)
        self.staging = SumStaging(build, self.accum, barrier)

    def initial_state(self) -> Int32:
        """Returns what is carried to the first query tile."""
        return Int32(-1)

    def target(self, p: Any, work_tile: WorkTile, block: QueryBlock, thread: Int32, state: Int32) -> SumTarget:
        """Returns the sum of a query tile; called before dS is waited for."""
        build = self.build
        index = self.accum.tile_index(p, block.head, work_tile.seqlen.first_tile + block.index)
        num_before = tile_order.preceding_key_tiles(
            work_tile.band, block.index, work_tile.tile, build.tile_m, build.tile_n
        )
        return SumTarget(index, num_before)

    def add_tile(
        self, p: Any, target: SumTarget, operands: DsK, thread: Int32, release: Callable[[], None], state: Int32
    ) -> Int32:
        """Computes 7  dQ = dS K of one query tile and adds it to its sum. Returns what is carried to the next tile.

        release: called once dS has been read
        """
        build = self.build
        start = self.accum.pointer(p, target.index)
        for piece in self.gemm.pieces(operands, thread, release):
            acquires = build.deterministic and piece.number == 0
            if acquires:
                self.staging.wait_complete()
                self.release_semaphore(p, state, thread)
                self.acquire_semaphore(p, Int32(target.index), target.num_before, thread)
            offset = piece.number * (cute.size(piece.r_dq) * self.accum.threads)
            self.add_piece(start + offset, piece, thread, acquires)
        if not build.deterministic:
            return state
        # A query tile that does not see the key tile has no place in the order; zeros are added to it.
        return cutlass.select_(target.num_before >= 0, Int32(target.index), Int32(-1))

    def finish_key_tile(self, p: Any, state: Int32, thread: Int32) -> Int32:
        """Releases the semaphore of the last query tile of a key tile.

        The next key tile must not do it: its acquire may wait for blocks that wait for this release.
        """
        if not self.build.deterministic:
            return state
        self.staging.wait_complete()
        self.release_semaphore(p, state, thread)
        return Int32(-1)

    def finish(self) -> None:
        """Waits until the last copies have read shared memory."""
        self.staging.wait_read()

    def add_piece(self, target: cute.Pointer, piece: Piece, thread: Int32, acquired: bool) -> None:
        """Adds a piece to its sum. acquired: warp 0 alone knows that the tile before is complete."""
        if self.staging.is_used:
            if not acquired:
                self.staging.wait_read(self.staged - 1)
                self.staging.sync()
            self.staging.send(target, piece.r_dq, thread, None, piece.number % self.staged)
            return
        if acquired:
            self.staging.sync()
        self.accum.add(target, piece.r_dq, thread)
        self.staging.sync()  # the compiler would move the additions past the next GEMM

    @cute.jit
    def acquire_semaphore(self, p: Any, index: Int32, num_before: Int32, thread: Int32):
        """Waits until `num_before` key tiles have been added to a sum; the warp that issues the reductions waits."""
        if cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0:
            with cute.arch.elect_one():
                counter = params.pointer(p.dq_semaphore, Int32, 4) + index
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                while seen < num_before:
                    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()

    @cute.jit
    def release_semaphore(self, p: Any, index: Int32, thread: Int32):
        """Lets the next key tile add to a sum to which this one has been added; to none if `index` is below 0.

        The warp that releases is not the one that acquires.
        """
        if (cute.arch.make_warp_uniform(thread // WARP_THREADS) == WARPGROUP_WARPS - 1) & (index >= 0):
            with cute.arch.elect_one():
                counter = params.pointer(p.dq_semaphore, Int32, 4) + index
                cute.arch.fence_proxy("async.global")
                cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
