"""Tests of problem/mask_tracing.py: what no kernel can do is refused in a sentence with the line of the function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.mask_tracing import MAX_STEPS, trace

ELSEWHERE = np.arange(8)
ARRAYS: dict[str, tuple[str, int]] = {"ids": ("int32", 2), "weight": ("float32", 1)}
Sees = Callable[..., Any]
BRANCH, ARRAY, INTEGER = "is true; use &", "is made an array", "used as a Python integer"
LINES: list[tuple[Sees, str]] = [
    (lambda b, h, q, k, ids, weight: q >= k if b == 0 else q < k, BRANCH),
    (lambda b, h, q, k, ids, weight: q >= k and k > 3, BRANCH),
    (lambda b, h, q, k, ids, weight: q >= k or k > 3, BRANCH),
    (lambda b, h, q, k, ids, weight: not q >= k, BRANCH),
    (lambda b, h, q, k, ids, weight: 0 <= q - k < 4, BRANCH),
    (lambda b, h, q, k, ids, weight: max(q, 3) >= k, BRANCH),
    (lambda b, h, q, k, ids, weight: q in (3, k), BRANCH),
    (lambda b, h, q, k, ids, weight: int(q) >= k, "leave int() away"),
    (lambda b, h, q, k, ids, weight: float(q) >= k, "leave float() away"),
    (lambda b, h, q, k, ids, weight: [1, 2, 3][q] >= k, INTEGER),
    (lambda b, h, q, k, ids, weight: sum(ids[0, n] for n in range(k)) > 0, INTEGER),
    (lambda b, h, q, k, ids, weight: q[0] >= k, "a number is indexed"),
    (lambda b, h, q, k, ids, weight: [*q] == k, "a traced value is iterated over"),
    (lambda b, h, q, k, ids, weight: q / 2 >= k, "/ divides; use //"),
    (lambda b, h, q, k, ids, weight: 2 / q >= k, "/ divides; use //"),
    (lambda b, h, q, k, ids, weight: q >= 2**31, "2147483648 is no int32"),
    (lambda b, h, q, k, ids, weight: q >= np.int64(-(2**40)), "is no int32"),
    (lambda b, h, q, k, ids, weight: q >= "k", "str 'k' is no number"),
    (lambda b, h, q, k, ids, weight: q >= None, "None is no number"),
    (lambda b, h, q, k, ids, weight: q + 0.5 >= k, "add of a float32 is rounded"),
    (lambda b, h, q, k, ids, weight: weight[q] * 2 >= 1, "mul of a float32 is rounded"),
    (lambda b, h, q, k, ids, weight: -weight[q] >= 1, "sub of a float32 is rounded"),
    (lambda b, h, q, k, ids, weight: weight[q] & 1 == 0, "and of a float; compare it first"),
    (lambda b, h, q, k, ids, weight: ~weight[q] == 0, "of a float; compare it first"),
    (lambda b, h, q, k, ids, weight: weight[q] << 1 == 0, "shl of a float"),
    # Arrays
    (lambda b, h, q, k, ids, weight: ids[b] == 3, "ids has 2 axes, and is indexed by 1"),
    (lambda b, h, q, k, ids, weight: ids[b, h, q] == 3, "ids has 2 axes, and is indexed by 3"),
    (lambda b, h, q, k, ids, weight: weight[b, q] == 3, "weight has 1 axes, and is indexed by 2"),
    (lambda b, h, q, k, ids, weight: ids[b, :] == 3, "index every axis by an integer"),
    (lambda b, h, q, k, ids, weight: ids[b, None] == 3, "index every axis by an integer"),
    (lambda b, h, q, k, ids, weight: ids[..., k] == 3, "index every axis by an integer"),
    (lambda b, h, q, k, ids, weight: ids[b, -1] == 3, "ids is indexed by -1; count from the first element"),
    (lambda b, h, q, k, ids, weight: ids[b, weight[k]] == 3, "ids is indexed by a float"),
    (lambda b, h, q, k, ids, weight: ids[b, 0.5] == 3, "ids is indexed by a float"),
    (lambda b, h, q, k, ids, weight: ids[b, [0, 1]] == 3, "list [0, 1] is no number"),
    (lambda b, h, q, k, ids, weight: ids == 3, "ids is used as a number; index it, as in ids[...]"),
    (lambda b, h, q, k, ids, weight: ids != 3, "ids is used as a number"),
    (lambda b, h, q, k, ids, weight: weight > 3, "weight is used as a number"),
    (lambda b, h, q, k, ids, weight: q + ids == 3, "ids is used as a number"),
    (lambda b, h, q, k, ids, weight: np.minimum(ids, q) == 3, "ids is used as a number"),
    (lambda b, h, q, k, ids, weight: q < ids.shape[1], "the shape of ids is read; pass its sizes as integers"),
    (lambda b, h, q, k, ids, weight: q < len(ids), "the shape of ids is read"),
    (lambda b, h, q, k, ids, weight: sum(weight) > 3, "an array is iterated over"),
    (lambda b, h, q, k, ids, weight: ELSEWHERE[q] == ELSEWHERE[k], ARRAY),
    (lambda b, h, q, k, ids, weight: ELSEWHERE.reshape(2, 4)[b, q] == 3, ARRAY),
    (lambda b, h, q, k, ids, weight: np.take(ELSEWHERE, q) == 3, ARRAY),
    (lambda b, h, q, k, ids, weight: ELSEWHERE + q == 3, "pass arrays in `arguments`, and index them"),
    (lambda b, h, q, k, ids, weight: q == ELSEWHERE, "pass arrays in `arguments`, and index them"),
    # NumPy
    (lambda b, h, q, k, ids, weight: np.sin(q) > 0, "numpy.sin has no operation"),
    (lambda b, h, q, k, ids, weight: np.add(q, k, dtype=np.int32) > 0, "numpy.add has no operation"),
    (lambda b, h, q, k, ids, weight: np.add.reduce(q) > 0, "numpy.add has no operation"),
    (lambda b, h, q, k, ids, weight: np.clip(q, 0, 3) > k, "numpy.clip has no operation"),
    (lambda b, h, q, k, ids, weight: np.where(q > k) == 3, "numpy.where has no operation"),
    (lambda b, h, q, k, ids, weight: np.stack([q, k]) == 3, "numpy.stack has no operation"),
    (lambda b, h, q, k, ids, weight: np.array([q, k]) == 3, ARRAY),
    # What it returns
    (lambda b, h, q, k, ids, weight: q, "the function returns int32 in place of a bool; compare it, as in x != 0"),
    (lambda b, h, q, k, ids, weight: q & k, "the function returns int32 in place of a bool"),
    (lambda b, h, q, k, ids, weight: weight[q], "the function returns float32 in place of a bool"),
    (lambda b, h, q, k, ids, weight: 1, "the function returns int32 in place of a bool"),
    (lambda b, h, q, k, ids, weight: None, "None is no number"),
    (lambda b, h, q, k, ids, weight: (q >= k, k >= q), "tuple"),
    (lambda b, h, q, k, ids, weight: ids, "ids is used as a number"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "words"), LINES)
def test_refusals_name_the_line(function: Sees, words: str) -> None:
    with pytest.raises(NotSupported) as caught:
        trace(function, ARRAYS)
    (refusal,) = caught.value.refusals
    text = str(refusal)
    assert words in text
    assert refusal.rule.startswith(f"test_mask_tracing.py, line {function.__code__.co_firstlineno}: ")
    assert text.startswith("mask function = <lambda>: ")
    assert refusal.remedy
    assert "\n" not in text


def refused(function: Any, arrays: dict[str, tuple[str, int]] | None = None, scalars: tuple[str, ...] = ()) -> str:
    """Returns the one sentence of a refusal."""
    with pytest.raises(NotSupported) as caught:
        trace(function, arrays or {}, scalars)
    (reason,) = caught.value.reasons
    return reason


def sees_far(batch: Any, head: Any, query: Any, key: Any) -> Any:
    far = distance(query, key) > 3
    return far | (key == 0)


def distance(query: Any, key: Any) -> Any:
    if query > key:
        return query - key
    return key - query


def test_the_line_is_that_which_runs() -> None:
    """In a function that the function calls."""
    line = inspect.getsourcelines(distance)[1] + 1
    assert refused(sees_far).startswith(f"mask function = sees_far: test_mask_tracing.py, line {line}: if, and, or")


def test_the_line_of_what_is_returned_is_that_of_the_definition() -> None:
    """Of methods, partial functions and decorated ones too."""

    def decorated(function: Sees) -> Sees:
        @functools.wraps(function)
        def outer(*arguments: Any) -> Any:
            return function(*arguments)

        return outer

    class Mask:
        def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query

        def sees(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query

    def sees(batch: Any, head: Any, query: Any, key: Any, more: Any = 0) -> Any:
        return query

    for function, code in (
        (sees, sees.__code__),
        (functools.partial(sees, more=3), sees.__code__),
        (decorated(sees), sees.__code__),
        (Mask().sees, Mask.sees.__code__),
        (Mask(), Mask.__call__.__code__),
    ):
        assert f": test_mask_tracing.py, line {code.co_firstlineno}: the function returns int32" in refused(function)


def test_a_function_of_a_file_of_any_name(tmp_path: Any) -> None:
    """The name of a folder hides no line."""
    folder = tmp_path / "numpy"
    folder.mkdir()
    (folder / "my_masks.py").write_text("def sees(batch, head, query, key):\n    return query > key and key > 3\n")
    names: dict[str, Any] = {"__name__": "my_masks"}
    exec(compile((folder / "my_masks.py").read_text(), str(folder / "my_masks.py"), "exec"), names)
    assert refused(names["sees"]).startswith("mask function = sees: my_masks.py, line 2: if, and, or")


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query: query > 0,
        lambda batch, head, query, key: query > 0,
        lambda batch, head, query, key, ids: query > 0,
        lambda batch, head, query, key, width: query > 0,
        lambda batch, head, query, key, ids, width, more: query > 0,
    ],
)
def test_parameters(function: Any) -> None:
    reason = refused(function, {"ids": ("int32", 1)}, ("width",))
    line = function.__code__.co_firstlineno
    assert f"line {line}: the function must take batch, head, query, key, ids, width: " in reason
    assert reason.endswith("; name its parameters as `arguments` does")


def test_any_names_of_parameters() -> None:
    """Of the coordinates, which are passed by place, and of arguments that the function takes by any name."""
    assert trace(lambda b, h, i, j: i >= j, {}).steps
    assert trace(lambda b, h, i, j, **arguments: arguments["ids"][i] == 3, {"ids": ("int32", 1)}).steps
    assert trace(lambda *places, ids: ids[places[2]] == 3, {"ids": ("int32", 1)}).steps
    assert refused(np.add) == (
        "function = add: the function must take batch, head, query, key: too many positional arguments; take these"
    )


def test_errors_of_the_function_are_its_own() -> None:
    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query.position >= key

    with pytest.raises(AttributeError, match="position"):
        trace(sees, {})


def sum_of(count: int) -> Sees:
    """Returns a function of 2 * count operations and two more."""

    def sees(batch: Any, head: Any, query: Any, key: Any, words: Any) -> Any:
        total = query
        for number in range(count):
            total = total + words[number]
        return total > 0

    return sees


def test_many_operations() -> None:
    """Those that the result needs, and others; what is done twice counts once."""
    fitting = (MAX_STEPS - 2) // 3  # a constant, a load and a sum for each
    assert len(trace(sum_of(fitting), {"words": ("int32", 1)}).steps) == 3 * fitting + 1
    sees = sum_of(fitting + 1)
    line = sees.__code__.co_firstlineno + 3
    assert f"line {line}: the function has more than 200 operations; compute an array" in refused(
        sees, {"words": ("int32", 1)}
    )

    def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = query >= key
        for _ in range(1000):
            seen = (query >= key) | (key > 3)
        return seen

    assert len(trace(same, {}).steps) == 4


def test_the_function_is_called_once() -> None:
    calls: list[MaskProgram] = []

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        calls.append(batch)
        return query >= key

    mask = MaskFunction(sees)
    mask.materialise(1, 1, 3, 3)
    mask.resolved(1, 3, 3)
    assert len(calls) == 1
