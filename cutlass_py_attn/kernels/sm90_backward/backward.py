"""sm90 backward: dQ, dK and dV on wgmma, with tiles loaded by TMA.

Blocks are persistent: each computes one key tile after the other. A block has four warpgroups. One warp of the first
takes work tiles from the scheduler and loads; the second computes dQ = dS K and adds it to dq_accum; the last two have
64 key rows each, with their dK and dV in registers. Scores are transposed (swap A/B): a thread's rows are keys, and P^T
is a register operand of dV. If dK and dV leave too few registers for the scores of a query tile, query and grad_output
are loaded in query blocks, some rows of a tile, and an iteration of all but dQ is one block; otherwise a block is the
tile. For short sequences a block can take all key tiles of a head: grad_query_per_head.py. A work tile of grouped
heads has all query heads of a group, or one of them, whose dK and dV are added to sums: key_gradient_sums.py. With
option shared_end blocks share the queries of the last key tiles, and add dK and dV to such sums.

    steps        1 S^T = K Q^T   2 P   3 dP^T = V dO^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    issued       after 2: 3, then 5;  after 4: 1 of the next iteration, then 6; with two key stages also of the next
                 work tile
    in flight    during 2: 6 of the iteration before;  during 4: 5;  7 during all of them

    pipeline     full: arrivals                   empty: arrivals                          stages
    query        TMA, with the logsumexp          8 warps, after 6                         query_stages, of blocks
    grad_output  TMA, with delta                  256 threads, after 5                     grad_output_stages, of blocks
    dS           8 warps, after 4 of each block   4 warps, after 7                         as many, in whole tiles
                                                  1 warp, after it has stored grad_bias
    key          TMA, with the scheduler's record 256 threads, after 6 and before 8        key_stages
                                                  128 threads, after the last 7
                                                  64 threads of adding warps, at once
                                                  32 threads of the grad_bias warp, at once
    value        TMA                              8 warps, after the last 3                1

Variants ds_registers and key_registers keep dS^T in registers, and less is read from shared memory:

    product           standard            ds_registers                      key_registers
    1 S^T = K Q^T     K, Q from shared    the same; with 128 columns        as standard
                      memory              added to -logsumexp / scale
    3 dP^T = V dO^T   V, dO from shared   the same, added to -delta; with   as ds_registers, issued after 5
                      memory              fewer columns issued after 5
    5 dV += P^T dO    P^T from registers  as standard                       as standard
    6 dK += dS^T Q    dS^T from shared    dS^T from registers               as ds_registers
                      memory
    7 dQ = dS K       dS, K from shared   as standard                       dQ^T = K^T dS^T, K^T from registers:
                      memory                                                grad_query_transposed.py

P^T and dS^T take turns in the same registers: 6 of the iteration before ends before P is converted, and 5 before dS is;
where 5 is issued first, it ends with 3.

With mask form "ranges", the tiles and their order come from lists in memory (listed_key_tiles.py), and the ranges of a
query tile's rows are loaded with its grad_output (block_ranges.py).

Dropout's mask bits are generated for several query tiles at once: dropout_transposed.py. Each consumer warp copies
the bias of its keys and of the next query block after 5: transposed_bias.py. One warp of the first warpgroup
writes dS as the gradient of the bias: grad_bias_store.py.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.backward_parts import chain as backward_chain
from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.backward_parts.postprocess import BackwardPostprocess
from cutlass_py_attn.kernels.common import dependent_launch, dropout, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.wgmma import DescriptorOperand, Wgmma, row_view
from cutlass_py_attn.kernels.component_gemms.products import doivj, grad_k, grad_v, matmul_qk
from cutlass_py_attn.kernels.sm90_backward.block_ranges import BlockRanges
from cutlass_py_attn.kernels.sm90_backward.dropout_transposed import TransposedDropout
from cutlass_py_attn.kernels.sm90_backward.grad_bias import GradBiasSm90
from cutlass_py_attn.kernels.sm90_backward.grad_bias_store import GradBiasStore
from cutlass_py_attn.kernels.sm90_backward.grad_query import DsK, GradQuerySm90, warpgroup_gemm
from cutlass_py_attn.kernels.sm90_backward.grad_query_ordered import OrderedGradQuery
from cutlass_py_attn.kernels.sm90_backward.grad_query_per_head import GradQueryPerHead
from cutlass_py_attn.kernels.sm90_backward.grad_query_transposed import TransposedGradQuery, TransposedPostprocess
from cutlass_py_attn.kernels.sm90_backward.key_gradient_sums import (
    KeyGradientPostprocess,
    KeyGradientSums,
    SharedTileSums,
)
from cutlass_py_attn.kernels.sm90_backward.key_tile_scheduler import (
    KeyTileScheduler,
    PerHeadScheduler,
    QueryHeadScheduler,
    SharedEndKeyTileScheduler,
)
from cutlass_py_attn.kernels.sm90_backward.layout import ADDING_WARPS, WORK_TILE_RECORDS, adds_in_order
from cutlass_py_attn.kernels.sm90_backward.listed_key_tiles import ListedKeyTileScheduler, ListedQueryTileOrder
from cutlass_py_attn.kernels.sm90_backward.main_kernel import (
    CONSUMER_START,
    BackwardGradBiasKernelSm90,
    BackwardKernelSm90,
    Maps,
    Pipelines,
    key_gradient_tile,
    store_key_gradient,
)
from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock, QueryTileOrder
from cutlass_py_attn.kernels.sm90_backward.schedule import schedule_of
from cutlass_py_attn.kernels.sm90_backward.smem import BackwardSmem, RowStatistics
from cutlass_py_attn.kernels.sm90_backward.transposed_scores import TransposedScores
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.named_barriers import BackwardBarrier
from cutlass_py_attn.kernels.sm90_common.pipelines import PipelineSpec, arrive, arrive_all, previous_stage
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.swap_ab import swap_view
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.launch.grad_bias import uses_wgmma
from cutlass_py_attn.launch.variants import KEEPS_DS, KEY_REGISTERS, PER_HEAD, QUERY_HEADS, SHARED_END
from cutlass_py_attn.problem.tensors import F32_BYTES, RANGE_BYTES

SCHEDULERS = {PER_HEAD: PerHeadScheduler, QUERY_HEADS: QueryHeadScheduler}  # of variants with work tiles of their own


@dataclass(frozen=True)
class Gemms:
    """The component GEMMs of the consumers, and their operands in shared memory. dV's A operand is in registers.

    dsq_parts: with dS^T in shared memory; dsq_b: Q alone, for dS^T in registers
    """

    mma_qk: Wgmma
    mma_dov: Wgmma
    mma_pdo: Wgmma
    mma_dsq: Wgmma
    qk_parts: Operands
    dov_parts: Operands
    pdo_b: DescriptorOperand
    dsq_parts: Operands
    dsq_b: DescriptorOperand


@dataclass(frozen=True)
class Consumer:
    """What a consumer warpgroup uses for all query blocks.

    r_s, r_dk, r_dv: S^T of the next query block, which becomes P^T, and the accumulators of dK and dV
    r_lse, r_delta: statistics of a query block
    r_kept: dropout's mask bits, or None
    """

    p: Any
    pipes: Pipelines
    gemms: Gemms
    thread: Int32
    warpgroup: Int32
    r_s: cute.Tensor
    r_dk: cute.Tensor
    r_dv: cute.Tensor
    r_lse: cute.Tensor
    r_delta: cute.Tensor
    r_kept: cute.Tensor | None


@dataclass
class Turn:
    """One iteration of a consumer warpgroup: its place, and what its steps leave for later ones.

    at_q, at, at_k: states of the pipelines of query, grad_output and key
    query, grad_output: stages of this query block
    next_query, key_stage: those of the next S^T
    thread: the thread's number, for the places of its scores in the tile
    """

    at_q: Any
    at: Any
    at_k: Any
    work_tile: WorkTile
    block: QueryBlock
    tile: ScoreTile
    iteration: Int32
    iterations: Any
    query: Int32
    grad_output: Int32
    next_query: Any = None
    key_stage: Any = None
    thread: Any = None
    r_derivative: Any = None
    weights: Any = None
    r_dp: Any = None
    r_ds: Any = None
    r_next: Any = None


class BackwardSm90:
    """The body of one Build: what each role of `BackwardKernelSm90` does."""

    waits_in_producer = True

    def __init__(self, build: Build) -> None:
        self.adds_in_order = adds_in_order(build)
        grad_query = GradQueryPerHead if build.variant == PER_HEAD else GradQuerySm90
        grad_query = OrderedGradQuery if self.adds_in_order else grad_query
        grad_query = TransposedGradQuery if build.variant == KEY_REGISTERS else grad_query
        self.build = build
        self.consumers = build.threads - CONSUMER_START  # threads of the consumer warpgroups
        self.dtype = DTYPES[build.dtype]
        self.smem = BackwardSmem(build)
        self.shared_sums = SharedTileSums(build) if SHARED_END in build.options else None
        self.ranges = BlockRanges(build) if build.form.has_ranges else None
        default = KeyTileScheduler if self.shared_sums is None else SharedEndKeyTileScheduler
        default = default if self.ranges is None else ListedKeyTileScheduler
        order = QueryTileOrder if self.ranges is None else ListedQueryTileOrder
        self.scheduler = SCHEDULERS.get(build.variant, default)(build)
        self.grad_query = grad_query(build, BackwardBarrier.GRAD_QUERY)
        self.tile_order = order(build)
        self.block_order = order(build, self.smem.blocks)
        self.grad_bias = GradBiasStore(build, self.tile_order) if build.maps_grad_bias else None
        self.scores = TransposedScores(build)
        self.statistics = RowStatistics(build, self.grad_query.accum)
        self.key_gradients = KeyGradientSums(build) if build.variant == QUERY_HEADS else None
        self.overlaps_tiles = build.key_stages > 1  # the next key tile's first scores are issued before this one's end
        self.dropout = TransposedDropout(build, CONSUMER_START, self.consumers) if build.has("dropout") else None
        self.schedule = schedule_of(build)

    def sync_barrier_init(self) -> None:
        """Makes the mbarriers visible to the block."""
        pipelines.sync_barrier_init()

    def sync_exit(self) -> None:
        """No other block accesses this block's shared memory."""

    def create_pipelines(self) -> Pipelines:
        """Creates the pipelines of query, grad_output, key, value and dS."""
        build, warps = self.build, self.consumers // WARP_THREADS
        statistics = build.block_queries * F32_BYTES
        ranges = 0 if self.ranges is None else build.block_queries * RANGE_BYTES
        record_warps = (ADDING_WARPS if self.adds_in_order else 0) + (1 if build.maps_grad_bias else 0)
        key_readers = self.consumers + WARPGROUP_THREADS + record_warps * WARP_THREADS
        specs = {
            "query": PipelineSpec(build.query_stages, warps, statistics),
            "grad_output": PipelineSpec(build.grad_output_stages, self.consumers, statistics + ranges),
            "key": PipelineSpec(build.key_stages, key_readers, 0),
            "value": PipelineSpec(1, warps, 0),
        }
        loaded, barriers = pipelines.tma_pipelines(build, specs)
        ds_arrivals = self.smem.blocks * warps
        ds_readers = WARPGROUP_WARPS + (1 if build.maps_grad_bias else 0)
        ds = pipelines.thread_pipeline(self.smem.ds_stages, ds_arrivals, ds_readers, barriers)
        if build.variant == PER_HEAD:
            self.grad_query.init_barrier()
        if self.adds_in_order:
            self.grad_query.init_barriers()
        return Pipelines(*loaded, ds)

    def states(self, user: Any) -> tuple[Any, Any, Any]:
        """Returns the first states of a user of the pipelines of query, grad_output and key."""
        build = self.build
        return pipelines.states(user, build.query_stages, build.grad_output_stages, build.key_stages)

    def value_state(self, at_k: Any, at_v: Any) -> Any:
        """Returns the state of the value: that of the key if both have one stage.

        Called at each use. A loop carries every name separately, so a second name of one state would not advance.
        """
        return at_v if self.overlaps_tiles else at_k

    def record(self, at_k: Any) -> Int32:
        """Returns the scheduler's record of the work tile whose key tile is at `at_k`, for a consumer."""
        return self._record(at_k.index, at_k.phase)

    def record_to_write(self, at_k: Any) -> Int32:
        """Returns the same for the producer, whose phase is the consumers' next one."""
        return self._record(at_k.index, at_k.phase ^ 1)

    def _record(self, stage: Int32, phase: Int32) -> Int32:
        return phase + WORK_TILE_RECORDS * stage if self.overlaps_tiles else phase

    @cute.jit
    def produce(self, p: Any, pipes: Pipelines, maps: Maps):
        """Producer warp: loads each key tile and its value tile, and the query and grad_output blocks that visit it."""
        build = self.build
        at_q, at_do, at_k = self.states(pipeline.PipelineUserType.Producer)
        (at_v,) = pipelines.states(pipeline.PipelineUserType.Producer, 1)
        if cutlass.const_expr(build.deterministic):  # the first number comes from a counter that delta clears
            dependent_launch.wait_for_previous(build, "main")
        total, number = self.scheduler.total(p), self.scheduler.first_number(p)
        cursor = self.scheduler.initial_cursor(p)
        while number < total:
            work_tile, cursor = self.scheduler.numbered_tile(p, number, cursor)
            of = work_tile.seqlen
            self.scheduler.write_record(self.record_to_write(at_k), work_tile)
            key_head = self.key_head(p, work_tile)
            key_at = tma.tile_coordinates(build, work_tile.tile * build.tile_n, key_head, of, "key")
            pipelines.load(build, pipes.k, at_k, "key", maps.k, key_at)
            block = self.block_order.first(p, work_tile)
            iterations = self.smem.blocks * self.tile_order.num_tiles(p, work_tile)
            for iteration in cutlass.range(iterations, unroll=1):
                visited = self.block_order.visited(p, block)
                query_at = tma.tile_coordinates(build, visited.index * build.block_queries, visited.head, of, "query")
                row = self.statistics.row(p, of.first_tile, visited)
                pipelines.load(build, pipes.q, at_q, "query", maps.q, query_at)
                if iteration == 0:  # delta writes the statistics, the sums and the counter, and nothing loaded so far
                    dependent_launch.wait_for_previous(build, "main")
                self.statistics.load(pipes.q, "logsumexp", p.logsumexp_log2, row, at_q)
                at_q.advance()
                if iteration == 0:  # after the first query block, which is needed earlier
                    pipelines.load(build, pipes.v, self.value_state(at_k, at_v), "value", maps.v, key_at)
                pipelines.load(build, pipes.do, at_do, "grad_output", maps.do, query_at)
                self.statistics.load(pipes.do, "delta", p.delta, row, at_do)
                if cutlass.const_expr(self.ranges is not None):
                    self.ranges.load(p, pipes.do, of.index, visited, at_do)
                at_do.advance()
                block = self.block_order.next(work_tile, block)
            at_k.advance()
            if cutlass.const_expr(self.overlaps_tiles):
                at_v.advance()
            number = self.scheduler.next_number(p, number)
        dependent_launch.wait_for_previous(build, "main")  # for a block without a work tile
        self.scheduler.write_record(self.record_to_write(at_k), None)
        pipelines.mark_full(pipes.k, at_k)
        pipes.q.producer_tail(at_q)
        pipes.do.producer_tail(at_do)

    def key_head(self, p: Any, work_tile: WorkTile) -> Int32:
        """Returns the head of key and value of a work tile."""
        if self.key_gradients is None:
            return work_tile.head
        return seqlen_info.key_head(self.build, p, work_tile.head)

    def wait_for_key_tile(self, pipes: Pipelines, at_k: Any) -> Int32:
        """Waits for the next work tile and returns its key tile, below 0 if none is left."""
        pipes.k.consumer_wait(at_k)
        return self.scheduler.read_key_tile(self.record(at_k))

    @cute.jit
    def add_query_gradient(self, p: Any, pipes: Pipelines, warp: Int32):
        """Adding warp: adds dQ of every second query tile, in turn with the other adding warp."""
        _, _, at_k = self.states(pipeline.PipelineUserType.Consumer)
        number, own = Int32(0), Int32(0)  # query tiles before this key tile, and those that this warp has added
        key_tile = self.wait_for_key_tile(pipes, at_k)
        while key_tile >= 0:
            work_tile = self.scheduler.read_record(p, self.record(at_k))
            arrive_all(pipes.k.sync_object_empty, at_k.index)
            # A warp skips the first query tile if the last one of the key tile before was its own.
            tiles, skips = self.tile_order.num_tiles(p, work_tile), (warp ^ number) & 1
            block = self.tile_order.first_of(p, work_tile, skips)
            for _ in cutlass.range((tiles - skips + 1) // 2, unroll=1):
                self.grad_query.add_staged(p, self.grad_query.target(p, work_tile, block, warp, own), warp, own)
                own += 1
                block = self.tile_order.next(work_tile, self.tile_order.next(work_tile, block))
            at_k.advance()
            number += tiles
            key_tile = self.wait_for_key_tile(pipes, at_k)

    @cute.jit
    def store_grad_bias(self, p: Any, pipes: Pipelines, target: Any):
        """Grad_bias warp: writes dS of every query tile, and zeros for those that a key tile does not visit."""
        _, _, at_k = self.states(pipeline.PipelineUserType.Consumer)
        (at,) = pipelines.states(pipeline.PipelineUserType.Consumer, self.smem.ds_stages)
        key_tile = self.wait_for_key_tile(pipes, at_k)
        while key_tile >= 0:
            work_tile = self.scheduler.read_record(p, self.record(at_k))
            arrive_all(pipes.k.sync_object_empty, at_k.index)
            block = self.tile_order.first(p, work_tile)
            for _ in cutlass.range(self.tile_order.num_tiles(p, work_tile), unroll=1):
                pipes.ds.consumer_wait(at)
                self.grad_bias.store(target, work_tile, block, at.index)
                arrive(pipes.ds.sync_object_empty, at.index)
                at.advance()
                block = self.tile_order.next(work_tile, block)
            self.grad_bias.clear_unvisited(p, work_tile)
            at_k.advance()
            key_tile = self.wait_for_key_tile(pipes, at_k)

    @cute.jit
    def multiply_query_gradient(self, p: Any, pipes: Pipelines, thread: Int32):
        """dQ warpgroup: 7  dQ = dS K of every query tile, added to its sum."""
        _, _, at_k = self.states(pipeline.PipelineUserType.Consumer)
        (at,) = pipelines.states(pipeline.PipelineUserType.Consumer, self.smem.ds_stages)
        s_ds, state = self.smem.tiles("ds"), self.grad_query.initial_state()
        key_tile = self.wait_for_key_tile(pipes, at_k)
        while key_tile >= 0:
            work_tile = self.scheduler.read_record(p, self.record(at_k))
            block = self.tile_order.first(p, work_tile)
            keys = self.grad_query.gemm.key_operand(self.smem.key_tile(at_k), thread)
            for _ in cutlass.range(self.tile_order.num_tiles(p, work_tile), unroll=1):
                visited = self.tile_order.visited(p, block)
                target = self.grad_query.target(p, work_tile, visited, thread, state)
                pipes.ds.consumer_wait(at)
                release = functools.partial(arrive, pipes.ds.sync_object_empty, at.index)
                operands = DsK(s_ds[None, None, at.index], keys)
                state = self.grad_query.add_tile(p, target, operands, thread, release, state)
                at.advance()
                block = self.tile_order.next(work_tile, block)
            arrive_all(pipes.k.sync_object_empty, at_k.index)
            at_k.advance()
            state = self.grad_query.finish_key_tile(p, state, thread)
            key_tile = self.wait_for_key_tile(pipes, at_k)
        self.grad_query.finish()

    @cute.jit
    def consume(self, p: Any, pipes: Pipelines, thread: Int32):
        """Consumer warpgroups: 64 rows of each key tile each."""
        build = self.build
        gemms = self.bind_gemms(thread)
        at_q, at, at_k = self.states(pipeline.PipelineUserType.Consumer)
        (at_v,) = pipelines.states(pipeline.PipelineUserType.Consumer, 1)
        r_dk, r_dv = gemms.mma_dsq.accumulator(thread), gemms.mma_pdo.accumulator(thread)
        r_s = gemms.mma_qk.accumulator(thread)
        r_lse, r_delta = self.statistics.registers(), self.statistics.registers()
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        r_kept, stream = None, None  # of dropout
        if cutlass.const_expr(self.dropout is not None):
            r_kept, stream = self.dropout.registers(), dropout.load_uniform_stream(p)
        consumer = Consumer(p, pipes, gemms, thread, warpgroup, r_s, r_dk, r_dv, r_lse, r_delta, r_kept)
        key_tile = self.wait_for_key_tile(pipes, at_k)
        if cutlass.const_expr(self.overlaps_tiles):
            self.wait_for_query(pipes, at_q, key_tile >= 0)
            self.first_scores(gemms, at_k, at_q, thread, r_s, r_lse)
        while key_tile >= 0:
            work_tile = self.scheduler.read_record(p, self.record(at_k))
            iterations = self.smem.blocks * larger(self.tile_order.num_tiles(p, work_tile), 1)
            r_dk.fill(0.0)
            r_dv.fill(0.0)
            if cutlass.const_expr(build.has("bias")):
                self.load_bias_tile(p, at_k, self.block_order.first(p, work_tile), Boolean(True))
            if cutlass.const_expr(not self.overlaps_tiles):
                pipes.q.consumer_wait(at_q)
                self.first_scores(gemms, at_k, at_q, thread, r_s, r_lse)
            next_key_tile = Int32(-1)  # until the next work tile is known
            pipes.v.consumer_wait(self.value_state(at_k, at_v))
            block = self.block_order.first(p, work_tile)
            if cutlass.const_expr(self.dropout is not None):
                self.dropout.load(p, stream, r_kept, work_tile, block, Int32(0), iterations)
            for iteration in cutlass.range(iterations, unroll=1):
                tile = ScoreTile(work_tile.seqlen, work_tile.band, block.head, block.index, key_tile)
                turn = Turn(at_q, at, at_k, work_tile, block, tile, iteration, iterations, at_q.index, at.index)
                self.take(self.schedule.block, consumer, turn)
                at.advance()
                at_q.advance()
                turn.query = previous_stage(at_q, build.query_stages)
                turn.grad_output = previous_stage(at, build.grad_output_stages)
                # After the last query block its S^T is multiplied again, unused: with a branch around it the compiler
                # would wait for all GEMMs.
                has_next, turn.key_stage = iteration + 1 < iterations, self.smem.key_stage(at_k)
                if cutlass.const_expr(self.overlaps_tiles):
                    at_next = pipelines.next_state(at_k, build.key_stages)
                    if iteration + 1 == iterations:
                        next_key_tile = self.wait_for_key_tile(pipes, at_next)
                    turn.key_stage = cutlass.select_(next_key_tile >= 0, at_next.index, turn.key_stage)
                    has_next = has_next | (next_key_tile >= 0)
                turn.next_query = cutlass.select_(has_next, at_q.index, turn.query)
                self.wait_for_query(pipes, at_q, has_next)
                self.take(self.schedule.next_block, consumer, turn)
                block = self.block_order.next(work_tile, block)
                if cutlass.const_expr(self.dropout is not None):
                    self.dropout.load(p, stream, r_kept, work_tile, block, iteration + 1, iterations)
                gemms.mma_qk.wait(1)
                r_s.store(turn.r_next.load())
            if cutlass.const_expr(not self.overlaps_tiles):
                pipes.v.consumer_release(at_k)
            gemms.mma_dsq.wait()
            arrive(pipes.q.sync_object_empty, previous_stage(at_q, build.query_stages))
            # 8  store dK and dV while the next key tile is loaded
            work_tile = self.scheduler.read_record(p, self.record(at_k))
            cute.arch.barrier(barrier_id=int(BackwardBarrier.CONSUMER_WARPGROUPS), number_of_threads=self.consumers)
            arrive_all(pipes.k.sync_object_empty, at_k.index)
            if cutlass.const_expr(self.key_gradients is not None):
                self.add_key_gradients(p, work_tile, r_dk, r_dv, warpgroup)
            elif cutlass.const_expr(self.shared_sums is not None):
                if work_tile.part >= 0:
                    self.add_part(p, gemms, work_tile, r_dk, r_dv)
                else:
                    self.store_key_gradients(p, gemms, work_tile, r_dk, r_dv)
            else:
                self.store_key_gradients(p, gemms, work_tile, r_dk, r_dv)
            at_k.advance()
            if cutlass.const_expr(self.overlaps_tiles):
                at_v.advance()
            key_tile = next_key_tile if cutlass.const_expr(self.overlaps_tiles) else self.wait_for_key_tile(pipes, at_k)

    def store_key_gradients(
        self, p: Any, gemms: Gemms, work_tile: WorkTile, r_dk: cute.Tensor, r_dv: cute.Tensor
    ) -> None:
        """Scales, converts and stores dK and dV of a key tile."""
        build = self.build
        r_dk.store(r_dk.load() * p.scale)
        if build.has("dropout"):
            r_dv.store(r_dv.load() * p.keep_scale)
        thread = params.read_register("tid.x") - CONSUMER_START
        key0 = work_tile.tile * build.tile_n
        for name, gemm, accumulator in (("grad_value", gemms.mma_pdo, r_dv), ("grad_key", gemms.mma_dsq, r_dk)):
            values = tile_copy.converted(accumulator, self.dtype)
            target = key_gradient_tile(build, p, name, work_tile.head, work_tile.seqlen, key0)
            store_key_gradient(values, gemm, target, thread)

    def add_key_gradients(
        self, p: Any, work_tile: WorkTile, r_dk: cute.Tensor, r_dv: cute.Tensor, warpgroup: Int32
    ) -> None:
        """Adds dK and dV of a key tile to their sums."""
        sums, build = self.key_gradients, self.build
        index = sums.index(p, work_tile.seqlen, self.key_head(p, work_tile), work_tile.tile, warpgroup)
        thread = params.read_register("tid.x") % WARPGROUP_THREADS
        sums.add(sums.pointer(p.grad_value_accum, index, build.columns_value), r_dv, thread)
        sums.add(sums.pointer(p.grad_key_accum, index, build.columns), r_dk, thread)

    @cute.jit
    def add_part(self, p: Any, gemms: Gemms, work_tile: WorkTile, r_dk: cute.Tensor, r_dv: cute.Tensor):
        """Adds dK and dV of a part to their sums; the last part of a key tile stores them."""
        thread = params.read_register("tid.x") - CONSUMER_START
        self.shared_sums.add_part(p, work_tile.part, thread, r_dk, r_dv)
        if self.shared_sums.count_part(p, work_tile.part, thread) == p.num_splits_query:
            self.store_sums(p, gemms, work_tile, thread)

    def store_sums(self, p: Any, gemms: Gemms, work_tile: WorkTile, thread: Int32) -> None:
        """Stores the sums of dK and dV of a shared key tile."""
        sum_dk, sum_dv = gemms.mma_dsq.accumulator(thread), gemms.mma_pdo.accumulator(thread)
        self.shared_sums.load_parts(p, work_tile.part, thread, sum_dk, sum_dv)
        self.store_key_gradients(p, gemms, work_tile, sum_dk, sum_dv)

    def first_scores(
        self, gemms: Gemms, at_k: Any, at_q: Any, thread: Int32, r_s: cute.Tensor, r_lse: cute.Tensor
    ) -> None:
        """Computes 1  S^T = K Q^T of the first query block of a key tile, and reads its logsumexp.

        If no work tile is left, it computes unused numbers.
        """
        r_next = self.scores_accumulator(gemms, at_q.index, thread)
        matmul_qk.issue(gemms.mma_qk, r_next, gemms.qk_parts.stage(self.smem.key_stage(at_k), at_q.index))
        if self.schedule.has("read_next_logsumexp"):
            self.statistics.read("logsumexp", at_q.index, thread, r_lse)
        gemms.mma_qk.wait()
        r_s.store(r_next.load())

    def scores_accumulator(self, gemms: Gemms, stage: Int32, thread: Int32) -> cute.Tensor:
        """Returns the accumulator of S^T of a query block; the stage has arrived, unless S^T is unused."""
        r_s = gemms.mma_qk.accumulator(thread)
        if starts_from_logsumexp(self.build):
            self.statistics.start("logsumexp", stage, thread, r_s)
        return r_s

    def take(self, steps: tuple[str, ...], consumer: Consumer, turn: Turn) -> None:
        """Takes the steps in order."""
        for step in steps:
            getattr(self, step)(consumer, turn)

    def read_logsumexp(self, consumer: Consumer, turn: Turn) -> None:
        """Reads the logsumexp of this query block."""
        self.statistics.read("logsumexp", turn.at_q.index, consumer.thread, consumer.r_lse)

    def locate(self, consumer: Consumer, turn: Turn) -> None:
        """Reads the thread's number."""
        turn.thread = self.scores.thread(consumer.thread, CONSUMER_START)

    def apply_terms(self, consumer: Consumer, turn: Turn) -> None:
        """2  Turns S into scores."""
        mma_qk, r_s = consumer.gemms.mma_qk, consumer.r_s
        turn.r_derivative = self.scores.apply_score_mod(consumer.p, mma_qk, r_s, turn.tile, turn.thread)

    def exponentiate(self, consumer: Consumer, turn: Turn) -> None:
        """2  P = exp2(S - logsumexp) in base 2."""
        self.scores.exponentiate(consumer.p, consumer.r_s, consumer.r_lse)

    def convert_weights(self, consumer: Consumer, turn: Turn) -> None:
        """2  Masks and converts P."""
        if self.ranges is None:
            self.scores.mask(consumer.gemms.mma_qk, consumer.r_s, turn.tile, turn.thread)
        else:
            self.mask_by_ranges(consumer, turn)
        turn.weights = self.scores.operands(consumer.r_s, turn.r_derivative, consumer.r_kept)

    @cute.jit
    def mask_by_ranges(self, consumer: Consumer, turn: Turn):
        """Sets weights outside of the ranges of their queries to zero, in a query tile that has any.

        The ranges are loaded with grad_output, which every query tile waits for again.
        """
        if turn.block.index < turn.work_tile.partial_end:
            consumer.pipes.do.consumer_wait(turn.at)
            coordinates = self.scores.coordinates(consumer.gemms.mma_qk, turn.thread)
            key0 = turn.tile.key_tile * self.build.tile_n
            weights = swap_view(row_view(consumer.r_s))
            self.ranges.mask(weights, coordinates, turn.at.index, key0)
            if cutlass.const_expr(self.ranges.function is not None):
                block = self.block_order.visited(consumer.p, turn.block).index
                self.ranges.mask_by_function(consumer.p, weights, coordinates, turn.tile, (block, key0))

    def wait_for_grad_output(self, consumer: Consumer, turn: Turn) -> None:
        """Waits for grad_output of this query block."""
        consumer.pipes.do.consumer_wait(turn.at)

    def issue_dp(self, consumer: Consumer, turn: Turn) -> None:
        """3  dP^T = V dO^T, which starts from -delta if no step reads delta."""
        gemms = consumer.gemms
        turn.r_dp = gemms.mma_dov.accumulator(consumer.thread)
        if not self.schedule.has("read_delta"):
            self.statistics.start("delta", turn.at.index, consumer.thread, turn.r_dp)
        doivj.issue(gemms.mma_dov, turn.r_dp, gemms.dov_parts.stage(None, turn.at.index))

    def issue_dv(self, consumer: Consumer, turn: Turn) -> None:
        """5  dV += P^T dO."""
        gemms = consumer.gemms
        parts = gemms.mma_pdo.register_operands(turn.weights.r_p, gemms.pdo_b.stage(turn.at.index))
        grad_v.issue(gemms.mma_pdo, consumer.r_dv, parts)

    def load_bias(self, consumer: Consumer, turn: Turn) -> None:
        """Starts copying the bias of the next query block; every thread of the warp has read that of this one."""
        following = self.block_order.next(turn.work_tile, turn.block)
        self.load_bias_tile(consumer.p, turn.at_k, following, turn.iteration + 1 < turn.iterations)

    @cute.jit
    def load_bias_tile(self, p: Any, at_k: Any, block: Any, has_block: Any):
        """Starts copying the bias of a query block if there is one."""
        if has_block:
            work_tile = self.scheduler.read_record(p, self.record(at_k))
            tile = ScoreTile(work_tile.seqlen, work_tile.band, block.head, block.index, work_tile.tile)
            self.scores.bias.load(p, tile, CONSUMER_START)

    @cute.jit
    def finish_dk(self, consumer: Consumer, turn: Turn):
        """Waits for 6 of the iteration before and releases its query block."""
        Wgmma.wait(self.schedule.pending("dk"))
        if turn.iteration > 0:
            arrive(consumer.pipes.q.sync_object_empty, previous_stage(turn.at_q, self.build.query_stages))

    def finish_dp(self, consumer: Consumer, turn: Turn) -> None:
        """Waits for 3; after the last one the next value may be loaded."""
        Wgmma.wait(self.schedule.pending("dp"))
        if self.overlaps_tiles:
            self.release_value(consumer.pipes, turn.iteration + 1 == turn.iterations)

    def read_delta(self, consumer: Consumer, turn: Turn) -> None:
        """Reads delta of this query block."""
        self.statistics.read("delta", turn.at.index, consumer.thread, consumer.r_delta)

    def compute_ds(self, consumer: Consumer, turn: Turn) -> None:
        """4  dS = P (dP - delta)."""
        self.scores.gradient(consumer.p, turn.r_dp, turn.weights.r_factor, consumer.r_delta, consumer.r_kept)

    def finish_dv(self, consumer: Consumer, turn: Turn) -> None:
        """Waits for 5 and releases grad_output; every thread has read delta of this stage."""
        Wgmma.wait(self.schedule.pending("dv"))
        arrive_all(consumer.pipes.do.sync_object_empty, turn.grad_output)

    def store_ds(self, consumer: Consumer, turn: Turn) -> None:
        """Stores dS, also for the warpgroup of dQ."""
        self.acquire_ds(consumer.pipes, turn.at)
        turn.r_ds, s_ds = tile_copy.converted(turn.r_dp, self.dtype), self.smem.ds_blocks()[None, None, turn.at.index]
        self.scores.store_ds(consumer.gemms.mma_qk, turn.r_ds, s_ds, consumer.thread)
        arrive(consumer.pipes.ds.sync_object_full, turn.at.index // self.smem.blocks)

    def issue_scores(self, consumer: Consumer, turn: Turn) -> None:
        """1  S^T = K Q^T of the next query block."""
        gemms = consumer.gemms
        turn.r_next = self.scores_accumulator(gemms, turn.next_query, consumer.thread)
        matmul_qk.issue(gemms.mma_qk, turn.r_next, gemms.qk_parts.stage(turn.key_stage, turn.next_query))

    def issue_dk(self, consumer: Consumer, turn: Turn) -> None:
        """6  dK += dS^T Q, from registers or once all threads of the warpgroup have stored dS."""
        gemms = consumer.gemms
        if self.build.variant in KEEPS_DS:
            parts = gemms.mma_dsq.register_operands(turn.r_ds, gemms.dsq_b.stage(turn.query))
        else:
            self.sync_warpgroup(consumer.warpgroup)
            parts = gemms.dsq_parts.stage(turn.grad_output, turn.query)
        grad_k.issue(gemms.mma_dsq, consumer.r_dk, parts)

    def read_next_logsumexp(self, consumer: Consumer, turn: Turn) -> None:
        """Reads the logsumexp of the next query block."""
        self.statistics.read("logsumexp", turn.next_query, consumer.thread, consumer.r_lse)

    @cute.jit
    def wait_for_query(self, pipes: Pipelines, at_q: Any, is_loaded: Any):
        """Waits for a query block if one is loaded."""
        if is_loaded:
            pipes.q.consumer_wait(at_q)

    @cute.jit
    def release_value(self, pipes: Pipelines, is_last: Any):
        """Releases V after its last GEMM."""
        if is_last:
            arrive(pipes.v.sync_object_empty, 0)

    def acquire_ds(self, pipes: Pipelines, at: Any) -> None:
        """Waits until the stage of dS is empty.

        dS has the stages of grad_output, which this warpgroup consumes; a producer's phase is the consumers' next one.
        """
        state = pipeline.PipelineState(self.smem.ds_stages, Int32(0), at.index // self.smem.blocks, at.phase ^ 1)
        pipes.ds.producer_acquire(state)

    def sync_warpgroup(self, warpgroup: Int32) -> None:
        """Syncs the threads of one consumer warpgroup."""
        barrier = int(BackwardBarrier.CONSUMER_0) + warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)

    def bind_gemms(self, thread: Int32) -> Gemms:
        """Returns the component GEMMs of steps 1, 3, 5 and 6 and their operands in shared memory."""
        build, rows = self.build, self.build.block_queries
        s_q, s_do, s_ds = self.smem.tiles("query"), self.smem.tiles("grad_output"), self.smem.ds_blocks()
        s_k, s_v = self.smem.tiles("key"), self.smem.tiles("value")
        spec_qk, spec_dov = (gemm.spec(build, swap_ab=True) for gemm in (matmul_qk, doivj))
        mma_qk = Wgmma(replace(spec_qk, n=rows, accumulate=starts_from_logsumexp(build)), build.dtype)
        mma_dov = Wgmma(replace(spec_dov, n=rows, accumulate=not self.schedule.has("read_delta")), build.dtype)
        mma_pdo = Wgmma(replace(grad_v.spec(build), k=rows), build.dtype)
        mma_dsq = Wgmma(replace(grad_k.spec(build), k=rows), build.dtype)
        return Gemms(
            mma_qk=mma_qk,
            mma_dov=mma_dov,
            mma_pdo=mma_pdo,
            mma_dsq=mma_dsq,
            qk_parts=matmul_qk.operands(mma_qk, s_q, s_k, thread),
            dov_parts=doivj.operands(mma_dov, s_do, s_v, thread),
            pdo_b=grad_v.b_operand(mma_pdo, s_do),
            dsq_parts=grad_k.operands(mma_dsq, s_ds, s_q, thread),
            dsq_b=grad_k.b_operand(mma_dsq, s_q),
        )


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    body = BackwardSm90(build)
    conversion = TransposedPostprocess if build.variant == KEY_REGISTERS else BackwardPostprocess
    postprocess = conversion(build, body.grad_query.accum, warpgroup_gemm)
    sums = body.key_gradients
    postprocess_kv = None if sums is None else KeyGradientPostprocess(build, sums)
    kernel = BackwardGradBiasKernelSm90 if build.maps_grad_bias else BackwardKernelSm90
    grad_bias = GradBiasSm90(build) if uses_wgmma(build) else None
    return backward_chain.trace(build, kernel(build, body), postprocess, postprocess_kv, grad_bias)
