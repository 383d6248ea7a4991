"""Mask programs: a mask function of a user as a list of operations, which kernels, NumPy and JAX compute alike.

mask_tracing.py writes them. A program has a text by which kernels are compiled, named and cached: functions that do the
same have the same text. Integers are int32 and wrap around; // and % round down, as in Python, and are 0 for a divisor
of 0; a shift counts modulo 32; an index that is no place of an axis reads the nearest one.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn.problem.tensors import MASK_ARRAY_AXES, MASK_ARRAYS

BOOL, INT, FLOAT = "bool", "int32", "float32"
KINDS: Final = (BOOL, INT, FLOAT)
ARRAY_KINDS: Final = {"bool": BOOL, "uint8": BOOL, "int32": INT, "float32": FLOAT}  # of an element, by its dtype
COORDINATES: Final = ("batch", "head", "query", "key")
MAX_SCALARS: Final = 4
WORD: Final = np.iinfo(np.int32)
MASK_SCALARS: Final = tuple(f"mask_scalar_{index}" for index in range(MAX_SCALARS))  # struct fields
_PAIRS: Final = {kind: (kind, kind) for kind in KINDS}
OPERATIONS: Final = {  # and the kinds of values that each takes, with that of its result
    "not": (((BOOL,), BOOL),),
    "int": (((BOOL,), INT),),
    "float": (((BOOL,), FLOAT), ((INT,), FLOAT)),
    **dict.fromkeys(("add", "sub", "mul", "div", "mod", "shl", "shr"), ((_PAIRS[INT], INT),)),
    **dict.fromkeys(("min", "max"), ((_PAIRS[INT], INT), (_PAIRS[FLOAT], FLOAT))),
    **dict.fromkeys(("lt", "le"), ((_PAIRS[INT], BOOL), (_PAIRS[FLOAT], BOOL))),
    **dict.fromkeys(("eq", "ne"), tuple((pair, BOOL) for pair in _PAIRS.values())),
    **dict.fromkeys(("and", "or", "xor"), ((_PAIRS[BOOL], BOOL), (_PAIRS[INT], INT))),
    "where": tuple(((BOOL, *pair), kind) for kind, pair in _PAIRS.items()),
}


_TEXT: Final = re.compile(r"arrays((?: \w+\[\d\])*); scalars (\d)((?:; \w+(?: [\w.+-]+)*)+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: `const`, `load`, or one of OPERATIONS.

    inputs: the number of `const`; the array of `load`, then the values of its index; else values. Values are numbered:
        the four COORDINATES, the scalars, and the results of the steps, in this order
    """

    operation: str
    inputs: tuple[Any, ...]

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers of the values that the step reads."""
        return self.inputs[{"const": 1, "load": 1}.get(self.operation, 0) :]

    def __str__(self) -> str:
        return " ".join(map(str, (self.operation, *self.inputs)))


@dataclass(frozen=True, slots=True)
class MaskProgram:
    """A traced mask function; the last step is whether a query sees a key.

    arrays: (kind, rank) of each array, its kind one of KINDS
    scalars: how many integers are arguments beside the arrays
    """

    arrays: tuple[tuple[str, int], ...]
    scalars: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        arrays = " ".join(f"{kind}[{rank}]" for kind, rank in self.arrays)
        return "; ".join((f"arrays {arrays}".strip(), f"scalars {self.scalars}", *map(str, self.steps)))

    @staticmethod
    def parse(text: str) -> MaskProgram:
        """Returns the program of a text that `str` gave; ValueError if it is of none."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError("it does not list arrays, scalars and operations")
        arrays, scalars, steps = match.groups()
        described = (word.removesuffix("]").split("[") for word in arrays.split())
        kinds = tuple((kind, int(rank)) for kind, rank in described)
        program = MaskProgram(kinds, int(scalars), tuple(map(_step, steps.split("; ")[1:])))
        program._expect_sound()
        return program

    def _expect_sound(self) -> None:
        """Raises ValueError for what no trace gives."""
        is_sound = len(self.arrays) <= len(MASK_ARRAYS) and 0 <= self.scalars <= MAX_SCALARS and bool(self.steps)
        is_sound = is_sound and all(kind in KINDS and rank <= len(MASK_ARRAY_AXES) for kind, rank in self.arrays)
        kinds = [INT] * (len(COORDINATES) + self.scalars)
        for step in self.steps if is_sound else ():
            in_order = all(0 <= value < len(kinds) for value in step.values)
            kinds.append(self._kind_of(step, [kinds[value] for value in step.values]) if in_order else "")
        if not is_sound or "" in kinds or kinds[-1] != BOOL:
            raise ValueError("its operations or arrays are not known")

    def _kind_of(self, step: Step, kinds: Sequence[str]) -> str:
        """Returns the kind of the result of a step that reads values of these kinds; "" for what no trace gives."""
        if step.operation == "const":
            return _kind_of_number(step.inputs[0])
        if step.operation == "load":
            array = step.inputs[0] if step.inputs else -1
            kind, rank = self.arrays[array] if 0 <= array < len(self.arrays) else ("", -1)
            return kind if [*kinds] == [INT] * rank else ""
        return next((kind for taken, kind in OPERATIONS.get(step.operation, ()) if taken == tuple(kinds)), "")

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that stand for the program in symbols."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:8]

    @property
    def coordinates(self) -> frozenset[str]:
        """The coordinates that the program reads."""
        read = {value for step in self.steps for value in step.values}
        return frozenset(name for number, name in enumerate(COORDINATES) if number in read)

    def joined(self, inner: int, mapped: Collection[int], is_outer: bool) -> tuple[MaskProgram, tuple[int, ...]]:
        """Returns the program of calls whose batches are one batch, and the integers that it takes behind its own.

        inner: size of the inner one of the two axes that are joined, that of calls and that of their batches
        mapped: arrays that differ from call to call, whose first axis is that of calls
        is_outer: whether the axis of calls is the outer one
        """
        batch, first = 0, len(COORDINATES) + self.scalars
        sizes = (inner,) if inner > 1 else ()
        steps, axes = [Step("const", (0,))], (batch, first)
        if sizes:
            steps, axes = [Step(name, (batch, first)) for name in ("div", "mod")], (first + 1, first + 2)
        of_call, of_batch = axes if is_outer else reversed(axes)
        arrays = tuple((kind, rank + (number in mapped)) for number, (kind, rank) in enumerate(self.arrays))
        start = MaskProgram(arrays, self.scalars + len(sizes), tuple(steps))
        return start._followed_by(self, {batch: of_batch}, dict.fromkeys(mapped, of_call)), sizes

    def placed(self, names: Collection[str]) -> MaskProgram:
        """Returns the program of a part of the batch and the heads.

        Its last array, int32 (2,), has the first batch and the first head of the part.

        names: those of the COORDINATES batch and head that count in the part
        """
        first, own = len(COORDINATES) + self.scalars, len(self.arrays)
        steps: list[Step] = []
        moved = {}
        for coordinate, name in enumerate(COORDINATES[:2]):
            if name in names:
                value = first + len(steps)
                steps += Step("const", (coordinate,)), Step("load", (own, value)), Step("add", (coordinate, value + 1))
                moved[coordinate] = value + 2
        return MaskProgram((*self.arrays, (INT, 1)), self.scalars, tuple(steps))._followed_by(self, moved, {})

    def _followed_by(self, program: MaskProgram, moved: Mapping[int, int], leading: Mapping[int, int]) -> MaskProgram:
        """Returns these steps, then those of a program.

        moved: values that take the place of coordinates in the program
        leading: values that it puts before the index of arrays
        """
        old = len(COORDINATES) + program.scalars
        shift = len(COORDINATES) + self.scalars + len(self.steps) - old
        steps = []
        for step in program.steps:
            values = [moved.get(value, value) if value < old else value + shift for value in step.values]
            others = step.inputs[: len(step.inputs) - len(values)]
            index = [leading[others[0]]] if step.operation == "load" and others[0] in leading else []
            steps.append(Step(step.operation, (*others, *index, *values)))
        return MaskProgram(self.arrays, self.scalars, (*self.steps, *steps))

    def compute(self, coordinates: Sequence[Any], scalars: Sequence[Any], functions: Functions) -> Any:
        """Returns whether queries see keys, by these functions; coordinates and scalars are values of them."""
        values = [*coordinates, *scalars]
        for step in self.steps:
            if step.operation == "const":
                values.append(functions.constant(step.inputs[0]))
            elif step.operation == "load":
                array, *index = step.inputs
                values.append(functions.load(array, [values[place] for place in index]))
            else:
                values.append(functions.operations[step.operation](*(values[place] for place in step.inputs)))
        return values[-1]


