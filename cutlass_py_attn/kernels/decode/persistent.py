"""Persistent decode: few queries against a cache in pages: lengths on the device, and a grid that no length changes.

As in forward.py the queries of all heads that share a key head are the rows of one tile, the warps of a block divide
the keys of a tile, and each team of warps has its own ring of stages and its own softmax. Here a fixed number of blocks
shares the keys of all sequences, see chunk_schedule.py: a block computes one piece of a row after another. The entry of
the table for a tile is read one step before the tile's copy starts.

    step    1 S = Q K^T     2 softmax     3 O += P V
    in flight: keys and values of the next tiles, one fewer than there are stages, and an entry of the table
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div, larger, smaller
from cutlass_py_attn.kernels.common import logsumexp, paging, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.combine import VECTOR, Combine
from cutlass_py_attn.kernels.common.mma_sync import Operands, row_view
from cutlass_py_attn.kernels.common.paged_copy import PagedCopy, PagedRows
from cutlass_py_attn.kernels.common.params import RowCoordinates
from cutlass_py_attn.kernels.common.score_mod import ScoreMod, ScoreRow
from cutlass_py_attn.kernels.common.softmax import OnlineSoftmax, exp2, finite, multiply_rows, safe_scale
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.decode import e4m3_cache
from cutlass_py_attn.kernels.decode.chunk_schedule import (
    BATCH,
    BEGIN,
    COUNT,
    GROUP,
    ROW_BEGIN,
    TOTAL,
    ChunkSchedule,
    Piece,
    Place,
)
from cutlass_py_attn.kernels.decode.e4m3_cache import E4m3Cache
from cutlass_py_attn.kernels.decode.forward import Decode, apply_softmax
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import COMBINE_WARPS, ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.sinks import SINKS

LOG2_E = math.log2(math.e)
PIECES_AT_ONCE = 6  # of a warp of the combine kernel, in flight at once: as registers beside two blocks of codes allow


@dataclass(frozen=True)
class WarpPieces:
    """The pieces of a row that one warp of the combine kernel joins, and registers for PIECES_AT_ONCE of them.

    slots: slot0, step and odd: piece i is in slot slot0 + i * step, but piece 0 in slot0 + odd.
    row: its number in the tile. first: the warp's first piece. count: pieces of the row.
    parts: columns of the pieces, (VECTOR, PIECES_AT_ONCE) float32. logsumexps: those of the pieces.
    """

    slots: tuple[Int64, Int64, Int64]
    row: Int32
    first: Int32
    count: Int32
    parts: cute.Tensor
    logsumexps: cute.Tensor


class CombinePieces(Combine):
    """The combine kernel of one Build, and the addresses of partial results: (slots, tile_m, columns_value) float32."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.schedule = ChunkSchedule(build)

    def partial_row(self, slot: Int64, row: Int32) -> Int64:
        """Returns the number of a row of a slot."""
        return slot * self.build.tile_m + row

    def slot_output(self, p: Any, number: Int64) -> cute.Pointer:
        """Returns the pointer to the partial output of a row of a slot, (columns_value,) float32."""
        offset = cute.assume(number * self.build.columns_value, divby=VECTOR)
        return params.pointer(p.partial_output, Float32) + offset

    def slot_logsumexp(self, p: Any, number: Int64) -> cute.Tensor:
        """Returns the base-2 logsumexp of a row of a slot, a tensor of one element."""
        return cute.make_tensor(params.pointer(p.partial_logsumexp, Float32, 4) + number, tile_copy.ONE)

    @cute.jit
    def run(self, p: Any):
        """Computes one row of the output from its pieces; leaves if the row has one piece, which has stored it."""
        build, group = self.build, seqlen_info.group_size(self.build, p)
        x, y, z = cute.arch.block_idx()
        row_tiles = self.schedule.row_tiles(p)
        width = p.team_rows
        batch, head, query, row, pieces = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        slot0, step, odd = Int32(0), Int32(1), Int32(0)
        member = Int32(0)
        if p.fixed_chunks != 0:  # a block for each row of the output
            query, head, batch = x, y + p.first_head, z + p.first_batch
            starts = self.schedule.starts(p)
            start = starts[batch]
            pieces = starts[batch + 1] - start
            packed = query * group + head % group
            number = head // group * row_tiles + packed // build.tile_m
            slot0 = start * self.schedule.groups(p) + number // width * pieces
            member, row = number % width, packed % build.tile_m
        else:  # a block for each row that the start of team z cuts, if no team before it does
            cut, before = self.schedule.cut(p, z), self.schedule.cut(p, larger(z - 1, 0))
            begin, row_begin, previous = cut[BEGIN], cut[ROW_BEGIN], before[BEGIN]
            if (row_begin < begin) & (previous <= row_begin):
                number = cut[GROUP] * width + y
                packed = number % row_tiles * build.tile_m + x
                batch, query = cut[BATCH], packed // group
                head = number // row_tiles * group + (packed - query * group)
                shares = self.schedule.shares(p, cut[TOTAL])
                pieces = shares.team_of(row_begin + cut[COUNT] - 1) - z + 2
                # The first piece is in slot 0 or 1 of its team, the others in slot 0 of the teams after it.
                slot0, step = 2 * (z - 1), Int32(2)
                odd = cutlass.select_(previous == row_begin, Int32(0), Int32(1))
                member, row = y, x
        if pieces > 1:
            seqlen = seqlen_info.create(build, p, batch)
            if query < seqlen.num_queries:
                thread, _, _ = cute.arch.thread_idx()
                slots = Int64(slot0) * width + member, Int64(step) * width, Int64(odd) * width
                self.join(p, slots, pieces, row, (seqlen, batch, head, query), thread)

    @cute.jit
    def join(self, p: Any, slots: tuple, pieces: Int32, row: Int32, place: tuple, thread: Int32):
        """Joins the pieces of a row and stores its output and logsumexp."""
        build, lane = self.build, thread % WARP_THREADS
        seqlen, batch, head, query = place
        layout = cute.make_layout((COMBINE_WARPS, build.columns_value), stride=(build.columns_value, 1))
        base = tile_copy.smem_symbol()
        s_sums = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), layout)
        first = thread // WARP_THREADS
        parts = cute.make_rmem_tensor((VECTOR, PIECES_AT_ONCE), Float32)
        logsumexps = cute.make_rmem_tensor(PIECES_AT_ONCE, Float32)
        ours = WarpPieces(slots, row, first, pieces, parts, logsumexps)
        self.load_pieces(p, ours, first, lane * VECTOR)
        maximum = -Float32.inf
        for piece in cutlass.range(lane, pieces, WARP_THREADS, unroll=1):
            maximum = cute.arch.fmax(maximum, self.slot_logsumexp(p, self.number(ours, piece))[0])
        maximum = cute.arch.warp_reduction_max(maximum)
        sink = -Float32.inf
        if cutlass.const_expr(build.has("sinks")):
            sink = params.load_scalar(p.sinks, Float32, head) * LOG2_E
            maximum = cute.arch.fmax(maximum, sink)
        maximum = finite(maximum)  # so that (-inf) - (-inf) never arises
        total = Float32(0.0)
        for piece in cutlass.range(lane, pieces, WARP_THREADS, unroll=1):
            total = total + exp2(self.slot_logsumexp(p, self.number(ours, piece))[0] - maximum)
        total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(build.has("sinks")):
            total = total + SINKS.weight(exp2, sink, maximum)
        empty = total == 0.0
        inverse = cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
        for step in cutlass.range_constexpr(ceil_div(build.columns_value, WARP_THREADS * VECTOR)):
            column = (step * WARP_THREADS + lane) * VECTOR
            if cutlass.const_expr(step > 0):
                self.load_pieces(p, ours, first, column)
            found = self.sum_of_pieces(p, ours, column, maximum)
            if column < build.columns_value:
                for i in cutlass.range_constexpr(VECTOR):
                    s_sums[first, column + i] = found[i] * inverse
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(ceil_div(build.columns_value, 2 * ROW_THREADS)):
            column = step * (2 * ROW_THREADS) + thread * 2
            if column < build.columns_value:
                values = cute.make_rmem_tensor(2, Float32)
                for i in cutlass.range_constexpr(2):
                    values[i] = self.sum_over_warps(s_sums, column + i)
                target = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                self.store_output(p, target, column, values)
        if thread == 0:
            lse = (maximum + cute.math.log2(total, fastmath=True)) * math.log(2.0)
            logsumexp.store(p, RowCoordinates(batch, head, query), cutlass.select_(empty, -Float32.inf, lse))

    def number(self, pieces: WarpPieces, piece: Int32) -> Int64:
        """Returns the number of the row of piece `piece` among all partial results."""
        slot0, step, odd = pieces.slots
        slot = slot0 + Int64(piece) * step + cutlass.select_(piece == 0, odd, Int64(0))
        return self.partial_row(slot, pieces.row)

    @cute.jit
    def load_pieces(self, p: Any, pieces: WarpPieces, first: Int32, column: Int32):
        """Starts loading the columns and logsumexps of this warp's pieces from piece `first` on.

        Past the last piece and column they are those of the last, without a branch, so that all loads are in flight.
        """
        column = smaller(column, self.build.columns_value - VECTOR)
        for i in cutlass.range_constexpr(PIECES_AT_ONCE):
            number = self.number(pieces, smaller(first + i * COMBINE_WARPS, pieces.count - 1))
            pieces.logsumexps[i] = self.slot_logsumexp(p, number)[0]
            source = self.slot_output(p, number) + cute.assume(column, divby=VECTOR)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), pieces.parts[None, i])

    @cute.jit
    def sum_of_pieces(self, p: Any, pieces: WarpPieces, column: Int32, maximum: Float32):
        """Returns the sum of this warp's pieces with their weights; the first ones are loaded."""
        found = cute.make_rmem_tensor(VECTOR, Float32)
        found.fill(0.0)
        for start in cutlass.range(pieces.first, pieces.count, COMBINE_WARPS * PIECES_AT_ONCE, unroll=1):
            for i in cutlass.range_constexpr(PIECES_AT_ONCE):
                factor = exp2(pieces.logsumexps[i] - maximum)
                factor = cutlass.select_(start + i * COMBINE_WARPS < pieces.count, factor, Float32(0.0))
                found.store(found.load() + pieces.parts[None, i].load() * factor)
            following = start + COMBINE_WARPS * PIECES_AT_ONCE
            if following < pieces.count:
                self.load_pieces(p, pieces, following, column)
        return found


