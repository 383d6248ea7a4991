"""Wide Hopper backward: heads whose dK and dV are too many registers for one warpgroup.

As HopperBackward, but the last two warpgroups share a tile of 64 keys by product: one weighs (S^T, P, dV), the other
differentiates (dP^T, dS, dK). P goes from thread to thread through shared memory; both gradients are products of
registers.

    weigh            1 S^T = K Q^T    2 P    5 dV += P^T dO                in flight    under 2: 5 of the tile before
    differentiate    3 dP^T = V dO^T  4 dS   6 dK += dS^T Q                             under 4: 6 of the tile before
    the third        7 dQ = dS K

    pipe         full: arrivals            empty: arrivals                        slots
    query        TMA, with the logsumexp   4 warps behind the next 1, 4 behind 6  query_stages
    grad_output  TMA, with delta           128 threads behind the next 3, 128 behind 5   grad_output_stages
    P            128 threads               128 threads                            1
    dS           4 warps, behind 4         4 warps, behind 7                      1
    key          TMA                       4 warps, behind the last 1, 4 behind the last 7   1
    value        TMA                       4 warps, behind the last 3             1
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, Uint32

from cutlass_py_attn import abi
from cutlass_py_attn.fused.hopper_backward import HopperBackward, arrive, before
from cutlass_py_attn.gemm import doivj, grad_k, grad_v, matmul_qk
from cutlass_py_attn.gemm.gemm import Gemm, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view, tile_at
from cutlass_py_attn.hopper import loaded_tiles
from cutlass_py_attn.parts import lengths, moves, params
from cutlass_py_attn.parts.integers import ceil_div, larger
from cutlass_py_attn.parts.quads import store_rows
from cutlass_py_attn.parts.turned import turned
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES

MAX_COLUMNS = 224  # of one product into registers
WORDS = 4  # of a vector that a thread hands over


class Stacked:
    """A gradient of 64 keys as products of at most 128 columns side by side: wider ones do not compile in a block of
    this many threads, whatever registers a warpgroup has asked for."""

    def __init__(self, spec: Gemm, dtype: str, ring: cute.Tensor) -> None:
        self.whole = Wgmma(spec, dtype)
        self.groups = ceil_div(spec.n, MAX_COLUMNS)
        self.product = Wgmma(replace(spec, n=spec.n // self.groups), dtype)
        shape = (spec.k, self.product.spec.n, cute.size(ring, mode=[2]))
        parts = [cute.local_tile(ring, shape, (0, number, 0)) for number in range(self.groups)]
        self.operands = [self.product.b_operand(transposed(part)) for part in parts]

    def accumulator(self, thread: Int32) -> cute.Tensor:
        """That of the whole gradient."""
        return self.whole.accumulator(thread)

    def coordinates(self, thread: Int32) -> cute.Tensor:
        """(row, column) of its elements."""
        return self.whole.coordinates(thread)

    def add(self, accumulator: cute.Tensor, left: cute.Tensor, slot: Int32, thread: Int32) -> None:
        """Start += left times the tile in a slot, `groups` groups."""
        a = self.product.from_registers(left)
        for number, operand in enumerate(self.operands):
            part = self.product.accumulator(thread)
            first = accumulator.iterator + number * cute.size(part)
            self.product.issue(cute.make_tensor(first, part.layout), Operands(a, operand.stage(slot)))


class WideBackward(HopperBackward):
    """The backward kernels of one Build with 64 keys."""

    def pipes(self) -> None:
        """The full and empty barriers of query, grad_output, key, value, P and dS."""
        build = self.build
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        barriers = cute.recast_ptr((base + build.buffer("barriers").offset).align(8), dtype=Int64)
        threads = pipeline.Agent.Thread
        statistics = build.tile_m * F32_BYTES
        users = {
            "query": (build.query_stages, 2 * WARPGROUP_WARPS, statistics),
            "grad_output": (build.grad_output_stages, 2 * WARPGROUP_THREADS, statistics),
            "key": (1, 2 * WARPGROUP_WARPS, 0),
            "value": (1, WARPGROUP_WARPS, 0),
        }
        made = []
        for name, (slots, readers, more) in users.items():
            rows, columns = loaded_tiles(build)[name]
            made.append(
                pipeline.PipelineTmaAsync.create(
                    num_stages=slots,
                    producer_group=pipeline.CooperativeGroup(threads),
                    consumer_group=pipeline.CooperativeGroup(threads, readers),
                    tx_count=rows * columns * build.item_bytes + more,
                    barrier_storage=barriers,
                    defer_sync=True,
                )
            )
            barriers = barriers + 2 * slots
        self.pipe_q, self.pipe_do, self.pipe_k, self.pipe_v = made
        made = []
        for users in (WARPGROUP_THREADS, WARPGROUP_WARPS):
            made.append(
                pipeline.PipelineAsync.create(
                    num_stages=1,
                    producer_group=pipeline.CooperativeGroup(threads, users),
                    consumer_group=pipeline.CooperativeGroup(threads, users),
                    barrier_storage=barriers,
                    defer_sync=True,
                )
            )
            barriers = barriers + 2
        self.pipe_p, self.pipe_ds = made

    @cute.jit
    def multiply_query_gradient(self, p: Any, thread: Int32):
        """A warpgroup: 7  dQ = dS K of every query tile, added to its sum."""
        _, _, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        s_ds = self.ring("ds")
        for mine in cutlass.range(self.turns(p), unroll=1):
            item = self.work(p, mine)
            of, _, _, first, end = item
            self.pipe_k.consumer_wait(at_kv)
            head, query_tile = self.first_place(p, item)
            for _ in cutlass.range(self.rounds(p, first, end), unroll=1):
                self.pipe_ds.consumer_wait(at)
                target = self.grad_query.sum_of(p, head, of.first_tile + query_tile)
                release = self.release_ds
                self.grad_query.add_tile(self.dtype, target, s_ds[None, None, 0], thread, release)
                at.advance()
                head, query_tile = self.next_place(item, head, query_tile)
            self.pipe_k.consumer_release(at_kv)
            at_kv.advance()
        self.grad_query.wait()

    def release_ds(self) -> None:
        """The one slot of dS is free."""
        arrive(self.pipe_ds.sync_object_empty, Int32(0))

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
        at_p = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        r_dv, r_s, r_lse = self.dv.accumulator(thread), self.scores.accumulator(thread), self.statistics()
        for mine in cutlass.range(self.turns(p), unroll=1):
            item = self.work(p, mine)
            of, _, key_tile, first, end = item
            rounds = larger(self.rounds(p, first, end), 1)
            r_dv.fill(0.0)
            # 1  S^T = K Q^T of the first query tile
            self.pipe_k.consumer_wait(at_kv)
            self.pipe_q.consumer_wait(at_q)
            r_next = self.scores.accumulator(thread)
            self.scores.issue(r_next, self.score_parts.stage(None, at_q.index))
            self.read_statistics("logsumexp", at_q.index, thread, r_lse)
            self.scores.wait()
            r_s.store(r_next.load())
            head, query_tile = self.first_place(p, item)
            for turn in cutlass.range(rounds, unroll=1):
                # 2  P = exp2(S - logsumexp) in base 2
                self.weights(r_s, r_lse, p.scale_log2)
                self.clear(lengths.band(build, p, of), r_s, thread, (query_tile, key_tile))
                self.scores.wait()
                if turn > 0:
                    self.release_grad_output(at)
                r_p = moves.converted(r_s, self.dtype)
                self.pipe_p.producer_acquire(at_p)
                self.hand_weights(r_p, thread)
                self.pipe_p.producer_commit(at_p)
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
                arrive(self.pipe_q.sync_object_empty, last)
                r_s.store(r_next.load())
                head, query_tile = self.next_place(item, head, query_tile)
            self.pipe_k.consumer_release(at_kv)
            self.scores.wait()
            self.release_grad_output(at)
            at_kv.advance()
            self.store(p, "grad_value", r_dv, self.work(p, params.again(mine)), thread)

    @cute.jit
    def differentiate(self, p: Any, thread: Int32):
        """A warpgroup: dP^T, dS and dK of each key tile."""
        build = self.build
        self.bind_products(thread)
        at_q, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        at_p = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        at_ds = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        r_dk, r_dp, r_delta = self.dk.accumulator(thread), self.dp.accumulator(thread), self.statistics()
        for mine in cutlass.range(self.turns(p), unroll=1):
            item = self.work(p, mine)
            _, _, _, first, end = item
            rounds = larger(self.rounds(p, first, end), 1)
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
                # 4  dS = P (dP - delta), also for the warpgroup of dQ
                self.pipe_p.consumer_wait(at_p)
                r_p = self.handed_weights(thread)
                self.pipe_p.consumer_release(at_p)
                at_p.advance()
                self.score_gradient(r_dp, r_p, r_delta)
                self.dp.wait()
                if turn > 0:
                    arrive(self.pipe_q.sync_object_empty, before(at_q, build.query_stages))
                r_ds = moves.converted(r_dp, self.dtype)
                self.pipe_ds.producer_acquire(at_ds)
                self.hand_over(r_ds, Int32(0), thread)
                arrive(self.pipe_ds.sync_object_full, Int32(0))
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
                self.release_grad_output(at)
                r_dp.store(r_next.load())
            self.pipe_v.consumer_release(at_kv)
            self.dp.wait()
            arrive(self.pipe_q.sync_object_empty, before(at_q, build.query_stages))
            at_kv.advance()
            r_dk.store(r_dk.load() * p.scale)
            self.store(p, "grad_key", r_dk, self.work(p, params.again(mine)), thread)

    def words_of(self, values: cute.Tensor) -> cute.Tensor:
        """16-bit registers as vectors of words: (word, vector)."""
        words = cute.recast_ptr(values.iterator, dtype=Uint32)
        return cute.make_tensor(words, cute.make_layout((WORDS, cute.size(values) // 2 // WORDS)))

    def place_of(self, thread: Int32, vector: int) -> cute.Tensor:
        """Where a thread's vector of P lies."""
        first = moves.shared_pointer(self.build, "p", Uint32) + (vector * WARPGROUP_THREADS + thread) * WORDS
        return cute.make_tensor(first.align(16), cute.make_layout(WORDS))

    def hand_weights(self, r_p: cute.Tensor, thread: Int32) -> None:
        """Write P for the thread with this number in the other warpgroup."""
        words = self.words_of(r_p)
        for vector in range(cute.size(words, mode=[1])):
            cute.autovec_copy(words[None, vector], self.place_of(thread, vector))

    def handed_weights(self, thread: Int32) -> cute.Tensor:
        """P of the thread with this number in the other warpgroup."""
        r_p = cute.make_rmem_tensor_like(self.dp.accumulator(thread), self.dtype)
        words = self.words_of(r_p)
        for vector in range(cute.size(words, mode=[1])):
            cute.autovec_copy(self.place_of(thread, vector), words[None, vector])
        return r_p

    def store(self, p: Any, name: str, values: cute.Tensor, item: tuple, thread: Int32) -> None:
        """Write dK or dV of a key tile from registers."""
        build = self.build
        of, head, key_tile, _, _ = item
        room, dim = (self.dk, build.head_dim) if name == "grad_key" else (self.dv, build.head_dim_value)
        start = key_tile * build.tile_n
        target = moves.tile_of(build, p, name, (of.batch, head, start), of.stored_keys - start, dim)
        store_rows(row_view(moves.converted(values, self.dtype)), row_view(room.coordinates(thread)), target)

    def bind_products(self, thread: Int32) -> None:
        """The rooms of steps 1, 3, 5 and 6 and what they read from shared memory."""
        build = self.build
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_q, s_do = self.ring("query"), self.ring("grad_output")
        s_k, s_v = (
            tile_at(base, build.buffer(name).offset, self.dtype, loaded_tiles(build)[name]) for name in ("key", "value")
        )
        self.scores, self.dp = (Wgmma(turned(room.spec(build)), build.dtype) for room in (matmul_qk, doivj))
        self.dv = Stacked(grad_v.spec(build), build.dtype, s_do)
        self.dk = Stacked(grad_k.spec(build), build.dtype, s_q)
        self.score_parts = self.scores.operands(s_k, s_q, thread)
        self.dp_parts = self.dp.operands(s_v, s_do, thread)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return WideBackward(build), params.representative(abi.BACKWARD)
