"""Wide Hopper backward: heads whose dK and dV are too many registers for one warpgroup.

As HopperBackward, but two blocks of a cluster have 64 keys each, and two warpgroups of a block share them by product:
one weighs (S^T, P, dV), the other differentiates (dP^T, dS, dK). P goes from thread to thread through shared memory,
and dS comes in its place; both gradients are products of registers. Each block brings every second strip of the query
and grad_output tiles for both, and gets the other's dS: its third warpgroup adds dQ of all 128 keys, in its block's
share of the columns. So each tile is read, and each sum added to, once for 128 keys.

    weigh            1 S^T = K Q^T    2 P    5 dV += P^T dO       in flight    under 2: 5 of the query tile before
    differentiate    3 dP^T = V dO^T  4 dS   6 dK += dS^T Q                    under 4: 6 of the query tile before
    the third        7 dQ = dS K                                               beside all of them

    pipe         full: arrivals             empty: arrivals                                       slots
    query        TMA of both, logsumexp     of both blocks 4 warps behind 6 and 4 behind the      query_stages
                                            next 1; of this one all threads behind 1
    grad_output  TMA of both, delta         of both blocks 4 warps behind 5 and 4 behind the      grad_output_stages
                                            next 3; of this one all threads behind 3
    dS           128 threads, the other's   of both blocks 4 warps behind 7                       1 or 2
    key          TMA                        4 warps behind the last 1, 4 behind the last 7        1
    value        TMA                        4 warps behind the last 3                             1
    P            a named barrier for each slot of dS, in whose place it comes
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives as prim
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32

from cutlass_py_attn import abi
from cutlass_py_attn.fused.hopper_backward import HopperBackward
from cutlass_py_attn.fused.wide_grad_query import WideGradQuery
from cutlass_py_attn.gemm import doivj, grad_k, grad_v, matmul_qk
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS, Gemm
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, columns_of, row_view, tile_at
from cutlass_py_attn.hopper import CLUSTER, loaded_tiles
from cutlass_py_attn.parts import moves, params, pipes
from cutlass_py_attn.parts.cluster import Cluster
from cutlass_py_attn.parts.integers import larger
from cutlass_py_attn.parts.items import Item
from cutlass_py_attn.parts.key_items import PairedKeyItems
from cutlass_py_attn.parts.pipes import arrive_all, before
from cutlass_py_attn.parts.quads import store_rows
from cutlass_py_attn.parts.turned import turned
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES
from cutlass_py_attn.shared_memory import shared_columns, tile_bytes

MAX_COLUMNS, PART_COLUMNS = 192, 128  # of one product into registers, and of the parts of a wider one
WORDS = 4  # of a vector that a thread hands over
OWN_BARRIER, P_FULL = 1, 2  # numbers of the barriers of the warpgroup that differentiates and of each slot of P


class Stacked:
    """A gradient of 64 keys as products side by side: wider ones do not compile in a block of this many threads,
    whatever registers a warpgroup has asked for."""

    def __init__(self, spec: Gemm, dtype: str, ring: cute.Tensor) -> None:
        self.whole = Wgmma(spec, dtype)
        self.parts = []
        width = spec.n if spec.n <= MAX_COLUMNS else PART_COLUMNS
        for first in range(0, spec.n, width):
            product = Wgmma(replace(spec, n=min(width, spec.n - first)), dtype)
            columns = ring if spec.n == width else columns_of(ring, first, product.spec.n)
            self.parts.append((product, product.b_operand(transposed(columns))))
        self.groups = len(self.parts)

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """That of the whole gradient."""
        return self.whole.accumulator(thread)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """(row, column) of its elements."""
        return self.whole.coordinates(thread)

    def add(self, accumulator: cute.Tensor, left: cute.Tensor, slot: Int32, thread: Int32) -> None:
        """Start += left times the tile in a slot, `groups` groups."""
        first = accumulator.iterator
        for product, columns in self.parts:
            part = product.accumulator(thread)
            parts = Operands(product.from_registers(left), columns.stage(slot))
            product.issue(cute.make_tensor(first, part.layout), parts)
            first = first + cute.size(part)


class WideBackward(HopperBackward):
    """The backward kernels of one Build whose blocks have 64 keys."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.grad_query, self.items, self.cluster = WideGradQuery(build), PairedKeyItems(build), Cluster(build)
        self.tile_bytes = tile_bytes(build.dtype, build.tile_m, build.tile_n)
        self.slots = build.buffer("p_ds").bytes // self.tile_bytes

    def enter(self) -> None:
        """Both blocks see the barriers."""
        self.cluster.meet()

    def leave(self) -> None:
        """Neither block ends while the other may write to its shared memory."""
        self.cluster.part()

    def make_pipes(self) -> None:
        """The full and empty barriers of query, grad_output, key, value and dS."""
        build = self.build
        statistics = build.tile_m * F32_BYTES
        other_key = build.buffer("other_key").bytes
        users = {
            "query": (build.query_stages, 3 * WARPGROUP_WARPS + WARPGROUP_THREADS, statistics),
            "grad_output": (build.grad_output_stages, 3 * WARPGROUP_WARPS + WARPGROUP_THREADS, statistics),
            "key": (1, 2 * WARPGROUP_WARPS, other_key),
            "value": (1, WARPGROUP_WARPS, 0),
        }
        (self.pipe_q, self.pipe_do, self.pipe_k, self.pipe_v), barriers = pipes.loaded(build, users)
        self.pipe_ds = pipes.handed_over(self.slots, WARPGROUP_THREADS, CLUSTER * WARPGROUP_WARPS, barriers)

    @cute.jit
    def produce(self, p: Any, maps: tuple):
        """One warp: ask for this block's key and value tiles, for its columns of the other's keys, and for its share of
        the query and grad_output tiles that see them."""
        build = self.build
        at_q, at_do, at_kv = self.states(pipeline.PipelineUserType.Producer)
        mine = Int32(0)
        while self.items.is_left(p, mine):
            item = self.items.taken(p, mine, self.cluster.rank())
            of, key_tile = item.of, item.tile
            key_place = (key_tile * build.tile_n, item.head, of.batch)
            pipes.fetch(build, self.pipe_k, at_kv, "key", maps[2], key_place)
            self.fetch_other_key(maps[2], ((key_tile ^ 1) * build.tile_n, item.head, of.batch), at_kv)
            head, query_tile = self.walk.first(p, item)
            for turn in cutlass.range(self.rounds(p, item.first, item.end), unroll=1):
                place = (query_tile * build.tile_m, head, of.batch)
                row = self.grad_query.number(p, head, of.first_tile + query_tile) * build.tile_m
                self.cluster.fetch(self.pipe_q, at_q, "query", maps[0], place)
                self.fetch_statistics(self.pipe_q, "logsumexp", p.logsumexp_log2, row, at_q)
                at_q.advance()
                if turn == 0:  # the first query tile is needed before it
                    pipes.fetch(build, self.pipe_v, at_kv, "value", maps[3], key_place)
                self.cluster.fetch(self.pipe_do, at_do, "grad_output", maps[1], place)
                self.fetch_statistics(self.pipe_do, "delta", p.delta, row, at_do)
                at_do.advance()
                head, query_tile = self.walk.next(item, head, query_tile)
            at_kv.advance()
            mine = mine + 1

    @cute.jit
    def fetch_other_key(self, source: Any, at: tuple, state: Any):
        """Ask for this block's columns of the other block's keys, with the key."""
        build, rank = self.build, self.cluster.rank()
        width, columns = swizzle_bytes(build.columns), shared_columns(build)
        barrier = self.pipe_k.producer_get_barrier(state)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        start, bytes_of_strip = build.buffer("other_key").offset, build.tile_n * width
        with cute.arch.elect_one():
            for strip in cutlass.range_constexpr(columns * build.item_bytes // width):
                column = rank * columns + strip * (width // build.item_bytes)
                corner = [column, at[0], at[1], at[2]]
                place = base + cute.assume(start + strip * bytes_of_strip, divby=1024)
                # Columns behind the last are zeros, as rows are.
                prim.cp_async_bulk_tensor_shared_cta_global(place, source.get_ptr(), corner, barrier)

    @cute.jit
    def multiply_query_gradient(self, p: Any, thread: Int32):
        """A warpgroup: 7  dQ = dS K of every query tile, this block's columns, added to its sum."""
        _, _, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        (at,) = pipes.states(pipeline.PipelineUserType.Consumer, self.slots)
        s_ds, s_other = self.scores_ring("p_ds"), self.scores_ring("other_ds")
        mine = Int32(0)
        while self.items.is_left(p, mine):
            item = self.items.taken(p, mine, self.cluster.rank())
            self.pipe_k.consumer_wait(at_kv)
            head, query_tile = self.walk.first(p, item)
            for _ in cutlass.range(self.rounds(p, item.first, item.end), unroll=1):
                self.pipe_ds.consumer_wait(at)
                number = self.grad_query.number(p, head, item.of.first_tile + query_tile)
                target = self.grad_query.tile(p, number)
                both = s_ds[None, None, at.index], s_other[None, None, at.index]
                self.grad_query.add_half(target, both, self.cluster.rank(), thread)
                self.cluster.release(self.pipe_ds, at.index)
                at.advance()
                head, query_tile = self.walk.next(item, head, query_tile)
            self.pipe_k.consumer_release(at_kv)
            at_kv.advance()
            mine = mine + 1

    @cute.jit
    def consume(self, p: Any, thread: Int32):
        """The two warpgroups of the keys."""
        if cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS) == 0:
            self.weigh(p, thread)
        else:
            self.differentiate(p, thread - WARPGROUP_THREADS)

    @cute.jit
    def weigh(self, p: Any, thread: Int32):
        """A warpgroup: S^T, P and dV of each key tile."""
        build = self.build
        self.bind_products(thread)
        at_q, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        (at_p,) = pipes.states(pipeline.PipelineUserType.Producer, self.slots)
        r_dv, r_s, r_lse = self.dv.accumulator(thread), self.scores.accumulator(thread), self.statistics()
        mine = Int32(0)
        while self.items.is_left(p, mine):
            item = self.items.taken(p, mine, self.cluster.rank())
            rounds = larger(self.rounds(p, item.first, item.end), 1)
            r_dv.fill(0.0)
            # 1  S^T = K Q^T of the first query tile
            self.pipe_k.consumer_wait(at_kv)
            self.pipe_q.consumer_wait(at_q)
            r_next = self.scores.accumulator(thread)
            self.scores.issue(r_next, self.score_parts.stage(None, at_q.index))
            self.read_statistics("logsumexp", at_q.index, thread, r_lse)
            self.scores.wait()
            r_s.store(r_next.load())
            head, query_tile = self.walk.first(p, item)
            for turn in cutlass.range(rounds, unroll=1):
                # 2  P = exp2(S - logsumexp) in base 2
                self.side.weights(p, r_s, r_lse)
                self.side.clear(item.band, r_s, thread, (query_tile, item.tile))
                self.scores.wait()
                if turn > 0:
                    self.cluster.release(self.pipe_do, before(at, build.grad_output_stages))
                r_p = moves.converted(r_s, self.dtype)
                self.pipe_ds.producer_acquire(at_p)
                self.hand_weights(r_p, at_p.index, thread)
                at_p.advance()
                # 1  S^T = K Q^T of the next query tile, behind it 5  dV += P^T dO. Behind the last query tile it is of
                # the same once more, for nobody: a branch around it would let the compiler wait for all products.
                at_q.advance()
                last = before(at_q, build.query_stages)
                slot = cutlass.select_(turn + 1 < rounds, at_q.index, last)
                if turn + 1 < rounds:
                    self.pipe_q.consumer_wait(at_q)
                r_next = self.scores.accumulator(thread)
                self.scores.issue(r_next, self.score_parts.stage(None, slot))
                self.pipe_do.consumer_wait(at)
                self.dv.add(r_dv, r_p, at.index, thread)
                at.advance()
                self.read_statistics("logsumexp", slot, thread, r_lse)
                self.scores.wait(self.dv.groups)
                self.cluster.release_there(self.pipe_q, last)
                arrive_all(self.pipe_q.sync_object_empty, last)
                r_s.store(r_next.load())
                head, query_tile = self.walk.next(item, head, query_tile)
            self.pipe_k.consumer_release(at_kv)
            self.scores.wait()
            self.cluster.release(self.pipe_do, before(at, build.grad_output_stages))
            at_kv.advance()
            self.store(p, "grad_value", r_dv, self.items.taken(p, params.again(mine), self.cluster.rank()), thread)
            mine = mine + 1

    @cute.jit
    def differentiate(self, p: Any, thread: Int32):
        """A warpgroup: dP^T, dS and dK of each key tile."""
        build = self.build
        self.bind_products(thread)
        at_q, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        (at_ds,) = pipes.states(pipeline.PipelineUserType.Consumer, self.slots)
        r_dk, r_dp, r_delta = self.dk.accumulator(thread), self.dp.accumulator(thread), self.statistics()
        mine = Int32(0)
        while self.items.is_left(p, mine):
            item = self.items.taken(p, mine, self.cluster.rank())
            rounds = larger(self.rounds(p, item.first, item.end), 1)
            r_dk.fill(0.0)
            # 3  dP^T = V dO^T of the first query tile
            self.pipe_v.consumer_wait(at_kv)
            self.pipe_do.consumer_wait(at)
            r_next = self.dp.accumulator(thread)
            self.dp.issue(r_next, self.dp_parts.stage(None, at.index))
            self.read_statistics("delta", at.index, thread, r_delta)
            self.dp.wait()
            r_dp.store(r_next.load())
            for turn in cutlass.range(rounds, unroll=1):
                # 4  dS = P (dP - delta), also for the warpgroups of dQ
                cute.arch.barrier(barrier_id=P_FULL + at_ds.index, number_of_threads=2 * WARPGROUP_THREADS)
                r_p = self.handed_weights(at_ds.index, thread)
                self.side.gradient(p, r_dp, r_p, r_delta, None)
                self.dp.wait()
                if turn > 0:
                    self.cluster.release(self.pipe_q, before(at_q, build.query_stages))
                r_ds = moves.converted(r_dp, self.dtype)
                self.meet()  # P has been read
                self.hand_over(r_ds, at_ds.index, thread)
                self.meet()
                self.send(at_ds.index, thread)
                at_ds.advance()
                # 3  dP^T = V dO^T of the next query tile, behind it 6  dK += dS^T Q
                at.advance()
                last = before(at, build.grad_output_stages)
                slot = cutlass.select_(turn + 1 < rounds, at.index, last)
                if turn + 1 < rounds:
                    self.pipe_do.consumer_wait(at)
                r_next = self.dp.accumulator(thread)
                self.dp.issue(r_next, self.dp_parts.stage(None, slot))
                self.pipe_q.consumer_wait(at_q)
                self.dk.add(r_dk, r_ds, at_q.index, thread)
                at_q.advance()
                self.read_statistics("delta", slot, thread, r_delta)
                self.dp.wait(self.dk.groups)
                self.cluster.release_there(self.pipe_do, last)
                self.release_grad_output(at)
                r_dp.store(r_next.load())
            self.pipe_v.consumer_release(at_kv)
            self.dp.wait()
            self.cluster.release(self.pipe_q, before(at_q, build.query_stages))
            at_kv.advance()
            r_dk.store(r_dk.load() * p.scale)
            self.store(p, "grad_key", r_dk, self.items.taken(p, params.again(mine), self.cluster.rank()), thread)
            mine = mine + 1

    def meet(self) -> None:
        """The threads of the warpgroup that differentiates wait for each other."""
        cute.arch.barrier(barrier_id=OWN_BARRIER, number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def send(self, slot: Int32, thread: Int32):
        """Copy dS to the other block, and say here that it is there, every thread having read P in its place, and that
        the other's is on its way."""
        full = self.pipe_ds.sync_object_full.get_barrier(slot)
        if cute.arch.make_warp_uniform(thread // WARP_THREADS) == 0:
            base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
            source, target = (
                base + cute.assume(self.build.buffer(name).offset + slot * self.tile_bytes, divby=1024)
                for name in ("p_ds", "other_ds")
            )
            there = self.cluster.rank() ^ 1
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(full, self.tile_bytes)
                prim.cp_async_bulk_shared_cluster_shared_cta(
                    cute.arch.map_dsmem_ptr(target, there),
                    source,
                    cute.arch.map_dsmem_ptr(full, there),
                    self.tile_bytes,
                )
        arrive_all(self.pipe_ds.sync_object_full, slot)

    def words_of(self, values: cute.Tensor) -> cute.Tensor:
        """16-bit registers as vectors of words: (word, vector)."""
        words = cute.recast_ptr(values.iterator, dtype=Uint32)
        return cute.make_tensor(words, cute.make_layout((WORDS, cute.size(values) // 2 // WORDS)))

    def place_of(self, slot: Int32, thread: Int32, vector: int) -> cute.Tensor:
        """Where a thread's vector of P lies."""
        first = moves.shared_pointer(self.build, "p_ds", Uint32) + slot * (self.tile_bytes // 4)
        at = first + (vector * WARPGROUP_THREADS + thread) * WORDS
        return cute.make_tensor(at.align(16), cute.make_layout(WORDS))

    def hand_weights(self, r_p: cute.Tensor, slot: Int32, thread: Int32) -> None:
        """Write P for the thread with this number in the other warpgroup."""
        words = self.words_of(r_p)
        for vector in range(cute.size(words, mode=[1])):
            cute.autovec_copy(words[None, vector], self.place_of(slot, thread, vector))
        cute.arch.barrier_arrive(barrier_id=P_FULL + slot, number_of_threads=2 * WARPGROUP_THREADS)

    def handed_weights(self, slot: Int32, thread: Int32) -> cute.Tensor:
        """P of the thread with this number in the other warpgroup."""
        r_p = cute.make_rmem_tensor_like(self.dp.accumulator(thread), self.dtype)
        words = self.words_of(r_p)
        for vector in range(cute.size(words, mode=[1])):
            cute.autovec_copy(self.place_of(slot, thread, vector), words[None, vector])
        return r_p

    def store(self, p: Any, name: str, values: cute.Tensor, item: Item, thread: Int32) -> None:
        """Write dK or dV of a key tile from registers."""
        build = self.build
        of, start = item.of, item.tile * build.tile_n
        room, dim = (self.dk, build.head_dim) if name == "grad_key" else (self.dv, build.head_dim_value)
        target = moves.tile_of(build, p, name, (of.batch, item.head, start), of.stored_keys - start, dim)
        store_rows(row_view(moves.converted(values, self.dtype)), row_view(room.coordinates(thread)), target)

    def bind_products(self, thread: Int32) -> None:
        """The rooms of steps 1, 3, 5 and 6 and what they read from shared memory."""
        build = self.build
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_q, s_do = self.tiles.ring("query"), self.tiles.ring("grad_output")
        s_k, s_v = (
            tile_at(base, build.buffer(name).offset, self.dtype, loaded_tiles(build)[name]) for name in ("key", "value")
        )
        self.scores, self.dp = (Wgmma(turned(room.spec(build)), build.dtype) for room in (matmul_qk, doivj))
        self.side.bind(self.scores)
        self.dv = Stacked(grad_v.spec(build), build.dtype, s_do)
        self.dk = Stacked(grad_k.spec(build), build.dtype, s_q)
        self.score_parts = self.scores.operands(s_k, s_q, thread)
        self.dp_parts = self.dp.operands(s_v, s_do, thread)

    def scores_ring(self, name: str) -> cute.Tensor:
        """A ring of dS as wgmma reads it."""
        build = self.build
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return tile_at(base, build.buffer(name).offset, self.dtype, (build.tile_m, build.tile_n), self.slots)

    def ds_blocks(self) -> cute.Tensor:
        """Where dS is handed over."""
        return self.scores_ring("p_ds")


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return WideBackward(build), params.representative(abi.BACKWARD)
