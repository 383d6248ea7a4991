"""Backward choice: for which sizes of a call a tile and variant of the sm90 backward is faster, as expressions.

The rows of the tile tables have them as rules: the planner evaluates them, and a C library prints them. Only the kind
of a problem decides which expression a row has, so that it is the same for a Problem and for a Build.
"""

from __future__ import annotations

import functools
from typing import Final

from cutlass_py_attn.kernels.problem_kind import NARROW_HEAD_DIM, ProblemKind
from cutlass_py_attn.kernels.sm90_common import shared_tiles
from cutlass_py_attn.kernels.sm90_family.row import NEVER
from cutlass_py_attn.launch.expressions import ONE, Expr, Name, ceil_div, maximum, minimum
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS
from cutlass_py_attn.launch.names import BATCH, GROUP, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES, NUM_SMS, TOKENS_K
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.problem.tensors import F32_BYTES, ITEM_BYTES

# Variant per_head: bytes of Q, dO and dQ sums that all blocks read at a time, which the L2 cache should hold, and how
# many times the key tiles of the busiest block may exceed those of the standard variant.
PER_HEAD_L2_BYTES, PER_HEAD_IMBALANCE = 36 << 20, 1.15
# Variant query_heads: work tiles of the standard variant per SM from which on the standard one is faster. Causal,
# d 128, one H200: query_heads gains 9 to 12 % at 3.9 and loses 0 to 7 % at 7.8; full: it loses 3 to 5 %.
QUERY_HEADS_WORK_TILES: Final = 5
# The same for full masks: query_heads gains 40 to 75 % at 0.06 to 0.5.
QUERY_HEADS_WORK_TILES_FULL: Final = 0.5
# Queries that a block must save for parts of few key tiles of 128 keys to be faster than blocks of 64 keys: at 256 and
# 384 they lose 18 and 8 %, at 512 to 960 they gain 8 to 30 %. Full, b 1, one H200.
LEAST_SAVED_QUERIES: Final = 512
# Queries of d 64 by mask, up to which backward tiles of 64 queries and keys are faster: 3 to 8 %; causal, s 384 and
# 448: 15 and 21 %, s 512: 0 to 8 %.
SHORT_QUERIES_FULL: Final = 256
SHORT_QUERIES: Final = 512
PARTS_ARE_FASTER: Final = Name("parts_are_faster")  # what `parts_of_key_tiles` gives


def in_sizes(kind: ProblemKind, rule: Expr) -> Expr:
    """Returns the rule of a row over sizes alone."""
    return rule.substitute({PARTS_ARE_FASTER.name: parts_of_key_tiles(kind)})


@functools.lru_cache(maxsize=1024)
def parts_of_key_tiles(kind: ProblemKind) -> Expr:
    """Returns the rule that is 1 if few key tiles of 128 keys are faster in parts with some of the queries each.

    They must save enough, without a mask. The parts are those of the tiles that have option shared_end.
    """
    has_equal_tiles = kind.form.sees_all and kind.has_no_more_than("grouped", "sinks")
    if not has_equal_tiles or kind.deterministic:
        return NEVER
    if not _is_narrow(kind) and (min(kind.dims) <= WARPGROUP_ROWS or max(kind.dims) > NARROW_HEAD_DIM):
        return NEVER
    rows = 2 * WARPGROUP_ROWS if _is_narrow(kind) else WARPGROUP_ROWS
    work_tiles = BATCH * NUM_HEADS_KEY * ceil_div(NUM_KEYS, 2 * WARPGROUP_ROWS)
    query_tiles = GROUP * ceil_div(NUM_QUERIES, rows)
    saved = query_tiles - shared_tiles.time_of_few(work_tiles, query_tiles)
    return (work_tiles < NUM_SMS) * (saved * rows >= LEAST_SAVED_QUERIES)


