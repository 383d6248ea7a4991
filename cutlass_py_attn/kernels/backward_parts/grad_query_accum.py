"""dq_accum: the float32 sums of the query gradient over key tiles, in global memory.

A sum is stored in the order of the registers of an accumulator: vector i of thread t is at i * threads + t, so that a
warp adds 512 contiguous bytes with one red.v4 (128 with a scalar red before sm_90). A head that is too wide for one
GEMM has several sums of dQ for each query tile, next to each other.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.kernels.backward_parts.layout import dq_piece_columns, dq_pieces
from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build


class SumOrder:
    """The order of the sums of one Build in memory, and the copies of an accumulator to and from a sum.

    threads: threads that share the accumulator
    """

    def __init__(self, build: Build, threads: int) -> None:
        self.build, self.threads = build, threads
        self.width = 4 if architecture(build.arch).vector_red else 1  # float32 of one access

    def add(self, target: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """Adds an accumulator to the sum at `target` by atomic reductions."""
        for i in range(cute.size(values) // self.width):
            vector = target + (thread + i * self.threads) * self.width
            if self.width == 4:
                four = [values[i * 4 + j] for j in range(4)]
                cute.arch.inline_ptx(
                    "red.relaxed.gpu.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
                    read_only_args=[vector, *four],
                )
            else:
                cute.arch.red(vector, values[i], op="add", dtype="f32", sem="relaxed", scope="gpu")

    def load(self, source: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """Loads a sum, from global or shared memory, into the registers of an accumulator."""
        for i in range(cute.size(values) // self.width):
            start = source + (thread + i * self.threads) * self.width
            vector = cute.make_rmem_tensor(self.width, Float32)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(self.width)), vector)
            for j in range(self.width):
                values[i * self.width + j] = vector[j]

    def store_shared(self, target: cute.Pointer, values: cute.Tensor, thread: Int32) -> None:
        """Stores an accumulator to shared memory in the order of a sum."""
        for i in range(cute.size(values) // self.width):
            vector = cute.make_rmem_tensor(self.width, Float32)
            for j in range(self.width):
                vector[j] = values[i * self.width + j]
            start = (target + (thread + i * self.threads) * self.width).align(16)
            cute.autovec_copy(vector, cute.make_tensor(start, cute.make_layout(self.width)))


class GradQueryAccum(SumOrder):
    """The layout of one Build's dq_accum."""

    def __init__(self, build: Build, threads: int) -> None:
        super().__init__(build, threads)
        self.columns, self.sums = dq_piece_columns(build), dq_pieces(build)

    def tile_index(self, p: Any, head: Int32, tile: Int32) -> Int64:
        """Returns the index of a query tile among those of all heads.

        tile: query tile, counted over all sequences of the head
        """
        return Int64(head) * p.total_tiles + tile

    def sum_index(self, tile_index: Int64, column: Any) -> Int64:
        """Returns the index of the sum that starts at a column of a query tile."""
        return tile_index * self.sums + column // self.columns

    def pointer(self, p: Any, index: Int64) -> cute.Pointer:
        """Returns where a sum starts."""
        return params.pointer(p.grad_query_accum, Float32) + index * (self.build.tile_m * self.columns)
