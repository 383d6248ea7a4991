"""Tests of the constructors of KeyRanges: what each lets see, pair by pair, in NumPy and traced by JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from tests.support.mask_cases import MASKS, visible
from tests.support.refusals import expect_raised

LAW = settings(deadline=None, max_examples=100)
Array = npt.NDArray[Any]
Case = tuple[Callable[..., KeyRanges], tuple[Any, ...], int, Array]  # constructor, its arrays, keys, what it lets see


def documents(random: np.random.Generator, mask: Mask) -> Case:
    """Documents of any lengths, some of them 0, with tokens before the first and behind the last."""
    batch, count, tokens = random.integers(1, 4), random.integers(0, 6), int(random.integers(1, 20))
    bounds = np.sort(random.integers(0, tokens + 3, (batch, count + 1)), axis=1)
    number = np.full((batch, tokens), -1)
    for row, document in np.ndindex(batch, count):
        number[row, bounds[row, document] : bounds[row, document + 1]] = document
    seen = (number[:, :, None] == number[:, None, :]) & (number >= 0)[:, :, None]
    given = bounds[0] if batch == 1 else bounds
    return (
        lambda array: KeyRanges.documents(array, tokens, mask),
        (given,),
        tokens,
        seen & visible(mask, tokens, tokens),
    )


def segments(random: np.random.Generator, mask: Mask) -> Case:
    """Runs of numbers, some of which come back."""
    batch, tokens = random.integers(1, 4), int(random.integers(0, 20))
    numbers = random.integers(-2, 2, (batch, tokens))
    seen = np.zeros((batch, tokens, tokens), bool)
    for row, query, key in np.ndindex(seen.shape):
        between = numbers[row, min(query, key) : max(query, key) + 1]
        seen[row, query, key] = (between == numbers[row, query]).all()
    return lambda array: KeyRanges.segments(array, mask), (numbers,), tokens, seen & visible(mask, tokens, tokens)


def prefix_lm(random: np.random.Generator, mask: Mask) -> Case:
    batch, queries = random.integers(1, 4), int(random.integers(0, 20))
    lengths = random.integers(-1, 23, batch)
    query, key = np.arange(queries)[:, None], np.arange(queries)
    seen = (key <= query) | (key < lengths[:, None, None])
    return lambda array: KeyRanges.prefix_lm(array, queries), (lengths,), queries, seen


def chunks(random: np.random.Generator, mask: Mask) -> Case:
    size, tokens = random.integers(1, 9), int(random.integers(0, 20))
    token = np.arange(tokens)
    seen = (token[:, None] // size == token // size) & (token <= token[:, None])
    return lambda array: KeyRanges.chunks(array, tokens), (np.asarray(size),), tokens, seen[None]


def windows(random: np.random.Generator, mask: Mask) -> Case:
    """Windows of each head; some have no limit, and some no key."""
    heads, queries = random.integers(1, 4), int(random.integers(0, 20))
    left, right = random.choice([0, 1, 3, 30, -2, 2**31 - 1], (2, heads))
    query, key = np.arange(queries)[:, None], np.arange(queries)
    seen = (key >= query - left[:, None, None]) & (key <= query + right[:, None, None])
    return lambda *arrays: KeyRanges.windows(*arrays, queries), (left, right), queries, seen[None]


CONSTRUCTORS = (documents, segments, prefix_lm, chunks, windows)
CASES = st.builds(
    lambda make, seed, mask: make(np.random.default_rng(seed), mask),
    st.sampled_from(CONSTRUCTORS),
    st.integers(0, 2**32 - 1),
    MASKS,
)
DTYPES = st.sampled_from(("int32", "int64", "int16", "uint32"))


def check(ranges: KeyRanges, num_keys: int, seen: Array) -> None:
    """Compares what each query sees, and the dtype and axes of the arrays, with the definition."""
    start, end = np.asarray(ranges.key_start), np.asarray(ranges.key_end)
    assert (start.dtype, end.dtype) == (np.int32, np.int32)
    assert start.shape == end.shape
    found = KeyRanges(start, end, ranges.band).materialise(num_keys)
    np.testing.assert_array_equal(found, seen.reshape(found.shape))


def as_dtype(array: Array, dtype: str) -> Array:
    """Returns the array in a dtype that holds its numbers, else in its own."""
    limits = np.iinfo(dtype)
    fits = not array.size or (array.min() >= limits.min and array.max() <= limits.max)
    return array.astype(dtype) if fits else array


@LAW
@given(CASES, DTYPES)
def test_what_is_seen(case: Case, dtype: str) -> None:
    make, arrays, num_keys, seen = case
    check(make(*(as_dtype(array, dtype) for array in arrays)), num_keys, seen)


@LAW
@given(CASES)
def test_python_numbers(case: Case) -> None:
    make, arrays, num_keys, seen = case
    if all(array.size for array in arrays):
        check(make(*(array.tolist() for array in arrays)), num_keys, seen)


@settings(deadline=None, max_examples=15)
@given(CASES)
def test_arrays_of_jax(case: Case) -> None:
    """Also while jax.jit traces them, where their numbers are not known."""
    jax = pytest.importorskip("jax")
    make, arrays, num_keys, seen = case

    def edges(*traced: Any) -> tuple[Any, Any]:
        ranges = make(*traced)
        return ranges.key_start, ranges.key_end

    moved = [jax.numpy.asarray(array.astype(np.int32)) for array in arrays]
    ranges = make(*moved)
    assert all(isinstance(edge, jax.Array) for edge in (ranges.key_start, ranges.key_end))
    check(ranges, num_keys, seen)
    check(KeyRanges(*jax.jit(edges)(*moved), ranges.band), num_keys, seen)


def test_one_of_two_arrays_may_be_of_jax() -> None:
    jax = pytest.importorskip("jax")
    ranges = KeyRanges.windows(np.array([1, 2]), jax.numpy.asarray([0, 1]), 3)
    assert isinstance(ranges.key_start, jax.Array)
    expected = KeyRanges.windows([1, 2], [0, 1], 3)
    np.testing.assert_array_equal(ranges.key_end, expected.key_end)


def test_examples_of_the_docstrings() -> None:
    for ranges, start, end in (
        (KeyRanges.documents([0, 3, 5], 6), [[0, 0, 0, 3, 3, 0]], [[3, 3, 3, 5, 5, 0]]),
        (KeyRanges.segments([[7, 7, 2, 7]]), [[0, 0, 2, 3]], [[2, 2, 3, 4]]),
        (KeyRanges.prefix_lm([2], 4), [[0, 0, 0, 0]], [[2, 2, 3, 4]]),
        (KeyRanges.chunks(2, 5), [[0, 0, 2, 2, 4]], [[1, 2, 3, 4, 5]]),
        (KeyRanges.windows([1, 2], 0, 3), [[-1, 0, 1], [-2, -1, 0]], [[1, 2, 3], [1, 2, 3]]),
    ):
        assert (ranges.key_start.tolist(), ranges.key_end.tolist()) == ([start], [end])
        assert ranges.band == Full()
    assert KeyRanges.documents([0, 3], 3, Causal()).band == Causal()


class Cupy:
    """An array of a library with the functions of NumPy that does not name them."""

    __module__ = "cupy"


def test_alibrary_of_that_does_not_name_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from cutlass_py_attn.problem import key_ranges

    functions = object()
    monkeypatch.setitem(sys.modules, "cupy", functions)
    assert key_ranges.library_of(Cupy()) is functions


BOUNDS = "cu_seqlens{}: must be (documents + 1,) or (batch, documents + 1) integers"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: KeyRanges.documents(3.0, 6), [BOUNDS.format("")]),
        (lambda: KeyRanges.documents([0.0, 3.0], 6), [BOUNDS.format(".dtype")]),
        (lambda: KeyRanges.documents([[0, 1], [2]], 6), [BOUNDS.format("")]),
        (lambda: KeyRanges.documents(np.zeros((1, 1, 3), int), 6), [BOUNDS.format(".shape")]),
        (lambda: KeyRanges.documents(np.zeros((2, 0), int), 6), ["cu_seqlens.shape: an entry at least"]),
        (lambda: KeyRanges.documents([0, 3, 2], 6), ["cu_seqlens: must be ascending"]),
        (lambda: KeyRanges.documents(np.array([3, 2], np.uint32), 6), ["cu_seqlens: must be ascending"]),
        (
            lambda: KeyRanges.documents("0", -1, "causal"),  # type: ignore[arg-type]
            [BOUNDS.format(""), "num_tokens: an int of at least 0", "band: must be a Mask"],
        ),
        (lambda: KeyRanges.documents(np.zeros((4, 2), int), 2**29), ["num_tokens: at most 536870910"]),
        (lambda: KeyRanges.segments([1, 2]), ["segment_ids.shape: (batch, num_tokens) integers"]),
        (
            lambda: KeyRanges.segments(np.broadcast_to(np.int8(1), (2**16, 2**15))),
            ["num_tokens: at most 32766 here"],
        ),
        (lambda: KeyRanges.prefix_lm([[2]], None), ["lengths.shape: (batch,)", "num_queries: an int of at least 0"]),  # type: ignore[arg-type]
        (lambda: KeyRanges.chunks(0, 6), ["size: at least 1"]),
        (lambda: KeyRanges.chunks(np.int64(-3), 6), ["size: at least 1"]),
        (lambda: KeyRanges.chunks(True, 6), ["size.dtype: () integers"]),
        (lambda: KeyRanges.chunks([2], 6), ["size.shape: () integers"]),
        (lambda: KeyRanges.windows([1, 2], [1, 2, 3], 6), ["right.shape: that of left, (2,)"]),
        (
            lambda: KeyRanges.windows(None, 0.5, 6),
            ["left: () or (num_heads,) integers", "right: () or (num_heads,) integers"],
        ),
    ],
)
def test_bad_arguments(call: Callable[[], Any], expected: list[str]) -> None:
    expect_raised(call, expected)
