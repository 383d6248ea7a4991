"""Softmax of the e4m3 forward: weights in the range of e4m3, and the rows of an 8-bit operand.

A weight is 2^(x - max + WEIGHT_BITS), so that the largest is 256, below e4m3's 448, and the least that is not rounded
to zero is 2^-18 of the largest. The factor is in the row sums too, and cancels; the logsumexp subtracts it.

Weights that are computed with the maxima before their key tile have SPECULATIVE_BITS instead. They fit e4m3 if no
GROUP of them adds up to more than LARGEST, which costs few comparisons: GROUP times 2^SPECULATIVE_BITS is 128, so that
equal scores fit, and a score may exceed the maximum by 3.7 in base 2. The least weight that is not rounded to zero is
then 2^-15 of the largest.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32

from cutlass_py_attn.kernels.common.softmax import QUAD, exp2, finite
from cutlass_py_attn.kernels.sm90_forward.chained_softmax import ChainedSoftmax

WEIGHT_BITS, SPECULATIVE_BITS = 8.0, 5.0
GROUP = 4  # weights of a row that a thread adds before their sum is compared
LARGEST = 448.0  # of e4m3


class E4m3Softmax(ChainedSoftmax):
    """ChainedSoftmax whose weights are 2^weight_bits times as large."""

    def __init__(self, rows: int, sums: cute.Tensor, weight_bits: float) -> None:
        super().__init__(rows, sums)
        self.weight_bits = weight_bits

    def speculate_in_range(self, scores: cute.Tensor, scale_log2: Float32) -> tuple[list[Float32], Boolean]:
        """Turns scores into weights with the maxima so far.

        Returns this thread's sum of each row, and whether its weights fit e4m3. They do not if one is NaN or infinite,
        as those of a row without a maximum are. The sums are not added to those of the rows.
        """
        sums, fit = [], Boolean(True)
        for row in range(self.rows):
            base = self.maximum[row] * scale_log2 - Float32(self.weight_bits)
            weights = self.exponentials(scores[row, None].load() * scale_log2 - base)
            scores[row, None].store(weights)
            held = cute.make_rmem_tensor(weights.shape, Float32)
            held.store(weights)
            total = Float32(0.0)
            for first in range(0, cute.size(held), GROUP):
                group = (held[first] + held[first + 1]) + (held[first + 2] + held[first + 3])
                fit = fit & (group <= LARGEST)
                total = total + group if first else group
            sums.append(total)
        return sums, fit

    def _weights_of(self, row: int, scores: cute.Tensor, sums: cute.Tensor, scale_log2: Float32) -> Float32:
        values = scores[row, None].load()
        maximum = self.row_maximum(values, self.maximum[row])
        base = finite(maximum)
        shrink = exp2((self.maximum[row] - base) * scale_log2)
        weights = self.exponentials(values * scale_log2 - (base * scale_log2 - Float32(self.weight_bits)))
        scores[row, None].store(weights)
        sums[row] = sums[row] * shrink + self.row_sum(weights)
        self.maximum[row] = maximum
        return shrink

    def row_results(self, scale_log2: Float32) -> tuple[list[Float32], list[Float32]]:
        """Returns the factor that normalises each row of O, 0 without keys, and its logsumexp (natural log)."""
        factors, logsumexps = [], []
        for row in range(self.rows):
            total = cute.arch.warp_reduction_sum(self.sum[row], threads_in_group=QUAD)
            empty = total == 0.0
            factors.append(Float32(cutlass.select_(empty, Float32(0.0), cute.arch.rcp_approx(total))))
            log2_sum = cute.math.log2(total, fastmath=True) - Float32(self.weight_bits)
            lse = (self.maximum[row] * scale_log2 + log2_sum) * math.log(2.0)
            logsumexps.append(Float32(cutlass.select_(empty, -Float32.inf, lse)))
        return factors, logsumexps


def a_operand(accumulator: cute.Tensor) -> cute.Tensor:
    """Returns uninitialised e4m3 registers for an accumulator's values as an A operand, ((4, 2, 2), 1, k-steps)."""
    (_, rows, eights), _, _ = accumulator.layout.shape
    return cute.make_rmem_tensor(cute.make_layout(((4, rows, 2), 1, eights // 4)), Float8E4M3FN)


def convert(accumulator: cute.Tensor, operand: cute.Tensor) -> None:
    """Rounds an accumulator ((2, 2, N / 8), 1, 1) to e4m3 in the registers of `a_operand`.

    Byte 2 b + e of thread t of a quad is the number of column 8 b + 2 t + e of 16, which is where
    `value_transpose` stores the key of that column: no thread needs another's numbers.
    """
    (pair, rows, eights), _, _ = accumulator.layout.shape
    pair_stride, row_stride, eight_stride = accumulator.layout.stride[0]
    shape = ((pair, 2), rows, 2, eights // 4)
    stride = ((pair_stride, eight_stride), row_stride, 2 * eight_stride, 4 * eight_stride)
    source = cute.make_tensor(accumulator.iterator, cute.make_layout(shape, stride=stride))
    held = cute.make_rmem_tensor(cute.size(operand), Float32)
    for index in range(cute.size(held)):
        held[index] = source[index]
    cute.make_tensor(operand.iterator, cute.make_layout(cute.size(operand))).store(held.load().to(Float8E4M3FN))
