"""Mask tracing: a mask function of a user becomes a MaskProgram.

`trace` calls the function once with symbols in place of numbers and writes down what it does with them: operators, and
numpy.where, minimum and maximum. What no kernel can do is refused with the line of the function.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final, NoReturn

import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.mask_program import (
    BOOL,
    COORDINATES,
    FLOAT,
    INT,
    KINDS,
    OPERATIONS,
    WORD,
    MaskProgram,
    Step,
    array_functions,
)
from cutlass_py_attn.refusals import Refusal

MAX_STEPS: Final = 200
SCORE_POSITIONS: Final = ("query", "key", "num_queries", "num_keys")  # that a score function takes
_KNOWN: Final = "use operators, and numpy.where, minimum, maximum and logical_and"


@dataclass(slots=True)
class _Recorder:
    """The steps that a function has done; equal ones are one.

    may_round: whether float32 may be computed with, not only compared: results then differ in the last bits
    """

    arrays: tuple[tuple[str, int], ...]
    scalars: int
    may_round: bool = False
    steps: list[Step] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def add(self, operation: str, *inputs: Any) -> int:
        """Returns the value of an operation, computed now if its inputs are numbers."""
        own = (operation, *((type(value).__name__, value) for value in inputs))
        if own not in self.numbers:
            is_computed = operation in _COMPUTED
            constants = [self.constant(value) for value in inputs] if is_computed else [None]
            if None not in constants:
                functions = array_functions(np, ())
                with np.errstate(all="ignore"):
                    result = functions.operations[operation](*map(functions.constant, constants))
                self.numbers[own] = self.add("const", result.item())
            else:
                self.numbers[own] = len(COORDINATES) + self.scalars + len(self.steps)
                self.steps.append(Step(operation, inputs))
                if len(self.steps) > MAX_STEPS:
                    _fail(f"the function has more than {MAX_STEPS} operations", "compute an array, and index it")
        return self.numbers[own]

    def constant(self, value: int) -> Any:
        """Returns the number that a value always is; None for no constant."""
        place = value - len(COORDINATES) - self.scalars
        step = self.steps[place] if place >= 0 else None
        return step.inputs[0] if step is not None and step.operation == "const" else None

    def program(self, result: int) -> MaskProgram:
        """Returns the program of a result, without the steps that it does not need."""
        first = len(COORDINATES) + self.scalars
        needed = {result}
        for number in range(first + len(self.steps) - 1, first - 1, -1):
            step = self.steps[number - first]
            if number in needed:
                needed.update(step.values)
        kept = sorted(number for number in needed if number >= first)
        places = {number: number for number in range(first)} | {old: first + new for new, old in enumerate(kept)}
        steps = []
        for number in kept:
            step = self.steps[number - first]
            first_value = len(step.inputs) - len(step.values)
            inputs = *step.inputs[:first_value], *(places[value] for value in step.values)
            steps.append(Step(step.operation, inputs))
        return MaskProgram(self.arrays, self.scalars, tuple(steps))


class _Symbol:
    """What stands for a number or an array while a function is traced; refuses what a kernel cannot do."""

    __slots__ = ("recorder",)
    __hash__ = None  # type: ignore[assignment]  # == compares in the kernel
    what = "a traced value"

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __bool__(self) -> bool:
        _fail("if, and, or, not, a < b < c ask whether a traced value is true", "use &, |, ~ and numpy.where")

    def __index__(self) -> int:
        _fail("a traced value is used as a Python integer", "pass arrays that it indexes in `arguments`")

    def __int__(self) -> int:
        _fail("a traced value is used as a Python integer", "leave int() away; integers are int32")

    def __float__(self) -> float:
        _fail("a traced value is used as a Python float", "leave float() away")

    def __iter__(self) -> Any:
        _fail(f"{self.what} is iterated over", "index it with coordinates")

    def __array__(self, *args: object, **kwargs: object) -> Any:
        _fail("a traced value is made an array, or is the index of one", f"{_KNOWN}; pass arrays in `arguments`")

    def __pow__(self, other: object) -> Any:
        _fail("** and @ have no operation", f"{_KNOWN}, or multiply")

    __rpow__ = __matmul__ = __pow__


class Value(_Symbol):
    """A number while a function is traced. kind: BOOL, INT or FLOAT; number: of the value in the program."""

    __slots__ = ("kind", "number")

    def __init__(self, recorder: _Recorder, kind: str, number: int) -> None:
        super().__init__(recorder)
        self.kind, self.number = kind, number

    def __getitem__(self, index: object) -> Any:
        if index == ():  # as of NumPy's arrays without axes
            return self
        _fail("a number is indexed", "pass arrays in `arguments`")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options or ufunc.__name__ not in {*UFUNCS, *_SWAPPED, *_UNARY, *ROUNDED}:
            _fail(f"numpy.{ufunc.__name__} has no operation", _KNOWN)
        if ufunc.__name__ in ROUNDED and self.recorder.may_round:
            if ufunc.__name__ == "divide":
                return self._quotient(*inputs)
            values = (self._value(value)._as(FLOAT) for value in inputs)
            return self._result(FLOAT, ROUNDED[ufunc.__name__], *values)
        if ufunc.__name__ in _UNARY:
            return _UNARY[ufunc.__name__](*inputs)
        if ufunc.__name__ in _SWAPPED:
            return self._called(_SWAPPED[ufunc.__name__], *inputs[::-1])
        return self._called(UFUNCS[ufunc.__name__], *inputs)

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        if function.__name__ != "where" or options or len(inputs) != 3:
            _fail(f"numpy.{function.__name__} has no operation", _KNOWN)
        condition, *values = map(self._value, inputs)
        kind = max((value.kind for value in values), key=KINDS.index)
        values = [value._as(kind) for value in values]
        return self._result(kind, "where", condition._as_bool(), *values)

    def _called(self, name: str, *inputs: Any) -> Value:
        """Returns an operation of values or Python numbers."""
        values = [self._value(value) for value in inputs]
        kind = max((value.kind for value in values), key=KINDS.index)
        if name in COMPARISONS:
            kind = INT if kind == BOOL and name in ("lt", "le") else kind
            return self._result(BOOL, name, *(value._as(kind) for value in values))
        if name in LOGICAL:
            return self._result(BOOL, LOGICAL[name], *(value._as_bool() for value in values))
        if name in BITWISE:
            if kind == FLOAT:
                _fail(f"{name} of a float", "compare it first")
            return self._result(kind, name, *(value._as(kind) for value in values))
        if kind == FLOAT and name in ("div", "mod", "shl", "shr"):
            _fail(f"{name} of a float", "use /, or integers")
        if kind == FLOAT and name not in ("min", "max") and not self.recorder.may_round:
            _fail(f"{name} of a float32 is rounded, differently in a kernel and in NumPy", "compute the array before")
        kind = INT if kind == BOOL else kind
        return self._result(kind, name, *(value._as(kind) for value in values))

    def _result(self, kind: str, name: str, *values: Value) -> Value:
        return Value(self.recorder, kind, self.recorder.add(name, *(value.number for value in values)))

    def _value(self, value: Any) -> Value:
        """Returns a Python or NumPy number as a value."""
        if isinstance(value, Value):
            return value
        if isinstance(value, ArrayValue):
            value._is_no_number()
        if isinstance(value, np.ndarray) and value.ndim == 0:  # what NumPy makes of its numbers
            value = value[()]
        if isinstance(value, (bool, np.bool_)):
            return Value(self.recorder, BOOL, self.recorder.add("const", bool(value)))
        if isinstance(value, (int, np.integer)):
            if not WORD.min <= value <= WORD.max:
                _fail(f"{value} is no int32", "use smaller numbers")
            return Value(self.recorder, INT, self.recorder.add("const", int(value)))
        if isinstance(value, (float, np.floating)):
            return Value(self.recorder, FLOAT, self.recorder.add("const", float(np.float32(value))))
        _fail(f"{type(value).__name__} {value!r:.60} is no number", "pass arrays in `arguments`, and index them")

    def _as(self, kind: str) -> Value:
        return self if self.kind == kind else self._result(kind, {INT: "int", FLOAT: "float"}[kind], self)

    def _as_bool(self) -> Value:
        return self if self.kind == BOOL else self._called("ne", self, 0)

    def __truediv__(self, other: Any) -> Value:
        return self._quotient(self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._quotient(other, self)

    def _quotient(self, left: Any, right: Any) -> Value:
        if not self.recorder.may_round:
            _fail("/ divides", "use //")
        dividend, divisor = (self._value(value)._as(FLOAT) for value in (left, right))
        constant = self.recorder.constant(divisor.number)
        if constant:
            return dividend * (1 / constant)
        return self._result(FLOAT, ROUNDED["divide"], dividend, divisor)

    def __invert__(self) -> Value:
        return self._called("not", self) if self.kind == BOOL else self._called("xor", self, -1)

    def __neg__(self) -> Value:
        return self._called("sub", 0, self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self._called("max", self, -self)


class ArrayValue(_Symbol):
    """An array while a function is traced, which is read by an index for every axis."""

    __slots__ = ("name", "number")
    what = "an array"

    def __init__(self, recorder: _Recorder, name: str, number: int) -> None:
        super().__init__(recorder)
        self.name, self.number = name, number

    def _has_no_size(self) -> NoReturn:
        """Sizes may differ from call to call."""
        _fail(f"the shape of {self.name} is read", "pass its sizes as integers in `arguments`")

    shape = property(_has_no_size)
    __len__ = _has_no_size

    def _is_no_number(self, *others: object, **options: object) -> NoReturn:
        _fail(f"{self.name} is used as a number", f"index it, as in {self.name}[...]")

    __array_ufunc__ = _is_no_number

    def __getitem__(self, index: Any) -> Value:
        places = index if isinstance(index, tuple) else (index,)
        kind, rank = self.recorder.arrays[self.number]
        if len(places) != rank or any(isinstance(place, slice) or place is None or place is ... for place in places):
            _fail(f"{self.name} has {rank} axes, and is indexed by {len(places)}", "index every axis by an integer")
        one = Value(self.recorder, INT, 0)
        values = [one._value(place) for place in places]
        if any(value.kind == FLOAT for value in values):
            _fail(f"{self.name} is indexed by a float", "index it by integers")
        constants = [self.recorder.constant(value.number) for value in values]
        if any(constant is not None and constant < 0 for constant in constants):
            _fail(f"{self.name} is indexed by {min(filter(None, constants))}", "count from the first element")
        numbers = (value._as(INT).number for value in values)
        return Value(self.recorder, kind, self.recorder.add("load", self.number, *numbers))


COMPARISONS: Final = ("lt", "le", "eq", "ne")
LOGICAL: Final = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not"}
BITWISE: Final = ("and", "or", "xor", "not")
UFUNCS: Final = {
    **{name: name for name in LOGICAL},
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "floor_divide": "div",
    "remainder": "mod",
    "minimum": "min",
    "maximum": "max",
    "less": "lt",
    "less_equal": "le",
    "equal": "eq",
    "not_equal": "ne",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "left_shift": "shl",
    "right_shift": "shr",
}
# Of NumPy, with the names of their operations: of float32 alone, and only where results may be rounded.
ROUNDED: Final = {"divide": "quotient", **{name: name for name in ("exp", "exp2", "log", "log2", "tanh", "sqrt")}}
_COMPUTED: Final = frozenset(OPERATIONS) - {"const", "load"}  # at once, if their inputs are numbers
_SWAPPED: Final = {"greater": "lt", "greater_equal": "le"}
_UNARY: Final[dict[str, Callable[[Any], Any]]] = {
    "negative": operator.neg,
    "absolute": operator.abs,
    "invert": operator.invert,
}
_OPERATORS: Final = {
    **{"add": "add", "sub": "sub", "mul": "mul", "floordiv": "div", "mod": "mod", "and": "and", "or": "or"},
    **{"xor": "xor", "lshift": "shl", "rshift": "shr"},
}


def _operator(name: str, is_swapped: bool) -> Any:
    return lambda self, other: self._called(name, *((other, self) if is_swapped else (self, other)))


for _name, _operation in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _operator(_operation, False))
    setattr(Value, f"__r{_name}__", _operator(_operation, True))
for _name in COMPARISONS:
    setattr(Value, f"__{_name}__", _operator(_name, False))
for _name, _operation in (("gt", "lt"), ("ge", "le")):
    setattr(Value, f"__{_name}__", _operator(_operation, True))


for _name in (*COMPARISONS, "gt", "ge", "neg", "abs", "invert", *_OPERATORS, *(f"r{name}" for name in _OPERATORS)):
    setattr(ArrayValue, f"__{_name}__", ArrayValue._is_no_number)


class _CannotTrace(Exception):
    """What a function does that no kernel can, where, and what to do; caught by `trace`.

    The place is "" if the function has returned.
    """


def _fail(what: str, remedy: str) -> NoReturn:
    raise _CannotTrace(_place(), what, remedy)


def _place() -> str:
    """Returns the line of the user's function that runs, as "file.py, line 3"; "" if none runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in (trace.__code__, trace_score.__code__):
        module = str(frame.f_globals.get("__name__"))
        if module != __name__ and module.partition(".")[0] != "numpy":
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _line(code: CodeType, number: int) -> str:
    return f"{code.co_filename.replace(os.sep, '/').rpartition('/')[2]}, line {number}"


