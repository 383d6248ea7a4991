"""Schedule: which tiles a block visits and in which order, as plain integer functions of a mask's band.

Every function takes Python ints or traced integers; tests run them on ints, kernels trace them.
"""

from __future__ import annotations

from typing import Any

from cutlass_py_attn.masks import Band
from cutlass_py_attn.parts.integers import ceil_div, choose, larger, smaller

L2_SHARE = 32 << 20  # bytes of the keys and values that blocks at work should read together
TILES_AT_ONCE = 12  # of each head, by the blocks at work: they read the same keys and values, at about the same time
LENGTHS_AT_ONCE = 4  # of query tiles of unequal length, at the least: the short ones move bytes, the long ones multiply
LATE_ROUNDS = 2  # of two items a block, that are dealt out singly at the end


def key_tile_start(band: Band, query_tile: Any, tile_m: int, tile_n: int) -> Any:
    """First key tile that some row of `query_tile` may see."""
    return band.key_start(query_tile * tile_m) // tile_n


def key_tile_end(band: Band, query_tile: Any, tile_m: int, tile_n: int) -> Any:
    """One past the last key tile that some row of `query_tile` sees; 0 where no row sees a key.

    The forward visits [key_tile_start, key_tile_end), nothing where the end is not behind the start.
    """
    first = query_tile * tile_m
    last = smaller(first + tile_m, band.num_queries) - 1
    some = first < band.num_queries
    if band.form == "local":  # all rows of a tile may lie below the last row that sees a key
        some = some & (band.key_start(first) < band.num_keys)
    return choose(some, ceil_div(band.key_end(last), tile_n), 0)


