"""Expressions: grids, workspace sizes and tensor maps as values that Python evaluates and C compiles.

An expression is arithmetic (+ - *, comparisons) over numbers, names and functions, as `ceil_div(NUM_KEYS, 64) * BATCH`.
The planner evaluates it for a Plan. A bundle prints it into its manifest, whose text `parse` reads, and into its C
header, so every number of a launch has one rule. Sizes and strides are 64-bit integers, factors are float64.
"""

from __future__ import annotations

import ast
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn import integers
from cutlass_py_attn.launch import split_kv

Values = Mapping[str, float]


class Expr(ABC):
    """An expression: a Number, a Name, an Operation or a Call; `str` gives its text in a manifest.

    The operators + - * >= <= > give an Operation, // and % a Call of div and mod. == compares two expressions, `equals`
    says that their values are equal. An expression is neither true nor false: `evaluate` returns a value.
    """

    __slots__ = ()

    @abstractmethod
    def evaluate(self, values: Values) -> Any:
        """Returns the value; KeyError for a name without one."""

    @abstractmethod
    def substitute(self, rules: Mapping[str, Expr]) -> Expr:
        """Returns the expression with the rules in place of their names."""

    def equals(self, other: Term) -> Expr:
        """Returns the comparison of the values of both."""
        return Operation("==", self, expr(other))

    def __add__(self, other: Term) -> Expr:
        return _chained("+", self, expr(other))

    def __radd__(self, other: Term) -> Expr:
        return _chained("+", expr(other), self)

    def __sub__(self, other: Term) -> Expr:
        return Operation("-", self, expr(other))

    def __rsub__(self, other: Term) -> Expr:
        return Operation("-", expr(other), self)

    def __mul__(self, other: Term) -> Expr:
        return _chained("*", self, expr(other))

    def __rmul__(self, other: Term) -> Expr:
        return _chained("*", expr(other), self)

    def __floordiv__(self, other: Term) -> Expr:
        return call("div", self, other)

    def __rfloordiv__(self, other: Term) -> Expr:
        return call("div", other, self)

    def __mod__(self, other: Term) -> Expr:
        return call("mod", self, other)

    def __rmod__(self, other: Term) -> Expr:
        return call("mod", other, self)

    def __ge__(self, other: Term) -> Expr:
        return Operation(">=", self, expr(other))

    def __le__(self, other: Term) -> Expr:
        return Operation("<=", self, expr(other))

    def __gt__(self, other: Term) -> Expr:
        return Operation(">", self, expr(other))

    def __bool__(self) -> bool:
        raise TypeError(f"{self}: an expression is neither true nor false; evaluate it")


Term = Expr | int | float
Grid = tuple[Expr, Expr, Expr]


@dataclass(frozen=True, slots=True)
class Number(Expr):
    """An int or a float."""

    value: float

    def evaluate(self, values: Values) -> Any:
        return self.value

    def substitute(self, rules: Mapping[str, Expr]) -> Expr:
        return self

    def __str__(self) -> str:
        """Without an exponent, which not every host that evaluates expressions reads."""
        text = repr(self.value)
        if "e" not in text:
            return text
        return f"{self.value:.1f}" if abs(self.value) >= 1 else f"{self.value:.60f}"


@dataclass(frozen=True, slots=True)
class Name(Expr):
    """A size, a stride, a factor, or a number that other expressions define."""

    name: str

    def evaluate(self, values: Values) -> Any:
        return values[self.name]

    def substitute(self, rules: Mapping[str, Expr]) -> Expr:
        return rules.get(self.name, self)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Operation(Expr):
    """Two expressions with one of OPERATORS between them; a comparison is 1 or 0."""

    symbol: str
    left: Expr
    right: Expr

    def evaluate(self, values: Values) -> Any:
        return OPERATORS[self.symbol](self.left.evaluate(values), self.right.evaluate(values))

    def substitute(self, rules: Mapping[str, Expr]) -> Expr:
        return Operation(self.symbol, self.left.substitute(rules), self.right.substitute(rules))

    def __str__(self) -> str:
        own = _strength(self)
        left = _in_brackets(self.left, _strength(self.left) < max(own, 1))
        return f"{left} {self.symbol} {_in_brackets(self.right, _strength(self.right) <= own)}"


@dataclass(frozen=True, slots=True)
class Call(Expr):
    """One of FUNCTIONS with its arguments."""

    function: str
    arguments: tuple[Expr, ...]

    def evaluate(self, values: Values) -> Any:
        return FUNCTIONS[self.function](*(argument.evaluate(values) for argument in self.arguments))

    def substitute(self, rules: Mapping[str, Expr]) -> Expr:
        return Call(self.function, tuple(argument.substitute(rules) for argument in self.arguments))

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


