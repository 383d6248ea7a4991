"""sm80 backward: dQ, dK and dV from dO, Q, K, V, delta and the logsumexp on mma.sync; grid (splits, heads, batch).

A block keeps one key tile and its dK and dV, and loops over the query tiles. dQ is summed over key tiles in float32 in
global memory (backward_parts/grad_query_accum.py). The kernels before and after this one: backward_parts/chain.py.

    step       1 S = Q K^T   2 P   3 dP = dO V^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    in flight  the query and grad_output tiles of the next iteration, by cp.async
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.backward_parts import chain as backward_chain
from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.backward_parts.postprocess import BackwardPostprocess
from cutlass_py_attn.kernels.common import dropout, masking, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, row_view
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import bias_of
from cutlass_py_attn.kernels.component_gemms.products import doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.kernels.sm80 import dq_semaphore
from cutlass_py_attn.kernels.sm80.backward_grid import BackwardGrid, KeyTileWork
from cutlass_py_attn.kernels.sm80.backward_scores import BackwardScores, ScoreTile
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import OPERANDS


@dataclass(frozen=True)
class Gemms:
    """The five component GEMMs on this build's warps."""

    mma_qk: MmaSync
    mma_dov: MmaSync
    mma_pdo: MmaSync
    mma_dsq: MmaSync
    mma_dsk: MmaSync


@dataclass(frozen=True)
class Smem:
    """The tiles in shared memory. Query, grad_output, bias and the row statistics have `query_stages` stages."""

    s_k: cute.Tensor
    s_v: cute.Tensor
    s_q: cute.Tensor
    s_do: cute.Tensor
    s_p: cute.Tensor
    s_ds: cute.Tensor
    s_bias: cute.Tensor | None
    s_lse: cute.Tensor
    s_delta: cute.Tensor


