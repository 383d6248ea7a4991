"""sm90 forward: O = softmax(scale Q K^T) V and the logsumexp on wgmma, with tiles loaded by TMA.

The kernel is persistent and warp-specialised. One producer warp fills the pipelines of query, key and value tiles. One
to three consumer warpgroups compute 64 rows of the query tile each. Named barriers order the GEMMs of several, so that
one warpgroup computes exponentials while another multiplies. If shared memory holds two query tiles, the first S of the
next work tile is in flight while the output is stored.

    step        S(n - 1) = Q K^T, then O += P(n) V    softmax of S(n - 1)
    in flight   key tile n - 2                         value tile n - 1, O += P(n) V

Keys and values may be in pages: the producer warp then loads each tile page by page (paged_loads.py), and nothing else
differs.

With option speculative, the weights of a key tile that every row sees use the maxima before it, so that exponentials
wait for no maximum of the tile. The masked key tiles of a window come before and after these. If a score exceeds its
maximum by far, the warpgroup computes S again, then the maxima. With option halves, S of such a tile is two products,
and the exponentials of the first half run during the second.

With mask form "ranges", the tiles and their order come from lists in memory (listed_tile_scheduler.py): the producer
warp reads every number of a key tile, and consumers those of tiles in which a range ends (row_ranges.py).

With option shared_end, all blocks share the keys of the last query tiles; in variant split_kv those of every query tile
(join_parts.py).

For long causal sequences two blocks of a cluster compute neighbouring query tiles, and each loads half of every key and
value tile for both. The first block skips tiles that only the second block reads.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.experimental.primitives as prim
import cutlass.pipeline as pipeline
from cutlass import Float32, GridConstant, Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.common import dependent_launch, logsumexp, masking, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.quad_transpose import store_rows
from cutlass_py_attn.kernels.common.softmax import multiply_rows, safe_scale
from cutlass_py_attn.kernels.common.wgmma import Wgmma, row_view, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.cluster import Cluster, SingleCta
from cutlass_py_attn.kernels.sm90_common.dropout_prefetch import RowDropout
from cutlass_py_attn.kernels.sm90_common.layout import num_stages, tma_tiles
from cutlass_py_attn.kernels.sm90_common.listed_tiles import entry
from cutlass_py_attn.kernels.sm90_common.paged_loads import PagedLoads
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import (
    ClusterTileScheduler,
    Cursor,
    LastRoundsScheduler,
    SharedEndScheduler,
    SplitKeysScheduler,
    TileScheduler,
    WorkTile,
)
from cutlass_py_attn.kernels.sm90_forward.chained_softmax import ChainedSoftmax, is_valid
from cutlass_py_attn.kernels.sm90_forward.join_parts import JoinParts
from cutlass_py_attn.kernels.sm90_forward.layout import deals_last_rounds, registers, splits_key_loop
from cutlass_py_attn.kernels.sm90_forward.listed_tile_scheduler import ListedTileScheduler
from cutlass_py_attn.kernels.sm90_forward.row_ranges import RowRanges
from cutlass_py_attn.kernels.sm90_forward.score_mod_registers import ScoreModRegisters
from cutlass_py_attn.kernels.sm90_forward.softmax_poly_exp2 import Exp2EmulatedSoftmax
from cutlass_py_attn.kernels.tile_lists.chain import TileLists
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import BITS, HALVES, MULTICAST, SPECULATIVE, SPLIT_KV

MAX_EMULATED_COLUMNS = 128  # of Q and V together: up to here the exponentials take as long as the GEMMs
MAX_LAZY_WARPGROUPS = 2  # with three, the registers of the lazy rescaling are missing elsewhere


class NamedBarrier(IntEnum):
    """Named barriers; a warpgroup waits at its own until it may issue GEMMs, or whether its weights are valid."""

    WARP_SCHEDULER_WG1 = 2
    WARP_SCHEDULER_WG2 = 3
    WARP_SCHEDULER_WG3 = 4
    VALID_WG1 = 5
    VALID_WG2 = 6
    VALID_WG3 = 7


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of tiles that TMA loads."""

    query: pipeline.PipelineTmaAsync
    key: pipeline.PipelineTmaAsync
    value: pipeline.PipelineTmaAsync


