"""Tile lists: which tiles the kernels of mask form "ranges" visit, from the ranges of keys that each query sees.

launch/tile_lists.py says what the arrays contain. Here NumPy makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.tensors import F32_BYTES, RANGE_WORDS, RANGES_PADDING
from cutlass_py_attn.problem.validation import MAX_LENGTH
from cutlass_py_attn.refusals import refuse

Array = npt.NDArray[Any]

ROUNDS_TOGETHER: Final = 2  # least rounds of work tiles that are sorted together, and how often their operands fill L2


class TileStates(NamedTuple):
    """What a mask is in each tile, as (batch, heads, query tiles, key tiles) bool; both first axes may have size 1.

    visited: whether a query sees a key; whole: whether each query sees each key. Rows past the last query do not count,
    keys past the last are not seen.
    """

    visited: Array
    whole: Array

    def of_groups(self, group: int) -> TileStates:
        """Returns the states of each key head: what the `group` query heads that read it visit together."""
        batch, heads, *tiles = self.visited.shape
        if heads == 1:
            return self
        visited, whole = (state.reshape(batch, heads // group, group, *tiles) for state in self)
        return TileStates(np.any(visited, axis=2), np.all(whole, axis=2))

    def transposed(self) -> TileStates:
        """Returns the states with key tiles before query tiles."""
        return TileStates(self.visited.swapaxes(2, 3), self.whole.swapaxes(2, 3))


@dataclass(frozen=True, slots=True, eq=False)
class TileLists:
    """The arrays `work_list` and `tile_entries` of one direction."""

    work_list: Array
    tile_entries: Array


@dataclass(frozen=True, slots=True)
class Order:
    """In which order work tiles are computed: the longest first, among tiles whose operands the L2 cache holds.

    visited_rows, row_bytes: rows of a visited tile, and the bytes that each of them loads and adds
    """

    direction: str
    visited_rows: int
    row_bytes: int
    num_sms: int

    @staticmethod
    def of(build: Build, num_sms: int) -> Order:
        """Returns the order of a Build on so many multiprocessors."""
        row_bytes = build.item_bytes * (build.columns + build.columns_value)
        if build.kind == "forward":
            return Order(build.kind, build.tile_n, row_bytes, num_sms)
        return Order(build.kind, build.tile_m, row_bytes + F32_BYTES * build.columns, num_sms)

    def heads_at_once(self, longest: int, tiles: int, heads: int) -> int:
        """Returns how many heads are ordered together, as under a causal mask.

        longest: entries of the longest list; tiles: work tiles of a head; heads: of all sequences
        """
        fitting = tile_order.heads_in_l2(longest * self.visited_rows, self.row_bytes)
        if self.direction == "forward":
            mixed = tile_order.heads_of_mixed_lengths(fitting, self.num_sms)
            return min(int(tile_order.static_group_heads(mixed, heads, self.num_sms)), heads)
        return min(int(tile_order.dynamic_group_heads(fitting, heads, tiles, self.num_sms)), heads)

    def segments(self, visited: Array, heads: int) -> Iterator[slice]:
        """Yields the work tiles that are sorted together: of two rounds at least, then of what fills L2 twice.

        visited: (work tiles, visited tiles) bool; heads: that are ordered together
        """
        most = ROUNDS_TOGETHER * tile_order.L2_BYTES // (heads * self.visited_rows * self.row_bytes)
        least = ceil_div(ROUNDS_TOGETHER * self.num_sms, heads)
        first, union = 0, np.zeros(visited.shape[1], bool)
        for tile in range(len(visited)):
            wider = union | visited[tile]
            if tile - first >= least and len(visited) - tile >= least and wider.sum() > most:
                yield slice(first, tile)
                first, wider = tile, visited[tile]
            union = wider
        yield slice(first, len(visited))


def device_ranges(ranges: KeyRanges, num_keys: int) -> Array:
    """Returns the array `key_ranges`; NotSupported when a query has two ranges with keys between them."""
    start, end = ranges.disjoint(num_keys)
    batch, heads, queries, count = start.shape
    if count > 1:
        rule = "the kernels take one range of keys for each query"
        raise NotSupported(refuse("start2", "ranges apart from start and end", rule, "use one range"))
    padded = np.zeros((batch, heads, round_up(queries, RANGES_PADDING), RANGE_WORDS), np.int32)
    padded[:, :, :queries] = np.concatenate([start, end], axis=-1)
    return padded


def tile_states(ranges: KeyRanges, num_keys: int, tile_m: int, tile_n: int) -> TileStates:
    """Returns the states of all tiles of (tile_m, tile_n)."""
    start, end = ranges.disjoint(num_keys)
    tile = np.arange(ranges.num_queries) // tile_m
    rows = np.bincount(tile)

    def rows_with(first: Array, last: Array) -> Array:
        """Returns how many rows of each query tile have each key tile in [first, last)."""
        steps = np.zeros((*start.shape[:2], len(rows), ceil_div(num_keys, tile_n) + 1), np.int32)
        has_tiles = first < last
        batch, head, query, _ = np.nonzero(has_tiles)
        np.add.at(steps, (batch, head, tile[query], first[has_tiles]), 1)
        np.add.at(steps, (batch, head, tile[query], last[has_tiles]), -1)
        return steps.cumsum(axis=-1)[..., :-1]

    visited = rows_with(start // tile_n, ceil_div(end, tile_n)) > 0
    return TileStates(visited, rows_with(ceil_div(start, tile_n), end // tile_n) == rows[:, None])


def forward_lists(states: TileStates, batch: int, num_heads: int, tile_n: int, order: Order) -> TileLists:
    """Returns the lists of a forward, whose work tiles visit their last key tiles first."""
    entries, lists = _lists(states, last_first=True)
    key_tile = np.where(states.visited.any(axis=-1), entries[lists[..., 0]], hidden_key_tile(tile_n))
    return TileLists(_work_list(states, lists, key_tile, (batch, num_heads), order), entries)


def backward_lists(
    states: TileStates, batch: int, num_heads_key: int, group: int, tile_n: int, order: Order
) -> TileLists:
    """Returns the lists of a backward. states: as of the forward, with the backward's tiles."""
    states = states.of_groups(group).transposed()
    entries, lists = _lists(states, last_first=False)
    has_tiles = states.visited.any(axis=-1)
    key_tile = np.where(has_tiles, np.arange(has_tiles.shape[-1]), hidden_key_tile(tile_n))
    return TileLists(_work_list(states, lists, key_tile, (batch, num_heads_key), order), entries)


