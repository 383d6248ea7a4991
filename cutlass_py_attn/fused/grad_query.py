"""Query gradient: float32 sum over the key tiles in global memory, and its conversion at the end.

The sum of a query tile is kept in the order of GradQ's accumulator registers: vector i of thread t lies at
i * threads + t, so that a warp adds 512 contiguous bytes with one red.v4 (128 with a scalar red before sm_90).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.device import architecture
from cutlass_py_attn.gemm import grad_q
from cutlass_py_attn.gemm.mma_sync import DTYPES, MmaSync
from cutlass_py_attn.parts import moves, params
from cutlass_py_attn.plan import Build


class GradQuery:
    """Where and how the query gradient of one Build is summed."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.width = 4 if architecture(build.arch).vector_red else 1

    def tile(self, p: Any, group: Int64, query_tile: Int32) -> cute.Pointer:
        """The sum of one query tile of one (batch, head)."""
        elements = self.build.tile_m * self.build.columns
        return params.pointer(p.grad_query_accum, Float32) + (group * p.query_tiles + query_tile) * elements

    def add(self, target: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """Add an accumulator to the sum."""
        for i in range(cute.size(values) // self.width):
            at = target + (thread + i * self.build.threads) * self.width
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
            at = source + (thread + i * self.build.threads) * self.width
            vector = cute.make_rmem_tensor(self.width, Float32)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(self.width)), vector)
            for j in range(self.width):
                values[i * self.width + j] = vector[j]

    def counter(self, p: Any, group: Int64, index: Int32) -> cute.Pointer:
        """A group has a turn for each query tile, and behind them the number of blocks that have started."""
        return params.pointer(p.turn, Int32, 4) + group * (p.query_tiles + 1) + index

    @cute.jit
    def ticket(self, p: Any, group: Int64, thread: Int32, shared: cute.Tensor):
        """This block's place in the order of starting, through one shared int32.

        Blocks that wait for turns take their key tiles in this order, so that each waits only for blocks that
        already run, in whichever order the GPU starts them.
        """
        if thread == 0:
            shared[0] = cute.arch.atomic_add(
                self.counter(p, group, p.query_tiles), Int32(1), sem="relaxed", scope="gpu"
            )
        cute.arch.sync_threads()
        place = shared[0]
        cute.arch.sync_threads()
        return place

    @cute.jit
    def wait_turn(self, p: Any, group: Int64, query_tile: Int32, turn: Int32, thread: Int32):
        """Wait until the blocks before this one have added to the tile."""
        counter = self.counter(p, group, query_tile)
        if thread == 0:
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            while seen != turn:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        cute.arch.sync_threads()

    @cute.jit
    def pass_turn(self, p: Any, group: Int64, query_tile: Int32, thread: Int32):
        """Let the next block add to the tile."""
        counter = self.counter(p, group, query_tile)
        cute.arch.sync_threads()
        if thread == 0:
            cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")

    @cute.jit
    def finish(self, p: Any):
        """Scale the sum of one query tile, convert it and write it to grad_query."""
        build, dtype = self.build, DTYPES[self.build.dtype]
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, batch = cute.arch.block_idx()
        self.product = MmaSync(grad_q.spec(build), build.dtype)
        values = self.product.accumulator(thread)
        self.load(self.tile(p, Int64(batch) * p.num_heads + head, query_tile), values, thread)
        values.store(values.load() * p.scale)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        tile = moves.shared_tile(base, 0, dtype, build.tile_m, build.columns)
        values = moves.converted(values, dtype)
        moves.registers_to_tile(thread, self.product.mma, values, tile, moves.has_stmatrix(build))
        cute.arch.sync_threads()
        query0 = query_tile * build.tile_m
        target = params.slice_at(
            p.grad_query,
            dtype,
            (batch, p.grad_query_batch),
            (head, p.grad_query_head),
            (query0, p.grad_query_row),
        )
        rows = p.num_queries - query0
        moves.store_tile(thread, build.threads, tile, target, p.grad_query_row, rows, build.head_dim)
