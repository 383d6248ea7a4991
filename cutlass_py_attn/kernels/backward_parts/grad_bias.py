"""Bias gradient: dS summed over the axes along which the bias broadcasts, if the main kernel does not write it.

A block owns one tile of grad_bias and loops over every tile of scores that adds to it: over the batches and query heads
that are summed, and within each over query and key tiles. For each tile it recomputes dS = P (dP - delta) and adds it,
in float32 and in a fixed order, to its registers.

The head dim is loaded in chunks of columns, first of Q and K for S, then of dO and V for dP, through one ring of two
stages: shared memory does not grow with the head dim.

    step       1 S = Q K^T   2 P   3 dP = dO V^T   4 dS
    in flight  the next chunk; with the first of Q the bias and logsumexp, with the first of dO delta
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div, larger, smaller
from cutlass_py_attn.kernels.backward_parts.grad_bias_layout import CHUNK_STAGES, grad_bias_build, grad_bias_chunk
from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.common import dropout, masking, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.dynamic_tiles import Rows, column_slice
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, row_view
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import ScoreMod, bias_of, bias_source
from cutlass_py_attn.kernels.common.tile_copy import GmemTile
from cutlass_py_attn.kernels.component_gemms.products import doivj, matmul_qk
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.variants import KEEPS_DS

FEW_ACCUMULATORS = 64  # registers a thread; with more, ptxas would spill some to let two blocks share an SM

# Bits of a lane that select among the columns of a row of an accumulator, and among the rows of a column.
COLUMN_LANES, ROW_LANES = (1, 2), (4, 8, 16)


@dataclass(frozen=True)
class ScoreTileIndex:
    """A tile of scores: number of its (batch, query head), query tile, key tile."""

    pair: Any
    query_tile: Any
    key_tile: Any


@dataclass(frozen=True)
class BiasTileIndex:
    """A tile of grad_bias: query tile and key tile; 0 along an axis that is summed over."""

    query_tile: Any
    key_tile: Any


@dataclass(frozen=True)
class TileRange:
    """Tiles [start, end)."""

    start: Any
    end: Any


@dataclass(frozen=True)
class HeadOfSequence:
    """A sequence and a query head."""

    seqlen: seqlen_info.SeqlenInfo
    head: Any


@dataclass(frozen=True)
class ChunkOperands:
    """The operands of one GEMM: the tensor with query rows, the one with key rows, and their columns."""

    queries: str
    keys: str
    columns: int


@dataclass(frozen=True)
class TileRows:
    """The query rows and the key rows of a tile of scores."""

    queries: Rows
    keys: Rows


@dataclass(frozen=True)
class Gemms:
    """The component GEMMs over one chunk of columns, and their operands in shared memory, two stages each."""

    mma_qk: MmaSync
    mma_dov: MmaSync
    s_left: cute.Tensor
    s_right: cute.Tensor


class GradBias:
    """The bias gradient of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = grad_bias_build(build)
        self.has_minus_delta, self.has_scaled_lse = build.variant in KEEPS_DS, starts_from_logsumexp(build)
        build = self.build
        self.score_mod = ScoreMod(build)
        self.dtype = DTYPES[build.dtype]
        self.columns = grad_bias_chunk(build)
        self.score_chunks = ceil_div(build.head_dim, self.columns)
        self.value_chunks = ceil_div(build.head_dim_value, self.columns)
        accumulators = 3 * build.tile_m * build.tile_n // build.threads  # the sum, S and dP
        self.launch_bounds = (
            {"min_blocks_per_mp": 1} if accumulators > FEW_ACCUMULATORS else params.launch_bounds(build)
        )

    @cute.jit
    def run(self, p: Any):
        """Computes one tile of grad_bias."""
        thread, _, _ = cute.arch.thread_idx()
        gemms = self.gemms()
        r_sum = gemms.mma_qk.accumulator(thread)
        r_sum.fill(0.0)

        # 0  load the first chunk
        tile, stage = self.first_tile(p), Int32(0)
        self.load(p, gemms, tile, Int32(0), stage)
        cute.arch.cp_async_commit_group()
        while tile.pair < self.num_pairs(p):
            r_kept = self.dropout_bits(p, gemms, tile)  # before anything else needs registers
            # 1  S = Q K^T
            r_s = gemms.mma_qk.accumulator(thread)
            r_s.fill(0.0)
            for chunk in cutlass.range(self.score_chunks, unroll=1):
                self.advance(p, gemms, tile, chunk + 1, stage)
                self.multiply_qk(gemms, r_s, stage)
                stage = stage ^ 1
            # 2  P
            self.weights(p, gemms, tile, r_s)
            # 3  dP = dO V^T
            r_dp = gemms.mma_dov.accumulator(thread)
            r_dp.fill(0.0)
            for chunk in cutlass.range(1, self.value_chunks, unroll=1):
                self.advance(p, gemms, tile, self.score_chunks + chunk, stage)
                self.multiply_dov(gemms, r_dp, stage)
                stage = stage ^ 1
            following = self.next_tile(p, tile)
            self.advance(p, gemms, following, Int32(0), stage)
            self.multiply_dov(gemms, r_dp, stage)
            stage = stage ^ 1
            # 4  dS
            masking.scale_kept(row_view(r_dp), r_kept, p.keep_scale)
            self.add_score_gradient(gemms, r_sum, r_s, r_dp)
            tile = following

        # 5  store the tile through the shared memory of the ring
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.sums_over("q") or self.sums_over("k")):
            self.store_sums(p, gemms, r_sum)
        else:
            self.store_tile(p, gemms, r_sum)

    def gemms(self) -> Gemms:
        """Returns the GEMMs of S and dP, which read the same two rings: Q or dO, and K or V."""
        build, base = self.build, tile_copy.smem_base(self.build)
        qk, dov = (replace(gemm.spec(build), k=self.columns, accumulate=True) for gemm in (matmul_qk, doivj))
        left, right = (
            tile_copy.smem_tile(base, build.buffer(name).offset, self.dtype, rows, self.columns, CHUNK_STAGES)
            for name, rows in (("left", build.tile_m), ("right", build.tile_n))
        )
        return Gemms(MmaSync(qk, build.dtype), MmaSync(dov, build.dtype), left, right)

    def sums_over(self, axis: str) -> bool:
        """Returns whether grad_bias is summed over this axis of b, h, q and k."""
        return axis in self.build.grad_bias_mode

    def own_tile(self, p: Any) -> BiasTileIndex:
        """Returns this block's tile of grad_bias."""
        block = params.read_register("ctaid.x")
        key_tiles = 1 if self.sums_over("k") else ceil_div(p.num_keys, self.build.tile_n)
        return BiasTileIndex(block // key_tiles, block % key_tiles)

    def own_head(self, p: Any) -> tuple[Int32, Int32]:
        """Returns (batch, head) of this block's tile of grad_bias; 0 along an axis that is summed over."""
        return params.read_register("ctaid.z") + p.first_batch, params.read_register("ctaid.y") + p.first_head

    def num_pairs(self, p: Any) -> Int32:
        """Returns how many (batch, query head) pairs are summed over."""
        return Int32(p.batch if self.sums_over("b") else 1) * (p.num_heads if self.sums_over("h") else 1)

    def head_of_pair(self, p: Any, pair: Int32) -> HeadOfSequence:
        """Returns the sequence and query head of one of the pairs."""
        batch, head = self.own_head(p)
        if self.sums_over("h"):
            pair, head = pair // p.num_heads, pair % p.num_heads
        if self.sums_over("b"):
            batch = pair
        return HeadOfSequence(seqlen_info.create(self.build, p, batch), head)

    def query_tiles(self, p: Any, pair: Int32, own: BiasTileIndex) -> TileRange:
        """Returns the query tiles that may add to this block's tile."""
        build = self.build
        if not self.sums_over("q"):
            return TileRange(own.query_tile, own.query_tile + 1)
        seqlen = self.head_of_pair(p, pair).seqlen
        if self.sums_over("k"):
            return TileRange(Int32(0), ceil_div(seqlen.num_queries, build.tile_m))
        tiles = seqlen_info.band(build, p, seqlen), own.key_tile, build.tile_m, build.tile_n
        return TileRange(tile_order.query_tile_start(*tiles), tile_order.query_tile_end(*tiles))

    def key_tiles(self, p: Any, pair: Int32, query_tile: Int32, own: BiasTileIndex) -> TileRange:
        """Returns the key tiles that some row of the query tile sees and that add to this block's tile."""
        build = self.build
        seqlen = self.head_of_pair(p, pair).seqlen
        tiles = seqlen_info.band(build, p, seqlen), query_tile, build.tile_m, build.tile_n
        start, end = tile_order.key_tile_start(*tiles), tile_order.key_tile_end(*tiles)
        if self.sums_over("k"):
            return TileRange(start, end)
        return TileRange(larger(start, own.key_tile), smaller(end, own.key_tile + 1))

    def first_tile(self, p: Any) -> ScoreTileIndex:
        """Returns the first tile of scores with a visible (query, key) pair."""
        own, pair = self.own_tile(p), Int32(0)
        query_tile = self.query_tiles(p, pair, own).start
        key_tile = self.key_tiles(p, pair, query_tile, own).start
        return self.search(p, ScoreTileIndex(pair, query_tile, key_tile), own)

    def next_tile(self, p: Any, tile: ScoreTileIndex) -> ScoreTileIndex:
        """Returns the next tile of scores with a visible pair; after the last, one with `pair` = `num_pairs`."""
        # Along an axis that is not summed over, a tile of scores is where the block's own tile is.
        own = BiasTileIndex(tile.query_tile, tile.key_tile)
        return self.search(p, ScoreTileIndex(tile.pair, tile.query_tile, tile.key_tile + 1), own)

    @cute.jit
    def search(self, p: Any, first: Any, own: Any):
        """Returns the first tile of scores with a visible pair, from `first` on."""
        pair, query_tile, key_tile = first.pair, first.query_tile, first.key_tile
        last = self.num_pairs(p) - 1
        end = self.key_tiles(p, pair, query_tile, own).end
        while (key_tile >= end) & (pair <= last):
            query_end = self.query_tiles(p, pair, own).end
            query_tile = query_tile + 1
            if query_tile >= query_end:
                pair = pair + 1
                query_tile = self.query_tiles(p, smaller(pair, last), own).start
            key_tiles = self.key_tiles(p, smaller(pair, last), query_tile, own)
            key_tile, end = key_tiles.start, key_tiles.end
        return ScoreTileIndex(pair, query_tile, key_tile)

    def score_tile(self, name: str) -> cute.Tensor:
        """Returns the (tile_m, tile_n) tile in the operands' type in the buffer of that name."""
        build, base = self.build, tile_copy.smem_base(self.build)
        return tile_copy.smem_tile(base, build.buffer(name).offset, self.dtype, build.tile_m, build.tile_n)

    def row_statistics(self, name: str) -> cute.Tensor:
        """Returns the logsumexp or delta of the rows of a tile in shared memory."""
        return cute.make_tensor(tile_copy.smem_pointer(self.build, name, Float32), cute.make_layout(self.build.tile_m))

    @cute.jit
    def advance(self, p: Any, gemms: Any, tile: Any, chunk: Int32, stage: Int32):
        """Waits for the chunk in `stage`, and starts the copy of chunk number `chunk` of `tile` to the other stage."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.load(p, gemms, tile, chunk, stage ^ 1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load(self, p: Any, gemms: Any, tile: Any, chunk: Int32, stage: Int32):
        """Starts the copies of a chunk of a tile and of what is loaded with it; none past the last tile."""
        if tile.pair < self.num_pairs(p):
            build, thread = self.build, params.read_register("tid.x")
            of = self.head_of_pair(p, tile.pair)
            origin = tile.query_tile * build.tile_m, tile.key_tile * build.tile_n
            row = (Int64(of.head) * p.total_tiles + of.seqlen.first_tile + tile.query_tile) * build.tile_m
            if chunk < self.score_chunks:
                operands = ChunkOperands("query", "key", build.head_dim)
                self.load_chunk(p, gemms, operands, self.rows(p, of, origin), chunk, stage, thread)
            else:
                operands, number = (
                    ChunkOperands("grad_output", "value", build.head_dim_value),
                    chunk - self.score_chunks,
                )
                self.load_chunk(p, gemms, operands, self.rows(p, of, origin), number, stage, thread)
            # One buffer suffices for each: they are read between the last chunk of K and the first chunk of V.
            if chunk == 0:
                bias = bias_of(build, p, "bias", of.seqlen, of.head, origin)
                tile_copy.copy_g2s(thread, build.threads, bias, self.score_tile("bias"))
                self.load_statistics(p.logsumexp_log2, row, "logsumexp", thread)
            if chunk == self.score_chunks:
                self.load_statistics(p.delta, row, "delta", thread)

    def rows(self, p: Any, of: HeadOfSequence, origin: tuple[Int32, Int32]) -> TileRows:
        """Returns the rows of the tile of scores at `origin`."""
        seqlen, (query0, key0) = of.seqlen, origin
        queries = Rows((seqlen.batch, of.head, seqlen.query_start + query0), seqlen.num_queries - query0)
        key_head = seqlen_info.key_head(self.build, p, of.head)
        return TileRows(queries, Rows((seqlen.batch, key_head, seqlen.key_start + key0), seqlen.num_keys - key0))

    def load_chunk(
        self, p: Any, gemms: Gemms, operands: ChunkOperands, rows: TileRows, number: Int32, stage: Int32, thread: Int32
    ) -> None:
        """Starts the copies of chunk `number` of two operands."""
        for name, of_tile, ring in (
            (operands.queries, rows.queries, gemms.s_left),
            (operands.keys, rows.keys, gemms.s_right),
        ):
            whole = tile_copy.gmem_tile(self.build, p, name, of_tile.coordinates, of_tile.count, operands.columns)
            chunk = column_slice(whole, number * self.columns, self.columns)
            tile_copy.copy_g2s(thread, self.build.threads, chunk, ring[None, None, stage])

    def load_statistics(self, address: Int64, row: Int64, name: str, thread: Int32) -> None:
        """Starts the copy of the logsumexp or delta of a tile's rows."""
        source = params.pointer(address, Float32) + cute.assume(row, divby=16)
        tile_copy.copy_vector_g2s(thread, source, self.row_statistics(name))

    def multiply_qk(self, gemms: Gemms, r_s: cute.Tensor, stage: Int32) -> None:
        """Adds Q K^T of the chunks in `stage` to S."""
        parts = matmul_qk.operands(gemms.mma_qk, gemms.s_left, gemms.s_right, params.read_register("tid.x"))
        matmul_qk.issue(gemms.mma_qk, r_s, parts.stage(stage, stage))

    def multiply_dov(self, gemms: Gemms, r_dp: cute.Tensor, stage: Int32) -> None:
        """Adds dO V^T of the chunks in `stage` to dP."""
        parts = doivj.operands(gemms.mma_dov, gemms.s_left, gemms.s_right, params.read_register("tid.x"))
        doivj.issue(gemms.mma_dov, r_dp, parts.stage(stage, stage))

    def coordinates(self, gemms: Gemms) -> cute.Tensor:
        """Returns (row, column) of each of a thread's scores, as (rows, columns)."""
        return row_view(gemms.mma_qk.coordinates(params.read_register("tid.x")))

    @cute.jit
    def weights(self, p: Any, gemms: Any, tile: Any, r_s: cute.Tensor):
        """Replaces S by P."""
        build = self.build
        of = self.head_of_pair(p, tile.pair)
        band = seqlen_info.band(build, p, of.seqlen)
        origin = tile.query_tile * build.tile_m, tile.key_tile * build.tile_n
        scores, coordinates = row_view(r_s), self.coordinates(gemms)
        bias = gemms.mma_qk.mma.get_slice(params.read_register("tid.x")).partition_C(self.score_tile("bias"))
        given = self.score_mod.load_operands(p, of.seqlen.index, of.head), bias
        self.score_mod.apply(p, scores, coordinates, origin, band, given)
        lse = self.row_statistics("logsumexp")
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            logsumexp = lse[coordinates[row, 0][0]]
            if cutlass.const_expr(self.has_scaled_lse):
                logsumexp = logsumexp * -p.scale_log2
            exponent = scores[row, None].load() - logsumexp
            scores[row, None].store(cute.math.exp2(exponent, fastmath=True))
        if tile_order.needs_mask(band, tile.query_tile, tile.key_tile, build.tile_m, build.tile_n):
            masking.mask_weights(band, scores, coordinates, origin)

    def dropout_bits(self, p: Any, gemms: Gemms, tile: ScoreTileIndex) -> cute.Tensor | None:
        """Returns the mask bits of the weights that dropout keeps; None without dropout."""
        build = self.build
        origin = tile.query_tile * build.tile_m, tile.key_tile * build.tile_n
        coordinates, of = self.coordinates(gemms), self.head_of_pair(p, tile.pair)
        return dropout.keep_bits_of_tile(build, p, coordinates, origin, (of.seqlen, of.head))

    def add_score_gradient(self, gemms: Gemms, r_sum: cute.Tensor, r_p: cute.Tensor, r_dp: cute.Tensor) -> None:
        """Adds dS = P (dP - delta)."""
        total, weights, dp = row_view(r_sum), row_view(r_p), row_view(r_dp)
        coordinates, delta = self.coordinates(gemms), self.row_statistics("delta")
        for row in range(cute.size(dp, mode=[0])):
            of_row = -delta[coordinates[row, 0][0]] if self.has_minus_delta else delta[coordinates[row, 0][0]]
            gradient = weights[row, None].load() * (dp[row, None].load() - of_row)
            total[row, None].store(total[row, None].load() + gradient)

    def target(self, p: Any) -> GmemTile:
        """Returns this block's tile of grad_bias; with varlen, grad_bias is as large as the longest sequences."""
        own = self.own_tile(p)
        start = own.query_tile * self.build.tile_m, own.key_tile * self.build.tile_n
        return bias_source(self.build, p, "grad_bias", (*self.own_head(p), *start), (p.num_queries, p.num_keys))

    def store_tile(self, p: Any, gemms: Gemms, r_sum: cute.Tensor) -> None:
        """Writes a tile that is summed over neither queries nor keys."""
        thread, tile = params.read_register("tid.x"), self.score_tile("left")
        values = tile_copy.converted(r_sum, self.dtype)
        tile_copy.copy_r2s(thread, gemms.mma_qk.mma, values, tile, tile_copy.has_stmatrix(self.build))
        cute.arch.sync_threads()
        tile_copy.copy_s2g(thread, self.build.threads, tile, self.target(p))

    def store_sums(self, p: Any, gemms: Gemms, r_sum: cute.Tensor) -> None:
        """Writes a tile that is summed over rows, columns or both: within a thread, then its warp, then the block."""
        build, thread, target = self.build, params.read_register("tid.x"), self.target(p)
        warp, warps = thread // WARP_THREADS, build.warps
        values, coordinates = row_view(r_sum), self.coordinates(gemms)
        rows, columns = (cute.size(values, mode=[mode]) for mode in (0, 1))
        # count: sums of the tile; step: elements between two of them in grad_bias; left: how many exist there
        if self.sums_over("q") and self.sums_over("k"):
            count, step, left, lanes = 1, 0, 1, ROW_LANES + COLUMN_LANES
            own = [(0, values.load())]
        elif self.sums_over("q"):
            count, step, left, lanes = build.tile_n, target.column_stride, target.columns, ROW_LANES
            own = [(coordinates[0, column][1], values[None, column].load()) for column in range(columns)]
        else:
            count, step, left, lanes = build.tile_m, target.row_stride, target.rows, COLUMN_LANES
            own = [(coordinates[row, 0][0], values[row, None].load()) for row in range(rows)]
        partial = cute.make_tensor(tile_copy.smem_pointer(build, "left", Float32), cute.make_layout((count, warps)))
        # A warp computes only some of the sums; the others stay zero.
        fill_zeros(thread, build.threads, partial)
        cute.arch.sync_threads()
        for index, parts in own:
            total = parts.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for lane in lanes:
                total = total + cute.arch.shuffle_sync_bfly(total, offset=lane)
            tile_copy.store_predicated(partial, (index, warp), total, thread & sum(lanes) == 0)
        cute.arch.sync_threads()
        store_line(thread, partial, target.start, step, left)


@cute.jit
def fill_zeros(thread: Int32, threads: cutlass.Constexpr, values: cute.Tensor):
    """Writes zeros to an array in shared memory."""
    for index in cutlass.range(thread, cute.size(values), threads, unroll=1):
        values[index] = Float32(0.0)


@cute.jit
def store_line(thread: Int32, partial: cute.Tensor, start: cute.Pointer, step: Any, left: Int32):
    """Writes the sums over the warps, one for each thread, `step` elements apart; `left` of them exist."""
    if (thread < cute.size(partial, mode=[0])) & (thread < left):
        total = partial[thread, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        target = cute.make_tensor(start + thread * Int64(step), cute.make_layout(1))
        target[0] = target.element_type(Float32(total))
