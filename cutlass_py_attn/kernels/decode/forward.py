"""Split-KV decode: O and the logsumexp of few queries against many keys.

The query heads that share a key head are packed: the queries of all of them are the rows of one tile. Blocks split the
keys, and so do the warps of a block. A team of warps computes all rows of the tile; it is one warp if there are few
rows. Each team has some keys of every key tile, its own multi-stage buffer and its own softmax. Teams synchronise only
at the end, when their outputs are joined. If blocks split the keys, each stores a partial float32 output and logsumexp,
which combine.py joins.

    step    1 S = Q K^T     2 softmax     3 O += P V
    in flight: keys and values of the next tiles, one fewer than there are stages
"""

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import logsumexp, masking, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.combine import Combine, PackedRow
from cutlass_py_attn.kernels.common.dynamic_tiles import TILE_ALIGNMENT_BYTES, smem_tile_at
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.common.softmax import QUAD, OnlineSoftmax, multiply_rows, safe_scale
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.decode import layout as decode_smem
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.smem import threads_of_row, tile_bytes


class NamedBarrier(IntEnum):
    """Named barriers; team i has FIRST_TEAM + i."""

    FIRST_TEAM = 1


@dataclass(frozen=True)
class WorkTile:
    """The rows and the split of a block.

    batch: number of the sequence; row0: first packed row of the tile.
    split: number of the block among those that split the keys.
    """

    seqlen: SeqlenInfo
    batch: Int32
    head_key: Int32
    row0: Int32
    split: Int32


