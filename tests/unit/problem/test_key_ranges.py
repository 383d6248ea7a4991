"""Tests of problem/key_ranges.py: every question that ranges answer, against the definition pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Mask
from tests.support.mask_cases import MASKS, visible

LAW = settings(deadline=None, max_examples=200)
SIZES = st.integers(1, 3)


@st.composite
def key_ranges(draw: st.DrawFn, counts: tuple[int, ...] = (1, 2)) -> tuple[KeyRanges, int]:
    """Ranges of up to nine queries over some keys, and the number of these keys; some are empty or leave the keys."""
    num_keys, shape = draw(st.integers(1, 12)), (draw(SIZES), draw(SIZES), draw(st.integers(1, 9)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = random.integers(-2, num_keys + 3, (2 * draw(st.sampled_from(counts)), *shape))
    return KeyRanges(*arrays), num_keys


def defined(ranges: KeyRanges, num_keys: int) -> npt.NDArray[Any]:
    """Returns the definition of a mask, pair by pair."""
    seen = np.zeros((*ranges.start.shape, num_keys), bool)
    for *row, key in np.ndindex(seen.shape):
        at = tuple(row)
        seen[(*at, key)] = ranges.start[at] <= key < ranges.end[at]
        if ranges.start2 is not None and ranges.end2 is not None:
            seen[(*at, key)] |= ranges.start2[at] <= key < ranges.end2[at]
    return seen


@LAW
@given(key_ranges())
def test_ranges_are_the_definition(case: tuple[KeyRanges, int]) -> None:
    ranges, num_keys = case
    truth = defined(ranges, num_keys)
    np.testing.assert_array_equal(ranges.materialise(num_keys), truth)
    start, end = ranges.disjoint(num_keys)
    assert start.dtype == end.dtype == np.int32
    keys = np.arange(num_keys)
    inside = (start[..., None] <= keys) & (keys < end[..., None])
    np.testing.assert_array_equal(inside.sum(axis=3), truth)  # no key is in two ranges
    assert (start >= 0).all()
    assert (end <= num_keys).all()
    assert ((start < end) | (end == 0)).all()
    if start.shape[3] == 2:
        both = (end > 0).all(axis=3)
        apart = (end[..., 0] < start[..., 1]) | (end[..., 1] < start[..., 0])
        assert both.any()
        assert apart[both].all()
        assert (end[..., 0] > 0)[end[..., 1] > 0].all()


@LAW
@given(key_ranges(), MASKS)
def test_ranges_within_a_mask(case: tuple[KeyRanges, int], mask: Mask) -> None:
    ranges, num_keys = case
    truth = defined(ranges, num_keys) & visible(mask, ranges.num_queries, num_keys)
    np.testing.assert_array_equal(ranges.within(mask, num_keys).materialise(num_keys), truth)


@LAW
@given(MASKS, st.integers(0, 40), st.integers(0, 40))
def test_every_mask_is_a_range(mask: Mask, num_queries: int, num_keys: int) -> None:
    found = KeyRanges.of(mask, num_queries, num_keys).materialise(num_keys)
    np.testing.assert_array_equal(found[0, 0], visible(mask, num_queries, num_keys))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ((np.zeros(3, int), np.ones(3, int)), "start.shape"),
        ((np.zeros((1, 1, 3), int), np.ones((1, 2, 3), int)), "end.shape"),
        ((np.zeros((1, 1, 3)), np.ones((1, 1, 3), int)), "start.dtype"),
        ((np.zeros((1, 1, 3), int), np.ones((1, 1, 3), int), np.ones((1, 1, 3), int)), "end2"),
    ],
)
def test_arrays_that_are_no_ranges(arrays: tuple[Any, ...], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        KeyRanges(*arrays)
