"""sm90 forward of e4m3 operands: O = softmax(scale Q K^T) V and the logsumexp on 8-bit wgmma.

The kernel is the forward of 16-bit operands (forward.py) with the differences below. Each operand has a scale, of a
batch and a key head or of more, which is what a code of 1 is worth.

    scores    the scales of query and key are in the scale of the exponent
    weights   in the range of e4m3 (softmax.py), rounded in registers
    values    two warps store each value tile transposed (value_transpose.py), because wgmma reads 8-bit operands
              K-major only; consumers read the transposed tile
    output    the sum over a key tile has an accumulator of its own and is added in float32, together with the
              rescaling: O = O factor + P V. Wide heads sum some columns after the others. The scale of value joins
              the normalisation.

    step        S(n - 1) = Q K^T, then P(n) V    softmax of S(n - 1), then O = O factor(n) + P(n) V
    in flight   key tile n - 2                   value tile n - 1, transposed, P(n) V
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8

from cutlass_py_attn.kernels.common import e4m3, logsumexp, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.wgmma import Wgmma, row_view, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.cluster import SingleCta
from cutlass_py_attn.kernels.sm90_common.layout import num_stages, tma_tiles
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import LastRoundsScheduler, TileScheduler, WorkTile
from cutlass_py_attn.kernels.sm90_e4m3.layout import FIRST_TRANSPOSING_WARP, TRANSPOSING_WARPS, part_columns, registers
from cutlass_py_attn.kernels.sm90_e4m3.softmax import SPECULATIVE_BITS, WEIGHT_BITS, E4m3Softmax, a_operand, convert
from cutlass_py_attn.kernels.sm90_e4m3.value_transpose import ValueTranspose
from cutlass_py_attn.kernels.sm90_forward.forward import ForwardSm90
from cutlass_py_attn.kernels.sm90_forward.layout import deals_last_rounds, splits_key_loop
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import BITS, SPECULATIVE

STORED_ELEMENTS = 4  # neighbouring columns of the output that a thread has
ROW_ELEMENTS = 8  # a multiple of this is from one row of the output to the next


@dataclass(frozen=True)
class E4m3Pipelines:
    """The pipelines of tiles that TMA loads, and of the value tiles that warps store transposed."""

    query: pipeline.PipelineTmaAsync
    key: pipeline.PipelineTmaAsync
    value: pipeline.PipelineTmaAsync
    value_transposed: pipeline.PipelineAsync


@dataclass(frozen=True)
class E4m3Consumer:
    """What a consumer warpgroup uses for all tiles.

    thread: its index among the threads of all consumer warpgroups
    coordinates: (row, column) in a tile of each score that the thread holds
    qk_operands, p_operand: operands of both GEMMs, all stages of query and key
    values: all stages of the transposed values as operands, one for each part of the columns of O
    r_p: P as e4m3
    outputs: O in float32, one tensor for each part of its columns
    part: accumulator of a part of the columns, over one key tile
    factors: by which O is multiplied before the next sum is added
    softmax: the running softmax of the rows that the thread holds
    """

    thread: Any
    coordinates: cute.Tensor
    qk_operands: Any
    p_operand: Any
    values: list[Any]
    r_p: cute.Tensor
    outputs: list[cute.Tensor]
    part: cute.Tensor
    factors: cute.Tensor
    softmax: E4m3Softmax


class ForwardE4m3Sm90(ForwardSm90):
    """The forward kernel of one Build of variant e4m3."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.output_dtype = Float16 if build.has("float16_output") else BFloat16
        self.columns = part_columns(build)
        output = replace(matmul_pv.spec(build), n=self.columns, b_transposed=False, accumulate=False)
        self.mma_qk = Wgmma(matmul_qk.spec(build), build.dtype)
        self.mma_pv = Wgmma(output, build.dtype)
        self.scheduler = LastRoundsScheduler(build) if deals_last_rounds(build) else TileScheduler(build)
        self.ranges = None
        self.cluster = SingleCta(build)
        self.transpose = ValueTranspose(build)
        self.consumers, self.registers = build.threads - WARPGROUP_THREADS, registers(build)
        self.overlaps_epilogue = num_stages(build)["query"] > 1
        self.masks_by_bits = BITS in build.options
        self.speculates = SPECULATIVE in build.options
        self.orders_warpgroups = self.consumers > WARPGROUP_THREADS and not self.speculates

    def placeholder_maps(self, p: Any) -> tuple[tensor_maps.TensorMap, ...]:
        """Returns tensor maps for tracing, in the order of the kernel's parameters; their elements are bytes."""
        tiles = tma_tiles(self.build).items()
        return tuple(tma.placeholder_map(p, getattr(p, name), Uint8, *tile) for name, tile in tiles)

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
            if warp >= FIRST_TRANSPOSING_WARP:
                self.transpose_values(p, pipes)
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            self.mma(p, pipes, thread - WARPGROUP_THREADS)

    def create_pipelines(self) -> E4m3Pipelines:
        """Creates the pipelines: consumer warps release the stages of all but the values that TMA loads."""
        stages, warps = num_stages(self.build), self.consumers // WARP_THREADS
        consumers = {"query": warps, "key": warps, "value": TRANSPOSING_WARPS}
        specs = {name: pipelines.PipelineSpec(count, consumers[name], 0) for name, count in stages.items()}
        loaded, barriers = pipelines.tma_pipelines(self.build, specs)
        threads = TRANSPOSING_WARPS * WARP_THREADS
        return E4m3Pipelines(*loaded, pipelines.thread_pipeline(stages["value"], threads, warps, barriers))

    @cute.jit
    def transpose_values(self, p: Any, pipes: Any):
        """Transposing warps: store every value tile that TMA has loaded transposed."""
        stages = num_stages(self.build)["value"]
        (read_state,) = pipelines.states(pipeline.PipelineUserType.Consumer, stages)
        (write_state,) = pipelines.states(pipeline.PipelineUserType.Producer, stages)
        cursor = self.scheduler.initial_cursor(p)
        for wave in cutlass.range(self.scheduler.num_waves(p), unroll=1):
            work, cursor = self.scheduler.work_tile(p, wave, cursor)
            for _ in cutlass.range(work.end - work.first, unroll=1):
                pipes.value.consumer_wait(read_state)
                pipes.value_transposed.producer_acquire(write_state)
                self.transpose.store(read_state.index, write_state.index)
                cute.arch.fence_proxy("async.shared", space="cta")
                pipelines.arrive_all(pipes.value_transposed.sync_object_full, write_state.index)
                cute.arch.sync_warp()
                pipes.value.consumer_release(read_state)
                read_state.advance()
                write_state.advance()

    @cute.jit
    def mma(self, p: Any, pipes: Any, thread: Int32):
        """Consumer warpgroups: 64 rows of each query tile each."""
        build = self.build
        q_state, k_state, v_state = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        next_q_state, _, _ = self.pipeline_states(pipeline.PipelineUserType.Consumer)
        consumer = self.consumer_state(p, thread)
        r_s = self.mma_qk.accumulator(thread)
        if thread >= self.consumers - WARPGROUP_THREADS:
            self.warp_scheduler_arrive(thread)
        waves, cursor = self.scheduler.num_waves(p), self.scheduler.initial_cursor(p)
        if cutlass.const_expr(self.overlaps_epilogue):
            self.issue_first(pipes, consumer, r_s, next_q_state, k_state, waves > 0)
            self.mma_qk.wait()
            self.release_first(pipes, k_state, waves > 0)
            next_q_state.advance()
            k_state.advance()
        for wave in cutlass.range(waves, unroll=1):
            work, cursor = self.scheduler.work_tile(p, wave, cursor)
            scale_log2 = self.scale_log2(p, work)
            consumer.softmax.reset()
            for index in cutlass.range_constexpr(len(consumer.outputs)):
                consumer.outputs[index].fill(0.0)
            last = work.end - 1
            # 1  S = Q K^T of the last key tile, unless it was issued at the end of the work tile before
            if cutlass.const_expr(not self.overlaps_epilogue):
                self.issue_first(pipes, consumer, r_s, q_state, k_state, True)
                self.mma_qk.wait()
                self.release_first(pipes, k_state, True)
                k_state.advance()
            # 2  softmax
            self.mask_if_needed(work, last, r_s, consumer)
            self.next_factors(consumer, r_s, scale_log2)
            convert(r_s, consumer.r_p)
            # Most key tiles are whole, and their loop has neither a mask nor a branch around one.
            spans = tile_order.key_tile_spans(
                work.band, work.tile, work.first, last, build.tile_m, build.tile_n, splits=splits_key_loop(build)
            )
            for index in cutlass.range_constexpr(len(spans)):
                span = spans[index]
                for i in cutlass.range(span.end - span.first, unroll=1):
                    k_state, v_state = self.mma_e4m3_tile(
                        pipes, consumer, (work, span.end - 1 - i), scale_log2, span.is_whole, q_state, k_state, v_state
                    )
            pipes.query.consumer_release(q_state)
            q_state.advance()
            # 3  O = O factor + P V of the work tile's first key tile, then 1  S = Q K^T of the next work tile
            pipes.value_transposed.consumer_wait(v_state)
            if cutlass.const_expr(self.overlaps_epilogue):
                self.warp_scheduler_sync(thread)
            self.issue_part(consumer, v_state, 0)
            if cutlass.const_expr(self.overlaps_epilogue):
                self.issue_first(pipes, consumer, r_s, next_q_state, k_state, wave + 1 < waves)
                next_q_state.advance()
                self.warp_scheduler_arrive(thread)
            self.add_parts(consumer, v_state, 1 if self.overlaps_epilogue else 0)
            pipelines.arrive(pipes.value_transposed.sync_object_empty, v_state.index)
            v_state.advance()
            # 4  normalise, store the logsumexp and the output tile
            self.store_e4m3(p, work, consumer, scale_log2)
            if cutlass.const_expr(self.overlaps_epilogue):
                self.mma_qk.wait()
                self.release_first(pipes, k_state, wave + 1 < waves)
                k_state.advance()

    @cute.jit
    def mma_e4m3_tile(
        self,
        pipes: Any,
        consumer: Any,
        tile: tuple,
        scale_log2: Float32,
        is_whole: cutlass.Constexpr,
        q_state: Any,
        k_state: Any,
        v_state: Any,
    ):
        """Computes S and P of the key tile in `tile` = (work tile, key tile), and adds P V of the one before to O.

        Returns the states of the key and value pipelines after it.
        """
        thread, (work, key_tile) = consumer.thread, tile
        # 1  S = Q K^T of this key tile, then 3  P V of the one before
        pipes.key.consumer_wait(k_state)
        self.warp_scheduler_sync(thread)
        r_s = self.mma_qk.accumulator(thread)
        qk_operands = consumer.qk_operands.stage(q_state.index, k_state.index)
        matmul_qk.issue(self.mma_qk, r_s, qk_operands)
        pipes.value_transposed.consumer_wait(v_state)
        self.issue_part(consumer, v_state, 0)
        self.warp_scheduler_arrive(thread)
        self.mma_qk.wait(1)
        if cutlass.const_expr(self.speculates and is_whole):
            self.finish_e4m3_speculative(pipes, consumer, r_s, scale_log2, qk_operands, k_state, v_state)
            k_state.advance()
            v_state.advance()
            convert(r_s, consumer.r_p)
            return k_state, v_state
        self.cluster.release(pipes.key, k_state)
        k_state.advance()
        # 2  softmax
        if cutlass.const_expr(not is_whole):
            self.mask_if_needed(work, key_tile, r_s, consumer)
        factors = consumer.softmax.weights(row_view(r_s), scale_log2)
        self.add_parts(consumer, v_state, 0)
        pipelines.arrive(pipes.value_transposed.sync_object_empty, v_state.index)
        v_state.advance()
        for row in cutlass.range_constexpr(len(factors)):
            consumer.factors[row] = factors[row]
        convert(r_s, consumer.r_p)
        return k_state, v_state

    @cute.jit
    def finish_e4m3_speculative(
        self,
        pipes: Any,
        consumer: Any,
        r_s: cute.Tensor,
        scale_log2: Float32,
        qk_operands: Any,
        k_state: Any,
        v_state: Any,
    ):
        """Turns S of a key tile into weights with the maxima before it; computes both again if one does not fit e4m3.

        Adds P V of the key tile before to O. Releases the key tile, and the value tile before.
        """
        # 2  softmax
        sums, fit = consumer.softmax.speculate_in_range(row_view(r_s), scale_log2)
        # With one part, the barrier keeps the wait for P V behind the exponentials; several are issued between them.
        has_parts = len(consumer.outputs) > 1
        if cutlass.const_expr(has_parts):
            self.add_parts(consumer, v_state, 0)
        repeats = self.any_of_warpgroup(consumer.thread, ~fit)
        if cutlass.const_expr(not has_parts):
            self.add_parts(consumer, v_state, 0)
        pipelines.arrive(pipes.value_transposed.sync_object_empty, v_state.index)
        if repeats:
            matmul_qk.issue(self.mma_qk, r_s, qk_operands)
            self.mma_qk.wait()
            self.next_factors(consumer, r_s, scale_log2)
        else:
            consumer.softmax.add_sums(sums)
            consumer.factors.fill(1.0)
        self.cluster.release(pipes.key, k_state)

    def next_factors(self, consumer: E4m3Consumer, r_s: cute.Tensor, scale_log2: Float32) -> None:
        """Replaces the scores by their weights, and sets the factors of the next sum."""
        for row, factor in enumerate(consumer.softmax.weights(row_view(r_s), scale_log2)):
            consumer.factors[row] = factor

    def issue_part(self, consumer: E4m3Consumer, v_state: Any, index: int) -> None:
        """Issues P V of some columns into their accumulator."""
        matmul_pv.issue(
            self.mma_pv, consumer.part, Operands(consumer.p_operand, consumer.values[index].stage(v_state.index))
        )

    def add_parts(self, consumer: E4m3Consumer, v_state: Any, pending: int) -> None:
        """Waits for P V of the first columns and adds it to O, then computes and adds the others.

        pending: wgmma groups that may stay in flight while the first columns are added
        """
        for index, output in enumerate(consumer.outputs):
            if index:
                self.issue_part(consumer, v_state, index)
            self.mma_pv.wait(0 if index else pending)
            rows, added = row_view(output), row_view(consumer.part)
            for row in range(cute.size(rows, mode=[0])):
                rows[row, None].store(rows[row, None].load() * consumer.factors[row] + added[row, None].load())

    def consumer_state(self, p: Any, thread: Int32) -> E4m3Consumer:
        """Returns what a consumer warpgroup uses for all tiles."""
        build, base = self.build, tile_copy.smem_base(self.build)
        stages = num_stages(build)
        s_q, s_k = (
            smem_tile_at(base, build.buffer(name).offset, self.dtype, tma_tiles(build)[name], stages[name])
            for name in ("query", "key")
        )
        shape, offset = (build.columns_value, build.tile_n), build.buffer("value_transposed").offset
        s_v = smem_tile_at(base, offset, self.dtype, shape, stages["value"])
        parts = range(build.columns_value // self.columns)
        r_p = a_operand(self.mma_qk.accumulator(thread))
        coordinates = row_view(self.mma_qk.coordinates(thread))
        rows = cute.size(coordinates, mode=[0])
        weight_bits = SPECULATIVE_BITS if self.speculates else WEIGHT_BITS
        return E4m3Consumer(
            thread=thread,
            coordinates=coordinates,
            qk_operands=matmul_qk.operands(self.mma_qk, s_q, s_k, thread),
            p_operand=self.mma_pv.from_registers(r_p),
            values=[self.mma_pv.b_operand(self.part_of_values(s_v, part)) for part in parts],
            r_p=r_p,
            outputs=[self.mma_pv.accumulator(thread) for _ in parts],
            part=self.mma_pv.accumulator(thread),
            factors=cute.make_rmem_tensor(rows, Float32),
            softmax=E4m3Softmax(rows, cute.make_rmem_tensor(rows, Float32), weight_bits),
        )

    def part_of_values(self, s_v: cute.Tensor, part: int) -> cute.Tensor:
        """Returns the rows of the transposed values, all stages, that are one part of the columns of O."""
        columns, keys, stages = (cute.size(s_v, mode=[axis]) for axis in range(3))
        return s_v if columns == self.columns else cute.local_tile(s_v, (self.columns, keys, stages), (part, 0, 0))

    def scale_log2(self, p: Any, work: WorkTile) -> Float32:
        """Returns the factor of the scores in the exponent: scale * log2(e) and the scales of query and key.

        It is never zero, see `softmax.TINY`. A scale below 0 gives NaN; those of a sequence without keys are unused.
        """
        factor = self.dequantisation(p, work, "query") * self.dequantisation(p, work, "key")
        found = p.scale_log2 * Float32(cutlass.select_(work.seqlen.num_keys > 0, factor, Float32(1.0)))
        return e4m3.exponent_scale(found)

    def dequantisation(self, p: Any, work: WorkTile, name: str) -> Float32:
        """Returns the scale of an operand's codes for the batch and the key head of a work tile; 1 if it has none."""
        return e4m3.scale(p, name, work.seqlen.index, seqlen_info.key_head(self.build, p, work.head))

    @cute.jit
    def store_e4m3(self, p: Any, work: Any, consumer: Any, scale_log2: Float32):
        """Normalises and stores the output tile, and stores the logsumexp."""
        build, coordinates, seqlen = self.build, consumer.coordinates, work.seqlen
        query0 = work.tile * build.tile_m
        factors, lse = consumer.softmax.row_results(scale_log2)
        place = RowCoordinates(seqlen.index, work.head, query0)
        logsumexp.store_tile(p, lse, coordinates, place, build.tile_m, seqlen.num_queries)
        value_scale = self.dequantisation(p, work, "value")
        start = (
            params.pointer(p.output, self.output_dtype)
            + params.assume_multiple(Int64(seqlen.batch) * p.output_batch, ROW_ELEMENTS)
            + params.assume_multiple(Int64(work.head) * p.output_head, ROW_ELEMENTS)
            + params.assume_multiple(Int64(seqlen.query_start + query0) * p.output_row, ROW_ELEMENTS)
        )
        first = coordinates[0, 0][1] * 2  # thread t of a quad holds columns 2 t of 8, which are columns 4 t of 16
        for row in cutlass.range_constexpr(len(factors)):
            row_index = coordinates[row, 0][0]
            target = start + params.assume_multiple(Int64(row_index) * p.output_row, ROW_ELEMENTS)
            is_row = query0 + row_index < seqlen.num_queries
            # The scale of a sequence without keys may be NaN.
            factor = cutlass.select_(factors[row] == 0.0, Float32(0.0), factors[row] * value_scale)
            for part in cutlass.range_constexpr(len(consumer.outputs)):
                values = row_view(consumer.outputs[part])[row, None]
                values.store(values.load() * factor)
                for sixteen in cutlass.range_constexpr(self.columns // 16):
                    column = part * self.columns + 16 * sixteen + first
                    held = [values[4 * sixteen + offset] for offset in (0, 2, 1, 3)]
                    store_vector(self.output_dtype, target, column, held, is_row & (column < build.head_dim_value))


@cute.jit
def store_vector(dtype: cutlass.Constexpr, row: Any, column: Int32, values: list, predicate: Any):
    """Stores float32 numbers as STORED_ELEMENTS 16-bit numbers from `column` of a row on, if `predicate` holds."""
    if predicate:
        held = cute.make_rmem_tensor(STORED_ELEMENTS, Float32)
        for index in cutlass.range_constexpr(STORED_ELEMENTS):
            held[index] = values[index]
        vector = cute.make_rmem_tensor(STORED_ELEMENTS, dtype)
        vector.store(held.load().to(dtype))
        target = row + cute.assume(Int64(column), divby=STORED_ELEMENTS)
        cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(STORED_ELEMENTS)))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return ForwardE4m3Sm90(build), params.example_arguments(abi.fields_of(build))
