"""Backward: dQ, dK, dV from dO, Q, K, V, O and the logsumexp; grid (splits, heads, batch).

Three kernels: delta (row statistics), the main kernel, and finish (dQ to its type). A block of the main kernel
keeps a key tile and its dK, dV and walks the query tiles; dQ is summed over key tiles in float32 in global memory.

    step     1 S = Q K^T   2 P   3 dP = dO V^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    in flight: the query and grad_output tiles of the next round, by cp.async
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.fused.delta import Delta
from cutlass_py_attn.fused.grad_bias import GradBias
from cutlass_py_attn.fused.grad_query import GradQuery
from cutlass_py_attn.fused.grad_sinks import GradSinks
from cutlass_py_attn.gemm import doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.gemm.mma_sync import MmaSync, row_view
from cutlass_py_attn.kernels import ROW_THREADS, entries
from cutlass_py_attn.parts import dropout, lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import ceil_div, larger
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.parts.terms import Terms, bias_of
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import OPERANDS

Params = params.struct("BackwardParams", abi.BACKWARD)


class Backward:
    """The backward kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.terms = Terms(build)
        self.dtype = DTYPES[build.dtype]
        self.promise = params.promise(build)
        self.delta = Delta(build)
        self.grad_query = GradQuery(build)
        self.grad_bias = GradBias(build)
        self.grad_sinks = GradSinks(build)
        # Blocks that walk several query heads are few and long: the longest of all heads start first, not those of one
        # head after the other.
        self.by_length = build.has("grouped") and build.mask == "causal"
        self.wants_query, self.wants_key, self.wants_value = (name in build.gradients for name in OPERANDS)

    @cute.jit
    def __call__(self, *values):
        grid = params.filled(Params, abi.BACKWARD, values).num_queries, 1, 1
        # In the order in which kernels.entries numbers them, and a struct of its own for each launch: the DSL keeps
        # the fields it has read of one with that launch.
        if cutlass.const_expr(self.build.has_main):
            params.name_entry(self.build, self.kernel)
            self.launch_main(values, grid)
        params.name_entry(self.build, self.delta_kernel, "_delta")
        self.delta_kernel(params.filled(Params, abi.BACKWARD, values)).launch(grid=grid, block=(ROW_THREADS, 1, 1))
        if cutlass.const_expr("finish" in entries(self.build)):
            params.name_entry(self.build, self.finish_kernel, "_finish")
            finish = self.finish_kernel(params.filled(Params, abi.BACKWARD, values))
            finish.launch(grid=grid, block=(self.grad_query.threads, 1, 1))
        self.launch_bias_and_sinks(values, grid)

    @cute.jit
    def launch_main(self, values: tuple, grid: tuple):
        """The main kernel."""
        block = (self.build.threads, 1, 1)
        self.kernel(params.filled(Params, abi.BACKWARD, values)).launch(grid=grid, block=block, **self.promise)

    @cute.jit
    def launch_bias_and_sinks(self, values: tuple, grid: tuple):
        """The entries behind the finish kernel, where the build has them."""
        if cutlass.const_expr("bias" in entries(self.build)):
            params.name_entry(self.build, self.bias_kernel, "_bias")
            block, promise = (self.build.threads, 1, 1), self.grad_bias.promise
            self.bias_kernel(params.filled(Params, abi.BACKWARD, values)).launch(grid=grid, block=block, **promise)
        if cutlass.const_expr("sinks" in entries(self.build)):
            params.name_entry(self.build, self.sinks_kernel, "_sinks")
            self.sinks_kernel(params.filled(Params, abi.BACKWARD, values)).launch(grid=grid, block=(ROW_THREADS, 1, 1))

    @cute.kernel
    def delta_kernel(self, p: Params):
        self.delta.run(p)

    @cute.kernel
    def finish_kernel(self, p: Params):
        self.grad_query.finish(p)

    @cute.kernel
    def bias_kernel(self, p: Params):
        self.grad_bias.run(p)

    @cute.kernel
    def sinks_kernel(self, p: Params):
        self.grad_sinks.run(p)

    @cute.kernel
    def kernel(self, p: Params):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        _, _, batch = cute.arch.block_idx()
        split, head, batch = self.own_block(), self.own_head(p), batch + p.first_batch
        self.of = lengths.sequence(build, p, batch)
        if cutlass.const_expr(build.deterministic):
            place = cute.make_tensor(moves.shared_pointer(build, "delta", Int32), cute.make_layout(1))
            split = self.grad_query.ticket(p, Int64(head) * p.batch + batch, thread, place)
        key_tiles = ceil_div(self.of.stored_keys, build.tile_n)
        for step in cutlass.range(split, key_tiles, p.num_splits_key, unroll=1):
            # Longest first under a causal mask; in turn order, that is diagonal first, when deterministic.
            key_tile = key_tiles - 1 - step if cutlass.const_expr(build.deterministic) else step
            self.one_key_tile(p, key_tile, head, thread)

    @cute.jit
    def one_key_tile(self, p: Any, key_tile: Int32, head_key: Int32, thread: Int32):
        """dK and dV of one key tile, and its share of dQ, over the query heads that read this key head."""
        build = self.build
        tiles = (build.tile_m, build.tile_n)
        key0 = key_tile * build.tile_n
        s_k, s_v, s_q, s_do, s_p, s_ds, s_bias, s_lse, s_delta = self.shared_tiles()
        rings = (s_q, s_do, s_bias, s_lse, s_delta)
        self.products()

        # 0  load the key tile and the first round
        start, end = self.visited(p, key_tile)
        rounds = self.rounds(p, start, end)
        self.load_key_tile(p, (head_key, key0), s_k, s_v, thread)
        self.load_round(p, (Int32(0), rounds, start, end, key0), rings, Int32(0), thread)
        cute.arch.cp_async_commit_group()

        r_dk, r_dv = self.dk.accumulator(thread), self.dv.accumulator(thread)
        r_dk.fill(0.0)
        r_dv.fill(0.0)

        for turn in cutlass.range(rounds, unroll=1):
            here = params.fresh("tid.x")
            slot = turn % build.query_stages
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(build.query_stages > 1):
                next_slot = (turn + 1) % build.query_stages
                self.load_round(p, (turn + 1, rounds, start, end, key0), rings, next_slot, here)
                cute.arch.cp_async_commit_group()
            of, at_head, query_tile = self.place(p, turn, start, end)
            band = lengths.band(build, p, of)
            corner = query_tile * build.tile_m, key0

            score_parts = matmul_qk.operands(self.scores, s_q, s_k, here)
            dp_parts = doivj.operands(self.dp, s_do, s_v, here)
            dv_parts = grad_v.operands(self.dv, s_p, s_do, here)
            dk_parts = grad_k.operands(self.dk, s_ds, s_q, here)
            dq_parts = grad_q.operands(self.dq, s_ds, s_k, here)
            # Before anything else needs registers.
            where = row_view(self.scores.coordinates(here))
            r_kept = dropout.kept(build, p, where, corner, (of, at_head))
            # 1  S = Q K^T
            r_s = self.scores.accumulator(thread)
            matmul_qk.issue(self.scores, r_s, self.at(score_parts, slot, None))
            # 2  P = exp2(S - logsumexp) in base 2, kept in the operands' type until dS
            r_slope = self.scaled(p, r_s, where, corner, (of, band, at_head), self.at_slot(s_bias, slot))
            self.weights(row_view(r_s), where, self.slot_of(s_lse, slot), p.scale_log2)
            if schedule.needs_mask(band, query_tile, key_tile, *tiles):
                masking.clear(band, row_view(r_s), where, corner)
            r_p = moves.converted(r_s, self.dtype)
            if cutlass.const_expr(self.wants_value):
                r_dropped = r_p if r_kept is None else masking.dropped(r_p, r_kept)
                moves.registers_to_tile(here, self.scores.mma, r_dropped, s_p, moves.has_stmatrix(build))
            # 3  dP = dO V^T
            r_dp = self.dp.accumulator(thread)
            doivj.issue(self.dp, r_dp, self.at(dp_parts, slot, None))
            # 4  dS = P (dP - delta)
            masking.keep(row_view(r_dp), r_kept, p.keep_scale)
            self.score_gradient(row_view(r_dp), row_view(r_p), where, self.slot_of(s_delta, slot))
            if cutlass.const_expr(build.has("softcap")):
                row_view(r_dp).store(row_view(r_dp).load() * r_slope.load().to(Float32))
            r_ds = moves.converted(r_dp, self.dtype)
            moves.registers_to_tile(here, self.scores.mma, r_ds, s_ds, moves.has_stmatrix(build))
            cute.arch.sync_threads()
            if cutlass.const_expr(build.bias_gradient == "main"):
                target = bias_of(build, p, "grad_bias", of, at_head, corner)
                moves.store_tile(here, build.threads, s_ds, target)
            # 5  dV += P^T dO
            if cutlass.const_expr(self.wants_value):
                grad_v.issue(self.dv, r_dv, self.at(dv_parts, None, slot))
            # 6  dK += dS^T Q
            if cutlass.const_expr(self.wants_key):
                grad_k.issue(self.dk, r_dk, self.at(dk_parts, None, slot))
            # 7  dQ = dS K
            if cutlass.const_expr(self.wants_query):
                r_dq = self.dq.accumulator(thread)
                grad_q.issue(self.dq, r_dq, dq_parts)
                tile = self.grad_query.number(p, at_head, of.first_tile + query_tile)
                if cutlass.const_expr(build.deterministic):
                    self.grad_query.wait_turn(p, tile, schedule.turn(band, query_tile, key_tile, *tiles), here)
                self.grad_query.add(self.grad_query.tile(p, tile), r_dq, here)
                if cutlass.const_expr(build.deterministic):
                    self.grad_query.pass_turn(p, tile, here)
            if cutlass.const_expr(build.query_stages == 1):
                cute.arch.sync_threads()
                self.load_round(p, (turn + 1, rounds, start, end, key0), rings, Int32(0), here)
                cute.arch.cp_async_commit_group()

        # 8  store dK and dV through the places of K and V
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        thread, head = params.fresh("tid.x"), self.own_head(p)
        r_dk.store(r_dk.load() * p.scale)
        if cutlass.const_expr(build.has("dropout")):
            r_dv.store(r_dv.load() * p.keep_scale)
        for product, values, tile in ((self.dk, r_dk, s_k), (self.dv, r_dv, s_v)):
            values = moves.converted(values, self.dtype)
            moves.registers_to_tile(thread, product.mma, values, tile, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        self.store_key_tile(p, (head, key0), s_k, s_v, thread)
        self.clear_unvisited(p, key_tile, start, end, thread)
        cute.arch.sync_threads()

    def own_block(self) -> Int32:
        """Number of this block among those of its batch and key head; formed again rather than kept in a register."""
        if not self.by_length:
            return params.fresh("ctaid.x")
        return self.number() // params.fresh("nctaid.y")

    def own_head(self, p: Any) -> Int32:
        """The key head of this block."""
        if not self.by_length:
            return params.fresh("ctaid.y") + p.first_head
        heads = params.fresh("nctaid.y")
        return self.number() % heads + p.first_head

    def number(self) -> Int32:
        """Number of this block in the order of starting."""
        return params.fresh("ctaid.y") * params.fresh("nctaid.x") + params.fresh("ctaid.x")

    def visited(self, p: Any, key_tile: Int32) -> tuple[Int32, Int32]:
        """Query tiles [start, end) that see a key of this tile."""
        tiles = lengths.band(self.build, p, self.of), key_tile, self.build.tile_m, self.build.tile_n
        start = schedule.query_tile_start(*tiles)
        return start, larger(schedule.query_tile_end(*tiles), start)

    def rounds(self, p: Any, start: Int32, end: Int32) -> Int32:
        """Rounds of one key tile: its query tiles, for each query head that reads the key head."""
        return (end - start) * p.group if self.build.has("grouped") else end - start

    def place(self, p: Any, turn: Int32, start: Int32, end: Int32) -> tuple[Any, Int32, Int32]:
        """(sequence, query head, query tile) of one round, formed again rather than kept in registers."""
        head, batch = self.own_head(p), params.fresh("ctaid.z") + p.first_batch
        of = self.of if self.build.has("varlen") else lengths.sequence(self.build, p, batch)
        if not self.build.has("grouped"):
            return of, head, start + turn
        tiles = larger(end - start, 1)
        return of, head * p.group + turn // tiles, start + turn % tiles

    def products(self) -> None:
        """The five rooms on this build's warps."""
        build = self.build
        self.scores, self.dp, self.dv, self.dk, self.dq = (
            MmaSync(room.spec(build), build.dtype) for room in (matmul_qk, doivj, grad_v, grad_k, grad_q)
        )

    def shared_tiles(self) -> tuple[cute.Tensor | None, ...]:
        """K, V, rings of Q and dO, P, dS, a ring of the bias, and rings of logsumexp and delta."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)

        def tile(name: str, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
            return moves.shared_tile(base, build.buffer(name).offset, self.dtype, rows, columns, stages)

        def vector(name: str) -> cute.Tensor:
            rows = cute.make_layout((build.tile_m, build.query_stages))
            return cute.make_tensor(moves.shared_pointer(build, name, Float32), rows)

        return (
            tile("key", build.tile_n, build.columns),
            tile("value", build.tile_n, build.columns_value),
            tile("query", build.tile_m, build.columns, build.query_stages),
            tile("grad_output", build.tile_m, build.columns_value, build.grad_output_stages),
            tile("p", build.tile_m, build.tile_n),
            tile("ds", build.tile_m, build.tile_n),
            tile("bias", build.tile_m, build.tile_n, build.query_stages) if build.has("bias") else None,
            vector("logsumexp"),
            vector("delta"),
        )

    def at(self, parts: Any, a: Int32 | None, b: Int32 | None) -> Any:
        """`parts` at a slot of their rings."""
        return parts.stage(a, b) if self.build.query_stages > 1 else parts

    def at_slot(self, ring: cute.Tensor | None, slot: Int32) -> cute.Tensor | None:
        """One slot of a ring of tiles."""
        return ring if ring is None or self.build.query_stages == 1 else ring[None, None, slot]

    def slot_of(self, ring: cute.Tensor, slot: Int32) -> cute.Tensor:
        """One slot of a ring of row statistics."""
        return ring[None, slot]

    def load_key_tile(self, p: Any, at: tuple[Any, ...], s_k: cute.Tensor, s_v: cute.Tensor, thread: Int32) -> None:
        """Start copying the key and value tiles."""
        head, key0 = at
        build, of = self.build, self.of
        start, rows = (of.batch, head, of.key_start + key0), of.num_keys - key0
        for name, columns, tile in (("key", build.head_dim, s_k), ("value", build.head_dim_value, s_v)):
            moves.load_tile(thread, build.threads, moves.tile_of(build, p, name, start, rows, columns), tile)

    @cute.jit
    def load_round(self, p: Any, which: tuple, rings: tuple, slot: Int32, thread: Int32):
        """Start copying a query tile, its grad_output and bias and its row statistics; nothing after the last round."""
        turn, rounds, start, end, key0 = which
        build = self.build
        s_q, s_do, s_bias, s_lse, s_delta = rings
        if turn < rounds:
            of, head, query_tile = self.place(p, turn, start, end)
            query0 = query_tile * build.tile_m
            at, rows = (of.batch, head, of.query_start + query0), of.num_queries - query0
            queries = moves.tile_of(build, p, "query", at, rows, build.head_dim)
            moves.load_tile(thread, build.threads, queries, self.at_slot(s_q, slot))
            grads = moves.tile_of(build, p, "grad_output", at, rows, build.head_dim_value)
            moves.load_tile(thread, build.threads, grads, self.at_slot(s_do, slot))
            if cutlass.const_expr(build.has("bias")):
                bias = bias_of(build, p, "bias", of, head, (query0, key0))
                moves.load_tile(thread, build.threads, bias, self.at_slot(s_bias, slot))
            tile = self.grad_query.number(p, head, of.first_tile + query_tile)
            first = cute.assume(tile * build.tile_m, divby=16)
            moves.load_rows(thread, params.pointer(p.logsumexp_log2, Float32) + first, s_lse[None, slot])
            moves.load_rows(thread, params.pointer(p.delta, Float32) + first, s_delta[None, slot])

    def scaled(
        self, p: Any, scores: cute.Tensor, where: cute.Tensor, corner: tuple, at: tuple, s_bias: cute.Tensor | None
    ) -> cute.Tensor | None:
        """With score terms, raw products become scores in base 2; the slope of the softcap if there is one."""
        if not self.terms.present:
            return None
        of, band, head = at
        bias = None
        if self.build.has("bias"):
            bias = self.scores.mma.get_slice(params.fresh("tid.x")).partition_C(s_bias)
        given = self.terms.slope(p, of.index, head), bias
        slope = self.terms.apply(p, row_view(scores), where, corner, band, given)
        return None if slope is None else moves.converted(slope, self.dtype)

    def weights(self, scores: cute.Tensor, where: cute.Tensor, lse: cute.Tensor, scale_log2: Float32) -> None:
        """S becomes P."""
        for row in range(cute.size(scores, mode=[0])):
            exponent = scores[row, None].load() * (1.0 if self.terms.present else scale_log2)
            exponent = exponent - lse[where[row, 0][0]]
            scores[row, None].store(cute.math.exp2(exponent, fastmath=True))

    def score_gradient(self, dp: cute.Tensor, p: cute.Tensor, where: cute.Tensor, delta: cute.Tensor) -> None:
        """dP becomes dS."""
        for row in range(cute.size(dp, mode=[0])):
            dp[row, None].store(p[row, None].load().to(Float32) * (dp[row, None].load() - delta[where[row, 0][0]]))

    def store_key_tile(self, p: Any, at: tuple[Any, ...], s_dk: cute.Tensor, s_dv: cute.Tensor, thread: Int32) -> None:
        """Write dK and dV; keys that the sequence has but does not use get zeros."""
        head, key0 = at
        build, of = self.build, self.of
        start, rows = (of.batch, head, of.key_start + key0), of.stored_keys - key0
        if self.wants_key:
            dk = moves.tile_of(build, p, "grad_key", start, rows, build.head_dim)
            moves.store_tile(thread, build.threads, s_dk, dk)
        if self.wants_value:
            dv = moves.tile_of(build, p, "grad_value", start, rows, build.head_dim_value)
            moves.store_tile(thread, build.threads, s_dv, dv)

    @cute.jit
    def clear_unvisited(self, p: Any, key_tile: Int32, start: Int32, end: Int32, thread: Int32):
        """grad_bias of the query tiles that see no key of this tile."""
        build = self.build
        if cutlass.const_expr(build.bias_gradient == "main" and build.mask != "full"):
            all_tiles = ceil_div(self.of.num_queries, build.tile_m)
            for step in cutlass.range(self.rounds(p, Int32(0), all_tiles), unroll=1):
                of, at_head, query_tile = self.place(p, step, Int32(0), all_tiles)
                if (query_tile < start) | (query_tile >= end):
                    corner = query_tile * build.tile_m, key_tile * build.tile_n
                    target = bias_of(build, p, "grad_bias", of, at_head, corner)
                    moves.clear_tile(thread, build.threads, (build.tile_m, build.tile_n), self.dtype, target)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return Backward(build), params.representative(abi.BACKWARD)
