"""Hopper backward: dQ, dK, dV on wgmma, with tiles that TMA brings.

A block stays on its SM and takes one key tile after the other. It has four warpgroups: one warp of the first takes and
loads; the second multiplies dQ = dS K and adds it to its sum in global memory; the last two own half of the key tile's
rows each, with their dK and dV in registers. Scores are transposed: a thread's rows are keys, and P is an operand where
it stands. Where dK and dV leave too few registers for a query tile's scores, query and grad_output come in blocks of
its rows, and a round of all but dQ is one block; elsewhere a block is the tile. Where heads are short, a block takes
all key tiles of a head: fused/head_grad_query.py.

    steps        1 S^T = K Q^T   2 P   3 dP^T = V dO^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    started      behind 2: 3, then 5;  behind 4: 1 of the next round, then 6; with two key tiles also of the next item
    in flight    under 2: 6 of the round before;  under 4: 5;  7 beside all of them

    pipe         full: arrivals                   empty: arrivals                          slots
    query        TMA, with the logsumexp          8 warps, behind 6                        query_stages, of blocks
    grad_output  TMA, with delta                  256 threads, behind 5                    grad_output_stages, of blocks
    dS           8 warps, behind 4 of each block  4 warps, behind 7                        as many, in whole tiles
    key          TMA, with the item's record      256 threads, behind 6 and before 8       key_stages
                                                  128 threads, behind the last 7
    value        TMA                              8 warps, behind the last 3               1

Dropout's bits of several query tiles are drawn at once: parts/kept_bits.py.
"""

import functools
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.pipeline as pipeline
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.cute.nvgpu import warp as warp_ops

from cutlass_py_attn import abi
from cutlass_py_attn.fused.backward import Backward, Params
from cutlass_py_attn.fused.head_grad_query import HeadGradQuery
from cutlass_py_attn.fused.hopper_grad_query import HopperGradQuery
from cutlass_py_attn.gemm import doivj, grad_k, grad_v, matmul_qk
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view, tile_at
from cutlass_py_attn.hopper import CONSUMERS, DQ_WARPGROUPS, LOADERS, cluster, loaded_tiles
from cutlass_py_attn.parts import dropout, moves, params, pipes, tma
from cutlass_py_attn.parts.backward_tiles import BackwardTiles
from cutlass_py_attn.parts.integers import larger
from cutlass_py_attn.parts.items import Item
from cutlass_py_attn.parts.kept_bits import KeptBits
from cutlass_py_attn.parts.key_items import HeadItems, KeyItems
from cutlass_py_attn.parts.pipes import arrive, arrive_all, before
from cutlass_py_attn.parts.quads import store_rows
from cutlass_py_attn.parts.turned import turned
from cutlass_py_attn.parts.turned_scores import TurnedScores
from cutlass_py_attn.parts.walk import Walk
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES
from cutlass_py_attn.shared_memory import RECORDS, registers

CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS
CONSUMERS_MEET, OWN_BARRIER = 1, 2  # numbers of the barriers of both consumers and of each
QUAD_COLUMNS, COLUMNS = 2, 8  # of an accumulator's row: neighbours in a thread, and those that four threads share