def _chained(symbol: str, left: Expr, right: Expr) -> Expr:
    """Returns a sum or a product, a + (b - c) as a + b - c and a * (b * c) as a * b * c: they have one text."""
    if isinstance(right, Operation) and right.symbol in _CHAINS[symbol]:
        return Operation(right.symbol, _chained(symbol, left, right.left), right.right)
    return Operation(symbol, left, right)


def _strength(expression: Expr) -> int:
    """Returns how tightly an expression holds together: the weaker one is in brackets beside an operator."""
    if not isinstance(expression, Operation):
        return 3
    return {"*": 2, "+": 1, "-": 1}.get(expression.symbol, 0)


def _in_brackets(expression: Expr, is_weak: bool) -> str:
    return f"({expression})" if is_weak else str(expression)


def _step(size: int, stride: int, otherwise: int) -> int:
    return otherwise if size == 1 else stride


def _distinct(*sizes_and_strides: int) -> int:
    axes = zip(sizes_and_strides[::2], sizes_and_strides[1::2], strict=True)
    span = 0  # from the first to the last element of the axes so far
    for stride, size in sorted((abs(stride), size) for size, stride in axes if size > 1):
        if stride <= span:
            return 0
        span += (size - 1) * stride
    return 1


def _causal_key_tiles(num_queries: int, num_keys: int, shift: int, tile_m: int, tile_n: int) -> int:
    ends = (min(first + tile_m, num_queries) for first in range(0, num_queries, tile_m))
    return sum(max(integers.ceil_div(min(num_keys, end + shift), tile_n), 1) for end in ends)


OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
}
# Functions that an expression may call. ceil_div rounds up, div rounds down. step is the stride of an axis with `size`
# indices, or `otherwise` if the axis has one index. distinct says of the four axes (size, stride) of an array whether
# each stride exceeds what the axes of smaller strides span: then no two indices have the same element. causal_key_tiles
# counts the key tiles that the query tiles of a head visit, each at least one, if query i sees the keys before i + 1 +
# shift.
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "ceil_div": integers.ceil_div,
    "div": operator.floordiv,
    "mod": operator.mod,
    "round_up": integers.round_up,
    "min": min,
    "max": max,
    "step": _step,
    "distinct": _distinct,
    "fewest_splits": split_kv.fewest_splits,
    "causal_key_tiles": _causal_key_tiles,
}


def expr(term: Term) -> Expr:
    """Returns the expression of a number, and any other as it is."""
    return term if isinstance(term, Expr) else Number(term)


def call(function: str, *arguments: Term) -> Expr:
    """Returns the call of one of FUNCTIONS."""
    return Call(function, tuple(map(expr, arguments)))


def ceil_div(a: Term, b: Term) -> Expr:
    return call("ceil_div", a, b)


def round_up(a: Term, b: Term) -> Expr:
    return call("round_up", a, b)


def minimum(a: Term, b: Term) -> Expr:
    return call("min", a, b)


def maximum(a: Term, b: Term) -> Expr:
    return call("max", a, b)


def step(size: Term, stride: Term, otherwise: Term) -> Expr:
    return call("step", size, stride, otherwise)


def contiguous_strides(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """Returns the strides of an array of this shape without gaps."""
    strides: list[Expr] = [ONE]
    for size in reversed(shape[1:]):
        strides.append(size if strides[-1] == ONE else size * strides[-1])
    return tuple(reversed(strides))


def times(expression: Expr, factor: int) -> Expr:
    """Returns the product of a term and a constant, without a factor of 1."""
    return expression if factor == 1 else expression * factor


def inline(expression: Expr, rules: Mapping[str, Expr]) -> Expr:
    """Returns an expression with the rules in place of their names, of which each names those before it alone."""
    known: dict[str, Expr] = {}
    for name, rule in rules.items():
        known[name] = rule.substitute(known)
    return expression.substitute(known)


def parse(text: str) -> Expr:
    """Returns the expression of its text; ValueError if it has anything else than expressions have."""
    return _parsed(ast.parse(text, mode="eval").body)


def _parsed(node: ast.expr) -> Expr:
    match node:
        case ast.Constant(int() | float() as value):
            return Number(value)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return Number(-value)
        case ast.Name(name):
            return Name(name)
        case ast.BinOp(left, symbol, right) | ast.Compare(left, [symbol], [right]) if type(symbol) in _SYMBOLS:
            return Operation(_SYMBOLS[type(symbol)], _parsed(left), _parsed(right))
        case ast.Call(ast.Name(function), arguments, []) if function in FUNCTIONS:
            return Call(function, tuple(map(_parsed, arguments)))
    raise ValueError(f"{ast.unparse(node)}: not part of an expression")


_SYMBOLS: Final[dict[type, str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Eq: "==", ast.GtE: ">=", ast.LtE: "<=", ast.Gt: ">",
}  # fmt: skip
_CHAINS: Final = {"+": ("+", "-"), "*": ("*",)}
ONE: Final = Number(1)
