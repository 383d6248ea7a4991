"""Joined softmax: running maximum and sum of rows that several warps share, in base 2 and float32.

As softmax.py, but a warp holds some columns of a row only: maxima and sums are joined through shared memory. The
output lies in other warps than the scores, so its factors pass through shared memory too.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cutlass_py_attn.parts import moves
from cutlass_py_attn.parts.softmax import QUAD

WARP_COLUMNS = 8  # side by side in a warp's accumulator; the warps along a row take turns


class JoinedSoftmax:
    """Maximum of the rows that a thread has elements of, and its share of their sums.

    where: (row, column) of the thread's elements. parts: shared memory, (rows, warps along a row). factors: shared
    memory, one for each row.
    """

    def __init__(self, where: cute.Tensor, parts: cute.Tensor, factors: cute.Tensor) -> None:
        self.rows = cute.size(where, mode=[0])
        self.parts, self.factors = parts, factors
        self.maximum = cute.make_rmem_tensor(self.rows, Float32)
        self.sum = cute.make_rmem_tensor(self.rows, Float32)
        self.maximum.fill(-Float32.inf)
        self.sum.fill(0.0)

    def step(self, scores: cute.Tensor, where: cute.Tensor, scale_log2: Float32) -> None:
        """Scores (rows x columns) become exp2((s - max) scale_log2); what the sums shrink by goes to `factors`.

        The block meets once; it must meet again before it reads the factors, and before the next step.
        """
        self._share(where, [self._row_maximum(scores[row, None]) for row in range(self.rows)])
        cute.arch.sync_threads()
        for row in range(self.rows):
            maximum = cute.arch.fmax(self.maximum[row], self._joined_maximum(where[row, 0][0]))
            # a row that has seen no key subtracts 0, so that (-inf) - (-inf) never arises
            base = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
            shrink = cute.math.exp2((self.maximum[row] - base) * scale_log2, fastmath=True)
            weights = cute.math.exp2(scores[row, None].load() * scale_log2 - base * scale_log2, fastmath=True)
            scores[row, None].store(weights)
            self.sum[row] = self.sum[row] * shrink + weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            self.maximum[row] = maximum
            moves.put(self.factors, where[row, 0][0], shrink, self._is_first(where))

    def join(self, where: cute.Tensor) -> None:
        """Share sums and maxima, in `parts` and `factors`; the block must meet before it reads them."""
        rows = range(self.rows)
        self._share(where, [cute.arch.warp_reduction_sum(self.sum[row], threads_in_group=QUAD) for row in rows])
        for row in rows:
            moves.put(self.factors, where[row, 0][0], self.maximum[row], self._is_first(where))

    def finish(self, row: Int32, sink: Float32 | None, scale_log2: Float32) -> tuple[Float32, Float32]:
        """(factor of the output, logsumexp in natural log) of one row, after `join`; 0 and -inf without a key.

        sink: a natural-log logit that joins the row's sum and has no value.
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
            total = total * shrink + cute.math.exp2(sink - base, fastmath=True)
        empty = total == 0.0
        lse = (maximum + cute.math.log2(total, fastmath=True)) * math.log(2.0)
        factor = cutlass.select_(empty, Float32(0.0), shrink * cute.arch.rcp_approx(total))
        return factor, cutlass.select_(empty, -Float32.inf, lse)

    def _row_maximum(self, row: cute.Tensor) -> Float32:
        maximum = row.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        return cute.arch.warp_reduction_max(maximum, threads_in_group=QUAD)

    def _joined_maximum(self, row: Int32) -> Float32:
        maximum = self.parts[row, 0]
        for warp in range(1, cute.size(self.parts, mode=[1])):
            maximum = cute.arch.fmax(maximum, self.parts[row, warp])
        return maximum

    def _share(self, where: cute.Tensor, values: list[Float32]) -> None:
        """One thread of each quad writes what its warp has of a row."""
        column = where[0, 0][1]
        for row, value in enumerate(values):
            moves.put(self.parts, (where[row, 0][0], column // WARP_COLUMNS), value, column % WARP_COLUMNS == 0)

    def _is_first(self, where: cute.Tensor) -> Boolean:
        """Whether this thread holds the first columns of its rows."""
        return where[0, 0][1] == 0


@cute.jit
def shrink(output: cute.Tensor, where: cute.Tensor, factors: cute.Tensor):
    """Multiply the rows of an accumulator (rows x columns) by their factors, none above 1; most often all are 1."""
    rows = cute.size(output, mode=[0])
    smallest = Float32(1.0)
    for row in cutlass.range_constexpr(rows):
        smallest = cute.arch.fmin(smallest, factors[where[row, 0][0]])
    if smallest < 1.0:
        for row in cutlass.range_constexpr(rows):
            output[row, None].store(output[row, None].load() * factors[where[row, 0][0]])