def hidden_key_tile(tile_n: int) -> int:
    """Returns a key tile behind all keys, which no range reaches."""
    return MAX_LENGTH // tile_n


def _lists(states: TileStates, *, last_first: bool) -> tuple[Array, Array]:
    """Returns the tiles of all lists, and (begin, partial_end, end) of each: (batch, heads, work tiles, 3)."""
    visited, whole = states
    count = visited.shape[-1]
    partial = visited & ~whole
    partial[..., 0] |= ~visited.any(axis=-1)
    order = np.arange(count, dtype=np.int32)[:: -1 if last_first else 1]
    listed = np.concatenate([partial[..., order], whole[..., order]], axis=-1)
    sizes = listed.sum(axis=-1)
    end = sizes.cumsum().reshape(sizes.shape)
    begin = end - sizes
    return order[np.nonzero(listed)[-1] % count], np.stack([begin, begin + partial.sum(axis=-1), end], axis=-1)


def _work_list(states: TileStates, lists: Array, key_tile: Array, heads: tuple[int, int], order: Order) -> Array:
    """Returns the records of the work tiles of `heads` = (batch, heads), in their order."""
    batch, head = (axis.ravel() for axis in np.indices(heads))
    of_head = batch % lists.shape[0], head % lists.shape[1]  # whose lists each (batch, head) has
    tiles = lists.shape[2]
    longest = int((lists[..., 2] - lists[..., 0]).max())
    at_once = order.heads_at_once(longest, tiles, len(batch))
    records = []
    for first in range(0, len(batch), at_once):
        group = slice(first, first + at_once)
        own = of_head[0][group], of_head[1][group]
        part = np.zeros((tiles, len(batch[group]), RECORD_WORDS), np.int32)
        part[..., 0] = np.arange(tiles)[:, None]
        part[..., 1], part[..., 2] = head[group], batch[group]
        part[..., 3:6] = lists[own].swapaxes(0, 1)
        part[..., 6] = key_tile[own].swapaxes(0, 1)
        visited = states.visited[own[0][0], own[1][0]]
        if order.direction == "forward":
            part, visited = part[::-1], visited[::-1]
        for segment in order.segments(visited, part.shape[1]):
            together = part[segment].reshape(-1, RECORD_WORDS)
            records.append(together[np.argsort(together[:, 3] - together[:, 5], kind="stable")])
    return np.concatenate(records)
