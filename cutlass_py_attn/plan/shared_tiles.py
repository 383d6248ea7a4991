"""Shared tiles: how many blocks share the keys of a query tile, or in a backward the queries of a key tile.

The work tiles that remain after the whole rounds of an sm90 kernel would keep few SMs busy for as long as a whole
round. In parts they take one round of shorter parts; in the backward up to PART_ROUNDS rounds, if the parts of one
would leave many SMs idle. Work tiles that are fewer than the SMs are all in parts. The notes beside the sm90
kernels have the measurements.
"""

from __future__ import annotations

import functools
from typing import Final

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.entry_points import COMBINE_WARPS
from cutlass_py_attn.plan.expressions import Expression, Grid, evaluate, times
from cutlass_py_attn.plan.sm90_smem import shared_tile_layout
from cutlass_py_attn.plan.variants import SPLIT_KV
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


def query_tiles(build: Build) -> dict[str, Expression]:
    """Returns how many query tiles blocks share, and how many blocks share the keys of each.

    These are the tiles that remain after the whole rounds; in variant split_kv all tiles, if they are fewer than the
    SMs. work_tiles: query tiles of all heads; with variable lengths there are no more.
    """
    if build.variant == SPLIT_KV:
        return few_query_tiles(build.tile_m, build.tile_n, is_varlen=build.has("varlen"))
    least = ceil_div(LEAST_SAVED, build.tile_n * (build.columns + build.columns_value))
    saved = f"key_tiles - end_time + {PART_KEY_TILES}"
    is_faster = f"(work_tiles > num_sms) * (remaining_tiles > 0) * ({saved} >= {least})"
    return {
        "work_tiles": num_work_tiles(build.tile_m, is_varlen=build.has("varlen")),
        "key_tiles": f"ceil_div(num_keys, {build.tile_n})",
        **_fastest_parts("key_tiles", LEAST_PART_KEY_TILES, PART_KEY_TILES, rounds=1),
        "num_splits_key": f"1 + {is_faster} * (fastest_splits - 1)",
        "shared_tiles": "(num_splits_key > 1) * remaining_tiles",
    }


def few_query_tiles(tile_m: int, tile_n: int, *, is_varlen: bool) -> dict[str, Expression]:
    """Returns `query_tiles` of variant split_kv with this tile: the parts take one round.

    most_splits: parts of each query tile that all SMs compute at the same time
    """
    parts = f"max(min(div(num_sms, max(work_tiles, 1)), div(key_tiles, {LEAST_PART_KEY_TILES})), 1)"
    saves_enough = f"key_tiles - ceil_div(key_tiles, most_splits) >= {PART_KEY_TILES + LEAST_SAVED_FEW}"
    return {
        "work_tiles": num_work_tiles(tile_m, is_varlen=is_varlen),
        "key_tiles": f"ceil_div(num_keys, {tile_n})",
        "most_splits": parts,
        "num_splits_key": f"1 + (num_sms > work_tiles) * ({saves_enough}) * (most_splits - 1)",
        "shared_tiles": "(num_splits_key > 1) * work_tiles",
    }


@functools.lru_cache(maxsize=1024)  # several tiles of a problem ask for the same
def time_of_few(work_tiles: int, query_tiles: int, num_sms: int) -> int:
    """Returns the time that the parts of few key tiles take, in query tiles.

    work_tiles: key tiles of all heads, fewer than num_sms, the multiprocessors. query_tiles: of each
    """
    values = {"work_tiles": work_tiles, "num_sms": num_sms, "query_tiles": query_tiles}
    for name, expression in _fastest_parts("query_tiles", LEAST_PART_TILES, PART_TILES).items():
        values[name] = evaluate(expression, values)
    return values["end_time"]


def _fastest_parts(
    tiles: str, least: int, overhead: int, repeats: str = "1", rounds: int = PART_ROUNDS
) -> dict[str, Expression]:
    """Returns in how many parts each of the work tiles that remain after the whole rounds is the fastest.

    tiles: name of the number of tiles that a work tile visits, `repeats` times each
    least: the fewest tiles of a part
    overhead: the time that a part takes besides, in tiles
    rounds: the most rounds of parts

    splits_{n}: parts of each work tile, if the parts of all take n rounds
    end_{n}: tiles that a block then computes after the whole rounds, in units of MOST_SPLITS, plus the parts, so that
        the least one says how many parts are fastest
    end_time, fastest_splits: both of the fastest
    """
    found: dict[str, Expression] = {"remaining_tiles": "mod(work_tiles, num_sms)"}
    fastest = "end_1"
    for n in range(1, rounds + 1):
        splits = f"div({n} * num_sms, max(remaining_tiles, 1)), div({tiles}, {least})"
        found[f"splits_{n}"] = f"max(min(min({splits}), {MOST_SPLITS - 1}), 1)"
        part = f"{repeats} * ceil_div({tiles}, splits_{n}) + {overhead}"
        taken = f"ceil_div(remaining_tiles * splits_{n}, num_sms) * ({part})"
        found[f"end_{n}"] = f"{taken} * {MOST_SPLITS} + splits_{n}"
        fastest = f"min({fastest}, end_{n})" if n > 1 else fastest
    found["fastest_end"] = fastest
    found["end_time"] = f"div(fastest_end, {MOST_SPLITS})"
    found["fastest_splits"] = f"mod(fastest_end, {MOST_SPLITS})"
    return found


def num_work_tiles(tile_m: int, *, is_varlen: bool) -> Expression:
    """Returns the query tiles of all heads; with variable lengths at least as many."""
    of_longest = f"ceil_div(num_queries, {tile_m}) * batch"
    if not is_varlen:
        return f"{of_longest} * num_heads"
    return f"min({of_longest}, div(tokens_q, {tile_m}) + batch) * num_heads"


def key_tiles(build: Build) -> dict[str, Expression]:
    """Returns how many of the last key tiles blocks share, and how many blocks share the queries of each.

    work_tiles: key tiles of all heads
    """
    group = "group" if build.has("grouped") else "1"
    is_faster = f"(remaining_tiles > 0) * ({group} * query_tiles - end_time >= {LEAST_SAVED_QUERY_TILES})"
    return {
        "work_tiles": f"ceil_div(num_keys, {build.tile_n}) * num_heads_key * batch",
        "query_tiles": f"ceil_div(num_queries, {build.tile_m})",
        **_fastest_parts("query_tiles", LEAST_PART_TILES, PART_TILES, group),
        "num_splits_query": f"1 + {is_faster} * (fastest_splits - 1)",
        "shared_key_tiles": "(num_splits_query > 1) * remaining_tiles",
    }


def sums_bytes(build: Build) -> Expression:
    """Returns the bytes of what the parts of shared key tiles are added to."""
    return times("shared_key_tiles", shared_tile_layout(build).total * WORD_BYTES)


def combine_grid(build: Build) -> Grid:
    """Returns the grid of the kernel that joins the parts of shared query tiles: a warp for each row."""
    return times("shared_tiles", build.tile_m // COMBINE_WARPS), "1", "1"


def parts_bytes(build: Build) -> dict[str, Expression]:
    """Returns the bytes of the partial results of shared query tiles by their names."""
    rows = f"shared_tiles * num_splits_key * {build.tile_m * F32_BYTES}"
    return {"partial_output": times(rows, build.columns_value), "partial_logsumexp": rows}
