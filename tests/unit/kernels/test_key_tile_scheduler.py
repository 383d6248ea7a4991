"""The order in which blocks of the sm90 backward compute key tiles, and in which they add to dQ."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.kernels.sm90_backward.query_tile_order import QueryBlock, QueryTileOrder
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.plan.planner import builds
from cutlass_py_attn.problem.masks import FORMS, Causal, Form, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support.mask_cases import MASKS

TILE_M, TILE_N = 8, 16
ONE_HEAD, TWO_HEADS = (
    Problem.dense("backward", Shape(1, 64, 64, heads, 128, 128, 1), "bfloat16", Full()) for heads in (1, 2)
)
# By query heads of a key head: a build says only whether there are several.
GROUPED_BUILDS = {
    group: next(build for build in builds(problem, "sm_90a") if build.variant == "")
    for group, problem in ((1, ONE_HEAD), (2, TWO_HEADS))
}
BY_QUERY_HEADS = next(
    build for build in builds(TWO_HEADS.replace(mask=Causal()), "sm_90a") if build.variant == "query_heads"
)
COUNTS = st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 30))  # key tiles, heads, fitting ones


@settings(deadline=None)
@given(st.sampled_from(FORMS), COUNTS)
def test_every_key_tile_of_every_head_is_computed_once(form: Form, counts: tuple[int, int, int]) -> None:
    tiles, heads, fitting = counts
    all_of_them = [(tile, head) for tile in range(tiles) for head in range(heads)]
    numbers = range(tiles * heads)
    orders = [
        [tile_order.key_tile_at(form, number, tiles, heads, fitting) for number in numbers],
        [tile_order.deterministic_key_tile_at(number, tiles, heads, fitting) for number in numbers],
    ]
    assert [sorted(order) for order in orders] == [all_of_them, all_of_them]
    for head in range(heads):
        ahead, in_turn = ([tile for tile, of in order if of == head] for order in orders)
        assert ahead == list(range(tiles))
        assert in_turn == list(range(tiles))[::-1]


@settings(deadline=None, max_examples=150)
@given(MASKS, st.integers(0, 80), st.integers(1, 120))
def test_a_key_tile_has_its_query_tiles_or_one_that_sees_nothing(mask: Mask, num_queries: int, num_keys: int) -> None:
    band, query_tiles = mask.band(num_queries, num_keys), max(-(-num_queries // TILE_M), 1)
    for key_tile in range(-(-num_keys // TILE_N) + 1):  # and one of keys that are stored, not used
        where = band, key_tile, TILE_M, TILE_N
        start, end = tile_order.query_tile_start(*where), tile_order.query_tile_end(*where)
        first, last = tile_order.nonempty_query_tiles(*where)
        assert 0 <= first < last <= query_tiles
        assert (first, last) == (start, end) if start < end else last == first + 1


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 12))
def test_one_block_per_head(tiles: int, heads: int, blocks: int) -> None:
    taken = []
    for block in range(blocks):
        number, own = block * tiles, []
        while number < tiles * heads:
            own.append(number)
            number = tile_order.next_per_head_tile(number, tiles, blocks)
        assert own == [head * tiles + tile for head in range(block, heads, blocks) for tile in range(tiles)]
        taken += own
    assert sorted(taken) == list(range(tiles * heads))


@settings(deadline=None, max_examples=150)
@given(MASKS, st.integers(1, 80), st.integers(1, 120))
def test_the_first_and_the_last_key_tile_that_visits_a_query_tile(mask: Mask, num_queries: int, num_keys: int) -> None:
    """With one block per head, the first key tile stores a sum, the last one completes it, those between add to it."""
    band, visits = mask.band(num_queries, num_keys), Counter[int]()
    spans = [
        (tile_order.key_tile_start(band, tile, TILE_M, TILE_N), tile_order.key_tile_end(band, tile, TILE_M, TILE_N))
        for tile in range(-(-num_queries // TILE_M))
    ]
    for key_tile in range(-(-num_keys // TILE_N)):
        for query_tile in range(*tile_order.nonempty_query_tiles(band, key_tile, TILE_M, TILE_N)):
            start, end = spans[query_tile]
            visits[query_tile] += start <= key_tile < end
    assert all(visits[tile] == max(end - start, 0) for tile, (start, end) in enumerate(spans))


class Block:
    """A block of the deterministic backward: in each step it adds to a query tile, or waits for the semaphore."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []  # (head, query tile, turn) that are left of its key tile

    def step(self, added: Counter[tuple[int, int]]) -> bool:
        """Adds to a query tile if the semaphore allows it; returns whether it did."""
        head, query_tile, turn = self.steps[0]
        if added[head, query_tile] < turn:
            return False
        added[head, query_tile] += turn >= 0
        self.steps.pop(0)
        return True


