"""Softmax with exp2 emulation: some exponentials by a polynomial, for head dims so small that MUFU.EX2 is the limit.

2^x is 2^n 2^f, where n is the integer nearest to x. A polynomial computes 2^f, and n is added to the exponent bits. The
constant term is 1, so that the smallest x, which represents minus infinity, gives exactly 0.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.kernels.sm90_forward.chained_softmax import ChainedSoftmax, larger

ROUNDER = 1.5 * 2.0**23  # x + ROUNDER has the integer nearest to x in its last bits
EXPONENT_BIT = 23
LOWEST, HIGHEST = -127.0, 100.0
# Of f, f^2, f^3 for |f| <= 1/2. The relative error is at most 1.0e-4; rounding to bfloat16 adds up to 2e-3.
COEFFICIENTS = (0.69328287, 0.24220985, 0.05500837)
SHARE = 24  # one of so many columns that a thread holds uses the polynomial


class Exp2EmulatedSoftmax(ChainedSoftmax):
    """ChainedSoftmax with one of `SHARE` exponentials of a row by a polynomial; at least one, if a row has fewer."""

    def exponentials(self, exponents: Any) -> Any:
        """Returns 2^x of each exponent."""
        return self._exponentials(exponents, exp2)

    def unbounded_exponentials(self, exponents: Any) -> Any:
        """Returns 2^x of each exponent; a large number for those above HIGHEST and for NaN."""
        return self._exponentials(exponents, unbounded_exp2)

    def _exponentials(self, exponents: Any, emulation: Callable[[Float32], Float32]) -> Any:
        values = cute.make_rmem_tensor(exponents.shape, Float32)
        values.store(exponents)
        share = min(SHARE, cute.size(values))
        for index in range(cute.size(values)):
            emulated = index % share == share - 1
            values[index] = emulation(values[index]) if emulated else cute.math.exp2(values[index], fastmath=True)
        return values.load()


def exp2(x: Float32) -> Float32:
    """Returns 2^x without MUFU.EX2; 0 for x <= -127; any number for NaN."""
    return _polynomial(cute.arch.fmax(x, Float32(LOWEST)))


def unbounded_exp2(x: Float32) -> Float32:
    """Returns 2^x without MUFU.EX2; 0 for x <= -127, 2^100 for x >= 100, and 3.4e38 for NaN."""
    return _polynomial(cute.arch.fmin(larger(x, Float32(LOWEST)), Float32(HIGHEST), nan=True))


def _polynomial(x: Float32) -> Float32:
    """Returns 2^x for LOWEST <= x <= HIGHEST. The bits of a NaN, all ones but the sign, give 3.4e38."""
    shifted = x + Float32(ROUNDER)
    fraction = x - (shifted - Float32(ROUNDER))
    power = Float32(COEFFICIENTS[-1])
    for coefficient in (*COEFFICIENTS[-2::-1], 1.0):
        power = power * fraction + Float32(coefficient)
    return (power.bitcast(Int32) + (shifted.bitcast(Int32) << EXPONENT_BIT)).bitcast(Float32)