@dataclass(frozen=True)
class ConsumerState:
    """What a consumer warpgroup uses for all tiles.

    thread: its index among the threads of all consumer warpgroups
    coordinates: (row, column) in a tile of each score that the thread holds
    qk_operands, p_operand, v_operand: operands of both GEMMs, all stages
    parts: operands of S = Q K^T for each part of a key tile whose scores are multiplied apart
    r_p, r_o: P in the operands' dtype, and the accumulator of O
    softmax: the running softmax of the rows that the thread holds
    scale_log2: factor of the scores in the exponent
    p: parameters of the kernel, for a mask function
    r_ranges: the keys that the rows see, with mask form "ranges"
    key_scale, value_scale: of a work tile's e4m3 codes: factors of the scores before score terms, and of the output
    """

    thread: Any
    coordinates: cute.Tensor
    qk_operands: Any
    parts: tuple[Any, ...]
    p_operand: Any
    v_operand: Any
    r_p: cute.Tensor
    r_o: cute.Tensor
    softmax: ChainedSoftmax
    scale_log2: Any
    p: Any = None
    r_ranges: cute.Tensor | None = None
    key_scale: Any = None
    value_scale: Any = None


class ForwardSm90:
    """The forward kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.mma_qk = Wgmma(matmul_qk.spec(build), build.dtype)
        self.mma_pv = Wgmma(matmul_pv.spec(build), build.dtype)
        self.score_mod = ScoreModRegisters(build)
        self.ranges = RowRanges(build) if build.form.has_ranges else None
        is_cluster = build.variant == MULTICAST
        dense = LastRoundsScheduler if deals_last_rounds(build) else TileScheduler
        dense = dense if self.ranges is None else ListedTileScheduler
        self.scheduler = ClusterTileScheduler(build) if is_cluster else dense(build)
        self.join = None
        if build.shares_query_tiles:
            self.scheduler = SplitKeysScheduler(build) if build.variant == SPLIT_KV else SharedEndScheduler(build)
            self.join = JoinParts(build, self.scheduler)
        self.cluster = Cluster(build) if is_cluster else SingleCta(build)
        self.consumers, self.registers = build.threads - WARPGROUP_THREADS, registers(build)
        self.dropout = RowDropout(build, self.consumers) if build.has("dropout") else None
        self.overlaps_epilogue = (
            num_stages(build)["query"] > 1
        )  # the next query tile is loaded before the output is stored
        self.emulates_exp2 = build.columns + build.columns_value <= MAX_EMULATED_COLUMNS and build.dtype == "bfloat16"
        # A float16 row that attends mostly to one key is more accurate with that key's weight at exactly 1.
        is_narrow = self.consumers <= MAX_LAZY_WARPGROUPS * WARPGROUP_THREADS
        self.rescales_lazily = build.dtype == "bfloat16" and is_narrow
        self.speculates = SPECULATIVE in build.options
        self.masks_by_bits = BITS in build.options
        self.orders_warpgroups = self.consumers > WARPGROUP_THREADS
        self.num_parts = 2 if HALVES in build.options else 1
        self.mma_part = Wgmma(replace(matmul_qk.spec(build), n=build.tile_n // self.num_parts), build.dtype)

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        build = self.build
        maps = self.placeholder_maps(p)
        params.set_entry_name(build, self.kernel)
        block, cluster_shape = (build.threads, 1, 1), (build.cluster, 1, 1)
        grid = p.num_queries, 1, 1
        self.kernel(*maps, p).launch(grid=grid, block=block, cluster=cluster_shape, min_blocks_per_mp=1)
        if cutlass.const_expr(build.has_combine):
            params.set_entry_name(build, self.combine_kernel, "_combine")
            # One struct for each launch: the DSL caches the fields that a launch has read in the struct.
            self.combine_kernel(params.from_values(build, values)).launch(grid=grid, block=(ROW_THREADS, 1, 1))
        if cutlass.const_expr(build.form.has_ranges):
            TileLists(build).launch(values, grid)

    @cute.kernel
    def combine_kernel(self, p: Any):
        self.join.run(p)

    def placeholder_maps(self, p: Any) -> tuple[Any, ...]:
        """Returns tensor maps for tracing, in the order of the kernel's parameters."""
        tiles = tma_tiles(self.build).items()
        return tuple(tma.placeholder_map(p, getattr(p, name), self.dtype, *tile) for name, tile in tiles)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        self.run(p, (map_q, map_k, map_v))

    @cute.jit
    def run(self, p: Any, maps: tuple):
        """Executes the role of this warp."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pipes = self.create_pipelines()
        self.cluster.sync_barrier_init()
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.load(p, pipes, maps)
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            self.mma(p, pipes, thread - WARPGROUP_THREADS)
        self.cluster.sync_exit()

    def create_pipelines(self) -> Pipelines:
        """Creates the pipelines. Consumer warps release stages: of key and value in all blocks of a cluster."""
        warps, blocks = self.consumers // WARP_THREADS, self.build.cluster
        consumers = {"query": warps, "key": warps * blocks, "value": warps * blocks}
        users = {name: (stages, consumers[name], 0) for name, stages in num_stages(self.build).items()}
        pipes, _ = pipelines.tma_pipelines(self.build, users)
        return Pipelines(*pipes)

    def pipeline_states(self, user: Any) -> tuple[Any, Any, Any]:
        """Returns the first states of the query, key and value pipelines for a producer or a consumer."""
        return pipelines.states(user, *num_stages(self.build).values())

    @cute.jit
    def load(self, p: Any, pipes: Any, maps: tuple):
        """Producer warp: loads the query tile and its key and value tiles, one work tile after the other."""
        build = self.build
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Producer)
        dependent_launch.wait_for_previous(build, "main")  # which writes the tile lists, if it is no other kernel
        cursor = self.scheduler.initial_cursor(p)
        for wave in cutlass.range(self.scheduler.num_waves(p), unroll=1):
            work, cursor = self.scheduler.work_tile(p, wave, cursor)
            cursor = self.scheduler.next_cursor(p, wave, cursor)
            seqlen, key_head = work.seqlen, seqlen_info.key_head(build, p, work.head)
            coordinates = tma.tile_coordinates(build, work.tile * build.tile_m, work.head, seqlen, "query")
            pipelines.load(build, pipes.query, q_state, "query", maps[0], coordinates)
            q_state.advance()
            for i in cutlass.range(work.end - work.first, unroll=1):
                key_tile = self.key_tile_to_load(p, work, i)
                coordinates = tma.tile_coordinates(build, key_tile * build.tile_n, key_head, seqlen, "key")
                self.cluster.load(pipes.key, k_state, "key", maps[1], coordinates)
                k_state.advance()
                self.cluster.load(pipes.value, v_state, "value", maps[2], coordinates)
                v_state.advance()
        dependent_launch.start_next(build, "main")
        pipes.key.producer_tail(k_state)
        pipes.value.producer_tail(v_state)

    def key_tile_to_load(self, p: Any, work: WorkTile, index: Any) -> Int32:
        """Returns the key tile that a work tile visits as number `index`."""
        return work.end - 1 - index if self.ranges is None else entry(p, work.first + index)

    @cute.jit
    def mma(self, p: Any, pipes: Any, thread: Int32):
        """Consumer warpgroups: 64 rows of each query tile each."""
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        next_q_state, _, _ = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        consumer = self.consumer_state(p, thread)
        r_s, r_o = self.mma_qk.accumulator(thread), consumer.r_o
        if thread >= self.consumers - WARPGROUP_THREADS:
            self.warp_scheduler_arrive(thread)
        dependent_launch.wait_for_previous(self.build, "main")
        waves, cursor = self.scheduler.num_waves(p), self.scheduler.initial_cursor(p)
        if cutlass.const_expr(self.ranges is not None):
            self.ranges.load(p, cursor, consumer.coordinates, consumer.r_ranges)
        if cutlass.const_expr(self.overlaps_epilogue):
            k_state = self.skip_key_tiles(p, pipes, k_state, Int32(0), waves, cursor)
            self.issue_first(pipes, consumer, r_s, next_q_state, k_state, waves > 0)
            self.mma_qk.wait()
            self.scale_keys(r_s, consumer, k_state)
            self.release_first(pipes, k_state, waves > 0)
            next_q_state.advance()
            k_state.advance()
        for wave in cutlass.range(waves, unroll=1):
            work, cursor = self.scheduler.work_tile(p, wave, cursor)
            scaled = self.with_scales(p, work, consumer)
            operands = self.score_mod.load_operands(p, work.seqlen.index, work.head)
            consumer.softmax.reset()
            r_o.fill(0.0)
            skipped = self.scheduler.skipped_key_tiles(work)
            last = work.end - skipped - 1 if cutlass.const_expr(self.ranges is None) else work.key_tile
            # 1  S = Q K^T of the last key tile, unless it was issued at the end of the work tile before
            if cutlass.const_expr(not self.overlaps_epilogue):
                k_state = self.cluster.skip(pipes.key, k_state, skipped)
                self.issue_first(pipes, consumer, r_s, q_state, k_state, True)
            v_state = self.cluster.skip(pipes.value, v_state, skipped)
            dropout_bits, bias = self.score_inputs(p, work, last, consumer)
            if cutlass.const_expr(not self.overlaps_epilogue):
                self.mma_qk.wait()
                self.scale_keys(r_s, consumer, k_state)
                self.release_first(pipes, k_state, True)
                k_state.advance()
            # 2  softmax
            self.modify_scores(p, work, last, r_s, scaled, operands, bias)
            self.mask_if_needed(work, last, r_s, scaled)
            scaled.softmax.weights(row_view(r_s), scaled.scale_log2)
            self.convert_weights(scaled.r_p, r_s, dropout_bits)
            # Most key tiles are whole, and their loop has neither a mask nor a branch around one.
            spans = self.spans(work, last)
            for index in cutlass.range_constexpr(len(spans)):
                span = spans[index]
                for i in cutlass.range(span.end - span.first, unroll=1):
                    key_tile = self.key_tile_of_span(p, span, i)
                    k_state, v_state = self.mma_key_tile(
                        p, pipes, scaled, (work, key_tile), operands, span.is_whole, q_state, k_state, v_state
                    )
            pipes.query.consumer_release(q_state)
            q_state.advance()
            # 3  O += P V of the work tile's first key tile, then 1  S = Q K^T of the next work tile
            pipes.value.consumer_wait(v_state)
            if cutlass.const_expr(self.overlaps_epilogue):
                self.warp_scheduler_sync(thread)
            matmul_pv.issue(self.mma_pv, r_o, Operands(consumer.p_operand, consumer.v_operand.stage(v_state.index)))
            if cutlass.const_expr(self.overlaps_epilogue):
                k_state = self.skip_key_tiles(p, pipes, k_state, wave + 1, waves, cursor)
                self.issue_first(pipes, consumer, r_s, next_q_state, k_state, wave + 1 < waves)
                next_q_state.advance()
                self.warp_scheduler_arrive(thread)
            self.mma_pv.wait(1 if self.overlaps_epilogue else 0)
            self.cluster.release(pipes.value, v_state)
            v_state.advance()
            if cutlass.const_expr(self.ranges is not None):  # of the next work tile, while this one is stored
                cursor = self.scheduler.next_cursor(p, wave, cursor)
                self.ranges.load(p, cursor, consumer.coordinates, consumer.r_ranges)
            # 4  normalise, store the logsumexp and the output tile
            self.store(p, work, scaled)
            if cutlass.const_expr(self.overlaps_epilogue):
                self.mma_qk.wait()
                self.scale_keys(r_s, consumer, k_state)
                self.release_first(pipes, k_state, wave + 1 < waves)
                k_state.advance()

    def spans(self, work: WorkTile, last: Int32) -> tuple[tile_order.KeyTileSpan, ...]:
        """Returns the key tiles that a work tile visits after the first one, or their places in its list, as spans."""
        build, second = self.build, work.first + 1
        if self.ranges is None:
            return tile_order.key_tile_spans(
                work.band, work.tile, work.first, last, build.tile_m, build.tile_n, splits=splits_key_loop(build)
            )
        return (
            tile_order.KeyTileSpan(second, work.partial_end, is_whole=False),
            tile_order.KeyTileSpan(larger(work.partial_end, second), work.end, is_whole=True),
        )

    def key_tile_of_span(self, p: Any, span: tile_order.KeyTileSpan, index: Any) -> Int32:
        """Returns the key tile that a span visits as number `index`; any number for a whole one of a list."""
        if self.ranges is None:
            return span.end - 1 - index
        return Int32(0) if span.is_whole else entry(p, span.first + index)

    @cute.jit
    def mma_key_tile(
        self,
        p: Any,
        pipes: Any,
        consumer: Any,
        tile: tuple,
        operands: Any,
        is_whole: cutlass.Constexpr,
        q_state: Any,
        k_state: Any,
        v_state: Any,
    ):
        """Computes S and P of the key tile in `tile` = (work tile, key tile), and O += P V of the one before.

        Returns the states of the key and value pipelines after it.
        """
        thread, (work, key_tile) = consumer.thread, tile
        # 1  S = Q K^T of this key tile, then 3  O += P V of the one before
        pipes.key.consumer_wait(k_state)
        self.warp_scheduler_sync(thread)
        r_s = self.mma_qk.accumulator(thread)
        if cutlass.const_expr(self.speculates and is_whole):
            self.issue_parts(consumer, r_s, q_state, k_state)
        else:
            matmul_qk.issue(self.mma_qk, r_s, consumer.qk_operands.stage(q_state.index, k_state.index))
        pipes.value.consumer_wait(v_state)
        matmul_pv.issue(
            self.mma_pv, consumer.r_o, Operands(consumer.p_operand, consumer.v_operand.stage(v_state.index))
        )
        self.warp_scheduler_arrive(thread)
        dropout_bits, bias = self.score_inputs(p, work, key_tile, consumer)
        if cutlass.const_expr(self.speculates and is_whole):
            self.finish_speculative(pipes, consumer, r_s, q_state, k_state, v_state)
            k_state.advance()
            v_state.advance()
            self.convert_weights(consumer.r_p, r_s, dropout_bits)
            return k_state, v_state
        self.mma_qk.wait(1)
        self.scale_keys(r_s, consumer, k_state)
        self.cluster.release(pipes.key, k_state)
        k_state.advance()
        # 2  softmax
        self.modify_scores(p, work, key_tile, r_s, consumer, operands, bias)
        if cutlass.const_expr(not is_whole):
            self.mask_if_needed(work, key_tile, r_s, consumer)
        factors = cute.make_rmem_tensor(consumer.softmax.rows, Float32)
        rescales = self.next_weights(consumer, row_view(r_s), factors)
        self.mma_pv.wait()
        self.cluster.release(pipes.value, v_state)
        v_state.advance()
        if rescales:
            multiply_rows(row_view(consumer.r_o), factors)
        self.convert_weights(consumer.r_p, r_s, dropout_bits)
        return k_state, v_state

    @cute.jit
    def finish_speculative(self, pipes: Any, consumer: Any, r_s: cute.Tensor, q_state: Any, k_state: Any, v_state: Any):
        """Turns S of a key tile into P with the maxima before it; computes both again if a score exceeds its maximum.

        Waits for O += P V of the key tile before. Releases the key tile, and the value tile before.
        """
        # 2  softmax
        sums = self.speculate(consumer, r_s)
        repeats = self.any_of_warpgroup(consumer.thread, ~is_valid(sums))
        self.mma_pv.wait()
        self.cluster.release(pipes.value, v_state)
        if repeats:
            self.repeat(consumer, r_s, q_state, k_state)
        else:
            self.accept(consumer, sums)
        self.cluster.release(pipes.key, k_state)

    def speculate(self, consumer: ConsumerState, r_s: cute.Tensor) -> list[Float32]:
        """Turns S into weights, part by part as they arrive; returns this thread's sum of each row."""
        sums = [Float32(0.0)] * consumer.softmax.rows
        for part in range(self.num_parts):
            self.mma_part.wait(self.num_parts - part)
            found = consumer.softmax.speculate(row_view(self.part_of(r_s, part)), consumer.scale_log2)
            sums = [a + b for a, b in zip(sums, found, strict=True)] if part else found
        return sums

    def issue_parts(self, consumer: ConsumerState, r_s: cute.Tensor, q_state: Any, k_state: Any) -> None:
        """Issues S = Q K^T of a key tile, each part as a wgmma group."""
        for part, operands in enumerate(consumer.parts):
            matmul_qk.issue(self.mma_part, self.part_of(r_s, part), operands.stage(q_state.index, k_state.index))

    def repeat(self, consumer: ConsumerState, r_s: cute.Tensor, q_state: Any, k_state: Any) -> None:
        """Computes S and P of a key tile again, with maxima that count it, and rescales the output."""
        self.issue_parts(consumer, r_s, q_state, k_state)
        self.mma_part.wait()
        multiply_rows(row_view(consumer.r_o), consumer.softmax.weights(row_view(r_s), consumer.scale_log2))

    def accept(self, consumer: ConsumerState, sums: list[Float32]) -> None:
        """Adds the sums of weights that are valid."""
        consumer.softmax.add_sums(sums)

    def part_of(self, r_s: cute.Tensor, part: int) -> cute.Tensor:
        """Returns the columns of a tile of S that are multiplied together."""
        if self.num_parts == 1:
            return r_s
        (pair, rows, eights), m, n = r_s.layout.shape
        layout = cute.make_layout(((pair, rows, eights // self.num_parts), m, n), stride=r_s.layout.stride)
        return cute.make_tensor(r_s.iterator + part * (cute.size(r_s) // self.num_parts), layout)

    def any_of_warpgroup(self, thread: Int32, condition: Any) -> Any:
        """Returns whether the condition holds in any thread of the warpgroup."""
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        barrier = NamedBarrier.VALID_WG1 + warpgroup
        found = prim.barrier_cta_red_aligned(condition, barrier, "or", thread_count=WARPGROUP_THREADS)
        return cute.arch.vote_any_sync(found)  # tells the compiler that the warp agrees

    def consumer_state(self, p: Any, thread: Int32) -> ConsumerState:
        """Returns what a consumer warpgroup uses for all tiles."""
        s_q, s_k, s_v = self.smem_stages()
        r_p = cute.make_rmem_tensor_like(self.mma_qk.accumulator(thread), self.dtype)
        coordinates = row_view(self.mma_qk.coordinates(thread))
        rows = cute.size(coordinates, mode=[0])
        kind = Exp2EmulatedSoftmax if self.emulates_exp2 else ChainedSoftmax
        return ConsumerState(
            thread=thread,
            coordinates=coordinates,
            qk_operands=matmul_qk.operands(self.mma_qk, s_q, s_k, thread),
            parts=tuple(self.part_operands(s_q, s_k, thread, part) for part in range(self.num_parts)),
            p_operand=self.mma_pv.from_registers(r_p),
            v_operand=matmul_pv.b_operand(self.mma_pv, s_v),
            r_p=r_p,
            r_o=self.mma_pv.accumulator(thread),
            softmax=kind(rows, cute.make_rmem_tensor(rows, Float32)),
            scale_log2=Float32(1.0) if self.score_mod.present else safe_scale(p.scale_log2),
            p=p,
            r_ranges=None if self.ranges is None else self.ranges.registers(rows),
        )

    def with_scales(self, p: Any, work: WorkTile, consumer: ConsumerState) -> ConsumerState:
        """Returns the state with the scales of a work tile's keys and values; 16-bit operands have none."""
        return consumer

    def scale_keys(self, r_s: cute.Tensor, consumer: ConsumerState, k_state: Any) -> None:
        """Multiplies S by the scales of the key tile of `k_state`, before it is released; 16-bit keys have none."""

    def scale_output(self, r_o: cute.Tensor, consumer: ConsumerState) -> None:
        """Multiplies O by the scale of a work tile's values; 16-bit values have none."""

    def part_operands(self, s_q: cute.Tensor, s_k: cute.Tensor, thread: Int32, part: int) -> Any:
        """Returns the operands of S = Q K^T for the keys of a part of a key tile."""
        rows, (columns, stages) = self.mma_part.spec.n, (self.build.columns, num_stages(self.build)["key"])
        keys = cute.local_tile(s_k, (rows, columns, stages), (part, 0, 0))
        return matmul_qk.operands(self.mma_part, s_q, keys, thread)

    def skip_key_tiles(self, p: Any, pipes: Pipelines, k_state: Any, wave: Int32, waves: Int32, cursor: Cursor) -> Any:
        """Returns the state of the key pipeline after the tiles of `wave` that only the other block reads."""
        return self.cluster.skip(pipes.key, k_state, self.scheduler.skipped_in_wave(p, wave, waves, cursor))

    @cute.jit
    def issue_first(self, pipes: Any, consumer: Any, r_s: cute.Tensor, q_state: Any, k_state: Any, exists: Any):
        """Issues S = Q K^T of a work tile's last key tile; if no work tile exists, of what is in shared memory."""
        if exists:
            pipes.query.consumer_wait(q_state)
            pipes.key.consumer_wait(k_state)
        matmul_qk.issue(self.mma_qk, r_s, consumer.qk_operands.stage(q_state.index, k_state.index))

    @cute.jit
    def release_first(self, pipes: Any, k_state: Any, exists: Any):
        """Releases the key tile of `issue_first`."""
        if exists:
            self.cluster.release(pipes.key, k_state)

    def score_inputs(self, p: Any, work: WorkTile, key_tile: Int32, consumer: ConsumerState) -> tuple[Any, Any]:
        """Returns (dropout mask bits, bias) of a tile of scores, computed and loaded while S is in flight.

        None for what the problem does not have.
        """
        coordinates, origin = consumer.coordinates, self.tile_origin(work, key_tile)
        bits = None if self.dropout is None else self.dropout.tile_bits(p, work, key_tile, coordinates, consumer.thread)
        return bits, self.score_mod.load_bias(p, work.seqlen, work.head, origin, coordinates)

    def modify_scores(
        self,
        p: Any,
        work: WorkTile,
        key_tile: Int32,
        r_s: cute.Tensor,
        consumer: ConsumerState,
        operands: Any,
        bias: Any,
    ) -> None:
        """Applies the score modification to a tile of S."""
        if self.score_mod.present:
            origin = self.tile_origin(work, key_tile)
            self.score_mod.apply(p, row_view(r_s), consumer.coordinates, origin, work.band, (operands, bias))

    @cute.jit
    def mask_if_needed(self, work: Any, key_tile: Int32, r_s: cute.Tensor, consumer: Any):
        """Masks a tile of S that has a masked pair."""
        if cutlass.const_expr(self.ranges is not None):
            if work.first < work.partial_end:
                key0 = key_tile * self.build.tile_n
                self.ranges.mask(work, row_view(r_s), consumer, key0)
        elif tile_order.needs_mask(work.band, work.tile, key_tile, self.build.tile_m, self.build.tile_n):
            mask = masking.mask_by_bits if self.masks_by_bits else masking.mask_scores
            mask(work.band, row_view(r_s), consumer.coordinates, self.tile_origin(work, key_tile))

    def tile_origin(self, work: WorkTile, key_tile: Int32) -> tuple[Int32, Int32]:
        """Returns the first query and the first key of a tile of S."""
        return work.tile * self.build.tile_m, key_tile * self.build.tile_n

    @cute.jit
    def store(self, p: Any, work: Any, consumer: Any):
        """Normalises and stores the output tile, and stores the logsumexp."""
        build, r_o, coordinates = self.build, consumer.r_o, consumer.coordinates
        softmax, scale_log2 = consumer.softmax, consumer.scale_log2
        if cutlass.const_expr(build.has("sinks")):
            sink = params.load_scalar(p.sinks, Float32, work.head)
            if cutlass.const_expr(build.variant == SPLIT_KV):
                sink = cutlass.select_(self.scheduler.is_last_part(p, work), sink, -Float32.inf)
            softmax.add_sink(row_view(r_o), sink, scale_log2)
            scale_log2 = Float32(1.0)
        lse = softmax.finish(row_view(r_o), scale_log2)
        if cutlass.const_expr(build.has_combine):
            if work.part >= 0:
                if cutlass.const_expr(build.variant == SPLIT_KV):
                    lse = [cutlass.select_(work.is_empty, -Float32.inf, value) for value in lse]
                self.join.store_part(p, work.part, row_view(r_o), coordinates, lse)
            else:
                self.store_tile(p, work, consumer, lse)
            return
        if cutlass.const_expr(build.has("dropout")):
            r_o.store(r_o.load() * p.keep_scale)
        self.scale_output(r_o, consumer)
        self.store_tile(p, work, consumer, lse)

    def store_tile(self, p: Any, work: WorkTile, consumer: ConsumerState, lse: list[Float32]) -> None:
        """Stores a normalised output tile and its logsumexp."""
        build, r_o, coordinates = self.build, consumer.r_o, consumer.coordinates
        seqlen, query0 = work.seqlen, work.tile * build.tile_m
        row = RowCoordinates(seqlen.index, work.head, query0)
        logsumexp.store_tile(p, lse, coordinates, row, build.tile_m, seqlen.num_queries)
        start = RowCoordinates(seqlen.batch, work.head, seqlen.query_start + query0)
        target = tile_copy.gmem_tile(build, p, "output", start, seqlen.num_queries - query0, build.head_dim_value)
        store_rows(row_view(tile_copy.converted(r_o, self.dtype)), coordinates, target)

    def next_weights(self, consumer: ConsumerState, scores: cute.Tensor, factors: cute.Tensor) -> Any:
        """Replaces the scores by their weights; returns whether the output must be multiplied by `factors`."""
        if self.rescales_lazily:
            return consumer.softmax.lazy_weights(scores, factors, consumer.scale_log2)
        for row, factor in enumerate(consumer.softmax.weights(scores, consumer.scale_log2)):
            factors[row] = factor
        return True

    def warp_scheduler_sync(self, thread: Int32) -> None:
        """Waits until the previous warpgroup has issued its GEMMs, if warpgroups issue them in order."""
        if not self.orders_warpgroups:
            return
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        barrier = NamedBarrier.WARP_SCHEDULER_WG1 + warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    def warp_scheduler_arrive(self, thread: Int32) -> None:
        """Lets the next warpgroup issue its GEMMs; the first follows the last."""
        if not self.orders_warpgroups:
            return
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        is_last = warpgroup == self.consumers // WARPGROUP_THREADS - 1
        following = cutlass.select_(is_last, Int32(0), warpgroup + 1)
        barrier = NamedBarrier.WARP_SCHEDULER_WG1 + following
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP_THREADS)

    def convert_weights(self, r_p: cute.Tensor, r_s: cute.Tensor, dropout_bits: cute.Tensor | None) -> None:
        """Converts P to the operands' dtype, in the registers that the next GEMM reads, after dropout."""
        if dropout_bits is not None:
            masking.apply_dropout(row_view(r_s), dropout_bits)
        tile_copy.convert(r_s, r_p)

    def smem_stages(self) -> list[cute.Tensor]:
        """Returns all stages of Q, K and V in shared memory, each (rows, columns, stages)."""
        build, base = self.build, tile_copy.smem_base(self.build)
        return [
            smem_tile_at(base, build.buffer(name).offset, self.dtype, tile, num_stages(build)[name])
            for name, tile in tma_tiles(build).items()
        ]


class PagedForwardSm90(ForwardSm90):
    """The forward kernel of a Build with pages: only the loads of key and value differ."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.loads = PagedLoads(build)

    def placeholder_maps(self, p: Any) -> tuple[Any, ...]:
        """Returns tensor maps for tracing: of query, key, value, and of the tile of value with the last key."""
        maps = super().placeholder_maps(p)
        return *maps, tma.placeholder_map(p, p.value, self.dtype, *tma_tiles(self.build)["value"])

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        map_last_v: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        self.run(p, (map_q, map_k, map_v, map_last_v))

    @cute.jit
    def load(self, p: Any, pipes: Any, maps: tuple):
        """Producer warp: loads the query tile and its key and value tiles, one work tile after the other.

        Each number of boxes that a tile can have has code of its own, without branches between the loads of a tile.
        """
        boxes = self.loads.boxes(p)
        for index in cutlass.range_constexpr(len(self.loads.counts)):
            if boxes.count == self.loads.counts[index]:
                self.load_with(p, pipes, maps, boxes, self.loads.counts[index])

    @cute.jit
    def load_with(self, p: Any, pipes: Any, maps: tuple, boxes: Any, count: cutlass.Constexpr):
        """`load` with `count` boxes a tile of key and value."""
        build = self.build
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Producer)
        cursor = self.scheduler.initial_cursor(p)
        for wave in cutlass.range(self.scheduler.num_waves(p), unroll=1):
            work, cursor = self.scheduler.work_tile(p, wave, cursor)
            coordinates = tma.tile_coordinates(build, work.tile * build.tile_m, work.head, work.seqlen, "query")
            pipelines.load(build, pipes.query, q_state, "query", maps[0], coordinates)
            q_state.advance()
            k_state, v_state = self.loads.load_tiles(p, pipes, maps[1:], k_state, v_state, work, boxes, count)
        dependent_launch.start_next(build, "main")
        pipes.key.producer_tail(k_state)
        pipes.value.producer_tail(v_state)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    kernel = PagedForwardSm90 if build.has("paged") else ForwardSm90
    return kernel(build), params.example_arguments(abi.fields_of(build))
