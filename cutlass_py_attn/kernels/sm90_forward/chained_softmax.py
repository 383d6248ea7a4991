"""Softmax of the sm90 forward: row maxima and sums by several chains, and lazy rescaling.

A thread holds 16 to 52 columns of a row. One chain of additions or maxima waits for each result; four chains that are
joined at the end leave the latency of the instructions to other work.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from cutlass_py_attn.kernels.common.softmax import QUAD, OnlineSoftmax, exp2, finite

CHAINS = 4
LARGEST_SUM = 2.0**24  # of the weights of a row that a thread adds: bfloat16 holds them, and float32 the sum of all
GROWTH = 8.0  # how far scores may exceed a maximum that is not updated, in base 2: weights stay below 2^8


class ChainedSoftmax(OnlineSoftmax):
    """OnlineSoftmax whose row maxima and sums are reduced by chains.

    The maxima propagate NaN, across the quad and into the running maximum, so that all weights of the row become NaN. A
    NaN score alone need not: a polynomial in place of an exponential may turn it into a number.
    """

    def row_maximum(self, values: Any, seen: Float32) -> Float32:
        tile_maximum = cute.arch.warp_reduction(chained(values, larger), larger, threads_in_group=QUAD)
        return larger(seen, tile_maximum)

    def row_sum(self, weights: Any) -> Float32:
        return chained(weights, lambda a, b: a + b)

    @cute.jit
    def lazy_weights(self, scores: cute.Tensor, factors: cute.Tensor, scale_log2: Float32):
        """Does `weights`, but updates the maxima only when a row of the warp exceeds its own by GROWTH.

        Returns whether the maxima were updated. Only then do `factors` have values, and the output must be multiplied
        by them. Which maximum is subtracted changes no result, as long as the weights stay within their type.
        """
        rows, maximum, sums = self.rows, self.maximum, self.sum
        found = cute.make_rmem_tensor(rows, Float32)
        grows = Boolean(False)
        for row in cutlass.range_constexpr(rows):
            found[row] = self.row_maximum(scores[row, None].load(), maximum[row])
            # NaN, which compares false, for a row that has seen no key yet or a score that is NaN, whose weight is NaN
            grows = grows | ((found[row] - maximum[row]) * scale_log2 > GROWTH)
        grows = cute.arch.vote_any_sync(grows)
        if grows:
            for row in cutlass.range_constexpr(rows):
                factors[row] = exp2((maximum[row] - finite(found[row])) * scale_log2)
                sums[row] = sums[row] * factors[row]
                maximum[row] = found[row]
        for row in cutlass.range_constexpr(rows):
            weights = exp2(scores[row, None].load() * scale_log2 - finite(maximum[row]) * scale_log2)
            scores[row, None].store(weights)
            sums[row] = sums[row] + self.row_sum(weights)
        return grows

    def speculate(self, scores: cute.Tensor, scale_log2: Float32) -> list[Float32]:
        """Turns scores, of a tile or of some of its columns, into weights with the maxima so far.

        Returns this thread's sum of each row. The sums are not added to those of the rows: a score may exceed the
        maximum, or a row may have none yet. `is_valid` says of the sums whether the weights may be used.
        """
        sums = []
        for row in range(self.rows):
            base = self.maximum[row] * scale_log2
            weights = self.unbounded_exponentials(scores[row, None].load() * scale_log2 - base)
            scores[row, None].store(weights)
            sums.append(self.row_sum(weights))
        return sums

    def unbounded_exponentials(self, exponents: Any) -> Any:
        """Returns 2 to the power of each; above 100 and for NaN either NaN or a number above LARGEST_SUM."""
        return self.exponentials(exponents)

    def add_sums(self, sums: list[Float32]) -> None:
        """Adds the sums of `speculate`."""
        for row in range(self.rows):
            self.sum[row] = self.sum[row] + sums[row]


def is_valid(sums: list[Float32]) -> Boolean:
    """Returns whether the weights may be used. A row without a maximum has weights of infinity or NaN.

    Scores may exceed the maximum before their tile by 24 in base 2.
    """
    found = Boolean(True)
    for value in sums:
        found = found & (value <= LARGEST_SUM)
    return found


def larger(a: Float32, b: Float32) -> Float32:
    """Returns the larger value; NaN if either is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def chained(values: Any, operation: Callable[[Float32, Float32], Float32]) -> Float32:
    """Reduces the values by CHAINS chains, which are joined in pairs."""
    held = cute.make_rmem_tensor(values.shape, Float32)
    held.store(values)
    parts = [held[index] for index in range(CHAINS)]
    for index in range(CHAINS, cute.size(held)):
        parts[index % CHAINS] = operation(parts[index % CHAINS], held[index])
    while len(parts) > 1:
        parts = [operation(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
