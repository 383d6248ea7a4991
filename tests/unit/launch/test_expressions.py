"""Tests of launch/expressions.py: the value and the text of an expression, and what texts are expressions."""

from __future__ import annotations

import pytest

from cutlass_py_attn.launch.expressions import (
    Expr,
    Name,
    Number,
    call,
    ceil_div,
    contiguous_strides,
    maximum,
    minimum,
    parse,
    round_up,
    step,
    times,
)
from cutlass_py_attn.launch.names import BATCH, NUM_HEADS, NUM_KEYS

VALUES = {"num_keys": 300, "batch": 2, "num_heads": 5, "scale": 0.5}
SCALE = Name("scale")


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        (ceil_div(NUM_KEYS, 64) * BATCH, "ceil_div(num_keys, 64) * batch", 10),
        (NUM_KEYS // 64, "div(num_keys, 64)", 4),
        (7 // BATCH, "div(7, batch)", 3),
        ((NUM_KEYS % 64).equals(0), "mod(num_keys, 64) == 0", 0),
        (512 % NUM_KEYS, "mod(512, num_keys)", 212),
        (round_up(NUM_KEYS, 32) + 1, "round_up(num_keys, 32) + 1", 321),
        (minimum(BATCH, maximum(NUM_KEYS, 3)), "min(batch, max(num_keys, 3))", 2),
        (step(BATCH, 7, 9), "step(batch, 7, 9)", 7),
        (step(1, 7, 9), "step(1, 7, 9)", 9),
        (call("distinct", 2, 8, 8, 1), "distinct(2, 8, 8, 1)", 1),
        (call("distinct", 2, 7, 8, 1), "distinct(2, 7, 8, 1)", 0),
        (call("fewest_splits", 1, 64, 132), "fewest_splits(1, 64, 132)", 64),
        (call("causal_key_tiles", 300, 200, 10, 128, 64), "causal_key_tiles(300, 200, 10, 128, 64)", 3 + 4 + 4),
        (1 - BATCH, "1 - batch", -1),
        (BATCH - 1 - NUM_HEADS, "batch - 1 - num_heads", -4),
        (BATCH - (1 - NUM_HEADS), "batch - (1 - num_heads)", 6),
        (2 * (BATCH + 1), "2 * (batch + 1)", 6),
        (BATCH * 3 + NUM_HEADS * 4, "batch * 3 + num_heads * 4", 26),
        ((BATCH > 1) * (NUM_HEADS <= 5) * 7, "(batch > 1) * (num_heads <= 5) * 7", 7),
        (BATCH + 1 >= NUM_HEADS, "batch + 1 >= num_heads", 0),
        (SCALE.equals(0).equals(0), "(scale == 0) == 0", 1),
        (SCALE * 1.5, "scale * 1.5", 0.75),
        (BATCH + -3, "batch + -3", -1),
    ],
)
def test_value_and_text(rule: Expr, text: str, value: float) -> None:
    assert (rule.evaluate(VALUES), str(rule), parse(text)) == (value, text, rule)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (BATCH + (NUM_HEADS + NUM_KEYS), "batch + num_heads + num_keys"),
        (BATCH + (NUM_HEADS - 1), "batch + num_heads - 1"),
        (BATCH * (NUM_HEADS * NUM_KEYS * 2), "batch * num_heads * num_keys * 2"),
        (3 + (BATCH + (NUM_HEADS + 1)), "3 + batch + num_heads + 1"),
    ],
)
def test_chains_have_one_text(rule: Expr, text: str) -> None:
    assert (str(rule), parse(text)) == (text, rule)


@pytest.mark.parametrize("value", [2.0**-126, 2.0**127, -(2.0**127), 1 / 2.0**126, 65504.0, 0.1, 1.4426950408889634])
def test_floats_have_all_bits_and_no_exponent(value: float) -> None:
    text = str(Number(value))
    assert "e" not in text
    assert parse(text) == Number(value)


def test_brackets_of_a_text_are_kept() -> None:
    text = "batch * (num_heads * 3)"
    assert str(parse(text)) == text


def test_rules_replace_names() -> None:
    rule = (NUM_KEYS + ceil_div(BATCH, 2)) * NUM_HEADS
    assert str(rule.substitute({"batch": NUM_HEADS + 1, "num_keys": Number(4)})) == (
        "(4 + ceil_div(num_heads + 1, 2)) * num_heads"
    )


def test_a_name_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="num_keys"):
        NUM_KEYS.evaluate({"batch": 2})


@pytest.mark.parametrize(
    "text", ["abs(1)", "__import__('os')", "batch.real", "1 / 2", "1 < 2 < 3", "'a'", "min(a, b=1)"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not part of an expression"):
        parse(text)


def test_an_expression_is_neither_true_nor_false() -> None:
    """The built-in min would compare two of them, and return either."""
    with pytest.raises(TypeError, match="neither true nor false"):
        min(BATCH, NUM_HEADS)  # type: ignore[type-var]


def test_strides_without_gaps() -> None:
    assert list(map(str, contiguous_strides((BATCH, NUM_HEADS, NUM_KEYS)))) == ["num_heads * num_keys", "num_keys", "1"]


def test_a_factor_of_one_is_left_out() -> None:
    assert (times(BATCH, 1), str(times(BATCH, 3))) == (BATCH, "batch * 3")
