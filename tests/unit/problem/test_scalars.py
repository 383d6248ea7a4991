"""Tests of scalars: which values are numbers, and which are not."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.planner import plan_backward, plan_with_tile
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import (
    flag_of,
    integer_of,
    number_of,
    path_refusals,
    python_value,
    with_python_numbers,
)
from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
from tests.support.fakes import DLPackArray, InterfaceArray
from tests.support.refusals import expect


class Index:
    """An object that stands for an integer, as operator.index reads it."""

    def __index__(self) -> int:
        return 7


class Scalar(DLPackArray):
    """A 0-d array of another library, on the DLPack device `device`."""

    dtype, shape = "torch.int64", ()

    def __index__(self) -> int:
        return 7

    def __float__(self) -> float:
        return 7.0


INTEGERS: dict[str, Any] = {
    "int": 7,
    "int8": np.int8(7),
    "uint64": np.uint64(7),
    "0-d array": np.array(7),
    "object with __index__": Index(),
    "tensor on the host": Scalar(None, (1, 0)),
    "tensor in pinned memory": Scalar(None, (3, 0)),
}
NO_INTEGERS: dict[str, Any] = {
    "float": 7.0,
    "NumPy float": np.float32(7),
    "0-d floats": np.array(7.0),
    "bool": True,
    "NumPy bool": np.True_,
    "str": "7",
    "one element": np.array([7]),
    "None": None,
    "Decimal": Decimal(7),
    "Fraction": Fraction(7),
    "complex": 7j,
    "date": np.timedelta64(7, "s"),
    "objects": np.array(7, object),
    "tensor on a device": Scalar(None, (2, 0)),
    "interface": InterfaceArray(np.array(7)),
}
NUMBERS: dict[str, Any] = {
    "float": 0.5,
    "NumPy float": np.float32(0.5),
    "NumPy double": np.float64(0.5),
    "bfloat16": ml_dtypes.bfloat16(0.5),
    "0-d array": np.array(0.5, "f2"),
    "Fraction": Fraction(1, 2),
}
NO_NUMBERS: dict[str, Any] = {
    "bool": False,
    "0-d bool": np.array(True),
    "str": "0.5",
    "bytes": b"0.5",
    "one element": np.array([0.5]),
    "Decimal": Decimal("0.5"),
    "complex": 0.5 + 0j,
    "NumPy complex": np.complex64(0.5),
    "None": None,
    "more than a float": 10**400,
    "list": [0.5],
    "tensor on a device": Scalar(None, (2, 0)),
}


@pytest.mark.parametrize("value", INTEGERS.values(), ids=INTEGERS)
def test_integers(value: Any) -> None:
    found = integer_of(value), number_of(value) if hasattr(value, "dtype") else 7.0
    assert (found, *map(type, found)) == ((7, 7.0), int, float)


@pytest.mark.parametrize("value", NO_INTEGERS.values(), ids=NO_INTEGERS)
def test_no_integers(value: Any) -> None:
    assert integer_of(value) is None


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_numbers(value: Any) -> None:
    assert (number_of(value), type(number_of(value))) == (0.5, float)
    assert integer_of(value) is None


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_no_numbers(value: Any) -> None:
    assert number_of(value) is None


def test_flags() -> None:
    assert [flag_of(value) for value in (True, np.False_, np.array(True))] == [True, False, True]
    assert {flag_of(value) for value in (1, 0, "no", None, np.array([True]), np.int8(1), 1.0)} == {None}


def test_paths() -> None:
    assert path_refusals("folder", "a") == path_refusals("folder", Path("a")) == []
    for wrong in (5, None, b"a", ["a"], "a\0b"):
        expect(path_refusals("folder", wrong), ["folder: a path, such as a str or a pathlib.Path"])


def test_python_numbers_of_dataclasses() -> None:
    mask = Window(3, None)
    assert with_python_numbers(mask) is mask
    for given, expected in (
        (Window(np.int64(3), np.array(0)), Window(3, 0)),
        (Causal(np.uint8(3)), Causal(3)),
        (CausalBottomRight(np.int64(3)), CausalBottomRight(3)),
        (Full(), Full()),
        (Shape(*np.array([1, 2, 3, 4, 5, 6]), tokens=tuple(np.array([7, 8]))), Shape(1, 2, 3, 4, 5, 6, tokens=(7, 8))),
        (Sequences(np.int32(2), np.array(3), 4, np.True_), Sequences(2, 3, 4, True)),
        (Tensor(tuple(np.array([1, 2])), tuple(np.array([2, 1])), "f", np.int8(16)), Tensor((1, 2), (2, 1), "f", 16)),
        (TileConfig(*np.array([64, 64, 4])), TileConfig(64, 64, 4)),
    ):
        found = with_python_numbers(given)
        assert repr(found) == repr(expected), "of Python's types"
    assert python_value(["x", np.int8(1)]) == ["x", 1]
    assert with_python_numbers(Causal(3.0)) == Causal(3.0), "no integer"  # type: ignore[arg-type]


def test_numpy_numbers_give_the_plan_of_python_numbers() -> None:
    sizes = np.array([2, 40, 50, 4, 16, 24], np.int32)
    plain = Problem.dense("backward", Shape(2, 40, 50, 4, 16, 24), "float16", Causal(7))
    plain = plain.replace(scale=0.5, softcap=3.0, dropout_p=0.25, num_splits_key=2)
    given: Any = {"scale": np.float32(0.5), "softcap": np.array(3), "dropout_p": np.float16(0.25)}
    problem = Problem.dense("backward", Shape(*sizes), "float16", Causal(np.int64(7)))
    problem = problem.replace(num_splits_key=np.array(2), deterministic=np.False_, **given)
    assert repr(problem) == repr(plain)
    assert problem.reasons() == []
    assert plan_backward(problem, "sm_90", np.int64(66)) == plan_backward(plain, "sm_90", 66)
    tile, same = TileConfig(*np.array([64, 64, 4, 2, 2])), TileConfig(64, 64, 4, 2, 2)
    assert plan_with_tile(problem, "sm_90", tile) == plan_with_tile(plain, "sm_90", same)


def test_large_sizes_of_narrow_integers_do_not_wrap() -> None:
    sizes = np.array([4, 2**20, 2**20, 16, 128, 128], np.int32)
    assert Problem.dense("forward", Shape(*sizes), "float16").query.strides[0] == 2**31
