"""sm90 forward of wide heads, head dims 257 to 512: two warpgroups divide the columns of O = softmax(scale Q K^T) V.

A block has 64 queries. O of all columns would take more registers than a warpgroup has, so each of two warpgroups has
half of the columns. They compute S of alternate key tiles, softmax and all, and hand P and the factors of the rows to
each other through shared memory. While one computes exponentials, the other multiplies.

    step            warpgroup of key tile j + 1                         the other, of key tile j
    1, 3            S = Q K^T of key tile j + 1, then O += P(j) V       O += P(j) V
    2               softmax of key tile j + 1, P to shared memory

One producer warp loads the query tile and then keys and values into a ring of chunks (chunk_ring.py). The two blocks of
a cluster have neighbouring query tiles of a head and the same key tiles: those of both. The grid has a cluster for each
pair of query tiles, the longest first.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
from cutlass import Float32, GridConstant, Int32

from cutlass_py_attn.integers import larger
from cutlass_py_attn.kernels.common import logsumexp, masking, params, seqlen_info, tile_copy, tma
from cutlass_py_attn.kernels.common.mma_sync import Operands
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.kernels.common.quad_transpose import store_rows
from cutlass_py_attn.kernels.common.softmax import multiply_rows, safe_scale
from cutlass_py_attn.kernels.common.wgmma import DescriptorOperand, Wgmma, row_view, smem_column_slice, smem_tile_at
from cutlass_py_attn.kernels.component_gemms.products import matmul_pv, matmul_qk
from cutlass_py_attn.kernels.sm90_common.cluster import Cluster
from cutlass_py_attn.kernels.sm90_common.layout import tma_tiles
from cutlass_py_attn.kernels.sm90_common.named_barriers import WideBarrier
from cutlass_py_attn.kernels.sm90_common.tile_scheduler import WorkTile
from cutlass_py_attn.kernels.sm90_forward.score_mod_registers import ScoreModRegisters
from cutlass_py_attn.kernels.sm90_wide import layout as sm90_wide
from cutlass_py_attn.kernels.sm90_wide.alternating_softmax import AlternatingSoftmax
from cutlass_py_attn.kernels.sm90_wide.chunk_ring import ChunkRing
from cutlass_py_attn.kernels.sm90_wide.layout import WARPGROUPS, registers
from cutlass_py_attn.launch import abi, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_THREADS
from cutlass_py_attn.launch.variants import CLUSTER


@dataclass(frozen=True)
class Warpgroup:
    """What one of both warpgroups uses for all key tiles.

    index: its number; it computes S of the key tiles j with j % 2 == index
    thread: number of this thread in the warpgroup
    coordinates: (row, column) in a tile of each score that the thread holds
    query: chunks of the query tile as operands
    key: all stages of the ring as the operand of S
    p: both buffers of P as the operand of O
    values: all stages of the ring as operands of O, one for each chunk of the warpgroup's columns
    outputs: accumulators of O, one for each chunk of the warpgroup's columns
    softmax: the softmax of the warpgroup's key tiles
    phases: the phases of the ring's full barriers of this warpgroup
    operands: operands of the score terms that stay in registers
    """

    index: int
    thread: Any
    coordinates: cute.Tensor
    query: list[DescriptorOperand]
    key: DescriptorOperand
    p: DescriptorOperand
    values: list[DescriptorOperand]
    outputs: list[cute.Tensor]
    softmax: AlternatingSoftmax
    phases: cute.Tensor
    operands: tuple[Any, ...]


class WideForwardSm90:
    """The forward kernel of one Build of variant wide."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtype = DTYPES[build.dtype]
        self.key_chunks, self.value_chunks = sm90_wide.key_chunks(build), sm90_wide.value_chunks(build)
        scores, output = matmul_qk.spec(build), matmul_pv.spec(build)
        self.mma_qk = [
            Wgmma(replace(scores, k=chunk.columns, accumulate=chunk.first > 0), build.dtype)
            for chunk in self.key_chunks
        ]
        self.mma_pv = [
            [Wgmma(replace(output, n=chunk.columns), build.dtype) for chunk in chunks] for chunks in self.value_chunks
        ]
        self.score_mod = ScoreModRegisters(build)
        self.cluster = Cluster(build)
        self.ring = ChunkRing(build, build.buffer("ring").offset, sm90_wide.ring_stages(build))
        self.registers = registers(build)
        # A float16 row that attends mostly to one key is more accurate with that key's weight at exactly 1.
        self.rescales_lazily = build.dtype == "bfloat16"

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        build = self.build
        maps = tuple(
            tma.placeholder_map(p, getattr(p, name), self.dtype, *tile) for name, tile in tma_tiles(build).items()
        )
        params.set_entry_name(build, self.kernel)
        grid, block, cluster_shape = (p.num_queries, p.num_heads, p.batch), (build.threads, 1, 1), (CLUSTER, 1, 1)
        self.kernel(*maps, p).launch(grid=grid, block=block, cluster=cluster_shape, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        p: Any,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.ring.create()
                cute.arch.mbarrier_init(self.query_barrier(), 1)
        self.cluster.sync_barrier_init()
        work = self.work_tile(p)
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.load_if(p, work, (map_q, map_k, map_v))
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            if warpgroup == 1:
                self.mma_if(p, work, 0, thread - WARPGROUP_THREADS)
            else:
                self.mma_if(p, work, 1, thread - 2 * WARPGROUP_THREADS)
        self.cluster.sync_exit()

    def work_tile(self, p: Any) -> WorkTile:
        """Returns this block's query tile, and the key tiles of both blocks of the cluster."""
        build = self.build
        block, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        pair = block // CLUSTER
        if not build.form.sees_all:
            pair = blocks // CLUSTER - 1 - pair  # the longest first
        seqlen = seqlen_info.create(build, p, batch + p.first_batch)
        band = seqlen_info.band(build, p, seqlen)
        shape = band, pair, CLUSTER * build.tile_m, build.tile_n
        first = tile_order.key_tile_start(*shape)
        end = larger(tile_order.key_tile_end(*shape), first + 1)
        return WorkTile(seqlen, band, head + p.first_head, CLUSTER * pair + self.cluster.rank(), first, end)

    def has_queries(self, work: WorkTile) -> Any:
        """Returns whether one of the cluster's query tiles is in its sequence: sequences differ in length."""
        return work.tile // CLUSTER * CLUSTER * self.build.tile_m < work.seqlen.num_queries

    @cute.jit
    def load_if(self, p: Any, work: Any, maps: tuple):
        """Does `load` if the sequence has the query tile."""
        if cutlass.const_expr(self.build.has("varlen")):
            if self.has_queries(work):
                self.load(p, work, maps)
        else:
            self.load(p, work, maps)

    @cute.jit
    def mma_if(self, p: Any, work: Any, warpgroup: cutlass.Constexpr, thread: Int32):
        """Does `mma` if the sequence has the query tile."""
        if cutlass.const_expr(self.build.has("varlen")):
            if self.has_queries(work):
                self.mma(p, work, warpgroup, thread)
        else:
            self.mma(p, work, warpgroup, thread)

    @cute.jit
    def load(self, p: Any, work: Any, maps: tuple):
        """Producer warp: loads the query tile, and keys and values in the order of their use."""
        build, seqlen = self.build, work.seqlen
        tile, barrier = tma_tiles(build)["query"], self.query_barrier()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, tile[0] * tile[1] * build.item_bytes)
        coordinates = tma.tile_coordinates(build, work.tile * build.tile_m, work.head, seqlen, "query")
        tma.load_tile(build, maps[0], "query", tile, coordinates, Int32(0), barrier)
        key_head = seqlen_info.key_head(build, p, work.head)
        coordinates = tma.tile_coordinates(build, work.first * build.tile_n, key_head, seqlen, "key")
        self.ring.load(maps[1], self.key_chunks, Int32(0), coordinates, Int32(0))
        tiles = work.end - work.first
        for j in cutlass.range(tiles, unroll=1):
            number = sm90_wide.first_key_chunk(build, j + 1)
            if j + 1 < tiles:
                key0 = (work.first + j + 1) * build.tile_n
                coordinates = tma.tile_coordinates(build, key0, key_head, seqlen, "key")
                self.ring.load(maps[1], self.key_chunks, number, coordinates, (j + 1) % WARPGROUPS)
            number = number + cutlass.select_(j + 1 < tiles, Int32(len(self.key_chunks)), Int32(0))
            coordinates = tma.tile_coordinates(build, (work.first + j) * build.tile_n, key_head, seqlen, "key")
            for warpgroup in cutlass.range_constexpr(WARPGROUPS):
                chunks = self.value_chunks[warpgroup]
                self.ring.load(maps[2], chunks, number, coordinates, Int32(warpgroup))
                number = number + len(chunks)

    @cute.jit
    def mma(self, p: Any, work: Any, warpgroup: cutlass.Constexpr, thread: Int32):
        """One of both warpgroups: S and P of every second key tile, and its columns of O."""
        own = self.create_warpgroup(p, work, warpgroup, thread)
        cute.arch.mbarrier_wait(self.query_barrier(), 0)
        tiles = work.end - work.first
        if cutlass.const_expr(warpgroup == 0):
            r_s = self.mma_qk[0].accumulator(thread)
            bias = self.load_bias(p, work, work.first, own)
            self.issue_scores(own, r_s, Int32(0))
            self.mma_qk[0].wait()
            self.ring.release(Int32(len(self.key_chunks) - 1))
            self.compute_weights(p, work, work.first, own, r_s, bias, True)
            self.store_weights(own, r_s)
        # Two key tiles a round: which warpgroup computes which is known when the kernel is compiled.
        for pair in cutlass.range((tiles - 1) // WARPGROUPS, unroll=1):
            self.step(p, work, own, 0, WARPGROUPS * pair, pair > 0)
            self.step(p, work, own, 1, WARPGROUPS * pair + 1, True)
        if (tiles - 1) % WARPGROUPS == 1:
            self.step(p, work, own, 0, tiles - 2, tiles > WARPGROUPS)
        self.last_step(own, tiles)
        # 4  normalise, store the logsumexp and the output tile
        self.store(p, work, own, (tiles - 1) % WARPGROUPS)

    @cute.jit
    def step(self, p: Any, work: Any, own: Any, owner: cutlass.Constexpr, j: Int32, is_used: Any):
        """Adds P V of key tile j to O; the warpgroup that does not own the tile computes P of tile j + 1.

        owner: warpgroup of key tile j. is_used: whether the other buffer of P has been used before
        """
        first_key = sm90_wide.first_key_chunk(self.build, j + 1)
        first_value = sm90_wide.first_value_chunk(self.build, j, own.index, is_last=False)
        if cutlass.const_expr(own.index != owner):
            key_tile = work.first + j + 1
            # 1  S = Q K^T of key tile j + 1
            r_s = self.mma_qk[0].accumulator(own.thread)
            bias = self.load_bias(p, work, key_tile, own)
            self.issue_scores(own, r_s, first_key)
            self.wait_at(WideBarrier.P_FULL_0 + owner)
            # 3  O += P V of key tile j
            self.issue_output(own, Int32(owner), first_value)
            self.mma_qk[0].wait(len(own.outputs))
            self.ring.release(first_key + len(self.key_chunks) - 1)
            # 2  softmax of key tile j + 1
            self.compute_weights(p, work, key_tile, own, r_s, bias, False)
            if is_used:
                self.wait_at(WideBarrier.P_EMPTY_0 + own.index)
            self.store_weights(own, r_s)
            self.finish_output(own, first_value)
            if j + WARPGROUPS < work.end - work.first:
                self.arrive_at(WideBarrier.P_EMPTY_0 + owner)
        else:
            self.issue_output(own, Int32(owner), first_value)
            self.finish_output(own, first_value)

    @cute.jit
    def last_step(self, own: Any, tiles: Int32):
        """Adds P V of the last key tile to O."""
        owner = (tiles - 1) % WARPGROUPS
        if owner != own.index:
            self.wait_at(WideBarrier.P_FULL_0 + owner)
        first = sm90_wide.first_value_chunk(self.build, tiles - 1, own.index, is_last=True)
        self.issue_output(own, owner, first)
        self.mma_pv[0][0].wait()

    def issue_scores(self, own: Warpgroup, r_s: cute.Tensor, first: Int32) -> None:
        """Issues S = Q K^T as a wgmma group for each chunk of K, and releases all chunks but the last.

        first: number of the first chunk
        """
        for index, mma in enumerate(self.mma_qk):
            stage = self.ring.wait(first + index, own.index, own.phases)
            matmul_qk.issue(mma, r_s, Operands(own.query[index], own.key.stage(stage)))
            if index:
                mma.wait(1)
                self.ring.release(first + index - 1)

    def issue_output(self, own: Warpgroup, owner: Int32, first: Int32) -> None:
        """Rescales O, and issues O += P V as a wgmma group for each chunk of V.

        owner: warpgroup of the key tile. first: number of the first chunk
        """
        own.softmax.rescale([row_view(r_o) for r_o in own.outputs], owner)
        for index, mma in enumerate(self.mma_pv[own.index]):
            stage = self.ring.wait(first + index, own.index, own.phases)
            matmul_pv.issue(mma, own.outputs[index], Operands(own.p.stage(owner), own.values[index].stage(stage)))

    def finish_output(self, own: Warpgroup, first: Int32) -> None:
        """Waits for the products of `issue_output`, and releases their chunks of V."""
        count = len(own.outputs)
        for index in range(count):
            self.mma_pv[own.index][index].wait(count - 1 - index)
            self.ring.release(first + index)

    def load_bias(self, p: Any, work: WorkTile, key_tile: Int32, own: Warpgroup) -> Any:
        """Returns the bias of a tile of scores, loaded while S is in flight; None without a bias."""
        return self.score_mod.load_bias(p, work.seqlen, work.head, self.tile_origin(work, key_tile), own.coordinates)

    def compute_weights(
        self, p: Any, work: WorkTile, key_tile: Int32, own: Warpgroup, r_s: cute.Tensor, bias: Any, is_first: bool
    ) -> None:
        """Turns a tile of S into P: score terms, mask, softmax. is_first: whether it is the first key tile."""
        scores, origin = row_view(r_s), self.tile_origin(work, key_tile)
        if self.score_mod.present:
            self.score_mod.apply(p, scores, own.coordinates, origin, work.band, (own.operands, bias))
        self.mask_if_needed(work, key_tile, scores, own.coordinates)
        own.softmax.weights(scores, is_first)

    @cute.jit
    def mask_if_needed(self, work: Any, key_tile: Int32, scores: cute.Tensor, coordinates: cute.Tensor):
        """Masks a tile of S that has a masked pair."""
        if tile_order.needs_mask(work.band, work.tile, key_tile, self.build.tile_m, self.build.tile_n):
            masking.mask_scores(work.band, scores, coordinates, self.tile_origin(work, key_tile))

    def tile_origin(self, work: WorkTile, key_tile: Int32) -> tuple[Int32, Int32]:
        """Returns the first query and the first key of a tile of S."""
        return work.tile * self.build.tile_m, key_tile * self.build.tile_n

    def store_weights(self, own: Warpgroup, r_s: cute.Tensor) -> None:
        """Stores P to the warpgroup's buffer, and lets the other warpgroup read it."""
        tile = self.p_tiles()[None, None, own.index]
        tile_copy.copy_r2s(own.thread, self.mma_qk[0].mma, tile_copy.converted(r_s, self.dtype), tile, True)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_warpgroup(own.index)
        self.arrive_at(WideBarrier.P_FULL_0 + own.index)

    def sync_warpgroup(self, warpgroup: int) -> None:
        """Waits for the other threads of the warpgroup."""
        barrier = WideBarrier.WARPGROUP_0 + warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)

    def wait_at(self, barrier: Any) -> None:
        """Waits at a named barrier of both warpgroups."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    def arrive_at(self, barrier: Any) -> None:
        """Arrives at a named barrier of both warpgroups without waiting."""
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=WARPGROUPS * WARPGROUP_THREADS)

    @cute.jit
    def store(self, p: Any, work: Any, own: Any, last: Int32):
        """Normalises and stores this warpgroup's columns of the output tile; the first also stores the logsumexp.

        last: warpgroup of the last key tile
        """
        build, seqlen, softmax = self.build, work.seqlen, own.softmax
        query0 = work.tile * build.tile_m
        softmax.leave_sums(last)
        # Not one barrier where both wait: compute-sanitizer takes that for divergence while the producer's warps wait
        # for the other block of the cluster. It follows what an arrival orders behind a barrier of the own warpgroup.
        self.sync_warpgroup(own.index)
        self.arrive_at(WideBarrier.SUMS_0 + own.index)
        self.wait_at(WideBarrier.SUMS_0 + 1 - own.index)
        sink = params.load_scalar(p.sinks, Float32, work.head) if cutlass.const_expr(build.has("sinks")) else None
        factors, lse = softmax.finish(last, sink)
        if cutlass.const_expr(own.index == 0):
            row = RowCoordinates(seqlen.index, work.head, query0)
            logsumexp.store_tile(p, lse, own.coordinates, row, build.tile_m, seqlen.num_queries)
        start = RowCoordinates(seqlen.batch, work.head, seqlen.query_start + query0)
        target = tile_copy.gmem_tile(build, p, "output", start, seqlen.num_queries - query0, build.head_dim_value)
        for index in cutlass.range_constexpr(len(own.outputs)):
            chunk, mma, r_o = self.value_chunks[own.index][index], self.mma_pv[own.index][index], own.outputs[index]
            multiply_rows(row_view(r_o), factors)
            coordinates = row_view(mma.coordinates(own.thread))
            part = replace(target, start=target.start + chunk.first, columns=build.head_dim_value - chunk.first)
            store_rows(row_view(tile_copy.converted(r_o, self.dtype)), coordinates, part)

    def create_warpgroup(self, p: Any, work: WorkTile, index: int, thread: Int32) -> Warpgroup:
        """Returns what a warpgroup uses for all key tiles."""
        build, base = self.build, tile_copy.smem_base(self.build)
        mma_qk, products, ring = self.mma_qk[0], self.mma_pv[index], self.ring.tiles()
        row_bytes, query = build.tile_m * build.item_bytes, build.buffer("query").offset
        coordinates = row_view(mma_qk.coordinates(thread))
        tile_rows = [coordinates[row, 0][0] for row in range(cute.size(coordinates, mode=[0]))]
        scale_log2 = Float32(1.0) if self.score_mod.present else safe_scale(p.scale_log2)
        outputs = [mma.accumulator(thread) for mma in products]
        for r_o in outputs:
            r_o.fill(0.0)
        return Warpgroup(
            index=index,
            thread=thread,
            coordinates=coordinates,
            query=[
                mma_qk.a_operand(
                    smem_tile_at(base, query + chunk.first * row_bytes, self.dtype, (build.tile_m, chunk.columns)),
                    thread,
                )
                for chunk in self.key_chunks
            ],
            key=mma_qk.b_operand(ring),
            p=products[0].a_operand(self.p_tiles(), thread),
            values=[
                matmul_pv.b_operand(mma, smem_column_slice(ring, 0, chunk.columns))
                for mma, chunk in zip(products, self.value_chunks[index], strict=True)
            ],
            outputs=outputs,
            softmax=AlternatingSoftmax(
                index,
                tile_copy.smem_pointer(build, "row_statistics", Float32),
                build.tile_m,
                tile_rows,
                scale_log2,
                self.rescales_lazily,
            ),
            phases=self.ring.phases(),
            operands=self.score_mod.load_operands(p, work.seqlen.index, work.head),
        )

    def p_tiles(self) -> cute.Tensor:
        """Returns both buffers of P in shared memory, (queries, keys, warpgroups)."""
        build, base = self.build, tile_copy.smem_base(self.build)
        return smem_tile_at(base, build.buffer("p").offset, self.dtype, (build.tile_m, build.tile_n), WARPGROUPS)

    def query_barrier(self) -> cute.Pointer:
        """Returns the full barrier of the query tile."""
        return self.ring.next_barrier()


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return WideForwardSm90(build), params.example_arguments(abi.fields_of(build))
