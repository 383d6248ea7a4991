"""Softmax of the e4m3 forward: weights in the range of e4m3, and the rows of an 8-bit operand.

A weight is 2^(x - max + WEIGHT_BITS), so that the largest is 256, below e4m3's 448, and the least that is not rounded
to zero is 2^-18 of the largest. The factor is in the row sums too, and cancels; the logsumexp subtracts it.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32

from cutlass_py_attn.kernels.common.softmax import QUAD, exp2, finite
from cutlass_py_attn.kernels.sm90.chained_softmax import ChainedSoftmax

WEIGHT_BITS = 8.0


class E4m3Softmax(ChainedSoftmax):
    """ChainedSoftmax whose weights are 2^WEIGHT_BITS times as large."""

    def _weights_of(self, row: int, scores: cute.Tensor, sums: cute.Tensor, scale_log2: Float32) -> Float32:
        values = scores[row, None].load()
        maximum = self.row_maximum(values, self.maximum[row])
        base = finite(maximum)
        shrink = exp2((self.maximum[row] - base) * scale_log2)
        weights = self.exponentials(values * scale_log2 - (base * scale_log2 - Float32(WEIGHT_BITS)))
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
            log2_sum = cute.math.log2(total, fastmath=True) - Float32(WEIGHT_BITS)
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
