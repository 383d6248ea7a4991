"""Tile order: which tiles a block visits and in which order, as plain integer functions of a mask's band.

Every function takes Python ints or traced integers: tests call it with ints, kernels trace it.

    query_tile, key_tile    index of a tile along the queries or the keys of a sequence
    number                  index of a work tile: one query tile (forward) or key tile (backward) of one head
    tiles                   query tiles or key tiles of one head
    blocks                  persistent thread blocks, or clusters of them, that share the work tiles
    round                   each block computes one work tile a round; blocks * round work tiles precede a round
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass_py_attn.integers import ceil_div, choose, larger, smaller
from cutlass_py_attn.problem.masks import Band, Form

L2_BYTES = 32 << 20  # of keys and values that all blocks should read at the same time
TILES_PER_HEAD = 12  # work tiles of one head in a round: they read the same keys and values at about the same time
MIXED_LENGTHS = 4  # least query tiles of unequal length in a round: short ones load much, long ones compute much
SINGLE_ROUNDS = 2  # rounds of pairs at the end whose work tiles are assigned one by one


def key_tile_start(band: Band, query_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Returns the first key tile that some row of `query_tile` may see."""
    return band.key_start(query_tile * tile_m) // tile_n


def key_tile_end(band: Band, query_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Returns one past the last key tile that some row of `query_tile` sees; 0 if no row sees a key.

    The forward visits [key_tile_start, key_tile_end), and nothing if the end is not above the start.
    """
    first = query_tile * tile_m
    last = smaller(first + tile_m, band.num_queries) - 1
    some = first < band.num_queries
    if band.form.has_left:  # all rows of a tile may be below the last row that sees a key
        some = some & (band.key_start(first) < band.num_keys)
    return choose(some, ceil_div(band.key_end(last), tile_n), 0)


def whole_key_tiles(band: Band, query_tile: Any, tile_m: int, tile_n: int) -> tuple[Any, Any]:
    """Returns the key tiles [first, end) that every row of `query_tile` sees completely: they need no mask.

    Rows past the last query do not count.
    """
    inside = band.num_keys // tile_n
    if band.form.sees_all:
        return query_tile * 0, inside
    end = smaller(inside, larger(query_tile * tile_m + band.high + 1, 0) // tile_n)
    if band.form.grows:
        return query_tile * 0, end
    last = smaller((query_tile + 1) * tile_m, band.num_queries) - 1
    return ceil_div(larger(last + band.low, 0), tile_n), end


class KeyTileSpan(NamedTuple):
    """Key tiles [first, end), and whether they are whole: none of them needs a mask. Others may need one."""

    first: Any
    end: Any
    is_whole: bool


def key_tile_spans(
    band: Band, query_tile: Any, first: Any, last: Any, tile_m: int, tile_n: int, *, splits: bool
) -> tuple[KeyTileSpan, ...]:
    """Returns the key tiles [first, last) of `query_tile` as spans: tiles that every row sees completely, and others.

    last: the last key tile, which is in no span because the forward visits it before its loops. The spans are in the
        order of the visit, and each is visited from its last tile to its first. A span may have no tile.
    splits: whether tiles that every row sees completely are a span of their own. Else all key tiles are one span that
        is not whole.
    """
    if not splits:
        return (KeyTileSpan(first, last, is_whole=False),)
    if band.form.sees_all:  # only the last key tile may have keys past the end
        return (KeyTileSpan(first, last, is_whole=True),)
    whole_first, whole_end = whole_key_tiles(band, query_tile, tile_m, tile_n)
    end = smaller(larger(whole_end, first), last)
    if band.form.grows:
        return KeyTileSpan(end, last, is_whole=False), KeyTileSpan(first, end, is_whole=True)
    start = smaller(larger(whole_first, first), end)
    whole = KeyTileSpan(start, end, is_whole=True)
    return KeyTileSpan(end, last, is_whole=False), whole, KeyTileSpan(first, start, is_whole=False)


def query_tile_start(band: Band, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Returns the first query tile that sees a key of `key_tile`; the number of query tiles if none does.

    The backward visits [query_tile_start, query_tile_end).
    """
    first_key = key_tile * tile_n
    first = band.query_start(first_key)
    # The first query that would see the key may be in the padding of the last tile.
    some = (first < band.num_queries) & (first_key < band.num_keys)
    return choose(some, first // tile_m, ceil_div(band.num_queries, tile_m))


def query_tile_end(band: Band, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Returns one past the last query tile that sees a key of `key_tile`."""
    last_key = smaller((key_tile + 1) * tile_n, band.num_keys) - 1
    return ceil_div(band.query_end(last_key), tile_m)


def nonempty_query_tiles(band: Band, key_tile: Any, tile_m: int, tile_n: int) -> tuple[Any, Any]:
    """Returns the query tiles [first, end) that see a key of `key_tile`; if none does, one masked query tile."""
    last = larger(ceil_div(band.num_queries, tile_m), 1) - 1
    first = smaller(query_tile_start(band, key_tile, tile_m, tile_n), last)
    return first, larger(query_tile_end(band, key_tile, tile_m, tile_n), first + 1)


def needs_mask(band: Band, query_tile: Any, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Returns whether tile (query_tile, key_tile) has a masked pair; rows past the last query do not count."""
    first, end = whole_key_tiles(band, query_tile, tile_m, tile_n)
    beyond = key_tile >= end
    return beyond | (key_tile < first) if band.form.has_left else beyond


def preceding_key_tiles(band: Band, query_tile: Any, key_tile: Any, tile_m: int, tile_n: int) -> Any:
    """Returns how many key tiles add to dQ of `query_tile` before `key_tile` does, in a deterministic backward.

    The order is from the last key tile to the first. Below 0 for key tiles after the last that the query tile sees.
    """
    return key_tile_end(band, query_tile, tile_m, tile_n) - 1 - key_tile


def tiles_of_split(first: Any, end: Any, split: Any, splits: Any) -> tuple[Any, Any]:
    """Returns the key tiles [first, end) of one of `splits` splits: their numbers differ by at most one tile."""
    count = larger(end - first, 0)
    return first + count * split // splits, first + count * (split + 1) // splits


def heads_in_l2(num_keys: Any, bytes_of_key: int) -> Any:
    """Returns how many heads have keys and values that fit L2_BYTES together; at least one."""
    return larger(L2_BYTES // bytes_of_key // larger(num_keys, 1), 1)


def static_group_heads(fitting: Any, heads: Any, blocks: Any) -> Any:
    """Returns the heads of one group, whose work tiles are ordered together, under a static assignment.

    fitting: heads whose keys and values the L2 cache holds

    The group has the fitting heads, rounded up to a multiple of a twelfth of the blocks, so that each round has equally
    many tiles of every head. All heads are one group if few would remain for a second.
    """
    few = larger(blocks // TILES_PER_HEAD, 1)
    found = (fitting + few - 1) // few * few
    return choose(2 * heads <= 3 * found, larger(heads, 1), found)


def dynamic_group_heads(fitting: Any, heads: Any, tiles: Any, blocks: Any) -> Any:
    """Returns the heads of one group, whose work tiles are ordered together, when a counter assigns work tiles.

    fitting: heads whose keys and values the L2 cache holds

    Every group has at least half as many tiles again as there are blocks. With fewer, the longest tiles of the last
    head start when too little other work is left to hide them.
    """
    least = larger(fitting, ceil_div(3 * blocks // 2, larger(tiles, 1)))
    return ceil_div(heads, larger(heads // least, 1))


def longest_first(number: Any, tiles: Any, heads: Any, group_heads: Any) -> tuple[Any, Any]:
    """Returns (query tile, head) of work tile `number` if later query tiles take longer.

    The last tiles of the heads of one group come first, then the tiles before them, then the next group. Blocks that
    compute at the same time read few heads.
    """
    group = number // (group_heads * tiles)
    within = number - group * (group_heads * tiles)
    here = smaller(group_heads, heads - group * group_heads)
    return tiles - 1 - within // here, group * group_heads + within % here


def heads_of_mixed_lengths(fitting: Any, blocks: Any) -> Any:
    """Returns at most `fitting` heads, so few that a round has tiles of several lengths."""
    return smaller(fitting, larger(blocks // MIXED_LENGTHS, 1))


def longest_first_in_groups(number: Any, tiles: Any, heads: Any, group_heads: Any) -> tuple[Any, Any]:
    """Returns (query tile, head) as `longest_first`, but with a last group of up to 5/3 of the heads of a group.

    The remaining heads join the last whole group if they are less than two thirds of a group.
    """
    groups = larger((heads + group_heads // 3) // group_heads, 1)
    group = smaller(number // (group_heads * tiles), groups - 1)
    within = number - group * (group_heads * tiles)
    here = choose(group == groups - 1, heads - group * group_heads, group_heads)
    return tiles - 1 - within // here, group * group_heads + within % here


def long_short_pairs(number: Any, tiles: Any, heads: Any, blocks: Any) -> tuple[Any, Any]:
    """Returns (query tile, head) of work tile `number` if a block computes pairs of tiles of one head.

    A pair has a long tile and the short tile that complements it. All blocks compute the next few heads, whose keys and
    values the L2 cache holds. The tiles of the last rounds are assigned one by one, the longest first; so are all tiles
    if a head has an odd number of them.
    """
    half = larger(tiles // 2, 1)
    rounds = choose(tiles % 2 == 0, larger(heads * half // blocks - SINGLE_ROUNDS, 0), 0)
    round_ = number // blocks
    pair = round_ // 2 * blocks + _snake(round_, number - round_ * blocks, blocks)
    outer = pair % half
    # Every second block begins with the short tile, so that a round has tiles of both lengths.
    tile = choose((round_ + pair) % 2 == 0, tiles - 1 - outer, outer)
    single_tile, single_head = _after_pairs(number - 2 * rounds * blocks, tiles, heads, rounds * blocks)
    is_pair = round_ < 2 * rounds
    return choose(is_pair, tile, single_tile), choose(is_pair, pair // half, single_head)


def _after_pairs(number: Any, tiles: Any, heads: Any, pairs: Any) -> tuple[Any, Any]:
    """Returns (query tile, head) of the work tiles that follow `pairs` pairs, the longest first.

    The pairs have used the outer tiles of the first remaining head, so only its middle tiles remain.
    """
    half = larger(tiles // 2, 1)
    first, used = pairs // half, pairs % half
    left = larger(heads - first, 1)
    others = larger(left - 1, 1)
    middle = number - used * (left - 1)
    last = middle - (tiles - 2 * used) * left
    is_middle = (middle >= 0) & (last < 0)
    # All heads but the first have tiles outside of the middle ones.
    outer = choose(middle < 0, number, last)
    longest = choose(middle < 0, tiles - 1, used - 1)
    tile = choose(is_middle, tiles - 1 - used - middle // left, longest - outer // others)
    return tile, first + choose(is_middle, middle % left, 1 + outer % others)


def key_tile_at(form: Form, number: Any, tiles: Any, heads: Any, group_heads: Any) -> tuple[Any, Any]:
    """Returns (key tile, head) of work tile `number` of the backward.

    Under a mask the longest come first: most queries see the first keys. `group_heads` heads are one group.
    """
    if form.sees_all:
        return number % tiles, number // tiles
    tile, head = longest_first(number, tiles, heads, smaller(group_heads, heads))
    return tiles - 1 - tile, head


def deterministic_key_tile_at(number: Any, tiles: Any, heads: Any, fitting: Any) -> tuple[Any, Any]:
    """Returns (key tile, head) of work tile `number` of a deterministic backward: from the last key tile to the first.

    A block then follows the blocks that started before it through the query tiles, and hardly waits for them. Blocks
    are spread over the queries, so the L2 cache holds no more than half of the `fitting` heads.
    """
    return longest_first(number, tiles, heads, smaller(larger(fitting // 2, 1), heads))


def next_per_head_tile(number: Any, tiles: Any, blocks: Any) -> Any:
    """Returns the work tile after `number` with one block per head; work tiles are numbered head by head.

    A block computes all key tiles of a head, then those of the head that is `blocks` heads further.
    """
    following = number + 1
    return following + choose(following % tiles == 0, (blocks - 1) * tiles, 0)


def num_rounds(total: Any, block: Any, blocks: Any) -> Any:
    """Returns how many of `total` work tiles a block computes."""
    whole = total // blocks
    return whole + choose(_snake(whole, block, blocks) < total - whole * blocks, 1, 0)


def work_tile_of_round(round_: Any, block: Any, blocks: Any) -> Any:
    """Returns the work tile of a block in a round.

    Even rounds assign work tiles in the order of the blocks, odd rounds in reverse, so that the block with the longest
    tile of one round has the shortest of the next.
    """
    return round_ * blocks + _snake(round_, block, blocks)


class BlockPlace(NamedTuple):
    """A block in a grid whose first row is persistent: its index in a row and their number, its row and their number.

    The persistent blocks share all rounds but the last `rows - 1`. A block of another row computes one work tile.
    """

    block: Any
    blocks: Any
    row: Any
    rows: Any


def num_work_tiles_at(total: Any, place: BlockPlace) -> Any:
    """Returns how many of `total` work tiles the block at a place computes."""
    before = _rounds_before_last(total, place) * place.blocks
    persistent = num_rounds(smaller(total, before), place.block, place.blocks)
    return choose(place.row == 0, persistent, choose(_last_work_tile(total, place) < total, 1, 0))


def work_tile_at(total: Any, round_: Any, place: BlockPlace) -> Any:
    """Returns the work tile of the block at a place in a round."""
    persistent = work_tile_of_round(round_, place.block, place.blocks)
    return choose(place.row == 0, persistent, _last_work_tile(total, place))


def _last_work_tile(total: Any, place: BlockPlace) -> Any:
    return (_rounds_before_last(total, place) + place.row - 1) * place.blocks + place.block


def _rounds_before_last(total: Any, place: BlockPlace) -> Any:
    return larger((total + place.blocks - 1) // place.blocks - (place.rows - 1), 0)


def _snake(round_: Any, block: Any, blocks: Any) -> Any:
    return choose(round_ % 2 == 0, block, blocks - 1 - block)
