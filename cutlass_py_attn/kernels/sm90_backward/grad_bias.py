"""Bias gradient of the sm90 family: dS summed over batches and query heads, on wgmma.

A persistent block computes one tile of grad_bias after the other. For each (batch, query head) pair that adds to a
tile, in order, it recomputes dS = P (dP - delta) and adds it in float32 to its registers. Sums over queries or keys are
for backward_parts/grad_bias.py.

    warpgroup   role
    0           warp 0 loads Q, K and logsumexp through one pipeline, dO, V and delta through another (producer)
    1, 2        64 queries of the tile each (consumers)

    step        1 S = Q K^T   2 P   3 dP = dO V^T   4 dS

If tiles are fewer than SMs, blocks share the pairs of a tile. Each warp stores its part of the sum in the workspace.
The one that stores the last part adds all of them, in their order, and stores the result.

Each consumer warp copies the bias of its 16 queries to shared memory: once for a tile if all pairs have the same bias,
else behind step 2 of the pair before.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, GridConstant, Int32, Int64

from cutlass_py_attn.integers import ceil_div, larger, smaller
from cutlass_py_attn.kernels.backward_parts.grad_bias_layout import WGMMA_REGISTERS, grad_bias_build
from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.common import masking, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, Operands
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.quad_transpose import store_rows
from cutlass_py_attn.kernels.common.score_mod import ScoreMod, bias_of, bias_source
from cutlass_py_attn.kernels.common.wgmma import Wgmma, row_view, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import doivj, matmul_qk
from cutlass_py_attn.kernels.sm90_common import pipelines
from cutlass_py_attn.kernels.sm90_common.layout import num_stages, tma_tiles
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS, WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.launch.variants import KEEPS_DS
from cutlass_py_attn.problem.tensors import F32_BYTES

VECTOR = 4  # float32 that a thread stores at once


@dataclass(frozen=True)
class BiasTile:
    """A tile of grad_bias: query tile, key tile, and batch and head; 0 along an axis that is summed over."""

    query_tile: Any
    key_tile: Any
    batch: Any
    head: Any


@dataclass(frozen=True)
class Work:
    """The work of a block: some pairs of a tile.

    tile, number: the tile and its number; split: of the blocks that share it; start, end: its pairs
    """

    tile: BiasTile
    number: Any
    split: Any
    start: Any
    end: Any


@dataclass(frozen=True)
class HeadOfSequence:
    """A sequence and a query head."""

    seqlen: seqlen_info.SeqlenInfo
    head: Any


@dataclass(frozen=True)
class Pipelines:
    """The pipelines: Q, K and logsumexp; dO, V and delta."""

    scores: Any
    weights: Any


@dataclass(frozen=True)
class Maps:
    """The tensor maps."""

    q: Any
    do: Any
    k: Any
    v: Any


@dataclass(frozen=True)
class Gemms:
    """The component GEMMs, and their operands in shared memory."""

    mma_qk: Wgmma
    mma_dov: Wgmma
    qk_parts: Operands
    dov_parts: Operands


class GradBiasSm90:
    """The bias gradient of one Build; `backward_chain.GradBiasKernel`.

    main: the backward's build, whose query tiles the row statistics have
    build: that of this kernel
    """

    def __init__(self, build: Build) -> None:
        self.main, self.build = build, grad_bias_build(build)
        self.has_minus_delta, self.has_scaled_lse = build.variant in KEEPS_DS, starts_from_logsumexp(build)
        self.score_mod = ScoreMod(self.build)
        self.dtype = DTYPES[build.dtype]
        self.consumers = self.build.threads - WARPGROUP_THREADS
        stages = num_stages(self.build)
        self.score_stages, self.weight_stages = stages["query"], stages["grad_output"]

    @cute.jit
    def launch(self, values: tuple, grid: tuple):
        """Names and launches the kernel."""
        params.set_entry_name(self.main, self.kernel, "_bias")
        p = params.from_values(self.main, values)
        tiles = tma_tiles(self.build).items()
        maps = tuple(tma.placeholder_map(p, getattr(p, name), self.dtype, *tile) for name, tile in tiles)
        self.kernel(*maps, p).launch(grid=grid, block=(self.build.threads, 1, 1), min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_do: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pipes = self.create_pipelines()
        pipelines.sync_barrier_init()
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(WGMMA_REGISTERS[0])
            if warp == 0:
                self.load(p, pipes, Maps(map_q, map_do, map_k, map_v))
        else:
            cute.arch.setmaxregister_increase(WGMMA_REGISTERS[1])
            self.consume(p, pipes, thread - WARPGROUP_THREADS)

    def create_pipelines(self) -> Pipelines:
        """Creates both pipelines."""
        build, barriers = self.build, pipelines.first_barrier(self.build)
        rows, statistics = build.tile_m + build.tile_n, build.tile_m * F32_BYTES
        created = []
        for stages, columns in ((self.score_stages, build.columns), (self.weight_stages, build.columns_value)):
            stage_bytes = rows * columns * build.item_bytes + statistics
            created.append(pipelines.tma_pipeline(stages, self.consumers, stage_bytes, barriers))
            barriers = barriers + 2 * stages
        return Pipelines(*created)

    def states(self, user: Any) -> tuple[Any, Any]:
        """Returns the first states of a user of both pipelines."""
        return pipelines.states(user, self.score_stages, self.weight_stages)

    def sums_over(self, axis: str) -> bool:
        """Returns whether grad_bias is summed over this axis of b and h."""
        return axis in self.main.grad_bias_mode.replace("none", "")

    def key_tiles(self, p: Any) -> Any:
        """Returns the key tiles of grad_bias."""
        return ceil_div(p.num_keys, self.build.tile_n)

    def num_tiles(self, p: Any) -> Int32:
        """Returns the tiles of grad_bias."""
        tiles = ceil_div(p.num_queries, self.build.tile_m) * self.key_tiles(p)
        heads = 1 if self.sums_over("h") else p.num_heads
        return Int32(tiles * heads * (1 if self.sums_over("b") else p.batch))

    def tile(self, p: Any, number: Int32) -> BiasTile:
        """Returns tile `number` of grad_bias: neighbours have the same queries."""
        key_tiles, query_tiles = self.key_tiles(p), ceil_div(p.num_queries, self.build.tile_m)
        rest, key_tile = number // key_tiles, number % key_tiles
        rest, query_tile = rest // query_tiles, rest % query_tiles
        if self.sums_over("h"):
            return BiasTile(query_tile, key_tile, rest, Int32(0))
        return BiasTile(query_tile, key_tile, rest // p.num_heads, rest % p.num_heads)

    def num_pairs(self, p: Any) -> Int32:
        """Returns how many (batch, query head) pairs are summed over."""
        return Int32(p.batch if self.sums_over("b") else 1) * (p.num_heads if self.sums_over("h") else 1)

    def head_of_pair(self, p: Any, tile: BiasTile, pair: Int32) -> HeadOfSequence:
        """Returns the sequence and query head of one of the pairs."""
        batch, head = tile.batch, tile.head
        if self.sums_over("h"):
            pair, head = pair // p.num_heads, pair % p.num_heads
        if self.sums_over("b"):
            batch = pair
        return HeadOfSequence(seqlen_info.create(self.main, p, batch), head)

    def num_splits(self, p: Any) -> Int32:
        """Returns how many blocks share a tile."""
        return larger(params.read_register("nctaid.x") // self.num_tiles(p), 1)

    def work(self, p: Any, number: Int32) -> Work:
        """Returns the work with this number."""
        splits = self.num_splits(p)
        tile, split = number // splits, number % splits
        return Work(
            self.tile(p, tile), tile, split, *tile_order.tiles_of_split(Int32(0), self.num_pairs(p), split, splits)
        )

    @cute.jit
    def next_pair(self, p: Any, work: Any, first: Int32):
        """Returns the first pair of the work, from `first` on, with a visible score in the tile; its end if none."""
        pair, end, tile = first, work.end, work.tile
        if cutlass.const_expr(self.main.has("varlen")):
            while (pair < end) & ~self.is_visible(p, tile, smaller(pair, larger(end - 1, 0))):
                pair = pair + 1
        elif cutlass.const_expr(not self.main.form.sees_all):
            pair = cutlass.select_(self.is_visible(p, tile, pair), pair, end)
        return pair

    def is_visible(self, p: Any, tile: BiasTile, pair: Int32) -> Boolean:
        """Returns whether some query of the tile sees some of its keys, in the sequence of the pair."""
        build = self.build
        band = seqlen_info.band(build, p, self.head_of_pair(p, tile, pair).seqlen)
        tiles = band, tile.query_tile, build.tile_m, build.tile_n
        start, end = tile_order.key_tile_start(*tiles), tile_order.key_tile_end(*tiles)
        return Boolean((tile.key_tile >= start) & (tile.key_tile < end))

    def origin(self, tile: BiasTile) -> tuple[Int32, Int32]:
        """Returns the first query and the first key of a tile."""
        return tile.query_tile * self.build.tile_m, tile.key_tile * self.build.tile_n

    @cute.jit
    def load(self, p: Any, pipes: Any, maps: Any):
        """Producer warp: loads the operands of each pair of each tile."""
        at_s, at_w = self.states(pipeline.PipelineUserType.Producer)
        number, blocks = params.read_register("ctaid.x"), params.read_register("nctaid.x")
        while number < self.num_tiles(p) * self.num_splits(p):
            work = self.work(p, number)
            tile, pair = work.tile, self.next_pair(p, work, work.start)
            while pair < work.end:
                of = self.head_of_pair(p, tile, pair)
                query_at, key_at = self.coordinates_of(p, tile, of)
                pipes.scores.producer_acquire(at_s)
                barrier = pipes.scores.producer_get_barrier(at_s)
                self.load_tile("query", maps.q, query_at, at_s.index, barrier)
                self.load_tile("key", maps.k, key_at, at_s.index, barrier)
                self.load_statistics(p, "logsumexp", p.logsumexp_log2, tile, of, at_s.index, barrier)
                at_s.advance()
                pipes.weights.producer_acquire(at_w)
                barrier = pipes.weights.producer_get_barrier(at_w)
                self.load_tile("grad_output", maps.do, query_at, at_w.index, barrier)
                self.load_tile("value", maps.v, key_at, at_w.index, barrier)
                self.load_statistics(p, "delta", p.delta, tile, of, at_w.index, barrier)
                at_w.advance()
                pair = self.next_pair(p, work, pair + 1)
            number = number + blocks
        pipes.scores.producer_tail(at_s)
        pipes.weights.producer_tail(at_w)

    def coordinates_of(self, p: Any, tile: BiasTile, of: HeadOfSequence) -> tuple[Any, Any]:
        """Returns the coordinates of the query rows and of the key rows in their tensor maps."""
        (query0, key0), key_head = self.origin(tile), seqlen_info.key_head(self.build, p, of.head)
        return (
            tma.tile_coordinates(self.build, query0, of.head, of.seqlen, "query"),
            tma.tile_coordinates(self.build, key0, key_head, of.seqlen, "key"),
        )

    def load_tile(self, name: str, source: Any, at: tuple, stage: Int32, barrier: Any) -> None:
        """Issues the copies of an operand's tile."""
        tma.load_tile(self.build, source, name, tma_tiles(self.build)[name], at, stage, barrier)

    def load_statistics(
        self, p: Any, name: str, address: Int64, tile: BiasTile, of: HeadOfSequence, stage: Int32, barrier: Any
    ) -> None:
        """Issues the copies of the logsumexp or delta of the tile's rows, by query tiles of the main kernel.

        Query tiles behind the last one of the sequence are the last one.
        """
        rows, seqlen = self.main.tile_m, of.seqlen
        parts = self.build.tile_m // rows
        last = ceil_div(seqlen.num_queries, rows) - 1
        target = tile_copy.smem_pointer(self.build, name, Float32) + stage * self.build.tile_m
        for part in range(parts):
            query_tile = smaller(tile.query_tile * parts + part, last)
            row = (Int64(of.head) * p.total_tiles + seqlen.first_tile + query_tile) * rows
            source = params.pointer(address, Float32) + cute.assume(row, divby=16)
            tma.load_rows(source, target + part * rows, rows, barrier)

    @cute.jit
    def consume(self, p: Any, pipes: Any, thread: Int32):
        """Consumer warpgroups: 64 rows of each tile each."""
        gemms = self.bind_gemms(thread)
        at_s, at_w = self.states(pipeline.PipelineUserType.Consumer)
        r_sum, r_s, r_dp = (gemms.mma_qk.accumulator(thread) for _ in range(3))
        number, blocks = params.read_register("ctaid.x"), params.read_register("nctaid.x")
        while number < self.num_tiles(p) * self.num_splits(p):
            work = self.work(p, number)
            tile, pair = work.tile, self.next_pair(p, work, work.start)
            r_sum.fill(0.0)
            self.load_bias(p, work, pair, thread, Boolean(True))
            while pair < work.end:
                # 1  S = Q K^T
                pipes.scores.consumer_wait(at_s)
                matmul_qk.issue(gemms.mma_qk, r_s, gemms.qk_parts.stage(at_s.index, at_s.index))
                gemms.mma_qk.wait()
                # 2  P
                self.weights(p, gemms, tile, pair, r_s, at_s.index, thread)
                pipelines.arrive_all(pipes.scores.sync_object_empty, at_s.index)
                at_s.advance()
                # 3  dP = dO V^T
                pipes.weights.consumer_wait(at_w)
                doivj.issue(gemms.mma_dov, r_dp, gemms.dov_parts.stage(at_w.index, at_w.index))
                following = self.next_pair(p, work, pair + 1)
                self.load_bias(p, work, following, thread, self.bias_differs(p))
                gemms.mma_dov.wait()
                # 4  dS
                self.add_score_gradient(p, gemms, tile, pair, (r_sum, r_s, r_dp), at_w.index, thread)
                pipelines.arrive_all(pipes.weights.sync_object_empty, at_w.index)
                at_w.advance()
                pair = following
            self.store(p, gemms, work, r_sum, thread)
            number = number + blocks

    def bind_gemms(self, thread: Int32) -> Gemms:
        """Returns the GEMMs of S and dP and their operands in shared memory."""
        build = self.build
        mma_qk, mma_dov = (Wgmma(gemm.spec(build), build.dtype) for gemm in (matmul_qk, doivj))
        s_q, s_k, s_do, s_v = (self.operand_tiles(name) for name in ("query", "key", "grad_output", "value"))
        qk_parts = matmul_qk.operands(mma_qk, s_q, s_k, thread)
        return Gemms(mma_qk, mma_dov, qk_parts, doivj.operands(mma_dov, s_do, s_v, thread))

    def operand_tiles(self, name: str) -> cute.Tensor:
        """Returns all stages of an operand."""
        build = self.build
        stages = self.score_stages if name in ("query", "key") else self.weight_stages
        base = tile_copy.smem_base(build)
        return smem_tile_at(base, build.buffer(name).offset, self.dtype, tma_tiles(build)[name], stages)

    def coordinates(self, gemms: Gemms, thread: Int32) -> cute.Tensor:
        """Returns (row, column) of each of a thread's scores, as (rows, columns)."""
        return row_view(gemms.mma_qk.coordinates(thread))

    def statistic(self, name: str, stage: Int32, row: Any) -> Float32:
        """Returns the logsumexp or delta of a row of the tile."""
        first = tile_copy.smem_pointer(self.build, name, Float32) + stage * self.build.tile_m
        return cute.make_tensor(first, cute.make_layout(self.build.tile_m))[row]

    def bias_tile(self, thread: Int32) -> cute.Tensor:
        """Returns the bias of the queries of a thread's warp, in shared memory."""
        build = self.build
        base, warp = tile_copy.smem_base(build), cute.arch.make_warp_uniform(thread // WARP_THREADS)
        warps = build.tile_m // MMA_ROWS
        tiles = tile_copy.smem_tile(base, build.buffer("bias").offset, self.dtype, MMA_ROWS, build.tile_n, warps)
        return tiles[None, None, warp]

    def bias_part(self, thread: Int32) -> cute.Tensor:
        """Returns the bias of each of a thread's scores: in a warp, an accumulator of wgmma is one of mma.sync."""
        spec = replace(matmul_qk.spec(self.build), m=MMA_ROWS, family="sm80", warps=(1, 1))
        lane = MmaSync(spec, self.build.dtype).mma.get_slice(thread % WARP_THREADS)
        return lane.partition_C(self.bias_tile(thread))

    def bias_differs(self, p: Any) -> Boolean:
        """Returns whether pairs may have different biases."""
        differs = Boolean(self.main.has("varlen"))
        for axis, stride in (("b", p.bias_batch), ("h", p.bias_head)):
            if self.sums_over(axis):
                differs = differs | (stride != 0)
        return Boolean(differs)

    @cute.jit
    def load_bias(self, p: Any, work: Any, pair: Int32, thread: Int32, is_wanted: Boolean):
        """Starts copying the bias of a pair; none past the last pair. All threads of a warp call this."""
        if is_wanted & (pair < work.end):
            cute.arch.sync_warp()  # all have read the bias before
            tile = work.tile
            of, (query0, key0) = self.head_of_pair(p, tile, pair), self.origin(tile)
            at = query0 + cute.arch.make_warp_uniform(thread // WARP_THREADS) * MMA_ROWS, key0
            source = bias_of(self.build, p, "bias", of.seqlen, of.head, at)
            tile_copy.copy_g2s(thread % WARP_THREADS, WARP_THREADS, source, self.bias_tile(thread))
            cute.arch.cp_async_commit_group()

    @cute.jit
    def weights(self, p: Any, gemms: Any, tile: Any, pair: Int32, r_s: cute.Tensor, stage: Int32, thread: Int32):
        """Replaces S by P."""
        build, of, origin = self.build, self.head_of_pair(p, tile, pair), self.origin(tile)
        band = seqlen_info.band(build, p, of.seqlen)
        scores, coordinates = row_view(r_s), self.coordinates(gemms, thread)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        self.score_mod.apply(p, scores, coordinates, origin, band, ((), self.bias_part(thread)))
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            logsumexp = self.statistic("logsumexp", stage, coordinates[row, 0][0])
            if cutlass.const_expr(self.has_scaled_lse):
                logsumexp = logsumexp * -p.scale_log2
            if cutlass.const_expr(self.main.has("varlen")):  # rows of grad_bias behind the queries of this sequence
                is_query = origin[0] + coordinates[row, 0][0] < of.seqlen.num_queries
                logsumexp = cutlass.select_(is_query, logsumexp, Float32.inf)
            scores[row, None].store(cute.math.exp2(scores[row, None].load() - logsumexp, fastmath=True))
        if tile_order.needs_mask(band, tile.query_tile, tile.key_tile, build.tile_m, build.tile_n):
            masking.mask_weights(band, scores, coordinates, origin)

    def add_score_gradient(
        self, p: Any, gemms: Gemms, tile: BiasTile, pair: Int32, values: tuple, stage: Int32, thread: Int32
    ) -> None:
        """Adds dS = P (dP - delta); values: the sum, P and dP."""
        total, weights, dp = (row_view(each) for each in values)
        coordinates = self.coordinates(gemms, thread)
        for row in range(cute.size(dp, mode=[0])):
            delta = self.statistic("delta", stage, coordinates[row, 0][0])
            delta = -delta if self.has_minus_delta else delta
            if self.main.has("varlen"):
                seqlen = self.head_of_pair(p, tile, pair).seqlen
                is_query = self.origin(tile)[0] + coordinates[row, 0][0] < seqlen.num_queries
                delta = cutlass.select_(is_query, delta, Float32(0.0))
            gradient = weights[row, None].load() * (dp[row, None].load() - delta)
            total[row, None].store(total[row, None].load() + gradient)

    @cute.jit
    def store(self, p: Any, gemms: Any, work: Any, r_sum: cute.Tensor, thread: Int32):
        """Writes the sum, or a part of it; the warp that stores the last part writes the sum of all."""
        splits = self.num_splits(p)
        is_complete = Boolean(True)
        if splits > 1:
            is_complete = self.store_part(p, work, splits, r_sum, thread)
            if is_complete:
                self.add_parts(p, work, splits, r_sum, thread)
        if is_complete:
            self.store_tile(p, gemms, work.tile, r_sum, thread)

    @cute.jit
    def store_part(self, p: Any, work: Any, splits: Int32, r_sum: cute.Tensor, thread: Int32):
        """Stores a part of the sum; returns whether this warp stored the last one. All threads of a warp call this."""
        for vector in cutlass.range_constexpr(cute.size(r_sum) // VECTOR):
            cute.autovec_copy(self.vector_of(r_sum, vector), self.part(p, work, splits, work.split, vector, thread))
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        stored = Int32(0)
        if cute.arch.lane_idx() == 0:
            warps = self.consumers // WARP_THREADS
            counter = params.pointer(p.grad_bias_counts, Int32, 4) + (work.number * warps + thread // WARP_THREADS)
            stored = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu") + 1
        stored = cute.arch.shuffle_sync(stored, 0)
        cute.arch.fence_acq_rel_gpu()
        return Boolean(stored == splits)

    @cute.jit
    def add_parts(self, p: Any, work: Any, splits: Int32, r_sum: cute.Tensor, thread: Int32):
        """Replaces a part by the sum of all, in their order."""
        r_sum.fill(0.0)
        for split in cutlass.range(splits, unroll=1):
            r_part = cute.make_rmem_tensor(r_sum.layout, Float32)
            for vector in cutlass.range_constexpr(cute.size(r_sum) // VECTOR):
                cute.autovec_copy(self.part(p, work, splits, split, vector, thread), self.vector_of(r_part, vector))
            r_sum.store(r_sum.load() + r_part.load())

    def vector_of(self, values: cute.Tensor, vector: int) -> cute.Tensor:
        """Returns a vector of registers."""
        return cute.make_tensor(values.iterator + vector * VECTOR, cute.make_layout(VECTOR))

    def part(self, p: Any, work: Work, splits: Int32, split: Int32, vector: int, thread: Int32) -> cute.Tensor:
        """Returns a vector of a thread's part of the sum, in the workspace."""
        start = params.pointer(p.grad_bias_parts, Float32)
        start = start + (Int64(work.number) * splits + split) * (self.build.tile_m * self.build.tile_n)
        return cute.make_tensor(start + (vector * self.consumers + thread) * VECTOR, cute.make_layout(VECTOR))

    def store_tile(self, p: Any, gemms: Gemms, tile: BiasTile, r_sum: cute.Tensor, thread: Int32) -> None:
        """Writes the sum; with varlen, grad_bias is as large as the longest sequences."""
        at = tile.batch, tile.head, *self.origin(tile)
        target = bias_source(self.build, p, "grad_bias", at, (p.num_queries, p.num_keys))
        values = tile_copy.converted(r_sum, self.dtype)
        store_rows(row_view(values), self.coordinates(gemms, thread), target)
