"""Hopper forward: O = softmax(scale Q K^T) V and the logsumexp on wgmma, with tiles that TMA brings.

A block stays on its SM and takes query tiles in turn. One of its warps keeps the rings of key and value full; two or
three more warpgroups own 64 rows of the query tile each. They take turns in starting their products, so that one
multiplies while another exponentiates. Where there is room for two query tiles, the next item's first scores are on
their way while the output is stored.

    step        S(n - 1) = Q K^T, then O += P(n) V    softmax of S(n - 1)
    in flight   key tile n - 2                         value tile n - 1, O += P(n) V

Of long causal rows two blocks of a cluster take neighbouring query tiles, and each loads half of every key and value
tile for both; the first passes over what only the second sees.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.pipeline as pipeline
from cutlass import Float32, GridConstant, Int32

from cutlass_py_attn import abi
from cutlass_py_attn.fused.forward import Forward, Params, output_spec
from cutlass_py_attn.gemm import matmul_qk
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view, tile_at
from cutlass_py_attn.hopper import cluster, loaded_tiles, slots
from cutlass_py_attn.parts import lengths, masking, moves, params, pipes, schedule, tma
from cutlass_py_attn.parts.bits_ahead import RowBits
from cutlass_py_attn.parts.cluster import Cluster
from cutlass_py_attn.parts.held_terms import HeldTerms
from cutlass_py_attn.parts.items import Item, Items, PairedItems
from cutlass_py_attn.parts.mixed_softmax import MixedSoftmax
from cutlass_py_attn.parts.quads import store_rows
from cutlass_py_attn.parts.softmax import OnlineSoftmax, lazy_weights, multiply_rows, safe_scale
from cutlass_py_attn.plan import Build
from cutlass_py_attn.shared_memory import registers

FIRST_TURN = 2  # number of the first warpgroup's barrier; every one has its own for its turn
NARROW = 128  # columns of Q and V together up to which the exponentials take as long as the products
LAZY_WARPGROUPS = 2  # with three, the registers that lazy weights need are missing elsewhere


class HopperForward(Forward):
    """The forward kernel of one Build."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.terms, self.items = HeldTerms(build), PairedItems(build) if build.multicast else Items(build)
        self.cluster = Cluster(build) if build.multicast else None
        self.consumers, self.registers = build.threads - WARPGROUP_THREADS, registers(build)
        self.runs_on = slots(build)["query"] > 1  # the next query tile is there before the output has left
        self.is_mixed = build.columns + build.columns_value <= NARROW and build.dtype == "bfloat16"
        self.kept = RowBits(build, self.consumers) if build.has("dropout") else None
        # A float16 row that sees mostly one key is closer with that key's weight at exactly 1.
        self.is_lazy = build.dtype == "bfloat16" and self.consumers <= LAZY_WARPGROUPS * WARPGROUP_THREADS

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.FORWARD, values)
        build = self.build
        maps = tuple(tma.stand_in(p, getattr(p, name), self.dtype, *tile) for name, tile in loaded_tiles(build).items())
        params.name_entry(build, self.kernel)
        block, together = (build.threads, 1, 1), (cluster(build), 1, 1)
        self.kernel(*maps, p).launch(grid=(p.num_queries, 1, 1), block=block, cluster=together, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[tensor_maps.TensorMap],
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
                self.produce(p, (map_q, map_k, map_v))
        else:
            cute.arch.setmaxregister_increase(self.registers[-1])
            self.consume(p, thread - WARPGROUP_THREADS)
        if cutlass.const_expr(self.cluster is not None):
            self.cluster.part()

    def enter(self) -> None:
        """Who shares the barriers sees them."""
        if self.cluster is None:
            pipes.meet()
        else:
            self.cluster.meet()

    def make_pipes(self) -> None:
        """The full and empty barriers of the rings of query, key and value."""
        warps, together = self.consumers // WARP_THREADS, cluster(self.build)
        readers = {"query": warps, "key": warps * together, "value": warps * together}
        users = {name: (count, readers[name], 0) for name, count in slots(self.build).items()}
        (self.pipe_q, self.pipe_k, self.pipe_v), _ = pipes.loaded(self.build, users)

    def states(self, user: Any) -> tuple[Any, Any, Any]:
        """Where one user of the three pipes begins."""
        return pipes.states(user, *slots(self.build).values())

    @cute.jit
    def produce(self, p: Any, maps: tuple):
        """One warp: ask for the query tile and its key and value tiles, tile after tile."""
        build = self.build
        at_q, at_k, at_v = self.states(pipeline.PipelineUserType.Producer)
        cursor = self.items.start()
        for turn in cutlass.range(self.items.turns(p), unroll=1):
            item, cursor = self.items.take(p, turn, cursor)
            of, key_head = item.of, lengths.key_head(build, p, item.head)
            place = tma.place(build, item.tile * build.tile_m, item.head, of, "query")
            pipes.fetch(build, self.pipe_q, at_q, "query", maps[0], place)
            at_q.advance()
            for i in cutlass.range(item.end - item.first, unroll=1):
                place = tma.place(build, (item.end - 1 - i) * build.tile_n, key_head, of, "key")
                self.fetch(self.pipe_k, at_k, "key", maps[1], place)
                at_k.advance()
                self.fetch(self.pipe_v, at_v, "value", maps[2], place)
                at_v.advance()
        self.pipe_k.producer_tail(at_k)
        self.pipe_v.producer_tail(at_v)

    def fetch(self, pipe: Any, state: Any, name: str, source: Any, at: tuple) -> None:
        """Ask for a tile of keys or values; in a cluster for this block's share, for both."""
        if self.cluster is None:
            pipes.fetch(self.build, pipe, state, name, source, at)
        else:
            self.cluster.fetch(pipe, state, name, source, at)

    def release(self, pipe: Any, state: Any) -> None:
        """Give back a tile of keys or values, to whoever loads it."""
        if self.cluster is None:
            pipe.consumer_release(state)
        else:
            self.cluster.release(pipe, state.index)

    @cute.jit
    def consume(self, p: Any, thread: Int32):
        """The other warpgroups: 64 rows of each query tile each."""
        s_q, s_k, s_v = self.rings()
        self.scores, self.output = self.products()
        self.score_parts = self.scores.operands(s_q, s_k, thread)
        self.value_part = self.output.b_operand(transposed(s_v))
        where = row_view(self.scores.coordinates(thread))
        at_q, at_k, at_v = self.states(pipeline.PipelineUserType.Consumer)
        next_q, _, _ = self.states(pipeline.PipelineUserType.Consumer)
        scale_log2 = Float32(1.0) if cutlass.const_expr(self.terms.present) else safe_scale(p.scale_log2)
        r_s, r_o = self.scores.accumulator(thread), self.output.accumulator(thread)
        r_p = cute.make_rmem_tensor_like(r_s, self.dtype)
        self.weights = self.output.from_registers(r_p)
        rows = cute.size(where, mode=[0])
        kind = MixedSoftmax if self.is_mixed else OnlineSoftmax
        self.softmax = kind(rows, cute.make_rmem_tensor(rows, Float32))
        if thread >= self.consumers - WARPGROUP_THREADS:
            self.pass_turn(thread)
        turns, cursor = self.items.turns(p), self.items.start()
        if cutlass.const_expr(self.runs_on):
            at_k = self.pass_unseen(self.pipe_k, at_k, self.unseen(p, Int32(0), turns, cursor))
            self.issue_first(r_s, next_q, at_k, turns > 0)
            self.scores.wait()
            self.release_first(at_k, turns > 0)
            next_q.advance()
            at_k.advance()
        for turn in cutlass.range(turns, unroll=1):
            item, cursor = self.items.take(p, turn, cursor)
            slope = self.terms.slope(p, item.of.index, item.head)
            self.softmax.reset()
            r_o.fill(0.0)
            unseen = self.items.unseen(item)
            end = item.end - unseen
            # 1  S = Q K^T of the last key tile, unless it was started with the end of the item before
            if cutlass.const_expr(not self.runs_on):
                at_k = self.pass_unseen(self.pipe_k, at_k, unseen)
                self.issue_first(r_s, at_q, at_k, True)
            at_v = self.pass_unseen(self.pipe_v, at_v, unseen)
            kept, bias = self.ahead(p, item, end - 1, where, thread)
            if cutlass.const_expr(not self.runs_on):
                self.scores.wait()
                self.release_first(at_k, True)
                at_k.advance()
            # 2  softmax
            self.finish_scores(p, item, end - 1, r_s, where, (slope, bias))
            self.softmax.weights(row_view(r_s), scale_log2)
            self.keep_weights(r_p, r_s, kept)
            for i in cutlass.range(1, end - item.first, unroll=1):
                key_tile = end - 1 - i
                # 1  S = Q K^T of the next key tile, behind it 3  O += P V of this one
                self.pipe_k.consumer_wait(at_k)
                self.wait_turn(thread)
                r_t = self.scores.accumulator(thread)
                self.scores.issue(r_t, self.score_parts.stage(at_q.index, at_k.index))
                self.pipe_v.consumer_wait(at_v)
                self.output.issue(r_o, Operands(self.weights, self.value_part.stage(at_v.index)))
                self.pass_turn(thread)
                kept, bias = self.ahead(p, item, key_tile, where, thread)
                self.scores.wait(1)
                self.release(self.pipe_k, at_k)
                at_k.advance()
                # 2  softmax
                self.finish_scores(p, item, key_tile, r_t, where, (slope, bias))
                factors = cute.make_rmem_tensor(rows, Float32)
                grows = self.next_weights(row_view(r_t), factors, scale_log2)
                self.output.wait()
                self.release(self.pipe_v, at_v)
                at_v.advance()
                if grows:
                    multiply_rows(row_view(r_o), factors)
                self.keep_weights(r_p, r_t, kept)
            self.pipe_q.consumer_release(at_q)
            at_q.advance()
            # 3  O += P V of the item's first key tile, behind it 1  S = Q K^T of the next item
            self.pipe_v.consumer_wait(at_v)
            if cutlass.const_expr(self.runs_on):
                self.wait_turn(thread)
            self.output.issue(r_o, Operands(self.weights, self.value_part.stage(at_v.index)))
            if cutlass.const_expr(self.runs_on):
                at_k = self.pass_unseen(self.pipe_k, at_k, self.unseen(p, turn + 1, turns, cursor))
                self.issue_first(r_s, next_q, at_k, turn + 1 < turns)
                next_q.advance()
                self.pass_turn(thread)
            self.output.wait(1 if self.runs_on else 0)
            self.release(self.pipe_v, at_v)
            at_v.advance()
            # 4  normalise, store the logsumexp and the output tile
            self.store(p, item, r_o, where, scale_log2)
            if cutlass.const_expr(self.runs_on):
                self.scores.wait()
                self.release_first(at_k, turn + 1 < turns)
                at_k.advance()

    def unseen(self, p: Any, turn: Int32, turns: Int32, cursor: Any) -> Int32 | int:
        """Of the item of a turn, if there is one, how many key tiles this block passes over."""
        if self.cluster is None:
            return 0
        item, _ = self.items.take(p, turn, cursor)
        return cutlass.select_(turn < turns, self.items.unseen(item), Int32(0))

    @cute.jit
    def pass_unseen(self, pipe: Any, at: Any, count: Any):
        """Give `count` tiles back as they come; where the pipe stands behind them."""
        if cutlass.const_expr(self.cluster is not None):
            for _ in cutlass.range(count, unroll=1):
                pipe.consumer_wait(at)
                self.release(pipe, at)
                at.advance()
        return at

    @cute.jit
    def issue_first(self, r_s: cute.Tensor, at_q: Any, at_k: Any, is_there: Any):
        """Start S = Q K^T of an item's last key tile; where there is no item any more, of what lies there."""
        if is_there:
            self.pipe_q.consumer_wait(at_q)
            self.pipe_k.consumer_wait(at_k)
        self.scores.issue(r_s, self.score_parts.stage(at_q.index, at_k.index))

    @cute.jit
    def release_first(self, at_k: Any, is_there: Any):
        """Give back the key tile of `issue_first`."""
        if is_there:
            self.release(self.pipe_k, at_k)

    def ahead(self, p: Any, item: Item, key_tile: Int32, where: cute.Tensor, thread: Int32) -> tuple[Any, Any]:
        """What a tile of scores needs and does not depend on them, while they are on their way: the bits of the weights
        that dropout keeps, and the bias; None where there is none."""
        corner = item.tile * self.build.tile_m, key_tile * self.build.tile_n
        kept = None if self.kept is None else self.kept.of_tile(p, item, key_tile, where, thread)
        bias = self.terms.bias_ahead(p, item.of, item.head, corner, where)
        return kept, bias

    @cute.jit
    def finish_scores(self, p: Any, item: Any, key_tile: Int32, r_s: cute.Tensor, where: cute.Tensor, given: tuple):
        """Score terms on a tile of products, and the mask where it has a pair that is not seen."""
        build = self.build
        corner = (item.tile * build.tile_m, key_tile * build.tile_n)
        if cutlass.const_expr(self.terms.present):
            self.terms.apply(p, row_view(r_s), where, corner, item.band, given)
        if schedule.needs_mask(item.band, item.tile, key_tile, build.tile_m, build.tile_n):
            masking.hide(item.band, row_view(r_s), where, corner)

    @cute.jit
    def store(self, p: Any, item: Any, r_o: cute.Tensor, where: cute.Tensor, scale_log2: Float32):
        """Normalise, store the logsumexp and the output tile."""
        build = self.build
        of, row0 = item.of, item.tile * build.tile_m
        if cutlass.const_expr(build.has("sinks")):
            self.softmax.join(row_view(r_o), params.scalar(p.sinks, Float32, item.head), scale_log2)
            scale_log2 = Float32(1.0)
        lse = self.softmax.finish(row_view(r_o), scale_log2)
        if cutlass.const_expr(build.has("dropout")):
            r_o.store(r_o.load() * p.keep_scale)
        self.store_logsumexp(p, lse, where, (of.index, item.head, row0), of.num_queries)
        at, left = (of.batch, item.head, of.query_start + row0), of.num_queries - row0
        target = moves.tile_of(build, p, "output", at, left, build.head_dim_value)
        store_rows(row_view(moves.converted(r_o, self.dtype)), where, target)

    def next_weights(self, scores: cute.Tensor, factors: cute.Tensor, scale_log2: Float32) -> Any:
        """The weights of a later key tile; whether the output must be multiplied by `factors`."""
        if self.is_lazy:
            return lazy_weights(scores, self.softmax.maximum, self.softmax.sum, factors, scale_log2)
        for row, shrink in enumerate(self.softmax.weights(scores, scale_log2)):
            factors[row] = shrink
        return True

    def wait_turn(self, thread: Int32) -> None:
        """Until the warpgroup before has started its products."""
        number = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        cute.arch.barrier(barrier_id=FIRST_TURN + number, number_of_threads=2 * WARPGROUP_THREADS)

    def pass_turn(self, thread: Int32) -> None:
        """Let the next warpgroup start, behind the last the first."""
        number = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        is_last = number == self.consumers // WARPGROUP_THREADS - 1
        after = cutlass.select_(is_last, Int32(0), number + 1)
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN + after, number_of_threads=2 * WARPGROUP_THREADS)

    def keep_weights(self, r_p: cute.Tensor, r_s: cute.Tensor, kept: cute.Tensor | None) -> None:
        """P in the operands' type, where the next product takes it from; `kept` as for masking.drop."""
        if kept is not None:
            masking.drop(row_view(r_s), kept)
        moves.convert(r_s, r_p)

    def rings(self) -> list[cute.Tensor]:
        """Rings of Q, K and V as wgmma reads them."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        return [
            tile_at(base, build.buffer(name).offset, self.dtype, tile, slots(build)[name])
            for name, tile in loaded_tiles(build).items()
        ]

    def products(self) -> tuple[Wgmma, Wgmma]:
        """S = Q K^T, and O += P V: GradQ's form with (P, V) for (dS, K)."""
        build = self.build
        values = output_spec(build, n=build.columns_value, warps=build.scores)
        return Wgmma(matmul_qk.spec(build), build.dtype), Wgmma(values, build.dtype)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernel, and arguments to compile it with."""
    return HopperForward(build), params.representative(abi.FORWARD)
