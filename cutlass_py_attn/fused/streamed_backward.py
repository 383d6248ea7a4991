"""Streamed backward: dQ, dK, dV for heads too wide to hold; grid (splits x blocks that share a key tile, heads, batch).

As the backward, but a block accumulates one column block of dK and dV, or of one of them, and adds one of dQ where it
has dK. In each round S and dP are summed over the whole head, from chunks of columns that come through a ring of
slots; then rows of dO's and Q's column block come through it. K and V stay in shared memory if they fit; else their
chunks come with those of Q and dO, and only K's column block stays, for dQ.

    step        1 S += Q K^T   2 P   3 dP += dO V^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    in flight: the next steps, as many as the ring has slots, less one
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.fused.backward import Backward, Params
from cutlass_py_attn.fused.streamed import Chain, Later, from_column, load_rows, part_at, tile_at
from cutlass_py_attn.gemm import doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.gemm.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.parts import dropout, lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import any_of, ceil_div, choose
from cutlass_py_attn.parts.streaming import tile_and_column_block
from cutlass_py_attn.parts.terms import bias_of
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import tile_bytes
from cutlass_py_attn.streams import Side, backward_cut, blocks_of_tile, is_apart, shares

KEYS_AT_ONCE = 16  # of a float32 product dQ = dS K


class StreamedBackward(Backward):
    """The backward kernels of one Build with a column block."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.cut = backward_cut(build)
        self.is_apart, self.shares, self.blocks = is_apart(build), shares(build), blocks_of_tile(build)

    @cute.kernel
    def kernel(self, p: Params):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        _, _, batch = cute.arch.block_idx()
        split, number = tile_and_column_block(self.own_block(), self.blocks)
        head, batch = self.own_head(p), batch + p.first_batch
        self.of = lengths.sequence(build, p, batch)
        self.share_work(number)
        if cutlass.const_expr(build.deterministic):
            # Blocks with other columns add to other sums: nobody waits for them.
            counter = (Int64(head) * p.batch + batch) * self.blocks + number
            place = cute.make_tensor(moves.shared_pointer(build, "statistics", Int32), cute.make_layout(1))
            split = self.grad_query.ticket(p, counter, thread, place)
        key_tiles = ceil_div(self.of.stored_keys, build.tile_n)
        for step in cutlass.range(split, key_tiles, p.num_splits_key, unroll=1):
            key_tile = key_tiles - 1 - step if cutlass.const_expr(build.deterministic) else step
            self.one_key_tile(p, key_tile, thread)

    def share_work(self, number: Int32) -> None:
        """What the block of this number, of those that share a key tile, computes, and the last step of each kind in
        a round. A condition is a Python bool where it holds for all of them or for none."""
        key, value = self.cut.key, self.cut.value
        keys, values = self.shares
        in_key = self.is_below(number, keys)
        in_value = self.is_below(number, values)
        if self.is_apart:
            in_value = not in_key if isinstance(in_key, bool) else number >= keys
        self.to_query = in_key if self.wants_query else False
        self.to_key = in_key if self.wants_key else False
        self.to_value = in_value if self.wants_value else False
        self.to_bias = self.is_below(number, 1) if self.build.bias_gradient == "main" else False
        self.to_scores = any_of(self.to_query, self.to_key, self.to_bias)
        steps = key.steps, value.steps, value.parts, key.parts
        ends, last = [], 0
        for count, is_needed in zip(steps, (True, self.to_scores, self.to_value, self.to_key), strict=True):
            last = last + choose(is_needed, count, 0)
            ends.append(last)
        self.ends = tuple(ends)

    def is_below(self, number: Int32, end: int) -> Any:
        """Whether this block's number lies below `end`."""
        return end == self.blocks if end in (0, self.blocks) else number < end

    @cute.jit
    def one_key_tile(self, p: Any, key_tile: Int32, thread: Int32):
        """dK and dV of one key tile, and its share of dQ, over the query heads that read this key head."""
        build, cut, stages = self.build, self.cut, self.build.query_stages
        tiles = (build.tile_m, build.tile_n)
        s_p, s_ds, s_lse, s_delta = self.score_tiles()
        self.products()
        after_scores, after_dp, after_dv, steps = self.ends

        # 0  start the first steps
        start, end = self.visited(p, key_tile)
        rounds = self.rounds(p, start, end)
        at = (rounds, start, end, key_tile)
        self.load_key_block(p, key_tile, thread)
        for step in cutlass.range(stages - 1, unroll=1):
            self.load_step(p, step, at, thread)
            cute.arch.cp_async_commit_group()

        r_dk, r_dv = self.accumulators()
        r_dk.fill(0.0)
        r_dv.fill(0.0)

        for turn in cutlass.range(rounds, unroll=1):
            of, at_head, query_tile = self.place(p, turn, start, end)
            band = lengths.band(build, p, of)
            corner = query_tile * build.tile_m, key_tile * build.tile_n
            before = turn * steps

            # 1  S = Q K^T
            r_s = self.scores.accumulator(thread)
            r_s.fill(0.0)
            for chunk in cutlass.range(cut.key.steps, unroll=1):
                here = params.fresh("tid.x")
                slot = self.advance(p, before + chunk, at, here)
                if chunk == 0:
                    self.load_bias(p, of, at_head, corner, here)
                cute.arch.cp_async_commit_group()
                s_q, s_k = self.chunk_tiles(cut.key, chunk, slot)
                matmul_qk.issue(self.scores, r_s, matmul_qk.operands(self.scores, s_q, s_k, here))

            # 2  P = exp2(S - logsumexp) in base 2, kept in the operands' type until dS
            here = params.fresh("tid.x")
            where = row_view(self.scores.coordinates(here))
            self.wait_for_bias()
            r_slope = self.scaled(p, r_s, where, corner, (of, band, at_head), s_ds)
            self.weights(row_view(r_s), where, s_lse[None, turn % stages], p.scale_log2)
            if schedule.needs_mask(band, query_tile, key_tile, *tiles):
                masking.clear(band, row_view(r_s), where, corner)
            r_p = moves.converted(r_s, self.dtype)
            r_kept = dropout.kept(build, p, where, corner, (of, at_head))
            if self.to_value:
                self.store_weights(r_p if r_kept is None else masking.dropped(r_p, r_kept), s_p, here)

            if self.to_scores:
                # 3  dP = dO V^T
                r_dp = self.dp.accumulator(thread)
                r_dp.fill(0.0)
                for chunk in cutlass.range(cut.value.steps, unroll=1):
                    here = params.fresh("tid.x")
                    slot = self.advance(p, before + after_scores + chunk, at, here)
                    cute.arch.cp_async_commit_group()
                    s_do, s_v = self.chunk_tiles(cut.value, chunk, slot)
                    doivj.issue(self.dp, r_dp, doivj.operands(self.dp, s_do, s_v, here))
                # 4  dS = P (dP - delta)
                here = params.fresh("tid.x")
                where = row_view(self.scores.coordinates(here))
                masking.keep(row_view(r_dp), r_kept, p.keep_scale)
                self.score_gradient(row_view(r_dp), row_view(r_p), where, s_delta[None, turn % stages])
                if cutlass.const_expr(build.has("softcap")):
                    row_view(r_dp).store(row_view(r_dp).load() * r_slope.load().to(Float32))
                r_ds = moves.converted(r_dp, self.dtype)
                moves.registers_to_tile(here, self.scores.mma, r_ds, s_ds, moves.has_stmatrix(build))
            cute.arch.sync_threads()
            here = params.fresh("tid.x")
            if self.to_bias:
                self.store_grad_bias(p, of, at_head, corner, s_ds, here)
            # 5  dV += P^T dO
            if self.to_value:
                for part in cutlass.range_constexpr(cut.value.parts):
                    slot = self.advance(p, before + after_dp + part, at, here)
                    cute.arch.cp_async_commit_group()
                    self.add_rows(self.dv, r_dv, s_p, (part, slot, cut.value), here)
            # 6  dK += dS^T Q
            if self.to_key:
                for part in cutlass.range_constexpr(cut.key.parts):
                    slot = self.advance(p, before + after_dv + part, at, here)
                    cute.arch.cp_async_commit_group()
                    self.add_rows(self.dk, r_dk, s_ds, (part, slot, cut.key), here)
            # 7  dQ = dS K
            if self.to_query:
                self.add_to_query(p, s_ds, (turn, start, end, key_tile), params.fresh("tid.x"))

        # 8  store dK and dV through the place of all tiles
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        here = params.fresh("tid.x")
        if self.to_key:
            r_dk.store(r_dk.load() * p.scale)
            self.store_block(p, "grad_key", key_tile, self.dk, r_dk, here)
        if self.to_value:
            if cutlass.const_expr(build.has("dropout")):
                r_dv.store(r_dv.load() * p.keep_scale)
            self.store_block(p, "grad_value", key_tile, self.dv, r_dv, here)
        if self.to_bias:
            self.clear_unvisited(p, key_tile, start, end, here)

    def column_block(self) -> Int32:
        """The column block of this block, formed again rather than kept in a register."""
        _, number = tile_and_column_block(self.own_block(), self.blocks)
        keys, values = self.shares
        # Blocks for dK come first, for they take longer.
        return cutlass.select_(number < keys, number, number - keys) if self.is_apart and keys and values else number

    def products(self) -> None:
        """The five rooms: S and dP over a chunk, dV and dK over some queries, dQ over the key tile."""
        build, key, value = self.build, self.cut.key, self.cut.value
        self.scores, self.dp, self.dv, self.dk = (
            MmaSync(spec, build.dtype)
            for spec in (
                replace(matmul_qk.spec(build), k=key.chunk, accumulate=True),
                replace(doivj.spec(build), k=value.chunk, accumulate=True),
                replace(grad_v.spec(build), n=value.piece, k=value.rows),
                replace(grad_k.spec(build), n=key.piece, k=key.rows),
            )
        )
        keys = build.tile_n if build.item_bytes == 2 else KEYS_AT_ONCE
        self.dq = Chain(replace(grad_q.spec(build), n=self.grad_query.columns, k=keys), build.dtype)

    def accumulators(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Registers for dK and dV, of one piece of columns after the other; the same ones where a block has one of
        them only."""
        layouts = []
        for product, side in ((self.dk, self.cut.key), (self.dv, self.cut.value)):
            piece = product.mma.get_slice(0).partition_shape_C((self.build.tile_n, side.piece))
            layouts.append(cute.make_layout((*piece, side.width // side.piece)))
        if not self.is_apart:
            return tuple(cute.make_rmem_tensor(layout, Float32) for layout in layouts)
        shared = cute.make_rmem_tensor(max(cute.size(layout) for layout in layouts), Float32)
        return tuple(cute.make_tensor(shared.iterator, layout) for layout in layouts)

    def score_tiles(self) -> tuple[cute.Tensor, ...]:
        """P, dS, and rings of logsumexp and delta: rounds that start while the ring runs ahead have slots of theirs."""
        build, stages = self.build, self.build.query_stages
        names = ("ds", "ds") if self.is_apart else ("p", "ds")
        p, ds = (tile_at(build.buffer(name).offset, self.dtype, build.tile_m, build.tile_n) for name in names)
        rows = cute.make_layout((build.tile_m, stages))
        statistics = moves.shared_pointer(build, "statistics", Float32)
        starts = statistics, statistics + build.tile_m * stages
        return p, ds, *(cute.make_tensor(start, rows) for start in starts)

    def slot(self, slot: Int32) -> Int32:
        """Where a slot of the ring starts."""
        return self.build.buffer("ring").offset + slot * self.cut.slot_bytes

    def chunk_tiles(self, side: Side, chunk: Int32, slot: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """One chunk of Q and K, or of dO and V."""
        build, start = self.build, self.slot(slot)
        rows = tile_at(start, self.dtype, build.tile_m, side.chunk)
        if not side.keeps:
            behind = start + tile_bytes(build.dtype, build.tile_m, side.chunk)
            return rows, tile_at(behind, self.dtype, build.tile_n, side.chunk)
        whole = build.buffer("key" if side is self.cut.key else "value").offset
        columns = chunk * side.chunk, side.chunk
        return rows, part_at(whole, build, build.tile_n, side.columns, columns)

    def key_block(self, piece: Any, width: int) -> cute.Tensor:
        """Piece number `piece` of K's column block, `width` columns wide."""
        build, key = self.build, self.cut.key
        first = self.column_block() * key.width if key.keeps and key.blocks > 1 else 0
        whole = key.columns if key.keeps else key.width
        return part_at(build.buffer("key").offset, build, build.tile_n, whole, (first + piece * width, width))

    def advance(self, p: Any, step: Int32, at: tuple, thread: Int32) -> Int32:
        """Wait for a step, start filling the slot of the one before it again, without commit; the step's slot."""
        stages = self.build.query_stages
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        self.load_step(p, step + stages - 1, at, thread)
        return step % stages

    @cute.jit
    def load_step(self, p: Any, step: Int32, at: tuple, thread: Int32):
        """Start filling the slot of a step; nothing after the last."""
        cut, (rounds, start, end, key_tile) = self.cut, at
        after_scores, after_dp, after_dv, steps = self.ends
        turn = step // steps
        index = step - turn * steps
        slot = step % self.build.query_stages
        if turn < rounds:
            of, head, query_tile = self.place(p, turn, start, end)
            first = query_tile * self.build.tile_m
            of_queries = (of.batch, head, of.query_start + first), of.num_queries - first
            if index < after_scores:
                if index == 0:
                    self.load_statistics(p, self.grad_query.number(p, head, of.first_tile + query_tile), turn, thread)
                self.load_chunk(p, cut.key, of_queries, (index, slot), thread)
                if (turn == 0) | (not cut.key.keeps):
                    self.load_keys(p, cut.key, key_tile, (index, slot), thread)
            elif index < after_dp:
                self.load_chunk(p, cut.value, of_queries, (index - after_scores, slot), thread)
                if (turn == 0) | (not cut.value.keeps):
                    self.load_keys(p, cut.value, key_tile, (index - after_scores, slot), thread)
            elif index < after_dv:
                self.load_part(p, cut.value, of_queries, (index - after_dp, slot), thread)
            else:
                self.load_part(p, cut.key, of_queries, (index - after_dv, slot), thread)

    def load_statistics(self, p: Any, tile: Int64, turn: Int32, thread: Int32) -> None:
        """Start copying logsumexp and delta of a query tile."""
        _, _, s_lse, s_delta = self.score_tiles()
        slot = turn % self.build.query_stages
        first = cute.assume(tile * self.build.tile_m, divby=16)
        moves.load_rows(thread, params.pointer(p.logsumexp_log2, Float32) + first, s_lse[None, slot])
        moves.load_rows(thread, params.pointer(p.delta, Float32) + first, s_delta[None, slot])

    def load_chunk(self, p: Any, side: Side, at: tuple, which: tuple[Int32, Int32], thread: Int32) -> None:
        """Start copying a chunk of Q or dO; which: chunk and slot."""
        tile, _ = self.chunk_tiles(side, *which)
        source = from_column(self.query_rows(p, side, at), which[0] * side.chunk, side.chunk)
        moves.load_tile(thread, self.build.threads, source, tile)

    def load_keys(self, p: Any, side: Side, key_tile: Int32, which: tuple[Int32, Int32], thread: Int32) -> None:
        """Start copying a chunk of K or V; which: chunk and slot."""
        _, tile = self.chunk_tiles(side, *which)
        source = from_column(self.key_rows(p, side, key_tile), which[0] * side.chunk, side.chunk)
        moves.load_tile(thread, self.build.threads, source, tile)

    def load_part(self, p: Any, side: Side, at: tuple, which: tuple[Int32, Int32], thread: Int32) -> None:
        """Start copying some rows of the column block of Q or dO; which: part and slot."""
        part, slot = which
        (batch, head, row), left = at
        first = part * side.rows
        source = self.query_rows(p, side, ((batch, head, row + first), left - first))
        if side.blocks > 1:
            source = from_column(source, self.column_block() * side.width, side.width)
        load_rows(thread, self.build, source, self.slot(slot), (side.rows, side.width))

    @cute.jit
    def load_key_block(self, p: Any, key_tile: Int32, thread: Int32):
        """Start copying K's column block where K does not stay."""
        if cutlass.const_expr(self.wants_query and not self.cut.key.keeps):  # noqa: SIM102
            if self.to_query:
                width = self.cut.key.width
                source = from_column(self.key_rows(p, self.cut.key, key_tile), self.column_block() * width, width)
                moves.load_tile(thread, self.build.threads, source, self.key_block(0, width))

    def query_rows(self, p: Any, side: Side, at: tuple) -> moves.Source:
        """Rows of Q or dO from (batch, head, row) on, of which so many are left."""
        is_query = side is self.cut.key
        columns = self.build.head_dim if is_query else self.build.head_dim_value
        return moves.tile_of(self.build, p, "query" if is_query else "grad_output", *at, columns)

    def key_rows(self, p: Any, side: Side, key_tile: Int32) -> moves.Source:
        """Rows of K or V from the first of the key tile on."""
        build, of, is_key = self.build, self.of, side is self.cut.key
        key0, head = key_tile * build.tile_n, self.own_head(p)
        at, columns = (of.batch, head, of.key_start + key0), build.head_dim if is_key else build.head_dim_value
        return moves.tile_of(build, p, "key" if is_key else "value", at, of.num_keys - key0, columns)

    def load_bias(self, p: Any, of: lengths.Sequence, head: Int32, corner: tuple, thread: Int32) -> None:
        """Start copying the bias of a tile of scores to where dS will be."""
        if self.build.has("bias"):
            _, s_bias, _, _ = self.score_tiles()
            moves.load_tile(thread, self.build.threads, bias_of(self.build, p, "bias", of, head, corner), s_bias)

    def store_weights(self, weights: cute.Tensor, s_p: cute.Tensor, thread: Int32) -> None:
        """P to shared memory, perhaps to the place of the bias."""
        if self.is_apart and self.build.has("bias"):
            cute.arch.sync_threads()
        moves.registers_to_tile(thread, self.scores.mma, weights, s_p, moves.has_stmatrix(self.build))

    def store_grad_bias(
        self, p: Any, of: lengths.Sequence, head: Int32, corner: tuple, s_ds: cute.Tensor, thread: Int32
    ) -> None:
        """Write dS as the gradient of the bias."""
        if self.build.bias_gradient == "main":
            target = bias_of(self.build, p, "grad_bias", of, head, corner)
            moves.store_tile(thread, self.build.threads, s_ds, target)

    def wait_for_bias(self) -> None:
        """The bias came with the first step of this round; more steps than slots have waited for it."""
        if self.build.has("bias") and self.cut.key.steps < self.build.query_stages:
            cute.arch.cp_async_wait_group(self.cut.key.steps - 1)
            cute.arch.sync_threads()

    def add_rows(self, product: MmaSync, values: cute.Tensor, scores: cute.Tensor, which: tuple, thread: Int32) -> None:
        """dV += P^T dO or dK += dS^T Q over some queries."""
        part, slot, side = which
        first = part * side.rows // product.spec.instruction[2]
        weights = Later(product.a_operand(transposed(scores), thread), first)
        for piece in range(side.width // side.piece):
            columns = piece * side.piece, side.piece
            rows = part_at(self.slot(slot), self.build, side.rows, side.width, columns)
            parts = Operands(weights, product.b_operand(transposed(rows), thread))
            product.issue(values[None, None, None, piece], parts)

    @cute.jit
    def add_to_query(self, p: Any, s_ds: cute.Tensor, at: tuple, thread: Int32):
        """dQ = dS K, added to its sums, one after the other."""
        build, (turn, start, end, key_tile) = self.build, at
        of, head, query_tile = self.place(p, turn, start, end)
        number, columns = self.grad_query.number(p, head, of.first_tile + query_tile), self.grad_query.columns
        number = self.grad_query.sum_number(number, self.column_block() * self.cut.key.width)
        tiles_before = Int32(0)
        if cutlass.const_expr(build.deterministic):
            tiles = lengths.band(build, p, of), query_tile, key_tile, build.tile_m, build.tile_n
            tiles_before = schedule.turn(*tiles)
        for piece in cutlass.range(self.cut.key.width // columns, unroll=1):
            here = params.fresh("tid.x")
            r_dq = self.dq.accumulator(here)
            self.multiply_keys(r_dq, s_ds, self.key_block(piece, columns), here)
            if cutlass.const_expr(build.deterministic):
                self.wait_before(p, piece, number, tiles_before, here)
            self.grad_query.add(self.grad_query.tile(p, number + piece), r_dq, here)
        if cutlass.const_expr(build.deterministic):
            self.grad_query.pass_turn(p, number, thread)

    @cute.jit
    def wait_before(self, p: Any, piece: Int32, number: Int64, tiles_before: Int32, thread: Int32):
        """Wait for this block's turn before it adds its first piece."""
        if piece == 0:
            self.grad_query.wait_turn(p, number, tiles_before, thread)

    @cute.jit
    def multiply_keys(self, r_dq: cute.Tensor, s_ds: cute.Tensor, keys: cute.Tensor, thread: Int32):
        """dQ = dS K, in 32 bits some keys at a time: the whole product would be laid open to ptxas, which then has
        so many operands under way that others must leave the registers."""
        r_dq.fill(0.0)
        count = self.dq.spec.k
        if cutlass.const_expr(count == self.build.tile_n):
            self.dq.issue(r_dq, grad_q.operands(self.dq, s_ds, keys, thread))
        else:
            for part in cutlass.range(self.build.tile_n // count, unroll=1):
                scores = cute.local_tile(s_ds, (self.build.tile_m, count), (0, part))
                rows = cute.local_tile(keys, (count, cute.size(keys, mode=[1])), (part, 0))
                self.dq.issue(r_dq, grad_q.operands(self.dq, scores, rows, thread))

    def store_block(
        self, p: Any, name: str, key_tile: Int32, product: MmaSync, values: cute.Tensor, thread: Int32
    ) -> None:
        """Write a column block of dK or dV; keys that the sequence has but does not use get zeros."""
        build, of = self.build, self.of
        side = self.cut.key if name == "grad_key" else self.cut.value
        for piece in range(side.width // side.piece):
            columns = part_at(0, build, build.tile_n, side.width, (piece * side.piece, side.piece))
            part = moves.converted(values[None, None, None, piece], self.dtype)
            moves.registers_to_tile(thread, product.mma, part, columns, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        tile = tile_at(0, self.dtype, build.tile_n, side.width)
        key0, head = key_tile * build.tile_n, self.own_head(p)
        columns = build.head_dim if name == "grad_key" else build.head_dim_value
        at, left = (of.batch, head, of.key_start + key0), of.stored_keys - key0
        target = moves.tile_of(build, p, name, at, left, columns)
        if side.blocks > 1:
            target = from_column(target, self.column_block() * side.width, side.width)
        moves.store_tile(thread, build.threads, tile, target)
        cute.arch.sync_threads()


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return StreamedBackward(build), params.representative(abi.BACKWARD)
