"""PTX emulator with float32: `ptx_threads` with float32 arithmetic and packed conversions to and from 16-bit numbers.

The approximations of ex2, lg2, rcp and tanh are computed exactly.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

from tests.support.ptx_threads import COMPARISONS, WARP, Array, Threads, as_type

_PAIRS = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}
_SHORT = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.fmax,
    "min": np.fmin,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda value: 1 / np.sqrt(value),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
}


class FloatThreads(Threads):
    """Threads whose registers may contain the bits of float32 numbers."""

    def value(self, text: str) -> Array:
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
            return np.full(len(self.counters), int(text[2:], 16), np.uint64)
        return super().value(text)

    def result(self, op: str, v: list[Array]) -> Array:
        kind, *modifiers = op.split(".")
        if kind == "cvt" and modifiers[-1] == "e4m3x2":
            codes = (v[0].astype(np.uint16) >> shift for shift in (np.uint16(8), np.uint16(0)))
            high, low = (_half_bits(each.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)) for each in codes)
            return high << np.uint64(16) | low
        if kind == "cvt" and modifiers[-2:] == ["f32", "f16"]:
            return _bits(v[0].astype(np.uint16).view(np.float16))
        if kind == "cvt" and modifiers[1] in _PAIRS:
            high, low = (_number(x).astype(_PAIRS[modifiers[1]]).view(np.uint16).astype(np.uint64) for x in v)
            return high << np.uint64(16) | low
        if kind == "cvt" and modifiers[-2] == "f32" and modifiers[-1] in ("s32", "u32"):
            return _bits(as_type(v[0], modifiers[-1]))
        if kind == "cvt" and modifiers[-2:] == ["f32", "bf16"]:
            return v[0] << np.uint64(16)
        if kind == "setp" and modifiers[-1] == "f32":
            a, b = map(_number, v)
            unordered = np.isnan(a) | np.isnan(b)  # for which equ, neu, ltu, ... are true, and eq, ne, lt, ... false
            compared = COMPARISONS[modifiers[0].removesuffix("u")](a, b)
            return np.where(unordered, modifiers[0] not in COMPARISONS, compared)
        if kind == "vote":
            if modifiers == ["sync", "ballot", "b32"]:
                bits = (v[0] != 0).reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
                return bits.sum(axis=1).repeat(WARP)
            joined = {"any": np.any, "all": np.all}.get(modifiers[1])
            assert joined is not None, f"{op}: not emulated"
            assert modifiers == ["sync", modifiers[1], "pred"], f"{op}: not emulated"
            return joined((v[0] != 0).reshape(-1, WARP), axis=1).repeat(WARP)
        if kind == "max" and "NaN" in modifiers:
            return _bits(np.maximum(*map(_number, v)))
        if kind == "min" and "NaN" in modifiers:
            return _bits(np.minimum(*map(_number, v)))
        if kind in ("abs", "max") and modifiers[-1] in _SHORT:
            dtype = _SHORT[modifiers[-1]]
            numbers = (x.astype(np.uint16).view(dtype).astype(np.float32) for x in v)
            return _FUNCTIONS[kind](*numbers).astype(dtype).view(np.uint16).astype(np.uint64)
        if kind in _FUNCTIONS and modifiers[-1] == "f32":
            with np.errstate(all="ignore"):
                return _bits(_FUNCTIONS[kind](*map(_number, v)))
        return super().result(op, v)


def _number(bits: Array) -> Array:
    return bits.astype(np.uint32).view(np.float32)


def _half_bits(numbers: Array) -> Array:
    return numbers.astype(np.float16).view(np.uint16).astype(np.uint64)


def _bits(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