@dataclass(frozen=True)
class Warp:
    """A thread's place in its block.

    lane: thread of the warp; member: thread of the team; team: number of the team.
    first_row: first row of the tile that the warp computes.
    """

    lane: Int32
    member: Int32
    team: Int32
    first_row: Any


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of each row and team in shared memory, (rows, teams) float32.

    factors: maximum of the scores, then the factor of the team's output.
    sums: sum of the weights.
    """

    factors: cute.Tensor
    sums: cute.Tensor


class Decode:
    """The decode kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        operands = decode_smem.operand_dtype(build)
        self.dtype = DTYPES[operands]
        self.launch_bounds = params.launch_bounds(build)
        self.keys = decode_smem.team_keys(build)
        self.team_warps, self.teams = build.warps_scores
        self.rows = build.tile_m // self.team_warps  # of a warp
        output_bytes = tile_bytes("float32", self.rows, build.columns_value)
        assert self.team_warps == 1 or output_bytes % TILE_ALIGNMENT_BYTES == 0, (
            f"tile_m = {build.tile_m}: the {output_bytes} bytes of a warp's output are no multiple of "
            f"{TILE_ALIGNMENT_BYTES}, where the output of the team's next warp starts"
        )
        self.key_bytes, self.value_bytes = decode_smem.stage_bytes(build)
        self.combine = Combine(build)
        # The GEMMs of one warp: all columns of its rows.
        one_warp = (1, 1)
        qk = replace(matmul_qk.spec(build), m=self.rows, n=self.keys, warps=one_warp)
        self.mma_qk = MmaSync(qk, operands)
        self.mma_pv = MmaSync(matmul_pv.spec(build, m=self.rows, k=self.keys, warps=one_warp), operands)

    @cute.jit
    def __call__(self, *values):
        grid = params.from_values(self.build, values).num_queries, 1, 1
        # One struct for each launch: the DSL caches the fields that a launch has read in the struct.
        params.set_entry_name(self.build, self.kernel)
        block = (self.build.threads, 1, 1)
        self.kernel(params.from_values(self.build, values)).launch(grid=grid, block=block, **self.launch_bounds)
        params.set_entry_name(self.build, self.combine_kernel, "_combine")
        self.combine_kernel(params.from_values(self.build, values)).launch(grid=grid, block=(ROW_THREADS, 1, 1))

    @cute.kernel
    def combine_kernel(self, p: Any):
        self.combine.run(p)

    @cute.kernel
    def kernel(self, p: Any):
        build, stages = self.build, self.build.query_stages
        thread, _, _ = cute.arch.thread_idx()
        block, head_key, batch = cute.arch.block_idx()
        head_key, batch = head_key + p.first_head, batch + p.first_batch
        warp = self.warp_of(thread)
        seqlen = seqlen_info.create(build, p, batch)
        # Blocks of other rows and the same keys are neighbours, so that they read the keys at the same time.
        row_tiles = ceil_div(p.num_queries * seqlen_info.group_size(build, p), build.tile_m)
        split, row0 = block // row_tiles, block % row_tiles * build.tile_m
        work = WorkTile(seqlen, batch, head_key, row0, split)
        band = seqlen_info.band(build, p, seqlen)
        tiles = (band, Int32(0), decode_smem.MAX_QUERIES, build.tile_n)
        first, end = tile_order.key_tile_start(*tiles), tile_order.key_tile_end(*tiles)
        start, stop = tile_order.tiles_of_split(first, end, split, p.num_splits_key)

        # 0  start the first tiles, with the first one the queries
        self.load_step(p, work, warp, start, stop, Int32(0))
        self.copy_queries(p, work, thread)
        cute.arch.cp_async_commit_group()
        for step in cutlass.range(1, stages - 1, unroll=1):
            self.load_step(p, work, warp, start + step, stop, step)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        s_q = self.query_tile(warp.first_row // self.rows)

        r_o = self.mma_pv.accumulator(warp.lane)
        r_o.fill(0.0)
        rows = cute.size(row_view(r_o), mode=[0])
        softmax = OnlineSoftmax(rows, cute.make_rmem_tensor(rows, Float32))
        scale_log2 = safe_scale(p.scale_log2)

        for key_tile in cutlass.range(start, stop, unroll=1):
            step = key_tile - start
            cute.arch.cp_async_wait_group(stages - 2)
            self.sync_team(warp)
            self.load_step(p, work, warp, key_tile + stages - 1, stop, (step + stages - 1) % stages)
            cute.arch.cp_async_commit_group()
            s_k, s_v = self.stage(warp, step % stages)

            # 1  S = Q K^T
            r_s = self.mma_qk.accumulator(warp.lane)
            matmul_qk.issue(self.mma_qk, r_s, matmul_qk.operands(self.mma_qk, s_q, s_k, warp.lane))

            # 2  mask, softmax
            if p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if tile_order.needs_mask(band, Int32(0), key_tile, decode_smem.MAX_QUERIES, build.tile_n):
                self.mask_scores(p, work, warp, band, r_s, key_tile)
            apply_softmax(softmax, r_s, r_o, scale_log2)

            # 3  O += P V
            v_operand = matmul_pv.b_operand(self.mma_pv, s_v, warp.lane)
            matmul_pv.issue(self.mma_pv, r_o, Operands(self.mma_pv.from_accumulator(r_s), v_operand))

        # 4  join the teams, store the logsumexp and the output, or this split's partial results
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        statistics = self.row_statistics()
        self.store_team_results(warp, softmax, r_o, statistics)
        cute.arch.sync_threads()
        self.join_rows(p, work, statistics, scale_log2, thread)
        cute.arch.sync_threads()
        self.store_rows(p, work, statistics.factors, thread)

    def warp_of(self, thread: Int32) -> Warp:
        """Returns the place of this thread."""
        lane, member = thread % WARP_THREADS, thread % (self.team_warps * WARP_THREADS)
        warp = thread // WARP_THREADS
        if self.team_warps == 1:
            return Warp(lane, member, warp, 0)
        return Warp(lane, member, warp // self.team_warps, warp % self.team_warps * self.rows)

    def sync_team(self, warp: Warp) -> None:
        """Waits for the other threads of the team; afterwards their writes to shared memory are visible."""
        if self.team_warps == 1:
            cute.arch.sync_warp()
        else:
            barrier = cute.arch.make_warp_uniform(warp.team) + NamedBarrier.FIRST_TEAM
            cute.arch.barrier(barrier_id=barrier, number_of_threads=self.team_warps * WARP_THREADS)

    def query_tile(self, part: Any) -> cute.Tensor:
        """Returns the rows of the query tile that warp `part` of each team computes."""
        build = self.build
        offset = build.buffer("query").offset + part * tile_bytes(build.dtype, self.rows, build.columns)
        return smem_tile_at(offset, build, self.dtype, self.rows, build.columns)

    def stage(self, warp: Warp, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns the team's keys and values of a stage."""
        build = self.build
        number = warp.team * build.query_stages + stage
        key = build.buffer("ring").offset + number * (self.key_bytes + self.value_bytes)
        return (
            smem_tile_at(key, build, self.dtype, self.keys, build.columns),
            smem_tile_at(key + self.key_bytes, build, self.dtype, self.keys, build.columns_value),
        )

    @cute.jit
    def load_step(self, p: Any, work: Any, warp: Any, key_tile: Int32, stop: Int32, stage: Int32):
        """Starts loading the team's keys and values of a key tile into a stage, unless the tile is past the last."""
        build, seqlen, threads = self.build, work.seqlen, self.team_warps * WARP_THREADS
        if key_tile < stop:
            key0 = key_tile * build.tile_n + warp.team * self.keys
            row = RowCoordinates(seqlen.batch, work.head_key, seqlen.key_start + key0)
            rows_left = seqlen.num_keys - key0
            s_k, s_v = self.stage(warp, stage)
            keys = tile_copy.gmem_tile(build, p, "key", row, rows_left, build.head_dim)
            tile_copy.copy_g2s(warp.member, threads, keys, s_k)
            values = tile_copy.gmem_tile(build, p, "value", row, rows_left, build.head_dim_value)
            tile_copy.copy_g2s(warp.member, threads, values, s_v)

    @cute.jit
    def copy_queries(self, p: Any, work: Any, thread: Int32):
        """Starts copying the rows of this block's tile, zeros past the last, without commit."""
        for part in cutlass.range_constexpr(self.team_warps):
            self.copy_query_part(p, work, part, thread)

    @cute.jit
    def copy_query_part(self, p: Any, work: Any, part: Any, thread: Int32):
        """Starts copying the rows that warp `part` of each team computes."""
        build, seqlen, group = self.build, work.seqlen, seqlen_info.group_size(self.build, p)
        vector = build.vector_bytes // build.item_bytes
        row_threads = threads_of_row(build.columns * build.item_bytes, build.vector_bytes)
        at_once = min(build.threads // row_threads, self.rows)  # rows
        atom = tile_copy.cp_async_atom(self.dtype, build.vector_bytes)
        lanes = cute.make_layout((at_once, row_threads), stride=(row_threads, 1))
        copy = cute.make_tiled_copy_tv(atom, lanes, cute.make_layout((1, vector))).get_slice(thread)
        coordinates = copy.partition_S(cute.make_identity_tensor((self.rows, build.columns)))
        if thread < at_once * row_threads:
            target = copy.partition_D(self.query_tile(part))
            for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
                packed_row = work.row0 + part * self.rows + coordinates[(0, 0), i, 0][0]
                query = packed_row // group
                head = work.head_key * group + (packed_row - query * group)
                start = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                source = params.row_pointer(build, p, "query", start)
                for j in cutlass.range_constexpr(cute.size(target, mode=[2])):
                    column = coordinates[(0, 0), i, j][1]
                    in_bounds = cute.make_rmem_tensor(cute.make_layout(1), Boolean)
                    in_bounds[0] = (query < seqlen.num_queries) & (column < build.head_dim)
                    values = cute.make_tensor(
                        source + params.assume_multiple(Int64(column), vector), cute.make_layout(((vector, 1),))
                    )
                    cute.copy(atom, values, target[None, i, j], pred=in_bounds)

    def output_columns(self, column: Any) -> tuple[Any, Any]:
        """Returns where two neighbouring columns of O are stored."""
        return column, column + 1

    def mask_scores(self, p: Any, work: WorkTile, warp: Warp, band: Any, r_s: cute.Tensor, key_tile: Int32) -> None:
        """Sets this warp's masked scores to -inf."""
        coordinates = row_view(self.mma_qk.coordinates(warp.lane))
        rows, row0 = range(cute.size(coordinates, mode=[0])), work.row0 + warp.first_row
        queries = [(row0 + coordinates[row, 0][0]) // seqlen_info.group_size(self.build, p) for row in rows]
        key0 = key_tile * self.build.tile_n + warp.team * self.keys
        masking.mask_packed_scores(band, row_view(r_s), coordinates, key0, queries)

    def row_statistics(self) -> RowStatistics:
        """Returns the statistics in shared memory."""
        build = self.build
        layout = cute.make_layout((build.tile_m, self.teams))
        start = tile_copy.smem_pointer(build, "statistics", Float32)
        return RowStatistics(
            cute.make_tensor(start, layout), cute.make_tensor(start + build.tile_m * self.teams, layout)
        )

    def team_output(self, team: Any, first_row: Any, rows: int) -> cute.Tensor:
        """Returns some rows of a team's float32 output in shared memory."""
        build = self.build
        offset = build.buffer("ring").offset + team * decode_smem.team_output_bytes(build)
        offset = offset + first_row * tile_bytes("float32", 1, build.columns_value)
        return smem_tile_at(offset, build, Float32, rows, build.columns_value)

    def store_team_results(
        self, warp: Warp, softmax: OnlineSoftmax, r_o: cute.Tensor, statistics: RowStatistics
    ) -> None:
        """Stores this warp's maxima, sums and output in shared memory."""
        coordinates = row_view(self.mma_qk.coordinates(warp.lane))
        for row in range(cute.size(coordinates, mode=[0])):
            total = cute.arch.warp_reduction_sum(softmax.sum[row], threads_in_group=QUAD)
            for target, value in ((statistics.factors, softmax.maximum[row]), (statistics.sums, total)):
                index = warp.first_row + coordinates[row, 0][0], warp.team
                tile_copy.store_predicated(target, index, value, warp.lane % QUAD == 0)
        s_o = self.team_output(warp.team, warp.first_row, self.rows)
        tile_copy.copy_r2s(warp.lane, self.mma_pv.mma, r_o, s_o, False)

    @cute.jit
    def join_rows(self, p: Any, work: Any, statistics: Any, scale_log2: Float32, thread: Int32):
        """Replaces maxima by the factors of the teams' outputs, one thread a row, and stores the logsumexp."""
        build, group = self.build, seqlen_info.group_size(self.build, p)
        seqlen, factors, sums = work.seqlen, statistics.factors, statistics.sums
        batch, head_key, row0 = work.batch, work.head_key, work.row0
        if thread < build.tile_m:
            maximum, total = -Float32.inf, Float32(0.0)
            for team in cutlass.range_constexpr(self.teams):
                maximum = cute.arch.fmax(maximum, factors[thread, team])
            # a row without a visible key subtracts 0, so that (-inf) - (-inf) never arises
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
            if query < seqlen.num_queries:
                if p.num_splits_key > 1:
                    number = self.combine.partial_index(p, PackedRow(batch, head_key, row0 + thread), work.split)
                    target = params.pointer(p.partial_logsumexp, Float32, 4) + number
                    cute.make_tensor(target, tile_copy.ONE)[0] = lse
                else:
                    head = head_key * group + (row0 + thread - query * group)
                    logsumexp.store(p, RowCoordinates(batch, head, query), lse * math.log(2.0))
        if (p.num_splits_key == 1) & (row0 == 0):
            for i in cutlass.range(group, unroll=1):
                logsumexp.store_padding(p, batch, head_key * group + i, seqlen.num_queries, thread)

    @cute.jit
    def store_rows(self, p: Any, work: Any, factors: cute.Tensor, thread: Int32):
        """Joins the teams' outputs and stores them, two columns at a time."""
        build, seqlen, group = self.build, work.seqlen, seqlen_info.group_size(self.build, p)
        outputs = [self.team_output(team, 0, build.tile_m) for team in range(self.teams)]
        pairs = build.columns_value // 2
        for step in cutlass.range(build.tile_m * pairs // build.threads, unroll=1):
            index = step * build.threads + thread
            row, column = index // pairs, index % pairs * 2
            query = (work.row0 + row) // group
            if query < seqlen.num_queries:
                values = cute.make_rmem_tensor(2, Float32)
                values.fill(0.0)
                self.add_team_outputs(values, outputs, factors, row, column)
                if p.num_splits_key > 1:
                    packed_row = PackedRow(work.batch, work.head_key, work.row0 + row)
                    start = self.combine.partial_output(p, packed_row, work.split)
                    tile_copy.store_pair(values, start, column, build.columns_value, True)
                else:
                    head = work.head_key * group + (work.row0 + row - query * group)
                    target = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                    self.combine.store_output(p, target, column, values)

    def add_team_outputs(
        self, values: cute.Tensor, outputs: list, factors: cute.Tensor, row: Int32, column: Int32
    ) -> None:
        """Adds two columns of a row over all teams to `values`."""
        for team, tile in enumerate(outputs):
            for i, stored in enumerate(self.output_columns(column)):
                values[i] = values[i] + factors[row, team] * tile[row, stored]


def apply_softmax(softmax: OnlineSoftmax, r_s: cute.Tensor, r_o: cute.Tensor, scale_log2: Float32) -> None:
    """Replaces scores by their weights and rescales the output."""
    multiply_rows(row_view(r_o), softmax.weights(row_view(r_s), scale_log2))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    return Decode(build), params.example_arguments(abi.fields_of(build))
