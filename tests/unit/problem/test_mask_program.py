"""Tests of problem/mask_program.py: what operations compute, against int32 pair by pair, and texts of programs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.mask_program import MaskProgram, array_functions
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.tensors import Tensor
from tests.support.requests import dense

LAW = settings(deadline=None, max_examples=150)
LEAST, MOST = -(2**31), 2**31 - 1
SIZES = 2, 3, 5, 7  # batch, heads, queries, keys
ARRAYS: Final[dict[str, npt.NDArray[Any]]] = {
    "ids": np.random.default_rng(1).integers(LEAST, MOST, (2, 4), np.int32, endpoint=True),
    "marked": np.random.default_rng(2).random(6) < 0.5,
    "weight": np.random.default_rng(3).integers(-2, 3, (3, 2)).astype(np.float32),
}
SCALARS: Final = {"width": -3, "most": MOST}


def wrapped(number: int) -> int:
    return (number - LEAST) % 2**32 + LEAST


def element(name: str, *index: int) -> Any:
    """Returns the element of an array; an index beside an axis is that of its nearest place."""
    array = ARRAYS[name]
    places = (min(max(place, 0), size - 1) for place, size in zip(index, array.shape, strict=True))
    return array[tuple(places)].item()


# By name: what a user's function does, and the same for numbers of Python.
INTEGERS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "add": (operator.add, lambda a, b: wrapped(a + b)),
    "sub": (operator.sub, lambda a, b: wrapped(a - b)),
    "mul": (operator.mul, lambda a, b: wrapped(a * b)),
    "div": (operator.floordiv, lambda a, b: wrapped(a // b) if b else 0),
    "mod": (operator.mod, lambda a, b: a % b if b else 0),
    "min": (np.minimum, min),
    "max": (np.maximum, max),
    "and": (operator.and_, operator.and_),
    "or": (operator.or_, operator.or_),
    "xor": (operator.xor, operator.xor),
    "shl": (operator.lshift, lambda a, b: wrapped(a << b % 32)),
    "shr": (operator.rshift, lambda a, b: a >> b % 32),
}
BOOLS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "lt": (operator.lt, operator.lt),
    "le": (operator.le, operator.le),
    "gt": (operator.gt, operator.gt),
    "ge": (operator.ge, operator.ge),
    "eq": (operator.eq, operator.eq),
    "ne": (operator.ne, operator.ne),
}
LOGICAL: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "and": (operator.and_, operator.and_),
    "or": (operator.or_, operator.or_),
    "xor": (operator.xor, operator.xor),
    "logical_and": (np.logical_and, operator.and_),
    "equal": (operator.eq, operator.eq),
}
UNARY: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "neg": (operator.neg, lambda a: wrapped(-a)),
    "abs": (abs, lambda a: wrapped(abs(a))),
    "invert": (operator.invert, operator.invert),
}
Expression = Callable[[dict[str, Any], Callable[..., Any], int], Any]


@st.composite
def integers(draw: st.DrawFn, depth: int = 3) -> Expression:
    """An int32 expression of (values by name, element of an array, which of a pair of functions)."""
    kind = (
        draw(st.sampled_from(("name", "const", "load")))
        if depth == 0
        else draw(st.sampled_from(("op",) * 4 + ("unary", "where", "load")))
    )
    if kind == "name":
        name = draw(st.sampled_from(("batch", "head", "query", "key", *SCALARS)))
        return lambda values, load, which: values[name]
    if kind == "const":
        number = draw(st.integers(-40, 40) | st.sampled_from((LEAST, MOST, 0)))
        return lambda values, load, which: number if which else values["key"] * 0 + number  # no number of Python
    deeper = max(depth - 1, 0)
    first, second = draw(integers(deeper)), draw(integers(deeper))
    if kind == "load":
        return lambda *of: of[1]("ids", first(*of), second(*of))
    if kind == "where":
        condition, pair = draw(bools(deeper)), (np.where, lambda c, a, b: a if c else b)
        return lambda *of: pair[of[2]](condition(*of), first(*of), second(*of))
    if kind == "unary":
        one = UNARY[draw(st.sampled_from(sorted(UNARY)))]
        return lambda *of: one[of[2]](first(*of))
    two = INTEGERS[draw(st.sampled_from(sorted(INTEGERS)))]
    return lambda *of: two[of[2]](first(*of), second(*of))


@st.composite
def bools(draw: st.DrawFn, depth: int = 3) -> Expression:
    """An expression of a bool."""
    deeper = max(depth - 1, 0)
    kind = draw(
        st.sampled_from(
            ("compare", "marked", "weight")
            if depth == 0
            else ("compare", "compare", "logical", "not", "marked", "weight")
        )
    )
    place, other = draw(integers(deeper)), draw(integers(deeper))
    if kind == "marked":
        return lambda *of: of[1]("marked", place(*of))
    if kind == "weight":
        bound = draw(st.integers(-4, 4)) / 2
        return lambda *of: of[1]("weight", place(*of), other(*of)) > bound
    if kind == "not":
        condition = draw(bools(deeper))
        return lambda *of: ~condition(*of) if of[2] == 0 else not condition(*of)
    if kind == "logical":
        two = LOGICAL[draw(st.sampled_from(sorted(LOGICAL)))]
        left, right = draw(bools(deeper)), draw(bools(deeper))
        return lambda *of: two[of[2]](left(*of), right(*of))
    compare = BOOLS[draw(st.sampled_from(sorted(BOOLS)))]
    return lambda *of: compare[of[2]](place(*of), other(*of))


def traced(expression: Expression) -> MaskFunction:
    def function(batch: Any, head: Any, query: Any, key: Any, **arguments: Any) -> Any:
        values = {"batch": batch, "head": head, "query": query, "key": key, **arguments}
        return expression(values, lambda name, *index: arguments[name][index], 0)

    return MaskFunction(function, {**ARRAYS, **SCALARS})


@LAW
@given(bools())
def test_programs_are_int32_pair_by_pair(expression: Expression) -> None:
    """And the text is read back."""
    mask = traced(expression)
    seen = mask.materialise(*SIZES)
    again = MaskFunction(MaskProgram.parse(str(mask.program)), mask.arguments)
    assert again.program == mask.program
    np.testing.assert_array_equal(again.materialise(*SIZES), seen)
    for at in np.ndindex(*SIZES):
        values = dict(zip(("batch", "head", "query", "key"), at, strict=True)) | SCALARS
        assert seen[at] == expression(values, element, 1), (at, str(mask.program))


def masked(function: Callable[..., Any], **arguments: Any) -> npt.NDArray[Any]:
    """Returns which keys of 8 the one query of the one head sees."""
    return MaskFunction(function, arguments).materialise(1, 1, 1, 8)[0, 0, 0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda key: (key - 4) // 3, [-2, -1, -1, -1, 0, 0, 0, 1]),
        (lambda key: (key - 4) % 3, [2, 0, 1, 2, 0, 1, 2, 0]),
        (lambda key: (key - 4) // -3, [1, 1, 0, 0, 0, -1, -1, -1]),
        (lambda key: (key - 4) % -3, [-1, 0, -2, -1, 0, -2, -1, 0]),
        (lambda key: 7 // (key - 4), [-2, -3, -4, -7, 0, 7, 3, 2]),
        (lambda key: 7 % (key - 4), [-1, -2, -1, 0, 0, 0, 1, 1]),
        (lambda key: 2**30 * key, [0, 2**30, -(2**31), -(2**30), 0, 2**30, -(2**31), -(2**30)]),
        (lambda key: 2**31 - 1 + key, [2**31 - 1, *range(-(2**31), -(2**31) + 7)]),
        (lambda key: 1 << 29 + key, [2**29, 2**30, -(2**31), 1, 2, 4, 8, 16]),
        (lambda key: -256 >> key, [-256, -128, -64, -32, -16, -8, -4, -2]),
        (lambda key: -5 >> 32 + key * 0, [-5] * 8),
        (lambda key: abs(key - 4), [4, 3, 2, 1, 0, 1, 2, 3]),
        (lambda key: +key * (key > 3) + (key == 1), [0, 1, 0, 0, 4, 5, 6, 7]),
        (lambda key: ~key & 3, [3, 2, 1, 0, 3, 2, 1, 0]),
        (lambda key: np.where(key < 2, key, -key), [0, 1, -2, -3, -4, -5, -6, -7]),
        (lambda key: np.where(key < 2, key > 5, 3), [0, 0, 3, 3, 3, 3, 3, 3]),
        (lambda key: np.minimum(np.maximum(key, 2), 5), [2, 2, 2, 3, 4, 5, 5, 5]),
        (lambda key: np.absolute(np.negative(np.int32(3) - key)), [3, 2, 1, 0, 1, 2, 3, 4]),
        (lambda key: np.int64(3) + (np.int32(3) > key) + np.greater_equal(key, 6), [4, 4, 4, 3, 3, 3, 4, 4]),
    ],
)
def test_integers(value: Callable[[Any], Any], expected: list[int]) -> None:
    """Each number is that of its key, and of no other."""
    truth = np.array(expected, np.int32)
    assert masked(lambda batch, head, query, key, truth: value(key) == truth[key], truth=truth).all()
    assert not masked(lambda batch, head, query, key, truth: value(key) != truth[key], truth=truth).any()


def test_indices_are_those_of_the_nearest_place() -> None:
    ids = np.array([[5, 6, 7], [8, 9, 4]])
    truth = np.array([5, 5, 5, 6, 7, 7, 7, 7])
    assert masked(lambda b, h, q, key, ids, truth: ids[q - 3, key - 2] == truth[key], ids=ids, truth=truth).all()
    assert masked(lambda b, h, q, key, ids: ids[key + 2**30, 2**31 - 1] == 4, ids=ids).all()
    assert masked(lambda b, h, q, key, one: one[()] == 3, one=np.array(3)).all()


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_arrays_of_bools(dtype: Any) -> None:
    """Any number beside 0 is true."""
    marked = np.array([0, 1, 0, 2, 255, 0, 1, 0]).astype(dtype)
    if dtype is np.uint8:
        assert MaskFunction(lambda b, h, q, k, m: m[k], {"m": marked}).program.arrays == (("bool", 1),)
    assert (masked(lambda b, h, q, k, marked: marked[k], marked=marked) == (marked != 0)).all()
    assert (masked(lambda b, h, q, k, marked: ~marked[k], marked=marked) == (marked == 0)).all()
    assert (masked(lambda b, h, q, k, marked: marked[k] + marked[k] == 2, marked=marked) == (marked != 0)).all()
    assert (
        masked(lambda b, h, q, k, marked: (marked[k] | k) == k | 1, marked=marked) == [0, 1, 0, 1, 1, 1, 1, 1]
    ).all()


def test_arrays_of_floats() -> None:
    """They are compared, selected and made of integers."""
    weight = np.array([-0.5, 0.0, 0.5, 1.0, np.inf, -np.inf, 2**24 + 1, np.nan], np.float32)
    with np.errstate(invalid="ignore"):
        assert (masked(lambda b, h, q, k, w: w[k] > 0.5, w=weight) == (weight > 0.5)).all()
        assert (masked(lambda b, h, q, k, w: w[k] <= k, w=weight) == (weight <= np.arange(8))).all()
        assert (masked(lambda b, h, q, k, w: w[k] == 2**24 + 1, w=weight) == (weight == 2.0**24)).all()
        assert (masked(lambda b, h, q, k, w: w[k] != w[k], w=weight) == np.isnan(weight)).all()
        assert (
            masked(lambda b, h, q, k, w: np.where(w[k] < 0, 1, w[k]) >= 1, w=weight) == [1, 0, 0, 1, 1, 1, 1, 0]
        ).all()
        assert masked(lambda b, h, q, k, w: np.logical_not(w[k]), w=weight).tolist() == [False, True] + [False] * 6


@pytest.mark.parametrize("function", [np.minimum, np.maximum])
def test_the_smaller_of_a_nan_is_the_first(function: Any) -> None:
    """As a kernel selects: a comparison with a NaN is false."""
    weight = np.array([np.nan, 1.0], np.float32)
    assert masked(lambda b, h, q, k, w: function(w[1], w[0]) == 1, w=weight).all()
    assert not masked(lambda b, h, q, k, w: function(w[0], w[1]) == 1, w=weight).any()


def test_results_are_int32_and_float32() -> None:
    functions = array_functions(np, [np.array([3], np.float32)])
    one, zero = np.int32(1), np.int32(0)
    for name in ("add", "sub", "mul", "div", "mod", "min", "max", "shl", "shr", "and", "or", "xor"):
        assert np.asarray(functions.operations[name](one, zero)).dtype == np.int32, name
    assert functions.load(0, [zero]).dtype == np.float32
    assert [functions.constant(value).dtype for value in (True, 3, 0.5)] == [np.bool_, np.int32, np.float32]


def text(function: Callable[..., Any], **arguments: Any) -> str:
    return str(MaskFunction(function, arguments).program)


def test_the_text() -> None:
    """Arrays with their ranks, the count of integers, and operations; what is computed twice is computed once."""

    def sees(batch: Any, head: Any, query: Any, key: Any, ids: Any, width: Any, weight: Any, marked: Any) -> Any:
        unused = query * key + 12345
        assert unused is not None
        same = ids[batch, query] == ids[batch, key]
        return (same & (weight[key] > 0.1) & marked[()]) | (key < width) | (key < width)

    arguments = {"ids": np.zeros((2, 3), int), "width": 4, "weight": np.zeros(3), "marked": np.array(True)}
    assert text(sees, **arguments) == (
        "arrays int32[2] float32[1] bool[0]; scalars 1; load 2; load 0 0 2; load 0 0 3; eq 6 7; load 1 3; "
        f"const {float(np.float32(0.1))}; lt 10 9; and 8 11; and 12 5; lt 3 4; or 13 14; or 15 14"
    )


def test_functions_that_do_the_same_have_the_same_text() -> None:
    """Whatever their names and those of their arguments are, and the values of these."""

    def first(batch: Any, head: Any, query: Any, key: Any, width: Any) -> Any:
        far = query - key
        return (far < width) & (far < width)

    offset = 0
    assert text(first, width=3) == text(lambda b, h, i, j, size: (size > i - j) & (i - j < size), size=9)
    assert text(first, width=3) != text(lambda b, h, i, j, size: i - j < size, size=3)
    assert text(lambda b, h, i, j: i + offset >= j) != text(lambda b, h, i, j: i + 1 >= j)
    assert text(lambda b, h, i, j: j < i + 4) == text(lambda b, h, i, j: j < i + np.int64(4))
    digests = {MaskFunction(lambda b, h, i, j, n=n: i - j == n).program.digest for n in range(50)}
    assert len(digests) == 50
    assert all(len(digest) == 8 and int(digest, 16) >= 0 for digest in digests)


def test_constants_are_computed_when_a_function_is_traced() -> None:
    assert text(lambda b, h, i, j: np.where(i < 3, 2, True) == 1) == (
        "arrays; scalars 0; const 3; lt 2 4; const 2; const 1; where 5 6 7; eq 8 7"
    )
    assert text(lambda b, h, i, j, w: w[0] > 3, w=np.zeros(1)) == (
        "arrays float32[1]; scalars 0; const 0; load 0 4; const 3.0; lt 6 5"
    )
    assert text(lambda b, h, i, j: True) == "arrays; scalars 0; const True"


def test_the_coordinates_that_a_program_reads() -> None:
    program = MaskFunction(lambda batch, head, i, j, n: (head * 2 == j) & (n > 3), {"n": 1}).program
    assert program.coordinates == {"head", "key"}
    assert MaskFunction(lambda batch, head, i, j, n: n[batch] > 0, {"n": np.ones(1)}).program.coordinates == {"batch"}


HEAD: Final = "arrays int32[2] float32[1]; scalars 1; "


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "query >= key",
        "arrays; scalars 0",
        "arrays; scalars 0; ",
        "arrays int32[1] ; scalars 0; le 2 3",
        "arrays int64[1]; scalars 0; le 2 3",
        "arrays int32[5]; scalars 0; le 2 3",
        "arrays int32[-1]; scalars 0; le 2 3",
        "arrays int32[1] int32[1] int32[1] int32[1] int32[1]; scalars 0; le 2 3",
        "arrays; scalars 5; le 2 3",
        "arrays; scalars -1; le 2 3",
        "arrays; scalars one; le 2 3",
        f"{HEAD}less 2 3",
        f"{HEAD}le 2",
        f"{HEAD}le 2 3 4",
        f"{HEAD}le 2 5",  # its own result
        f"{HEAD}le 2 -1",
        f"{HEAD}le 2 x",
        f"{HEAD}add 2 3",  # no bool
        f"{HEAD}const 3",
        f"{HEAD}const",
        f"{HEAD}const True True",
        f"{HEAD}const {2**31}; le 2 5",
        f"{HEAD}const one",
        f"{HEAD}load; le 2 3",
        f"{HEAD}load 2 0; le 2 3",
        f"{HEAD}load -1 0; le 2 3",
        f"{HEAD}load 0 2; le 2 3",
        f"{HEAD}load 1 2; load 1 5; le 2 3",  # by a float
        f"{HEAD}load 1 2; le 2 5",  # an int32 and a float32
        f"{HEAD}load 1 2; add 5 5; le 2 3",
        f"{HEAD}le 2 3; not 2; and 5 5",
        f"{HEAD}where 2 3 4; le 2 3",
        f"{HEAD}le 2 3;and 5 5",
        f"{HEAD}le 2 3\nand 5 5",
        None,
        7,
    ],
)
def test_texts_that_no_trace_gives_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        MaskProgram.parse(wrong)
    problem = dense().replace(mask_program=wrong, mask_scalars=(1,), mask_array_0=Tensor.contiguous((2, 3), "int32"))
    if wrong is not None:
        assert [refusal.field for refusal in problem.refusals()] == ["mask_program"]


def test_a_program_is_a_function() -> None:
    """Of arguments in its order, by any names."""
    ids = np.array([1, 1, 2, 2, 2])
    mask = MaskFunction(lambda b, h, i, j, ids, width: (ids[i] == ids[j]) & (i - j < width), {"ids": ids, "width": 2})
    again = MaskFunction(mask.program, {"a": ids, "b": 2}, Causal())
    expected = mask.materialise(1, 1, 5, 5) & Causal().materialise(5, 5)
    np.testing.assert_array_equal(again.materialise(1, 1, 5, 5), expected)
