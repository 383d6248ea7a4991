"""Cross-warp softmax: running maximum and sum of rows that several warps share, in base 2 and float32.

As OnlineSoftmax, but a warp has only some columns of a row: maxima and sums are combined through shared memory. The
warps that accumulate the output of a row need not be those of its scores, so its factors pass through shared memory.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutlass_py_attn.kernels.common import tile_copy
from cutlass_py_attn.kernels.common.softmax import QUAD, exp2
from cutlass_py_attn.score_terms.sinks import SINKS

WARP_COLUMNS = 8  # neighbouring columns of a warp's accumulator; then come those of the next warp along the row


@dataclass(frozen=True)
class CrossWarpSoftmax:
    """Running maximum of a thread's rows, and the thread's partial sums.

    maximum, sum: registers, one for each row.
    parts: shared memory, (rows, warps along a row); what each warp has of a row.
    factors: shared memory, (rows,); what the output of each row is multiplied by.
    """

    maximum: cute.Tensor
    sum: cute.Tensor
    parts: cute.Tensor
    factors: cute.Tensor

    @staticmethod
    def create(coordinates: cute.Tensor, parts: cute.Tensor, factors: cute.Tensor) -> "CrossWarpSoftmax":
        """Returns the state before the first key tile; coordinates: (row, column) of the thread's scores."""
        rows = cute.size(coordinates, mode=[0])
        maximum, total = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        return CrossWarpSoftmax(maximum, total, parts, factors)

    @property
    def rows(self) -> int:
        """Rows of a thread."""
        return cute.size(self.maximum)

    def step(self, scores: cute.Tensor, coordinates: cute.Tensor, scale_log2: Float32) -> None:
        """Replaces scores (rows, columns) by exp2((s - max) scale_log2); stores what the sums shrink by in `factors`.

        Synchronises the block once. The block must synchronise again before it reads the factors, and before the next
        step.
        """
        self._share(coordinates, [self._warp_maximum(scores[row, None]) for row in range(self.rows)])
        cute.arch.sync_threads()
        for row in range(self.rows):
            maximum = cute.arch.fmax(self.maximum[row], self._row_maximum(coordinates[row, 0][0]))
            # a row without a visible key so far subtracts 0, so that (-inf) - (-inf) never arises
            base = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
            shrink = cute.math.exp2((self.maximum[row] - base) * scale_log2, fastmath=True)
            weights = cute.math.exp2(scores[row, None].load() * scale_log2 - base * scale_log2, fastmath=True)
            scores[row, None].store(weights)
            self.sum[row] = self.sum[row] * shrink + weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            self.maximum[row] = maximum
            tile_copy.store_predicated(self.factors, coordinates[row, 0][0], shrink, self._is_first(coordinates))

    def join(self, coordinates: cute.Tensor) -> None:
        """Stores sums in `parts` and maxima in `factors`; the block must synchronise before it reads them."""
        rows = range(self.rows)
        self._share(coordinates, [cute.arch.warp_reduction_sum(self.sum[row], threads_in_group=QUAD) for row in rows])
        for row in rows:
            index, is_first = coordinates[row, 0][0], self._is_first(coordinates)
            tile_copy.store_predicated(self.factors, index, self.maximum[row], is_first)

    def finish(self, row: Int32, sink: Float32 | None, scale_log2: Float32) -> tuple[Float32, Float32]:
        """Returns (factor of the output, natural-log logsumexp) of a row, after `join`; (0, -inf) without a key.

        sink: natural-log logit without a value that is added to the row's sum; None for none.
        """
        total = Float32(0.0)
        for warp in range(cute.size(self.parts, mode=[1])):
            total = total + self.parts[row, warp]
        maximum, shrink = self.factors[row] * scale_log2, Float32(1.0)
        if sink is not None:
            seen, sink = maximum, sink * math.log2(math.e)
            maximum = cute.arch.fmax(seen, sink)
            base = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
            shrink = cute.math.exp2(seen - base, fastmath=True)
            total = total * shrink + SINKS.weight(exp2, sink, base)
        empty = total == 0.0
        lse = (maximum + cute.math.log2(total, fastmath=True)) * math.log(2.0)
        factor = cutlass.select_(empty, Float32(0.0), shrink * cute.arch.rcp_approx(total))
        return factor, cutlass.select_(empty, -Float32.inf, lse)

    def _warp_maximum(self, row: cute.Tensor) -> Float32:
        """Returns the maximum of this warp's columns of a row."""
        maximum = row.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        return cute.arch.warp_reduction_max(maximum, threads_in_group=QUAD)

    def _row_maximum(self, row: Int32) -> Float32:
        """Returns the maximum of a row over all warps."""
        maximum = self.parts[row, 0]
        for warp in range(1, cute.size(self.parts, mode=[1])):
            maximum = cute.arch.fmax(maximum, self.parts[row, warp])
        return maximum

    def _share(self, coordinates: cute.Tensor, values: list[Float32]) -> None:
        """Stores each warp's value of a row in `parts`, by one thread of each quad."""
        column = coordinates[0, 0][1]
        for row, value in enumerate(values):
            tile_copy.store_predicated(
                self.parts, (coordinates[row, 0][0], column // WARP_COLUMNS), value, column % WARP_COLUMNS == 0
            )

    def _is_first(self, coordinates: cute.Tensor) -> Boolean:
        """Whether this thread has the first columns of its rows."""
        return coordinates[0, 0][1] == 0


@cute.jit
def multiply_rows(output: cute.Tensor, coordinates: cute.Tensor, factors: cute.Tensor):
    """Multiplies the rows of an accumulator (rows, columns) by their factors, which are at most 1 and mostly 1."""
    rows = cute.size(output, mode=[0])
    smallest = Float32(1.0)
    for row in cutlass.range_constexpr(rows):
        smallest = cute.arch.fmin(smallest, factors[coordinates[row, 0][0]])
    if smallest < 1.0:
        for row in cutlass.range_constexpr(rows):
            output[row, None].store(output[row, None].load() * factors[coordinates[row, 0][0]])
