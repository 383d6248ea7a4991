"""Tests of launch/tile_lists.py: the slices of records, and what the kernels write of a mask, pair by pair."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.launch import tile_lists, tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_lists import HIDDEN_KEY, RECORD_WORDS, SLICE_RECORDS, slice_of
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, RANGE_WORDS, Shape
from cutlass_py_attn.problem.validation import MAX_LENGTH
from tests.support import tile_lists as expected
from tests.support.listed_plans import BACKWARD, FORWARD, ranges_build, with_ranges
from tests.support.mask_cases import MASKS, Int32

LAW = settings(deadline=None, max_examples=100)
TILES = {"forward": FORWARD, "backward": BACKWARD}
NUM_SMS = 132


@dataclass(frozen=True)
class SmallTiles:
    """What the records ask of a Build, with tiles of a few rows."""

    kind: str
    tile_m: int
    tile_n: int
    item_bytes: int = 2
    columns: int = 64
    columns_value: int = 64


def build_of(direction: str) -> Build:
    problem = Problem.dense(direction, Shape(1, 512, 512, 4, 128, 128), "bfloat16")
    return ranges_build(with_ranges(problem), TILES[direction][128])


@LAW
@given(st.integers(1, 3000) | st.integers(1, 20), st.integers(1, 40), st.data())
def test_slices_have_every_record_once(tiles: int, pairs: int, data: st.DataObject) -> None:
    """A slice has consecutive records, of each of some places for each of some pairs."""
    together = data.draw(st.integers(1, pairs))
    slices = [slice_of(number, tiles, pairs, together) for number in range(tiles * pairs)]
    for number, (first, first_place, places, first_pair, some, place, pair) in enumerate(slices):
        assert number - first == place * some + pair
        assert 0 <= place < places
        assert 0 <= pair < some
        assert 0 <= first_place <= first_place + places <= tiles
        assert 0 <= first_pair <= first_pair + some <= pairs
        assert places * some <= max(SLICE_RECORDS, together)
        assert some <= together
        assert first == 0 or slices[first - 1][:5] != slices[first][:5]
        assert slices[first][:5] == (first, first_place, places, first_pair, some)
    assert len({(of.first_place + of.place, of.first_pair + of.pair) for of in slices}) == tiles * pairs


@LAW
@given(st.integers(1, 2**20), st.integers(1, 2**11), st.data())
def test_slices_in_32_bits(tiles: int, pairs: int, data: st.DataObject) -> None:
    """As the kernels compute them, up to the last of 2^31 records; a few whole heads are one slice."""
    pairs = min(pairs, (2**31 - 1) // tiles)
    together = data.draw(st.integers(1, pairs))
    number = data.draw(st.integers(0, tiles * pairs - 1))
    of = slice_of(Int32(number), Int32(tiles), Int32(pairs), Int32(together))
    assert of == slice_of(number, tiles, pairs, together)
    if together * tiles <= SLICE_RECORDS:
        assert (of.first_place, of.places) == (0, tiles)


@LAW
@given(
    st.sampled_from(DIRECTIONS),
    st.integers(1, MAX_LENGTH),
    st.integers(1, MAX_LENGTH),
    st.integers(1, 2**16),
    st.integers(1, 160),
)
def test_pairs_together(direction: str, num_queries: int, num_keys: int, pairs: int, num_sms: int) -> None:
    build = build_of(direction)
    tiles = -(-num_queries // build.tile_m) if direction == "forward" else -(-num_keys // build.tile_n)
    sizes = SimpleNamespace(num_queries=num_queries, num_keys=num_keys)
    together = tile_lists.pairs_together(build, sizes, tiles, pairs, num_sms)
    assert 1 <= together <= pairs
    in_32_bits = SimpleNamespace(num_queries=Int32(num_queries), num_keys=Int32(num_keys))
    assert together == tile_lists.pairs_together(build, in_32_bits, Int32(tiles), Int32(pairs), Int32(num_sms))


@pytest.mark.parametrize(
    ("direction", "length", "pairs", "together"),
    [
        ("forward", 8192, 512, 11),  # 8 heads fit the L2 cache, up to a multiple of a twelfth of the SMs
        ("forward", 8192, 16, 16),  # no second group for few
        ("forward", 2**20, 512, 11),
        ("forward", 512, 512, 33),  # fewer than fit, so that lengths are mixed
        ("backward", 8192, 512, 4),
        ("backward", 512, 512, 64),
    ],
)
def test_pairs_together_of_a_device(direction: str, length: int, pairs: int, together: int) -> None:
    build = build_of(direction)
    tiles = length // (build.tile_m if direction == "forward" else build.tile_n)
    sizes = SimpleNamespace(num_queries=length, num_keys=length)
    assert tile_lists.pairs_together(build, sizes, tiles, pairs, NUM_SMS) == together


def test_the_order_in_which_a_head_has_its_tiles() -> None:
    """Those come first that visit most under a causal mask, as in the order of a band."""
    tiles = 7
    for direction in DIRECTIONS:
        build = build_of(direction)
        order = [tile_lists.tile_at(build, place, tiles) for place in range(tiles)]
        band = Causal().band(tiles * build.tile_m, tiles * build.tile_n)
        if direction == "forward":
            lengths = [tile_order.key_tile_end(band, tile, build.tile_m, build.tile_n) for tile in order]
        else:
            starts = (tile_order.query_tile_start(band, tile, build.tile_m, build.tile_n) for tile in order)
            lengths = [-start for start in starts]
        assert sorted(order) == [*range(tiles)]
        assert lengths == sorted(lengths, reverse=True)


def test_a_hidden_key_is_behind_all_keys() -> None:
    assert HIDDEN_KEY == MAX_LENGTH
    for direction in DIRECTIONS:
        build = build_of(direction)
        assert tile_lists.hidden_key_tile(build) * build.tile_n == HIDDEN_KEY


@pytest.mark.parametrize("lists", [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_list_of(lists: tuple[int, int]) -> None:
    """Lists are numbered as an array (batch, heads) of them, which broadcasts."""
    numbers = np.broadcast_to(np.arange(lists[0] * lists[1]).reshape(lists), (3, 4))
    for batch, head in np.ndindex(3, 4):
        assert tile_lists.list_of(batch, head, *lists) == numbers[batch, head]


@st.composite
def masks(draw: st.DrawFn) -> tuple[SmallTiles, Shape, KeyRanges]:
    """Ranges of a few small tiles; some are empty or leave the keys, some axes have size 1."""
    queries, keys = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    batch, heads_key, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    shape = Shape(batch, queries, keys, heads_key * group, 64, 64, heads_key)
    axes = draw(st.sampled_from((1, batch))), draw(st.sampled_from((1, shape.num_heads)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = random.integers(-2, keys + 3, (2, *axes, queries))
    if draw(st.booleans()):
        edges = np.stack([np.full_like(edges[0], 0), np.full_like(edges[0], keys)])  # whole tiles
    ranges = KeyRanges(*edges, draw(MASKS))
    return (
        SmallTiles(draw(st.sampled_from(DIRECTIONS)), *draw(st.sampled_from([(4, 4), (3, 5), (8, 4)]))),
        shape,
        ranges,
    )


@LAW
@given(masks(), st.integers(1, 132))
def test_records_are_those_of_every_pair(case: tuple[SmallTiles, Shape, KeyRanges], num_sms: int) -> None:
    """The lists of tests/support against a count of visible pairs, tile by tile, as in the full mask of all heads."""
    tiles, shape, ranges = case
    full = shape.batch, shape.num_heads, shape.num_queries, shape.num_keys
    seen = np.broadcast_to(ranges.materialise(shape.num_keys), full)
    build: Build = tiles  # type: ignore[assignment]
    states = expected.tile_states(ranges.materialise(shape.num_keys), tiles.tile_m, tiles.tile_n)
    work = expected.of_work_tiles(states, build, shape.group)
    records = expected.records(build, shape, work, num_sms)
    forward = tiles.kind == "forward"
    heads = shape.num_heads if forward else shape.num_heads_key
    rows, columns = (-(-shape.num_queries // tiles.tile_m), -(-shape.num_keys // tiles.tile_n))
    work_tiles, others = (rows, columns) if forward else (columns, rows)
    assert sorted(record[:3] for record, _ in records) == sorted(
        itertools.product(range(work_tiles), range(heads), range(shape.batch))
    )
    for (tile, head, batch, partial, total, key_tile), listed in records:
        of_heads = [head] if forward else [*range(head * shape.group, (head + 1) * shape.group)]
        visited, whole = [], []
        for other in range(others)[:: -1 if forward else 1]:
            row, column = (tile, other) if forward else (other, tile)
            part = seen[batch, of_heads][
                :,
                row * tiles.tile_m : (row + 1) * tiles.tile_m,
                column * tiles.tile_n : (column + 1) * tiles.tile_n,
            ]
            is_whole = part.all() and (column + 1) * tiles.tile_n <= shape.num_keys
            if part.any():
                (whole if is_whole else visited).append(other)
        if visited or whole:
            assert (listed, partial, total) == (visited + whole, len(visited), len(visited + whole))
            assert key_tile == (listed[0] if forward else tile)
        else:
            assert (listed, partial, total) == ([0], 1, 1)
            assert key_tile == tile_lists.hidden_key_tile(build)


@LAW
@given(masks(), st.integers(1, 132))
def test_the_longest_lists_of_a_slice_come_first(case: tuple[SmallTiles, Shape, KeyRanges], num_sms: int) -> None:
    tiles, shape, ranges = case
    build: Build = tiles  # type: ignore[assignment]
    states = expected.tile_states(ranges.materialise(shape.num_keys), tiles.tile_m, tiles.tile_n)
    work = expected.of_work_tiles(states, build, shape.group)
    lengths = [len(listed) for _, listed in expected.records(build, shape, work, num_sms)]
    count = work.visited.shape[2]
    pairs = len(lengths) // count
    sizes = SimpleNamespace(num_queries=shape.num_queries, num_keys=shape.num_keys)
    together = tile_lists.pairs_together(build, sizes, count, pairs, num_sms)
    firsts = [slice_of(number, count, pairs, together).first for number in range(len(lengths))]
    for first, group in itertools.groupby(range(len(lengths)), firsts.__getitem__):
        members = [*group]
        assert members[0] == first
        assert [lengths[number] for number in members] == sorted((lengths[n] for n in members), reverse=True)


@LAW
@given(masks())
def test_ranges_of_the_device(case: tuple[SmallTiles, Shape, KeyRanges]) -> None:
    """Rows are padded with empty ranges, and each range is cut to keys and band."""
    _, shape, ranges = case
    array = expected.device_ranges(ranges, shape.num_keys)
    *heads, queries = ranges.key_start.shape
    assert array.shape == (*heads, 128, RANGE_WORDS)
    assert not array[:, :, queries:].any()
    keys = np.arange(shape.num_keys)
    seen = (array[:, :, :queries, :1] <= keys) & (keys < array[:, :, :queries, 1:])
    np.testing.assert_array_equal(seen, ranges.materialise(shape.num_keys))


def test_written_records() -> None:
    """A record names its list by where this begins, its partial tiles end, and it ends."""
    work_list = np.array([[3, 1, 0, 4, 5, 7, 9, 0], [2, 0, 1, 0, 1, 1, 8, 0]], np.int32)
    assert work_list.shape[1] == RECORD_WORDS
    found = expected.written_records(work_list, np.array([5, 0, 0, 0, 9, 2, 1, 0]))
    assert found == [((3, 1, 0, 1, 3, 9), [9, 2, 1]), ((2, 0, 1, 1, 1, 8), [5])]
