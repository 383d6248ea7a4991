"""Softmax: online softmax of the forward, in base 2 and float32.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018): a new row maximum rescales the sum and the
output so far. Scores are raw products; the factor scale * log2(e) is applied inside the exponent.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cutlass_py_attn.score_terms.sinks import SINKS

QUAD = 4  # threads that hold one row of an m16n8 accumulator
# Replaces a scale of zero: 0 * -inf would be NaN for a masked score. Validation refuses other scales that it would
# raise. With a scale of zero all weights are equal, here to 1e-7 if no product of query and key is beyond 1e23; exact
# zeros would need a branch in every tile.
TINY = 1e-30


def safe_scale(scale_log2: Float32) -> Float32:
    """Returns |scale_log2|, never zero; the caller applies the sign to the scores."""
    magnitude = cute.arch.fmax(scale_log2, -scale_log2)
    return cute.arch.fmax(magnitude, Float32(TINY))


class OnlineSoftmax:
    """Maximum and sum of the rows that a thread holds.

    rows: rows of the thread; it holds a quarter of each, and the quarters are summed in `finish`
    sums: the thread's own shared memory for its row sums. They are used once per tile, and the products in between need
        every register.
    """

    def __init__(self, rows: int, sums: cute.Tensor) -> None:
        self.rows = rows
        self.maximum = cute.make_rmem_tensor(rows, Float32)
        self.sum = sums
        self.reset()

    def reset(self) -> None:
        """Sets maximum and sum to those of no keys."""
        self.maximum.fill(-Float32.inf)
        self.sum.fill(0.0)

    def step(self, scores: cute.Tensor, output: cute.Tensor, scale_log2: Float32) -> None:
        """Turns scores (rows x columns) into exp2((s - max) scale_log2), and rescales `output` and the sums."""
        sums = cute.make_rmem_tensor(self.rows, Float32)
        cute.autovec_copy(self.sum, sums)
        for row in range(self.rows):
            shrink = self._weights_of(row, scores, sums, scale_log2)
            output[row, None].store(output[row, None].load() * shrink)
        cute.autovec_copy(sums, self.sum)

    def weights(self, scores: cute.Tensor, scale_log2: Float32) -> list[Float32]:
        """Does `step` without the output; returns the factor of each output row."""
        return [self._weights_of(row, scores, self.sum, scale_log2) for row in range(self.rows)]

    def _weights_of(self, row: int, scores: cute.Tensor, sums: cute.Tensor, scale_log2: Float32) -> Float32:
        """Does `step` for one row; returns the factor of its output."""
        values = scores[row, None].load()
        maximum = self.row_maximum(values, self.maximum[row])
        base = finite(maximum)
        shrink = cute.math.exp2((self.maximum[row] - base) * scale_log2, fastmath=True)
        weights = self.exponentials(values * scale_log2 - base * scale_log2)
        scores[row, None].store(weights)
        sums[row] = sums[row] * shrink + self.row_sum(weights)
        self.maximum[row] = maximum
        return shrink

    def row_maximum(self, values: Any, seen: Float32) -> Float32:
        """Returns the maximum of `seen` and of the values that the threads of a quad hold of a row."""
        tile_maximum = values.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        tile_maximum = cute.arch.warp_reduction_max(tile_maximum, threads_in_group=QUAD)
        return cute.arch.fmax(seen, tile_maximum)

    def row_sum(self, weights: Any) -> Float32:
        """Returns the sum of the values that this thread holds of a row."""
        return weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    def exponentials(self, exponents: Any) -> Any:
        """Returns 2 to the power of each."""
        return cute.math.exp2(exponents, fastmath=True)

    def add_sink(self, output: cute.Tensor, logit: Float32, scale_log2: Float32) -> None:
        """Adds a sink, a logit in natural log without a value, to every row; rescales `output` and the sums.

        The maxima are in base 2 afterwards, so that `finish` must be called with a scale of 1.
        """
        sums = cute.make_rmem_tensor(self.rows, Float32)
        cute.autovec_copy(self.sum, sums)
        sink = logit * math.log2(math.e)
        for row in range(self.rows):
            seen = self.maximum[row] * scale_log2
            maximum = cute.arch.fmax(seen, sink)
            base = finite(maximum)
            shrink = cute.math.exp2(seen - base, fastmath=True)
            # each of the four threads that hold a row adds a quarter
            sums[row] = sums[row] * shrink + SINKS.weight(exp2, sink, base) * (1.0 / QUAD)
            self.maximum[row] = maximum
            output[row, None].store(output[row, None].load() * shrink)
        cute.autovec_copy(sums, self.sum)

    def finish(self, output: cute.Tensor, scale_log2: Float32) -> list[Float32]:
        """Divides `output` by the sums; returns the logsumexp (natural log) of each row, -inf without keys."""
        result = []
        for row in range(self.rows):
            total = cute.arch.warp_reduction_sum(self.sum[row], threads_in_group=QUAD)
            empty = total == 0.0
            output[row, None].store(
                output[row, None].load() * cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))
            )
            lse = (self.maximum[row] * scale_log2 + cute.math.log2(total, fastmath=True)) * math.log(2.0)
            result.append(cutlass.select_(empty, -Float32.inf, lse))
        return result


def exp2(exponent: Any) -> Any:
    """Returns 2 to the power of a value, by the hardware's approximation."""
    return cute.math.exp2(exponent, fastmath=True)


def multiply_rows(output: cute.Tensor, factors: Any) -> None:
    """Multiplies each of the rows (rows x columns) by its factor."""
    for row in range(cute.size(output, mode=[0])):
        output[row, None].store(output[row, None].load() * factors[row])


def finite(maximum: Float32) -> Float32:
    """Returns the maximum, or 0 for a row that has seen no key, so that (-inf) - (-inf) never arises."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
