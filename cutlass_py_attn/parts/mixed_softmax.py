"""Mixed softmax: some of the exponentials by a polynomial, for heads so narrow that the unit of exponentials is late.

2^x is 2^n 2^f with n the integer next to x. A polynomial gives 2^f, and n is added to the exponent of its bits. Its
constant is 1, so that the smallest x, which stands for minus infinity, gives 0 to the bit.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cutlass_py_attn.parts.softmax import OnlineSoftmax

ROUNDER = 1.5 * 2.0**23  # a float32 sum with it has the nearest integer in its last bits
EXPONENT_BIT = 23
LOWEST = -127.0
# Of f, f^2, f^3 where |f| <= 1/2: 1.0e-4 off at most, relative; a bfloat16 weight is rounded by up to 2e-3.
COEFFICIENTS = (0.69328287, 0.24220985, 0.05500837)
SHARE = 8  # one of so many columns goes by the polynomial


class MixedSoftmax(OnlineSoftmax):
    """OnlineSoftmax, one of `SHARE` exponentials by a polynomial."""

    def exponentials(self, exponents: Any) -> Any:
        """2 to the power of each."""
        held = cute.make_rmem_tensor(exponents.shape, Float32)
        held.store(exponents)
        for index in range(cute.size(held)):
            by_polynomial = index % SHARE == SHARE - 1
            held[index] = exp2(held[index]) if by_polynomial else cute.math.exp2(held[index], fastmath=True)
        return held.load()


def exp2(x: Float32) -> Float32:
    """2^x without the unit of exponentials; 0 from -127 down."""
    x = cute.arch.fmax(x, Float32(LOWEST))
    shifted = x + Float32(ROUNDER)
    fraction = x - (shifted - Float32(ROUNDER))
    power = Float32(COEFFICIENTS[-1])
    for coefficient in (*COEFFICIENTS[-2::-1], 1.0):
        power = power * fraction + Float32(coefficient)
    return (power.bitcast(Int32) + (shifted.bitcast(Int32) << EXPONENT_BIT)).bitcast(Float32)
