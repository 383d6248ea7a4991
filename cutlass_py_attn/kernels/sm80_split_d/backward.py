"""Split-D backward: dQ, dK and dV for head dims that are too wide for one block.

The grid is (splits x blocks of a key tile, heads, batch). As in the sm80 backward a block keeps one key tile and loops
over the query tiles, but it accumulates one column block of dK and dV, or of one of them, and adds one column block of
dQ if it has dK. In each iteration S and dP are summed over the whole head dim: chunks of columns pass through a ring of
stages. Then the rows of dO's and Q's column block pass through it. K and V stay in shared memory if they fit; otherwise
their chunks are loaded with those of Q and dO, and only K's column block stays, for dQ.

    step        1 S += Q K^T   2 P   3 dP += dO V^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    in flight   the loads of the next steps: one less than the ring has stages

A load step fills one stage of the ring: a chunk for S, a chunk for dP, some rows for dV, or some rows for dK.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import any_of, ceil_div, choose
from cutlass_py_attn.kernels.backward_parts import chain as backward_chain
from cutlass_py_attn.kernels.backward_parts.grad_query_accum import GradQueryAccum
from cutlass_py_attn.kernels.backward_parts.postprocess import BackwardPostprocess
from cutlass_py_attn.kernels.common import dropout, masking, params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.dynamic_tiles import (
    AccumulatingMma,
    OperandSlice,
    Rows,
    column_slice,
    copy_rows_g2s,
    smem_columns_at,
    smem_tile_at,
)
from cutlass_py_attn.kernels.common.mma_sync import MmaSync, Operands, row_view
from cutlass_py_attn.kernels.common.params import DTYPES
from cutlass_py_attn.kernels.common.score_mod import bias_of
from cutlass_py_attn.kernels.component_gemms.products import doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.kernels.sm80 import dq_semaphore
from cutlass_py_attn.kernels.sm80.backward_grid import BackwardGrid, KeyTileWork
from cutlass_py_attn.kernels.sm80.backward_scores import BackwardScores, ScoreTile
from cutlass_py_attn.kernels.sm80_split_d.layout import (
    HeadSide,
    backward_split,
    blocks_per_tile,
    column_blocks,
    splits_dk_dv,
    tile_and_column_block,
)
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import tile_bytes
from cutlass_py_attn.problem.tensors import OPERANDS

KEYS_AT_ONCE = 16  # k of one float32 GEMM dQ = dS K


@dataclass(frozen=True)
class BlockShare:
    """What one of the blocks that share a key tile computes.

    has_dq, has_dk, has_dv, has_grad_bias, has_ds: a Python bool if it is the same for all of these blocks
    scores_end, dp_end, dv_end, dk_end: one past the last load step of each kind in an iteration
    """

    has_dq: Any
    has_dk: Any
    has_dv: Any
    has_grad_bias: Any
    has_ds: Any
    scores_end: Any
    dp_end: Any
    dv_end: Any
    dk_end: Any

    @property
    def steps(self) -> Any:
        """Load steps of one iteration."""
        return self.dk_end


@dataclass(frozen=True)
class BlockWork:
    """A key tile, the query tiles that it visits, and this block's share of both."""

    tile: KeyTileWork
    share: BlockShare


@dataclass(frozen=True)
class Gemms:
    """The five component GEMMs: S and dP over a chunk, dV and dK over some queries, dQ over the key tile."""

    mma_qk: MmaSync
    mma_dov: MmaSync
    mma_pdo: MmaSync
    mma_dsq: MmaSync
    mma_dsk: AccumulatingMma


@dataclass(frozen=True)
class Smem:
    """P, dS and the row statistics in shared memory.

    The row statistics have as many stages as the ring: an iteration's are loaded while earlier ones are in use.
    """

    s_p: cute.Tensor
    s_ds: cute.Tensor
    s_lse: cute.Tensor
    s_delta: cute.Tensor


