"""Tests of problem/masks.py: every question a mask or its band answers, against the definition pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.masks import Band, Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.validation import MAX_LENGTH
from tests.support.mask_cases import MASKS, Int32, visible
from tests.support.refusals import expect

LENGTHS = st.one_of(st.integers(0, 12), st.integers(0, 120))
LAW = settings(deadline=None, max_examples=300)


@LAW
@given(MASKS, LENGTHS, LENGTHS)
def test_materialise_and_pairs_are_the_definition(mask: Mask, num_queries: int, num_keys: int) -> None:
    found, truth = mask.materialise(num_queries, num_keys), visible(mask, num_queries, num_keys)
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, truth)
    assert mask.pairs(num_queries, num_keys) == truth.sum()


@LAW
@given(MASKS, st.integers(0, 40), st.integers(0, 40))
def test_sees_is_the_definition_past_the_ends_too(mask: Mask, num_queries: int, num_keys: int) -> None:
    truth = np.zeros((num_queries + 3, num_keys + 3), np.bool_)
    truth[:num_queries, :num_keys] = visible(mask, num_queries, num_keys)
    found = [
        [bool(mask.sees(i, j, num_queries, num_keys)) for j in range(num_keys + 3)] for i in range(num_queries + 3)
    ]
    np.testing.assert_array_equal(found, truth)


@LAW
@given(MASKS, LENGTHS, LENGTHS)
def test_key_range_of_queries(mask: Mask, num_queries: int, num_keys: int) -> None:
    band, truth = mask.band(num_queries, num_keys), visible(mask, num_queries, num_keys)
    for query in range(num_queries):
        later, earlier = np.flatnonzero(truth[query:].any(axis=0)), np.flatnonzero(truth[: query + 1].any(axis=0))
        start = band.key_start(query)
        assert start == later[0] if later.size else start >= num_keys
        assert band.key_end(query) == (earlier[-1] + 1 if earlier.size else 0)


@LAW
@given(MASKS, LENGTHS, LENGTHS)
def test_query_range_of_keys(mask: Mask, num_queries: int, num_keys: int) -> None:
    band, truth = mask.band(num_queries, num_keys), visible(mask, num_queries, num_keys)
    for key in range(num_keys):
        later, earlier = np.flatnonzero(truth[:, key:].any(axis=1)), np.flatnonzero(truth[:, : key + 1].any(axis=1))
        start = band.query_start(key)
        assert start == later[0] if later.size else start >= num_queries
        if mask.form == "local":
            assert band.query_end(key) == (earlier[-1] + 1 if earlier.size else 0)
        else:  # every query from the first on sees key 0
            assert band.query_end(key) == num_queries


@pytest.mark.parametrize(
    ("mask", "form", "edges"),
    [
        (Full(), "full", (masks.UNLIMITED, masks.UNLIMITED)),
        (Window(), "full", (masks.UNLIMITED, masks.UNLIMITED)),
        (Causal(), "causal", (masks.UNLIMITED, 0)),
        (CausalBottomRight(), "causal", (masks.UNLIMITED, 0)),
        (Window(None, 0), "causal", (masks.UNLIMITED, 0)),
        (Window(None, 7), "causal", (masks.UNLIMITED, 7)),
        (Causal(1), "local", (0, 0)),
        (CausalBottomRight(300), "local", (299, 0)),
        (Window(4, None), "local", (4, masks.UNLIMITED)),
        (Window(2**31, 2**31), "local", (masks.UNLIMITED, masks.UNLIMITED)),
    ],
    ids=str,
)
def test_forms_and_edges(mask: Mask, form: str, edges: tuple[int, int]) -> None:
    assert (mask.form, mask.edges) == (form, edges)
    assert form in masks.FORMS


@settings(deadline=None, max_examples=100)
@given(LENGTHS, LENGTHS, st.integers(1, 300))
def test_masks_that_are_another_s(num_queries: int, num_keys: int, size: int) -> None:
    for left, right in (
        (CausalBottomRight(), Window(None, 0)),
        (CausalBottomRight(size), Window(size - 1, 0)),
        (Full(), Window(num_queries + num_keys, num_queries + num_keys)),
    ):
        np.testing.assert_array_equal(left.materialise(num_queries, num_keys), right.materialise(num_queries, num_keys))


def test_rows_that_see_nothing() -> None:
    def some(mask: Mask, *lengths: int) -> list[bool]:
        return [bool(row.any()) for row in mask.materialise(*lengths)]

    assert some(CausalBottomRight(), 5, 3) == [False, False, True, True, True]
    assert some(Causal(2), 6, 3) == [True, True, True, True, False, False]
    assert some(Window(0, 0), 4, 2) == [False, False, True, True]


EXTREMES = st.sampled_from([0, 1, 2, MAX_LENGTH - 1, MAX_LENGTH])
FAR = st.none() | st.sampled_from([0, 1, MAX_LENGTH, 2**31 - 1])


@settings(deadline=None, max_examples=300)
@given(st.builds(Window, FAR, FAR), EXTREMES, EXTREMES, st.data())
def test_no_sum_leaves_32_bits(mask: Mask, num_queries: int, num_keys: int, data: st.DataObject) -> None:
    """The longest sequences with the widest edges, at the places that a tile at the end reaches."""
    left, right = (Int32(edge) for edge in mask.edges)
    queries, keys = Int32(num_queries), Int32(num_keys)
    diagonal = keys - queries
    band = Band(mask.form, diagonal - left, diagonal + right, queries, keys)
    query, key = (Int32(data.draw(st.integers(0, length + 127))) for length in (num_queries, num_keys))
    band.sees(query, key)
    band.key_start(query), band.key_end(query), band.query_start(key), band.query_end(key)


def test_names() -> None:
    assert {name: cls.name for name, cls in masks.ALL.items()} == {name: name for name in masks.ALL}
    assert set(masks.ALL) == {"full", "causal", "causal_br", "window"}
    assert [masks.from_name(name) for name in masks.PLAIN] == [Full(), Causal(), CausalBottomRight()]
    for name in ("diagonal", "window"):
        with pytest.raises(ValueError, match=f"mask '{name}': must be one of full, causal, causal_br"):
            masks.from_name(name)


def test_edges_are_integers_of_at_least_0() -> None:
    assert masks.refusals(Window(0, None)) == []
    edges: tuple[Any, ...] = -1, 1.5, True, "2"
    rule = "an int of at least 0, or None for no limit"
    for edge in edges:
        expect(masks.refusals(Window(edge, 3)), [f"window_left: {rule}"])
        expect(masks.refusals(Window(edge, edge)), [f"window_left: {rule}", f"window_right: {rule}"])


@pytest.mark.parametrize("number", [np.array(2), np.int32(2), np.uint8(2)], ids=repr)
def test_masks_are_hashable_by_their_numbers(number: Any) -> None:
    """Also as static arguments of jax.jit, which hashes them before this package sees them."""
    for kind in (Causal, CausalBottomRight):
        made = kind(number)
        assert (made, hash(made), type(made.window_size)) == (kind(2), hash(kind(2)), int)
    assert hash(Window(number, None)) == hash(Window(2, None))
