"""Backward choice: for which sizes of a call a tile and variant of the sm90 backward is faster, as expressions.

The planner evaluates them, and a C library has them as rules. Only what machine code fixes decides which expression a
tile has, so that it is the same for a Problem and for a Build. Names are those of `launch_rules`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.kernels.sm90.rules import NARROW_HEAD_DIM
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Name, Number, ceil_div, maximum, minimum
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS
from cutlass_py_attn.launch.names import BATCH, GROUP, NUM_HEADS_KEY, NUM_KEYS, NUM_QUERIES, NUM_SMS, TOKENS_K
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import KEY_REGISTERS, PER_HEAD, QUERY_HEADS, STANDARD
from cutlass_py_attn.plan import shared_tiles
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.problem import Problem
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
NEVER: Final = Number(0)
PARTS_ARE_FASTER: Final = Name("parts_are_faster")  # what `parts_of_key_tiles` gives


@dataclass(frozen=True, slots=True)
class BackwardKind:
    """What a problem and the kernels that compute it have in common, whatever the sizes."""

    dtype: str
    head_dim: int
    head_dim_value: int
    form: Form
    features: tuple[str, ...]
    deterministic: bool

    @staticmethod
    def of(source: Problem | Build) -> BackwardKind:
        """Returns the kind of a backward."""
        if isinstance(source, Build):
            dims, form = (source.head_dim, source.head_dim_value), source.form
        else:
            dims, form = (source.shape.head_dim, source.shape.head_dim_value), source.mask.form
        return BackwardKind(source.dtype, *dims, form, source.features, source.deterministic)

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of key and of value."""
        return self.head_dim, self.head_dim_value

    @property
    def is_narrow(self) -> bool:
        """Whether a warpgroup has the rows of both head dims."""
        return max(self.dims) <= WARPGROUP_ROWS

    def has_no_more_than(self, *features: str) -> bool:
        """Returns whether the features are among these."""
        return {*self.features} <= {*features}


def sizes(problem: Problem, num_sms: int) -> dict[str, int]:
    """Returns the values of the names in `is_faster`."""
    shape = problem.shape
    values = {name: getattr(shape, name) for name in ("batch", "num_heads_key", "num_queries", "num_keys", "group")}
    values |= {"num_sms": num_sms} if shape.tokens is None else {"num_sms": num_sms, "tokens_k": shape.tokens[1]}
    return values | {PARTS_ARE_FASTER.name: parts_of_key_tiles(BackwardKind.of(problem)).evaluate(values)}


def is_faster(kind: BackwardKind, tile: TileConfig | Build) -> Expr:
    """Returns the rule that is 1 for sizes at which the planner tries the tile, over PARTS_ARE_FASTER among others."""
    if tile.variant == STANDARD and tile.tile_n == WARPGROUP_ROWS:
        return _few_keys_are_faster(kind, tile.tile_m)
    if tile.variant == PER_HEAD:
        return _per_head_is_faster(kind, tile.tile_m, tile.tile_n)
    if tile.variant == QUERY_HEADS:
        return (1 - PARTS_ARE_FASTER) * _query_heads_is_faster(kind, tile.tile_n)
    if tile.variant == KEY_REGISTERS and tile.key_stages > 1:
        return _key_stages_are_faster(kind)
    return ONE


def in_sizes(kind: BackwardKind, rule: Expr) -> Expr:
    """Returns a rule of `is_faster` over sizes alone."""
    return rule.substitute({PARTS_ARE_FASTER.name: parts_of_key_tiles(kind)})


@functools.lru_cache(maxsize=1024)
def parts_of_key_tiles(kind: BackwardKind) -> Expr:
    """Returns the rule that is 1 if few key tiles of 128 keys are faster in parts with some of the queries each.

    They must save enough, without a mask. The parts are those of the tiles that have option shared_end.
    """
    has_equal_tiles = kind.form.sees_all and kind.has_no_more_than("grouped", "sinks")
    if not has_equal_tiles or kind.deterministic:
        return NEVER
    if not kind.is_narrow and (min(kind.dims) <= WARPGROUP_ROWS or max(kind.dims) > NARROW_HEAD_DIM):
        return NEVER
    rows = 2 * WARPGROUP_ROWS if kind.is_narrow else WARPGROUP_ROWS
    work_tiles = BATCH * NUM_HEADS_KEY * ceil_div(NUM_KEYS, 2 * WARPGROUP_ROWS)
    query_tiles = GROUP * ceil_div(NUM_QUERIES, rows)
    saved = query_tiles - shared_tiles.time_of_few(work_tiles, query_tiles)
    return (work_tiles < NUM_SMS) * (saved * rows >= LEAST_SAVED_QUERIES)


