"""Tests of launch/tile_order.py: the tiles that are visited, against the mask written out as an array."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.kernels.sm90_forward.layout import splits_key_loop
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.masks import Band, Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.validation import MAX_LENGTH
from tests.support.mask_cases import MASKS, Int32, visible

Bools = npt.NDArray[np.bool_]
Case = tuple[Mask, int, int, int, int]  # mask, tile_m, tile_n, num_queries, num_keys
TILES = st.sampled_from([1, 2, 3, 8, 16, 64, 128])
LENGTHS = st.one_of(st.integers(0, 12), st.integers(0, 400))
CASES = st.tuples(MASKS, TILES, TILES, LENGTHS, LENGTHS)
LAW = settings(deadline=None, max_examples=250)
PAST = 2  # tiles behind the last one that blocks ask for: those of the longest sequence, of stored but unused keys


def tiled(case: Case) -> tuple[Bools, Bools]:
    """Which tiles [query tiles, key tiles] have a visible pair, and which are whole and visible throughout.

    Rows past the last query do not count: nothing is stored for them. Keys past the last one do.
    """
    mask, tile_m, tile_n, num_queries, num_keys = case
    query_tiles, key_tiles = -(-num_queries // tile_m), -(-num_keys // tile_n)
    seen = np.zeros((num_queries, key_tiles * tile_n), np.bool_)
    seen[:, :num_keys] = visible(mask, num_queries, num_keys)
    if 0 in seen.shape:
        empty = np.zeros((query_tiles, key_tiles), np.bool_)
        return empty, empty
    by_tile, rows = seen.reshape(num_queries, key_tiles, tile_n), np.arange(0, num_queries, tile_m)
    touched = np.logical_or.reduceat(by_tile.any(axis=2), rows, axis=0)
    complete = np.logical_and.reduceat(by_tile.all(axis=2), rows, axis=0)
    return touched, complete


def padded(tiles: Bools) -> Bools:
    """The same with PAST tiles of nothing behind the last of each axis."""
    return np.pad(tiles, ((0, PAST), (0, PAST)))


def forward_visits(case: Case) -> Bools:
    """Tiles that the forward visits."""
    mask, tile_m, tile_n, *lengths = case
    band, found = mask.band(*lengths), np.zeros_like(padded(tiled(case)[0]))
    for m in range(found.shape[0]):
        start, end = (f(band, m, tile_m, tile_n) for f in (tile_order.key_tile_start, tile_order.key_tile_end))
        assert start >= 0
        assert 0 <= end <= found.shape[1]
        found[m, start:end] = True
    return found


def backward_visits(case: Case) -> Bools:
    """Tiles that the backward visits."""
    mask, tile_m, tile_n, *lengths = case
    band, found = mask.band(*lengths), np.zeros_like(padded(tiled(case)[0]))
    for n in range(found.shape[1]):
        start, end = (f(band, n, tile_m, tile_n) for f in (tile_order.query_tile_start, tile_order.query_tile_end))
        assert start >= 0
        assert end <= found.shape[0] - PAST
        found[start:end, n] = True
    return found


@LAW
@given(CASES)
def test_forward_visits_what_has_a_pair(case: Case) -> None:
    np.testing.assert_array_equal(forward_visits(case), padded(tiled(case)[0]))


@LAW
@given(CASES)
def test_backward_visits_what_has_a_pair(case: Case) -> None:
    np.testing.assert_array_equal(backward_visits(case), padded(tiled(case)[0]))


@LAW
@given(CASES)
def test_whole_tiles_are_the_complete_ones_and_need_no_mask(case: Case) -> None:
    mask, tile_m, tile_n, *lengths = case
    band, (_, complete) = mask.band(*lengths), tiled(case)
    key_tiles = np.arange(complete.shape[1])
    for m in range(complete.shape[0]):
        first, end = tile_order.whole_key_tiles(band, m, tile_m, tile_n)
        np.testing.assert_array_equal((key_tiles >= first) & (key_tiles < end), complete[m])
        needs = [bool(tile_order.needs_mask(band, m, n, tile_m, tile_n)) for n in range(complete.shape[1])]
        np.testing.assert_array_equal(needs, ~complete[m])


@LAW
@given(CASES)
def test_spans_are_all_key_tiles_but_the_last_and_separate_the_complete_ones(case: Case) -> None:
    mask, tile_m, tile_n, *lengths = case
    band, (_, complete) = mask.band(*lengths), tiled(case)
    for m in range(complete.shape[0]):
        first, end = (f(band, m, tile_m, tile_n) for f in (tile_order.key_tile_start, tile_order.key_tile_end))
        last = max(end, first + 1) - 1
        assert tile_order.key_tile_spans(band, m, first, last, tile_m, tile_n, splits=False) == ((first, last, False),)
        spans = tile_order.key_tile_spans(band, m, first, last, tile_m, tile_n, splits=True)
        assert [n for span in spans for n in reversed(range(span.first, span.end))] == [*reversed(range(first, last))]
        for span in spans:
            assert all(complete[m, n] == span.is_whole for n in range(span.first, span.end))


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        (Full(), [(0, 5, True)]),
        (Causal(), [(4, 5, False), (0, 4, True)]),
        (Causal(200), [(4, 5, False), (3, 4, True), (0, 3, False)]),
        (Causal(50), [(4, 5, False), (4, 4, True), (3, 4, False)]),
    ],
)
def test_spans_of_a_tile(mask: Mask, spans: list[tuple[int, int, bool]]) -> None:
    """Queries 256 to 383 and key tiles of 64. Query 383 sees no key behind its own, which is in key tile 5."""
    band = mask.band(1024, 1024)
    first = tile_order.key_tile_start(band, 2, 128, 64)
    found = tile_order.key_tile_spans(band, 2, first, 5, 128, 64, splits=True)
    assert [*map(tuple, found)] == spans


@pytest.mark.parametrize(
    ("spec", "splits"),
    [
        ("bf16_d64_s1024_b1_h2_full", True),
        ("bf16_d64_s1024_b1_h2_causal_window64", True),
        ("bf16_d128_s1024_b1_h2_causal_window64", True),
        ("f16_d128_s1024_b1_h2_causal_window64", False),
        ("bf16_d64_s1024_b1_h2_causal_window64_alibi", False),
        ("bf16_d64_s1024_b1_h2_causal_alibi", True),
        ("bf16_d64_s1024_b1_h2_full_softcap30", True),
        ("bf16_d96_s1024_b1_h2_causal_softcap30", False),
        ("bf16_d128_s1024_b1_h2_full_alibi", False),
        ("bf16_d128v64_s1024_b1_h2_full_alibi", False),
        ("bf16_d128_s1024_b1_h2_full_bias", True),
        ("bf16_d128_s1024_b1_h2_full_sinks", True),
        ("bf16_d128_s1024_b1_h2_causal_dropout0.5", True),
    ],
)
def test_some_score_terms_of_windows_and_wide_heads_keep_one_loop(spec: str, splits: bool) -> None:
    build = planner.plan(parse(spec).problem("forward"), "sm_90a", 132).build
    assert build.family == "sm90"
    assert splits_key_loop(build) is splits


@LAW
@given(CASES)
def test_turns_count_up_over_what_is_visited(case: Case) -> None:
    mask, tile_m, tile_n, *lengths = case
    band, (touched, _) = mask.band(*lengths), tiled(case)
    for m in range(touched.shape[0]):
        turns = [tile_order.preceding_key_tiles(band, m, int(n), tile_m, tile_n) for n in np.flatnonzero(touched[m])]
        assert turns == list(range(len(turns)))[::-1], "from the last key tile to the first, without gaps"


@settings(deadline=None, max_examples=150)
@given(st.tuples(MASKS, TILES, TILES, st.integers(1, 200), st.integers(1, 200)), st.integers(0, 200))
def test_keys_that_are_stored_but_unused_are_visited_by_none(case: Case, unused: int) -> None:
    mask, tile_m, tile_n, *lengths = case
    band, stored = mask.band(*lengths), lengths[1] + unused
    for n in range(-(-lengths[1] // tile_n), -(-stored // tile_n)):
        start, end = (f(band, n, tile_m, tile_n) for f in (tile_order.query_tile_start, tile_order.query_tile_end))
        assert start >= end


# The schedule of the memory-efficient attention, by its own formulas: one block walks the query tiles of a key
# tile from the first that sees one of its keys, and a query tile counts the key tiles that add to it.
LENGTH_PAIRS = (
    *((30, 66), (256, 256), (314, 320), (32, 256), (224, 226), (5, 531), (320, 332)),
    *((256, keys) for keys in range(62, 67)),
)
PUBLISHED = [Full(), *(kind(size) for kind in (Causal, CausalBottomRight) for size in (None, 3, 300))]


def walked(mask: Mask, lengths: tuple[int, int], tile: tuple[int, int], first_key: int) -> list[int]:
    """The first queries of the tiles that one key block visits."""
    (num_queries, num_keys), (tile_m, tile_n) = lengths, tile
    if isinstance(mask, Full):
        return list(range(0, num_queries, tile_m))
    assert isinstance(mask, Causal)
    moved = num_keys - num_queries if mask.bottom_right else 0
    last_key = min(first_key + tile_n, num_keys) - 1
    last = last_key - moved + (mask.window_size or num_queries + num_keys) - 1
    if last < 0 or first_key - moved >= num_queries:
        return []
    found = [max(0, first_key - moved) // tile_m * tile_m]
    while found[-1] + tile_m < num_queries and (mask.window_size is None or found[-1] + tile_m <= last):
        found.append(found[-1] + tile_m)
    return found


def contributors(mask: Mask, lengths: tuple[int, int], tile: tuple[int, int], first_query: int) -> int:
    """Key tiles that add to the gradient of one query tile."""
    (num_queries, num_keys), (tile_m, tile_n) = lengths, tile
    if isinstance(mask, Full):
        return -(-num_keys // tile_n)
    assert isinstance(mask, Causal)
    moved = num_keys - num_queries if mask.bottom_right else 0
    last_key = min(min(first_query + tile_m, num_queries) - 1 + moved, num_keys - 1)
    first_key = 0 if mask.window_size is None else max(first_query - mask.window_size + 1 + moved, 0)
    return 0 if last_key < 0 or first_key >= num_keys else last_key // tile_n - first_key // tile_n + 1


@pytest.mark.parametrize("mask", PUBLISHED, ids=str)
@pytest.mark.parametrize("tile", [(32, 64), (64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_the_published_schedule(mask: Mask, tile: tuple[int, int]) -> None:
    for lengths in LENGTH_PAIRS:
        band = mask.band(*lengths)
        for n, first_key in enumerate(range(0, lengths[1], tile[1])):
            start, end = tile_order.query_tile_start(band, n, *tile), tile_order.query_tile_end(band, n, *tile)
            assert [m * tile[0] for m in range(start, end)] == walked(mask, lengths, tile, first_key)
        for m, first_query in enumerate(range(0, lengths[0], tile[0])):
            start, end = tile_order.key_tile_start(band, m, *tile), tile_order.key_tile_end(band, m, *tile)
            assert max(end - start, 0) == contributors(mask, lengths, tile, first_query)


def test_the_published_pairs_have_rows_and_tiles_without_keys() -> None:
    """Else the formulas above would agree where nothing is at stake."""
    counts = {
        contributors(mask, lengths, (32, 64), first)
        for mask, lengths in product(PUBLISHED, LENGTH_PAIRS)
        for first in range(0, lengths[0], 32)
    }
    assert {0, 1, 2, 9} <= counts


FAR = st.none() | st.sampled_from([0, 1, MAX_LENGTH, 2**31 - 1])
EXTREMES = st.sampled_from([0, 1, MAX_LENGTH - 1, MAX_LENGTH])


@settings(deadline=None, max_examples=200)
@given(st.builds(Window, FAR, FAR), EXTREMES, EXTREMES, st.sampled_from([32, 128]), st.sampled_from([64, 128]))
def test_no_sum_leaves_32_bits(mask: Mask, num_queries: int, num_keys: int, tile_m: int, tile_n: int) -> None:
    left, right = (Int32(edge) for edge in mask.edges)
    queries, keys = Int32(num_queries), Int32(num_keys)
    band = Band(mask.form, keys - queries - left, keys - queries + right, queries, keys)
    for query_tile in {0, num_queries // tile_m, num_queries // tile_m + 1}:
        m = Int32(query_tile)
        first, end = (
            tile_order.key_tile_start(band, m, tile_m, tile_n),
            tile_order.key_tile_end(band, m, tile_m, tile_n),
        )
        assert first >= 0 <= end
        for key_tile in {0, num_keys // tile_n, num_keys // tile_n + 1}:
            n = Int32(key_tile)
            tile_order.needs_mask(band, m, n, tile_m, tile_n)
            tile_order.preceding_key_tiles(band, m, n, tile_m, tile_n)
            first, end = (f(band, n, tile_m, tile_n) for f in (tile_order.query_tile_start, tile_order.query_tile_end))
            assert first >= 0 <= end


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 50))
def test_longest_first_reaches_every_tile_of_every_head_once(tiles: int, heads: int, at_once: int) -> None:
    """Of as many heads as are read at once, later tiles come first."""
    order = [tile_order.longest_first(number, tiles, heads, at_once) for number in range(tiles * heads)]
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    for number, (tile, head) in enumerate(order):
        group = head // at_once
        assert number // (tiles * at_once) == group
        earlier = [other for other, its_head in order[:number] if its_head // at_once == group]
        assert all(other >= tile for other in earlier)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 50))
def test_few_heads_that_are_left_over_go_with_the_group_before(tiles: int, heads: int, at_once: int) -> None:
    order = [tile_order.longest_first_in_groups(number, tiles, heads, at_once) for number in range(tiles * heads)]
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    groups = max((heads + at_once // 3) // at_once, 1)
    for number, (tile, head) in enumerate(order):
        group = min(head // at_once, groups - 1)
        assert min(number // (tiles * at_once), groups - 1) == group
        earlier = [other for other, its_head in order[:number] if min(its_head // at_once, groups - 1) == group]
        assert all(other >= tile for other in earlier)


def test_mixed_heads() -> None:
    """Of four query tiles 33 heads give 132 blocks a round of every length."""
    assert [tile_order.heads_of_mixed_lengths(fitting, 132) for fitting in (1, 33, 34, 128)] == [1, 33, 33, 33]
    assert tile_order.heads_of_mixed_lengths(5, 3) == 1


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 70))
def test_pairs_reach_every_tile_of_every_head_once(tiles: int, heads: int, blocks: int) -> None:
    """A block's next two items are a long tile and the short one that makes up for it, of one of the next heads, until
    all that is left is dealt out from the longest tile to the shortest."""
    order = [tile_order.long_short_pairs(number, tiles, heads, blocks) for number in range(tiles * heads)]
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    rounds = max(heads * (tiles // 2) // blocks - tile_order.SINGLE_ROUNDS, 0) if tiles % 2 == 0 else 0
    for turn, block in product(range(rounds), range(blocks)):
        two = [order[tile_order.work_tile_of_round(2 * turn + step, block, blocks)] for step in (0, 1)]
        assert two[0][0] + two[1][0] == tiles - 1
        assert {head for _, head in two} == {(turn * blocks + block) // (tiles // 2)}
    late = [tile for tile, _ in order[2 * rounds * blocks :]]
    assert late == sorted(late, reverse=True)


def test_heads_at_once() -> None:
    assert tile_order.heads_in_l2(8192, 512) == 8
    assert tile_order.heads_in_l2(2048, 256) == 64
    assert tile_order.heads_in_l2(MAX_LENGTH, 1024) == tile_order.heads_in_l2(0, 2**30) == 1


def test_heads_dealt() -> None:
    """A multiple of a twelfth of the blocks; all where few would be left."""
    assert [tile_order.static_group_heads(fitting, 512, 132) for fitting in (1, 11, 12, 64)] == [11, 11, 22, 66]
    assert [tile_order.static_group_heads(4, heads, 132) for heads in (0, 1, 16, 17)] == [1, 1, 16, 11]
    assert tile_order.static_group_heads(3, 9, 5) == 3


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(1, 20))
def test_blocks_take_every_item_once(total: int, blocks: int) -> None:
    taken = [
        tile_order.work_tile_of_round(turn, block, blocks)
        for block in range(blocks)
        for turn in range(tile_order.num_rounds(total, block, blocks))
    ]
    assert sorted(taken) == list(range(total))


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(1, 20), st.integers(1, 5))
def test_blocks_of_the_last_rounds_take_what_is_left(total: int, blocks: int, rows: int) -> None:
    places = [tile_order.BlockPlace(block, blocks, row, rows) for row in range(rows) for block in range(blocks)]
    taken = [
        (place.row, tile_order.work_tile_at(total, turn, place))
        for place in places
        for turn in range(tile_order.num_work_tiles_at(total, place))
    ]
    assert sorted(number for _, number in taken) == list(range(total))
    last = [number for row, number in taken if row > 0]
    assert last == list(range(total))[total - len(last) :]  # the GPU starts these blocks in this order
    assert all(tile_order.num_work_tiles_at(total, place) <= 1 for place in places if place.row > 0)


@pytest.mark.parametrize(
    ("tiles", "heads", "bytes_of_key"),
    [(64, 32, 1024), (64, 64, 512), (16, 256, 512), (32, 24, 512), (8, 512, 512), (4, 1024, 512)],
)
def test_blocks_have_equal_shares_of_a_causal_mask(tiles: int, heads: int, bytes_of_key: int) -> None:
    """A query tile has as many key tiles as its number, and one more; 132 blocks, tiles of 128."""
    fitting = tile_order.heads_of_mixed_lengths(tile_order.heads_in_l2(tiles * 128, bytes_of_key), 132)
    at_once = tile_order.static_group_heads(fitting, heads, 132)
    busiest = busiest_share(
        tiles, heads, 132, lambda number: tile_order.longest_first_in_groups(number, tiles, heads, at_once)
    )
    assert busiest <= 1.02 * heads * tiles * (tiles + 1) / 2 / 132


@pytest.mark.parametrize(("tiles", "heads"), [(16, 64), (16, 512), (32, 40), (32, 64), (64, 32)])
def test_clusters_have_equal_shares_of_pairs(tiles: int, heads: int) -> None:
    busiest = busiest_share(tiles, heads, 66, lambda number: tile_order.long_short_pairs(number, tiles, heads, 66))
    assert busiest <= 1.02 * heads * tiles * (tiles + 1) / 2 / 66


def busiest_share(tiles: int, heads: int, blocks: int, place: Callable[[int], tuple[int, int]]) -> int:
    """Key tiles of the block that has the most."""

    def share(block: int) -> int:
        turns = range(tile_order.num_rounds(tiles * heads, block, blocks))
        return sum(place(tile_order.work_tile_of_round(turn, block, blocks))[0] + 1 for turn in turns)

    return max(map(share, range(blocks)))
