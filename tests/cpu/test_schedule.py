"""Tests of parts/schedule.py: the tiles that are visited, against the mask written out as an array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn import masks
from cutlass_py_attn.parts import schedule

Case = tuple[masks.Mask, int, int, int, int]
TILES = st.sampled_from([1, 2, 3, 8, 16, 64, 128])
LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, 300))
CASES = st.tuples(st.sampled_from([cls() for cls in masks.ALL.values()]), TILES, TILES, LENGTHS, LENGTHS)


def _tiles(case: Case) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which tiles [query tiles, key tiles] have a visible pair, and which are whole and visible throughout.

    Rows past the last query do not count: nothing is stored for them. Keys past the last one do.
    """
    mask, tile_m, tile_n, num_queries, num_keys = case
    query, key = np.arange(num_queries)[:, None], np.arange(-(-num_keys // tile_n) * tile_n)[None, :]
    last = {
        "full": query * 0 + num_keys,
        "causal": query,
        "causal_br": query + num_keys - num_queries,
    }[mask.name]
    seen = (key <= last) & (key < num_keys)
    rows = np.arange(0, num_queries, tile_m)
    by_tile = seen.reshape(num_queries, -1, tile_n)
    touched = np.logical_or.reduceat(by_tile.any(axis=2), rows, axis=0)
    complete = np.logical_and.reduceat(by_tile.all(axis=2), rows, axis=0)
    return touched, complete


@settings(deadline=None, max_examples=600)
@given(CASES)
def test_forward_visits_what_has_a_pair(case: Case) -> None:
    touched, _ = _tiles(case)
    visits = np.zeros(touched.shape, int)
    for m in range(touched.shape[0]):
        end = schedule.key_tile_end(case[0], m, *case[1:])
        assert 0 <= end <= touched.shape[1]
        visits[m, :end] += 1
    np.testing.assert_array_equal(visits, touched)


@settings(deadline=None, max_examples=600)
@given(CASES)
def test_full_tiles_are_the_complete_ones(case: Case) -> None:
    _, complete = _tiles(case)
    for m in range(complete.shape[0]):
        full = schedule.full_key_tiles(case[0], m, *case[1:])
        called_full = np.arange(complete.shape[1]) < full
        np.testing.assert_array_equal(called_full, complete[m])
        needs = [bool(schedule.needs_mask(case[0], m, n, *case[1:])) for n in range(complete.shape[1])]
        np.testing.assert_array_equal(needs, ~complete[m])


def _backward(case: Case, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Tiles that the backward visits: for each key tile, query tiles from the start to the last."""
    visited = np.zeros(shape, np.bool_)
    for n in range(shape[1]):
        start = schedule.query_tile_start(case[0], n, *case[1:])
        assert start >= 0
        visited[start:, n] = True
    return visited


@settings(deadline=None, max_examples=600)
@given(CASES)
def test_backward_covers_the_forward(case: Case) -> None:
    touched, _ = _tiles(case)
    assert not (touched & ~_backward(case, touched.shape)).any()


@settings(deadline=None, max_examples=600)
@given(CASES)
def test_backward_visits_nothing_else(case: Case) -> None:
    touched, _ = _tiles(case)
    np.testing.assert_array_equal(_backward(case, touched.shape), touched)


@settings(deadline=None, max_examples=600)
@given(CASES)
def test_contributions_count_the_visits_of_the_backward(case: Case) -> None:
    touched, _ = _tiles(case)
    counts = [schedule.contributions(case[0], m, *case[1:]) for m in range(touched.shape[0])]
    np.testing.assert_array_equal(counts, _backward(case, touched.shape).sum(axis=1))
