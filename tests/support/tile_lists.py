"""Tile lists in NumPy: what kernels/tile_lists must write, from the ranges of keys that each query sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.launch import tile_lists
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.tensors import RANGE_WORDS, Shape

Array = npt.NDArray[Any]


class TileStates(NamedTuple):
    """What a mask is in each tile, as (batch, heads, query tiles, key tiles) bool; both first axes may have size 1.

    visited: whether a query sees a key; whole: whether each query sees each key. Rows past the last query do not count,
    keys past the last are not seen.
    """

    visited: Array
    whole: Array


def device_ranges(ranges: KeyRanges, num_keys: int) -> Array:
    """Returns the array `key_ranges`."""
    ranges = ranges.within(num_keys)
    *heads, queries = ranges.key_start.shape
    padded = np.zeros((*heads, round_up(queries, tile_lists.ROWS_PADDING), RANGE_WORDS), np.int32)
    padded[:, :, :queries] = np.stack([ranges.key_start, ranges.key_end], axis=-1)
    return padded


def tile_states(seen: Array, tile_m: int, tile_n: int) -> TileStates:
    """Returns the states of all tiles of (tile_m, tile_n).

    seen: (batch, heads, queries, keys) bool
    """
    *heads, queries, num_keys = seen.shape
    query_tiles, key_tiles = ceil_div(queries, tile_m), ceil_div(num_keys, tile_n)
    some, every = (np.full((*heads, query_tiles * tile_m, key_tiles * tile_n), past) for past in (False, True))
    for padded in (some, every):
        padded[..., :queries, num_keys:] = False
        padded[..., :queries, :num_keys] = seen
    parts = [padded.reshape(*heads, query_tiles, tile_m, key_tiles, tile_n) for padded in (some, every)]
    return TileStates(parts[0].any(axis=(3, 5)), parts[1].all(axis=(3, 5)))


def of_work_tiles(states: TileStates, build: Build, group: int) -> TileStates:
    """Returns the states with work tiles before the tiles that they visit; those of a group of a backward together."""
    if build.kind == "forward":
        return states
    batch, heads, *tiles = states.visited.shape
    if heads > 1:
        visited, whole = (state.reshape(batch, heads // group, group, *tiles) for state in states)
        states = TileStates(visited.any(axis=2), whole.all(axis=2))
    return TileStates(*(state.swapaxes(2, 3) for state in states))


def list_of(build: Build, visited: Array, whole: Array) -> tuple[list[int], int]:
    """Returns the tiles of a list in the order of the visit, and how many of them are partial."""
    order = range(len(visited))[:: -1 if build.kind == "forward" else 1]
    partial = [tile for tile in order if visited[tile] and not whole[tile]]
    listed = [*partial, *(tile for tile in order if visited[tile] and whole[tile])]
    return (listed, len(partial)) if listed else ([0], 1)


def records(build: Build, shape: Shape, states: TileStates, num_sms: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Returns the record of every work tile without the place of its list, with the tiles of the list, in order.

    A record is (tile, head, batch, partial tiles, tiles, key_tile). states: of `of_work_tiles`
    """
    lists_batch, lists_heads, tiles, _ = states.visited.shape
    heads = shape.num_heads if build.kind == "forward" else shape.num_heads_key
    pairs = shape.batch * heads
    sizes = SimpleNamespace(num_queries=shape.num_queries, num_keys=shape.num_keys)
    together = tile_lists.pairs_together(build, sizes, tiles, pairs, num_sms)
    sorted_records: list[tuple[int, int, tuple[int, ...], list[int]]] = []
    for number in range(pairs * tiles):
        of = tile_lists.slice_of(number, tiles, pairs, together)
        batch, head = divmod(of.first_pair + of.pair, heads)
        tile = tile_lists.tile_at(build, of.first_place + of.place, tiles)
        at = batch % lists_batch, head % lists_heads, tile
        listed, partial = list_of(build, states.visited[at], states.whole[at])
        is_empty = not states.visited[at].any()
        key_tile = listed[0] if build.kind == "forward" else tile
        key_tile = tile_lists.hidden_key_tile(build) if is_empty else key_tile
        last = of.first + of.places * of.pairs
        length = len(listed) if tile_lists.is_sorted(build, last, pairs * tiles, num_sms) else 0
        sorted_records.append((of.first, -length, (tile, head, batch, partial, len(listed), key_tile), listed))
    sorted_records.sort(key=lambda record: record[:2])
    return [record[2:] for record in sorted_records]


def written_records(work_list: Array, tile_entries: Array) -> list[tuple[tuple[int, ...], list[int]]]:
    """Returns the same from the arrays that kernels wrote."""
    return [
        ((tile, head, batch, partial_end - begin, end - begin, key_tile), tile_entries[begin:end].tolist())
        for tile, head, batch, begin, partial_end, end, key_tile, _ in work_list.tolist()
    ]
