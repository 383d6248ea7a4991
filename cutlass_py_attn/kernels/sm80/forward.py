"""Forward: O = softmax(scale Q K^T) V and the logsumexp, one block for each query tile.

A block keeps its query tile in shared memory and visits the key tiles from the last to the first, so that the tiles
that a causal mask cuts come first. While the GEMMs of one tile execute, cp.async loads the next tile.

Keys and values may be in pages of any size: each thread then finds the pages of the rows that it copies.

    step        1 S = Q K^T     2 softmax         3 O += P V
    in flight   value tile n    key tile n - 1    key tile n - 1
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.common import logsumexp, masking, paged_tile_copy, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.score_mod import ScoreMod
from cutlass_py_attn.kernels.common.seqlen_info import SeqlenInfo
from cutlass_py_attn.kernels.common.softmax import OnlineSoftmax, safe_scale
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.sm80 import e4m3_tiles
from cutlass_py_attn.kernels.sm80.score_inputs import ScoreInputs
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build


@dataclass(frozen=True)
class QueryTile:
    """The query tile of a block: its sequence, its query head and its number in the sequence."""

    batch: Int32
    head: Int32
    tile: Int32


@dataclass(frozen=True)
class SmemTiles:
    """Tiles in shared memory; the output tile has the place of the query tile."""

    query: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    output: cute.Tensor


@dataclass(frozen=True)
class MainloopState:
    """What all iterations of the loop over key tiles use: the running softmax and the operands of both GEMMs."""

    softmax: OnlineSoftmax
    qk_operands: Any
    v_operand: Any


class ForwardSm80:
    """The forward kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.launch_bounds = params.launch_bounds(build)
        self.score_mod = ScoreMod(build)
        self.mma_qk = MmaSync(matmul_qk.spec(build), build.dtype)
        self.mma_pv = MmaSync(matmul_pv.spec(build), build.dtype)
        self.score_inputs = ScoreInputs(build, self.mma_qk, "bias")
        self.codes = e4m3_tiles.of(build)

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        params.set_entry_name(self.build, self.kernel)
        grid = (p.num_queries, p.num_heads, p.batch)
        self.kernel(p).launch(grid=grid, block=(self.build.threads, 1, 1), **self.launch_bounds)

    @cute.kernel
    def kernel(self, p: Any):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        work = self.query_tile(p)
        query0 = work.tile * build.tile_m
        seqlen = seqlen_info.create(build, p, work.batch)
        band = seqlen_info.band(build, p, seqlen)
        tiles = (band, work.tile, build.tile_m, build.tile_n)
        smem = self.smem_tiles()

        # 0  load the query tile and the last key tile
        first, end = tile_order.key_tile_start(*tiles), tile_order.key_tile_end(*tiles)
        rows_left = seqlen.num_queries - query0
        start = RowCoordinates(seqlen.batch, work.head, seqlen.query_start + query0)
        query = tile_copy.gmem_tile(build, p, "query", start, rows_left, build.head_dim)
        tile_copy.copy_g2s(thread, build.threads, query, smem.query)
        self.load_key_rows(p, "key", seqlen, work.head, larger(end - 1, 0), smem.key, thread)
        cute.arch.cp_async_commit_group()

        qk_operands = matmul_qk.operands(self.mma_qk, smem.query, smem.key, thread)
        v_operand = matmul_pv.b_operand(self.mma_pv, smem.value, thread)
        r_o = self.mma_pv.accumulator(thread)
        r_o.fill(0.0)
        rows = cute.size(row_view(r_o), mode=[0])
        loop = MainloopState(OnlineSoftmax(rows, self.row_sums(rows, thread)), qk_operands, v_operand)
        scale_log2 = Float32(1.0) if cutlass.const_expr(self.score_mod.present) else safe_scale(p.scale_log2)
        operands = self.score_mod.load_operands(p, work.batch, work.head)
        if cutlass.const_expr(self.codes is not None):
            key_head = seqlen_info.key_head(build, p, work.head)
            key_scale, value_scale = self.codes.operand_scales(p, seqlen.index, key_head, first < end)

        for i in cutlass.range(end - first, unroll=1):
            key_tile = end - 1 - i
            now = self.query_tile(p)
            tile_origin = now.tile * build.tile_m, key_tile * build.tile_n
            # Computed while the key tile is in flight, and before the scores occupy registers.
            dropout_bits = self.score_inputs.dropout_bits(p, seqlen, now.head, tile_origin)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            self.load_key_rows(p, "value", seqlen, now.head, key_tile, smem.value, thread)
            self.score_inputs.load_bias(p, seqlen, now.head, tile_origin, thread)
            cute.arch.cp_async_commit_group()
            self.convert_codes("key", smem.key, thread)

            # 1  S = Q K^T
            r_s = self.mma_qk.accumulator(thread)
            matmul_qk.issue(self.mma_qk, r_s, loop.qk_operands)
            if cutlass.const_expr(self.codes is not None):
                self.codes.scale_scores(row_view(r_s), row_view(self.mma_qk.coordinates(thread)), key_scale)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if key_tile > first:
                self.load_key_rows(p, "key", seqlen, now.head, key_tile - 1, smem.key, thread)
            cute.arch.cp_async_commit_group()
            self.convert_codes("value", smem.value, thread)

            # 2  score modification, mask, softmax, dropout
            coordinates = row_view(self.mma_qk.coordinates(params.read_register("tid.x")))
            if cutlass.const_expr(self.score_mod.present):
                bias = self.score_inputs.bias_partition(thread)
                self.score_mod.apply(p, row_view(r_s), coordinates, tile_origin, band, (operands, bias))
            elif p.scale_log2 < 0.0:
                r_s.store(-r_s.load())
            if tile_order.needs_mask(band, now.tile, key_tile, build.tile_m, build.tile_n):
                masking.mask_scores(band, row_view(r_s), coordinates, tile_origin)
            loop.softmax.step(row_view(r_s), row_view(r_o), scale_log2)
            if cutlass.const_expr(build.has("dropout")):
                masking.apply_dropout(row_view(r_s), dropout_bits)

            # 3  O += P V
            matmul_pv.issue(self.mma_pv, r_o, Operands(self.mma_pv.from_accumulator(r_s), loop.v_operand))

        # 4  normalise, store the logsumexp and the output tile
        cute.arch.cp_async_wait_group(0)
        now = self.query_tile(p)
        seqlen, query0 = seqlen_info.create(build, p, now.batch), now.tile * build.tile_m
        if cutlass.const_expr(build.has("sinks")):
            loop.softmax.add_sink(row_view(r_o), params.load_scalar(p.sinks, Float32, now.head), scale_log2)
            scale_log2 = Float32(1.0)
        lse = loop.softmax.finish(row_view(r_o), scale_log2)
        if cutlass.const_expr(build.has("dropout")):
            r_o.store(r_o.load() * p.keep_scale)
        if cutlass.const_expr(self.codes is not None):
            r_o.store(r_o.load() * value_scale)
        coordinates = row_view(self.mma_qk.coordinates(thread))
        row = RowCoordinates(now.batch, now.head, query0)
        logsumexp.store_tile(p, lse, coordinates, row, build.tile_m, seqlen.num_queries)
        cute.arch.sync_threads()
        r_o = tile_copy.converted(r_o, self.dtype)
        tile_copy.copy_r2s(thread, self.mma_pv.mma, r_o, smem.output, tile_copy.has_stmatrix(build))
        cute.arch.sync_threads()
        start = RowCoordinates(seqlen.batch, now.head, seqlen.query_start + query0)
        target = tile_copy.gmem_tile(build, p, "output", start, seqlen.num_queries - query0, build.head_dim_value)
        tile_copy.copy_s2g(thread, build.threads, smem.output, target)

    def query_tile(self, p: Any) -> QueryTile:
        """Returns this block's query tile, computed again at each use rather than kept in registers."""
        block = params.read_register("ctaid.x")
        if not self.build.form.sees_all:
            block = params.read_register("nctaid.x") - 1 - block  # the longest tiles first
        batch = params.read_register("ctaid.z") + p.first_batch
        return QueryTile(batch, params.read_register("ctaid.y") + p.first_head, block)

    def smem_tiles(self) -> SmemTiles:
        """Returns the tiles in shared memory."""
        build, base = self.build, tile_copy.smem_base(self.build)

        def tile(name: str, rows: int, columns: int) -> cute.Tensor:
            return tile_copy.smem_tile(base, build.buffer(name).offset, self.dtype, rows, columns)

        return SmemTiles(
            tile("query", build.tile_m, build.columns),
            tile("key", build.tile_n, build.columns),
            tile("value", build.tile_n, build.columns_value),
            tile("query", build.tile_m, build.columns_value),
        )

    def row_sums(self, rows: int, thread: Int32) -> cute.Tensor:
        """Returns this thread's partial row sums in shared memory."""
        first = cute.assume(thread * rows, divby=rows)
        return cute.make_tensor(tile_copy.smem_pointer(self.build, "sums", Float32) + first, cute.make_layout(rows))

    def load_key_rows(
        self, p: Any, name: str, seqlen: SeqlenInfo, head: Int32, key_tile: Int32, tile: cute.Tensor, thread: Int32
    ) -> None:
        """Starts copying key tile `key_tile` of key or value, for query head `head`."""
        build, key0 = self.build, key_tile * self.build.tile_n
        columns = build.head_dim if name == "key" else build.head_dim_value
        if self.codes is not None:
            self.codes.load(p, name, seqlen, head, key0, params.read_register("tid.x"))
            return
        if build.has("paged"):
            key_head = seqlen_info.key_head(build, p, head)
            pages = paged_tile_copy.paged_tile(build, p, name, seqlen, key_head, key0, columns)
            tid = params.read_register("tid.x")
            paged_tile_copy.copy_g2s(p, tid, build.threads, pages, tile)
            if name == "key":
                paged_tile_copy.prefetch_entry(p, seqlen, key0 - build.tile_n + tid % build.tile_n)
            return
        start = RowCoordinates(seqlen.batch, seqlen_info.key_head(build, p, head), seqlen.key_start + key0)
        source = tile_copy.gmem_tile(build, p, name, start, seqlen.num_keys - key0, columns)
        tile_copy.copy_g2s(thread, build.threads, source, tile)

    def convert_codes(self, name: str, tile: cute.Tensor, thread: Int32) -> None:
        """Converts the e4m3 codes that have arrived to a tile of key or value, and waits for all threads."""
        if self.codes is not None:
            self.codes.convert(name, tile, thread)
            cute.arch.sync_threads()


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return ForwardSm80(build), params.example_arguments(abi.fields_of(build))
