"""Softmax: running maximum and sum of the forward, in base 2 and float32.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018): a new maximum rescales what was
summed before. Scores are raw products; the factor scale * log2(e) is applied inside the exponent.
"""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

QUAD = 4  # threads that share a row of an m16n8 accumulator
GROWTH = 8.0  # by which scores may outgrow a maximum that is kept, in base 2: weights stay below 2^8
TINY = 1e-30  # stands for a scale of zero: 0 * -inf would be NaN where a score is hidden


def safe_scale(scale_log2: Float32) -> Float32:
    """|scale_log2|, never zero; the sign is applied to the scores."""
    magnitude = cute.arch.fmax(scale_log2, -scale_log2)
    return cute.arch.fmax(magnitude, Float32(TINY))


class OnlineSoftmax:
    """Maximum and sum of the rows that a thread holds (a quarter of each; sums are joined at the end).

    The sums wait in `sums`, this thread's own shared memory: they are touched once a tile, and the products
    between need every register.
    """

    def __init__(self, rows: int, sums: cute.Tensor) -> None:
        self.rows = rows
        self.maximum = cute.make_rmem_tensor(rows, Float32)
        self.sum = sums
        self.reset()

    def reset(self) -> None:
        """As if no key had been seen."""
        self.maximum.fill(-Float32.inf)
        self.sum.fill(0.0)

    def step(self, scores: cute.Tensor, output: cute.Tensor, scale_log2: Float32) -> None:
        """Scores (rows x columns) become exp2((s - max) scale_log2); `output` and the sums are rescaled."""
        sums = cute.make_rmem_tensor(self.rows, Float32)
        cute.autovec_copy(self.sum, sums)
        for row in range(self.rows):
            shrink = self._weights_of(row, scores, sums, scale_log2)
            output[row, None].store(output[row, None].load() * shrink)
        cute.autovec_copy(sums, self.sum)

    def weights(self, scores: cute.Tensor, scale_log2: Float32) -> list[Float32]:
        """`step` without the output: what each of its rows must be multiplied with."""
        return [self._weights_of(row, scores, self.sum, scale_log2) for row in range(self.rows)]

    def _weights_of(self, row: int, scores: cute.Tensor, sums: cute.Tensor, scale_log2: Float32) -> Float32:
        """`step` of one row; what its output must be multiplied with."""
        values = scores[row, None].load()
        tile_maximum = values.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        tile_maximum = cute.arch.warp_reduction_max(tile_maximum, threads_in_group=QUAD)
        maximum = cute.arch.fmax(self.maximum[row], tile_maximum)
        base = _finite(maximum)
        shrink = cute.math.exp2((self.maximum[row] - base) * scale_log2, fastmath=True)
        weights = self.exponentials(values * scale_log2 - base * scale_log2)
        scores[row, None].store(weights)
        sums[row] = sums[row] * shrink + weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        self.maximum[row] = maximum
        return shrink

    def exponentials(self, exponents: Any) -> Any:
        """2 to the power of each."""
        return cute.math.exp2(exponents, fastmath=True)

    def join(self, output: cute.Tensor, logit: Float32, scale_log2: Float32) -> None:
        """A sink joins every row: a natural-log logit that has no value. `output` and the sums are rescaled.

        After this the maxima are in base 2: `finish` takes them with a scale of 1.
        """
        sums = cute.make_rmem_tensor(self.rows, Float32)
        cute.autovec_copy(self.sum, sums)
        sink = logit * math.log2(math.e)
        for row in range(self.rows):
            seen = self.maximum[row] * scale_log2
            maximum = cute.arch.fmax(seen, sink)
            base = _finite(maximum)
            shrink = cute.math.exp2(seen - base, fastmath=True)
            # each of the four threads that share a row adds a quarter
            sums[row] = sums[row] * shrink + cute.math.exp2(sink - base, fastmath=True) * (1.0 / QUAD)
            self.maximum[row] = maximum
            output[row, None].store(output[row, None].load() * shrink)
        cute.autovec_copy(sums, self.sum)

    def finish(self, output: cute.Tensor, scale_log2: Float32) -> list[Float32]:
        """Divide `output` by the sums; the logsumexp (natural log) of each row, -inf where no key was seen."""
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


def multiply_rows(output: cute.Tensor, factors: Any) -> None:
    """Multiply each of the rows (rows x columns) by a factor."""
    for row in range(cute.size(output, mode=[0])):
        output[row, None].store(output[row, None].load() * factors[row])


@cute.jit
def lazy_weights(
    scores: cute.Tensor, maximum: cute.Tensor, sums: cute.Tensor, factors: cute.Tensor, scale_log2: Float32
):
    """As OnlineSoftmax.weights, but maxima stay until a row of the warp outgrows its own by GROWTH; whether one did.

    Only then must the output be multiplied by `factors`, and have they a value. Which maximum is subtracted changes no
    result, as long as the weights stay within their type.
    """
    rows = cute.size(maximum)
    found = cute.make_rmem_tensor(rows, Float32)
    grows = Boolean(False)
    for row in cutlass.range_constexpr(rows):
        tile_maximum = scores[row, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        tile_maximum = cute.arch.warp_reduction_max(tile_maximum, threads_in_group=QUAD)
        found[row] = cute.arch.fmax(maximum[row], tile_maximum)
        # NaN, which is no growth, where a row has seen no key yet
        grows = grows | ((found[row] - maximum[row]) * scale_log2 > GROWTH)
    grows = cute.arch.vote_any_sync(grows)
    if grows:
        for row in cutlass.range_constexpr(rows):
            factors[row] = cute.math.exp2((maximum[row] - _finite(found[row])) * scale_log2, fastmath=True)
            sums[row] = sums[row] * factors[row]
            maximum[row] = found[row]
    for row in cutlass.range_constexpr(rows):
        exponents = scores[row, None].load() * scale_log2 - _finite(maximum[row]) * scale_log2
        weights = cute.math.exp2(exponents, fastmath=True)
        scores[row, None].store(weights)
        sums[row] = sums[row] + weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
    return grows


def _finite(maximum: Float32) -> Float32:
    """The maximum, 0 for a row that has seen no key, so that (-inf) - (-inf) never arises."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)
