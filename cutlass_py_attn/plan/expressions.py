"""Expressions: grids, workspace sizes and tensor maps as short texts that Python evaluates and C compiles.

An expression is arithmetic (+ - *, comparisons, brackets) over names and the functions below. Its text reads alike in
Python and in C. The planner evaluates it for a Plan; a bundle prints it into its manifest and its C header, so every
number of a launch has one rule. Sizes and strides are 64-bit integers, factors are float64.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Final

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.plan.split_kv import fewest_splits

Expression = str
Grid = tuple[Expression, Expression, Expression]

NAME: Final = re.compile(r"(?<![\w.])[a-z_][a-z0-9_]*")


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


# Functions that an expression may call. ceil_div rounds up, div rounds down. step is the stride of an axis with `size`
# indices, or `otherwise` if the axis has one index. distinct says of the four axes (size, stride) of an array whether
# each stride exceeds what the axes of smaller strides span: then no two indices have the same element.
FUNCTIONS: Final[dict[str, Callable[..., int]]] = {
    "ceil_div": ceil_div,
    "div": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "round_up": round_up,
    "min": min,
    "max": max,
    "step": _step,
    "distinct": _distinct,
    "fewest_splits": fewest_splits,
}


def evaluate(expression: Expression, values: Mapping[str, float]) -> Any:
    """Returns the value of an expression of this package; NameError for a name without a value.

    Never pass text from elsewhere: the expression is Python code.
    """
    return eval(_compiled(expression), {"__builtins__": {}}, {**FUNCTIONS, **values})


@functools.lru_cache(maxsize=4096)
def _compiled(expression: Expression) -> CodeType:
    return compile(expression, "<expression>", "eval")


def names_of(expression: Expression) -> set[str]:
    """Returns the names that an expression reads, functions excluded."""
    return set(NAME.findall(expression)) - FUNCTIONS.keys()


def times(expression: Expression, factor: int) -> Expression:
    """Returns the product of a term and a constant, without a factor of 1."""
    return expression if factor == 1 else f"{expression} * {factor}"
