"""The conversion to e4m3 on bits, as targets before sm_89 compute it: executed by NumPy, compared with ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cutlass_py_attn.kernels.common import e4m3
from cutlass_py_attn.reference.serving import e4m3_codes

Array = npt.NDArray[Any]


def codes(values: Array) -> Array:
    """Returns the codes of float32 numbers by `code_of_bits`."""

    def bits_of_sum(bits: Array) -> Array:
        return (bits.view(np.float32) + np.float32(e4m3.ROUNDER)).view(np.uint32)

    with np.errstate(invalid="ignore"):
        found: Array = e4m3.code_of_bits(values.view(np.uint32), np.where, bits_of_sum)
    return found.astype(np.uint8)


def expected(values: Array) -> Array:
    """Returns ml_dtypes' codes of the numbers limited to 448; 0x7F for NaN."""
    with np.errstate(invalid="ignore"):
        limited = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), limited)


def test_every_16_bit_number() -> None:
    """All bit patterns of bfloat16 and float16, NaN and infinities among them."""
    for dtype in (ml_dtypes.bfloat16, np.float16):
        values = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
        np.testing.assert_array_equal(codes(values), expected(values))
        np.testing.assert_array_equal(e4m3_codes(values), expected(values))


def test_every_border_between_two_codes() -> None:
    """The float32 numbers around each number halfway between neighbours, and around each code."""
    known = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    borders = np.concatenate([known, (known[1:] + known[:-1]) / 2, np.array([464, 480, 2.0**-10], np.float32)])
    near = np.concatenate([borders.view(np.int32) + step for step in range(-3, 4)]).astype(np.int32)
    values = near[near >= 0].view(np.float32)
    for signed in (values, -values):
        np.testing.assert_array_equal(codes(signed), expected(signed))


def test_random_numbers() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    np.testing.assert_array_equal(codes(values), expected(values))


def test_the_largest_number() -> None:
    found = codes(np.array([448, 464, 465, 1e30, np.inf, -np.inf, np.nan, -np.nan, 0, -0.0], np.float32))
    assert found.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x00, 0x80]


def test_targets_with_an_instruction() -> None:
    archs = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
    assert [e4m3.has_instruction(arch) for arch in archs] == [False, False, False, True, True, True, True]