class BackwardSplitD:
    """The main kernel of one Build whose head dims are split over blocks."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.launch_bounds = params.launch_bounds(build)
        self.grid = BackwardGrid(build)
        self.scores = BackwardScores(build, self.grid)
        self.accum = GradQueryAccum(build, build.threads)
        self.wants_query, self.wants_key, self.wants_value = (name in build.gradients for name in OPERANDS)
        self.cut = backward_split(build)
        self.splits_dk_dv, self.shares, self.blocks = splits_dk_dv(build), column_blocks(build), blocks_per_tile(build)

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
        split, number = tile_and_column_block(self.grid.split(), self.blocks)
        head, batch = self.grid.key_head(p), batch + p.first_batch
        seqlen = seqlen_info.create(build, p, batch)
        share = self.share(number)
        if cutlass.const_expr(build.deterministic):
            # Blocks with other columns add to other sums, so each column block has a counter of its own.
            counter = (Int64(head) * p.batch + batch) * self.blocks + number
            shared = cute.make_tensor(tile_copy.smem_pointer(build, "statistics", Int32), cute.make_layout(1))
            split = dq_semaphore.start_rank(p, counter, thread, shared)
        key_tiles = ceil_div(seqlen.stored_keys, build.tile_n)
        for step in cutlass.range(split, key_tiles, p.num_splits_key, unroll=1):
            key_tile = key_tiles - 1 - step if cutlass.const_expr(build.deterministic) else step
            self.one_key_tile(p, seqlen, share, key_tile, thread)

    def share(self, number: Int32) -> BlockShare:
        """Returns the share of block `number` of the blocks that share a key tile."""
        key, value = self.cut.key, self.cut.value
        keys, values = self.shares
        in_key = self.is_below(number, keys)
        in_value = self.is_below(number, values)
        if self.splits_dk_dv:
            in_value = not in_key if isinstance(in_key, bool) else number >= keys
        has_dq = in_key if self.wants_query else False
        has_dk = in_key if self.wants_key else False
        has_dv = in_value if self.wants_value else False
        has_grad_bias = self.is_below(number, 1) if self.build.grad_bias_mode == "main" else False
        has_ds = any_of(has_dq, has_dk, has_grad_bias)
        steps = key.steps, value.steps, value.parts, key.parts
        ends, last = [], 0
        for count, is_needed in zip(steps, (True, has_ds, has_dv, has_dk), strict=True):
            last = last + choose(is_needed, count, 0)
            ends.append(last)
        return BlockShare(has_dq, has_dk, has_dv, has_grad_bias, has_ds, *ends)

    def is_below(self, number: Int32, end: int) -> Any:
        """Returns whether `number` is below `end`: a Python bool if it is the same for all blocks of a key tile."""
        return end == self.blocks if end in (0, self.blocks) else number < end

    @cute.jit
    def one_key_tile(self, p: Any, seqlen: Any, share: Any, key_tile: Int32, thread: Int32):
        """Computes this block's share of one key tile, over the query heads that read this key head."""
        build, cut, stages = self.build, self.cut, self.build.query_stages
        tiles = (build.tile_m, build.tile_n)
        smem, gemms = self.smem(), self.gemms()

        # 0  start the first load steps
        work = BlockWork(self.grid.work(p, seqlen, key_tile), share)
        self.load_key_block(p, work, thread)
        for step in cutlass.range(stages - 1, unroll=1):
            self.load_step(p, step, work, thread)
            cute.arch.cp_async_commit_group()

        r_dk, r_dv = self.accumulators(gemms)
        r_dk.fill(0.0)
        r_dv.fill(0.0)

        for iteration in cutlass.range(work.tile.iterations, unroll=1):
            query_tile = self.grid.query_tile(p, seqlen, work.tile.query_tiles, iteration)
            band = seqlen_info.band(build, p, query_tile.seqlen)
            origin = query_tile.index * build.tile_m, key_tile * build.tile_n
            score_tile = ScoreTile(query_tile.seqlen, band, query_tile.head, origin)
            before = iteration * share.steps

            # 1  S = Q K^T
            r_s = gemms.mma_qk.accumulator(thread)
            r_s.fill(0.0)
            for chunk in cutlass.range(cut.key.steps, unroll=1):
                here = params.read_register("tid.x")
                stage = self.advance(p, before + chunk, work, here)
                if chunk == 0:
                    self.load_bias(p, score_tile, here)
                cute.arch.cp_async_commit_group()
                s_q, s_k = self.chunk_tiles(cut.key, chunk, stage)
                matmul_qk.issue(gemms.mma_qk, r_s, matmul_qk.operands(gemms.mma_qk, s_q, s_k, here))

            # 2  P = exp2(S - logsumexp) in base 2, kept in the operands' type until dS
            here = params.read_register("tid.x")
            coordinates = row_view(gemms.mma_qk.coordinates(here))
            self.wait_for_bias()
            r_derivative = self.scores.apply_score_mod(p, gemms.mma_qk, r_s, coordinates, score_tile, smem.s_ds)
            self.scores.exponentiate(r_s, coordinates, smem.s_lse[None, iteration % stages], p.scale_log2)
            if tile_order.needs_mask(band, query_tile.index, key_tile, *tiles):
                masking.mask_weights(band, row_view(r_s), coordinates, origin)
            r_p = tile_copy.converted(r_s, self.dtype)
            r_kept = dropout.keep_bits_of_tile(build, p, coordinates, origin, (query_tile.seqlen, query_tile.head))
            if share.has_dv:
                r_dropped = r_p if r_kept is None else masking.with_dropout(r_p, r_kept)
                self.store_weights(gemms.mma_qk, r_dropped, smem.s_p, here)

            if share.has_ds:
                # 3  dP = dO V^T
                r_dp = gemms.mma_dov.accumulator(thread)
                r_dp.fill(0.0)
                for chunk in cutlass.range(cut.value.steps, unroll=1):
                    here = params.read_register("tid.x")
                    stage = self.advance(p, before + share.scores_end + chunk, work, here)
                    cute.arch.cp_async_commit_group()
                    s_do, s_v = self.chunk_tiles(cut.value, chunk, stage)
                    doivj.issue(gemms.mma_dov, r_dp, doivj.operands(gemms.mma_dov, s_do, s_v, here))
                # 4  dS = P (dP - delta)
                here = params.read_register("tid.x")
                coordinates = row_view(gemms.mma_qk.coordinates(here))
                masking.scale_kept(row_view(r_dp), r_kept, p.keep_scale)
                self.scores.gradient(r_dp, r_p, coordinates, smem.s_delta[None, iteration % stages])
                if cutlass.const_expr(self.scores.score_mod.has_derivative):
                    row_view(r_dp).store(row_view(r_dp).load() * r_derivative.load().to(Float32))
                r_ds = tile_copy.converted(r_dp, self.dtype)
                tile_copy.copy_r2s(here, gemms.mma_qk.mma, r_ds, smem.s_ds, tile_copy.has_stmatrix(build))
            cute.arch.sync_threads()
            here = params.read_register("tid.x")
            if share.has_grad_bias:
                self.scores.store_grad_bias(p, score_tile, smem.s_ds, here)
            # 5  dV += P^T dO
            if share.has_dv:
                for part in cutlass.range_constexpr(cut.value.parts):
                    stage = self.advance(p, before + share.dp_end + part, work, here)
                    cute.arch.cp_async_commit_group()
                    a = grad_v.a_operand(gemms.mma_pdo, smem.s_p, here)
                    a = self.from_query(gemms.mma_pdo, a, part * cut.value.rows)
                    for piece in cutlass.range_constexpr(cut.value.width // cut.value.piece):
                        s_do = self.row_piece(cut.value, stage, piece)
                        parts = Operands(a, grad_v.b_operand(gemms.mma_pdo, s_do, here))
                        grad_v.issue(gemms.mma_pdo, r_dv[None, None, None, piece], parts)
            # 6  dK += dS^T Q
            if share.has_dk:
                for part in cutlass.range_constexpr(cut.key.parts):
                    stage = self.advance(p, before + share.dv_end + part, work, here)
                    cute.arch.cp_async_commit_group()
                    a = grad_k.a_operand(gemms.mma_dsq, smem.s_ds, here)
                    a = self.from_query(gemms.mma_dsq, a, part * cut.key.rows)
                    for piece in cutlass.range_constexpr(cut.key.width // cut.key.piece):
                        s_q = self.row_piece(cut.key, stage, piece)
                        parts = Operands(a, grad_k.b_operand(gemms.mma_dsq, s_q, here))
                        grad_k.issue(gemms.mma_dsq, r_dk[None, None, None, piece], parts)
            # 7  dQ = dS K
            if share.has_dq:
                self.add_query_gradient(p, gemms, smem.s_ds, work, iteration, params.read_register("tid.x"))

        # 8  store dK and dV through the shared memory of all tiles
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        here = params.read_register("tid.x")
        if share.has_dk:
            r_dk.store(r_dk.load() * p.scale)
            self.store_block(p, "grad_key", work, gemms.mma_dsq, r_dk, here)
        if share.has_dv:
            if cutlass.const_expr(build.has("dropout")):
                r_dv.store(r_dv.load() * p.keep_scale)
            self.store_block(p, "grad_value", work, gemms.mma_pdo, r_dv, here)
        if share.has_grad_bias:
            self.scores.zero_unvisited_grad_bias(p, work.tile, here)

    def column_block(self) -> Int32:
        """Returns the column block of this block; recomputed at each use rather than kept in a register."""
        _, number = tile_and_column_block(self.grid.split(), self.blocks)
        keys, values = self.shares
        # Blocks for dK come first, because they take longer.
        return (
            cutlass.select_(number < keys, number, number - keys) if self.splits_dk_dv and keys and values else number
        )

    def gemms(self) -> Gemms:
        """Returns the five component GEMMs."""
        build, key, value = self.build, self.cut.key, self.cut.value
        keys = build.tile_n if build.item_bytes == 2 else KEYS_AT_ONCE
        return Gemms(
            mma_qk=MmaSync(replace(matmul_qk.spec(build), k=key.chunk, accumulate=True), build.dtype),
            mma_dov=MmaSync(replace(doivj.spec(build), k=value.chunk, accumulate=True), build.dtype),
            mma_pdo=MmaSync(replace(grad_v.spec(build), n=value.piece, k=value.rows), build.dtype),
            mma_dsq=MmaSync(replace(grad_k.spec(build), n=key.piece, k=key.rows), build.dtype),
            mma_dsk=AccumulatingMma(replace(grad_q.spec(build), n=self.accum.columns, k=keys), build.dtype),
        )

    def accumulators(self, gemms: Gemms) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns registers for dK and dV, one piece of columns after the other.

        Both are views of the same registers if a block has only one of them.
        """
        layouts = []
        for mma, side in ((gemms.mma_dsq, self.cut.key), (gemms.mma_pdo, self.cut.value)):
            piece = mma.mma.get_slice(0).partition_shape_C((self.build.tile_n, side.piece))
            layouts.append(cute.make_layout((*piece, side.width // side.piece)))
        if not self.splits_dk_dv:
            return tuple(cute.make_rmem_tensor(layout, Float32) for layout in layouts)
        shared = cute.make_rmem_tensor(max(cute.size(layout) for layout in layouts), Float32)
        return tuple(cute.make_tensor(shared.iterator, layout) for layout in layouts)

    def smem(self) -> Smem:
        """Returns P, dS and the row statistics; P has the place of dS if no block has both dV and dS."""
        build, stages = self.build, self.build.query_stages
        names = ("ds", "ds") if self.splits_dk_dv else ("p", "ds")
        offsets = (build.buffer(name).offset for name in names)
        s_p, s_ds = (smem_tile_at(offset, build, self.dtype, build.tile_m, build.tile_n) for offset in offsets)
        rows = cute.make_layout((build.tile_m, stages))
        statistics = tile_copy.smem_pointer(build, "statistics", Float32)
        starts = statistics, statistics + build.tile_m * stages
        return Smem(s_p, s_ds, *(cute.make_tensor(start, rows) for start in starts))

    def stage_offset(self, stage: Int32) -> Int32:
        """Returns where a stage of the ring starts, in bytes of shared memory."""
        return self.build.buffer("ring").offset + stage * self.cut.slot_bytes

    def chunk_tiles(self, side: HeadSide, chunk: Int32, stage: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Returns one chunk of Q and K, or of dO and V, in shared memory."""
        build, start = self.build, self.stage_offset(stage)
        rows = smem_tile_at(start, build, self.dtype, build.tile_m, side.chunk)
        if not side.keeps:
            key_start = start + tile_bytes(build.dtype, build.tile_m, side.chunk)
            return rows, smem_tile_at(key_start, build, self.dtype, build.tile_n, side.chunk)
        whole = build.buffer("key" if side is self.cut.key else "value").offset
        columns = chunk * side.chunk, side.chunk
        return rows, smem_columns_at(whole, build, build.tile_n, side.columns, columns)

    def row_piece(self, side: HeadSide, stage: Int32, piece: int) -> cute.Tensor:
        """Returns a piece of columns of the rows of dO or Q in a stage of the ring."""
        columns = piece * side.piece, side.piece
        return smem_columns_at(self.stage_offset(stage), self.build, side.rows, side.width, columns)

    def from_query(self, mma: MmaSync, a: Any, query: int) -> OperandSlice:
        """Returns the A operand from row `query` of P or dS on: B has the rows of one load step."""
        return OperandSlice(a, query // mma.spec.instruction[2])

    def key_block(self, piece: Any, width: int) -> cute.Tensor:
        """Returns piece number `piece` of K's column block, `width` columns wide."""
        build, key = self.build, self.cut.key
        first = self.column_block() * key.width if key.keeps and key.blocks > 1 else 0
        whole = key.columns if key.keeps else key.width
        return smem_columns_at(build.buffer("key").offset, build, build.tile_n, whole, (first + piece * width, width))

    def advance(self, p: Any, step: Int32, work: BlockWork, thread: Int32) -> Int32:
        """Waits for a load step and starts the load step that reuses the stage of the step before it.

        Commits nothing. Returns the stage of the step.
        """
        stages = self.build.query_stages
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()
        self.load_step(p, step + stages - 1, work, thread)
        return step % stages

    @cute.jit
    def load_step(self, p: Any, step: Int32, work: BlockWork, thread: Int32):
        """Starts the copies of a load step; none past the last step."""
        cut, share = self.cut, work.share
        iteration = step // share.steps
        index = step - iteration * share.steps
        stage = step % self.build.query_stages
        if iteration < work.tile.iterations:
            tile = self.grid.query_tile(p, work.tile.seqlen, work.tile.query_tiles, iteration)
            row0 = tile.index * self.build.tile_m
            queries = Rows(
                (tile.seqlen.batch, tile.head, tile.seqlen.query_start + row0), tile.seqlen.num_queries - row0
            )
            if index < share.scores_end:
                if index == 0:
                    tile_index = self.accum.tile_index(p, tile.head, tile.seqlen.first_tile + tile.index)
                    self.load_statistics(p, tile_index, iteration, thread)
                self.load_query_chunk(p, cut.key, queries, index, stage, thread)
                if (iteration == 0) | (not cut.key.keeps):
                    self.load_key_chunk(p, cut.key, work.tile, index, stage, thread)
            elif index < share.dp_end:
                self.load_query_chunk(p, cut.value, queries, index - share.scores_end, stage, thread)
                if (iteration == 0) | (not cut.value.keeps):
                    self.load_key_chunk(p, cut.value, work.tile, index - share.scores_end, stage, thread)
            elif index < share.dv_end:
                self.load_query_rows(p, cut.value, queries, index - share.dp_end, stage, thread)
            else:
                self.load_query_rows(p, cut.key, queries, index - share.dv_end, stage, thread)

    def load_statistics(self, p: Any, tile_index: Int64, iteration: Int32, thread: Int32) -> None:
        """Starts the copies of the logsumexp and delta of a query tile."""
        smem = self.smem()
        stage = iteration % self.build.query_stages
        row = cute.assume(tile_index * self.build.tile_m, divby=16)
        tile_copy.copy_vector_g2s(thread, params.pointer(p.logsumexp_log2, Float32) + row, smem.s_lse[None, stage])
        tile_copy.copy_vector_g2s(thread, params.pointer(p.delta, Float32) + row, smem.s_delta[None, stage])

    def load_query_chunk(
        self, p: Any, side: HeadSide, queries: Rows, chunk: Int32, stage: Int32, thread: Int32
    ) -> None:
        """Starts the copy of a chunk of Q or dO."""
        tile, _ = self.chunk_tiles(side, chunk, stage)
        source = column_slice(self.query_source(p, side, queries), chunk * side.chunk, side.chunk)
        tile_copy.copy_g2s(thread, self.build.threads, source, tile)

    def load_key_chunk(
        self, p: Any, side: HeadSide, work: KeyTileWork, chunk: Int32, stage: Int32, thread: Int32
    ) -> None:
        """Starts the copy of a chunk of K or V."""
        _, tile = self.chunk_tiles(side, chunk, stage)
        source = column_slice(self.key_source(p, side, work), chunk * side.chunk, side.chunk)
        tile_copy.copy_g2s(thread, self.build.threads, source, tile)

    def load_query_rows(self, p: Any, side: HeadSide, queries: Rows, part: Int32, stage: Int32, thread: Int32) -> None:
        """Starts the copy of some rows of the column block of Q or dO."""
        source = self.query_source(p, side, queries.advance(part * side.rows))
        if side.blocks > 1:
            source = column_slice(source, self.column_block() * side.width, side.width)
        copy_rows_g2s(thread, self.build, source, self.stage_offset(stage), (side.rows, side.width))

    @cute.jit
    def load_key_block(self, p: Any, work: BlockWork, thread: Int32):
        """Starts the copy of K's column block if K does not stay in shared memory."""
        if cutlass.const_expr(self.wants_query and not self.cut.key.keeps):  # noqa: SIM102
            if work.share.has_dq:
                width = self.cut.key.width
                source = column_slice(self.key_source(p, self.cut.key, work.tile), self.column_block() * width, width)
                tile_copy.copy_g2s(thread, self.build.threads, source, self.key_block(0, width))

    def query_source(self, p: Any, side: HeadSide, rows: Rows) -> tile_copy.GmemTile:
        """Returns rows of Q or dO in global memory."""
        is_query = side is self.cut.key
        columns = self.build.head_dim if is_query else self.build.head_dim_value
        name = "query" if is_query else "grad_output"
        return tile_copy.gmem_tile(self.build, p, name, rows.coordinates, rows.count, columns)

    def key_source(self, p: Any, side: HeadSide, work: KeyTileWork) -> tile_copy.GmemTile:
        """Returns the rows of K or V of the key tile in global memory."""
        build, seqlen, is_key = self.build, work.seqlen, side is self.cut.key
        key0, head = work.key_tile * build.tile_n, self.grid.key_head(p)
        columns = build.head_dim if is_key else build.head_dim_value
        coordinates = seqlen.batch, head, seqlen.key_start + key0
        return tile_copy.gmem_tile(build, p, "key" if is_key else "value", coordinates, seqlen.num_keys - key0, columns)

    def load_bias(self, p: Any, tile: ScoreTile, thread: Int32) -> None:
        """Starts the copy of the bias of a tile of scores to the place of dS."""
        if self.build.has("bias"):
            source = bias_of(self.build, p, "bias", tile.seqlen, tile.head, tile.origin)
            tile_copy.copy_g2s(thread, self.build.threads, source, self.smem().s_ds)

    def store_weights(self, mma_qk: MmaSync, r_p: cute.Tensor, s_p: cute.Tensor, thread: Int32) -> None:
        """Stores P to shared memory; its place may be that of the bias."""
        if self.splits_dk_dv and self.build.has("bias"):
            cute.arch.sync_threads()
        tile_copy.copy_r2s(thread, mma_qk.mma, r_p, s_p, tile_copy.has_stmatrix(self.build))

    def wait_for_bias(self) -> None:
        """Waits for the bias, which was loaded with the first step of this iteration.

        If an iteration has at least as many steps for S as the ring has stages, those have waited for it already.
        """
        if self.build.has("bias") and self.cut.key.steps < self.build.query_stages:
            cute.arch.cp_async_wait_group(self.cut.key.steps - 1)
            cute.arch.sync_threads()

    @cute.jit
    def add_query_gradient(
        self, p: Any, gemms: Gemms, s_ds: cute.Tensor, work: BlockWork, iteration: Int32, thread: Int32
    ):
        """Computes dQ = dS K and adds it to its sums, one after the other."""
        build = self.build
        tile = self.grid.query_tile(p, work.tile.seqlen, work.tile.query_tiles, iteration)
        tile_index = self.accum.tile_index(p, tile.head, tile.seqlen.first_tile + tile.index)
        columns = self.accum.columns
        index = self.accum.sum_index(tile_index, self.column_block() * self.cut.key.width)
        num_before = Int32(0)
        if cutlass.const_expr(build.deterministic):
            band = seqlen_info.band(build, p, tile.seqlen)
            num_before = tile_order.preceding_key_tiles(
                band, tile.index, work.tile.key_tile, build.tile_m, build.tile_n
            )
        for piece in cutlass.range(self.cut.key.width // columns, unroll=1):
            here = params.read_register("tid.x")
            r_dq = gemms.mma_dsk.accumulator(here)
            self.multiply_keys(gemms, r_dq, s_ds, self.key_block(piece, columns), here)
            if cutlass.const_expr(build.deterministic):
                self.acquire_first(p, piece, index, num_before, here)
            self.accum.add(self.accum.pointer(p, index + piece), r_dq, here)
        if cutlass.const_expr(build.deterministic):
            dq_semaphore.release(p, index, thread)

    @cute.jit
    def acquire_first(self, p: Any, piece: Int32, index: Int64, num_before: Int32, thread: Int32):
        """Acquires the semaphore before the first piece is added."""
        if piece == 0:
            dq_semaphore.acquire(self.build, p, index, num_before, thread)

    @cute.jit
    def multiply_keys(self, gemms: Gemms, r_dq: cute.Tensor, s_ds: cute.Tensor, s_k: cute.Tensor, thread: Int32):
        """Computes 7  dQ = dS K; float32 operands some keys at a time.

        The whole float32 product would be unrolled: ptxas would then load so many operands early that others spill.
        """
        r_dq.fill(0.0)
        count = gemms.mma_dsk.spec.k
        if cutlass.const_expr(count == self.build.tile_n):
            grad_q.issue(gemms.mma_dsk, r_dq, grad_q.operands(gemms.mma_dsk, s_ds, s_k, thread))
        else:
            for part in cutlass.range(self.build.tile_n // count, unroll=1):
                scores = cute.local_tile(s_ds, (self.build.tile_m, count), (0, part))
                rows = cute.local_tile(s_k, (count, cute.size(s_k, mode=[1])), (part, 0))
                grad_q.issue(gemms.mma_dsk, r_dq, grad_q.operands(gemms.mma_dsk, scores, rows, thread))

    def store_block(self, p: Any, name: str, work: BlockWork, mma: MmaSync, values: cute.Tensor, thread: Int32) -> None:
        """Writes a column block of dK or dV; keys that are stored but not used (seqused_k) get zeros."""
        build, seqlen = self.build, work.tile.seqlen
        side = self.cut.key if name == "grad_key" else self.cut.value
        for piece in range(side.width // side.piece):
            columns = smem_columns_at(0, build, build.tile_n, side.width, (piece * side.piece, side.piece))
            part = tile_copy.converted(values[None, None, None, piece], self.dtype)
            tile_copy.copy_r2s(thread, mma.mma, part, columns, tile_copy.has_stmatrix(build))
        cute.arch.sync_threads()
        tile = smem_tile_at(0, build, self.dtype, build.tile_n, side.width)
        key0, head = work.tile.key_tile * build.tile_n, self.grid.key_head(p)
        columns = build.head_dim if name == "grad_key" else build.head_dim_value
        coordinates, rows = (seqlen.batch, head, seqlen.key_start + key0), seqlen.stored_keys - key0
        target = tile_copy.gmem_tile(build, p, name, coordinates, rows, columns)
        if side.blocks > 1:
            target = column_slice(target, self.column_block() * side.width, side.width)
        tile_copy.copy_s2g(thread, build.threads, tile, target)
        cute.arch.sync_threads()


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernels, and arguments to compile it with."""
    main = BackwardSplitD(build)
    return backward_chain.trace(build, main, BackwardPostprocess(build, main.accum, MmaSync))
