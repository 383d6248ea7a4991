"""Merge: two partial results of attention joined by their logsumexps, or two rows added (plan/merge.py).

With m the larger of the logsumexps l_a and l_b of a row,

    O = (exp(l_a - m) O_a + exp(l_b - m) O_b) / (exp(l_a - m) + exp(l_b - m))
    l = m + log(exp(l_a - m) + exp(l_b - m))

in float32. A row of weight 0, such as one without keys, counts as nothing, whatever it holds. If both have none, O is 0
and l is -inf.

    variant    result        output_a   output
    ""         the merge     dtype      dtype
    total      the merge     float32    float32
    last       the merge     float32    dtype
    sum        O_a + O_b     float32    float32
    sum_last   O_a + O_b     float32    dtype

dtype is that of the build, and of output_b.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.common import params, seqlen_info
from cutlass_py_attn.kernels.common.params import DTYPES, RowCoordinates
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import SUM, SUM_LAST

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


class Merge:
    """The kernel of one Build."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.dtypes = {
            name: Float32 if name in abi.FLOAT32_OUTPUTS[build.variant] else DTYPES[build.dtype]
            for name in ("output_a", "output_b", "output")
        }
        self.vector = build.vector_bytes // build.item_bytes

    @cute.jit
    def __call__(self, *values):
        p = params.from_values(self.build, values)
        params.set_entry_name(self.build, self.kernel)
        bounds = params.launch_bounds(self.build)
        self.kernel(p).launch(grid=(p.num_rows, 1, 1), block=(self.build.threads, 1, 1), **bounds)

    @cute.kernel
    def kernel(self, p: Any):
        build = self.build
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % build.tile_n
        number = block * build.tile_m + thread // build.tile_n
        if number < p.num_rows:
            row = number // p.num_heads  # of all sequences
            head = number - row * p.num_heads
            sequence = row // p.num_queries
            query = row - sequence * p.num_queries
            if cutlass.const_expr(build.variant in (SUM, SUM_LAST)):
                self.store(p, RowCoordinates(sequence, head, query), Float32(1.0), Float32(1.0), lane)
            elif cutlass.const_expr(build.has("varlen")):
                start, length = seqlen_info.query_rows(p, sequence)
                self.row(p, RowCoordinates(Int32(0), head, start + query), sequence, query, length, lane)
            else:
                self.row(p, RowCoordinates(sequence, head, query), sequence, query, p.num_queries, lane)

    @cute.jit
    def row(self, p: Any, at: RowCoordinates, sequence: Int32, query: Int32, length: Int32, lane: Int32):
        """Merges one row, or pads its logsumexp if the sequence has no such query."""
        offset = seqlen_info.logsumexp_offset(p, sequence, at.head)
        merged = Float32.inf
        if query < length:
            first = params.load_scalar(p.logsumexp_a, Float32, offset + query)
            second = params.load_scalar(p.logsumexp_b, Float32, offset + query)
            largest = cute.arch.fmax(first, second)
            largest = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            weight_a = cute.math.exp2((first - largest) * LOG2_E, fastmath=True)
            weight_b = cute.math.exp2((second - largest) * LOG2_E, fastmath=True)
            total = weight_a + weight_b
            inverse = cutlass.select_(total == 0.0, Float32(0.0), Float32(1.0) / total)
            self.store(p, at, weight_a * inverse, weight_b * inverse, lane)
            logarithm = largest + cute.math.log2(total, fastmath=True) * LN_2
            merged = cutlass.select_(total == 0.0, -Float32.inf, logarithm)
        if lane == 0:
            self.store_logsumexp(p, offset + query, merged)
        if query == p.num_queries - 1:
            padded = seqlen_info.padded_rows(p.num_queries)
            for place in cutlass.range(p.num_queries + lane, padded, self.build.tile_n, unroll=1):
                self.store_logsumexp(p, offset + place, Float32.inf)

    def store_logsumexp(self, p: Any, index: Int64, value: Any) -> None:
        """Stores one number of the result's logsumexp."""
        cute.make_tensor(params.pointer(p.logsumexp, Float32, 4) + index, cute.make_layout(1))[0] = value

    @cute.jit
    def store(self, p: Any, at: RowCoordinates, weight_a: Float32, weight_b: Float32, lane: Int32):
        """Stores this thread's columns of a merged row."""
        columns, vector = self.build.head_dim_value, self.vector
        for step in cutlass.range_constexpr(ceil_div(columns, vector * self.build.tile_n)):
            column = (step * self.build.tile_n + lane) * vector
            if cutlass.const_expr(columns % (vector * self.build.tile_n) == 0):
                self.merge_vector(p, at, column, weight_a, weight_b)
            else:
                if column < columns:
                    self.merge_vector(p, at, column, weight_a, weight_b)

    def merge_vector(self, p: Any, at: RowCoordinates, column: Int32, weight_a: Float32, weight_b: Float32) -> None:
        """Merges one vector of a row."""
        first, second = (self.load(p, name, at, column) for name in ("output_a", "output_b"))
        summed = cute.make_rmem_tensor(self.vector, Float32)
        for i in range(self.vector):
            if self.build.variant in (SUM, SUM_LAST):
                summed[i] = Float32(first[i]) + Float32(second[i])
            else:
                summed[i] = weighted(first[i], weight_a) + weighted(second[i], weight_b)
        merged = cute.make_rmem_tensor(self.vector, self.dtypes["output"])
        merged.store(summed.load().to(self.dtypes["output"]))
        cute.autovec_copy(merged, self.vector_at(p, "output", at, column))

    def load(self, p: Any, name: str, at: RowCoordinates, column: Int32) -> cute.Tensor:
        """Returns one vector of a row, in registers."""
        values = cute.make_rmem_tensor(self.vector, self.dtypes[name])
        cute.autovec_copy(self.vector_at(p, name, at, column), values)
        return values

    def vector_at(self, p: Any, name: str, at: RowCoordinates, column: Int32) -> cute.Tensor:
        """Returns one vector of a row in global memory."""
        dtype = self.dtypes[name]
        start = params.row_pointer(self.build, p, name, at, dtype, self.vector * dtype.width // 8)
        start = start + params.assume_multiple(column, self.vector)
        return cute.make_tensor(start, cute.make_layout(self.vector))


def weighted(number: Any, weight: Float32) -> Float32:
    """Returns number * weight; 0 for a weight of 0, also if the number is NaN."""
    return Float32(cutlass.select_(weight == 0.0, Float32(0.0), Float32(number) * weight))


def trace(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """Returns the host function that launches this build's kernel, and arguments to compile it with."""
    return Merge(build), params.example_arguments(abi.fields_of(build))
