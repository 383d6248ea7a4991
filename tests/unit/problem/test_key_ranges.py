"""Tests of problem/key_ranges.py: every question that ranges answer, against the definition pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, Mask
from tests.support.mask_cases import MASKS, visible
from tests.support.refusals import expect

LAW = settings(deadline=None, max_examples=200)
SIZES = st.integers(1, 3)


@st.composite
def key_ranges(draw: st.DrawFn) -> tuple[KeyRanges, int]:
    """Ranges of up to nine queries over some keys, and the number of these keys; some are empty or leave the keys."""
    num_keys, shape = draw(st.integers(1, 12)), (draw(SIZES), draw(SIZES), draw(st.integers(1, 9)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return KeyRanges(*random.integers(-2, num_keys + 3, (2, *shape)), draw(MASKS)), num_keys


def defined(ranges: KeyRanges, num_keys: int) -> npt.NDArray[Any]:
    """Returns the definition of a mask, pair by pair."""
    seen = np.zeros((*ranges.key_start.shape, num_keys), bool)
    for *row, key in np.ndindex(seen.shape):
        at = tuple(row)
        seen[(*at, key)] = ranges.key_start[at] <= key < ranges.key_end[at]
    return seen & visible(ranges.band, seen.shape[2], num_keys)


@LAW
@given(key_ranges())
def test_ranges_are_the_definition(case: tuple[KeyRanges, int]) -> None:
    ranges, num_keys = case
    np.testing.assert_array_equal(ranges.materialise(num_keys), defined(ranges, num_keys))


@LAW
@given(key_ranges())
def test_ranges_within_the_keys_and_the_band(case: tuple[KeyRanges, int]) -> None:
    """What is cut needs neither; an empty range is (0, 0)."""
    ranges, num_keys = case
    cut = ranges.within(num_keys)
    start, end = cut.key_start, cut.key_end
    np.testing.assert_array_equal(defined(KeyRanges(start, end), num_keys), defined(ranges, num_keys))
    assert (start >= 0).all()
    assert (end <= num_keys).all()
    assert ((start < end) | ((start == 0) & (end == 0))).all()


@LAW
@given(key_ranges(), st.data())
def test_one_pair(case: tuple[KeyRanges, int], data: st.DataObject) -> None:
    """Of any sequence and head, where an axis of size 1 is that of all."""
    ranges, num_keys = case
    batch, heads, queries = ranges.key_start.shape
    sizes = 4 if batch == 1 else batch, 4 if heads == 1 else heads, queries, num_keys
    one = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    at = one[0] if batch > 1 else 0, one[1] if heads > 1 else 0, *one[2:]
    assert ranges.sees(*one, num_keys) == defined(ranges, num_keys)[at]


@LAW
@given(MASKS, st.integers(0, 40), st.integers(0, 40))
def test_every_mask_is_a_range(mask: Mask, num_queries: int, num_keys: int) -> None:
    ranges = KeyRanges.of(mask, num_queries, num_keys)
    np.testing.assert_array_equal(ranges.materialise(num_keys)[0, 0], visible(mask, num_queries, num_keys))


def test_arrays_of_numpy_become_int32() -> None:
    """With numbers beyond these at their ends; others are left to the checks of a call."""
    start = np.array([[[-(2**40), 5]]])
    ranges = KeyRanges(start, np.array([[[2**63 + 1, 7]]], np.uint64))
    arrays = ranges.arrays()
    assert [array.dtype for array in arrays.values()] == [np.int32, np.int32]
    assert arrays["key_start"].tolist() == [[[-(2**31), 5]]]
    assert arrays["key_end"].tolist() == [[[2**31 - 1, 7]]]
    floats = np.zeros((1, 1, 2))
    assert KeyRanges(floats, floats).arrays()["key_end"] is floats


def test_what_is_no_array_and_no_band() -> None:
    array = np.zeros((1, 1, 3), int)
    expect(KeyRanges(array, array, Causal()).refusals(), [])
    wrong: Any = KeyRanges([[[1]]], 3, "causal")
    words = "must be an int32 array (batch, num_heads, num_queries)"
    expect(wrong.refusals(), [f"key_start: {words}", f"key_end: {words}", "band: must be a Mask"])


def test_ranges_have_no_hash() -> None:
    array = np.zeros((1, 1, 3), int)
    with pytest.raises(TypeError, match="unhashable"):
        hash(KeyRanges(array, array))
