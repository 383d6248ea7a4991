"""Tile lists: what the kernels of mask form "ranges" read in place of the order of tiles that a band has.

Three kernels (kernels/tile_lists) write them before the main kernel, into the workspace:

    array          shape                                          contents
    key_ranges     (lists, padded_rows, RANGE_WORDS)              start and end of the keys that each query sees
    tile_states    (lists, query tiles, words, STATE_WORDS)       bits of visited and of whole key tiles
    tile_entries   (lists of work tiles, visited tiles)           the tiles that work tiles visit, a list in each row
    list_sizes     (lists of work tiles, SIZE_WORDS)              of each list; see below
    work_list      (work tiles, RECORD_WORDS)                     a record of every work tile, in the order of execution

All are int32. There is a list of ranges for each (sequence, query head), or fewer if the ranges have axes of size 1. A
work tile is a query tile of the forward, which visits key tiles, or a key tile of the backward, which visits query
tiles, of all query heads of a group. The words of its sizes, of its record, and the order of its tiles:

    word       0        1      2         3      4            5    6
    sizes      partial  total  key_tile
    record     tile     head   batch     begin  partial_end  end  key_tile
    entries    [begin, partial_end) have a pair that the mask hides; entries [partial_end, end) have none

The head is that of the query in the forward, that of key and value in the backward. A list has at least one entry: a
work tile that no pair reaches visits tile 0 in the first part. key_tile is the key tile as which the first entry of a
forward, or every entry of a backward, is masked: one behind all keys for a list without a tile. Several records may
name one list.

Records are in slices, one after another. In each slice the longest lists come first; in the backward, whose blocks take
the next record when they have ended one, only in the slices of its last rounds, and the others keep the order in which
neighbouring tiles read the same rows. The functions below say which work tiles a slice has; like tile_order they take
Python ints and traced integers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from cutlass_py_attn.integers import choose, larger, smaller
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.tensors import F32_BYTES

RECORD_WORDS: Final = 8
SIZE_WORDS: Final = 4
STATE_WORDS: Final = 2
STATE_TILES: Final = 32  # key tiles that a word of states has a bit of
ROWS_PADDING: Final = 128  # rows of key_ranges are padded to a multiple of this, the largest query tile of a backward
HIDDEN_KEY: Final = 2**29  # the most keys that a problem has
SORTED_ROUNDS: Final = 2  # at the end of a backward, in which the longest work tiles come first
SLICE_RECORDS: Final = 256  # most records of a slice, two rounds of a large GPU, if pairs together are fewer


class Slice(NamedTuple):
    """Where a record is before its slice is sorted.

    first: number of the first record of the slice
    first_place, places: the tiles of the slice, as places in the order in which a head has them
    first_pair, pairs: its (sequence, head) pairs
    place, pair: of the record, in the slice
    """

    first: Any
    first_place: Any
    places: Any
    first_pair: Any
    pairs: Any
    place: Any
    pair: Any


def slice_of(number: Any, tiles: Any, pairs: Any, together: Any) -> Slice:
    """Returns the slice of record `number`.

    tiles: work tiles of a head; pairs: (sequence, head) pairs; together: of these, whose tiles are ordered together
    """
    most = larger(SLICE_RECORDS // together, 1)  # tiles of a slice
    group = number // (together * tiles)
    within = number - group * (together * tiles)
    here = smaller(together, pairs - group * together)
    segment = within // (most * here)
    inside = within - segment * (most * here)
    places = smaller(most, tiles - segment * most)
    return Slice(number - inside, segment * most, places, group * together, here, inside // here, inside % here)


def is_sorted(build: Build, last: Any, records: Any, num_sms: Any) -> Any:
    """Returns whether the longest lists of a slice come first; last: number behind its last record, of `records`."""
    return (build.kind == "forward") | (last + SORTED_ROUNDS * num_sms > records)


def pairs_together(build: Build, sizes: Any, tiles: Any, pairs: Any, num_sms: Any) -> Any:
    """Returns how many (sequence, head) pairs are ordered together, as many as under a causal mask.

    sizes: what has the numbers of queries and keys, num_queries and num_keys; tiles, pairs: as for `slice_of`
    """
    row_bytes = build.item_bytes * (build.columns + build.columns_value)
    if build.kind == "forward":
        fitting = tile_order.heads_in_l2(sizes.num_keys, row_bytes)
        mixed = tile_order.heads_of_mixed_lengths(fitting, num_sms)
        return smaller(tile_order.static_group_heads(mixed, pairs, num_sms), pairs)
    fitting = tile_order.heads_in_l2(sizes.num_queries, row_bytes + F32_BYTES * build.columns)
    return smaller(tile_order.dynamic_group_heads(fitting, pairs, tiles, num_sms), pairs)


def tile_at(build: Build, place: Any, tiles: Any) -> Any:
    """Returns the work tile at a place: a forward begins with the last one, whose rows see most under a causal mask."""
    return tiles - 1 - place if build.kind == "forward" else place


def hidden_key_tile(build: Build) -> int:
    """Returns a key tile behind all keys, which no range reaches."""
    return HIDDEN_KEY // build.tile_n


def list_of(batch: Any, head: Any, lists_batch: Any, lists_heads: Any) -> Any:
    """Returns the list of a head of a sequence, where there are (lists_batch, lists_heads) of them; either may be 1."""
    return choose(lists_batch > 1, batch, 0) * lists_heads + choose(lists_heads > 1, head, 0)
