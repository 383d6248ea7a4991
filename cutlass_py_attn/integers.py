"""Integer helpers with the same results for Python ints and for values traced by the DSL.

The DSL rounds `//` down like Python, but `%` truncates: never use `%` on values that may be negative.
"""

from __future__ import annotations

from typing import Any


def smaller(a: Any, b: Any) -> Any:
    """Returns min(a, b)."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def larger(a: Any, b: Any) -> Any:
    """Returns max(a, b)."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def choose(condition: Any, a: Any, b: Any) -> Any:
    """Returns a if condition else b; a select instruction, not a branch, if the condition is traced."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.select_(condition, a, b)


def log2(power: Any) -> Any:
    """Returns the logarithm of a power of two, signed: what is shifted by an unsigned number is unsigned afterwards."""
    if isinstance(power, int):
        return power.bit_length() - 1
    import cutlass
    from cutlass import cute

    return cutlass.Int32(31) - cutlass.Int32(cute.arch.clz(power))


def ceil_div(a: Any, b: int) -> Any:
    """Returns ceil(a / b) for a >= 0 and a positive Python int b."""
    return (a + (b - 1)) // b


def round_up(a: Any, b: int) -> Any:
    """Returns the smallest multiple of b that is >= a, for a >= 0."""
    return ceil_div(a, b) * b


def largest_divisor(whole: int, limit: int) -> int:
    """Returns the largest divisor of `whole` that is at most `limit`."""
    return max(divisor for divisor in range(1, limit + 1) if whole % divisor == 0)


def any_of(*conditions: Any) -> Any:
    """Returns whether any condition is true: a Python bool if one is True or all are False, else a traced value."""
    if any(condition is True for condition in conditions):
        return True
    result: Any = False
    for condition in conditions:
        if condition is not False:
            result = condition if result is False else result | condition
    return result
