"""Hopper forward: O = softmax(scale Q K^T) V and the logsumexp on wgmma, with tiles that TMA brings.

A block stays on its SM and takes query tiles in turn. One of its warps keeps the rings of key and value full; two or
three more warpgroups own 64 rows of the query tile each. They take turns in starting their products, so that one
multiplies while another exponentiates.

    step        S(n - 1) = Q K^T, then O += P(n) V    softmax of S(n - 1)
    in flight   key tile n - 2                         value tile n - 1, O += P(n) V
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as tensor_maps
import cutlass.experimental.primitives as prim
import cutlass.pipeline as pipeline
from cutlass import Float32, GridConstant, Int32, Int64

from cutlass_py_attn import abi
from cutlass_py_attn.fused.forward import Forward, Params, output_spec
from cutlass_py_attn.gemm import matmul_qk
from cutlass_py_attn.gemm.alone_hopper import MAP_SWIZZLES
from cutlass_py_attn.gemm.gemm import WARP_THREADS, WARPGROUP_THREADS, WARPGROUP_WARPS
from cutlass_py_attn.gemm.mma_sync import Operands
from cutlass_py_attn.gemm.plans import swizzle_bytes
from cutlass_py_attn.gemm.views import transposed
from cutlass_py_attn.gemm.wgmma import Wgmma, row_view, tile_at
from cutlass_py_attn.hopper import loaded_tiles
from cutlass_py_attn.parts import lengths, masking, moves, params, schedule
from cutlass_py_attn.parts.integers import ceil_div, larger
from cutlass_py_attn.parts.softmax import OnlineSoftmax, lazy_weights, multiply_rows, safe_scale
from cutlass_py_attn.plan import Build

REGISTERS = {2: (24, 240), 3: (32, 160)}  # of a thread of the producer and of the consumers, by their warpgroups
CONSUMERS_MEET, FIRST_TURN = 1, 2  # numbers of their barriers; every warpgroup has one for its turn
LAZY_WARPGROUPS = 2  # with three, the registers that lazy weights need are missing elsewhere


class HopperForward(Forward):
    """The forward kernel of one Build."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.consumers = build.threads - WARPGROUP_THREADS
        # A float16 row that sees mostly one key is closer with that key's weight at exactly 1.
        self.is_lazy = build.dtype == "bfloat16" and self.consumers <= LAZY_WARPGROUPS * WARPGROUP_THREADS

    @cute.jit
    def __call__(self, *values):
        p = params.filled(Params, abi.FORWARD, values)
        build = self.build
        maps = tuple(self.tensor_map(p, name, *tile) for name, tile in loaded_tiles(build).items())
        self.kernel.set_name_prefix(build.symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(*maps, p).launch(grid=(p.num_queries, 1, 1), block=(build.threads, 1, 1), min_blocks_per_mp=1)

    def tensor_map(self, p: Any, name: str, rows: int, columns: int) -> tensor_maps.TensorMap:
        """A stand-in: the launch passes the map of the plan's recipe, and the kernel sees 128 bytes."""
        width = swizzle_bytes(columns)
        head = cute.assume(Int64(p.query_head), divby=8)
        layout = cute.make_layout((p.batch, p.num_heads, p.num_queries, columns), stride=(head * 64, head, head * 8, 1))
        view = cute.make_tensor(params.pointer(getattr(p, name), self.dtype), layout)
        return tensor_maps.create_tensor_map_tiled_from_view(
            view, box_dims=(1, 1, rows, width // 2), stride_order=(3, 2, 1, 0), swizzle=MAP_SWIZZLES[width]
        )

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
        self.pipes()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[self.consumers // WARPGROUP_THREADS][0])
            if warp == 0:
                self.produce(p, (map_q, map_k, map_v))
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.consumers // WARPGROUP_THREADS][1])
            self.consume(p, thread - WARPGROUP_THREADS)

    def pipes(self) -> None:
        """The full and empty barriers of the query tile and of the rings of key and value."""
        build, stages = self.build, self.build.query_stages
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        barriers = cute.recast_ptr((base + build.buffer("barriers").offset).align(8), dtype=Int64)
        producer = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        consumers = pipeline.CooperativeGroup(pipeline.Agent.Thread, self.consumers // WARP_THREADS)
        made = []
        for slots, (rows, columns) in zip((1, stages, stages), loaded_tiles(build).values(), strict=True):
            made.append(
                pipeline.PipelineTmaAsync.create(
                    num_stages=slots,
                    producer_group=producer,
                    consumer_group=consumers,
                    tx_count=rows * columns * build.item_bytes,
                    barrier_storage=barriers,
                    defer_sync=True,
                )
            )
            barriers = barriers + 2 * slots
        self.pipe_q, self.pipe_k, self.pipe_v = made

    def states(self, user: Any) -> tuple[Any, Any, Any]:
        """Where one user of the three pipes begins."""
        stages = self.build.query_stages
        return tuple(pipeline.make_pipeline_state(user, count) for count in (1, stages, stages))

    def total(self, p: Any) -> Int32:
        """Query tiles of all heads and batches."""
        return ceil_div(p.num_queries, self.build.tile_m) * p.num_heads * p.batch

    def work(self, p: Any, number: Int32) -> tuple[Any, Any, Any, Any, Any]:
        """(sequence, head, query tile, first and end of its key tiles); at least one key tile."""
        build = self.build
        tiles = ceil_div(p.num_queries, build.tile_m)
        bytes_of_key = build.item_bytes * (build.head_dim + build.head_dim_value)
        if build.mask == "full":
            tile, rest = number % tiles, number // tiles
        else:
            at_once = schedule.heads_at_once(p.num_keys, bytes_of_key)
            tile, rest = schedule.longest_first(number, tiles, p.num_heads * p.batch, at_once)
        head, of = rest % p.num_heads, lengths.sequence(build, p, rest // p.num_heads)
        band = lengths.band(build, p, of)
        where = band, tile, build.tile_m, build.tile_n
        first = schedule.key_tile_start(*where)
        return of, head, tile, first, larger(schedule.key_tile_end(*where), first + 1)

    @cute.jit
    def produce(self, p: Any, maps: tuple):
        """One warp: ask for the query tile and its key and value tiles, tile after tile."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        build = self.build
        at_q, at_k, at_v = self.states(pipeline.PipelineUserType.Producer)
        for number in cutlass.range(block, self.total(p), blocks, unroll=1):
            of, head, tile, first, end = self.work(p, number)
            key_head = lengths.key_head(build, p, head)
            self.pipe_q.producer_acquire(at_q)
            barrier = self.pipe_q.producer_get_barrier(at_q)
            self.fetch(maps[0], "query", (tile * build.tile_m, head, of.batch), at_q.index, barrier)
            at_q.advance()
            for i in cutlass.range(end - first, unroll=1):
                row = (end - 1 - i) * build.tile_n
                self.pipe_k.producer_acquire(at_k)
                barrier = self.pipe_k.producer_get_barrier(at_k)
                self.fetch(maps[1], "key", (row, key_head, of.batch), at_k.index, barrier)
                at_k.advance()
                self.pipe_v.producer_acquire(at_v)
                barrier = self.pipe_v.producer_get_barrier(at_v)
                self.fetch(maps[2], "value", (row, key_head, of.batch), at_v.index, barrier)
                at_v.advance()
        self.pipe_k.producer_tail(at_k)
        self.pipe_v.producer_tail(at_v)

    def fetch(self, source: Any, name: str, at: tuple, slot: Int32, barrier: cute.Pointer) -> None:
        """Ask for one tile at (row, head, batch), a strip as wide as the swizzle at a time."""
        build = self.build
        rows, columns = loaded_tiles(build)[name]
        width = swizzle_bytes(columns)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        start = build.buffer(name).offset + slot * (rows * columns * build.item_bytes)
        with cute.arch.elect_one():
            for strip in range(columns * build.item_bytes // width):
                offset = cute.assume(start + strip * rows * width, divby=1024)
                corner = [Int32(strip * width // build.item_bytes), at[0], at[1], at[2]]
                prim.cp_async_bulk_tensor_shared_cta_global(base + offset, source.get_ptr(), corner, barrier)

    @cute.jit
    def consume(self, p: Any, thread: Int32):
        """The other warpgroups: 64 rows of each query tile each."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        build = self.build
        s_q, s_k, s_v, s_o = self.tiles()
        self.scores, self.output = self.products()
        self.score_parts = self.scores.operands(s_q, s_k, thread)
        self.value_part = self.output.b_operand(transposed(s_v))
        where = row_view(self.scores.coordinates(thread))
        at_q, at_k, at_v = self.states(pipeline.PipelineUserType.Consumer)
        scale_log2 = safe_scale(p.scale_log2)
        r_s, r_o = self.scores.accumulator(thread), self.output.accumulator(thread)
        r_p = cute.make_rmem_tensor_like(r_s, self.dtype)
        self.weights = self.output.from_registers(r_p)
        rows = cute.size(where, mode=[0])
        self.softmax = OnlineSoftmax(rows, cute.make_rmem_tensor(rows, Float32))
        if thread >= self.consumers - WARPGROUP_THREADS:
            self.pass_turn(thread)
        for number in cutlass.range(block, self.total(p), blocks, unroll=1):
            of, head, tile, first, end = self.work(p, number)
            band = lengths.band(build, p, of)
            self.softmax.reset()
            r_o.fill(0.0)
            row0 = tile * build.tile_m
            # 1  S = Q K^T of the last key tile
            self.pipe_q.consumer_wait(at_q)
            self.pipe_k.consumer_wait(at_k)
            self.scores.issue(r_s, self.score_parts.stage(None, at_k.index))
            self.scores.wait()
            self.pipe_k.consumer_release(at_k)
            at_k.advance()
            # 2  softmax
            self.hide(p, band, r_s, where, (tile, end - 1))
            self.softmax.weights(row_view(r_s), scale_log2)
            self.keep_weights(r_p, r_s)
            for i in cutlass.range(1, end - first, unroll=1):
                # 1  S = Q K^T of the next key tile, behind it 3  O += P V of this one
                self.pipe_k.consumer_wait(at_k)
                self.wait_turn(thread)
                r_t = self.scores.accumulator(thread)
                self.scores.issue(r_t, self.score_parts.stage(None, at_k.index))
                self.pipe_v.consumer_wait(at_v)
                self.output.issue(r_o, Operands(self.weights, self.value_part.stage(at_v.index)))
                self.pass_turn(thread)
                self.scores.wait(1)
                self.pipe_k.consumer_release(at_k)
                at_k.advance()
                # 2  softmax
                self.hide(p, band, r_t, where, (tile, end - 1 - i))
                factors = cute.make_rmem_tensor(rows, Float32)
                grows = self.next_weights(row_view(r_t), factors, scale_log2)
                self.output.wait()
                self.pipe_v.consumer_release(at_v)
                at_v.advance()
                if grows:
                    multiply_rows(row_view(r_o), factors)
                self.keep_weights(r_p, r_t)
            # 3  O += P V of the first key tile
            self.pipe_v.consumer_wait(at_v)
            self.output.issue(r_o, Operands(self.weights, self.value_part.stage(at_v.index)))
            self.output.wait()
            self.pipe_v.consumer_release(at_v)
            at_v.advance()
            # 4  normalise, store the logsumexp and the output tile
            lse = self.softmax.finish(row_view(r_o), scale_log2)
            self.store_logsumexp(p, lse, where, (of.index, head, row0), of.num_queries)
            self.meet()
            r_c = moves.converted(r_o, self.dtype)
            moves.registers_to_tile(thread, self.output.mma, r_c, s_o, True)
            self.meet()
            at, left = (of.batch, head, row0), of.num_queries - row0
            target = moves.tile_of(build, p, "output", at, left, build.head_dim_value)
            moves.store_tile(thread, self.consumers, s_o, target)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()
            self.pipe_q.consumer_release(at_q)
            at_q.advance()

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

    def meet(self) -> None:
        """The consumers wait for each other."""
        cute.arch.barrier(barrier_id=CONSUMERS_MEET, number_of_threads=self.consumers)

    @cute.jit
    def hide(self, p: Any, band: Any, r_s: cute.Tensor, where: cute.Tensor, at: tuple):
        """Mask a tile of scores, where it has a pair that is not seen."""
        tile, key_tile = at
        build = self.build
        if p.scale_log2 < 0.0:
            r_s.store(-r_s.load())
        if schedule.needs_mask(band, tile, key_tile, build.tile_m, build.tile_n):
            masking.hide(band, row_view(r_s), where, (tile * build.tile_m, key_tile * build.tile_n))

    def keep_weights(self, r_p: cute.Tensor, r_s: cute.Tensor) -> None:
        """P in the operands' type, where the next product takes it from."""
        converted = moves.converted(r_s, self.dtype)
        r_p.store(converted.load())

    def tiles(self) -> tuple[cute.Tensor, ...]:
        """Q, rings of K and V as wgmma reads them, and O in Q's place."""
        build, base = self.build, cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        stages = build.query_stages

        def tile(name: str, shape: tuple[int, int], count: int | None) -> cute.Tensor:
            return tile_at(base, build.buffer(name).offset, self.dtype, shape, count)

        return (
            tile("query", (build.tile_m, build.columns), None),
            tile("key", (build.tile_n, build.columns), stages),
            tile("value", (build.tile_n, build.columns_value), stages),
            moves.shared_tile(base, build.buffer("query").offset, self.dtype, build.tile_m, build.columns_value),
        )

    def products(self) -> tuple[Wgmma, Wgmma]:
        """S = Q K^T, and O += P V: GradQ's form with (P, V) for (dS, K)."""
        build = self.build
        values = output_spec(build, n=build.columns_value, warps=build.scores)
        return Wgmma(matmul_qk.spec(build), build.dtype), Wgmma(values, build.dtype)


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """The host function that launches this build's kernel, and arguments to compile it with."""
    return HopperForward(build), params.representative(abi.FORWARD)