@dataclass(frozen=True, slots=True)
class Functions:
    """How the operations are computed: by NumPy, by jax.numpy or in a kernel.

    constant: returns a Python bool, int or float as a value
    load: returns an element of an array, by the number of the array and an index for each axis
    operations: by name
    """

    constant: Callable[[Any], Any]
    load: Callable[[int, list[Any]], Any]
    operations: Mapping[str, Callable[..., Any]]


def _step(text: str) -> Step:
    operation, *words = text.split()
    if operation != "const":
        return Step(operation, tuple(map(int, words)))
    (word,) = words
    if word in ("True", "False"):
        return Step(operation, (word == "True",))
    return Step(operation, (int(word) if word.lstrip("-").isdigit() else float(word),))


def _kind_of_number(number: Any) -> str:
    if type(number) is int and not WORD.min <= number <= WORD.max:
        return ""
    return {bool: BOOL, int: INT, float: FLOAT}[type(number)]


def array_functions(xp: Any, arrays: Sequence[Any]) -> Functions:
    """Returns the functions of numpy or jax.numpy, for arrays of these values."""

    def constant(value: Any) -> Any:
        return xp.asarray(value, dtype={bool: bool, int: xp.int32, float: xp.float32}[type(value)])

    def load(number: int, index: list[Any]) -> Any:
        array = arrays[number]
        array = array != 0 if array.dtype in (np.dtype(bool), np.dtype(np.uint8)) else array
        return array[tuple(xp.clip(place, 0, size - 1) for place, size in zip(index, array.shape, strict=True))]

    def divided(left: Any, right: Any) -> Any:
        return xp.where(right == 0, 0, left // xp.where(right == 0, 1, right))

    shared = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": divided,
        "mod": lambda left, right: xp.where(right == 0, 0, left - divided(left, right) * right),
        "min": lambda left, right: xp.where(right < left, right, left),
        "max": lambda left, right: xp.where(left < right, right, left),
        "lt": operator.lt,
        "le": operator.le,
        "eq": operator.eq,
        "ne": operator.ne,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
        "not": operator.invert,
        "shl": lambda value, count: xp.left_shift(value, count & 31),
        "shr": lambda value, count: xp.right_shift(value, count & 31),
        "where": xp.where,
        "int": lambda value: xp.asarray(value).astype(xp.int32),
        "float": lambda value: xp.asarray(value).astype(xp.float32),
    }
    return Functions(constant, load, shared)