def whole_key_tiles(band: Band, query_tile: Any, tile_m: int, tile_n: int) -> tuple[Any, Any]:
    """Key tiles [first, end) that every row of `query_tile` sees completely: they need no mask.

    Rows past the last query do not count.
    """
    inside = band.num_keys // tile_n
    if band.form == "full":
        return query_tile * 0, inside
    end = smaller(inside, larger(query_tile * tile_m + band.high + 1, 0) // tile_n)
    if band.form == "causal":
        return query_tile * 0, end
    last = smaller((query_tile + 1) * tile_m, band.num_queries) - 1
    return ceil_div(larger(last + band.low, 0), tile_n), end


def query_tile_start(band: Band, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """First query tile that sees a key of `key_tile`; the backward visits [query_tile_start, query_tile_end).

    The number of query tiles when no query sees one: the first that would may lie in the last tile's padding.
    """
    first_key = key_tile * tile_n
    first = band.query_start(first_key)
    some = (first < band.num_queries) & (first_key < band.num_keys)
    return choose(some, first // tile_m, ceil_div(band.num_queries, tile_m))


def query_tile_end(band: Band, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """One past the last query tile that sees a key of `key_tile`."""
    last_key = smaller((key_tile + 1) * tile_n, band.num_keys) - 1
    return ceil_div(band.query_end(last_key), tile_m)


def some_query_tiles(band: Band, key_tile: Any, tile_m: int, tile_n: int) -> tuple[Any, Any]:
    """The query tiles that see a key of `key_tile`, or else one that sees none, be it a tile of nobody's."""
    last = larger(ceil_div(band.num_queries, tile_m), 1) - 1
    first = smaller(query_tile_start(band, key_tile, tile_m, tile_n), last)
    return first, larger(query_tile_end(band, key_tile, tile_m, tile_n), first + 1)


def needs_mask(band: Band, query_tile: Any, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Whether tile (query_tile, key_tile) has a pair that is not seen, rows past the end aside."""
    first, end = whole_key_tiles(band, query_tile, tile_m, tile_n)
    beyond = key_tile >= end
    return beyond | (key_tile < first) if band.form == "local" else beyond


def turn(band: Band, query_tile: Any, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """How many key tiles add to the gradient of `query_tile` before `key_tile` does, when they take turns from
    the last key tile to the first. Below 0 for key tiles behind the last that it sees."""
    return key_tile_end(band, query_tile, tile_m, tile_n) - 1 - key_tile


def share_of_tiles(first: Any, end: Any, split: Any, splits: Any) -> tuple[Any, Any]:
    """The key tiles [first, end) that block `split` of `splits` walks: shares differ by one tile at most."""
    count = larger(end - first, 0)
    return first + count * split // splits, first + count * (split + 1) // splits


def heads_at_once(num_keys: Any, bytes_of_key: int) -> Any:
    """Heads whose keys and values fit the L2 cache's share together; at least one."""
    return larger(L2_SHARE // bytes_of_key // larger(num_keys, 1), 1)


def heads_dealt(fitting: Any, heads: Any, blocks: Any) -> Any:
    """Of `heads`, those whose tiles are dealt out at once: the `fitting` ones, in multiples of a twelfth of the blocks,
    so that a turn of all blocks takes as many tiles of each; all where few would be left."""
    few = larger(blocks // TILES_AT_ONCE, 1)
    found = (fitting + few - 1) // few * few
    return choose(2 * heads <= 3 * found, larger(heads, 1), found)


def heads_counted(fitting: Any, heads: Any, tiles: Any, blocks: Any) -> Any:
    """Of `heads`, those whose tiles a counter deals out at once: the `fitting` ones or more, so that every group of
    heads has half as many tiles again as there are blocks. With fewer, the longest tiles of the last head start when
    too little is left to hide them."""
    least = larger(fitting, ceil_div(3 * blocks // 2, larger(tiles, 1)))
    return ceil_div(heads, larger(heads // least, 1))


def longest_first(number: Any, tiles: Any, heads: Any, at_once: Any) -> tuple[Any, Any]:
    """(query tile, head) of item `number` where later tiles take longer: the last tiles of `at_once` heads come first,
    then the tiles before them, then the next heads; blocks at work read few heads."""
    group = number // (at_once * tiles)
    within = number - group * (at_once * tiles)
    here = smaller(at_once, heads - group * at_once)
    return tiles - 1 - within // here, group * at_once + within % here


def mixed_heads(fitting: Any, blocks: Any) -> Any:
    """Of the `fitting` heads as many as leave blocks that work at the same time tiles of several lengths."""
    return smaller(fitting, larger(blocks // LENGTHS_AT_ONCE, 1))


def longest_of_groups(number: Any, tiles: Any, heads: Any, at_once: Any) -> tuple[Any, Any]:
    """`longest_first`, but what is left over goes with the last whole group where it is less than two thirds of one."""
    groups = larger((heads + at_once // 3) // at_once, 1)
    group = smaller(number // (at_once * tiles), groups - 1)
    within = number - group * (at_once * tiles)
    here = choose(group == groups - 1, heads - group * at_once, at_once)
    return tiles - 1 - within // here, group * at_once + within % here


def paired(number: Any, tiles: Any, heads: Any, blocks: Any) -> tuple[Any, Any]:
    """(query tile, head) of item `number` where a block takes two tiles of a head in turn, a long one and the short one
    that makes up for it: all blocks work on the next few heads, whose keys and values the L2 cache holds.

    What would be the last rounds of pairs is dealt out singly, the longest tiles first, and so is everything where
    tiles are odd in number.
    """
    half = larger(tiles // 2, 1)
    rounds = choose(tiles % 2 == 0, larger(heads * half // blocks - LATE_ROUNDS, 0), 0)
    turn = number // blocks
    pair = turn // 2 * blocks + _place(turn, number - turn * blocks, blocks)
    outer = pair % half
    # Every second block begins with the short tile, for the same reason as in `mixed_heads`.
    tile = choose((turn + pair) % 2 == 0, tiles - 1 - outer, outer)
    late_tile, late_head = _late(number - 2 * rounds * blocks, tiles, heads, rounds * blocks)
    is_early = turn < 2 * rounds
    return choose(is_early, tile, late_tile), choose(is_early, pair // half, late_head)


def _late(number: Any, tiles: Any, heads: Any, done: Any) -> tuple[Any, Any]:
    """(query tile, head) of the items behind the `done` pairs, the longest first: those of the first head left are its
    middle tiles."""
    half = larger(tiles // 2, 1)
    first, taken = done // half, done % half
    left = larger(heads - first, 1)
    others = larger(left - 1, 1)
    middle = number - taken * (left - 1)
    last = middle - (tiles - 2 * taken) * left
    is_middle = (middle >= 0) & (last < 0)
    # Tiles before and behind the middle ones are of all heads but the first.
    outer = choose(middle < 0, number, last)
    longest = choose(middle < 0, tiles - 1, taken - 1)
    tile = choose(is_middle, tiles - 1 - taken - middle // left, longest - outer // others)
    return tile, first + choose(is_middle, middle % left, 1 + outer % others)


def key_tile_of(form: str, number: Any, tiles: Any, heads: Any, fitting: Any) -> tuple[Any, Any]:
    """(key tile, head) of item `number` of the backward, `fitting` heads at once: the longest come first, for the first
    keys are seen by the most queries."""
    if form == "full":
        return number % tiles, number // tiles
    tile, head = longest_first(number, tiles, heads, smaller(fitting, heads))
    return tiles - 1 - tile, head


def key_tile_in_turn(number: Any, tiles: Any, heads: Any, fitting: Any) -> tuple[Any, Any]:
    """(key tile, head) of item `number` where key tiles add to a query tile in turn, from the last to the first.

    A block on its way through the query tiles is then behind those that started before it, and hardly waits. Blocks
    are spread over the queries, so that no more than half of the fitting heads stay in the cache.
    """
    return longest_first(number, tiles, heads, smaller(larger(fitting // 2, 1), heads))


def next_of_heads(number: Any, tiles: Any, blocks: Any) -> Any:
    """The item behind `number` where a block takes all key tiles of a head, and then those of the head that is as many
    further as there are blocks; items are numbered by heads."""
    following = number + 1
    return following + choose(following % tiles == 0, (blocks - 1) * tiles, 0)


def turns(total: Any, block: Any, blocks: Any) -> Any:
    """How many of `total` items a block takes."""
    whole = total // blocks
    return whole + choose(_place(whole, block, blocks) < total - whole * blocks, 1, 0)


def number_of(turn: Any, block: Any, blocks: Any) -> Any:
    """The item that a block takes in its turn: as many as there are blocks are dealt out forwards, the next of them
    backwards, so that who had the longest of the one has the shortest of the other."""
    return turn * blocks + _place(turn, block, blocks)


def _place(turn: Any, block: Any, blocks: Any) -> Any:
    return choose(turn % 2 == 0, block, blocks - 1 - block)