def _definition(function: Callable[..., Any]) -> str:
    """Returns the line on which a function is defined; "" for what has no code of Python."""
    own = inspect.unwrap(function)
    codes = (getattr(each, "__code__", None) for each in (own, getattr(own, "func", None), type(own).__call__))
    code = next((code for code in codes if code is not None), None)
    return "" if code is None else _line(code, code.co_firstlineno)


def trace(
    function: Callable[..., Any], arrays: Mapping[str, tuple[str, int]], scalars: Sequence[str] = ()
) -> MaskProgram:
    """Returns the program of function(batch, head, query, key, **arguments).

    arrays: (kind, rank) of the arrays among the arguments by name, as a MaskProgram has them
    scalars: names of the integers among the arguments

    Raises NotSupported, with the line of the function, for what a kernel cannot do.
    """
    recorder = _Recorder(tuple(arrays.values()), len(scalars))
    _expect_parameters(function, COORDINATES, [*arrays, *scalars])
    coordinates = [Value(recorder, INT, number) for number in range(len(COORDINATES))]
    values = {name: _array(recorder, name, number) for number, name in enumerate(arrays)}
    values |= {name: Value(recorder, INT, len(COORDINATES) + number) for number, name in enumerate(scalars)}
    try:
        value = coordinates[0]._value(function(*coordinates, **values))
        if value.kind != BOOL:
            _fail(f"the function returns {value.kind} in place of a bool", "compare it, as in x != 0")
        return recorder.program(value.number)
    except _CannotTrace as error:
        place, what, remedy = error.args
        raise NotSupported(_refusal("mask function", function, place, what, remedy)) from error


