"""Hopper backward: dQ, dK, dV on wgmma, with tiles that TMA brings.

A block stays on its SM and takes key tiles in turn. It has four warpgroups: one warp of the first loads; the second
multiplies dQ = dS K and adds it to its sum in global memory; the last two own half of the key tile's rows each, with
their dK and dV in registers. Scores are transposed: a thread's rows are keys, and P is an operand where it stands.

    steps        1 S^T = K Q^T   2 P   3 dP^T = V dO^T   4 dS   5 dV += P^T dO   6 dK += dS^T Q   7 dQ = dS K
    in flight    under 2: 6 of the query tile before;  under 4: 5;  7 beside all of them

    pipe         full: arrivals            empty: arrivals                        slots
    query        TMA, with the logsumexp   8 warps, behind 6                      query_stages
    grad_output  TMA, with delta           256 threads, behind 5                  grad_output_stages
    dS           8 warps, behind 4         4 warps, behind 7                      grad_output_stages
    key          TMA                       8 warps, behind the last 1, 4, behind the last 7   1
    value        TMA                       8 warps, once dK and dV are stored through its place   1
"""

import functools
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.pipeline as pipeline
from cutlass import Float32, GridConstant, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from cutlass_py_attn import abi
from cutlass_py_attn.fused.backward import Backward, Params
from cutlass_py_attn.fused.hopper_grad_query import HopperGradQuery
from cutlass_py_attn.gemm import doivj, grad_k, grad_v, matmul_qk
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view, tile_at
from cutlass_py_attn.hopper import cluster, loaded_tiles
from cutlass_py_attn.parts import lengths, masking, moves, params, pipes, schedule, tma
from cutlass_py_attn.parts.integers import ceil_div, larger, smaller
from cutlass_py_attn.parts.pipes import arrive, before
from cutlass_py_attn.parts.turned import by_columns, places, turned, turned_view
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import F32_BYTES

REGISTERS = (32, 64, 208)  # of a thread that loads, that multiplies dQ, and of the others
CONSUMERS = 2  # warpgroups that own the keys
CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS
CONSUMERS_MEET, OWN_BARRIER = 1, 2  # numbers of the barriers of both consumers and of each
QUAD_COLUMNS, COLUMNS = 2, 8  # of an accumulator's row: neighbours in a thread, and those that four threads share


