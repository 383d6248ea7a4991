"""Mask function: the program of a user's mask in a kernel."""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8

from cutlass_py_attn.integers import larger, smaller
from cutlass_py_attn.kernels.common import params
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.mask_program import BOOL, FLOAT, INT, MASK_SCALARS, Functions, MaskProgram
from cutlass_py_attn.problem.tensors import MASK_ARRAY_AXES, MASK_ARRAYS

STORED = {BOOL: Uint8, INT: Int32, FLOAT: Float32}
CONSTANTS = {bool: Boolean, int: Int32, float: Float32}
SHORT_STEPS = 24  # of a program of which a thread computes several pairs at once
SHIFT_BITS = 31  # of a number that are the count of a shift


class MaskFunction:
    """The mask function of a build."""

    def __init__(self, build: Build) -> None:
        self.program = MaskProgram.parse(build.form.program)

    def at_once(self, most: int) -> int:
        """Returns how many steps of a loop, up to `most`, are unrolled: one of a long program, whose values take the
        registers."""
        return most if len(self.program.steps) <= SHORT_STEPS else 1

    def sees(self, p: Any, batch: Int32, head: Int32, query: Int32, key: Int32) -> Boolean:
        """Returns whether a query of a head of a sequence sees a key; any positions may be asked for."""
        scalars = [getattr(p, name) for name in MASK_SCALARS[: self.program.scalars]]

        def load(number: int, index: list[Any]) -> Any:
            name, (kind, _) = MASK_ARRAYS[number], self.program.arrays[number]
            offset = Int64(0)
            for axis, place in enumerate(index):
                inside = larger(smaller(place, getattr(p, f"{name}_size_{axis}") - 1), 0)
                offset = offset + Int64(inside) * params.stride(p, name, MASK_ARRAY_AXES[axis])
            value = params.load_scalar(getattr(p, name), STORED[kind], offset)
            return value != Uint8(0) if kind == BOOL else value

        functions = Functions(lambda value: CONSTANTS[type(value)](value), load, OPERATIONS)
        # The division of a layout's coordinate rounds towards 0, that of what an Int64 becomes rounds down.
        coordinates = [Int32(Int64(place)) for place in (batch, head, query, key)]
        return self.program.compute(coordinates, scalars, functions)


def _divided(left: Int32, right: Int32) -> Int32:
    is_zero = right == 0
    return cutlass.select_(is_zero, Int32(0), left // cutlass.select_(is_zero, Int32(1), right))


def _remainder(left: Int32, right: Int32) -> Int32:
    return cutlass.select_(right == 0, Int32(0), left - _divided(left, right) * right)


OPERATIONS = {
    "add": lambda left, right: left + right,
    "sub": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "div": _divided,
    "mod": _remainder,
    "min": lambda left, right: cutlass.select_(right < left, right, left),
    "max": lambda left, right: cutlass.select_(left < right, right, left),
    "lt": lambda left, right: left < right,
    "le": lambda left, right: left <= right,
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "and": lambda left, right: left & right,
    "or": lambda left, right: left | right,
    "xor": lambda left, right: left ^ right,
    "not": lambda value: value ^ Boolean(True),
    "shl": lambda value, count: value << (count & SHIFT_BITS),
    "shr": lambda value, count: value >> (count & SHIFT_BITS),
    "where": cutlass.select_,
    "int": lambda value: cutlass.select_(value, Int32(1), Int32(0)),
    "float": lambda value: Float32(value) if isinstance(value, Int32) else cutlass.select_(value, 1.0, 0.0),
}
