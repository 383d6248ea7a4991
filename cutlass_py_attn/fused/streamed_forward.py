"""Streamed forward: O and the logsumexp of heads that are too wide for one block to hold.

There is a block for each tile of queries and block of value columns. It walks the key tiles from the last to the
first. Of each, chunks of K's columns come through a ring of slots until S is complete, then rows of V's column block;
a slot is filled again once all have read it.

    step    1 S += Q K^T, a chunk each     2 softmax, P to shared memory     3 O += P V, some keys each
    in flight: the next steps, as many as the ring has slots, less one
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn import abi
from cutlass_py_attn.fused.forward import Forward, Params, output_spec
from cutlass_py_attn.fused.streamed import Later, from_column, tile_at
from cutlass_py_attn.gemm import matmul_qk
from cutlass_py_attn.gemm.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.parts import joined_softmax, lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import larger
from cutlass_py_attn.parts.joined_softmax import JoinedSoftmax
from cutlass_py_attn.parts.softmax import safe_scale
from cutlass_py_attn.parts.streaming import tile_and_column_block
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import tile_bytes
from cutlass_py_attn.streams import blocks_of_tile, forward_cut


class StreamedForward(Forward):
    """The forward kernel of one Build with a column block."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.cut = forward_cut(build)
        self.column_blocks = blocks_of_tile(build)

    @cute.kernel
    def kernel(self, p: Params):
        build, cut, stages = self.build, self.cut, self.build.query_stages
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        number, self.column_block = tile_and_column_block(block, self.column_blocks)
        longest_first = build.mask != "full"
        query_tile = blocks // self.column_blocks - 1 - number if cutlass.const_expr(longest_first) else number
        head, batch = head + p.first_head, batch + p.first_batch
        query0 = query_tile * build.tile_m
        self.of = lengths.sequence(build, p, batch)
        self.at = batch, head, query0
        band = lengths.band(build, p, self.of)
        tiles = (band, query_tile, build.tile_m, build.tile_n)
        first, end = schedule.key_tile_start(*tiles), schedule.key_tile_end(*tiles)
        key_tiles = larger(end - first, 0)
        self.scores, self.output = self.products()
        s_p, parts, factors = self.score_tiles()

        # 0  start the first steps
        for step in cutlass.range(stages - 1, unroll=1):
            self.load_step(p, step, end, key_tiles, thread)
            cute.arch.cp_async_commit_group()

        r_o = self.output.accumulator(thread)
        r_o.fill(0.0)
        where = row_view(self.scores.coordinates(thread))
        self.softmax = JoinedSoftmax(where, parts, factors)
        scale_log2 = Float32(1.0) if cutlass.const_expr(self.terms.present) else safe_scale(p.scale_log2)
        slope = self.terms.slope(p, batch, head)

        for i in cutlass.range(key_tiles, unroll=1):
            key_tile = end - 1 - i
            corner = query0, key_tile * build.tile_n
            before = i * cut.steps

            # 1  S = Q K^T
            r_s = self.scores.accumulator(thread)
            r_s.fill(0.0)
            for chunk in cutlass.range(cut.score_steps, unroll=1):
                here = params.fresh("tid.x")
                slot = self.advance(p, before + chunk, end, key_tiles, here)
                if chunk == 0:
                    self.load_bias(p, self.of, head, corner, here)
                cute.arch.cp_async_commit_group()
                s_q, s_k = self.score_operands(chunk, slot)
                matmul_qk.issue(self.scores, r_s, matmul_qk.operands(self.scores, s_q, s_k, here))

            # 2  score terms, mask, softmax, dropout
            here = params.fresh("tid.x")
            where = row_view(self.scores.coordinates(here))
            if cutlass.const_expr(self.terms.present):
                self.wait_for_bias()
                self.terms.apply(p, row_view(r_s), where, corner, band, (slope, self.bias_part(here)))
            elif p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if schedule.needs_mask(band, query_tile, key_tile, build.tile_m, build.tile_n):
                masking.hide(band, row_view(r_s), where, corner)
            self.softmax.step(row_view(r_s), where, scale_log2)
            if cutlass.const_expr(build.has("dropout")):
                masking.drop(row_view(r_s), self.kept(p, corner, (self.of, head)))
            r_p = moves.converted(r_s, self.dtype)
            moves.registers_to_tile(here, self.scores.mma, r_p, s_p, moves.has_stmatrix(build))

            # 3  O += P V
            at = before + cut.score_steps, end, key_tiles
            if cutlass.const_expr(build.item_bytes == 2):
                for part in cutlass.range_constexpr(cut.value_steps):
                    self.add_values(p, r_o, s_p, factors, part, at)
            else:
                # Not laid open: ptxas would put off the sums to the next part, and have two products in registers.
                for part in cutlass.range(cut.value_steps, unroll=1):
                    self.add_values(p, r_o, s_p, factors, part, at)

        # 4  normalise, store the logsumexp and the output tile
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.softmax.join(where)
        cute.arch.sync_threads()
        self.finish_rows(p, factors, scale_log2, thread)
        cute.arch.sync_threads()
        self.store_output(p, r_o, factors, thread)

    def products(self) -> tuple[MmaSync, MmaSync]:
        """S += Q K^T over a chunk, and O += P V over some keys: GradQ's form with (P, V) for (dS, K)."""
        build, cut = self.build, self.cut
        scores = replace(matmul_qk.spec(build), k=cut.chunk, accumulate=True)
        values = output_spec(build, n=build.block_columns_value, k=cut.value_rows)
        return MmaSync(scores, build.dtype), MmaSync(values, build.dtype)

    @cute.jit
    def add_values(self, p: Any, r_o: cute.Tensor, s_p: cute.Tensor, factors: cute.Tensor, part: Any, at: tuple):
        """O += P V over one part of the keys; the first part makes O's maximum that of P."""
        build, cut, (first, end, key_tiles) = self.build, self.cut, at
        here = params.fresh("tid.x")
        slot = self.advance(p, first + part, end, key_tiles, here)
        cute.arch.cp_async_commit_group()
        if part == 0:
            joined_softmax.shrink(row_view(r_o), row_view(self.output.coordinates(here)), factors)
        if cutlass.const_expr(build.item_bytes == 2):
            depth = self.output.spec.instruction[2]
            weights = Later(self.output.a_operand(s_p, here), part * cut.value_rows // depth)
        else:
            some = cute.local_tile(s_p, (build.tile_m, cut.value_rows), (0, part))
            weights = self.output.a_operand(some, here)
        values = self.output.b_operand(transposed(self.value_rows(slot)), here)
        self.output.issue(r_o, Operands(weights, values))

    def score_tiles(self) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """P, what the warps along a row share, and the factors of the rows."""
        build, warps = self.build, self.build.scores[1]
        statistics = moves.shared_pointer(build, "statistics", Float32)
        parts = cute.make_tensor(statistics, cute.make_layout((build.tile_m, warps)))
        factors = cute.make_tensor(statistics + warps * build.tile_m, cute.make_layout(build.tile_m))
        return tile_at(build.buffer("p").offset, self.dtype, build.tile_m, build.tile_n), parts, factors

    def bias_tile(self) -> cute.Tensor:
        """The bias of one tile of scores, where P will be."""
        return tile_at(self.build.buffer("p").offset, self.dtype, self.build.tile_m, self.build.tile_n)

    def slot(self, slot: Int32) -> Int32:
        """Where a slot of the ring starts."""
        return self.build.buffer("ring").offset + slot * self.cut.slot_bytes

    def score_operands(self, chunk: Int32, slot: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """One chunk of Q and of K."""
        build, cut = self.build, self.cut
        rows = tile_bytes(build.dtype, build.tile_m, cut.chunk)
        key = self.slot(slot)
        query = build.buffer("query").offset + chunk * rows if cut.keeps_query else key
        key = key if cut.keeps_query else key + rows
        return tile_at(query, self.dtype, build.tile_m, cut.chunk), tile_at(key, self.dtype, build.tile_n, cut.chunk)

    def value_rows(self, slot: Int32) -> cute.Tensor:
        """Some keys of V's column block."""
        return tile_at(self.slot(slot), self.dtype, self.cut.value_rows, self.build.block_columns_value)

    def advance(self, p: Any, step: Int32, end: Int32, key_tiles: Int32, thread: Int32) -> Int32:
        """Wait for a step, start filling the slot of the one before it again, without commit; the step's slot."""
        stages = self.build.query_stages
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        self.load_step(p, step + stages - 1, end, key_tiles, thread)
        return step % stages

    @cute.jit
    def load_step(self, p: Any, step: Int32, end: Int32, key_tiles: Int32, thread: Int32):
        """Start filling the slot of a step; nothing after the last."""
        build, cut = self.build, self.cut
        turn, slot = step // cut.steps, step % build.query_stages
        index = step - turn * cut.steps
        key0 = (end - 1 - turn) * build.tile_n
        if turn < key_tiles:
            if index < cut.score_steps:
                s_q, s_k = self.score_operands(index, slot)
                self.load_columns(p, "key", key0, index * cut.chunk, s_k, thread)
                if (turn == 0) | (not cut.keeps_query):
                    self.load_columns(p, "query", 0, index * cut.chunk, s_q, thread)
            else:
                row = key0 + (index - cut.score_steps) * cut.value_rows
                column = self.column_block * build.block_columns_value
                self.load_columns(p, "value", row, column, self.value_rows(slot), thread)

    def load_columns(self, p: Any, name: str, row: Any, column: Any, tile: cute.Tensor, thread: Int32) -> None:
        """Start copying the part of query, key or value at (row, column), of this block's query tile or sequence."""
        build, of = self.build, self.of
        _, head, query0 = self.at
        if name == "query":
            start, rows = (of.batch, head, of.query_start + query0), of.num_queries - query0
        else:
            start, rows = (of.batch, lengths.key_head(build, p, head), of.key_start + row), of.num_keys - row
        columns = build.head_dim_value if name == "value" else build.head_dim
        source = moves.tile_of(build, p, name, start, rows, columns)
        moves.load_tile(thread, build.threads, from_column(source, column, cute.size(tile, mode=[1])), tile)

    def wait_for_bias(self) -> None:
        """The bias came with the second steps of this tile's first."""
        if self.build.has("bias") and self.cut.score_steps < self.build.query_stages:
            cute.arch.cp_async_wait_group(self.cut.score_steps - 1)
            cute.arch.sync_threads()

    @cute.jit
    def finish_rows(self, p: Any, factors: cute.Tensor, scale_log2: Float32, thread: Int32):
        """A thread for each row: the factor of the output and the logsumexp, which column block 0 writes."""
        build, of = self.build, self.of
        batch, head, query0 = self.at
        if thread < build.tile_m:
            sink = params.scalar(p.sinks, Float32, head) if cutlass.const_expr(build.has("sinks")) else None
            factor, lse = self.softmax.finish(thread, sink, scale_log2)
            if cutlass.const_expr(build.has("dropout")):
                factor = factor * p.keep_scale
            factors[thread] = factor
            row = query0 + thread
            if (row < lengths.padded(of.num_queries)) & (self.column_block == 0):
                target = params.pointer(p.logsumexp, Float32, 4) + lengths.logsumexp_start(p, batch, head)
                value = cutlass.select_(row < of.num_queries, lse, Float32.inf)
                cute.make_tensor(target + row, cute.make_layout(1))[0] = value

    def store_output(self, p: Any, r_o: cute.Tensor, factors: cute.Tensor, thread: Int32) -> None:
        """Write this block's columns of the output tile, through the ring's place."""
        build, of = self.build, self.of
        _, head, query0 = self.at
        rows, where = row_view(r_o), row_view(self.output.coordinates(thread))
        for row in range(cute.size(rows, mode=[0])):
            rows[row, None].store(rows[row, None].load() * factors[where[row, 0][0]])
        s_o = tile_at(build.buffer("ring").offset, self.dtype, build.tile_m, build.block_columns_value)
        values = moves.converted(r_o, self.dtype)
        moves.registers_to_tile(thread, self.output.mma, values, s_o, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        at, left = (of.batch, head, of.query_start + query0), of.num_queries - query0
        target = moves.tile_of(build, p, "output", at, left, build.head_dim_value)
        column = self.column_block * build.block_columns_value
        moves.store_tile(thread, build.threads, s_o, from_column(target, column, build.block_columns_value))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernel, and arguments to compile it with."""
    return StreamedForward(build), params.representative(abi.FORWARD)
