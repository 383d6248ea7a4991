"""Decode: O and the logsumexp of few queries against many keys; blocks share the keys, and so do a block's warps.

The queries of all heads that read one key head are the rows of one tile. A team of warps has all of its rows, one warp
where those are few. Each team walks key tiles of which it has some keys of its own, through a ring of its own, with a
softmax of its own: teams meet at the end only, where their outputs are joined. Where blocks share the keys, each writes
a float32 output and logsumexp, which combine.py joins.

    step    1 S = Q K^T     2 softmax     3 O += P V
    in flight: the keys and values of the next tiles, as many as the ring has slots, less one
"""

import math
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn import abi, decode
from cutlass_py_attn.fused.combine import Combine, store_logsumexp, store_padding
from cutlass_py_attn.fused.forward import output_spec
from cutlass_py_attn.fused.streamed import PLACE_BYTES, tile_at
from cutlass_py_attn.gemm import matmul_qk
from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.gemm.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.kernels import ROW_THREADS
from cutlass_py_attn.parts import lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.parts.softmax import QUAD, OnlineSoftmax, multiply_rows, safe_scale
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import tile_bytes

Params = params.struct("DecodeParams", abi.DECODE)
FIRST_TEAM = 1  # number of the barrier of the first team


class Decode:
    """The decode kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.promise = params.promise(build)
        self.keys = decode.team_keys(build)
        self.warps, self.teams = build.scores  # of a team, and of a block
        self.rows = build.tile_m // self.warps  # of a warp
        own_bytes = tile_bytes("float32", self.rows, build.columns_value)
        assert self.warps == 1 or own_bytes % PLACE_BYTES == 0, "the output of a team's next warp starts there"
        self.key_bytes, self.value_bytes = decode.slot_bytes(build)
        self.combine = Combine(build)

    @cute.jit
    def __call__(self, *values):
        grid = params.filled(Params, abi.DECODE, values).num_queries, 1, 1
        # A struct of its own for each launch: the DSL keeps the fields it has read of one with that launch.
        params.name_entry(self.build, self.kernel)
        block = (self.build.threads, 1, 1)
        self.kernel(params.filled(Params, abi.DECODE, values)).launch(grid=grid, block=block, **self.promise)
        params.name_entry(self.build, self.combine_kernel, "_combine")
        self.combine_kernel(params.filled(Params, abi.DECODE, values)).launch(grid=grid, block=(ROW_THREADS, 1, 1))

    @cute.kernel
    def combine_kernel(self, p: Params):
        self.combine.run(p)

    @cute.kernel
    def kernel(self, p: Params):
        build, stages = self.build, self.build.query_stages
        thread, _, _ = cute.arch.thread_idx()
        block, head_key, batch = cute.arch.block_idx()
        head_key, batch = head_key + p.first_head, batch + p.first_batch
        self.lane, self.member = thread % WARP_THREADS, thread % (self.warps * WARP_THREADS)
        self.team, self.first_row = self.place(thread)
        self.of = lengths.sequence(build, p, batch)
        # Blocks of other rows and the same keys are neighbours: they read them at the same time.
        row_tiles = ceil_div(p.num_queries * lengths.group_of(build, p), build.tile_m)
        split, row0 = block // row_tiles, block % row_tiles * build.tile_m
        self.at = batch, head_key, row0, split
        band = lengths.band(build, p, self.of)
        tiles = (band, Int32(0), decode.MAX_QUERIES, build.tile_n)
        first, end = schedule.key_tile_start(*tiles), schedule.key_tile_end(*tiles)
        start, stop = schedule.share_of_tiles(first, end, split, p.num_splits_key)
        self.scores, self.output = self.products()

        # 0  start the first tiles, load the queries
        for step in cutlass.range(stages - 1, unroll=1):
            self.load_step(p, start + step, stop, step)
            cute.arch.cp_async_commit_group()
        self.load_queries(p, thread)
        cute.arch.sync_threads()
        s_q = self.queries(self.first_row // self.rows)

        r_o = self.output.accumulator(self.lane)
        r_o.fill(0.0)
        rows = cute.size(row_view(r_o), mode=[0])
        self.softmax = OnlineSoftmax(rows, cute.make_rmem_tensor(rows, Float32))
        scale_log2 = safe_scale(p.scale_log2)

        for key_tile in cutlass.range(start, stop, unroll=1):
            step = key_tile - start
            cute.arch.cp_async_wait_group(stages - 2)
            self.meet()
            self.load_step(p, key_tile + stages - 1, stop, (step + stages - 1) % stages)
            cute.arch.cp_async_commit_group()
            s_k, s_v = self.slot(step % stages)

            # 1  S = Q K^T
            r_s = self.scores.accumulator(self.lane)
            matmul_qk.issue(self.scores, r_s, matmul_qk.operands(self.scores, s_q, s_k, self.lane))

            # 2  mask, softmax
            if p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if schedule.needs_mask(band, Int32(0), key_tile, decode.MAX_QUERIES, build.tile_n):
                self.hide(p, band, r_s, key_tile)
            multiply_rows(row_view(r_o), self.softmax.weights(row_view(r_s), scale_log2))

            # 3  O += P V
            values = self.output.b_operand(transposed(s_v), self.lane)
            self.output.issue(r_o, Operands(self.output.from_accumulator(r_s), values))

        # 4  join the teams, store the logsumexp and the output, or this block's part of them
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        factors, sums = self.statistics()
        self.put_own(r_o, factors, sums)
        cute.arch.sync_threads()
        self.join_rows(p, factors, sums, scale_log2, thread)
        cute.arch.sync_threads()
        self.store_rows(p, factors, thread)

    def products(self) -> tuple[MmaSync, MmaSync]:
        """S = Q K^T and O += P V of one warp."""
        build, alone = self.build, (1, 1)
        scores = replace(matmul_qk.spec(build), m=self.rows, n=self.keys, warps=alone)
        values = output_spec(build, m=self.rows, n=build.columns_value, k=self.keys, warps=alone)
        return MmaSync(scores, build.dtype), MmaSync(values, build.dtype)

    def place(self, thread: Int32) -> tuple[Int32, Any]:
        """(team, first row of the tile) of this thread's warp."""
        warp = thread // WARP_THREADS
        if self.warps == 1:
            return warp, 0
        return warp // self.warps, warp % self.warps * self.rows

    def meet(self) -> None:
        """Wait for the other threads of the team; what they have written to shared memory can be read then."""
        if self.warps == 1:
            cute.arch.sync_warp()
        else:
            number = cute.arch.make_warp_uniform(self.team) + FIRST_TEAM
            cute.arch.barrier(barrier_id=number, number_of_threads=self.warps * WARP_THREADS)

    def queries(self, part: Any) -> cute.Tensor:
        """The rows of the query tile that warp `part` of each team has."""
        build = self.build
        offset = build.buffer("query").offset + part * tile_bytes(build.dtype, self.rows, build.columns)
        return tile_at(offset, self.dtype, self.rows, build.columns)

    def slot(self, slot: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """This team's keys and values in a slot of its ring."""
        build = self.build
        number = self.team * build.query_stages + slot
        key = build.buffer("ring").offset + number * (self.key_bytes + self.value_bytes)
        return (
            tile_at(key, self.dtype, self.keys, build.columns),
            tile_at(key + self.key_bytes, self.dtype, self.keys, build.columns_value),
        )

    @cute.jit
    def load_step(self, p: Any, key_tile: Int32, stop: Int32, slot: Int32):
        """Start filling a slot with this team's keys and values of a tile; nothing behind the last."""
        build, of, threads = self.build, self.of, self.warps * WARP_THREADS
        _, head_key, _, _ = self.at
        if key_tile < stop:
            key0 = key_tile * build.tile_n + self.team * self.keys
            at, left = (of.batch, head_key, of.key_start + key0), of.num_keys - key0
            s_k, s_v = self.slot(slot)
            moves.load_tile(self.member, threads, moves.tile_of(build, p, "key", at, left, build.head_dim), s_k)
            values = moves.tile_of(build, p, "value", at, left, build.head_dim_value)
            moves.load_tile(self.member, threads, values, s_v)

    @cute.jit
    def load_queries(self, p: Any, thread: Int32):
        """The rows of this block's tile, an element at a time while keys are on their way; zeros behind the last."""
        build, of, group = self.build, self.of, lengths.group_of(self.build, p)
        _, head_key, row0, _ = self.at
        for part in cutlass.range_constexpr(self.warps):
            tile = self.queries(part)
            for step in cutlass.range(self.rows * build.columns // build.threads, unroll=moves.ELEMENT_UNROLL):
                index = step * build.threads + thread
                row, column = index // build.columns, index % build.columns
                number = row0 + part * self.rows + row
                query = number // group
                value = self.dtype(0.0)
                if (query < of.num_queries) & (column < build.head_dim):
                    head = head_key * group + (number - query * group)
                    source = params.rows(build, p, "query", (of.batch, head, of.query_start + query))
                    value = cute.make_tensor(source + column, moves.ONE)[0]
                tile[row, column] = value

    def hide(self, p: Any, band: Any, r_s: cute.Tensor, key_tile: Int32) -> None:
        """Set this warp's scores that are not seen to -inf."""
        where = row_view(self.scores.coordinates(self.lane))
        rows, row0 = range(cute.size(where, mode=[0])), self.at[2] + self.first_row
        queries = [(row0 + where[row, 0][0]) // lengths.group_of(self.build, p) for row in rows]
        masking.hide_packed(band, row_view(r_s), where, key_tile * self.build.tile_n + self.team * self.keys, queries)

    def statistics(self) -> tuple[cute.Tensor, cute.Tensor]:
        """(rows, teams): first each row's maximum, then its factor, and its sum."""
        build = self.build
        layout = cute.make_layout((build.tile_m, self.teams))
        start = moves.shared_pointer(build, "statistics", Float32)
        return cute.make_tensor(start, layout), cute.make_tensor(start + build.tile_m * self.teams, layout)

    def outputs(self, team: Any, first_row: Any, rows: int) -> cute.Tensor:
        """Some rows of one team's output in float32."""
        build = self.build
        offset = build.buffer("ring").offset + team * decode.joined_bytes(build)
        offset = offset + first_row * tile_bytes("float32", 1, build.columns_value)
        return tile_at(offset, Float32, rows, build.columns_value)

    def put_own(self, r_o: cute.Tensor, maxima: cute.Tensor, sums: cute.Tensor) -> None:
        """What this warp has, to shared memory."""
        where = row_view(self.scores.coordinates(self.lane))
        for row in range(cute.size(where, mode=[0])):
            total = cute.arch.warp_reduction_sum(self.softmax.sum[row], threads_in_group=QUAD)
            for target, value in ((maxima, self.softmax.maximum[row]), (sums, total)):
                moves.put(target, (self.first_row + where[row, 0][0], self.team), value, self.lane % QUAD == 0)
        own = self.outputs(self.team, self.first_row, self.rows)
        moves.registers_to_tile(self.lane, self.output.mma, r_o, own, False)

    @cute.jit
    def join_rows(self, p: Any, factors: cute.Tensor, sums: cute.Tensor, scale_log2: Float32, thread: Int32):
        """A thread for each row: maxima become the factors of the teams' outputs; the logsumexp is written."""
        build, of, group = self.build, self.of, lengths.group_of(self.build, p)
        batch, head_key, row0, split = self.at
        if thread < build.tile_m:
            maximum, total = -Float32.inf, Float32(0.0)
            for team in cutlass.range_constexpr(self.teams):
                maximum = cute.arch.fmax(maximum, factors[thread, team])
            # a row that has seen no key subtracts 0, so that (-inf) - (-inf) never arises
            base = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
            for team in cutlass.range_constexpr(self.teams):
                factor = cute.math.exp2((factors[thread, team] - base) * scale_log2, fastmath=True)
                total = total + factor * sums[thread, team]
                factors[thread, team] = factor
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            for team in cutlass.range_constexpr(self.teams):
                factors[thread, team] = factors[thread, team] * inverse
            lse = maximum * scale_log2 + cute.math.log2(total, fastmath=True)
            lse = cutlass.select_(empty, -Float32.inf, lse)
            query = (row0 + thread) // group
            if query < of.num_queries:
                if p.num_splits_key > 1:
                    number = self.combine.part(p, (batch, head_key, row0 + thread), split)
                    target = params.pointer(p.partial_logsumexp, Float32, 4) + number
                    cute.make_tensor(target, moves.ONE)[0] = lse
                else:
                    head = head_key * group + (row0 + thread - query * group)
                    store_logsumexp(p, (batch, head, query), lse * math.log(2.0))
        if (p.num_splits_key == 1) & (row0 == 0):
            for i in cutlass.range(group, unroll=1):
                store_padding(p, (batch, head_key * group + i), of.num_queries, thread)

    @cute.jit
    def store_rows(self, p: Any, factors: cute.Tensor, thread: Int32):
        """Join the teams' outputs two columns at a time, and write them."""
        build, of, group = self.build, self.of, lengths.group_of(self.build, p)
        batch, head_key, row0, split = self.at
        outputs = [self.outputs(team, 0, build.tile_m) for team in range(self.teams)]
        pairs = build.columns_value // 2
        for step in cutlass.range(build.tile_m * pairs // build.threads, unroll=1):
            index = step * build.threads + thread
            row, column = index // pairs, index % pairs * 2
            query = (row0 + row) // group
            if query < of.num_queries:
                values = cute.make_rmem_tensor(2, Float32)
                values.fill(0.0)
                self.add_outputs(values, outputs, factors, (row, column))
                if p.num_splits_key > 1:
                    start = self.combine.partial_row(p, (batch, head_key, row0 + row), split)
                    moves.store_pair(values, start, column, build.columns_value, True)
                else:
                    head = head_key * group + (row0 + row - query * group)
                    self.combine.store(p, (of.batch, head, of.query_start + query), column, values)

    def add_outputs(self, values: cute.Tensor, outputs: list, factors: cute.Tensor, at: tuple[Int32, Int32]) -> None:
        """Two columns of a row, over all teams."""
        row, column = at
        for team, tile in enumerate(outputs):
            for i in range(2):
                values[i] = values[i] + factors[row, team] * tile[row, column + i]


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return Decode(build), params.representative(abi.DECODE)