def trace_score(function: Callable[..., Any]) -> MaskProgram:
    """Returns the program of function(query, key, num_queries, num_keys, operand), which is float32 as `operand` is.

    The first four values of the program are the integers, the fifth is the operand. Raises NotSupported as `trace`
    does.
    """
    recorder = _Recorder((), 1, may_round=True)
    _expect_parameters(function, (*SCORE_POSITIONS, "operand"), ())
    positions = [Value(recorder, INT, number) for number in range(len(SCORE_POSITIONS))]
    try:
        value = positions[0]._value(function(*positions, Value(recorder, FLOAT, len(SCORE_POSITIONS))))
        return recorder.program(value._as(FLOAT).number)
    except _CannotTrace as error:
        place, what, remedy = error.args
        raise NotSupported(_refusal("score function", function, place, what, remedy)) from error


def _array(recorder: _Recorder, name: str, number: int) -> Any:
    """Returns what stands for an array; one without axes is a number."""
    kind, rank = recorder.arrays[number]
    return ArrayValue(recorder, name, number) if rank else Value(recorder, kind, recorder.add("load", number))


def _expect_parameters(function: Callable[..., Any], positions: Sequence[str], names: Sequence[str]) -> None:
    """Raises NotSupported for a function that does not take these positions, and arguments of these names."""
    try:
        inspect.signature(function).bind(*positions, **dict.fromkeys(names))
    except TypeError as error:
        taken = f"the function must take {', '.join((*positions, *names))}: {error}"
        remedy = "name its parameters as `arguments` does" if names else "take these"
        raise NotSupported(_refusal("function", function, "", taken, remedy)) from error
    except ValueError:  # a function without a signature
        return


def _refusal(field: str, function: Callable[..., Any], place: str, what: str, remedy: str) -> Refusal:
    """Returns the refusal of a function; place: a line, "" for that of its definition."""
    name = str(getattr(function, "__qualname__", repr(function)))
    where = place or _definition(function)
    return Refusal(field, name, f"{where}: {what}" if where else what, remedy)