@functools.lru_cache(maxsize=1024)
def few_keys(kind: ProblemKind, tile: TileConfig) -> Expr:
    """Blocks of 64 keys are faster if each SM has at most one, and under a causal mask at most two.

    Narrow heads have 64 queries a tile up to SHORT_QUERIES, and 128 beyond. Wide heads of one tile of 128 keys are
    faster in one block per head, unless SMs idle. Windows and score terms were not measured.
    """
    if not kind.has_no_more_than("grouped") or kind.form.has_left:
        return NEVER
    tiles = BATCH * NUM_HEADS_KEY * ceil_div(NUM_KEYS, WARPGROUP_ROWS)
    has_more_keys = NUM_KEYS > 2 * WARPGROUP_ROWS  # else one block per head
    most = (1 + has_more_keys) * NUM_SMS if kind.form.grows else NUM_SMS
    fills_sms = tiles <= most
    if not _is_narrow(kind):
        one_tile = (NUM_KEYS > WARPGROUP_ROWS) * (2 * tiles <= NUM_SMS)
        fills_sms = has_more_keys * fills_sms + (1 - has_more_keys) * one_tile
    is_faster = (1 - PARTS_ARE_FASTER) * (1 - _work_tiles_are_few(kind, 2 * WARPGROUP_ROWS)) * fills_sms
    if _is_narrow(kind) and tile.tile_m == WARPGROUP_ROWS:
        most_queries = SHORT_QUERIES_FULL if kind.form.sees_all else SHORT_QUERIES
        return (most_queries >= NUM_QUERIES) * is_faster
    return is_faster


@functools.lru_cache(maxsize=1024)
def per_head(kind: ProblemKind, tile: TileConfig) -> Expr:
    """One block per head keeps the SMs as busy as the standard variant, and its operands stay in the L2 cache."""
    heads, key_tiles = BATCH * NUM_HEADS_KEY, ceil_div(NUM_KEYS, tile.tile_n)
    busiest, shared = ceil_div(heads, NUM_SMS) * key_tiles, ceil_div(heads * key_tiles, NUM_SMS)
    width = kind.head_dim * F32_BYTES + sum(kind.dims) * ITEM_BYTES[kind.dtype]
    rows = maximum(minimum(NUM_SMS, heads), 1) * NUM_QUERIES * GROUP
    # Under a causal mask a key tile is done with the queries before it.
    live = rows * width // (1 if kind.form.sees_all else 2)
    is_balanced = busiest <= PER_HEAD_IMBALANCE * shared
    is_faster = (1 - PARTS_ARE_FASTER) * is_balanced * (live <= PER_HEAD_L2_BYTES)
    # Of narrow heads, tiles of 64 queries were measured with one tile a head alone.
    if _is_narrow(kind) and tile.tile_m == WARPGROUP_ROWS:
        return (tile.tile_m >= NUM_QUERIES) * (tile.tile_n >= NUM_KEYS) * is_faster
    return is_faster


def query_heads(kind: ProblemKind, tile: TileConfig) -> Expr:
    """Returns the rule that is 1 if a block for each query head is faster than one for each group."""
    return (1 - PARTS_ARE_FASTER) * _work_tiles_are_few(kind, tile.tile_n)


@functools.lru_cache(maxsize=1024)
def _work_tiles_are_few(kind: ProblemKind, tile_n: int) -> Expr:
    """If work tiles of whole groups are few, some SMs idle; the more if a mask makes these tiles unequal."""
    if "grouped" not in kind.features or kind.deterministic:
        return NEVER
    key_tiles = BATCH * ceil_div(NUM_KEYS, tile_n)
    if "varlen" in kind.features:  # num_keys is that of the longest sequence
        key_tiles = minimum(key_tiles, TOKENS_K // tile_n + BATCH)
    most = QUERY_HEADS_WORK_TILES_FULL if kind.form.sees_all else QUERY_HEADS_WORK_TILES
    return (GROUP > 1) * (most * NUM_SMS > key_tiles * NUM_HEADS_KEY)


def key_stages(kind: ProblemKind, tile: TileConfig) -> Expr:
    """Two key stages are faster, but were not measured with windows, unless their gradients are deterministic."""
    return ONE if not kind.form.has_left or kind.deterministic else NEVER


def _is_narrow(kind: ProblemKind) -> bool:
    """Returns whether a warpgroup has the rows of both head dims."""
    return max(kind.dims) <= WARPGROUP_ROWS
