"""Shared tiles: how many blocks share the keys of a query tile, or in a backward the queries of a key tile.

The work tiles that remain after the whole rounds of an sm90 kernel would keep few SMs busy for as long as a whole
round. In parts they take one round of shorter parts; in the backward up to PART_ROUNDS rounds, if the parts of one
would leave many SMs idle. Work tiles that are fewer than the SMs are all in parts. The notes beside the sm90
kernels have the measurements.
"""

from __future__ import annotations

import functools
from typing import Final

from cutlass_py_attn import integers
from cutlass_py_attn.kernels.backward_parts.layout import shared_tile_layout
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import COMBINE_WARPS
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid, Name, ceil_div, inline, maximum, minimum, times
from cutlass_py_attn.launch.names import (
    BATCH,
    GROUP,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_QUERIES,
    NUM_SMS,
    NUM_SPLITS_KEY,
    TOKENS_Q,
    WORK_TILES,
)
from cutlass_py_attn.launch.variants import SPLIT_KV
from cutlass_py_attn.problem.tensors import F32_BYTES, WORD_BYTES

# Of the forward, in key tiles: the least of a part, and the time that a part takes besides.
LEAST_PART_KEY_TILES, PART_KEY_TILES = 2, 2
# Keys times columns of key and value that a block must save in the last round to be worth the kernel that joins parts:
# 10 key tiles of 128 at d 128. Full, 60 shared tiles, one H200: sharing loses 33, 23, 12 and 4 % at 3, 4, 6 and 8 saved
# key tiles, and gains 9 % at 16.
LEAST_SAVED: Final = 10 * 128 * (128 + 128)
# Key tiles that a block must save, besides those that a part takes, if all query tiles are in parts.
LEAST_SAVED_FEW: Final = 4
# The same of the backward, in query tiles.
LEAST_PART_TILES, PART_TILES, LEAST_SAVED_QUERY_TILES = 2, 2, 4
# The most rounds of the backward's parts; more rounds would save less than 2 % of a round. In the forward one round is
# faster: 96 query tiles in 4 parts of 16 key tiles, three rounds, take 1.14 of the time of whole tiles.
PART_ROUNDS: Final = 3
MOST_SPLITS: Final = 1024  # more than the parts of a tile
_KEY_TILES, _QUERY_TILES, _REMAINING_TILES = Name("key_tiles"), Name("query_tiles"), Name("remaining_tiles")
_END_TIME, _FASTEST_SPLITS = Name("end_time"), Name("fastest_splits")


def query_tiles(build: Build) -> dict[str, Expr]:
    """Returns how many query tiles blocks share, and how many blocks share the keys of each.

    These are the tiles that remain after the whole rounds; in variant split_kv all tiles, if they are fewer than the
    SMs. work_tiles: query tiles of all heads; with variable lengths there are no more.
    """
    if build.variant == SPLIT_KV:
        return few_query_tiles(build.tile_m, build.tile_n, is_varlen=build.has("varlen"))
    least = integers.ceil_div(LEAST_SAVED, build.tile_n * (build.columns + build.columns_value))
    saved = _KEY_TILES - _END_TIME + PART_KEY_TILES
    is_faster = (WORK_TILES > NUM_SMS) * (_REMAINING_TILES > 0) * (saved >= least)
    return {
        "work_tiles": num_work_tiles(build.tile_m, is_varlen=build.has("varlen")),
        "key_tiles": ceil_div(NUM_KEYS, build.tile_n),
        **_fastest_parts(_KEY_TILES, LEAST_PART_KEY_TILES, PART_KEY_TILES, rounds=1),
        "num_splits_key": 1 + is_faster * (_FASTEST_SPLITS - 1),
        "shared_tiles": (NUM_SPLITS_KEY > 1) * _REMAINING_TILES,
    }