class BackwardSm80:
    """The main kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.launch_bounds = params.launch_bounds(build)
        self.grid = BackwardGrid(build)
        self.scores = BackwardScores(build, self.grid)
        self.accum = GradQueryAccum(build, build.threads)
        self.wants_query, self.wants_key, self.wants_value = (name in build.gradients for name in OPERANDS)

    @cute.jit
    def launch(self, values: tuple, grid: tuple):
        """Names and launches the main kernel."""
        params.set_entry_name(self.build, self.kernel)
        main = self.kernel(params.from_values(self.build, values))
        main.launch(grid=grid, block=(self.build.threads, 1, 1), **self.launch_bounds)

    @cute.kernel
    def kernel(self, p: Any):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        _, _, batch = cute.arch.block_idx()
        split, head, batch = self.grid.split(), self.grid.key_head(p), batch + p.first_batch
        seqlen = seqlen_info.create(build, p, batch)
        if cutlass.const_expr(build.deterministic):
            shared = cute.make_tensor(tile_copy.smem_pointer(build, "delta", Int32), cute.make_layout(1))
            split = dq_semaphore.start_rank(p, Int64(head) * p.batch + batch, thread, shared)
        key_tiles = ceil_div(seqlen.stored_keys, build.tile_n)
        for step in cutlass.range(split, key_tiles, p.num_splits_key, unroll=1):
            # Under a causal mask the first key tiles are the longest and come first. The order of the semaphore is from
            # the last key tile to the first.
            key_tile = key_tiles - 1 - step if cutlass.const_expr(build.deterministic) else step
            self.one_key_tile(p, seqlen, key_tile, head, thread)

    @cute.jit
    def one_key_tile(self, p: Any, seqlen: Any, key_tile: Int32, key_head: Int32, thread: Int32):
        """Computes dK and dV of one key tile, and its addition to dQ, over the query heads that read this key head."""
        build = self.build
        tiles = (build.tile_m, build.tile_n)
        key0 = key_tile * build.tile_n
        smem, gemms = self.smem(), self.gemms()

        # 0  load the key tile and the first query tile
        work = self.grid.work(p, seqlen, key_tile)
        self.load_key_tile(p, seqlen, (key_head, key0), smem, thread)
        self.load_query_tile(p, work, Int32(0), smem, Int32(0), thread)
        cute.arch.cp_async_commit_group()

        r_dk, r_dv = gemms.mma_dsq.accumulator(thread), gemms.mma_pdo.accumulator(thread)
        r_dk.fill(0.0)
        r_dv.fill(0.0)

        for iteration in cutlass.range(work.iterations, unroll=1):
            here = params.read_register("tid.x")
            stage = iteration % build.query_stages
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if cutlass.const_expr(build.query_stages > 1):
                next_stage = (iteration + 1) % build.query_stages
                self.load_query_tile(p, work, iteration + 1, smem, next_stage, here)
                cute.arch.cp_async_commit_group()
            query_tile = self.grid.query_tile(p, seqlen, work.query_tiles, iteration)
            band = seqlen_info.band(build, p, query_tile.seqlen)
            origin = query_tile.index * build.tile_m, key0
            score_tile = ScoreTile(query_tile.seqlen, band, query_tile.head, origin)

            qk_parts = matmul_qk.operands(gemms.mma_qk, smem.s_q, smem.s_k, here)
            dov_parts = doivj.operands(gemms.mma_dov, smem.s_do, smem.s_v, here)
            pdo_parts = grad_v.operands(gemms.mma_pdo, smem.s_p, smem.s_do, here)
            dsq_parts = grad_k.operands(gemms.mma_dsq, smem.s_ds, smem.s_q, here)
            dsk_parts = grad_q.operands(gemms.mma_dsk, smem.s_ds, smem.s_k, here)
            # Dropout bits come first, before anything else needs registers.
            coordinates = row_view(gemms.mma_qk.coordinates(here))
            r_kept = dropout.keep_bits_of_tile(build, p, coordinates, origin, (query_tile.seqlen, query_tile.head))
            # 1  S = Q K^T
            r_s = gemms.mma_qk.accumulator(thread)
            matmul_qk.issue(gemms.mma_qk, r_s, self.stage_of(qk_parts, stage, None))
            # 2  P = exp2(S - logsumexp) in base 2, kept in the operands' type until dS
            s_bias = self.tile_stage(smem.s_bias, stage)
            r_derivative = self.scores.apply_score_mod(p, gemms.mma_qk, r_s, coordinates, score_tile, s_bias)
            self.scores.exponentiate(r_s, coordinates, smem.s_lse[None, stage], p.scale_log2)
            if tile_order.needs_mask(band, query_tile.index, key_tile, *tiles):
                masking.mask_weights(band, row_view(r_s), coordinates, origin)
            r_p = tile_copy.converted(r_s, self.dtype)
            if cutlass.const_expr(self.wants_value):
                r_dropped = r_p if r_kept is None else masking.with_dropout(r_p, r_kept)
                tile_copy.copy_r2s(here, gemms.mma_qk.mma, r_dropped, smem.s_p, tile_copy.has_stmatrix(build))
            # 3  dP = dO V^T
            r_dp = gemms.mma_dov.accumulator(thread)
            doivj.issue(gemms.mma_dov, r_dp, self.stage_of(dov_parts, stage, None))
            # 4  dS = P (dP - delta)
            masking.scale_kept(row_view(r_dp), r_kept, p.keep_scale)
            self.scores.gradient(r_dp, r_p, coordinates, smem.s_delta[None, stage])
            if cutlass.const_expr(self.scores.score_mod.has_derivative):
                row_view(r_dp).store(row_view(r_dp).load() * r_derivative.load().to(Float32))
            r_ds = tile_copy.converted(r_dp, self.dtype)
            tile_copy.copy_r2s(here, gemms.mma_qk.mma, r_ds, smem.s_ds, tile_copy.has_stmatrix(build))
            cute.arch.sync_threads()
            self.scores.store_grad_bias(p, score_tile, smem.s_ds, here)
            # 5  dV += P^T dO
            if cutlass.const_expr(self.wants_value):
                grad_v.issue(gemms.mma_pdo, r_dv, self.stage_of(pdo_parts, None, stage))
            # 6  dK += dS^T Q
            if cutlass.const_expr(self.wants_key):
                grad_k.issue(gemms.mma_dsq, r_dk, self.stage_of(dsq_parts, None, stage))
            # 7  dQ = dS K
            if cutlass.const_expr(self.wants_query):
                r_dq = gemms.mma_dsk.accumulator(thread)
                grad_q.issue(gemms.mma_dsk, r_dq, dsk_parts)
                index = self.accum.tile_index(p, query_tile.head, query_tile.seqlen.first_tile + query_tile.index)
                if cutlass.const_expr(build.deterministic):
                    num_before = tile_order.preceding_key_tiles(band, query_tile.index, key_tile, *tiles)
                    dq_semaphore.acquire(build, p, index, num_before, here)
                self.accum.add(self.accum.pointer(p, index), r_dq, here)
                if cutlass.const_expr(build.deterministic):
                    dq_semaphore.release(p, index, here)
            if cutlass.const_expr(build.query_stages == 1):
                cute.arch.sync_threads()
                self.load_query_tile(p, work, iteration + 1, smem, Int32(0), here)
                cute.arch.cp_async_commit_group()

        # 8  store dK and dV through the shared memory of K and V
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        thread, head = params.read_register("tid.x"), self.grid.key_head(p)
        r_dk.store(r_dk.load() * p.scale)
        if cutlass.const_expr(build.has("dropout")):
            r_dv.store(r_dv.load() * p.keep_scale)
        for mma, values, tile in ((gemms.mma_dsq, r_dk, smem.s_k), (gemms.mma_pdo, r_dv, smem.s_v)):
            values = tile_copy.converted(values, self.dtype)
            tile_copy.copy_r2s(thread, mma.mma, values, tile, tile_copy.has_stmatrix(build))
        cute.arch.sync_threads()
        self.store_key_tile(p, seqlen, (head, key0), smem, thread)
        self.scores.zero_unvisited_grad_bias(p, work, thread)
        cute.arch.sync_threads()

    def gemms(self) -> Gemms:
        """Returns the five component GEMMs."""
        build = self.build
        return Gemms(*(MmaSync(gemm.spec(build), build.dtype) for gemm in (matmul_qk, doivj, grad_v, grad_k, grad_q)))

    def smem(self) -> Smem:
        """Returns the tiles in shared memory."""
        build, base = self.build, tile_copy.smem_base(self.build)

        def tile(name: str, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
            return tile_copy.smem_tile(base, build.buffer(name).offset, self.dtype, rows, columns, stages)

        def row_statistics(name: str) -> cute.Tensor:
            rows = cute.make_layout((build.tile_m, build.query_stages))
            return cute.make_tensor(tile_copy.smem_pointer(build, name, Float32), rows)

        return Smem(
            s_k=tile("key", build.tile_n, build.columns),
            s_v=tile("value", build.tile_n, build.columns_value),
            s_q=tile("query", build.tile_m, build.columns, build.query_stages),
            s_do=tile("grad_output", build.tile_m, build.columns_value, build.grad_output_stages),
            s_p=tile("p", build.tile_m, build.tile_n),
            s_ds=tile("ds", build.tile_m, build.tile_n),
            s_bias=tile("bias", build.tile_m, build.tile_n, build.query_stages) if build.has("bias") else None,
            s_lse=row_statistics("logsumexp"),
            s_delta=row_statistics("delta"),
        )

    def stage_of(self, parts: Any, a: Int32 | None, b: Int32 | None) -> Any:
        """Returns operands at stage `a` of A and stage `b` of B; None for an operand with one tile."""
        return parts.stage(a, b) if self.build.query_stages > 1 else parts

    def tile_stage(self, tiles: cute.Tensor | None, stage: Int32) -> cute.Tensor | None:
        """Returns one stage of a tile in shared memory."""
        return tiles if tiles is None or self.build.query_stages == 1 else tiles[None, None, stage]

    def load_key_tile(self, p: Any, seqlen: Any, at: tuple, smem: Smem, thread: Int32) -> None:
        """Starts the copies of the key and value tiles at (key head, first key)."""
        build, (head, key0) = self.build, at
        coordinates, rows = (seqlen.batch, head, seqlen.key_start + key0), seqlen.num_keys - key0
        for name, columns, tile in (("key", build.head_dim, smem.s_k), ("value", build.head_dim_value, smem.s_v)):
            source = tile_copy.gmem_tile(build, p, name, coordinates, rows, columns)
            tile_copy.copy_g2s(thread, build.threads, source, tile)

    @cute.jit
    def load_query_tile(self, p: Any, work: KeyTileWork, iteration: Int32, smem: Smem, stage: Int32, thread: Int32):
        """Starts the copies of a query tile, its grad_output, bias and row statistics; none past the last iteration."""
        build = self.build
        if iteration < work.iterations:
            tile = self.grid.query_tile(p, work.seqlen, work.query_tiles, iteration)
            query0 = tile.index * build.tile_m
            coordinates = tile.seqlen.batch, tile.head, tile.seqlen.query_start + query0
            rows = tile.seqlen.num_queries - query0
            queries = tile_copy.gmem_tile(build, p, "query", coordinates, rows, build.head_dim)
            tile_copy.copy_g2s(thread, build.threads, queries, self.tile_stage(smem.s_q, stage))
            grads = tile_copy.gmem_tile(build, p, "grad_output", coordinates, rows, build.head_dim_value)
            tile_copy.copy_g2s(thread, build.threads, grads, self.tile_stage(smem.s_do, stage))
            if cutlass.const_expr(build.has("bias")):
                origin = query0, work.key_tile * build.tile_n
                bias = bias_of(build, p, "bias", tile.seqlen, tile.head, origin)
                tile_copy.copy_g2s(thread, build.threads, bias, self.tile_stage(smem.s_bias, stage))
            index = self.accum.tile_index(p, tile.head, tile.seqlen.first_tile + tile.index)
            row = cute.assume(index * build.tile_m, divby=16)
            tile_copy.copy_vector_g2s(thread, params.pointer(p.logsumexp_log2, Float32) + row, smem.s_lse[None, stage])
            tile_copy.copy_vector_g2s(thread, params.pointer(p.delta, Float32) + row, smem.s_delta[None, stage])

    def store_key_tile(self, p: Any, seqlen: Any, at: tuple, smem: Smem, thread: Int32) -> None:
        """Writes dK and dV at (key head, first key); keys that are stored but not used (seqused_k) get zeros."""
        build, (head, key0) = self.build, at
        coordinates, rows = (seqlen.batch, head, seqlen.key_start + key0), seqlen.stored_keys - key0
        if self.wants_key:
            dk = tile_copy.gmem_tile(build, p, "grad_key", coordinates, rows, build.head_dim)
            tile_copy.copy_s2g(thread, build.threads, smem.s_k, dk)
        if self.wants_value:
            dv = tile_copy.gmem_tile(build, p, "grad_value", coordinates, rows, build.head_dim_value)
            tile_copy.copy_s2g(thread, build.threads, smem.s_v, dv)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    main = BackwardSm80(build)
    return backward_chain.trace(build, main, BackwardPostprocess(build, main.accum, MmaSync))
