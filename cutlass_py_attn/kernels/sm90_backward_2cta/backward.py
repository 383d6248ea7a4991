"""2-CTA backward: head dims whose dK and dV are too many registers for one warpgroup.

Two blocks of a cluster have 64 keys each. Two warpgroups of a block share them by GEMM: the weight warpgroup computes
S^T, P and dV, the gradient warpgroup dP^T, dS and dK. P goes from thread to thread through shared memory, and dS is
stored to its place; both are register operands of dV and dK. Each block loads every second strip of the query and
grad_output tiles for both blocks, and receives the other's dS: its dQ warpgroup adds dQ of all 128 keys, in its block's
share of the columns. So each tile is loaded, and each sum added to, once for 128 keys.

    weights          1 S^T = K Q^T    2 P    5 dV += P^T dO       in flight    during 2: 5 of the query tile before
    gradients        3 dP^T = V dO^T  4 dS   6 dK += dS^T Q                    during 4: 6 of the query tile before
    dQ               7 dQ = dS K                                               during all of them

    pipeline     full: arrivals             empty: arrivals                                       stages
    query        TMA of both, logsumexp     of both blocks 4 warps after 6 and 4 after the        query_stages
                                            next 1; of this one all threads after 1
    grad_output  TMA of both, delta         of both blocks 4 warps after 5 and 4 after the        grad_output_stages
                                            next 3; of this one all threads after 3
    dS           128 threads, the other's   of both blocks 4 warps after 7                        1 or 2
    key          TMA                        4 warps after the last 1, 4 after the last 7          1
    value        TMA                        4 warps after the last 3                              1
    P            a named barrier for each stage of dS, whose place P has
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.backward_parts import chain as backward_chain
from cutlass_py_attn.kernels.backward_parts.postprocess import BackwardPostprocess
from cutlass_py_attn.kernels.common import params, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.wgmma import Wgmma, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import doivj, grad_k, grad_v, matmul_qk
from cutlass_py_attn.kernels.sm90_backward.grad_query import warpgroup_gemm
from cutlass_py_attn.kernels.sm90_backward.key_tile_scheduler import ClusterKeyTileScheduler
from cutlass_py_attn.kernels.sm90_backward.main_kernel import (
    BackwardKernelSm90,
    Maps,
    Pipelines,
    key_gradient_tile,
    store_key_gradient,
)
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryTileOrder
from cutlass_py_attn.kernels.sm90_backward.smem import BackwardSmem, RowStatistics
from cutlass_py_attn.kernels.sm90_backward.transposed_scores import TransposedScores
from cutlass_py_attn.kernels.sm90_backward_2cta.grad_query import ClusterDs, GradQuery2Cta
from cutlass_py_attn.kernels.sm90_backward_2cta.layout import first_cta_columns
from cutlass_py_attn.kernels.sm90_backward_2cta.stacked_wgmma import StackedOperand, StackedWgmma
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.cluster import Cluster
from cutlass_py_attn.kernels.sm90_common.named_barriers import Backward2CtaBarrier
from cutlass_py_attn.kernels.sm90_common.pipelines import PipelineSpec, arrive_all, previous_stage
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.launch.smem import swizzle_bytes, tile_bytes
from cutlass_py_attn.launch.variants import CLUSTER
from cutlass_py_attn.problem.tensors import F32_BYTES

WORDS = 4  # 32-bit words of one vector of P that a thread stores


@dataclass(frozen=True)
class Gemms:
    """The component GEMMs of the consumers, and their operands in shared memory. dV and dK have A in registers."""

    mma_qk: Wgmma
    mma_dov: Wgmma
    mma_pdo: StackedWgmma
    mma_dsq: StackedWgmma
    qk_parts: Operands
    dov_parts: Operands
    pdo_b: StackedOperand
    dsq_b: StackedOperand


class Backward2Cta:
    """The body of one Build with 64 keys a block: what each role of `BackwardKernelSm90` does."""

    waits_in_producer = False

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.smem = BackwardSmem(build)
        self.scheduler, self.cluster = ClusterKeyTileScheduler(build), Cluster(build)
        self.grad_query = GradQuery2Cta(build, Backward2CtaBarrier.GRAD_QUERY)
        self.tile_order = QueryTileOrder(build)
        self.scores = TransposedScores(build)
        self.statistics = RowStatistics(build, self.grad_query.accum)
        self.tile_bytes = tile_bytes(build.dtype, build.tile_m, build.tile_n)
        self.ds_stages = build.buffer("p_ds").bytes // self.tile_bytes

    def sync_barrier_init(self) -> None:
        """Makes the mbarriers visible to both blocks."""
        self.cluster.sync_barrier_init()

    def sync_exit(self) -> None:
        """Waits until the other block no longer writes to this block's shared memory."""
        self.cluster.sync()

    def create_pipelines(self) -> Pipelines:
        """Creates the pipelines of query, grad_output, key, value and dS."""
        build = self.build
        statistics = build.tile_m * F32_BYTES
        arrivals = 3 * WARPGROUP_WARPS + WARPGROUP_THREADS  # of query and of grad_output, see the table above
        specs = {
            "query": PipelineSpec(build.query_stages, arrivals, statistics),
            "grad_output": PipelineSpec(build.grad_output_stages, arrivals, statistics),
            "key": PipelineSpec(1, 2 * WARPGROUP_WARPS, build.buffer("other_key").bytes),
            "value": PipelineSpec(1, WARPGROUP_WARPS, 0),
        }
        loaded, barriers = pipelines.tma_pipelines(build, specs)
        ds = pipelines.thread_pipeline(self.ds_stages, WARPGROUP_THREADS, CLUSTER * WARPGROUP_WARPS, barriers)
        return Pipelines(*loaded, ds)

    def states(self, user: Any) -> tuple[Any, Any, Any]:
        """Returns the first states of a user of the pipelines of query, grad_output, and key and value."""
        build = self.build
        return pipelines.states(user, build.query_stages, build.grad_output_stages, build.key_stages)

    @cute.jit
    def produce(self, p: Any, pipes: Pipelines, maps: Maps):
        """Producer warp: loads this block's key and value tiles, its columns of the other block's keys, and its strips
        of the query and grad_output tiles that visit them."""
        build = self.build
        at_q, at_do, at_kv = self.states(pipeline.PipelineUserType.Producer)
        wave = Int32(0)
        while self.scheduler.has_work(p, wave):
            work_tile = self.scheduler.block_tile(p, wave, self.cluster.rank())
            of, key_tile = work_tile.seqlen, work_tile.tile
            key_at = (key_tile * build.tile_n, work_tile.head, of.batch)
            pipelines.load(build, pipes.k, at_kv, "key", maps.k, key_at)
            other_at = ((key_tile ^ 1) * build.tile_n, work_tile.head, of.batch)
            self.load_other_key(pipes, maps.k, other_at, at_kv)
            tile = self.tile_order.first(p, work_tile)
            for iteration in cutlass.range(self.tile_order.num_tiles(p, work_tile), unroll=1):
                query_at = (tile.index * build.tile_m, tile.head, of.batch)
                row = self.statistics.row(p, of.first_tile, tile)
                self.cluster.load(pipes.q, at_q, "query", maps.q, query_at)
                self.statistics.load(pipes.q, "logsumexp", p.logsumexp_log2, row, at_q)
                at_q.advance()
                if iteration == 0:  # after the first query tile, which is needed earlier
                    pipelines.load(build, pipes.v, at_kv, "value", maps.v, key_at)
                self.cluster.load(pipes.do, at_do, "grad_output", maps.do, query_at)
                self.statistics.load(pipes.do, "delta", p.delta, row, at_do)
                at_do.advance()
                tile = self.tile_order.next(work_tile, tile)
            at_kv.advance()
            wave = wave + 1

    @cute.jit
    def load_other_key(self, pipes: Pipelines, source: Any, at: tuple, state: Any):
        """Issues the load of this block's columns of the other block's keys, with the key tile.

        at: (first key, head, batch)
        """
        build, rank = self.build, self.cluster.rank()
        width, columns = swizzle_bytes(build.columns), first_cta_columns(build)
        barrier = pipes.k.producer_get_barrier(state)
        base = tile_copy.smem_base(build)
        start, strip_bytes = build.buffer("other_key").offset, build.tile_n * width
        with cute.arch.elect_one():
            for strip in cutlass.range_constexpr(columns * build.item_bytes // width):
                column = rank * columns + strip * (width // build.item_bytes)
                coordinates = [column, at[0], at[1], at[2]]
                target = base + cute.assume(start + strip * strip_bytes, divby=1024)
                # TMA writes zeros for columns past the last, as it does for rows.
                prim.cp_async_bulk_tensor_shared_cta_global(target, source.get_ptr(), coordinates, barrier)

    @cute.jit
    def multiply_query_gradient(self, p: Any, pipes: Pipelines, thread: Int32):
        """dQ warpgroup: 7  dQ = dS K of every query tile, this block's columns, added to its sum."""
        _, _, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        (at,) = pipelines.states(pipeline.PipelineUserType.Consumer, self.ds_stages)
        s_ds, s_other = self.ds_tiles("p_ds"), self.ds_tiles("other_ds")
        wave = Int32(0)
        while self.scheduler.has_work(p, wave):
            work_tile = self.scheduler.block_tile(p, wave, self.cluster.rank())
            pipes.k.consumer_wait(at_kv)
            tile = self.tile_order.first(p, work_tile)
            for _ in cutlass.range(self.tile_order.num_tiles(p, work_tile), unroll=1):
                pipes.ds.consumer_wait(at)
                index = self.grad_query.accum.tile_index(p, tile.head, work_tile.seqlen.first_tile + tile.index)
                target = self.grad_query.accum.pointer(p, index)
                both = ClusterDs(s_ds[None, None, at.index], s_other[None, None, at.index])
                self.grad_query.add_tile(target, both, self.cluster.rank(), thread)
                self.cluster.release_stage(pipes.ds, at.index)
                at.advance()
                tile = self.tile_order.next(work_tile, tile)
            pipes.k.consumer_release(at_kv)
            at_kv.advance()
            wave = wave + 1

    @cute.jit
    def consume(self, p: Any, pipes: Pipelines, thread: Int32):
        """Consumer warpgroups: the weight warpgroup and the gradient warpgroup."""
        if cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS) == 0:
            self.compute_weights(p, pipes, thread)
        else:
            self.compute_gradients(p, pipes, thread - WARPGROUP_THREADS)

    @cute.jit
    def compute_weights(self, p: Any, pipes: Pipelines, thread: Int32):
        """Weight warpgroup: S^T, P and dV of each key tile."""
        build = self.build
        gemms = self.bind_gemms(thread)
        at_q, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        (at_p,) = pipelines.states(pipeline.PipelineUserType.Producer, self.ds_stages)
        r_dv, r_s = gemms.mma_pdo.accumulator(thread), gemms.mma_qk.accumulator(thread)
        r_lse = self.statistics.registers()
        wave = Int32(0)
        while self.scheduler.has_work(p, wave):
            work_tile = self.scheduler.block_tile(p, wave, self.cluster.rank())
            iterations = larger(self.tile_order.num_tiles(p, work_tile), 1)
            r_dv.fill(0.0)
            # 1  S^T = K Q^T of the first query tile
            pipes.k.consumer_wait(at_kv)
            pipes.q.consumer_wait(at_q)
            r_next = gemms.mma_qk.accumulator(thread)
            matmul_qk.issue(gemms.mma_qk, r_next, gemms.qk_parts.stage(None, at_q.index))
            self.statistics.read("logsumexp", at_q.index, thread, r_lse)
            gemms.mma_qk.wait()
            r_s.store(r_next.load())
            tile = self.tile_order.first(p, work_tile)
            for iteration in cutlass.range(iterations, unroll=1):
                # 2  P = exp2(S - logsumexp) in base 2
                score_tile = ScoreTile(work_tile.seqlen, work_tile.band, tile.head, tile.index, work_tile.tile)
                self.scores.exponentiate(p, r_s, r_lse)
                self.scores.mask(gemms.mma_qk, r_s, score_tile, thread)
                gemms.mma_pdo.wait()
                if iteration > 0:
                    self.cluster.release_stage(pipes.do, previous_stage(at, build.grad_output_stages))
                r_p = tile_copy.converted(r_s, self.dtype)
                pipes.ds.producer_acquire(at_p)
                self.store_weights(r_p, at_p.index, thread)
                at_p.advance()
                # 1  S^T = K Q^T of the next query tile, followed by 5  dV += P^T dO. After the last query tile it is
                # the same S^T again, unused: with a branch around it the compiler would wait for all GEMMs.
                at_q.advance()
                last = previous_stage(at_q, build.query_stages)
                stage = cutlass.select_(iteration + 1 < iterations, at_q.index, last)
                if iteration + 1 < iterations:
                    pipes.q.consumer_wait(at_q)
                r_next = gemms.mma_qk.accumulator(thread)
                matmul_qk.issue(gemms.mma_qk, r_next, gemms.qk_parts.stage(None, stage))
                pipes.do.consumer_wait(at)
                pdo_parts = gemms.mma_pdo.register_operands(r_p, gemms.pdo_b.stage(at.index))
                grad_v.issue(gemms.mma_pdo, r_dv, pdo_parts)
                at.advance()
                self.statistics.read("logsumexp", stage, thread, r_lse)
                gemms.mma_qk.wait(gemms.mma_pdo.groups)
                self.cluster.release_remote(pipes.q, last)
                arrive_all(pipes.q.sync_object_empty, last)
                r_s.store(r_next.load())
                tile = self.tile_order.next(work_tile, tile)
            pipes.k.consumer_release(at_kv)
            gemms.mma_pdo.wait()
            self.cluster.release_stage(pipes.do, previous_stage(at, build.grad_output_stages))
            at_kv.advance()
            # 8  store dV; the work tile is recomputed, not kept in registers
            work_tile = self.scheduler.block_tile(p, params.opaque(wave), self.cluster.rank())
            target = key_gradient_tile(
                build, p, "grad_value", work_tile.head, work_tile.seqlen, work_tile.tile * build.tile_n
            )
            store_key_gradient(tile_copy.converted(r_dv, self.dtype), gemms.mma_pdo, target, thread)
            wave = wave + 1

    @cute.jit
    def compute_gradients(self, p: Any, pipes: Pipelines, thread: Int32):
        """Gradient warpgroup: dP^T, dS and dK of each key tile."""
        build = self.build
        gemms = self.bind_gemms(thread)
        at_q, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        (at_ds,) = pipelines.states(pipeline.PipelineUserType.Consumer, self.ds_stages)
        r_dk, r_dp = gemms.mma_dsq.accumulator(thread), gemms.mma_dov.accumulator(thread)
        r_delta = self.statistics.registers()
        wave = Int32(0)
        while self.scheduler.has_work(p, wave):
            work_tile = self.scheduler.block_tile(p, wave, self.cluster.rank())
            iterations = larger(self.tile_order.num_tiles(p, work_tile), 1)
            r_dk.fill(0.0)
            # 3  dP^T = V dO^T of the first query tile
            pipes.v.consumer_wait(at_kv)
            pipes.do.consumer_wait(at)
            r_next = gemms.mma_dov.accumulator(thread)
            doivj.issue(gemms.mma_dov, r_next, gemms.dov_parts.stage(None, at.index))
            self.statistics.read("delta", at.index, thread, r_delta)
            gemms.mma_dov.wait()
            r_dp.store(r_next.load())
            for iteration in cutlass.range(iterations, unroll=1):
                # 4  dS = P (dP - delta), also for the warpgroups of dQ
                self.wait_for_weights(at_ds.index)
                r_p = self.load_weights(r_dp, at_ds.index, thread)
                self.scores.gradient(p, r_dp, r_p, r_delta, None)
                gemms.mma_dsq.wait()
                if iteration > 0:
                    self.cluster.release_stage(pipes.q, previous_stage(at_q, build.query_stages))
                r_ds = tile_copy.converted(r_dp, self.dtype)
                self.sync_warpgroup()  # all threads have read P
                s_ds = self.ds_tiles("p_ds")[None, None, at_ds.index]
                self.scores.store_ds(gemms.mma_qk, r_ds, s_ds, thread)
                self.sync_warpgroup()
                self.send_ds(pipes, at_ds.index, thread)
                at_ds.advance()
                # 3  dP^T = V dO^T of the next query tile, followed by 6  dK += dS^T Q
                at.advance()
                last = previous_stage(at, build.grad_output_stages)
                stage = cutlass.select_(iteration + 1 < iterations, at.index, last)
                if iteration + 1 < iterations:
                    pipes.do.consumer_wait(at)
                r_next = gemms.mma_dov.accumulator(thread)
                doivj.issue(gemms.mma_dov, r_next, gemms.dov_parts.stage(None, stage))
                pipes.q.consumer_wait(at_q)
                dsq_parts = gemms.mma_dsq.register_operands(r_ds, gemms.dsq_b.stage(at_q.index))
                grad_k.issue(gemms.mma_dsq, r_dk, dsq_parts)
                at_q.advance()
                self.statistics.read("delta", stage, thread, r_delta)
                gemms.mma_dov.wait(gemms.mma_dsq.groups)
                self.cluster.release_remote(pipes.do, last)
                # Every thread has read delta of this stage.
                arrive_all(pipes.do.sync_object_empty, previous_stage(at, build.grad_output_stages))
                r_dp.store(r_next.load())
            pipes.v.consumer_release(at_kv)
            gemms.mma_dsq.wait()
            self.cluster.release_stage(pipes.q, previous_stage(at_q, build.query_stages))
            at_kv.advance()
            # 8  store dK
            r_dk.store(r_dk.load() * p.scale)
            work_tile = self.scheduler.block_tile(p, params.opaque(wave), self.cluster.rank())
            target = key_gradient_tile(
                build, p, "grad_key", work_tile.head, work_tile.seqlen, work_tile.tile * build.tile_n
            )
            store_key_gradient(tile_copy.converted(r_dk, self.dtype), gemms.mma_dsq, target, thread)
            wave = wave + 1

    def sync_warpgroup(self) -> None:
        """Syncs the threads of the gradient warpgroup."""
        cute.arch.barrier(barrier_id=int(Backward2CtaBarrier.DS_WARPGROUP), number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def send_ds(self, pipes: Pipelines, stage: Int32, thread: Int32):
        """Copies dS to the other block, and arrives at this block's full barrier, which also expects the other's dS.

        Each thread has read P from the place of dS before it arrives.
        """
        full = pipes.ds.sync_object_full.get_barrier(stage)
        if cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0:
            base = tile_copy.smem_base(self.build)
            source, target = (
                base + cute.assume(self.build.buffer(name).offset + stage * self.tile_bytes, divby=1024)
                for name in ("p_ds", "other_ds")
            )
            other = self.cluster.rank() ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, self.tile_bytes)
                prim.cp_async_bulk_shared_cluster_shared_cta(
                    cute.arch.map_dsmem_ptr(target, other),
                    source,
                    cute.arch.map_dsmem_ptr(full, other),
                    self.tile_bytes,
                )
        arrive_all(pipes.ds.sync_object_full, stage)

    def words(self, values: cute.Tensor) -> cute.Tensor:
        """Returns 16-bit registers as vectors of 32-bit words: (word, vector)."""
        words = cute.recast_ptr(values.iterator, dtype=Uint32)
        return cute.make_tensor(words, cute.make_layout((WORDS, cute.size(values) // 2 // WORDS)))

    def weight_vector(self, stage: Int32, thread: Int32, vector: int) -> cute.Tensor:
        """Returns where a thread's vector of P is stored."""
        first = tile_copy.smem_pointer(self.build, "p_ds", Uint32) + stage * (self.tile_bytes // 4)
        start = first + (vector * WARPGROUP_THREADS + thread) * WORDS
        return cute.make_tensor(start.align(16), cute.make_layout(WORDS))

    def store_weights(self, r_p: cute.Tensor, stage: Int32, thread: Int32) -> None:
        """Stores P for the thread with this number in the gradient warpgroup, and arrives at the stage's barrier."""
        words = self.words(r_p)
        for vector in range(cute.size(words, mode=[1])):
            cute.autovec_copy(words[None, vector], self.weight_vector(stage, thread, vector))
        barrier = int(Backward2CtaBarrier.P_FULL_0) + stage
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    def wait_for_weights(self, stage: Int32) -> None:
        """Waits until the weight warpgroup has stored P."""
        barrier = int(Backward2CtaBarrier.P_FULL_0) + stage
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    def load_weights(self, r_dp: cute.Tensor, stage: Int32, thread: Int32) -> cute.Tensor:
        """Loads P of the thread with this number in the weight warpgroup; dP has the same layout."""
        r_p = cute.make_rmem_tensor_like(r_dp, self.dtype)
        words = self.words(r_p)
        for vector in range(cute.size(words, mode=[1])):
            cute.autovec_copy(self.weight_vector(stage, thread, vector), words[None, vector])
        return r_p

    def bind_gemms(self, thread: Int32) -> Gemms:
        """Returns the component GEMMs of steps 1, 3, 5 and 6 and their operands in shared memory."""
        build = self.build
        s_q, s_do = self.smem.tiles("query"), self.smem.tiles("grad_output")
        s_k, s_v = self.smem.tiles("key"), self.smem.tiles("value")
        mma_qk = Wgmma(matmul_qk.spec(build, swap_ab=True), build.dtype)
        mma_dov = Wgmma(doivj.spec(build, swap_ab=True), build.dtype)
        mma_pdo = StackedWgmma(grad_v.spec(build), build.dtype)
        mma_dsq = StackedWgmma(grad_k.spec(build), build.dtype)
        return Gemms(
            mma_qk=mma_qk,
            mma_dov=mma_dov,
            mma_pdo=mma_pdo,
            mma_dsq=mma_dsq,
            qk_parts=matmul_qk.operands(mma_qk, s_q, s_k, thread),
            dov_parts=doivj.operands(mma_dov, s_do, s_v, thread),
            pdo_b=grad_v.b_operand(mma_pdo, s_do),
            dsq_b=grad_k.b_operand(mma_dsq, s_q),
        )

    def ds_tiles(self, name: str) -> cute.Tensor:
        """Returns all stages of dS as wgmma reads them: p_ds of this block's keys, other_ds of the other block's."""
        build = self.build
        base = tile_copy.smem_base(build)
        return smem_tile_at(base, build.buffer(name).offset, self.dtype, (build.tile_m, build.tile_n), self.ds_stages)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    body = Backward2Cta(build)
    postprocess = BackwardPostprocess(build, body.grad_query.accum, warpgroup_gemm)
    return backward_chain.trace(build, BackwardKernelSm90(build, body), postprocess)