def few_query_tiles(tile_m: int, tile_n: int, *, is_varlen: bool) -> dict[str, Expr]:
    """Returns `query_tiles` of variant split_kv with this tile: the parts take one round.

    most_splits: parts of each query tile that all SMs compute at the same time
    """
    most_splits = Name("most_splits")
    saves_enough = _KEY_TILES - ceil_div(_KEY_TILES, most_splits) >= PART_KEY_TILES + LEAST_SAVED_FEW
    return {
        "work_tiles": num_work_tiles(tile_m, is_varlen=is_varlen),
        "key_tiles": ceil_div(NUM_KEYS, tile_n),
        "most_splits": maximum(minimum(NUM_SMS // maximum(WORK_TILES, 1), _KEY_TILES // LEAST_PART_KEY_TILES), 1),
        "num_splits_key": 1 + (NUM_SMS > WORK_TILES) * saves_enough * (most_splits - 1),
        "shared_tiles": (NUM_SPLITS_KEY > 1) * WORK_TILES,
    }


def time_of_few(work_tiles: Expr, query_tiles: Expr) -> Expr:
    """Returns the time that the parts of few key tiles take, in query tiles.

    work_tiles: key tiles of all heads, fewer than the SMs. query_tiles: of each
    """
    sizes = {WORK_TILES.name: work_tiles, _QUERY_TILES.name: query_tiles}
    return inline(_END_TIME, sizes | _fastest_parts(_QUERY_TILES, LEAST_PART_TILES, PART_TILES))


def _fastest_parts(
    tiles: Expr, least: int, overhead: int, repeats: Expr = ONE, rounds: int = PART_ROUNDS
) -> dict[str, Expr]:
    """Returns in how many parts each of the work tiles that remain after the whole rounds is the fastest.

    tiles: how many a work tile visits, `repeats` times each
    least: the fewest tiles of a part
    overhead: the time that a part takes besides, in tiles
    rounds: the most rounds of parts

    splits_{n}: parts of each work tile, if the parts of all take n rounds
    end_{n}: tiles that a block then computes after the whole rounds, in units of MOST_SPLITS, plus the parts, so that
        the least one says how many parts are fastest
    end_time, fastest_splits: both of the fastest
    """
    rules: dict[str, Expr] = {"remaining_tiles": WORK_TILES % NUM_SMS}
    ends: list[Expr] = []
    for n in range(1, rounds + 1):
        splits = Name(f"splits_{n}")
        most = minimum(n * NUM_SMS // maximum(_REMAINING_TILES, 1), tiles // least)
        rules[splits.name] = maximum(minimum(most, MOST_SPLITS - 1), 1)
        part = repeats * ceil_div(tiles, splits) + overhead
        end = Name(f"end_{n}")
        rules[end.name] = ceil_div(_REMAINING_TILES * splits, NUM_SMS) * part * MOST_SPLITS + splits
        ends.append(end)
    rules["fastest_end"] = functools.reduce(minimum, ends)
    rules["end_time"] = Name("fastest_end") // MOST_SPLITS
    rules["fastest_splits"] = Name("fastest_end") % MOST_SPLITS
    return rules


def num_work_tiles(tile_m: int, *, is_varlen: bool) -> Expr:
    """Returns the query tiles of all heads; with variable lengths at least as many."""
    of_longest = ceil_div(NUM_QUERIES, tile_m) * BATCH
    if not is_varlen:
        return of_longest * NUM_HEADS
    return minimum(of_longest, TOKENS_Q // tile_m + BATCH) * NUM_HEADS


def key_tiles(build: Build) -> dict[str, Expr]:
    """Returns how many of the last key tiles blocks share, and how many blocks share the queries of each.

    work_tiles: key tiles of all heads
    """
    group = GROUP if build.has("grouped") else ONE
    is_faster = (_REMAINING_TILES > 0) * (group * _QUERY_TILES - _END_TIME >= LEAST_SAVED_QUERY_TILES)
    return {
        "work_tiles": ceil_div(NUM_KEYS, build.tile_n) * NUM_HEADS_KEY * BATCH,
        "query_tiles": ceil_div(NUM_QUERIES, build.tile_m),
        **_fastest_parts(_QUERY_TILES, LEAST_PART_TILES, PART_TILES, group),
        "num_splits_query": 1 + is_faster * (_FASTEST_SPLITS - 1),
        "shared_key_tiles": (Name("num_splits_query") > 1) * _REMAINING_TILES,
    }


def sums_bytes(build: Build) -> Expr:
    """Returns the bytes of what the parts of shared key tiles are added to."""
    return times(Name("shared_key_tiles"), shared_tile_layout(build).total * WORD_BYTES)


def combine_grid(build: Build) -> Grid:
    """Returns the grid of the kernel that joins the parts of shared query tiles: a warp for each row."""
    return times(Name("shared_tiles"), build.tile_m // COMBINE_WARPS), ONE, ONE


def parts_bytes(build: Build) -> dict[str, Expr]:
    """Returns the bytes of the partial results of shared query tiles by their names."""
    rows = Name("shared_tiles") * NUM_SPLITS_KEY * (build.tile_m * F32_BYTES)
    return {"partial_output": times(rows, build.columns_value), "partial_logsumexp": rows}