class PersistentDecode(Decode):
    """The persistent decode kernels of one Build."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.schedule = ChunkSchedule(build)
        self.score_mod = ScoreMod(build)
        self.pieces = CombinePieces(build)
        self.has_dependent_launch = architecture(build.arch).compute_capability >= (9, 0)
        threads = self.team_warps * WARP_THREADS
        self.paged_copy = PagedCopy(build, self.keys, threads) if build.has("paged") else None
        self.e4m3 = E4m3Cache(build, self.keys, threads) if build.has(registry.KV8) else None

    @cute.kernel
    def combine_kernel(self, p: Any):
        if cutlass.const_expr(self.has_dependent_launch):
            cute.arch.griddepcontrol_wait()
        self.pieces.run(p)

    @cute.kernel
    def kernel(self, p: Any):
        if cutlass.const_expr(self.has_dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = self.warp_of(thread)
        groups, row_tiles = self.schedule.groups(p), self.schedule.row_tiles(p)
        team, member = self.schedule.place_of(p, block)
        begin, end, batch, start, total = self.schedule.find_share(p, block, team, thread)
        place = Place(begin, end, team, member, groups, row_tiles)
        stores = (p.fixed_chunks == 0) & (member == 0) & (thread == 0)
        if stores & (begin >= end):
            self.schedule.store_no_cut(p, team, begin)
        chunk = begin
        while chunk < end:
            piece = self.schedule.piece(p, place, chunk, batch, start)
            if stores & (chunk == begin):
                self.schedule.store_cut(p, place, total, piece)
            self.compute(p, piece, warp, piece.start_tile, piece.end_tile, thread)
            cute.arch.sync_threads()  # the next piece overwrites the ring, which holds outputs
            chunk = chunk + piece.count
            if chunk >= (start + piece.of_sequence) * groups:
                start = start + piece.of_sequence
                batch = batch + 1

    @cute.jit
    def compute(self, p: Any, piece: Any, warp: Any, start: Int32, stop: Int32, thread: Int32):
        """Computes the key tiles [start, stop) of a row, and stores its results or partial results."""
        build, stages, seqlen = self.build, self.build.query_stages, piece.seqlen
        group = seqlen_info.group_size(build, p)
        band = seqlen_info.band(build, p, seqlen)
        if piece.row0 >= seqlen.num_queries * group:  # a sequence of fewer queries has no such rows
            stop = start
        row, shift = self.table_row(p, piece)

        # 0  start the first tiles, with the first one the queries
        scales = self.first_scales(p, piece)
        entries = [self.entry(p, row, shift, seqlen, warp, start + step, stop) for step in range(stages)]
        for step in cutlass.range_constexpr(stages - 1):
            self.load_pages(p, piece, warp, start + step, stop, Int32(step), entries[step])
            if cutlass.const_expr(step == 0):
                queries = self.start_queries(p, piece, thread)
            cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.e4m3 is None):
            cute.arch.cp_async_wait_group(stages - 2)
        else:
            self.store_queries(queries, thread)
        cute.arch.sync_threads()
        s_q = self.query_tile(warp.first_row // self.rows)

        r_o = self.mma_pv.accumulator(warp.lane)
        r_o.fill(0.0)
        rows = cute.size(row_view(r_o), mode=[0])
        softmax = OnlineSoftmax(rows, cute.make_rmem_tensor(rows, Float32))
        has_terms = self.score_mod.present
        scale_log2 = Float32(1.0) if cutlass.const_expr(has_terms) else safe_scale(p.scale_log2)
        operands = self.row_operands(p, piece, warp) if cutlass.const_expr(has_terms) else ()

        entry = entries[stages - 1]
        for key_tile in cutlass.range(start, stop, unroll=1):
            step = key_tile - start
            cute.arch.cp_async_wait_group(stages - 2)
            self.sync_team(warp)
            following = self.entry(p, row, shift, seqlen, warp, key_tile + stages, stop)
            self.load_pages(p, piece, warp, key_tile + (stages - 1), stop, (step + stages - 1) % stages, entry)
            entry = following
            cute.arch.cp_async_commit_group()
            keys, values = self.stage(warp, step % stages)

            # 1  S = Q K^T
            r_s = self.mma_qk.accumulator(warp.lane)
            self.multiply_keys(warp, s_q, keys, r_s, scales)

            # 2  score modification, mask, softmax
            if cutlass.const_expr(has_terms):
                self.modify_scores(p, piece, warp, band, r_s, key_tile, operands)
            elif p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if tile_order.needs_mask(band, Int32(0), key_tile, p.num_queries, build.tile_n):
                self.mask_scores(p, piece, warp, band, r_s, key_tile)
            self.apply_softmax(warp, softmax, r_s, r_o, scale_log2, values, scales)

            # 3  O += P V
            self.multiply_values(warp, r_s, values, r_o)

        # 4  join the teams, store the row, or this piece's partial results
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        statistics = self.row_statistics()
        if cutlass.const_expr(self.e4m3 is not None):
            # A sequence without keys may have any scale.
            r_o.store(r_o.load() * cutlass.select_(start < stop, Float32(scales[1]), Float32(0.0)))
        self.store_team_results(warp, softmax, r_o, statistics)
        cute.arch.sync_threads()
        self.join_teams(p, piece, statistics, scale_log2, thread)
        cute.arch.sync_threads()
        self.store_piece(p, piece, statistics.factors, thread)

    def table_row(self, p: Any, piece: Piece) -> tuple[Any, Any]:
        """Returns the table's entries of a sequence, and log2 of the page size; None without pages."""
        if self.paged_copy is None:
            return None, None
        return paging.page_row(p, piece.batch), paging.page_shift(p)

    def first_scales(self, p: Any, piece: Piece) -> cute.Tensor | None:
        """Returns the scales of keys and of values in registers; with scales of rows, the least unit of the values'."""
        if self.e4m3 is None:
            return None
        found = cute.make_rmem_tensor(2, Float32)
        found[0] = found[1] = Float32(e4m3_cache.LEAST_UNIT)
        if not self.e4m3.has_row_scales:
            found[0], found[1] = (self.e4m3.scale(p, name, piece) for name in e4m3_cache.NAMES)
        return found

    def stage(self, warp: Any, stage: Int32) -> tuple[Any, Any]:
        """Returns the team's keys and values of a stage; of codes, where the stage starts, twice."""
        if self.e4m3 is None:
            return super().stage(warp, stage)
        start = self.e4m3.stage_start(warp.team, stage)
        return start, start

    def multiply_keys(self, warp: Any, s_q: cute.Tensor, keys: Any, r_s: cute.Tensor, scales: Any) -> None:
        """Computes S = Q K^T of the keys of a stage."""
        if self.e4m3 is None:
            matmul_qk.issue(self.mma_qk, r_s, matmul_qk.operands(self.mma_qk, s_q, keys, warp.lane))
            return
        q_operand = self.mma_qk.a_operand(s_q, warp.lane)
        matmul_qk.issue(self.mma_qk, r_s, Operands(q_operand, self.e4m3.keys_operand(keys, warp.lane)))
        self.e4m3.scale_scores(r_s, scales[0], keys, row_view(self.mma_qk.coordinates(warp.lane)))

    def apply_softmax(
        self,
        warp: Any,
        softmax: OnlineSoftmax,
        r_s: cute.Tensor,
        r_o: cute.Tensor,
        scale_log2: Float32,
        values: Any,
        scales: Any,
    ) -> None:
        """Replaces scores by their weights, times the scales of the values' rows if there are any, and rescales O."""
        if self.e4m3 is None or not self.e4m3.has_row_scales:
            apply_softmax(softmax, r_s, r_o, scale_log2)
            return
        factors = softmax.weights(row_view(r_s), scale_log2)
        coordinates = row_view(self.mma_qk.coordinates(warp.lane))
        scales[1], shrink = self.e4m3.scale_weights(r_s, scales[1], values, coordinates)
        multiply_rows(row_view(r_o), [factor * shrink for factor in factors])

    def multiply_values(self, warp: Any, r_p: cute.Tensor, values: Any, r_o: cute.Tensor) -> None:
        """Computes O += P V of the values of a stage."""
        if self.e4m3 is None:
            v_operand = matmul_pv.b_operand(self.mma_pv, values, warp.lane)
        else:
            v_operand = self.e4m3.values_operand(values, warp.lane)
        matmul_pv.issue(self.mma_pv, r_o, Operands(self.mma_pv.from_accumulator(r_p), v_operand))

    @cute.jit
    def copy_queries(self, p: Any, work: Any, thread: Int32):
        # Not unrolled: with the addresses of all rows at once, tiles of 64 rows spill.
        for part in cutlass.range(self.team_warps, unroll=1):
            self.copy_query_part(p, work, part, thread)

    def start_queries(self, p: Any, work: Any, thread: Int32) -> cute.Tensor | None:
        """Starts copying the rows of this block's tile, without commit; for codes into the registers that it returns.

        cp.async cannot store their columns in the order that codes need.
        """
        if self.e4m3 is None:
            self.copy_queries(p, work, thread)
            return None
        return self.load_queries(p, work, thread)

    def query_vectors(self) -> tuple[int, int, int]:
        """Returns (elements of a vector, vectors of a row, vectors of a thread) of the tile of queries."""
        build = self.build
        vector = build.vector_bytes // build.item_bytes
        of_row = build.columns // vector
        return vector, of_row, ceil_div(build.tile_m * of_row, build.threads)

    @cute.jit
    def load_queries(self, p: Any, work: Any, thread: Int32):
        """Starts loading this thread's vectors of the rows of this block's tile, zeros past the last."""
        build, seqlen, group = self.build, work.seqlen, seqlen_info.group_size(self.build, p)
        vector, of_row, count = self.query_vectors()
        loaded = cute.make_rmem_tensor((vector, count), params.DTYPES[build.dtype])
        loaded.fill(0.0)
        for number in cutlass.range_constexpr(count):
            index = number * build.threads + thread
            packed_row, column = work.row0 + index // of_row, index % of_row * vector
            query = packed_row // group
            if (index < build.tile_m * of_row) & (query < seqlen.num_queries) & (column < build.head_dim):
                head = work.head_key * group + (packed_row - query * group)
                start = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                source = params.row_pointer(build, p, "query", start) + params.assume_multiple(Int64(column), vector)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(vector)), loaded[None, number])
        return loaded

    @cute.jit
    def store_queries(self, loaded: cute.Tensor, thread: Int32):
        """Stores the vectors of queries in the order of columns that codes need."""
        build = self.build
        vector, of_row, count = self.query_vectors()
        for number in cutlass.range_constexpr(count):
            index = number * build.threads + thread
            row, column = index // of_row, index % of_row * vector
            if index < build.tile_m * of_row:
                tile = self.query_tile(row // self.rows)
                for i in cutlass.range_constexpr(vector):
                    target = row % self.rows, e4m3_cache.query_column(build.columns, column + i)
                    tile[target] = self.dtype(loaded[i, number])

    def output_columns(self, column: Any) -> tuple[Any, Any]:
        if self.e4m3 is None:
            return super().output_columns(column)
        return e4m3_cache.output_column(column, 0), e4m3_cache.output_column(column, 1)

    def entry(self, p: Any, row: Any, shift: Int32, seqlen: Any, warp: Any, key_tile: Int32, stop: Int32) -> Int32:
        """Starts loading this lane's entry of the table for a key tile before `stop`; none without pages."""
        if self.paged_copy is None:
            return Int32(0)
        key0 = key_tile * self.build.tile_n + warp.team * self.keys
        end = cutlass.select_(key_tile < stop, seqlen.num_keys, Int32(0))
        return self.paged_copy.entry(p, row, shift, key0, end, warp.lane)

    @cute.jit
    def load_pages(self, p: Any, piece: Any, warp: Any, key_tile: Int32, stop: Int32, stage: Int32, entry: Int32):
        """Starts loading the team's keys and values of a key tile into a stage, unless the tile is past the last."""
        build = self.build
        if key_tile < stop:
            key0 = key_tile * build.tile_n + warp.team * self.keys
            if cutlass.const_expr(self.paged_copy is not None):
                entry = paging.clamped(p, entry)
            if cutlass.const_expr(self.e4m3 is not None):
                self.e4m3.load(p, piece, warp, key0, entry, self.stage(warp, stage)[0])
            else:
                rows = PagedRows(piece.head_key, key0, piece.seqlen.num_keys, entry)
                s_k, s_v = self.stage(warp, stage)
                self.paged_copy.copy(p, "key", warp.member, rows, build.head_dim, s_k)
                self.paged_copy.copy(p, "value", warp.member, rows, build.head_dim_value, s_v)

    def packed_rows(self, piece: Piece, warp: Any, coordinates: cute.Tensor) -> list[Int32]:
        """Returns the packed query row of each row of this thread's scores."""
        rows = range(cute.size(coordinates, mode=[0]))
        return [piece.row0 + warp.first_row + coordinates[row, 0][0] for row in rows]

    def row_operands(self, p: Any, piece: Piece, warp: Any) -> tuple:
        """Returns the operands of the score terms for each row of this thread's scores: heads differ by row."""
        coordinates = row_view(self.mma_qk.coordinates(warp.lane))
        group = seqlen_info.group_size(self.build, p)
        heads = [piece.head_key * group + packed % group for packed in self.packed_rows(piece, warp, coordinates)]
        return tuple(self.score_mod.load_operands(p, piece.batch, head) for head in heads)

    def modify_scores(
        self, p: Any, piece: Piece, warp: Any, band: Any, r_s: cute.Tensor, key_tile: Int32, operands: tuple
    ) -> None:
        """Turns this warp's raw products into scores in base 2."""
        scores, coordinates = row_view(r_s), row_view(self.mma_qk.coordinates(warp.lane))
        group = seqlen_info.group_size(self.build, p)
        key0 = key_tile * self.build.tile_n + warp.team * self.keys
        derivative = cute.make_rmem_tensor_like(scores) if self.score_mod.has_derivative else None
        for number, packed in enumerate(self.packed_rows(piece, warp, coordinates)):
            origin = packed // group - coordinates[number, 0][0], key0
            row = ScoreRow(self.score_mod, p, scores, number, coordinates, origin, band, None, derivative)
            if not any(term.scales_products for term in self.score_mod.terms):
                row.values = row.values * p.scale_log2
            in_registers = iter(operands[number])
            for term in self.score_mod.terms:
                term.modify_scores(row, next(in_registers) if term.vector is not None else None)
            row.store()

    @cute.jit
    def join_teams(self, p: Any, piece: Any, statistics: Any, scale_log2: Float32, thread: Int32):
        """Replaces maxima by the factors of the teams' outputs, one thread a row, and stores the logsumexp."""
        build, group = self.build, seqlen_info.group_size(self.build, p)
        seqlen, factors, sums = piece.seqlen, statistics.factors, statistics.sums
        if thread < build.tile_m:
            packed = piece.row0 + thread
            query = packed // group
            head = piece.head_key * group + (packed - query * group)
            maximum, total = -Float32.inf, Float32(0.0)
            for team in cutlass.range_constexpr(self.teams):
                maximum = cute.arch.fmax(maximum, factors[thread, team])
            base = finite(maximum)
            for team in cutlass.range_constexpr(self.teams):
                factor = exp2((factors[thread, team] - base) * scale_log2)
                total = total + factor * sums[thread, team]
                factors[thread, team] = factor
            top, shrink = base * scale_log2, Float32(1.0)  # the row's maximum in base 2
            if cutlass.const_expr(build.has("sinks")):  # noqa: SIM102
                if piece.is_whole & (query < seqlen.num_queries):
                    seen, sink = maximum * scale_log2, params.load_scalar(p.sinks, Float32, head) * LOG2_E
                    top = finite(cute.arch.fmax(seen, sink))
                    shrink = exp2(seen - top)
                    total = total * shrink + SINKS.weight(exp2, sink, top)
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0.0), shrink * cute.arch.rcp_approx(total))
            for team in cutlass.range_constexpr(self.teams):
                factors[thread, team] = factors[thread, team] * inverse
            lse = cutlass.select_(empty, -Float32.inf, top + cute.math.log2(total, fastmath=True))
            if query < seqlen.num_queries:
                if piece.is_whole:
                    logsumexp.store(p, RowCoordinates(piece.batch, head, query), lse * math.log(2.0))
                else:
                    target = self.pieces.slot_logsumexp(p, self.pieces.partial_row(piece.slot, thread))
                    target[0] = lse
        if piece.is_first & (piece.row0 == 0):
            for i in cutlass.range(group, unroll=1):
                self.store_padding(p, piece, piece.head_key * group + i, thread)

    @cute.jit
    def store_padding(self, p: Any, piece: Any, head: Int32, thread: Int32):
        """Stores +inf in the padding of a head's logsumexp."""
        num_queries = piece.seqlen.num_queries
        end = seqlen_info.padded_rows(num_queries)
        for query in cutlass.range(num_queries + thread, end, self.build.threads, unroll=1):
            logsumexp.store(p, RowCoordinates(piece.batch, head, query), Float32.inf)

    @cute.jit
    def store_piece(self, p: Any, piece: Any, factors: cute.Tensor, thread: Int32):
        """Joins the teams' outputs and stores them, two columns at a time."""
        build, seqlen, group = self.build, piece.seqlen, seqlen_info.group_size(self.build, p)
        outputs = [self.team_output(team, 0, build.tile_m) for team in range(self.teams)]
        pairs = build.columns_value // 2
        for step in cutlass.range(build.tile_m * pairs // build.threads, unroll=1):
            index = step * build.threads + thread
            row, column = index // pairs, index % pairs * 2
            packed = piece.row0 + row
            query = packed // group
            if query < seqlen.num_queries:
                values = cute.make_rmem_tensor(2, Float32)
                values.fill(0.0)
                self.add_team_outputs(values, outputs, factors, row, column)
                if piece.is_whole:
                    head = piece.head_key * group + (packed - query * group)
                    target = RowCoordinates(seqlen.batch, head, seqlen.query_start + query)
                    self.pieces.store_output(p, target, column, values)
                else:
                    start = self.pieces.slot_output(p, self.pieces.partial_row(piece.slot, row))
                    tile_copy.store_pair(values, start, column, build.columns_value, True)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    return PersistentDecode(build), params.example_arguments(abi.fields_of(build))
