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
from cutlass_py_attn.fused.grad_query import GradQuery
from cutlass_py_attn.gemm import doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.gemm.mma_sync import DTYPES, MmaSync, row_view
from cutlass_py_attn.parts import masking, moves, params, schedule
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import DELTA_THREADS

Params = params.struct("BackwardParams", abi.BACKWARD)


class Backward:
    """The three backward kernels of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.mask = build.mask_object
        self.dtype = DTYPES[build.dtype]
        self.promise = params.promise(build)
        self.delta = Delta(build)
        self.grad_query = GradQuery(build)

    @cute.jit
    def __call__(self, *values):
        symbol, threads = self.build.symbol, self.build.threads
        grid = params.filled(Params, abi.BACKWARD, values).num_queries, 1, 1
        self.delta_kernel.set_name_prefix(f"{symbol}_delta", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.finish_kernel.set_name_prefix(f"{symbol}_finish", remove_cutlass_symbol=True, keep_mangled_name=False)
        # A struct of its own for each launch: the DSL keeps the fields it has read of one with that launch.
        main, delta, finish = (params.filled(Params, abi.BACKWARD, values) for _ in range(3))
        self.kernel(main).launch(grid=grid, block=(threads, 1, 1), **self.promise)
        self.delta_kernel(delta).launch(grid=grid, block=(DELTA_THREADS, 1, 1))
        self.finish_kernel(finish).launch(grid=grid, block=(threads, 1, 1))

    @cute.kernel
    def delta_kernel(self, p: Params):
        self.delta.run(p)

    @cute.kernel
    def finish_kernel(self, p: Params):
        self.grad_query.finish(p)

    @cute.kernel
    def kernel(self, p: Params):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        split, head, batch = cute.arch.block_idx()
        if cutlass.const_expr(build.deterministic):
            place = cute.make_tensor(moves.shared_pointer(build, "delta", Int32), cute.make_layout(1))
            split = self.grad_query.ticket(p, Int64(batch) * p.num_heads + head, thread, place)
        key_tiles = ceil_div(p.num_keys, build.tile_n)
        for step in cutlass.range(split, key_tiles, p.num_splits_key, unroll=1):
            # Longest first under a causal mask; in turn order, that is diagonal first, when deterministic.
            key_tile = key_tiles - 1 - step if cutlass.const_expr(build.deterministic) else step
            self.one_key_tile(p, key_tile, head, batch, thread)

    @cute.jit
    def one_key_tile(self, p: Any, key_tile: Int32, head: Int32, batch: Int32, thread: Int32):
        """dK and dV of one key tile, and its share of dQ."""
        build, mask = self.build, self.mask
        lengths = (p.num_queries, p.num_keys)
        tiles = (build.tile_m, build.tile_n, *lengths)
        key0 = key_tile * build.tile_n
        s_k, s_v, s_q, s_do, s_p, s_ds, s_lse, s_delta = self.shared_tiles()
        self.products()

        # 0  load the key tile and the first round
        start = schedule.query_tile_start(mask, key_tile, *tiles)
        self.load_key_tile(p, (batch, head, key0), s_k, s_v, thread)
        self.load_round(p, (batch, head, start), (s_q, s_do, s_lse, s_delta), Int32(0), thread)
        cute.arch.cp_async_commit_group()

        r_dk, r_dv = self.dk.accumulator(thread), self.dv.accumulator(thread)
        r_dk.fill(0.0)
        r_dv.fill(0.0)

        for query_tile in cutlass.range(start, p.query_tiles, unroll=1):
            here, at_head, at_batch = (params.fresh(name) for name in ("tid.x", "ctaid.y", "ctaid.z"))
            slot = (query_tile - start) % build.query_stages
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(build.query_stages > 1):
                next_slot = (query_tile + 1 - start) % build.query_stages
                self.load_round(p, (at_batch, at_head, query_tile + 1), (s_q, s_do, s_lse, s_delta), next_slot, here)
                cute.arch.cp_async_commit_group()

            score_parts = matmul_qk.operands(self.scores, s_q, s_k, here)
            dp_parts = doivj.operands(self.dp, s_do, s_v, here)
            dv_parts = grad_v.operands(self.dv, s_p, s_do, here)
            dk_parts = grad_k.operands(self.dk, s_ds, s_q, here)
            dq_parts = grad_q.operands(self.dq, s_ds, s_k, here)
            # 1  S = Q K^T
            r_s = self.scores.accumulator(thread)
            matmul_qk.issue(self.scores, r_s, self.at(score_parts, slot, None))
            where = row_view(self.scores.coordinates(here))
            # 2  P = exp2(S scale_log2 - logsumexp_log2), kept in the operands' type until dS
            self.weights(row_view(r_s), where, self.slot_of(s_lse, slot), p.scale_log2)
            if schedule.needs_mask(mask, query_tile, key_tile, *tiles):
                masking.clear(mask, row_view(r_s), where, (query_tile * build.tile_m, key0), lengths)
            r_p = moves.converted(r_s, self.dtype)
            moves.registers_to_tile(here, self.scores.mma, r_p, s_p, moves.has_stmatrix(build))
            # 3  dP = dO V^T
            r_dp = self.dp.accumulator(thread)
            doivj.issue(self.dp, r_dp, self.at(dp_parts, slot, None))
            # 4  dS = P (dP - delta)
            self.score_gradient(row_view(r_dp), row_view(r_p), where, self.slot_of(s_delta, slot))
            r_ds = moves.converted(r_dp, self.dtype)
            moves.registers_to_tile(here, self.scores.mma, r_ds, s_ds, moves.has_stmatrix(build))
            cute.arch.sync_threads()
            # 5  dV += P^T dO
            grad_v.issue(self.dv, r_dv, self.at(dv_parts, None, slot))
            # 6  dK += dS^T Q
            grad_k.issue(self.dk, r_dk, self.at(dk_parts, None, slot))
            # 7  dQ = dS K
            group = Int64(at_batch) * p.num_heads + at_head
            r_dq = self.dq.accumulator(thread)
            grad_q.issue(self.dq, r_dq, dq_parts)
            if cutlass.const_expr(build.deterministic):
                turn = schedule.contributions(mask, query_tile, *tiles) - 1 - key_tile
                self.grad_query.wait_turn(p, group, query_tile, turn, here)
            self.grad_query.add(self.grad_query.tile(p, group, query_tile), r_dq, here)
            if cutlass.const_expr(build.deterministic):
                self.grad_query.pass_turn(p, group, query_tile, here)
            if cutlass.const_expr(build.query_stages == 1):
                cute.arch.sync_threads()
                self.load_round(p, (at_batch, at_head, query_tile + 1), (s_q, s_do, s_lse, s_delta), Int32(0), here)
                cute.arch.cp_async_commit_group()

        # 8  store dK and dV through the places of K and V
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        thread, head, batch = params.fresh("tid.x"), params.fresh("ctaid.y"), params.fresh("ctaid.z")
        r_dk.store(r_dk.load() * p.scale)
        for product, values, tile in ((self.dk, r_dk, s_k), (self.dv, r_dv, s_v)):
            values = moves.converted(values, self.dtype)
            moves.registers_to_tile(thread, product.mma, values, tile, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        self.store_key_tile(p, (batch, head, key0), s_k, s_v, thread)
        cute.arch.sync_threads()

    def products(self) -> None:
        """The five rooms on this build's warps."""
        build = self.build
        self.scores, self.dp, self.dv, self.dk, self.dq = (
            MmaSync(room.spec(build), build.dtype) for room in (matmul_qk, doivj, grad_v, grad_k, grad_q)
        )

    def shared_tiles(self) -> tuple[cute.Tensor, ...]:
        """K, V, rings of Q and dO, P, dS, and rings of logsumexp and delta."""
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
            vector("logsumexp"),
            vector("delta"),
        )

    def at(self, parts: Any, a: Int32 | None, b: Int32 | None) -> Any:
        """`parts` at a slot of their rings."""
        return parts.stage(a, b) if self.build.query_stages > 1 else parts

    def slot_of(self, ring: cute.Tensor, slot: Int32) -> cute.Tensor:
        """One slot of a ring of row statistics."""
        return ring[None, slot]

    def load_key_tile(self, p: Any, at: tuple[Any, ...], s_k: cute.Tensor, s_v: cute.Tensor, thread: Int32) -> None:
        """Start copying the key and value tiles."""
        batch, head, key0 = at
        build, rows = self.build, p.num_keys - key0
        keys = params.slice_at(p.key, self.dtype, (batch, p.key_batch), (head, p.key_head), (key0, p.key_row))
        values = params.slice_at(p.value, self.dtype, (batch, p.value_batch), (head, p.value_head), (key0, p.value_row))
        moves.load_tile(thread, build.threads, keys, p.key_row, rows, build.head_dim, s_k)
        moves.load_tile(thread, build.threads, values, p.value_row, rows, build.head_dim_value, s_v)

    @cute.jit
    def load_round(self, p: Any, at: tuple, rings: tuple, slot: Int32, thread: Int32):
        """Start copying a query tile, its grad_output tile and its row statistics; nothing past the last tile."""
        batch, head, query_tile = at
        build, query0 = self.build, query_tile * self.build.tile_m
        s_q, s_do, s_lse, s_delta = rings
        if cutlass.const_expr(build.query_stages > 1):
            s_q, s_do = s_q[None, None, slot], s_do[None, None, slot]
        if query_tile < p.query_tiles:
            rows = p.num_queries - query0
            queries = params.slice_at(
                p.query, self.dtype, (batch, p.query_batch), (head, p.query_head), (query0, p.query_row)
            )
            moves.load_tile(thread, build.threads, queries, p.query_row, rows, build.head_dim, s_q)
            grads = params.slice_at(
                p.grad_output,
                self.dtype,
                (batch, p.grad_output_batch),
                (head, p.grad_output_head),
                (query0, p.grad_output_row),
            )
            moves.load_tile(thread, build.threads, grads, p.grad_output_row, rows, build.head_dim_value, s_do)
            first = (Int64(batch) * p.num_heads + head) * p.query_tiles * build.tile_m + query0
            first = cute.assume(first, divby=16)
            moves.load_rows(thread, params.pointer(p.logsumexp_log2, Float32) + first, s_lse[None, slot])
            moves.load_rows(thread, params.pointer(p.delta, Float32) + first, s_delta[None, slot])

    def weights(self, scores: cute.Tensor, where: cute.Tensor, lse: cute.Tensor, scale_log2: Float32) -> None:
        """S becomes P."""
        for row in range(cute.size(scores, mode=[0])):
            exponent = scores[row, None].load() * scale_log2 - lse[where[row, 0][0]]
            scores[row, None].store(cute.math.exp2(exponent, fastmath=True))

    def score_gradient(self, dp: cute.Tensor, p: cute.Tensor, where: cute.Tensor, delta: cute.Tensor) -> None:
        """dP becomes dS."""
        for row in range(cute.size(dp, mode=[0])):
            dp[row, None].store(p[row, None].load().to(Float32) * (dp[row, None].load() - delta[where[row, 0][0]]))

    def store_key_tile(self, p: Any, at: tuple[Any, ...], s_dk: cute.Tensor, s_dv: cute.Tensor, thread: Int32) -> None:
        """Write dK and dV."""
        batch, head, key0 = at
        build, rows = self.build, p.num_keys - key0
        dk = params.slice_at(
            p.grad_key, self.dtype, (batch, p.grad_key_batch), (head, p.grad_key_head), (key0, p.grad_key_row)
        )
        dv = params.slice_at(
            p.grad_value,
            self.dtype,
            (batch, p.grad_value_batch),
            (head, p.grad_value_head),
            (key0, p.grad_value_row),
        )
        moves.store_tile(thread, build.threads, s_dk, dk, p.grad_key_row, rows, build.head_dim)
        moves.store_tile(thread, build.threads, s_dv, dv, p.grad_value_row, rows, build.head_dim_value)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return Backward(build), params.representative(abi.BACKWARD)
