"""Sinks gradient: of head h it is -sum exp(sink_h - logsumexp) delta over all query rows of all sequences.

A block sums the row statistics of one head, which the delta kernel left in the workspace, four rows at a time and
in a fixed order. A row without keys or past the end has a logsumexp of +inf there and adds nothing.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.gemm.gemm import WARP_THREADS
from cutlass_py_attn.kernels import ROW_THREADS
from cutlass_py_attn.parts import lengths, params
from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.parts.terms import LOG2_E
from cutlass_py_attn.plan import Build

FOUR = 4  # float32 of one 16-byte load
LOADS = 4  # of each array on their way at once


class GradSinks:
    """The gradient of the sinks of one Build, called from its kernel."""

    def __init__(self, build: Build) -> None:
        self.build = build
        # Only where lengths vary are there gaps between sequences; then each warp takes sequences of its own.
        self.lanes = WARP_THREADS if build.has("varlen") else ROW_THREADS

    @cute.jit
    def run(self, p: Any):
        """One head for each block."""
        thread, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        sink = params.scalar(p.sinks, Float32, head) * LOG2_E
        start = Int64(head) * p.total_tiles * self.build.tile_m
        total = Float32(0.0)
        for index in cutlass.range(thread // self.lanes, self.pieces(p), ROW_THREADS // self.lanes, unroll=1):
            first, rows = self.piece(p, index)
            for four in cutlass.range(thread % self.lanes, rows // FOUR, self.lanes, unroll=LOADS):
                row = start + first + four * FOUR
                total = total + self.part(self.load(p.logsumexp_log2, row), self.load(p.delta, row), sink)
        total = self.sum_of_block(total, thread)
        if thread == 0:
            target = params.pointer(p.grad_sinks, Float32, 4) + head
            cute.make_tensor(target, cute.make_layout(1))[0] = -total

    def pieces(self, p: Any) -> Any:
        """Pieces of the workspace of one head without uninitialised rows in between."""
        return p.batch if self.build.has("varlen") else 1

    def piece(self, p: Any, index: Int32) -> tuple[Any, Any]:
        """(first row, rows) of a piece, in whole query tiles."""
        tile_m = self.build.tile_m
        if not self.build.has("varlen"):
            return 0, p.total_tiles * tile_m
        of = lengths.sequence(self.build, p, index)
        return of.first_tile * tile_m, round_up(of.num_queries, tile_m)

    def load(self, address: Int64, row: Int64) -> cute.Tensor:
        """Four rows of one array."""
        source = params.pointer(address, Float32) + params.multiple(row, FOUR)
        values = cute.make_rmem_tensor(FOUR, Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(FOUR)), values)
        return values

    def part(self, logsumexp: cute.Tensor, delta: cute.Tensor, sink: Float32) -> Float32:
        """The sum over four rows."""
        total = Float32(0.0)
        for i in range(FOUR):
            weighted = cute.math.exp2(sink - logsumexp[i], fastmath=True) * delta[i]
            # Whatever delta is there: others leave NaN as the output of a row without keys.
            total = total + cutlass.select_(logsumexp[i] == Float32.inf, Float32(0.0), weighted)
        return total

    @cute.jit
    def sum_of_block(self, value: Float32, thread: Int32):
        """The sum over all threads, in thread 0; from one order always."""
        warps = ROW_THREADS // WARP_THREADS
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=1024)
        sums = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), cute.make_layout(warps))
        value = cute.arch.warp_reduction_sum(value, threads_in_group=WARP_THREADS)
        if thread % WARP_THREADS == 0:
            sums[thread // WARP_THREADS] = value
        cute.arch.sync_threads()
        return sums.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
