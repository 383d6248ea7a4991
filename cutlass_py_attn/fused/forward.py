"""Forward: O = softmax(scale Q K^T) V and the logsumexp, one block for each tile of queries.

A block keeps its query tile in shared memory and walks the key tiles from the last to the first, so that the
tiles a causal mask cuts come first. While the products of one tile run, cp.async fetches the next.

    step        1 S = Q K^T     2 softmax         3 O += P V
    in flight   value tile n    key tile n - 1    key tile n - 1
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn import abi
from cutlass_py_attn.gemm import grad_q, matmul_qk
from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.gemm.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.parts import dropout, lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import larger
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.parts.softmax import QUAD, OnlineSoftmax, safe_scale
from cutlass_py_attn.parts.terms import Terms, bias_of
from cutlass_py_attn.plan import Build

Params = params.struct("ForwardParams", abi.FORWARD)


class Forward:
    """The forward kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.terms = Terms(build)
        self.dtype = DTYPES[build.dtype]
        self.promise = params.promise(build)

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.FORWARD, values)
        params.name_entry(self.build, self.kernel)
        grid = (p.num_queries, p.num_heads, p.batch)
        self.kernel(p).launch(grid=grid, block=(self.build.threads, 1, 1), **self.promise)

    @cute.kernel
    def kernel(self, p: Params):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        batch, head, query_tile = self.place(p)
        query0 = query_tile * build.tile_m
        of = lengths.sequence(build, p, batch)
        band = lengths.band(build, p, of)
        tiles = (band, query_tile, build.tile_m, build.tile_n)
        s_q, s_k, s_v, s_o = self.shared_tiles()
        self.scores, self.output = self.products()

        # 0  load the query tile and the last key tile
        first, end = schedule.key_tile_start(*tiles), schedule.key_tile_end(*tiles)
        rows_left = of.num_queries - query0
        query = moves.tile_of(build, p, "query", (of.batch, head, of.query_start + query0), rows_left, build.head_dim)
        moves.load_tile(thread, build.threads, query, s_q)
        self.load_keys(p, "key", (of, head, larger(end - 1, 0)), s_k, thread)
        cute.arch.cp_async_commit_group()

        score_parts = matmul_qk.operands(self.scores, s_q, s_k, thread)
        value_part = self.output.b_operand(transposed(s_v), thread)
        r_o = self.output.accumulator(thread)
        r_o.fill(0.0)
        rows = cute.size(row_view(r_o), mode=[0])
        self.softmax = OnlineSoftmax(rows, self.row_sums(rows, thread))
        scale_log2 = Float32(1.0) if cutlass.const_expr(self.terms.present) else safe_scale(p.scale_log2)
        slope = self.terms.slope(p, batch, head)

        for i in cutlass.range(end - first, unroll=1):
            key_tile = end - 1 - i
            _, at_head, at_tile = self.place(p)
            corner = at_tile * build.tile_m, key_tile * build.tile_n
            # While the key tile is on its way, and before the scores need registers.
            kept = self.kept(p, corner, (of, at_head))
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.load_keys(p, "value", (of, at_head, key_tile), s_v, thread)
            self.load_bias(p, of, at_head, corner, thread)
            cute.arch.cp_async_commit_group()

            # 1  S = Q K^T
            r_s = self.scores.accumulator(thread)
            matmul_qk.issue(self.scores, r_s, score_parts)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if key_tile > first:
                self.load_keys(p, "key", (of, at_head, key_tile - 1), s_k, thread)
            cute.arch.cp_async_commit_group()

            # 2  score terms, mask, softmax, dropout
            where = row_view(self.scores.coordinates(params.fresh("tid.x")))
            if cutlass.const_expr(self.terms.present):
                self.terms.apply(p, row_view(r_s), where, corner, band, (slope, self.bias_part(thread)))
            elif p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if schedule.needs_mask(band, at_tile, key_tile, build.tile_m, build.tile_n):
                masking.hide(band, row_view(r_s), where, corner)
            self.softmax.step(row_view(r_s), row_view(r_o), scale_log2)
            if cutlass.const_expr(build.has("dropout")):
                masking.drop(row_view(r_s), kept)

            # 3  O += P V
            self.add_values(r_o, r_s, value_part)

        # 4  normalise, store the logsumexp and the output tile
        cute.arch.cp_async_wait_group(0)
        at_batch, at_head, at_tile = self.place(p)
        last, row0 = lengths.sequence(build, p, at_batch), at_tile * build.tile_m
        if cutlass.const_expr(build.has("sinks")):
            self.softmax.join(row_view(r_o), params.scalar(p.sinks, Float32, at_head), scale_log2)
            scale_log2 = Float32(1.0)
        lse = self.softmax.finish(row_view(r_o), scale_log2)
        if cutlass.const_expr(build.has("dropout")):
            r_o.store(r_o.load() * p.keep_scale)
        where = row_view(self.scores.coordinates(thread))
        self.store_logsumexp(p, lse, where, (at_batch, at_head, row0), last.num_queries)
        cute.arch.sync_threads()
        r_o = moves.converted(r_o, self.dtype)
        moves.registers_to_tile(thread, self.output.mma, r_o, s_o, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        at = (last.batch, at_head, last.query_start + row0)
        target = moves.tile_of(build, p, "output", at, last.num_queries - row0, build.head_dim_value)
        moves.store_tile(thread, build.threads, s_o, target)

    def place(self, p: Any) -> tuple[Int32, Int32, Int32]:
        """(batch, head, query tile) of this block, formed again where it is needed rather than kept in registers."""
        block = params.fresh("ctaid.x")
        if self.build.mask != "full":
            block = params.fresh("nctaid.x") - 1 - block  # longest first
        return params.fresh("ctaid.z") + p.first_batch, params.fresh("ctaid.y") + p.first_head, block

    def shared_tiles(self) -> tuple[cute.Tensor, ...]:
        """Q, K, V in shared memory, and O in Q's place."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)

        def tile(name: str, rows: int, columns: int) -> cute.Tensor:
            return moves.shared_tile(base, build.buffer(name).offset, self.dtype, rows, columns)

        return (
            tile("query", build.tile_m, build.columns),
            tile("key", build.tile_n, build.columns),
            tile("value", build.tile_n, build.columns_value),
            tile("query", build.tile_m, build.columns_value),
        )

    def row_sums(self, rows: int, thread: Int32) -> cute.Tensor:
        """This thread's partial row sums in shared memory."""
        first = cute.assume(thread * rows, divby=rows)
        return cute.make_tensor(moves.shared_pointer(self.build, "sums", Float32) + first, cute.make_layout(rows))

    def products(self) -> tuple[MmaSync, MmaSync]:
        """S = Q K^T, and O += P V: GradQ's form with (P, V) for (dS, K), P from the registers of S."""
        build = self.build
        values = output_spec(build, n=build.columns_value, warps=build.scores)
        return MmaSync(matmul_qk.spec(build), build.dtype), MmaSync(values, build.dtype)

    def add_values(self, r_o: cute.Tensor, r_p: cute.Tensor, value_part: Any) -> None:
        """O += P V."""
        self.output.issue(r_o, Operands(self.output.from_accumulator(r_p), value_part))

    def load_keys(self, p: Any, name: str, at: tuple[Any, Any, Any], tile: cute.Tensor, thread: Int32) -> None:
        """Start copying a tile of key or value at (sequence, query head, key tile)."""
        of, head, key_tile = at
        build, key0 = self.build, key_tile * self.build.tile_n
        columns = build.head_dim if name == "key" else build.head_dim_value
        start = of.batch, lengths.key_head(build, p, head), of.key_start + key0
        moves.load_tile(thread, build.threads, moves.tile_of(build, p, name, start, of.num_keys - key0, columns), tile)

    def bias_tile(self) -> cute.Tensor:
        """The bias of one tile of scores in shared memory."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return moves.shared_tile(base, build.buffer("bias").offset, self.dtype, build.tile_m, build.tile_n)

    def load_bias(self, p: Any, of: lengths.Sequence, head: Int32, corner: tuple, thread: Int32) -> None:
        """Start copying the bias of a tile of scores."""
        if self.build.has("bias"):
            source = bias_of(self.build, p, "bias", of, head, corner)
            moves.load_tile(thread, self.build.threads, source, self.bias_tile())

    def bias_part(self, thread: Int32) -> cute.Tensor | None:
        """This thread's part of the bias tile."""
        return self.scores.mma.get_slice(thread).partition_C(self.bias_tile()) if self.build.has("bias") else None

    def kept(self, p: Any, corner: tuple, at: tuple) -> cute.Tensor | None:
        """The bits of the weights that dropout keeps."""
        if not self.build.has("dropout"):
            return None
        return dropout.kept(self.build, p, row_view(self.scores.coordinates(params.fresh("tid.x"))), corner, at)

    def store_logsumexp(
        self, p: Any, lse: list[Float32], where: cute.Tensor, corner: tuple[Int32, Int32, Int32], num_queries: Int32
    ) -> None:
        """One thread of each quad writes its rows; rows between num_queries and the padding become +inf."""
        batch, head, query0 = corner
        padded = lengths.padded(num_queries)
        start = lengths.logsumexp_start(p, batch, head) + query0
        target = cute.make_tensor(params.pointer(p.logsumexp, Float32, 4) + start, cute.make_layout(self.build.tile_m))
        thread, _, _ = cute.arch.thread_idx()
        for row, value in enumerate(lse):
            store_row(target, where[row, 0][0], value, query0, num_queries, padded, thread)


def output_spec(build: Build, **changes: Any) -> Gemm:
    """O += P V: GradQ's form with (P, V) for (dS, K), and what differs from it."""
    return replace(grad_q.spec(build), name="output", equation="O += P V", accumulate=True, **changes)


@cute.jit
def store_row(
    target: cute.Tensor,
    row: Int32,
    value: Float32,
    query0: Int32,
    num_queries: Int32,
    padded: Int32,
    thread: Int32,
):
    """Write one logsumexp."""
    if (thread % QUAD == 0) & (query0 + row < padded):
        target[row] = cutlass.select_(query0 + row < num_queries, value, Float32.inf)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernel, and arguments to compile it with."""
    return Forward(build), params.representative(abi.FORWARD)
