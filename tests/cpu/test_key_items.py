"""The order in which blocks of the Hopper backward take key tiles, and the turns in which they add to dQ."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from visible import MASKS

from cutlass_py_attn.masks import FORMS, Full, Mask
from cutlass_py_attn.parts import schedule
from cutlass_py_attn.parts.walk import Walk
from cutlass_py_attn.planner import builds
from cutlass_py_attn.problem import Problem, Shape

TILE_M, TILE_N = 8, 16
ONE_HEAD, TWO_HEADS = (
    Problem.dense("backward", Shape(1, 64, 64, heads, 128, 128, 1), "bfloat16", Full()) for heads in (1, 2)
)
# By query heads that read a key head: that there are several is all that a walk is told of them.
WALKS = {group: Walk(builds(problem, "sm_90a")[0]) for group, problem in ((1, ONE_HEAD), (2, TWO_HEADS))}
COUNTS = st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 30))  # key tiles, heads, fitting ones


@given(st.sampled_from(FORMS), COUNTS)
def test_every_key_tile_of_every_head_is_taken_once(form: str, counts: tuple[int, int, int]) -> None:
    tiles, heads, fitting = counts
    all_of_them = [(tile, head) for tile in range(tiles) for head in range(heads)]
    numbers = range(tiles * heads)
    orders = [
        [schedule.key_tile_of(form, number, tiles, heads, fitting) for number in numbers],
        [schedule.key_tile_in_turn(number, tiles, heads, fitting) for number in numbers],
    ]
    assert [sorted(order) for order in orders] == [all_of_them, all_of_them]
    for head in range(heads):
        ahead, in_turn = ([tile for tile, of in order if of == head] for order in orders)
        assert ahead == list(range(tiles))
        assert in_turn == list(range(tiles))[::-1]


@settings(deadline=None, max_examples=300)
@given(MASKS, st.integers(0, 80), st.integers(1, 120))
def test_a_key_tile_has_its_query_tiles_or_one_that_sees_nothing(mask: Mask, num_queries: int, num_keys: int) -> None:
    band, query_tiles = mask.band(num_queries, num_keys), max(-(-num_queries // TILE_M), 1)
    for key_tile in range(-(-num_keys // TILE_N) + 1):  # and one of keys that are stored, not used
        where = band, key_tile, TILE_M, TILE_N
        start, end = schedule.query_tile_start(*where), schedule.query_tile_end(*where)
        first, last = schedule.some_query_tiles(*where)
        assert 0 <= first < last <= query_tiles
        assert (first, last) == (start, end) if start < end else last == first + 1


@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 12))
def test_blocks_take_whole_heads(tiles: int, heads: int, blocks: int) -> None:
    taken = []
    for block in range(blocks):
        number, own = block * tiles, []
        while number < tiles * heads:
            own.append(number)
            number = schedule.next_of_heads(number, tiles, blocks)
        assert own == [head * tiles + tile for head in range(block, heads, blocks) for tile in range(tiles)]
        taken += own
    assert sorted(taken) == list(range(tiles * heads))


@settings(deadline=None, max_examples=300)
@given(MASKS, st.integers(1, 80), st.integers(1, 120))
def test_the_first_and_the_last_key_tile_that_visits_a_query_tile(mask: Mask, num_queries: int, num_keys: int) -> None:
    """A block that takes whole heads stores a sum at the first and is done with it at the last; those between add."""
    band, visits = mask.band(num_queries, num_keys), Counter[int]()
    spans = [
        (schedule.key_tile_start(band, tile, TILE_M, TILE_N), schedule.key_tile_end(band, tile, TILE_M, TILE_N))
        for tile in range(-(-num_queries // TILE_M))
    ]
    for key_tile in range(-(-num_keys // TILE_N)):
        for query_tile in range(*schedule.some_query_tiles(band, key_tile, TILE_M, TILE_N)):
            start, end = spans[query_tile]
            visits[query_tile] += start <= key_tile < end
    assert all(visits[tile] == max(end - start, 0) for tile, (start, end) in enumerate(spans))


class Block:
    """What a block does of the key tiles that it takes: step by step, a query tile each, or waiting for its turn."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []  # (head, query tile, turn) that are left of its key tile

    def step(self, added: Counter[tuple[int, int]]) -> bool:
        """Add to a query tile if it is this block's turn; whether it was."""
        head, query_tile, turn = self.steps[0]
        if added[head, query_tile] < turn:
            return False
        added[head, query_tile] += turn >= 0
        self.steps.pop(0)
        return True


