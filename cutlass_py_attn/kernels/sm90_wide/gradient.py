"""One gradient of the sm90 backward of wide heads, 64 rows of dQ, dK or dV: what a block of it loads and computes.

The operands of backward_layout.py. Each of two warpgroups has half of the gradient's columns. They compute the
scores of alternate streamed tiles, P or dS, and hand these to each other through shared memory. While one computes
exponentials, the other multiplies.

    step            warpgroup of streamed tile j + 1                 the other, of tile j
    1, 3            S and dP of tile j + 1                           -
    5, 6 or 7       its columns of the gradient, from tile j         its columns of the gradient, from tile j
    2, 4            P and dS of tile j + 1, to shared memory         -

Tiles of dK and dV are streamed for every query head that reads the keys of the block, one head after the other.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutlass_py_attn.kernels.common import seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.quad_transpose import store_rows
from cutlass_py_attn.kernels.common.views import transposed
from cutlass_py_attn.kernels.common.wgmma import DescriptorOperand, Wgmma, row_view, smem_column_slice, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import doivj, grad_k, grad_q, grad_v, matmul_qk
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_common.named_barriers import WideBarrier
from cutlass_py_attn.kernels.sm90_common.score_tile import ScoreTile
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.kernels.sm90_wide import backward_layout as sm90_wide_backward
from cutlass_py_attn.kernels.sm90_wide.backward_layout import GRAD_KEY, GRAD_QUERY, GRAD_VALUE, RESIDENT, Gradient
from cutlass_py_attn.kernels.sm90_wide.chunk_ring import ChunkRing
from cutlass_py_attn.kernels.sm90_wide.layout import WARPGROUPS
from cutlass_py_attn.kernels.sm90_wide.scores import Statistics, WideScores
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS

RESULTS = {GRAD_QUERY.name: grad_q, GRAD_KEY.name: grad_k, GRAD_VALUE.name: grad_v}  # the GEMM of each gradient


@dataclass(frozen=True)
class Warpgroup:
    """What one of both warpgroups uses for all streamed tiles.

    index: its number; it computes the scores of the tiles j with j % 2 == index
    thread: number of this thread in the warpgroup
    resident: chunks of the resident tile of each product of scores, as operands
    streamed: all stages of the ring as the operand of scores
    p_ds: both buffers of P or dS as the operand of the gradient
    chunks: all stages of the ring as operands of the gradient, one for each chunk of the warpgroup's columns
    results: accumulators of the gradient, one for each chunk of the warpgroup's columns
    rows: the statistics of the block's queries, for dQ; None for others
    phases: the phases of the ring's full barriers of this warpgroup
    """

    index: int
    thread: Any
    resident: list[list[DescriptorOperand]]
    streamed: DescriptorOperand
    p_ds: DescriptorOperand
    chunks: list[DescriptorOperand]
    results: list[cute.Tensor]
    rows: Statistics | None
    phases: cute.Tensor


class WideGradient:
    """One gradient of a Build of variant wide."""

    def __init__(self, build: Build, gradient: Gradient) -> None:
        self.build, self.gradient = build, gradient
        self.dtype = DTYPES[build.dtype]
        start, stages = sm90_wide_backward.ring_buffer(build, gradient)
        _, most = sm90_wide_backward.ring_buffer(build, GRAD_VALUE)
        self.ring, self.scores = ChunkRing(build, start, stages, most), WideScores(build, gradient)
        self.score_chunks = sm90_wide_backward.score_chunks(build, gradient)
        self.result_chunks = sm90_wide_backward.result_chunks(build, gradient)
        self.num_score_chunks = sm90_wide_backward.num_score_chunks(build, gradient)
        swap_ab = gradient.is_transposed
        specs = matmul_qk.spec(build, swap_ab=swap_ab), doivj.spec(build, swap_ab=swap_ab)
        self.mma_scores = [
            [Wgmma(replace(spec, k=chunk.columns, accumulate=chunk.first > 0), build.dtype) for chunk in chunks]
            for spec, chunks in zip(specs, self.score_chunks, strict=False)
        ]
        result = replace(RESULTS[gradient.name].spec(build), a_transposed=False, accumulate=True)
        result = replace(result, warps=build.warps_scores)
        self.mma_results = [
            [Wgmma(replace(result, n=chunk.columns), build.dtype) for chunk in chunks] for chunks in self.result_chunks
        ]

    @cute.jit
    def load(self, p: Any, work: Any, maps: cutlass.Constexpr):
        """Producer warp: loads the resident tiles, and the streamed ones in the order of their use.

        maps: the tensor map of each operand
        """
        build, tiles = self.build, tma_tiles(self.build)
        barrier = self.resident_barrier()
        operands = [resident for resident, _ in self.gradient.products]
        size = sum(tiles[name][0] * tiles[name][1] * build.item_bytes for name in operands)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        side = "key" if self.gradient.is_transposed else "query"
        coordinates = tma.tile_coordinates(build, work.tile * build.tile_m, work.head, work.seqlen, side)
        for name in operands:
            tma.load_tile(build, maps[name], RESIDENT[name], tiles[name], coordinates, Int32(0), barrier)
        self.load_scores(p, work, maps, Int32(0), Int32(0))
        count = self.num_tiles(p, work)
        for j in cutlass.range(count, unroll=1):
            number = sm90_wide_backward.first_score_chunk(build, self.gradient, j + 1)
            if j + 1 < count:
                self.load_scores(p, work, maps, number, j + 1)
            number = number + cutlass.select_(j + 1 < count, Int32(self.num_score_chunks), Int32(0))
            coordinates = self.streamed_coordinates(p, work, j)
            for warpgroup in cutlass.range_constexpr(WARPGROUPS):
                chunks = self.result_chunks[warpgroup]
                self.ring.load(maps[self.gradient.streamed], chunks, number, coordinates, Int32(warpgroup))
                number = number + len(chunks)

    def load_scores(self, p: Any, work: WorkTile, maps: dict[str, Any], number: Int32, j: Int32) -> None:
        """Loads what the scores of streamed tile j are computed from; its chunks have numbers from `number` on."""
        coordinates = self.streamed_coordinates(p, work, j)
        for (_, operand), chunks in zip(self.gradient.products, self.score_chunks, strict=True):
            self.ring.load(maps[operand], chunks, number, coordinates, j % WARPGROUPS)
            number = number + len(chunks)

    def num_tiles(self, p: Any, work: WorkTile) -> Int32:
        """Returns the number of streamed tiles: key tiles, or query tiles of all query heads of the key head."""
        count = work.end - work.first
        return count * seqlen_info.group_size(self.build, p) if self.gradient.is_transposed else count

    def score_tile(self, p: Any, work: WorkTile, j: Int32) -> ScoreTile:
        """Returns the tile of scores of streamed tile j."""
        if not self.gradient.is_transposed:
            return ScoreTile(work.seqlen, work.band, work.head, work.tile, work.first + j)
        if not self.build.has("grouped"):
            return ScoreTile(work.seqlen, work.band, work.head, work.first + j, work.tile)
        count = work.end - work.first
        return ScoreTile(work.seqlen, work.band, work.head * p.group + j // count, work.first + j % count, work.tile)

    def streamed_coordinates(self, p: Any, work: WorkTile, j: Int32) -> tuple[Any, ...]:
        """Returns the coordinates of streamed tile j for TMA."""
        build, tile = self.build, self.score_tile(p, work, j)
        query0, key0 = tile.origin(build)
        if self.gradient.is_transposed:
            return tma.tile_coordinates(build, query0, tile.head, work.seqlen, "query")
        return tma.tile_coordinates(build, key0, seqlen_info.key_head(build, p, tile.head), work.seqlen, "key")

    @cute.jit
    def mma(self, p: Any, work: Any, warpgroup: cutlass.Constexpr, thread: Int32):
        """One of both warpgroups: the scores of every second streamed tile, and its columns of the gradient."""
        own = self.create_warpgroup(p, work, warpgroup, thread)
        cute.arch.mbarrier_wait(self.resident_barrier(), 0)
        tiles = self.num_tiles(p, work)
        if cutlass.const_expr(warpgroup == 0):
            self.first_step(p, work, own)
        # Two tiles a round: which warpgroup computes which is known when the kernel is compiled.
        for pair in cutlass.range((tiles - 1) // WARPGROUPS, unroll=1):
            self.step(p, work, own, 0, WARPGROUPS * pair, pair > 0)
            self.step(p, work, own, 1, WARPGROUPS * pair + 1, True)
        if (tiles - 1) % WARPGROUPS == 1:
            self.step(p, work, own, 0, tiles - 2, tiles > WARPGROUPS)
        self.last_step(own, tiles)
        # 8  scale and store the rows of the gradient
        if cutlass.const_expr(self.build.has("seqused")):
            # Beside used lengths their place has no registers during the tiles, and is read again.
            work = replace(work, seqlen=seqlen_info.create(self.build, p, work.seqlen.index))
        self.store(p, work, own)

    @cute.jit
    def first_step(self, p: Any, work: Any, own: Any):
        """Computes P or dS of streamed tile 0."""
        tile = self.score_tile(p, work, Int32(0))
        loaded = self.load_statistics(p, tile, own)
        accumulators = [chunks[0].accumulator(own.thread) for chunks in self.mma_scores]
        self.issue_scores(own, accumulators, Int32(0))
        self.mma_scores[0][0].wait()
        self.ring.release(Int32(self.num_score_chunks - 1))
        self.compute(p, tile, own, accumulators, loaded)
        self.hand_over(own, accumulators)

    @cute.jit
    def step(self, p: Any, work: Any, own: Any, owner: cutlass.Constexpr, j: Int32, is_used: Any):
        """Adds to the gradient from tile j; the warpgroup that does not own the tile computes P or dS of tile j + 1.

        owner: warpgroup of tile j. is_used: whether the other buffer of P or dS has been used before
        """
        first_score = sm90_wide_backward.first_score_chunk(self.build, self.gradient, j + 1)
        first_result = sm90_wide_backward.first_result_chunk(self.build, self.gradient, j, own.index, is_last=False)
        if cutlass.const_expr(own.index != owner):
            tile = self.score_tile(p, work, j + 1)
            loaded = self.load_statistics(p, tile, own)
            accumulators = [chunks[0].accumulator(own.thread) for chunks in self.mma_scores]
            self.issue_scores(own, accumulators, first_score)
            self.wait_at(WideBarrier.P_FULL_0 + owner)
            self.issue_result(own, Int32(owner), first_result)
            self.mma_scores[0][0].wait(len(own.results))
            self.ring.release(first_score + self.num_score_chunks - 1)
            self.compute(p, tile, own, accumulators, loaded)
            if is_used:
                self.wait_at(WideBarrier.P_EMPTY_0 + own.index)
            self.hand_over(own, accumulators)
            self.finish_result(own, first_result)
            if j + WARPGROUPS < self.num_tiles(p, work):
                self.arrive_at(WideBarrier.P_EMPTY_0 + owner)
        else:
            self.issue_result(own, Int32(owner), first_result)
            self.finish_result(own, first_result)

    @cute.jit
    def last_step(self, own: Any, tiles: Int32):
        """Adds to the gradient from the last tile."""
        owner = (tiles - 1) % WARPGROUPS
        if owner != own.index:
            self.wait_at(WideBarrier.P_FULL_0 + owner)
        gradient = self.gradient
        first = sm90_wide_backward.first_result_chunk(self.build, gradient, tiles - 1, own.index, is_last=True)
        self.issue_result(own, owner, first)
        self.mma_results[0][0].wait()

    def issue_scores(self, own: Warpgroup, accumulators: list[cute.Tensor], first: Int32) -> None:
        """Issues S and dP as a wgmma group for each chunk, and releases all chunks but the last.

        first: number of the first chunk
        """
        # 1  S = Q K^T, or S^T = K Q^T
        self.issue_product(own, 0, accumulators, first)
        if self.gradient.has_ds:
            # 3  dP = dO V^T, or dP^T = V dO^T
            self.issue_product(own, 1, accumulators, first + len(self.score_chunks[0]))

    def issue_product(self, own: Warpgroup, index: int, accumulators: list[cute.Tensor], first: Int32) -> None:
        """Issues a product of scores as a wgmma group for each chunk, and releases the chunk before each.

        index: number of the product. first: number of its first chunk
        """
        for number, (mma, resident) in enumerate(zip(self.mma_scores[index], own.resident[index], strict=True)):
            stage = self.ring.wait(first + number, own.index, own.phases)
            mma.issue(accumulators[index], Operands(resident, own.streamed.stage(stage)))
            if index + number:
                mma.wait(1)
                self.ring.release(first + number - 1)

    def issue_result(self, own: Warpgroup, owner: Int32, first: Int32) -> None:
        """Issues the product of the gradient as a wgmma group for each chunk.

        owner: warpgroup of the tile. first: number of the first chunk
        """
        # 7  dQ += dS K; in blocks of dV it is step 5, dV += P^T dO, in blocks of dK step 6, dK += dS^T Q
        for index, mma in enumerate(self.mma_results[own.index]):
            stage = self.ring.wait(first + index, own.index, own.phases)
            mma.issue(own.results[index], Operands(own.p_ds.stage(owner), own.chunks[index].stage(stage)))

    def finish_result(self, own: Warpgroup, first: Int32) -> None:
        """Waits for the products of `issue_result`, and releases their chunks."""
        count = len(own.results)
        for index in range(count):
            self.mma_results[own.index][index].wait(count - 1 - index)
            self.ring.release(first + index)

    def load_statistics(self, p: Any, tile: ScoreTile, own: Warpgroup) -> Any:
        """Returns what a thread loads of the statistics of a tile while its scores are in flight; None for dQ."""
        return self.scores.load_columns(p, tile, own.thread) if self.gradient.is_transposed else None

    def compute(self, p: Any, tile: ScoreTile, own: Warpgroup, accumulators: list[cute.Tensor], loaded: Any) -> None:
        """Turns S into P, and dP into dS if there is one."""
        of = self.scores.share_columns(loaded, own.index, own.thread) if own.rows is None else own.rows
        # 2  P = exp2(S - logsumexp) in base 2
        self.scores.compute_weights(p, accumulators[0], self.mma_scores[0][0], tile, own.thread, of)
        if self.gradient.has_ds:
            # 4  dS = P (dP - delta)
            self.scores.compute_gradients(*accumulators, of)

    def hand_over(self, own: Warpgroup, accumulators: list[cute.Tensor]) -> None:
        """Stores P or dS to the warpgroup's buffer, and lets the other warpgroup read it."""
        tile = self.p_ds_tiles()[None, None, own.index]
        values = tile_copy.converted(accumulators[-1], self.dtype)
        tile_copy.copy_r2s(own.thread, self.mma_scores[0][0].mma, values, tile, True)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=WideBarrier.WARPGROUP_0 + own.index, number_of_threads=WARPGROUP_THREADS)
        self.arrive_at(WideBarrier.P_FULL_0 + own.index)

    def wait_at(self, barrier: Any) -> None:
        """Waits at a named barrier of both warpgroups."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    def arrive_at(self, barrier: Any) -> None:
        """Arrives at a named barrier of both warpgroups without waiting."""
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    @cute.jit
    def store(self, p: Any, work: Any, own: Any):
        """Scales and stores this warpgroup's columns of the gradient."""
        build, gradient, seqlen = self.build, self.gradient, work.seqlen
        row0 = work.tile * build.tile_m
        if cutlass.const_expr(gradient.is_transposed):
            start, rows = seqlen.key_start + row0, seqlen.stored_keys - row0
        else:
            start, rows = seqlen.query_start + row0, seqlen.num_queries - row0
        columns = build.head_dim if gradient.has_ds else build.head_dim_value
        coordinates = RowCoordinates(seqlen.batch, work.head, start)
        target = tile_copy.gmem_tile(build, p, gradient.name, coordinates, rows, columns)
        for index in cutlass.range_constexpr(len(own.results)):
            chunk, mma = self.result_chunks[own.index][index], self.mma_results[own.index][index]
            result = own.results[index]
            if cutlass.const_expr(gradient.has_ds):
                result.store(result.load() * p.scale)
            part = replace(target, start=target.start + chunk.first, columns=columns - chunk.first)
            values = row_view(tile_copy.converted(result, self.dtype))
            store_rows(values, row_view(mma.coordinates(own.thread)), part)

    def create_warpgroup(self, p: Any, work: WorkTile, index: int, thread: Int32) -> Warpgroup:
        """Returns what a warpgroup uses for all streamed tiles."""
        build, base = self.build, tile_copy.smem_base(self.build)
        mma, products, ring = self.mma_scores[0][0], self.mma_results[index], self.ring.tiles()
        row_bytes = build.tile_m * build.item_bytes
        resident = []
        for (operand, _), chunks in zip(self.gradient.products, self.score_chunks, strict=True):
            start = build.buffer(RESIDENT[operand]).offset
            tiles = [
                smem_tile_at(base, start + chunk.first * row_bytes, self.dtype, (build.tile_m, chunk.columns))
                for chunk in chunks
            ]
            resident.append([mma.a_operand(tile, thread) for tile in tiles])
        results = [product.accumulator(thread) for product in products]
        for accumulator in results:
            accumulator.fill(0.0)
        rows = None
        if not self.gradient.is_transposed:
            rows = self.scores.read_rows(p, self.score_tile(p, work, Int32(0)), self.scores.coordinates(mma, thread))
        return Warpgroup(
            index=index,
            thread=thread,
            resident=resident,
            streamed=mma.b_operand(ring),
            p_ds=products[0].a_operand(self.p_ds_tiles(), thread),
            chunks=[
                product.b_operand(transposed(smem_column_slice(ring, 0, chunk.columns)))
                for product, chunk in zip(products, self.result_chunks[index], strict=True)
            ],
            results=results,
            rows=rows,
            phases=self.ring.phases(),
        )

    def p_ds_tiles(self) -> cute.Tensor:
        """Returns both buffers of P or dS in shared memory, (rows, columns, warpgroups)."""
        build, base = self.build, tile_copy.smem_base(self.build)
        return smem_tile_at(base, build.buffer("p_ds").offset, self.dtype, (build.tile_m, build.tile_n), WARPGROUPS)

    def resident_barrier(self) -> cute.Pointer:
        """Returns the full barrier of the resident tiles."""
        return self.ring.next_barrier()
