"""Sinks gradient: grad_sinks[h] = -sum exp(sink_h - logsumexp) delta, over all query rows of head h.

A block sums the row statistics of one head, which the preprocess left in the workspace, four rows at a time and in a
fixed order. A row without keys or past the last query has a logsumexp of +inf there and adds nothing. The sm90 backward
with dS^T in registers leaves -delta, and variant ds_registers may leave -logsumexp / scale; both are converted.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.common import params, seqlen_info, tile_copy
from cutlass_py_attn.kernels.common.score_mod import LOG2_E
from cutlass_py_attn.kernels.common.softmax import exp2
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import ROW_THREADS
from cutlass_py_attn.launch.gemm_spec import WARP_THREADS
from cutlass_py_attn.launch.variants import KEEPS_DS
from cutlass_py_attn.score_terms.sinks import SINKS

FOUR = 4  # float32 of one 16-byte load
LOADS_IN_FLIGHT = 4  # of each array


@dataclass(frozen=True)
class RowRange:
    """Contiguous rows of one head's workspace, in whole query tiles: the first row, and how many."""

    first: Any
    count: Any


class GradSinks:
    """The gradient of the sinks of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        # With varlen there are gaps between sequences, and each warp sums sequences of its own.
        self.threads_of_range = WARP_THREADS if build.has("varlen") else ROW_THREADS

    @cute.jit
    def run(self, p: Any):
        """Sums one head."""
        thread, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        sink = params.load_scalar(p.sinks, Float32, head) * LOG2_E
        start = Int64(head) * p.total_tiles * self.build.tile_m
        total, threads = Float32(0.0), self.threads_of_range
        for index in cutlass.range(thread // threads, self.num_ranges(p), ROW_THREADS // threads, unroll=1):
            rows = self.row_range(p, index)
            for four in cutlass.range(thread % threads, rows.count // FOUR, threads, unroll=LOADS_IN_FLIGHT):
                row = start + rows.first + four * FOUR
                logsumexp, delta = self.load(p.logsumexp_log2, row), self.load(p.delta, row)
                if cutlass.const_expr(starts_from_logsumexp(self.build)):
                    logsumexp.store(logsumexp.load() * -p.scale_log2)
                total = total + self.sum_rows(logsumexp, delta, sink)
        total = self.sum_block(total, thread)
        if thread == 0:
            target = params.pointer(p.grad_sinks, Float32, 4) + head
            has_minus_delta = cutlass.const_expr(self.build.variant in KEEPS_DS)
            cute.make_tensor(target, cute.make_layout(1))[0] = total if has_minus_delta else -total

    def num_ranges(self, p: Any) -> Any:
        """Returns the ranges of one head's workspace: with varlen a sequence each, because of the gaps between them."""
        return p.batch if self.build.has("varlen") else 1

    def row_range(self, p: Any, index: Int32) -> RowRange:
        """Returns the range with this index."""
        tile_m = self.build.tile_m
        if not self.build.has("varlen"):
            return RowRange(0, p.total_tiles * tile_m)
        of = seqlen_info.create(self.build, p, index)
        return RowRange(of.first_tile * tile_m, round_up(of.num_queries, tile_m))

    def load(self, address: Int64, row: Int64) -> cute.Tensor:
        """Loads four rows of one array."""
        source = params.pointer(address, Float32) + params.assume_multiple(row, FOUR)
        values = cute.make_rmem_tensor(FOUR, Float32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(FOUR)), values)
        return values

    def sum_rows(self, logsumexp: cute.Tensor, delta: cute.Tensor, sink: Float32) -> Float32:
        """Returns the sum over four rows."""
        total = Float32(0.0)
        for i in range(FOUR):
            weighted = SINKS.weight(exp2, sink, logsumexp[i]) * delta[i]
            # Selected, not multiplied by zero: delta of a row without keys may be NaN.
            total = total + cutlass.select_(logsumexp[i] == Float32.inf, Float32(0.0), weighted)
        return total

    @cute.jit
    def sum_block(self, value: Float32, thread: Int32):
        """Returns the sum over all threads, valid in thread 0; the order of the additions is fixed."""
        warps = ROW_THREADS // WARP_THREADS
        base = tile_copy.smem_symbol()
        sums = cute.make_tensor(cute.recast_ptr(base, dtype=Float32), cute.make_layout(warps))
        value = cute.arch.warp_reduction_sum(value, threads_in_group=WARP_THREADS)
        if thread % WARP_THREADS == 0:
            sums[thread // WARP_THREADS] = value
        cute.arch.sync_threads()
        return sums.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
