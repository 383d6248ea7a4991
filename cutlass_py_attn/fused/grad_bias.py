"""Bias gradient: dS summed over the axes along which the bias broadcasts, where the main kernel does not write it.

A block owns one tile of grad_bias and walks every tile of scores that adds to it: the batches and query heads that
are summed over, and of each the query and key tiles. Of each it computes dS = P (dP - delta) anew and adds it, in
float32 and always in the same order, to its registers.

The head's columns come a chunk at a time, of Q and K for S and then of dO and V for dP, through one ring of two
slots: shared memory does not grow with the head dim.

    step       1 S = Q K^T      2 P      3 dP = dO V^T      4 dS
    in flight  the next chunk; with the first of Q the bias and logsumexp, with the first of dO delta
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.fused.streamed import from_column
from cutlass_py_attn.gemm import matmul_qk
from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.gemm.mma_sync import MmaSync, row_view
from cutlass_py_attn.parts import dropout, lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import ceil_div, larger, smaller
from cutlass_py_attn.parts.moves import Source
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.parts.terms import Terms, bias_of, bias_source
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import bias_gradient_build
from cutlass_py_attn.shared_memory import BIAS_SLOTS, bias_gradient_chunk

FEW_ACCUMULATORS = 64  # registers a thread; with more, ptxas would spill some to let two blocks share an SM

Place = tuple[Int32, Int32, Int32]  # a tile of scores: number of its (batch, query head), query tile, key tile

# Bits of a lane that choose among the columns of a row of an accumulator, and among the rows of a column.
COLUMN_LANES, ROW_LANES = (1, 2), (4, 8, 16)


class GradBias:
    """The bias gradient of one Build, called from its kernel."""

    def __init__(self, build: Build) -> None:
        self.build = bias_gradient_build(build)
        self.terms = Terms(build)
        self.dtype = DTYPES[build.dtype]
        self.columns = bias_gradient_chunk(build)
        self.score_chunks = ceil_div(build.head_dim, self.columns)
        self.value_chunks = ceil_div(build.head_dim_value, self.columns)
        accumulators = 3 * build.tile_m * build.tile_n // build.threads  # the sum, S and dP
        self.promise = {"min_blocks_per_mp": 1} if accumulators > FEW_ACCUMULATORS else params.promise(build)

    @cute.jit
    def run(self, p: Any):
        """One tile of grad_bias for each block."""
        thread, _, _ = cute.arch.thread_idx()
        # One product of chunks serves S and dP.
        self.product = MmaSync(replace(matmul_qk.spec(self.build), k=self.columns, accumulate=True), self.build.dtype)
        self.rings = self.shared_rings()
        r_sum = self.product.accumulator(thread)
        r_sum.fill(0.0)

        # 0  load the first chunk
        here, slot = self.first(p), Int32(0)
        self.load(p, here, Int32(0), slot)
        cute.arch.cp_async_commit_group()
        while here[0] < self.pairs(p):
            r_kept = self.kept(p, here)  # before anything else needs registers
            # 1  S = Q K^T
            r_s = self.product.accumulator(thread)
            r_s.fill(0.0)
            for chunk in cutlass.range(self.score_chunks, unroll=1):
                self.turn(p, here, chunk + 1, slot)
                self.multiply(r_s, slot)
                slot = slot ^ 1
            # 2  P
            self.weights(p, here, r_s)
            # 3  dP = dO V^T
            r_dp = self.product.accumulator(thread)
            r_dp.fill(0.0)
            for chunk in cutlass.range(1, self.value_chunks, unroll=1):
                self.turn(p, here, self.score_chunks + chunk, slot)
                self.multiply(r_dp, slot)
                slot = slot ^ 1
            behind = self.behind(p, here)
            self.turn(p, behind, Int32(0), slot)
            self.multiply(r_dp, slot)
            slot = slot ^ 1
            # 4  dS
            masking.keep(row_view(r_dp), r_kept, p.keep_scale)
            self.add_score_gradient(row_view(r_sum), row_view(r_s), row_view(r_dp))
            here = behind

        # 5  store the tile through the place of the rings
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.sums_over("q") or self.sums_over("k")):
            self.store_sums(p, r_sum)
        else:
            self.store_tile(p, r_sum)

    def sums_over(self, axis: str) -> bool:
        """Whether grad_bias is summed over this axis of b, h, q and k."""
        return axis in self.build.bias_gradient

    def own_tile(self, p: Any) -> tuple[Int32, Int32]:
        """(query tile, key tile) of grad_bias; 0 along an axis that is summed over."""
        block = params.fresh("ctaid.x")
        key_tiles = 1 if self.sums_over("k") else ceil_div(p.num_keys, self.build.tile_n)
        return block // key_tiles, block % key_tiles

    def own_head(self, p: Any) -> tuple[Int32, Int32]:
        """(batch, head) of grad_bias; 0 along an axis that is summed over."""
        return params.fresh("ctaid.z") + p.first_batch, params.fresh("ctaid.y") + p.first_head

    def pairs(self, p: Any) -> Int32:
        """How many (batch, query head) are summed over."""
        return Int32(p.batch if self.sums_over("b") else 1) * (p.num_heads if self.sums_over("h") else 1)

    def sequence(self, p: Any, pair: Int32) -> tuple[lengths.Sequence, Int32]:
        """(sequence, query head) of one of the pairs."""
        batch, head = self.own_head(p)
        if self.sums_over("h"):
            pair, head = pair // p.num_heads, pair % p.num_heads
        if self.sums_over("b"):
            batch = pair
        return lengths.sequence(self.build, p, batch), head

    def query_tiles(self, p: Any, pair: Int32, own: tuple[Int32, Int32]) -> tuple[Any, Any]:
        """Query tiles [start, end) that may add to this block's tile."""
        build, (query_tile, key_tile) = self.build, own
        if not self.sums_over("q"):
            return query_tile, query_tile + 1
        of, _ = self.sequence(p, pair)
        if self.sums_over("k"):
            return Int32(0), ceil_div(of.num_queries, build.tile_m)
        tiles = lengths.band(build, p, of), key_tile, build.tile_m, build.tile_n
        return schedule.query_tile_start(*tiles), schedule.query_tile_end(*tiles)

    def key_tiles(self, p: Any, pair: Int32, query_tile: Int32, own: tuple[Int32, Int32]) -> tuple[Any, Any]:
        """Key tiles [start, end) that some row of the query tile sees and that add to this block's tile."""
        build, (_, key_tile) = self.build, own
        of, _ = self.sequence(p, pair)
        tiles = lengths.band(build, p, of), query_tile, build.tile_m, build.tile_n
        start, end = schedule.key_tile_start(*tiles), schedule.key_tile_end(*tiles)
        return (start, end) if self.sums_over("k") else (larger(start, key_tile), smaller(end, key_tile + 1))

    def first(self, p: Any) -> Place:
        """The first tile of scores with a visible pair of query and key."""
        own, none = self.own_tile(p), Int32(0)
        query_tile, _ = self.query_tiles(p, none, own)
        key_tile, _ = self.key_tiles(p, none, query_tile, own)
        return self.search(p, (none, query_tile, key_tile), own)

    def behind(self, p: Any, at: Place) -> Place:
        """The next tile of scores with a visible pair; behind the last one, a number that no (batch, head) has."""
        pair, query_tile, key_tile = at
        # Along an axis that is not summed over, a tile of scores is where the block's own tile is.
        return self.search(p, (pair, query_tile, key_tile + 1), (query_tile, key_tile))

    @cute.jit
    def search(self, p: Any, at: Place, own: tuple):
        """The first tile of scores with a visible pair from `at` on."""
        pair, query_tile, key_tile = at
        last = self.pairs(p) - 1
        _, end = self.key_tiles(p, pair, query_tile, own)
        while (key_tile >= end) & (pair <= last):
            _, query_end = self.query_tiles(p, pair, own)
            query_tile = query_tile + 1
            if query_tile >= query_end:
                pair = pair + 1
                query_tile, _ = self.query_tiles(p, smaller(pair, last), own)
            key_tile, end = self.key_tiles(p, smaller(pair, last), query_tile, own)
        return pair, query_tile, key_tile

    def shared_rings(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Chunks of Q and dO, and of K and V."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        left, right = (
            moves.shared_tile(base, build.buffer(name).offset, self.dtype, rows, self.columns, BIAS_SLOTS)
            for name, rows in (("left", build.tile_m), ("right", build.tile_n))
        )
        return left, right

    def score_tile(self, name: str) -> cute.Tensor:
        """A tile of scores in the operands' type in the buffer of that name."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return moves.shared_tile(base, build.buffer(name).offset, self.dtype, build.tile_m, build.tile_n)

    def statistic(self, name: str) -> cute.Tensor:
        """logsumexp or delta of the rows of a tile."""
        return cute.make_tensor(moves.shared_pointer(self.build, name, Float32), cute.make_layout(self.build.tile_m))

    @cute.jit
    def turn(self, p: Any, at: Place, number: Int32, slot: Int32):
        """Wait for the chunk in `slot`, and start copying chunk `number` of the tile `at` to the other slot."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.load(p, at, number, slot ^ 1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load(self, p: Any, at: Place, number: Int32, slot: Int32):
        """Start copying chunk `number` of a tile's operands and what comes with it; nothing behind the last tile."""
        pair, query_tile, key_tile = at
        if pair < self.pairs(p):
            build, thread = self.build, params.fresh("tid.x")
            of, head = self.sequence(p, pair)
            start = query_tile * build.tile_m, key_tile * build.tile_n
            row = (Int64(head) * p.total_tiles + of.first_tile + query_tile) * build.tile_m
            if number < self.score_chunks:
                self.load_chunk(p, ("query", "key", build.head_dim), (of, head, *start), (number, slot), thread)
            else:
                which = "grad_output", "value", build.head_dim_value
                self.load_chunk(p, which, (of, head, *start), (number - self.score_chunks, slot), thread)
            # Both are read between the last chunk of K and the first of V: a place for one tile will do.
            if number == 0:
                bias = bias_of(build, p, "bias", of, head, start)
                moves.load_tile(thread, build.threads, bias, self.score_tile("bias"))
                self.load_statistic(p.logsumexp_log2, row, "logsumexp", thread)
            if number == self.score_chunks:
                self.load_statistic(p.delta, row, "delta", thread)

    def load_chunk(self, p: Any, which: tuple, at: tuple, where: tuple[Int32, Int32], thread: Int32) -> None:
        """Start copying a chunk of two operands; which: their names and columns, where: chunk and slot."""
        left_name, right_name, columns = which
        of, head, query0, key0 = at
        chunk, slot = where
        build = self.build
        for name, head_of, start, rows, ring in (
            (left_name, head, of.query_start + query0, of.num_queries - query0, self.rings[0]),
            (right_name, lengths.key_head(build, p, head), of.key_start + key0, of.num_keys - key0, self.rings[1]),
        ):
            whole = moves.tile_of(build, p, name, (of.batch, head_of, start), rows, columns)
            chunk_of = from_column(whole, chunk * self.columns, self.columns)
            moves.load_tile(thread, build.threads, chunk_of, ring[None, None, slot])

    def load_statistic(self, address: Int64, row: Int64, name: str, thread: Int32) -> None:
        """Start copying the logsumexp or delta of a tile's rows."""
        source = params.pointer(address, Float32) + cute.assume(row, divby=16)
        moves.load_rows(thread, source, self.statistic(name))

    def multiply(self, target: cute.Tensor, slot: Int32) -> None:
        """Add the product of the chunks in `slot`."""
        parts = self.product.operands(*self.rings, params.fresh("tid.x"))
        self.product.issue(target, parts.stage(slot, slot))

    def coordinates(self) -> cute.Tensor:
        """(row, column) of each of a thread's scores, as rows x columns."""
        return row_view(self.product.coordinates(params.fresh("tid.x")))

    @cute.jit
    def weights(self, p: Any, at: Place, r_s: cute.Tensor):
        """S becomes P."""
        build = self.build
        pair, query_tile, key_tile = at
        of, head = self.sequence(p, pair)
        band = lengths.band(build, p, of)
        corner = query_tile * build.tile_m, key_tile * build.tile_n
        scores, where = row_view(r_s), self.coordinates()
        part = self.product.mma.get_slice(params.fresh("tid.x")).partition_C(self.score_tile("bias"))
        given = self.terms.slope(p, of.index, head), part
        self.terms.apply(p, scores, where, corner, band, given)
        lse = self.statistic("logsumexp")
        for row in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            exponent = scores[row, None].load() - lse[where[row, 0][0]]
            scores[row, None].store(cute.math.exp2(exponent, fastmath=True))
        if schedule.needs_mask(band, query_tile, key_tile, build.tile_m, build.tile_n):
            masking.clear(band, scores, where, corner)

    def kept(self, p: Any, at: Place) -> cute.Tensor | None:
        """The bits of the weights that dropout keeps."""
        build, (pair, query_tile, key_tile) = self.build, at
        corner = query_tile * build.tile_m, key_tile * build.tile_n
        return dropout.kept(build, p, self.coordinates(), corner, self.sequence(p, pair))

    def add_score_gradient(self, total: cute.Tensor, weights: cute.Tensor, dp: cute.Tensor) -> None:
        """Add dS = P (dP - delta)."""
        where, delta = self.coordinates(), self.statistic("delta")
        for row in range(cute.size(dp, mode=[0])):
            gradient = weights[row, None].load() * (dp[row, None].load() - delta[where[row, 0][0]])
            total[row, None].store(total[row, None].load() + gradient)

    def target(self, p: Any) -> Source:
        """This block's tile of grad_bias. Where lengths vary it has room for the longest sequences."""
        query_tile, key_tile = self.own_tile(p)
        start = query_tile * self.build.tile_m, key_tile * self.build.tile_n
        return bias_source(self.build, p, "grad_bias", (*self.own_head(p), *start), (p.num_queries, p.num_keys))

    def store_tile(self, p: Any, r_sum: cute.Tensor) -> None:
        """Write a tile that is summed over neither queries nor keys."""
        thread, tile = params.fresh("tid.x"), self.score_tile("left")
        values = moves.converted(r_sum, self.dtype)
        moves.registers_to_tile(thread, self.product.mma, values, tile, moves.has_stmatrix(self.build))
        cute.arch.sync_threads()
        moves.store_tile(thread, self.build.threads, tile, self.target(p))

    def store_sums(self, p: Any, r_sum: cute.Tensor) -> None:
        """Write a tile that is summed over rows, columns or both: over a thread's own, its warp's, then the block's."""
        build, thread, target = self.build, params.fresh("tid.x"), self.target(p)
        warp, warps = thread // WARP_THREADS, build.warps
        values, where = row_view(r_sum), self.coordinates()
        rows, columns = (cute.size(values, mode=[mode]) for mode in (0, 1))
        if self.sums_over("q") and self.sums_over("k"):
            count, step, left, lanes = 1, 0, 1, ROW_LANES + COLUMN_LANES
            own = [(0, values.load())]
        elif self.sums_over("q"):
            count, step, left, lanes = build.tile_n, target.column, target.columns, ROW_LANES
            own = [(where[0, column][1], values[None, column].load()) for column in range(columns)]
        else:
            count, step, left, lanes = build.tile_m, target.row, target.rows, COLUMN_LANES
            own = [(where[row, 0][0], values[row, None].load()) for row in range(rows)]
        partial = cute.make_tensor(moves.shared_pointer(build, "left", Float32), cute.make_layout((count, warps)))
        # A warp has sums of some places only; the others stay zero.
        clear(thread, build.threads, partial)
        cute.arch.sync_threads()
        for place, parts in own:
            total = parts.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for lane in lanes:
                total = total + cute.arch.shuffle_sync_bfly(total, offset=lane)
            moves.put(partial, (place, warp), total, thread & sum(lanes) == 0)
        cute.arch.sync_threads()
        store_line(thread, partial, target.start, step, left)


@cute.jit
def clear(thread: Int32, threads: cutlass.Constexpr, values: cute.Tensor):
    """Zeros to an array in shared memory."""
    for index in cutlass.range(thread, cute.size(values), threads, unroll=1):
        values[index] = Float32(0.0)


@cute.jit
def store_line(thread: Int32, partial: cute.Tensor, start: cute.Pointer, step: Any, left: Int32):
    """Write the sums over the warps, thread by thread, `step` elements apart, as far as there are places left."""
    if (thread < cute.size(partial, mode=[0])) & (thread < left):
        total = partial[thread, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        place = cute.make_tensor(start + thread * Int64(step), cute.make_layout(1))
        place[0] = place.element_type(Float32(total))