class HopperBackward(Backward):
    """The backward kernels of one Build; the main one is this file's."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.grad_query = HeadGradQuery(build) if build.whole_heads else HopperGradQuery(build)
        self.items = HeadItems(build) if build.whole_heads else KeyItems(build)
        self.walk = Walk(build)
        self.before = (LOADERS + DQ_WARPGROUPS) * WARPGROUP_THREADS  # threads before those that hold scores
        self.side = TurnedScores(build)
        self.tiles = BackwardTiles(build)
        self.is_ahead = build.key_stages > 1  # the next key tile's first scores come before this one's end
        self.registers = registers(build)
        self.kept = KeptBits(build, self.before, CONSUMER_THREADS) if build.has("dropout") else None
        # Where a thread has registers for them, the logsumexp is read while S is multiplied.
        self.reads_ahead = build.block_queries <= 64 and not {"dropout", "softcap"} & {*build.features}

    @cute.jit
    def launch_main(self, values: tuple, grid: tuple):
        p = params.filled(Params, abi.BACKWARD, values)
        tiles = loaded_tiles(self.build).items()
        maps = tuple(tma.stand_in(p, getattr(p, name), self.dtype, *tile) for name, tile in tiles)
        block = (self.build.threads, 1, 1)
        together = (cluster(self.build), 1, 1)
        self.kernel(*maps, p).launch(grid=grid, block=block, cluster=together, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
        map_do: GridConstant[tensor_maps.TensorMap],
        map_k: GridConstant[tensor_maps.TensorMap],
        map_v: GridConstant[tensor_maps.TensorMap],
        p: Params,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.make_pipes()
        self.enter()
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(p, (map_q, map_do, map_k, map_v))
        elif warp < 2 * WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(self.registers[1])
            self.multiply_query_gradient(p, thread - WARPGROUP_THREADS)
        else:
            cute.arch.setmaxregister_increase(self.registers[2])
            self.consume(p, thread - self.before)
        self.leave()

    def enter(self) -> None:
        """Who shares the barriers sees them."""
        pipes.meet()

    def leave(self) -> None:
        """Nobody waits for this block's shared memory."""

    def make_pipes(self) -> None:
        """The full and empty barriers of query, grad_output, key, value and dS."""
        build = self.build
        keepers, statistics = CONSUMER_THREADS // WARP_THREADS, build.block_queries * F32_BYTES
        users = {
            "query": (build.query_stages, keepers, statistics),
            "grad_output": (build.grad_output_stages, CONSUMER_THREADS, statistics),
            "key": (build.key_stages, CONSUMER_THREADS + WARPGROUP_THREADS, 0),
            "value": (1, keepers, 0),
        }
        (self.pipe_q, self.pipe_do, self.pipe_k, self.pipe_v), barriers = pipes.loaded(build, users)
        self.pipe_ds = pipes.handed_over(self.tiles.ds_slots, self.tiles.blocks * keepers, WARPGROUP_WARPS, barriers)
        if build.whole_heads:
            self.grad_query.make_barrier()

    def states(self, user: Any) -> tuple[Any, Any, Any]:
        """Where one user begins: of query, of grad_output, of key."""
        build = self.build
        return pipes.states(user, build.query_stages, build.grad_output_stages, build.key_stages)

    def value_at(self, at_k: Any, at_v: Any) -> Any:
        """Where the value of an item stands: at the key's place where that has one slot too. Asked where it is used: a
        loop gives each name a value of its own, so that a second name of one state would part from it."""
        return at_v if self.is_ahead else at_k

    def record(self, at_k: Any) -> Int32:
        """The place of the record of the item whose key tile is at `at_k`, for who reads it."""
        return self.record_of(at_k.index, at_k.phase)

    def record_to_write(self, at_k: Any) -> Int32:
        """The same for who writes it, a phase ahead."""
        return self.record_of(at_k.index, at_k.phase ^ 1)

    def record_of(self, slot: Int32, phase: Int32) -> Int32:
        """The place of the record of the item in a slot of the key and a phase of its readers."""
        return phase + RECORDS * slot if self.is_ahead else phase

    def row(self, p: Any, head: Int32, first_tile: Int32, query_block: Int32) -> Int64:
        """Where the row statistics of a query block start."""
        tile, block = first_tile + query_block // self.tiles.blocks, query_block % self.tiles.blocks
        return self.grad_query.number(p, head, tile) * self.build.tile_m + block * self.build.block_queries

    @cute.jit
    def produce(self, p: Any, maps: tuple):
        """One warp: take key tiles; ask for them and their values, and for the query and grad_output tiles that see
        them."""
        build = self.build
        at_q, at_do, at_k = self.states(pipeline.PipelineUserType.Producer)
        (at_v,) = pipes.states(pipeline.PipelineUserType.Producer, 1)
        total, number, cursor = self.items.total(p), self.items.first_number(p), self.items.start()
        while number < total:
            item, cursor = self.items.item(p, number, cursor)
            of = item.of
            self.items.tell(self.record_to_write(at_k), item)
            key_place = tma.place(build, item.tile * build.tile_n, item.head, of, "key")
            pipes.fetch(build, self.pipe_k, at_k, "key", maps[2], key_place)
            head, query_block = self.walk.first(p, item, self.tiles.blocks)
            for turn in cutlass.range(self.tiles.blocks * self.rounds(p, item.first, item.end), unroll=1):
                place = tma.place(build, query_block * build.block_queries, head, of, "query")
                row = self.row(p, head, of.first_tile, query_block)
                pipes.fetch(build, self.pipe_q, at_q, "query", maps[0], place)
                self.fetch_statistics(self.pipe_q, "logsumexp", p.logsumexp_log2, row, at_q)
                at_q.advance()
                if turn == 0:  # the first query block is needed before it
                    pipes.fetch(build, self.pipe_v, self.value_at(at_k, at_v), "value", maps[3], key_place)
                pipes.fetch(build, self.pipe_do, at_do, "grad_output", maps[1], place)
                self.fetch_statistics(self.pipe_do, "delta", p.delta, row, at_do)
                at_do.advance()
                head, query_block = self.walk.next(item, head, query_block, self.tiles.blocks)
            at_k.advance()
            if cutlass.const_expr(self.is_ahead):
                at_v.advance()
            number = self.items.next_number(p, number)
        self.items.tell(self.record_to_write(at_k), None)
        pipes.fill(self.pipe_k, at_k)
        self.pipe_q.producer_tail(at_q)
        self.pipe_do.producer_tail(at_do)

    def next_tile(self, at_k: Any) -> Int32:
        """Wait for the next item: its key tile, below 0 where none is left."""
        self.pipe_k.consumer_wait(at_k)
        return self.items.tile(self.record(at_k))

    def fetch_statistics(self, pipe: Any, name: str, address: Int64, row: Int64, state: Any) -> None:
        """Ask for the row statistics that come with a tile."""
        rows = self.build.block_queries
        source = params.pointer(address, Float32) + cute.assume(row, divby=16)
        target = self.tiles.vector(name).iterator + state.index * rows
        tma.fetch_rows(source, target, rows, pipe.producer_get_barrier(state))

    @cute.jit
    def multiply_query_gradient(self, p: Any, thread: Int32):
        """A warpgroup: 7  dQ = dS K of every query tile, added to its sum."""
        _, _, at_k = self.states(pipeline.PipelineUserType.Consumer)
        (at,) = pipes.states(pipeline.PipelineUserType.Consumer, self.tiles.ds_slots)
        s_ds, state = self.tiles.ring("ds"), self.grad_query.begin()
        tile = self.next_tile(at_k)
        while tile >= 0:
            item = self.items.read(p, self.record(at_k))
            head, query_tile = self.walk.first(p, item)
            for _ in cutlass.range(self.rounds(p, item.first, item.end), unroll=1):
                share = self.grad_query.share(p, (item, head, query_tile), thread, state)
                self.pipe_ds.consumer_wait(at)
                release = functools.partial(arrive, self.pipe_ds.sync_object_empty, at.index)
                parts = s_ds[None, None, at.index], self.tiles.key(at_k)
                state = self.grad_query.add_tile(p, share, parts, thread, release, state)
                at.advance()
                head, query_tile = self.walk.next(item, head, query_tile)
            arrive_all(self.pipe_k.sync_object_empty, at_k.index)
            at_k.advance()
            state = self.grad_query.end(p, state, thread)
            tile = self.next_tile(at_k)
        self.grad_query.wait()

    @cute.jit
    def consume(self, p: Any, thread: Int32):
        """The warpgroups of the keys: 64 rows of each key tile each."""
        build = self.build
        self.bind_products(thread)
        at_q, at, at_k = self.states(pipeline.PipelineUserType.Consumer)
        (at_v,) = pipes.states(pipeline.PipelineUserType.Consumer, 1)
        r_dk, r_dv = self.dk.accumulator(thread), self.dv.accumulator(thread)
        r_s = self.scores.accumulator(thread)
        r_lse, r_delta = self.statistics(), self.statistics()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        r_kept, stream = None, None  # of dropout
        if cutlass.const_expr(self.kept is not None):
            r_kept, stream = self.kept.registers(), dropout.uniform_stream(p)
        key_tile = self.next_tile(at_k)
        if cutlass.const_expr(self.is_ahead):
            self.wait_for_query(at_q, key_tile >= 0)
            self.first_scores(at_k, at_q, thread, r_s, r_lse)
        while key_tile >= 0:
            item = self.items.read(p, self.record(at_k))
            turns = self.tiles.blocks * larger(self.rounds(p, item.first, item.end), 1)
            r_dk.fill(0.0)
            r_dv.fill(0.0)
            if cutlass.const_expr(not self.is_ahead):
                self.pipe_q.consumer_wait(at_q)
                self.first_scores(at_k, at_q, thread, r_s, r_lse)
            following = Int32(-1)  # key tile of the next item, once it is known
            self.pipe_v.consumer_wait(self.value_at(at_k, at_v))
            head, query_block = self.walk.first(p, item, self.tiles.blocks)
            if cutlass.const_expr(self.kept is not None):
                self.kept.find(p, stream, r_kept, item, (head, query_block), (Int32(0), turns))
            for turn in cutlass.range(turns, unroll=1):
                # 2  P = exp2(S - logsumexp) in base 2
                if cutlass.const_expr(not self.reads_ahead):
                    self.read_statistics("logsumexp", at_q.index, thread, r_lse)
                here, tile = self.side.place(thread, self.before), (item.of, head, query_block, key_tile)
                r_slope = self.side.finish_scores(p, r_s, item.band, here, tile)
                self.side.weights(p, r_s, r_lse)
                self.side.clear(item.band, r_s, here, tile)
                r_p, r_factor = self.side.operands(r_s, r_slope, r_kept)
                # 3  dP^T = V dO^T, behind it 5  dV += P^T dO
                self.pipe_do.consumer_wait(at)
                r_dp = self.dp.accumulator(thread)
                self.dp.issue(r_dp, self.dp_parts.stage(None, at.index))
                self.dv.issue(r_dv, Operands(self.dv.from_registers(r_p), self.grads_across.stage(at.index)))
                self.dk.wait(2)
                if turn > 0:
                    arrive(self.pipe_q.sync_object_empty, before(at_q, build.query_stages))
                self.dp.wait(1)
                if cutlass.const_expr(self.is_ahead):
                    self.release_value(turn + 1 == turns)
                # 4  dS = P (dP - delta), also for the warpgroup of dQ
                self.read_statistics("delta", at.index, thread, r_delta)
                self.side.gradient(p, r_dp, r_factor, r_delta, r_kept)
                self.wait_for_slot(at)
                self.hand_over(moves.converted(r_dp, self.dtype), at.index, thread)
                arrive(self.pipe_ds.sync_object_full, at.index // self.tiles.blocks)
                at.advance()
                at_q.advance()
                # 1  S^T = K Q^T of the next query block or key tile, behind it 6  dK += dS^T Q. Where none follows, it
                # is of the same once more, for nobody: a branch around it would let the compiler wait for all products.
                last, last_ds = before(at_q, build.query_stages), before(at, build.grad_output_stages)
                follows, key_slot = turn + 1 < turns, self.tiles.key_slot(at_k)
                if cutlass.const_expr(self.is_ahead):
                    at_next = pipes.behind(at_k, build.key_stages)
                    if turn + 1 == turns:
                        following = self.next_tile(at_next)
                    key_slot = cutlass.select_(following >= 0, at_next.index, key_slot)
                    follows = follows | (following >= 0)
                slot = cutlass.select_(follows, at_q.index, last)
                if follows:
                    self.pipe_q.consumer_wait(at_q)
                r_next = self.scores.accumulator(thread)
                self.scores.issue(r_next, self.score_parts.stage(key_slot, slot))
                self.meet(group)
                self.dk.issue(r_dk, self.dk_parts.stage(last_ds, last))
                if cutlass.const_expr(self.reads_ahead):
                    self.read_statistics("logsumexp", slot, thread, r_lse)
                self.dv.wait(2)
                self.release_grad_output(at)
                head, query_block = self.walk.next(item, head, query_block, self.tiles.blocks)
                if cutlass.const_expr(self.kept is not None):
                    self.kept.find(p, stream, r_kept, item, (head, query_block), (turn + 1, turns))
                self.scores.wait(1)
                r_s.store(r_next.load())
            if cutlass.const_expr(not self.is_ahead):
                self.pipe_v.consumer_release(at_k)
            self.dk.wait()
            arrive(self.pipe_q.sync_object_empty, before(at_q, build.query_stages))
            # 8  store dK and dV; the next key tile is on its way then
            item = self.items.read(p, self.record(at_k))
            cute.arch.barrier(barrier_id=CONSUMERS_MEET, number_of_threads=CONSUMER_THREADS)
            arrive_all(self.pipe_k.sync_object_empty, at_k.index)
            r_dk.store(r_dk.load() * p.scale)
            if cutlass.const_expr(build.has("dropout")):
                r_dv.store(r_dv.load() * p.keep_scale)
            here = params.fresh("tid.x") - self.before
            self.store(p, "grad_value", r_dv, item, here)
            self.store(p, "grad_key", r_dk, item, here)
            at_k.advance()
            if cutlass.const_expr(self.is_ahead):
                at_v.advance()
            key_tile = following if cutlass.const_expr(self.is_ahead) else self.next_tile(at_k)

    def first_scores(self, at_k: Any, at_q: Any, thread: Int32, r_s: cute.Tensor, r_lse: cute.Tensor) -> None:
        """1  S^T = K Q^T of the first query block of a key tile, and its logsumexp; of anything where none is left."""
        r_next = self.scores.accumulator(thread)
        self.scores.issue(r_next, self.score_parts.stage(self.tiles.key_slot(at_k), at_q.index))
        if self.reads_ahead:
            self.read_statistics("logsumexp", at_q.index, thread, r_lse)
        self.scores.wait()
        r_s.store(r_next.load())

    @cute.jit
    def wait_for_query(self, at_q: Any, is_there: Any):
        """Until a query block has come, where one will."""
        if is_there:
            self.pipe_q.consumer_wait(at_q)

    @cute.jit
    def release_value(self, is_last: Any):
        """Release V behind its last product."""
        if is_last:
            arrive(self.pipe_v.sync_object_empty, 0)

    def release_grad_output(self, at: Any) -> None:
        """Release the slot before `at`, of which every thread has read row statistics."""
        arrive_all(self.pipe_do.sync_object_empty, before(at, self.build.grad_output_stages))

    def ds_blocks(self) -> cute.Tensor:
        """Where dS is handed over, by query blocks."""
        return self.tiles.ds_blocks()

    def wait_for_slot(self, at: Any) -> None:
        """Until the slot of dS is free. dS goes around with grad_output, of which this warpgroup is a reader: who
        writes a ring is a phase ahead."""
        ahead = pipeline.PipelineState(self.tiles.ds_slots, Int32(0), at.index // self.tiles.blocks, at.phase ^ 1)
        self.pipe_ds.producer_acquire(ahead)

    def statistics(self) -> cute.Tensor:
        """Registers for the row statistics of the queries that a thread's accumulator has in its columns."""
        return cute.make_rmem_tensor(cute.make_layout((QUAD_COLUMNS, self.build.block_queries // COLUMNS)), Float32)

    def read_statistics(self, name: str, slot: Int32, thread: Int32, found: cute.Tensor) -> None:
        """Row statistics from shared memory, in pairs."""
        ring, rows = self.tiles.vector(name), self.build.block_queries
        first = ring.iterator + (slot * rows + thread % (COLUMNS // QUAD_COLUMNS) * QUAD_COLUMNS)
        pairs = cute.make_layout((QUAD_COLUMNS, rows // COLUMNS), stride=(1, COLUMNS))
        cute.autovec_copy(cute.make_tensor(first.align(8), pairs), found)

    def hand_over(self, r_ds: cute.Tensor, slot: Int32, thread: Int32) -> None:
        """Write this warpgroup's keys of dS, transposed back, where wgmma reads them."""
        tile = transposed(self.ds_blocks()[None, None, slot])
        op = warp_ops.StMatrix8x8x16bOp(transpose=True, num_matrices=4)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, self.dtype), self.scores.mma).get_slice(thread)
        cute.copy(copy, copy.retile(r_ds), copy.partition_D(tile))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def store(self, p: Any, name: str, values: cute.Tensor, item: Item, thread: Int32) -> None:
        """Write 64 rows of dK or dV, from registers."""
        build, of, start = self.build, item.of, item.tile * self.build.tile_n
        room, dim = (self.dk, build.head_dim) if name == "grad_key" else (self.dv, build.head_dim_value)
        converted = moves.converted(values, self.dtype)
        at = (of.batch, item.head, of.key_start + start)
        target = moves.tile_of(build, p, name, at, of.stored_keys - start, dim)
        store_rows(row_view(converted), row_view(room.coordinates(thread)), target)

    def meet(self, group: Int32) -> None:
        """The threads of one consumer warpgroup wait for each other."""
        cute.arch.barrier(barrier_id=OWN_BARRIER + group, number_of_threads=WARPGROUP_THREADS)

    def bind_products(self, thread: Int32) -> None:
        """The rooms of steps 1, 3, 5 and 6 and what they read from shared memory."""
        build = self.build
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_q, s_do, s_ds = self.tiles.ring("query"), self.tiles.ring("grad_output"), self.ds_blocks()
        s_k = self.tiles.ring("key")
        s_v = tile_at(base, build.buffer("value").offset, self.dtype, loaded_tiles(build)["value"])
        rows = build.block_queries
        self.scores, self.dp = (
            Wgmma(turned(replace(room.spec(build), m=rows)), build.dtype) for room in (matmul_qk, doivj)
        )
        self.dv, self.dk = (Wgmma(replace(room.spec(build), k=rows), build.dtype) for room in (grad_v, grad_k))
        self.side.bind(self.scores)
        self.score_parts = self.scores.operands(s_k, s_q, thread)
        self.dp_parts = self.dp.operands(s_v, s_do, thread)
        self.grads_across = self.dv.b_operand(transposed(s_do))
        self.dk_parts = grad_k.operands(self.dk, s_ds, s_q, thread)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return HopperBackward(build), params.representative(abi.BACKWARD)
