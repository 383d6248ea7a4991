"""Split-D forward: O and the logsumexp for head dims too large for the shared memory or registers of one block.

There is one block for each query tile and block of value columns. The block visits the key tiles from the last to the
first. For each key tile it first loads chunks of K's columns until S is complete, then rows of V's column block, all
through one multi-stage buffer. A stage is filled again when all threads have read it.

    step    1 S += Q K^T over one chunk     2 softmax, P to shared memory     3 O += P V over some keys
    in flight: the next steps, one fewer than there are stages
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.common import logsumexp, masking, paged_tile_copy, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.dynamic_tiles import OperandSlice, column_slice, smem_tile_at
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.score_mod import ScoreMod
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.common.softmax import safe_scale
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.sm80.score_inputs import ScoreInputs
from cutlass_py_attn.kernels.sm80_split_d import cross_warp_softmax
from cutlass_py_attn.kernels.sm80_split_d.cross_warp_softmax import CrossWarpSoftmax
from cutlass_py_attn.kernels.sm80_split_d.layout import blocks_per_tile, forward_split, tile_and_column_block
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import tile_bytes


@dataclass(frozen=True)
class WorkTile:
    """The query tile and column block of a thread block.

    batch: number of the sequence; query0: first query of the tile.
    key_tile_end, key_tiles: one past the last key tile, and their number.
    """

    seqlen: SeqlenInfo
    batch: Int32
    head: Int32
    query0: Int32
    column_block: Int32
    key_tile_end: Int32
    key_tiles: Int32


class ForwardSplitD:
    """The forward kernel of one Build with a column block."""

    def __init__(self, build: Build) -> None:
        self.build, self.split = build, forward_split(build)
        self.dtype = DTYPES[build.dtype]
        self.launch_bounds = params.launch_bounds(build)
        self.column_blocks = blocks_per_tile(build)
        self.score_mod = ScoreMod(build)
        # S += Q K^T over one chunk of the head dim; O += P V over some keys.
        qk = replace(matmul_qk.spec(build), k=self.split.chunk, accumulate=True)
        n, k, warps = build.block_columns_value, self.split.value_rows, build.warps_grad_q
        self.mma_qk = MmaSync(qk, build.dtype)
        self.mma_pv = MmaSync(matmul_pv.spec(build, n=n, k=k, warps=warps), build.dtype)
        self.score_inputs = ScoreInputs(build, self.mma_qk, "p")  # P replaces the bias tile

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        params.set_entry_name(self.build, self.kernel)
        grid = (p.num_queries, p.num_heads, p.batch)
        self.kernel(p).launch(grid=grid, block=(self.build.threads, 1, 1), **self.launch_bounds)

    @cute.kernel
    def kernel(self, p: Any):
        build, split, stages = self.build, self.split, self.build.query_stages
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        number, column_block = tile_and_column_block(block, self.column_blocks)
        longest_first = not build.form.sees_all
        query_tile = blocks // self.column_blocks - 1 - number if cutlass.const_expr(longest_first) else number
        head, batch = head + p.first_head, batch + p.first_batch
        query0 = query_tile * build.tile_m
        seqlen = seqlen_info.create(build, p, batch)
        band = seqlen_info.band(build, p, seqlen)
        tiles = (band, query_tile, build.tile_m, build.tile_n)
        first, end = tile_order.key_tile_start(*tiles), tile_order.key_tile_end(*tiles)
        work = WorkTile(seqlen, batch, head, query0, column_block, end, larger(end - first, 0))
        s_p = smem_tile_at(build.buffer("p").offset, build, self.dtype, build.tile_m, build.tile_n)
        parts, factors = self.row_statistics()

        # 0  start the first steps
        for step in cutlass.range(stages - 1, unroll=1):
            self.load_step(p, work, step, thread)
            cute.arch.cp_async_commit_group()

        r_o = self.mma_pv.accumulator(thread)
        r_o.fill(0.0)
        coordinates = row_view(self.mma_qk.coordinates(thread))
        softmax = CrossWarpSoftmax.create(coordinates, parts, factors)
        scale_log2 = Float32(1.0) if cutlass.const_expr(self.score_mod.present) else safe_scale(p.scale_log2)
        operands = self.score_mod.load_operands(p, batch, head)

        for i in cutlass.range(work.key_tiles, unroll=1):
            key_tile = end - 1 - i
            tile_origin = query0, key_tile * build.tile_n
            first_step = i * split.steps

            # 1  S = Q K^T
            r_s = self.mma_qk.accumulator(thread)
            r_s.fill(0.0)
            for chunk in cutlass.range(split.score_steps, unroll=1):
                tid = params.read_register("tid.x")
                stage = self.advance(p, work, first_step + chunk, tid)
                if chunk == 0:
                    self.score_inputs.load_bias(p, seqlen, head, tile_origin, tid)
                cute.arch.cp_async_commit_group()
                s_q, s_k = self.qk_tiles(chunk, stage)
                matmul_qk.issue(self.mma_qk, r_s, matmul_qk.operands(self.mma_qk, s_q, s_k, tid))

            # 2  score modification, mask, softmax, dropout
            tid = params.read_register("tid.x")
            coordinates = row_view(self.mma_qk.coordinates(tid))
            if cutlass.const_expr(self.score_mod.present):
                self.wait_for_bias()
                bias = self.score_inputs.bias_partition(tid)
                self.score_mod.apply(p, row_view(r_s), coordinates, tile_origin, band, (operands, bias))
            elif p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if tile_order.needs_mask(band, query_tile, key_tile, build.tile_m, build.tile_n):
                masking.mask_scores(band, row_view(r_s), coordinates, tile_origin)
            softmax.step(row_view(r_s), coordinates, scale_log2)
            if cutlass.const_expr(build.has("dropout")):
                masking.apply_dropout(row_view(r_s), self.score_inputs.dropout_bits(p, seqlen, head, tile_origin))
            r_p = tile_copy.converted(r_s, self.dtype)
            tile_copy.copy_r2s(tid, self.mma_qk.mma, r_p, s_p, tile_copy.has_stmatrix(build))

            # 3  O += P V
            value_step = first_step + split.score_steps
            if cutlass.const_expr(build.item_bytes == 2):
                for part in cutlass.range_constexpr(split.value_steps):
                    self.add_values(p, work, r_o, s_p, factors, part, value_step)
            else:
                # Not unrolled: ptxas would delay the sums to the next part, with two products in registers.
                for part in cutlass.range(split.value_steps, unroll=1):
                    self.add_values(p, work, r_o, s_p, factors, part, value_step)

        # 4  normalise, store the logsumexp and the output tile
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        softmax.join(coordinates)
        cute.arch.sync_threads()
        self.finish_rows(p, work, softmax, scale_log2, thread)
        cute.arch.sync_threads()
        self.store_output(p, work, r_o, factors, thread)

    @cute.jit
    def add_values(
        self, p: Any, work: Any, r_o: cute.Tensor, s_p: cute.Tensor, factors: cute.Tensor, part: Any, first_step: Int32
    ):
        """O += P V over one part of the keys; the first part multiplies O by the factors of the softmax."""
        build, split = self.build, self.split
        tid = params.read_register("tid.x")
        stage = self.advance(p, work, first_step + part, tid)
        cute.arch.cp_async_commit_group()
        if part == 0:
            cross_warp_softmax.multiply_rows(row_view(r_o), row_view(self.mma_pv.coordinates(tid)), factors)
        if cutlass.const_expr(build.item_bytes == 2):
            depth = self.mma_pv.spec.instruction[2]
            p_operand = OperandSlice(self.mma_pv.a_operand(s_p, tid), part * split.value_rows // depth)
        else:
            s_part = cute.local_tile(s_p, (build.tile_m, split.value_rows), (0, part))
            p_operand = self.mma_pv.a_operand(s_part, tid)
        v_operand = matmul_pv.b_operand(self.mma_pv, self.value_tile(stage), tid)
        matmul_pv.issue(self.mma_pv, r_o, Operands(p_operand, v_operand))

    def row_statistics(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns `parts` and `factors` of CrossWarpSoftmax in shared memory."""
        build, warps = self.build, self.build.warps_scores[1]
        statistics = tile_copy.smem_pointer(build, "statistics", Float32)
        parts = cute.make_tensor(statistics, cute.make_layout((build.tile_m, warps)))
        return parts, cute.make_tensor(statistics + warps * build.tile_m, cute.make_layout(build.tile_m))

    def stage_offset(self, stage: Int32) -> Int32:
        """Returns the offset of a stage in shared memory (bytes)."""
        return self.build.buffer("ring").offset + stage * self.split.slot_bytes

    def qk_tiles(self, chunk: Int32, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns one chunk of Q and of K; Q's is not in the stage if all of Q stays in shared memory."""
        build, split = self.build, self.split
        chunk_bytes = tile_bytes(build.dtype, build.tile_m, split.chunk)
        key = self.stage_offset(stage)
        query = build.buffer("query").offset + chunk * chunk_bytes if split.keeps_query else key
        key = key if split.keeps_query else key + chunk_bytes
        s_q = smem_tile_at(query, build, self.dtype, build.tile_m, split.chunk)
        return s_q, smem_tile_at(key, build, self.dtype, build.tile_n, split.chunk)

    def value_tile(self, stage: Int32) -> cute.Tensor:
        """Returns some keys of V's column block."""
        build, rows = self.build, self.split.value_rows
        return smem_tile_at(self.stage_offset(stage), build, self.dtype, rows, build.block_columns_value)

    def advance(self, p: Any, work: WorkTile, step: Int32, thread: Int32) -> Int32:
        """Waits for a step, starts loading into the stage of the step before it, without commit; returns its stage."""
        stages = self.build.query_stages
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        self.load_step(p, work, step + stages - 1, thread)
        return step % stages

    @cute.jit
    def load_step(self, p: Any, work: Any, step: Int32, thread: Int32):
        """Starts loading the tiles of a step into its stage, unless the step is past the last."""
        build, split = self.build, self.split
        iteration, stage = step // split.steps, step % build.query_stages
        index = step - iteration * split.steps
        key0 = (work.key_tile_end - 1 - iteration) * build.tile_n
        if iteration < work.key_tiles:
            if index < split.score_steps:
                s_q, s_k = self.qk_tiles(index, stage)
                self.load_tile(p, work, "key", key0, index * split.chunk, s_k, thread)
                if (iteration == 0) | (not split.keeps_query):
                    self.load_tile(p, work, "query", 0, index * split.chunk, s_q, thread)
            else:
                row = key0 + (index - split.score_steps) * split.value_rows
                column = work.column_block * build.block_columns_value
                self.load_tile(p, work, "value", row, column, self.value_tile(stage), thread)

    def load_tile(
        self, p: Any, work: WorkTile, name: str, row: Any, column: Any, tile: cute.Tensor, thread: Int32
    ) -> None:
        """Starts copying a tile of query, key or value at (row, column) of this query tile, or of the sequence."""
        build, seqlen, head = self.build, work.seqlen, work.head
        columns = build.head_dim_value if name == "value" else build.head_dim
        width = cute.size(tile, mode=[1])
        if build.has("paged") and name != "query":
            key_head = seqlen_info.key_head(build, p, head)
            pages = paged_tile_copy.paged_tile(build, p, name, seqlen, key_head, row, columns)
            paged_tile_copy.copy_g2s(p, thread, build.threads, paged_tile_copy.column_slice(pages, column, width), tile)
            return
        if name == "query":
            start = RowCoordinates(seqlen.batch, head, seqlen.query_start + work.query0)
            rows_left = seqlen.num_queries - work.query0
        else:
            start = RowCoordinates(seqlen.batch, seqlen_info.key_head(build, p, head), seqlen.key_start + row)
            rows_left = seqlen.num_keys - row
        source = tile_copy.gmem_tile(build, p, name, start, rows_left, columns)
        tile_copy.copy_g2s(thread, build.threads, column_slice(source, column, width), tile)

    def wait_for_bias(self) -> None:
        """Waits for the bias, which was committed with the loads of the tile's first step."""
        if self.build.has("bias") and self.split.score_steps < self.build.query_stages:
            cute.arch.cp_async_wait_group(self.split.score_steps - 1)
            cute.arch.sync_threads()

    @cute.jit
    def finish_rows(self, p: Any, work: Any, softmax: Any, scale_log2: Float32, thread: Int32):
        """Computes the output's factor of each row, one thread a row; column block 0 stores the logsumexp."""
        build, seqlen = self.build, work.seqlen
        if thread < build.tile_m:
            sink = params.load_scalar(p.sinks, Float32, work.head) if cutlass.const_expr(build.has("sinks")) else None
            factor, lse = softmax.finish(thread, sink, scale_log2)
            if cutlass.const_expr(build.has("dropout")):
                factor = factor * p.keep_scale
            softmax.factors[thread] = factor
            row = work.query0 + thread
            if (row < seqlen_info.padded_rows(seqlen.num_queries)) & (work.column_block == 0):
                logsumexp.store_or_pad(p, RowCoordinates(work.batch, work.head, row), lse, seqlen.num_queries)

    def store_output(self, p: Any, work: WorkTile, r_o: cute.Tensor, factors: cute.Tensor, thread: Int32) -> None:
        """Stores this block's columns of the output tile through the shared memory of the stages."""
        build, seqlen = self.build, work.seqlen
        rows, coordinates = row_view(r_o), row_view(self.mma_pv.coordinates(thread))
        for row in range(cute.size(rows, mode=[0])):
            rows[row, None].store(rows[row, None].load() * factors[coordinates[row, 0][0]])
        s_o = smem_tile_at(build.buffer("ring").offset, build, self.dtype, build.tile_m, build.block_columns_value)
        values = tile_copy.converted(r_o, self.dtype)
        tile_copy.copy_r2s(thread, self.mma_pv.mma, values, s_o, tile_copy.has_stmatrix(build))
        cute.arch.sync_threads()
        start = RowCoordinates(seqlen.batch, work.head, seqlen.query_start + work.query0)
        rows_left = seqlen.num_queries - work.query0
        target = tile_copy.gmem_tile(build, p, "output", start, rows_left, build.head_dim_value)
        column = work.column_block * build.block_columns_value
        tile_copy.copy_s2g(thread, build.threads, s_o, column_slice(target, column, build.block_columns_value))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return ForwardSplitD(build), params.example_arguments(abi.fields_of(build))
