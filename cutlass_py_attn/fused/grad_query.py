"""Query gradient: float32 sum over the key tiles in global memory, and its conversion at the end.

The sum of a query tile is kept in the order of GradQ's accumulator registers: vector i of thread t lies at
i * threads + t, so that a warp adds 512 contiguous bytes with one red.v4 (128 with a scalar red before sm_90).
A head that is too wide for one product has several sums for each query tile, side by side.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.device import architecture
from cutlass_py_attn.fused.streamed import from_column
from cutlass_py_attn.gemm import grad_q
from cutlass_py_attn.gemm.gemm import Gemm
from cutlass_py_attn.gemm.mma_sync import MmaSync
from cutlass_py_attn.parts import lengths, moves, params
from cutlass_py_attn.parts.params import DTYPES
from cutlass_py_attn.plan import Build
from cutlass_py_attn.streams import sum_columns, sums_of_tile


class GradQuery:
    """Where and how the query gradient of one Build is summed."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.width = 4 if architecture(build.arch).vector_red else 1
        self.columns, self.sums = sum_columns(build), sums_of_tile(build)
        self.threads = build.threads

    def product_of(self, spec: Gemm) -> Any:
        """The product whose accumulator the sum is kept in the order of."""
        return MmaSync(spec, self.build.dtype)

    def number(self, p: Any, head: Int32, tile: Int32) -> Int64:
        """Number of a query tile among those of all heads; `tile` counts those of all sequences of a head."""
        return Int64(head) * p.total_tiles + tile

    def sum_number(self, number: Int64, column: Any) -> Int64:
        """Number of the sum that starts in a column of a query tile."""
        return number * self.sums + column // self.columns

    def tile(self, p: Any, number: Int64) -> cute.Pointer:
        """One sum."""
        return params.pointer(p.grad_query_accum, Float32) + number * (self.build.tile_m * self.columns)

    def add(self, target: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """Add an accumulator to the sum."""
        for i in range(cute.size(values) // self.width):
            at = target + (thread + i * self.threads) * self.width
            if self.width == 4:
                four = [values[i * 4 + j] for j in range(4)]
                cute.arch.inline_ptx(
                    "red.relaxed.gpu.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
                    read_only_args=[at, *four],
                )
            else:
                cute.arch.red(at, values[i], op="add", dtype="f32", sem="relaxed", scope="gpu")

    def load(self, source: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """Read a sum back into the registers it came from."""
        for i in range(cute.size(values) // self.width):
            at = source + (thread + i * self.threads) * self.width
            vector = cute.make_rmem_tensor(self.width, Float32)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(self.width)), vector)
            for j in range(self.width):
                values[i * self.width + j] = vector[j]

    @cute.jit
    def ticket(self, p: Any, number: Int64, thread: Int32, shared: cute.Tensor):
        """This block's place in the order of starting among those that count at `number`, through one shared int32.

        Blocks that wait for turns take their key tiles in this order, so that each waits only for blocks that
        already run, in whichever order the GPU starts them.
        """
        if thread == 0:
            started = params.pointer(p.started, Int32, 4) + number
            shared[0] = cute.arch.atomic_add(started, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_threads()
        place = shared[0]
        cute.arch.sync_threads()
        return place

    @cute.jit
    def wait_turn(self, p: Any, number: Int64, turn: Int32, thread: Int32):
        """Wait until the blocks before this one have added to the tile."""
        counter = params.pointer(p.turn, Int32, 4) + number
        if thread == 0:
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            while seen != turn:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_threads()

    @cute.jit
    def pass_turn(self, p: Any, number: Int64, thread: Int32):
        """Let the next block add to the tile."""
        cute.arch.sync_threads()
        if thread == 0:
            counter = params.pointer(p.turn, Int32, 4) + number
            cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")

    @cute.jit
    def finish(self, p: Any):
        """Scale one sum, convert it and write it to grad_query."""
        build, dtype = self.build, DTYPES[self.build.dtype]
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        query_tile, place = block // self.sums, block % self.sums
        head, batch = head + p.first_head, batch + p.first_batch
        of = lengths.sequence(build, p, batch)
        self.product = self.product_of(replace(grad_q.spec(build), n=self.columns))
        values = self.product.accumulator(thread)
        query0 = query_tile * build.tile_m
        # Sums behind the last column are there because a column block is always added to in full.
        if (query0 < of.num_queries) & (place * self.columns < build.head_dim):
            number = self.number(p, head, of.first_tile + query_tile) * self.sums + place
            self.load(self.tile(p, number), values, thread)
            values.store(values.load() * p.scale)
            base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
            tile = moves.shared_tile(base, 0, dtype, build.tile_m, self.columns)
            converted = moves.converted(values, dtype)
            moves.registers_to_tile(thread, self.product.mma, converted, tile, moves.has_stmatrix(build))
            cute.arch.sync_threads()
            at = (of.batch, head, of.query_start + query0)
            target = moves.tile_of(build, p, "grad_query", at, of.num_queries - query0, build.head_dim)
            if cutlass.const_expr(self.sums > 1):
                target = from_column(target, place * self.columns, self.columns)
            moves.store_tile(thread, self.threads, tile, target)