class HopperBackward(Backward):
    """The backward kernels of one Build; the main one is this file's."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.grad_query = HopperGradQuery(build)
        self.keys = build.tile_n * cluster(build)  # that are taken at once
        # Where a thread has registers for them, the logsumexp is read while S is multiplied.
        self.reads_ahead = build.tile_m <= 64

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
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == 0:
                self.produce(p, (map_q, map_do, map_k, map_v))
        elif warp < 2 * WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            self.multiply_query_gradient(p, thread - WARPGROUP_THREADS)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[2])
            self.consume(p, thread - 2 * WARPGROUP_THREADS)
        self.leave()

    def enter(self) -> None:
        """Who shares the barriers sees them."""
        pipes.meet()

    def leave(self) -> None:
        """Nobody waits for this block's shared memory."""

    def make_pipes(self) -> None:
        """The full and empty barriers of query, grad_output, key, value and dS."""
        build = self.build
        keepers, statistics = CONSUMER_THREADS // WARP_THREADS, build.tile_m * F32_BYTES
        users = {
            "query": (build.query_stages, keepers, statistics),
            "grad_output": (build.grad_output_stages, CONSUMER_THREADS, statistics),
            "key": (1, keepers + WARPGROUP_WARPS, 0),
            "value": (1, keepers, 0),
        }
        (self.pipe_q, self.pipe_do, self.pipe_k, self.pipe_v), barriers = pipes.loaded(build, users)
        self.pipe_ds = pipes.handed_over(build.grad_output_stages, keepers, WARPGROUP_WARPS, barriers)

    def states(self, user: Any) -> tuple[Any, Any, Any]:
        """Where one user begins: of query, of grad_output and dS, of key and value."""
        return pipes.states(user, self.build.query_stages, self.build.grad_output_stages, 1)

    def total(self, p: Any) -> Int32:
        """Key tiles of all key heads and batches."""
        return ceil_div(p.num_keys, self.keys) * (p.num_heads // p.group) * p.batch

    def place(self) -> tuple[Int32, Int32]:
        """This block's number among those that take key tiles, and how many they are."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block, blocks

    def turns(self, p: Any) -> Int32:
        """How many key tiles this block takes."""
        block, blocks = self.place()
        return schedule.turns(self.total(p), block, blocks)

    def work(self, p: Any, turn: Int32) -> tuple[Any, Any, Any, Any, Any]:
        """Of this block's turn: (sequence, key head, key tile, first and end of its query tiles), at least one."""
        block, blocks = self.place()
        number = schedule.number_of(turn, block, blocks)
        build, heads = self.build, p.num_heads // p.group
        tiles = ceil_div(p.num_keys, self.keys)
        if build.mask == "full":
            tile, rest = number % tiles, number // tiles
        else:
            bytes_of_query = build.item_bytes * (build.columns + build.columns_value) + F32_BYTES * build.columns
            fitting = schedule.heads_at_once(p.num_queries * p.group, bytes_of_query)
            at_once = schedule.heads_dealt(fitting, heads * p.batch, blocks)
            tile, rest = schedule.longest_first(number, tiles, heads * p.batch, at_once)
            tile = tiles - 1 - tile  # the first keys are seen by the most queries
        of = lengths.sequence(build, p, rest // heads)
        where = lengths.band(build, p, of), tile, build.tile_m, self.keys
        first = smaller(schedule.query_tile_start(*where), ceil_div(of.num_queries, build.tile_m) - 1)
        return of, rest % heads, tile, first, larger(schedule.query_tile_end(*where), first + 1)

    def first_place(self, p: Any, item: tuple) -> tuple[Int32, Int32]:
        """(query head, query tile) of the first round of a key tile."""
        _, head, _, first, _ = item
        return head * p.group if self.build.has("grouped") else head, first

    def next_place(self, item: tuple, head: Int32, query_tile: Int32) -> tuple[Int32, Int32]:
        """Those of the round after: all query tiles of a head, then those of the next that reads the key head."""
        _, _, _, first, end = item
        query_tile = query_tile + 1
        if not self.build.has("grouped"):
            return head, query_tile
        is_over = query_tile == end
        return cutlass.select_(is_over, head + 1, head), cutlass.select_(is_over, first, query_tile)

    @cute.jit
    def produce(self, p: Any, maps: tuple):
        """One warp: ask for the key and value tiles, and for the query and grad_output tiles that see them."""
        build = self.build
        at_q, at_do, at_kv = self.states(pipeline.PipelineUserType.Producer)
        for mine in cutlass.range(self.turns(p), unroll=1):
            item = self.work(p, mine)
            of, key_head, key_tile, first, end = item
            key_place = key_tile * build.tile_n, key_head, of.batch
            pipes.fetch(build, self.pipe_k, at_kv, "key", maps[2], key_place)
            head, query_tile = self.first_place(p, item)
            for turn in cutlass.range(self.rounds(p, first, end), unroll=1):
                place = (query_tile * build.tile_m, head, of.batch)
                row = self.grad_query.number(p, head, of.first_tile + query_tile) * build.tile_m
                pipes.fetch(build, self.pipe_q, at_q, "query", maps[0], place)
                self.fetch_statistics(self.pipe_q, "logsumexp", p.logsumexp_log2, row, at_q)
                at_q.advance()
                if turn == 0:  # the first query tile is needed before it
                    pipes.fetch(build, self.pipe_v, at_kv, "value", maps[3], key_place)
                pipes.fetch(build, self.pipe_do, at_do, "grad_output", maps[1], place)
                self.fetch_statistics(self.pipe_do, "delta", p.delta, row, at_do)
                at_do.advance()
                head, query_tile = self.next_place(item, head, query_tile)
            at_kv.advance()
        self.pipe_q.producer_tail(at_q)
        self.pipe_do.producer_tail(at_do)

    def fetch_statistics(self, pipe: Any, name: str, address: Int64, row: Int64, state: Any) -> None:
        """Ask for the row statistics that come with a tile."""
        rows = self.build.tile_m
        source = params.pointer(address, Float32) + cute.assume(row, divby=16)
        target = self.vector(name).iterator + state.index * rows
        tma.fetch_rows(source, target, rows, pipe.producer_get_barrier(state))

    @cute.jit
    def multiply_query_gradient(self, p: Any, thread: Int32):
        """A warpgroup: 7  dQ = dS K of every query tile, added to its sum."""
        _, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        s_ds = self.ring("ds")
        for mine in cutlass.range(self.turns(p), unroll=1):
            item = self.work(p, mine)
            of, _, _, first, end = item
            self.pipe_k.consumer_wait(at_kv)
            head, query_tile = self.first_place(p, item)
            for _ in cutlass.range(self.rounds(p, first, end), unroll=1):
                self.pipe_ds.consumer_wait(at)
                target = self.grad_query.sum_of(p, head, of.first_tile + query_tile)
                release = functools.partial(arrive, self.pipe_ds.sync_object_empty, at.index)
                self.grad_query.add_tile(self.dtype, target, s_ds[None, None, at.index], thread, release)
                at.advance()
                head, query_tile = self.next_place(item, head, query_tile)
            self.pipe_k.consumer_release(at_kv)
            at_kv.advance()
        self.grad_query.wait()

    @cute.jit
    def consume(self, p: Any, thread: Int32):
        """The warpgroups of the keys: 64 rows of each key tile each."""
        build = self.build
        self.bind_products(thread)
        at_q, at, at_kv = self.states(pipeline.PipelineUserType.Consumer)
        r_dk, r_dv = self.dk.accumulator(thread), self.dv.accumulator(thread)
        r_s = self.scores.accumulator(thread)
        r_lse, r_delta = self.statistics(), self.statistics()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        for mine in cutlass.range(self.turns(p), unroll=1):
            item = self.work(p, mine)
            of, _, key_tile, first, end = item
            rounds = larger(self.rounds(p, first, end), 1)
            r_dk.fill(0.0)
            r_dv.fill(0.0)
            # 1  S^T = K Q^T of the first query tile
            self.pipe_k.consumer_wait(at_kv)
            self.pipe_q.consumer_wait(at_q)
            r_next = self.scores.accumulator(thread)
            self.scores.issue(r_next, self.score_parts.stage(None, at_q.index))
            if cutlass.const_expr(self.reads_ahead):
                self.read_statistics("logsumexp", at_q.index, thread, r_lse)
            self.scores.wait()
            r_s.store(r_next.load())
            self.pipe_v.consumer_wait(at_kv)
            head, query_tile = self.first_place(p, item)
            for turn in cutlass.range(rounds, unroll=1):
                # 2  P = exp2(S - logsumexp) in base 2
                if cutlass.const_expr(not self.reads_ahead):
                    self.read_statistics("logsumexp", at_q.index, thread, r_lse)
                self.weights(r_s, r_lse, p.scale_log2)
                self.clear(lengths.band(build, p, of), r_s, thread, (query_tile, key_tile))
                r_p = moves.converted(r_s, self.dtype)
                # 3  dP^T = V dO^T, behind it 5  dV += P^T dO
                self.pipe_do.consumer_wait(at)
                r_dp = self.dp.accumulator(thread)
                self.dp.issue(r_dp, self.dp_parts.stage(None, at.index))
                self.dv.issue(r_dv, Operands(self.dv.from_registers(r_p), self.grads_across.stage(at.index)))
                self.dk.wait(2)
                if turn > 0:
                    arrive(self.pipe_q.sync_object_empty, before(at_q, build.query_stages))
                self.dp.wait(1)
                # 4  dS = P (dP - delta), also for the warpgroup of dQ
                self.read_statistics("delta", at.index, thread, r_delta)
                self.score_gradient(r_dp, r_p, r_delta)
                self.wait_for_slot(at)
                self.hand_over(moves.converted(r_dp, self.dtype), at.index, thread)
                arrive(self.pipe_ds.sync_object_full, at.index)
                at.advance()
                at_q.advance()
                # 1  S^T = K Q^T of the next query tile, behind it 6  dK += dS^T Q. Behind the last query tile it is of
                # the same once more, for nobody: a branch around it would let the compiler wait for all products.
                last, last_ds = before(at_q, build.query_stages), before(at, build.grad_output_stages)
                slot = cutlass.select_(turn + 1 < rounds, at_q.index, last)
                if turn + 1 < rounds:
                    self.pipe_q.consumer_wait(at_q)
                r_next = self.scores.accumulator(thread)
                self.scores.issue(r_next, self.score_parts.stage(None, slot))
                self.meet(group)
                self.dk.issue(r_dk, self.dk_parts.stage(last_ds, last))
                if cutlass.const_expr(self.reads_ahead):
                    self.read_statistics("logsumexp", slot, thread, r_lse)
                self.dv.wait(2)
                self.release_grad_output(at)
                self.scores.wait(1)
                r_s.store(r_next.load())
                head, query_tile = self.next_place(item, head, query_tile)
            self.dk.wait()
            arrive(self.pipe_q.sync_object_empty, before(at_q, build.query_stages))
            self.pipe_k.consumer_release(at_kv)
            # 8  store dK and dV through the place of V
            r_dk.store(r_dk.load() * p.scale)
            here, item = params.fresh("tid.x") - 2 * WARPGROUP_THREADS, self.work(p, params.again(mine))
            cute.arch.barrier(barrier_id=CONSUMERS_MEET, number_of_threads=CONSUMER_THREADS)
            self.store(p, "grad_value", r_dv, item, here)
            self.store(p, "grad_key", r_dk, item, here)
            self.pipe_v.consumer_release(at_kv)
            at_kv.advance()

    def release_grad_output(self, at: Any) -> None:
        """Release the slot before `at`. Every thread arrives: the row statistics that threads have read are thereby
        known to be read, by racecheck too."""
        slot = before(at, self.build.grad_output_stages)
        cute.arch.mbarrier_arrive(self.pipe_do.sync_object_empty.get_barrier(slot))

    def wait_for_slot(self, at: Any) -> None:
        """Until the slot of dS is free. dS goes around with grad_output, of which this warpgroup is a reader: who
        writes a ring is a phase ahead."""
        ahead = pipeline.PipelineState(self.build.grad_output_stages, Int32(0), at.index, at.phase ^ 1)
        self.pipe_ds.producer_acquire(ahead)

    def statistics(self) -> cute.Tensor:
        """Registers for the row statistics of the queries that a thread's accumulator has in its columns."""
        return cute.make_rmem_tensor(cute.make_layout((QUAD_COLUMNS, self.build.tile_m // COLUMNS)), Float32)

    def read_statistics(self, name: str, slot: Int32, thread: Int32, found: cute.Tensor) -> None:
        """Row statistics from shared memory, in pairs."""
        ring, rows = self.vector(name), self.build.tile_m
        first = ring.iterator + (slot * rows + thread % (COLUMNS // QUAD_COLUMNS) * QUAD_COLUMNS)
        pairs = cute.make_layout((QUAD_COLUMNS, rows // COLUMNS), stride=(1, COLUMNS))
        cute.autovec_copy(cute.make_tensor(first.align(8), pairs), found)

    def weights(self, r_s: cute.Tensor, lse: cute.Tensor, scale_log2: Float32) -> None:
        """S^T becomes P^T."""
        scores = by_columns(r_s)
        for side, row, eight in places(scores):
            exponent = scores[side, row, eight] * scale_log2 - lse[side, eight]
            scores[side, row, eight] = cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def clear(self, band: Any, r_s: cute.Tensor, thread: Int32, at: tuple):
        """Zero the weights that the mask hides, where the tile has any."""
        query_tile, key_tile = at
        build = self.build
        if schedule.needs_mask(band, query_tile, key_tile, build.tile_m, build.tile_n):
            corner = query_tile * build.tile_m, key_tile * build.tile_n
            identity = transposed(cute.make_identity_tensor((build.tile_m, build.tile_n)))
            where = row_view(self.scores.mma.get_slice(thread).partition_C(identity))
            masking.clear(band, turned_view(row_view(r_s)), turned_view(where), corner)

    def score_gradient(self, r_dp: cute.Tensor, r_p: cute.Tensor, delta: cute.Tensor) -> None:
        """dP^T becomes dS^T."""
        dp = by_columns(r_dp)
        words = cute.make_tensor(cute.recast_ptr(r_p.iterator, dtype=Uint32), cute.make_layout(cute.size(r_p) // 2))
        for row, eight in [(row, eight) for eight in range(cute.size(dp, mode=[2])) for row in range(2)]:
            for side, weight in enumerate(moves.in_float32(words[eight * 2 + row], self.dtype)):
                dp[side, row, eight] = weight * (dp[side, row, eight] - delta[side, eight])

    def hand_over(self, r_ds: cute.Tensor, slot: Int32, thread: Int32) -> None:
        """Write this warpgroup's keys of dS, transposed back, where wgmma reads them."""
        tile = transposed(self.ring("ds")[None, None, slot])
        op = warp_ops.StMatrix8x8x16bOp(transpose=True, num_matrices=4)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, self.dtype), self.scores.mma).get_slice(thread)
        cute.copy(copy, copy.retile(r_ds), copy.partition_D(tile))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def store(self, p: Any, name: str, values: cute.Tensor, item: tuple, thread: Int32) -> None:
        """Write 64 rows of dK or dV through this warpgroup's half of V's place."""
        build, rows = self.build, self.build.tile_n // CONSUMERS
        of, head, key_tile, _, _ = item
        of_key = name == "grad_key"
        columns, dim = (build.columns, build.head_dim) if of_key else (build.columns_value, build.head_dim_value)
        group = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        place = build.buffer("value").offset + group * (build.buffer("value").bytes // CONSUMERS)
        tile = moves.shared_tile(base, place, self.dtype, rows, columns)
        room = self.dk if of_key else self.dv
        alone = Wgmma(replace(room.spec, m=rows, warps=(WARPGROUP_WARPS, 1)), build.dtype)
        lane, start = thread % WARPGROUP_THREADS, key_tile * build.tile_n + group * rows
        self.meet(group)
        moves.registers_to_tile(lane, alone.mma, moves.converted(values, self.dtype), tile, True)
        self.meet(group)
        target = moves.tile_of(build, p, name, (of.batch, head, start), of.stored_keys - start, dim)
        moves.store_tile(lane, WARPGROUP_THREADS, tile, target)
        cute.arch.fence_proxy("async.shared", space="cta")

    def meet(self, group: Int32) -> None:
        """The threads of one consumer warpgroup wait for each other."""
        cute.arch.barrier(barrier_id=OWN_BARRIER + group, number_of_threads=WARPGROUP_THREADS)

    def bind_products(self, thread: Int32) -> None:
        """The rooms of steps 1, 3, 5 and 6 and what they read from shared memory."""
        build = self.build
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        s_q, s_do, s_ds = self.ring("query"), self.ring("grad_output"), self.ring("ds")
        s_k, s_v = (
            tile_at(base, build.buffer(name).offset, self.dtype, loaded_tiles(build)[name]) for name in ("key", "value")
        )
        self.scores, self.dp = (Wgmma(turned(room.spec(build)), build.dtype) for room in (matmul_qk, doivj))
        self.dv, self.dk = (Wgmma(room.spec(build), build.dtype) for room in (grad_v, grad_k))
        self.score_parts = self.scores.operands(s_k, s_q, thread)
        self.dp_parts = self.dp.operands(s_v, s_do, thread)
        self.grads_across = self.dv.b_operand(transposed(s_do))
        self.dk_parts = grad_k.operands(self.dk, s_ds, s_q, thread)

    def ring(self, name: str) -> cute.Tensor:
        """A ring of tiles as wgmma reads them."""
        build = self.build
        shape = (build.tile_m, build.tile_n) if name == "ds" else loaded_tiles(build)[name]
        slots = build.query_stages if name == "query" else build.grad_output_stages
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return tile_at(base, build.buffer(name).offset, self.dtype, shape, slots)

    def vector(self, name: str) -> cute.Tensor:
        """A ring of row statistics."""
        slots = self.build.query_stages if name == "logsumexp" else self.build.grad_output_stages
        layout = cute.make_layout((self.build.tile_m, slots))
        return cute.make_tensor(moves.shared_pointer(self.build, name, Float32), layout)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernels, and arguments to compile it with."""
    return HopperBackward(build), params.representative(abi.BACKWARD)
