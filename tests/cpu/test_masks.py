"""Tests of masks.py: every question a mask answers, against its inequality written out pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn import masks

LENGTHS = st.integers(1, 40)
NAMES = st.sampled_from(sorted(masks.ALL))


def seen_pairs(name: str, num_queries: int, num_keys: int) -> set[tuple[int, int]]:
    """All visible (query, key) pairs, straight from the definition."""
    last = {
        "full": lambda i: num_keys - 1,
        "causal": lambda i: i,
        "causal_br": lambda i: i + num_keys - num_queries,
    }[name]
    return {(i, j) for i in range(num_queries) for j in range(num_keys) if j <= last(i)}


def test_every_mask_is_defined_here() -> None:
    assert set(masks.ALL) == {"full", "causal", "causal_br"}


@settings(deadline=None, max_examples=150)
@given(NAMES, LENGTHS, LENGTHS)
def test_sees_is_the_definition(name: str, num_queries: int, num_keys: int) -> None:
    mask, pairs = masks.from_name(name), seen_pairs(name, num_queries, num_keys)
    # Tiles reach past the end of both sequences, so the question is asked there too.
    for i in range(num_queries + 3):
        for j in range(num_keys + 3):
            assert bool(mask.sees(i, j, num_queries, num_keys)) == ((i, j) in pairs)


@settings(deadline=None, max_examples=150)
@given(NAMES, st.integers(0, 40), st.integers(0, 40))
def test_materialise_is_the_definition(name: str, num_queries: int, num_keys: int) -> None:
    found = masks.from_name(name).materialise(num_queries, num_keys)
    assert found.shape == (num_queries, num_keys)
    assert found.dtype == np.bool_
    assert set(zip(*(axis.tolist() for axis in np.nonzero(found)), strict=True)) == seen_pairs(
        name, num_queries, num_keys
    )


@settings(deadline=None, max_examples=150)
@given(NAMES, LENGTHS, LENGTHS)
def test_key_end_is_one_past_the_last_key(name: str, num_queries: int, num_keys: int) -> None:
    mask, pairs = masks.from_name(name), seen_pairs(name, num_queries, num_keys)
    for last_query in range(num_queries):
        expected = max((j + 1 for i, j in pairs if i <= last_query), default=0)
        assert mask.key_end(last_query, num_queries, num_keys) == expected


@settings(deadline=None, max_examples=150)
@given(NAMES, LENGTHS, LENGTHS)
def test_query_start_is_the_first_query(name: str, num_queries: int, num_keys: int) -> None:
    mask, pairs = masks.from_name(name), seen_pairs(name, num_queries, num_keys)
    for first_key in range(num_keys):
        found = mask.query_start(first_key, num_queries, num_keys)
        expected = min((i for i, j in pairs if j >= first_key), default=None)
        if expected is None:
            assert found >= num_queries
        else:
            assert found == expected


def test_empty_rows_of_bottom_right() -> None:
    seen = masks.CausalBottomRight().materialise(5, 3)
    assert seen.any(axis=1).tolist() == [False, False, True, True, True]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="full, causal, causal_br"):
        masks.from_name("diagonal")
