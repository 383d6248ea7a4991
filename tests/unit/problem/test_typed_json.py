"""Tests of problem/typed_json.py: the value that is not of the type of its field is named, and what it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cutlass_py_attn.problem import typed_json


@dataclass(frozen=True)
class Point:
    """A field of each kind."""

    axes: tuple[int, float]
    names: tuple[str, ...]
    is_last: bool
    inner: Point | None


WHOLE: dict[str, Any] = {"axes": [1, 0.5], "names": ["a", "b"], "is_last": True, "inner": None}


def test_an_object_is_read() -> None:
    inner = Point((1, 0.5), ("a", "b"), is_last=True, inner=None)
    assert typed_json.read(Point, WHOLE, "point") == inner
    assert typed_json.read(Point, WHOLE | {"inner": WHOLE}, "point").inner == inner


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": [1]}, "point.axes = [1] (list): must be a list of 2"),
        ({"axes": 5}, "point.axes = 5 (int): must be a list"),
        ({"axes": [True, 0.5]}, "point.axes[0] = True (bool): must be an int of 64 bits"),
        ({"axes": [2**63, 0.5]}, "point.axes[0] = 9223372036854775808 (int): must be an int of 64 bits"),
        ({"axes": [1, "x"]}, "point.axes[1] = 'x' (str): must be a float"),
        ({"names": ["a", 1]}, "point.names[1] = 1 (int): must be a str"),
        ({"is_last": 1}, "point.is_last = 1 (int): must be a bool"),
        ({"inner": []}, "point.inner = [] (list): must be an object"),
        ({"more": 1}, "point: missing fields [], unknown fields ['more']"),
    ],
)
def test_another_type_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is compared below
        typed_json.read(Point, WHOLE | changes, "point")
    assert str(caught.value) == message + "; written by another version" * ("fields" in message)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"point: missing fields \['is_last'\], unknown fields \[\]"):
        typed_json.read(Point, {name: value for name, value in WHOLE.items() if name != "is_last"}, "point")