@functools.lru_cache(maxsize=1024)
def _few_keys_are_faster(kind: BackwardKind, tile_m: int) -> Expr:
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
    if not kind.is_narrow:
        one_tile = (NUM_KEYS > WARPGROUP_ROWS) * (2 * tiles <= NUM_SMS)
        fills_sms = has_more_keys * fills_sms + (1 - has_more_keys) * one_tile
    is_faster = (1 - PARTS_ARE_FASTER) * (1 - _query_heads_is_faster(kind, 2 * WARPGROUP_ROWS)) * fills_sms
    if kind.is_narrow and tile_m == WARPGROUP_ROWS:
        most_queries = SHORT_QUERIES_FULL if kind.form.sees_all else SHORT_QUERIES
        return (most_queries >= NUM_QUERIES) * is_faster
    return is_faster


@functools.lru_cache(maxsize=1024)
def _per_head_is_faster(kind: BackwardKind, tile_m: int, tile_n: int) -> Expr:
    """One block per head keeps the SMs as busy as the standard variant, and its operands stay in the L2 cache."""
    heads, key_tiles = BATCH * NUM_HEADS_KEY, ceil_div(NUM_KEYS, tile_n)
    busiest, shared = ceil_div(heads, NUM_SMS) * key_tiles, ceil_div(heads * key_tiles, NUM_SMS)
    width = kind.head_dim * F32_BYTES + sum(kind.dims) * ITEM_BYTES[kind.dtype]
    rows = maximum(minimum(NUM_SMS, heads), 1) * NUM_QUERIES * GROUP
    # Under a causal mask a key tile is done with the queries before it.
    live = rows * width // (1 if kind.form.sees_all else 2)
    is_balanced = busiest <= PER_HEAD_IMBALANCE * shared
    is_faster = (1 - PARTS_ARE_FASTER) * is_balanced * (live <= PER_HEAD_L2_BYTES)
    # Of narrow heads, tiles of 64 queries were measured with one tile a head alone.
    if kind.is_narrow and tile_m == WARPGROUP_ROWS:
        return (tile_m >= NUM_QUERIES) * (tile_n >= NUM_KEYS) * is_faster
    return is_faster


@functools.lru_cache(maxsize=1024)
def _query_heads_is_faster(kind: BackwardKind, tile_n: int) -> Expr:
    """If work tiles of whole groups are few, some SMs idle; the more if a mask makes these tiles unequal."""
    if "grouped" not in kind.features or kind.deterministic:
        return NEVER
    key_tiles = BATCH * ceil_div(NUM_KEYS, tile_n)
    if "varlen" in kind.features:  # num_keys is that of the longest sequence
        key_tiles = minimum(key_tiles, TOKENS_K // tile_n + BATCH)
    most = QUERY_HEADS_WORK_TILES_FULL if kind.form.sees_all else QUERY_HEADS_WORK_TILES
    return (GROUP > 1) * (most * NUM_SMS > key_tiles * NUM_HEADS_KEY)


def _key_stages_are_faster(kind: BackwardKind) -> Expr:
    """Two key stages are faster, but were not measured with windows, unless their gradients are deterministic."""
    return ONE if not kind.form.has_left or kind.deterministic else NEVER


def sees_keys(form: Form, tile_m: int) -> Expr:
    """Returns the rule that is 1 if every query tile sees a key: the first one and, right of a window, the last one."""
    if form.sees_all:
        return ONE
    shift = Name("bottom_right") * (NUM_KEYS - NUM_QUERIES)
    first = minimum(NUM_QUERIES, tile_m) + Name("window_right") + shift >= 1
    if form.grows:
        return first
    last_start = (ceil_div(NUM_QUERIES, tile_m) - 1) * tile_m - Name("window_left") + shift
    return first * (last_start < NUM_KEYS)