@settings(deadline=None, max_examples=150)
@given(MASKS, st.tuples(st.integers(1, 60), st.integers(1, 100)), COUNTS, st.integers(1, 7), st.randoms())
def test_blocks_that_wait_for_semaphores_never_deadlock(
    mask: Mask, lengths: tuple[int, int], counts: tuple[int, int, int], num_blocks: int, random: Random
) -> None:
    """However few blocks run, and in whichever order: a block waits only for key tiles that started before its own."""
    _, heads, fitting = counts
    band, tiles = mask.band(*lengths), -(-lengths[1] // TILE_N)
    numbers, blocks = iter(range(tiles * heads)), [Block() for _ in range(num_blocks)]
    added: Counter[tuple[int, int]] = Counter()
    while True:
        for block in blocks:
            if not block.steps and (number := next(numbers, None)) is not None:
                tile, head = tile_order.deterministic_key_tile_at(number, tiles, heads, fitting)
                first, end = tile_order.nonempty_query_tiles(band, tile, TILE_M, TILE_N)
                turns = (tile_order.preceding_key_tiles(band, m, tile, TILE_M, TILE_N) for m in range(first, end))
                block.steps = [(head, m, turn) for m, turn in zip(range(first, end), turns, strict=True)]
        at_work = [block for block in blocks if block.steps]
        if not at_work:
            break
        random.shuffle(at_work)
        assert any([block.step(added) for block in at_work]), "every block waits"
    for m in range(-(-lengths[0] // TILE_M)):
        start, end = (f(band, m, TILE_M, TILE_N) for f in (tile_order.key_tile_start, tile_order.key_tile_end))
        assert all(added[head, m] >= max(end - start, 0) for head in range(heads))


@pytest.mark.parametrize(
    ("heads", "tiles", "fitting", "expected"),
    [
        (64, 64, 4, 4),
        (32, 128, 2, 2),
        (256, 16, 16, 16),
        (1024, 4, 64, 64),
        (8, 64, 1, 4),
        (9, 64, 1, 5),
    ],
)
def test_blocks_finish_at_about_the_same_time(heads: int, tiles: int, fitting: int, expected: int) -> None:
    """132 blocks, each of which takes the next key tile of a causal mask when it is done.

    The first of 64 key tiles visits 128 query tiles.
    """
    blocks = 132
    assert tile_order.dynamic_group_heads(fitting, heads, tiles, blocks) == expected
    done_at = [0] * blocks
    work = 0
    for number in range(heads * tiles):
        tile, _ = tile_order.key_tile_at(Form("causal"), number, tiles, heads, expected)
        work += 2 * (tiles - tile) + 2
        heapq.heapreplace(done_at, done_at[0] + 2 * (tiles - tile) + 2)
    assert max(done_at) <= 1.07 * work / blocks


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 140), st.integers(1, 140))
def test_heads_counted_are_some_and_at_most_all(fitting: int, heads: int, tiles: int, blocks: int) -> None:
    assert 1 <= tile_order.dynamic_group_heads(fitting, heads, tiles, blocks) <= heads


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 2), st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 6)))
def test_every_query_block_of_every_head_is_visited_once(
    group: int, blocks: int, of_tile: tuple[int, int, int]
) -> None:
    first, count, head = of_tile
    order = QueryTileOrder(GROUPED_BUILDS[min(group, 2)], blocks)
    p, work_tile = SimpleNamespace(group=group), SimpleNamespace(head=head, first=first, end=first + count)
    assert order.num_tiles(p, work_tile) == group * count
    visited = [order.first(p, work_tile)]
    for _ in range(group * count * blocks - 1):
        visited.append(order.next(work_tile, visited[-1]))
    heads, rows = range(head * group, (head + 1) * group), range(first * blocks, (first + count) * blocks)
    assert visited == [QueryBlock(head, block) for head in heads for block in rows]


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 2), st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 6)))
def test_work_tiles_of_query_heads_visit_one_head(group: int, blocks: int, of_tile: tuple[int, int, int]) -> None:
    first, count, head = of_tile
    order = QueryTileOrder(BY_QUERY_HEADS, blocks)
    p, work_tile = SimpleNamespace(group=group), SimpleNamespace(head=head, first=first, end=first + count)
    assert order.num_tiles(p, work_tile) == count
    visited = [order.first(p, work_tile)]
    for _ in range(count * blocks - 1):
        visited.append(order.next(work_tile, visited[-1]))
    assert visited == [QueryBlock(head, block) for block in range(first * blocks, (first + count) * blocks)]


@settings(deadline=None)
@given(st.sampled_from(sorted(GROUPED_BUILDS)), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6))
def test_two_adding_warps_take_turns_at_query_tiles(group: int, key_tiles: list[tuple[int, int]]) -> None:
    order, p = QueryTileOrder(GROUPED_BUILDS[group]), SimpleNamespace(group=group)
    work_tiles = [SimpleNamespace(head=1, first=first, end=first + count) for first, count in key_tiles]
    in_order: list[QueryBlock] = []
    of_warps: tuple[list[QueryBlock], list[QueryBlock]] = ([], [])
    for work_tile in work_tiles:
        number, tiles, block = len(in_order), order.num_tiles(p, work_tile), order.first(p, work_tile)
        for warp, added in enumerate(of_warps):
            skips = (warp ^ number) & 1
            own = order.first_of(p, work_tile, skips)
            for _ in range((tiles - skips + 1) // 2):
                added.append(own)
                own = order.next(work_tile, order.next(work_tile, own))
        for _ in range(tiles):
            in_order.append(block)
            block = order.next(work_tile, block)
    assert of_warps == (in_order[::2], in_order[1::2])
