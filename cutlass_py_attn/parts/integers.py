"""Integer helpers that give the same answer on Python ints and on values traced by the DSL.

The DSL floors `//` like Python but truncates `%`; so `%` is never used on values that may be negative.
"""

from __future__ import annotations

from typing import Any


def smaller(a: Any, b: Any) -> Any:
    """min(a, b) for ints and traced integers."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def larger(a: Any, b: Any) -> Any:
    """max(a, b) for ints and traced integers."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def choose(condition: Any, a: Any, b: Any) -> Any:
    """a if condition else b, without a branch where the condition is traced."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.select_(condition, a, b)


def ceil_div(a: Any, b: int) -> Any:
    """ceil(a / b) for a >= 0 and a positive Python int b."""
    return (a + (b - 1)) // b


def round_up(a: Any, b: int) -> Any:
    """The smallest multiple of b that is >= a, for a >= 0."""
    return ceil_div(a, b) * b


def largest_part(whole: int, limit: int) -> int:
    """The largest divisor of `whole` that is at most `limit`."""
    return max(part for part in range(1, limit + 1) if whole % part == 0)


def any_of(*conditions: Any) -> Any:
    """Whether one holds: a Python bool where one is True or all are False, else traced."""
    if any(condition is True for condition in conditions):
        return True
    found: Any = False
    for condition in conditions:
        if condition is not False:
            found = condition if found is False else found | condition
    return found