@settings(deadline=None, max_examples=300)
@given(MASKS, st.tuples(st.integers(1, 60), st.integers(1, 100)), COUNTS, st.integers(1, 7), st.randoms())
def test_blocks_that_wait_for_turns_all_come_to_an_end(
    mask: Mask, lengths: tuple[int, int], counts: tuple[int, int, int], num_blocks: int, random: Random
) -> None:
    """However few blocks run, and in whichever order: a block waits only for key tiles that were taken before."""
    _, heads, fitting = counts
    band, tiles = mask.band(*lengths), -(-lengths[1] // TILE_N)
    numbers, blocks = iter(range(tiles * heads)), [Block() for _ in range(num_blocks)]
    added: Counter[tuple[int, int]] = Counter()
    while True:
        for block in blocks:
            if not block.steps and (number := next(numbers, None)) is not None:
                tile, head = schedule.key_tile_in_turn(number, tiles, heads, fitting)
                first, end = schedule.some_query_tiles(band, tile, TILE_M, TILE_N)
                turns = (schedule.turn(band, m, tile, TILE_M, TILE_N) for m in range(first, end))
                block.steps = [(head, m, turn) for m, turn in zip(range(first, end), turns, strict=True)]
        at_work = [block for block in blocks if block.steps]
        if not at_work:
            break
        random.shuffle(at_work)
        assert any([block.step(added) for block in at_work]), "every block waits"
    for m in range(-(-lengths[0] // TILE_M)):
        start, end = (f(band, m, TILE_M, TILE_N) for f in (schedule.key_tile_start, schedule.key_tile_end))
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
def test_no_block_works_long_after_the_others(heads: int, tiles: int, fitting: int, expected: int) -> None:
    """132 blocks, each of which takes the next key tile of a causal mask as it gets done; the first of 64 has 128 query
    tiles."""
    blocks = 132
    assert schedule.heads_counted(fitting, heads, tiles, blocks) == expected
    done_at = [0] * blocks
    work = 0
    for number in range(heads * tiles):
        tile, _ = schedule.key_tile_of("causal", number, tiles, heads, expected)
        work += 2 * (tiles - tile) + 2
        heapq.heapreplace(done_at, done_at[0] + 2 * (tiles - tile) + 2)
    assert max(done_at) <= 1.07 * work / blocks


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 140), st.integers(1, 140))
def test_heads_counted_are_some_and_at_most_all(fitting: int, heads: int, tiles: int, blocks: int) -> None:
    assert 1 <= schedule.heads_counted(fitting, heads, tiles, blocks) <= heads


@given(st.integers(1, 5), st.integers(1, 2), st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 6)))
def test_a_walk_meets_every_query_tile_of_every_head_once(
    group: int, blocks: int, of_item: tuple[int, int, int]
) -> None:
    first, count, head = of_item
    walk = WALKS[min(group, 2)]
    p, item = SimpleNamespace(group=group), SimpleNamespace(head=head, first=first, end=first + count)
    order = [walk.first(p, item, blocks)]
    for _ in range(group * count * blocks - 1):
        order.append(walk.next(item, *order[-1], blocks))
    heads, rows = range(head * group, (head + 1) * group), range(first * blocks, (first + count) * blocks)
    assert order == [(head, block) for head in heads for block in rows]
