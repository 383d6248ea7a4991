"""Tests of plan/expressions.py: what an expression may say, and which names it reads."""

from __future__ import annotations

import pytest

from cutlass_py_attn.plan.expressions import evaluate, names_of, times


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("ceil_div(num_keys, 64) * batch", 10),
        ("div(num_keys, 64)", 4),
        ("mod(num_keys, 64) == 0", False),
        ("round_up(num_keys, 32) + 1", 321),
        ("min(batch, max(num_keys, 3))", 2),
        ("step(batch, 7, 9)", 7),
        ("step(1, 7, 9)", 9),
        ("fewest_splits(1, 64, 132)", 64),
    ],
)
def test_values(expression: str, value: int) -> None:
    assert evaluate(expression, {"num_keys": 300, "batch": 2}) == value


@pytest.mark.parametrize("expression", ["num_keys", "abs(1)", "__import__('os')"])
def test_a_name_without_a_value_is_an_error(expression: str) -> None:
    with pytest.raises(NameError):
        evaluate(expression, {"batch": 2})


def test_names_are_those_without_functions() -> None:
    assert names_of("ceil_div(num_keys, 64) * batch + 1") == {"num_keys", "batch"}


def test_a_factor_of_one_is_left_out() -> None:
    assert (times("batch", 1), times("batch", 3)) == ("batch", "batch * 3")
