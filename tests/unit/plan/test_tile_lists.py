"""Tests of plan/tile_lists.py: states, lists and records against the mask pair by pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.plan import tile_lists
from cutlass_py_attn.plan.tile_lists import Order, TileLists
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal

Array = npt.NDArray[Any]

TILE_M, TILE_N = 3, 4
LAW = settings(deadline=None, max_examples=150)


@st.composite
def masks_of_heads(draw: st.DrawFn) -> tuple[KeyRanges, int, int, int, int]:
    """Ranges, and (num_keys, batch, heads of key, group) of what they may mask; an axis of the ranges may have size 1.

    Most rows of some ranges are empty, and lengths are off the tiles.
    """
    batch, heads_key, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, num_keys = draw(st.integers(1, 14)), draw(st.integers(1, 19))
    shape = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads_key * group])), queries
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = random.integers(-2, num_keys + 3, (draw(st.sampled_from([2, 4])), *shape))
    arrays[0] -= draw(st.sampled_from([0, num_keys]))  # the second time, most rows see the first keys
    arrays[1, :, :, random.random(queries) < draw(st.sampled_from([0, 0.8]))] = 0
    return KeyRanges(*arrays), num_keys, batch, heads_key, group


def tiles_of(seen: Array) -> Iterator[tuple[tuple[int, int], Array]]:
    """Yields (query tile, key tile) and the pairs of each tile of one head; keys past the last are not seen."""
    queries, keys = seen.shape
    padded = np.zeros((queries, ceil_div(keys, TILE_N) * TILE_N), bool)
    padded[:, :keys] = seen
    for tile in np.ndindex(ceil_div(queries, TILE_M), ceil_div(keys, TILE_N)):
        row, column = tile[0] * TILE_M, tile[1] * TILE_N
        yield (tile[0], tile[1]), padded[row : row + TILE_M, column : column + TILE_N]


@LAW
@given(masks_of_heads())
def test_states(case: tuple[KeyRanges, int, int, int, int]) -> None:
    ranges, num_keys, *_ = case
    seen = ranges.materialise(num_keys)
    states = tile_lists.tile_states(ranges, num_keys, TILE_M, TILE_N)
    for head in np.ndindex(seen.shape[:2]):
        for tile, pairs in tiles_of(seen[head]):
            assert states.visited[(*head, *tile)] == pairs.any()
            assert states.whole[(*head, *tile)] == pairs.all()


def expect_lists(lists: TileLists, pairs: dict[tuple[int, ...], list[Array]], *, by_query: bool) -> None:
    """Checks records and entries.

    pairs: those of each (batch, head, query tile, key tile) in every query head that reads the head
    by_query: whether query tiles are work tiles
    """
    work, entries = lists.work_list, lists.tile_entries
    assert work.dtype == entries.dtype == np.int32
    tiles = {(batch, head, place[0 if by_query else 1]) for batch, head, *place in pairs}
    assert sorted((batch, head, tile) for tile, head, batch, *_ in work.tolist()) == sorted(tiles)
    for tile, head, batch, begin, partial_end, end, key_tile, _ in work.tolist():
        of_tile = {
            place[1 if by_query else 0]: parts
            for (b, h, *place), parts in pairs.items()
            if (b, h, place[0 if by_query else 1]) == (batch, head, tile)
        }
        visited = {other for other, parts in of_tile.items() if any(part.any() for part in parts)}
        whole = {other for other in visited if all(part.all() for part in of_tile[other])}
        listed = entries[begin:end].tolist()
        if not visited:
            assert (listed, partial_end, key_tile) == ([0], end, tile_lists.hidden_key_tile(TILE_N))
            continue
        order = sorted(visited - whole, reverse=by_query) + sorted(whole, reverse=by_query)
        assert listed == order
        assert partial_end - begin == len(visited - whole)
        assert key_tile == (listed[0] if by_query else tile)


@LAW
@given(masks_of_heads(), st.integers(1, 4))
def test_lists(case: tuple[KeyRanges, int, int, int, int], num_sms: int) -> None:
    """A list may be that of several heads and sequences; in the backward that of all query heads of a key head."""
    ranges, num_keys, batch, heads_key, group = case
    heads = heads_key * group
    seen = np.broadcast_to(ranges.materialise(num_keys), (batch, heads, ranges.num_queries, num_keys))
    states = tile_lists.tile_states(ranges, num_keys, TILE_M, TILE_N)
    order = Order("forward", TILE_N, 512, num_sms)
    forward = tile_lists.forward_lists(states, batch, heads, TILE_N, order)
    pairs = {(*at, *tile): [part] for at in np.ndindex(batch, heads) for tile, part in tiles_of(seen[at])}
    expect_lists(forward, pairs, by_query=True)
    order = Order("backward", TILE_M, 1024, num_sms)
    backward = tile_lists.backward_lists(states, batch, heads_key, group, TILE_N, order)
    of_group: dict[tuple[int, ...], list[Array]] = {}
    for (b, head, *tile), (part,) in pairs.items():
        of_group.setdefault((b, head // group, *tile), []).append(part)
    expect_lists(backward, of_group, by_query=False)


def test_the_longest_work_tiles_of_a_group_of_heads_come_first() -> None:
    """Where the L2 cache holds all keys: tiles of all heads together. Else segments of tiles that see the same keys."""
    ranges = KeyRanges.of(Causal(), 64 * 128, 64 * 128)
    states = tile_lists.tile_states(ranges, 64 * 128, 128, 128)
    small, large = Order("forward", 128, 512, 4), Order("forward", 128, 2**20, 4)
    work = tile_lists.forward_lists(states, 1, 2, 128, small).work_list
    lengths = work[:, 5] - work[:, 3]
    heads = small.heads_at_once(64, 64, 2)
    for first in range(0, 2, heads):
        assert (np.diff(lengths[first * 64 : (first + heads) * 64]) <= 0).all()
    assert len([*small.segments(states.visited[0, 0], heads)]) == 1
    assert len([*large.segments(states.visited[0, 0], 1)]) > 1


def test_device_ranges() -> None:
    """Rows are padded; a query has one range."""
    start, end = np.array([[[-1, 3, 2]]]), np.array([[[2, 9, 2]]])
    found = tile_lists.device_ranges(KeyRanges(start, end), 5)
    assert (found.shape, found.dtype) == ((1, 1, 128, 2), np.dtype(np.int32))
    assert found[0, 0, :4].tolist() == [[0, 2], [3, 5], [0, 0], [0, 0]]
    touching = KeyRanges(start, end, np.array([[[2, 0, 1]]]), np.array([[[3, 3, 2]]]))
    assert tile_lists.device_ranges(touching, 5)[0, 0, :3].tolist() == [[0, 3], [0, 5], [1, 2]]
    with pytest.raises(NotSupported, match="one range of keys"):
        tile_lists.device_ranges(KeyRanges(start, end, end + 1, end + 2), 5)
