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
from cutlass import Float32, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.gemm import grad_q, matmul_qk
from cutlass_py_attn.gemm.mma_sync import DTYPES, MmaSync, Operands, row_view
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.parts import masking, moves, params, schedule
from cutlass_py_attn.parts.integers import larger, round_up
from cutlass_py_attn.parts.softmax import QUAD, OnlineSoftmax, safe_scale
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import LSE_PADDING

Params = params.struct("ForwardParams", abi.FORWARD)


class Forward:
    """The forward kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.mask = build.mask_object
        self.dtype = DTYPES[build.dtype]
        self.promise = params.promise(build)

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.FORWARD, values)
        self.kernel.set_name_prefix(self.build.symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        grid = (p.num_queries, p.num_heads, p.batch)
        self.kernel(p).launch(grid=grid, block=(self.build.threads, 1, 1), **self.promise)

    @cute.kernel
    def kernel(self, p: Params):
        build, mask = self.build, self.mask
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        query_tile = blocks - 1 - block if cutlass.const_expr(mask.bounded) else block  # longest first
        query0 = query_tile * build.tile_m
        lengths = (p.num_queries, p.num_keys)
        tiles = (build.tile_m, build.tile_n, *lengths)
        s_q, s_k, s_v, s_o = self.shared_tiles()
        self.scores, self.output = self.products()

        # 0  load the query tile and the last key tile
        key_tiles = schedule.key_tile_end(mask, query_tile, *tiles)
        full_tiles = schedule.full_key_tiles(mask, query_tile, *tiles)
        query = params.slice_at(
            p.query, self.dtype, (batch, p.query_batch), (head, p.query_head), (query0, p.query_row)
        )
        moves.load_tile(thread, build.threads, query, p.query_row, p.num_queries - query0, build.head_dim, s_q)
        keys = params.slice_at(p.key, self.dtype, (batch, p.key_batch), (head, p.key_head))
        values = params.slice_at(p.value, self.dtype, (batch, p.value_batch), (head, p.value_head))
        self.load_keys(thread, keys, p.key_row, larger(key_tiles - 1, 0), p.num_keys, build.head_dim, s_k)
        cute.arch.cp_async_commit_group()

        score_parts = matmul_qk.operands(self.scores, s_q, s_k, thread)
        value_part = self.output.b_operand(transposed(s_v), thread)
        r_o = self.output.accumulator(thread)
        r_o.fill(0.0)
        where = row_view(self.scores.coordinates(thread))
        rows = cute.size(where, mode=[0])
        self.softmax = OnlineSoftmax(rows, self.row_sums(rows, thread))
        scale_log2 = safe_scale(p.scale_log2)

        for i in cutlass.range(key_tiles, unroll=1):
            key_tile = key_tiles - 1 - i
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.load_keys(thread, values, p.value_row, key_tile, p.num_keys, build.head_dim_value, s_v)
            cute.arch.cp_async_commit_group()

            # 1  S = Q K^T
            r_s = self.scores.accumulator(thread)
            matmul_qk.issue(self.scores, r_s, score_parts)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if key_tile > 0:
                self.load_keys(thread, keys, p.key_row, key_tile - 1, p.num_keys, build.head_dim, s_k)
            cute.arch.cp_async_commit_group()

            # 2  softmax
            if p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if key_tile >= full_tiles:
                masking.hide(mask, row_view(r_s), where, (query0, key_tile * build.tile_n), lengths)
            self.softmax.step(row_view(r_s), row_view(r_o), scale_log2)

            # 3  O += P V
            self.add_values(r_o, r_s, value_part)

        # 4  normalise, store the logsumexp and the output tile
        cute.arch.cp_async_wait_group(0)
        lse = self.softmax.finish(row_view(r_o), scale_log2)
        self.store_logsumexp(p, lse, where, (batch, head, query0), thread)
        cute.arch.sync_threads()
        r_o = moves.converted(r_o, self.dtype)
        moves.registers_to_tile(thread, self.output.mma, r_o, s_o, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        target = params.slice_at(
            p.output, self.dtype, (batch, p.output_batch), (head, p.output_head), (query0, p.output_row)
        )
        rows = p.num_queries - query0
        moves.store_tile(thread, build.threads, s_o, target, p.output_row, rows, build.head_dim_value)

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
        form = grad_q.spec(build)
        values = replace(
            form,
            name="output",
            equation="O += P V",
            n=build.columns_value,
            accumulate=True,
            warps=build.scores,
        )
        return MmaSync(matmul_qk.spec(build), build.dtype), MmaSync(values, build.dtype)

    def add_values(self, r_o: cute.Tensor, r_p: cute.Tensor, value_part: Any) -> None:
        """O += P V."""
        self.output.issue(r_o, Operands(self.output.from_accumulator(r_p), value_part))

    def load_keys(
        self,
        thread: Int32,
        source: cute.Pointer,
        row_stride: Int64,
        key_tile: Int32,
        num_keys: Int32,
        columns: int,
        tile: cute.Tensor,
    ) -> None:
        """Start copying tile `key_tile` of the keys or values; rows past the last key become zero."""
        first = key_tile * self.build.tile_n
        offset = cute.assume(Int64(first) * row_stride, divby=128 // self.dtype.width)
        moves.load_tile(thread, self.build.threads, source + offset, row_stride, num_keys - first, columns, tile)

    def store_logsumexp(
        self,
        p: Params,
        lse: list[Float32],
        where: cute.Tensor,
        corner: tuple[Int32, Int32, Int32],
        thread: Int32,
    ) -> None:
        """One thread of each quad writes its rows; rows between num_queries and the padding become +inf."""
        batch, head, query0 = corner
        padded = round_up(p.num_queries, LSE_PADDING)
        start = (Int64(batch) * p.num_heads + head) * padded + query0
        target = cute.make_tensor(params.pointer(p.logsumexp, Float32, 4) + start, cute.make_layout(self.build.tile_m))
        for row, value in enumerate(lse):
            store_row(target, where[row, 0][0], value, query0, p.num_queries, padded, thread)


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
