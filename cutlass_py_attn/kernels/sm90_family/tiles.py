"""Tile tables of the sm90 family as rows, by features and head dim, the fastest first.

A row says all of one decision: the tile with its options, the sizes for which it is tried and its speed (`row.py`). The
planner chooses the first tile that fits the target's shared memory. The notes beside the kernels say what each tile was
measured against. tools/bench/results/plans.jsonl keeps the measurements with GPU, clock, commit and command:
tools/tuning/search_plans.py writes them, and tools/release/check_verified.py lists the tiles that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cutlass_py_attn.kernels.problem_kind import NARROW_HEAD_DIM, ProblemKind
from cutlass_py_attn.kernels.sm90_backward.rules import SCORE_ROWS_HEAD_DIMS
from cutlass_py_attn.kernels.sm90_common.rules import SM90_MAX_HEAD_DIM
from cutlass_py_attn.kernels.sm90_family import tile_time
from cutlass_py_attn.kernels.sm90_family.backward_choice import few_keys, key_stages, per_head, query_heads
from cutlass_py_attn.kernels.sm90_family.row import ANY_DIMS, Row, Rule, Speed, always
from cutlass_py_attn.kernels.sm90_family.tile_options import with_options
from cutlass_py_attn.kernels.sm90_wide.kernel import WIDE_MAX_HEAD_DIM
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import MLA_HEAD_DIMS, SPLIT_KV, STANDARD
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import FLOAT8, Shape
from cutlass_py_attn.score_terms import registry

_Rows = tuple[Row, ...]
_Table = Mapping[int, _Rows]  # by the widest head dim that the rows serve

# Why rows have no speed.
_LATER: Final = "it is for features that leave the tiles before it too few registers"
_LONG: Final = "its table was measured in long sequences alone"
_BY_RULES: Final = "no estimate chooses among backwards: the order and the rules of their tables do"
_BY_MEASUREMENTS: Final = "its times fit no estimate: blocks wait for memory"
_NO_OTHER: Final = "its table has no other tile"
# By head_dim_value. One of the warpgroups loads. Halves are slower than whole key tiles with 128 columns, and with 32
# without a mask; float16 has option shared_end alone. Speeds are fits of the measurements in
# kernels/sm90_forward/NOTES-short.md, of bf16 on an H200; those of 192x96 and 128x128 at head dim 96 are fitted to
# s 8192 as well.
_SM90_FORWARD_64: _Rows = (
    Row("192x128x16:2-speculative-halves", {64: Speed(1100, 1440)}, dims=(32, 64)),
    Row("128x128x12:2-speculative", {64: Speed(860, 1120)}, dims=(0, 96)),
    Row("128x208x12:2-plain", {64: Speed(860, 1910)}, when=tile_time.one_key_tile, any_length=False),
    Row("64x128x8:2-speculative", {64: Speed(400, 840)}, dims=(0, 128), any_length=False),
    Row("64x64x8:2-plain", {64: Speed(300, 500)}, any_length=False),
)
_SM90_FORWARD: _Table = {
    32: (
        Row("192x128x16:2-speculative", {64: Speed(1100, 1440)}, dims=(0, 32), masks=("full",)),
        Row("192x128x16:2-speculative-halves", {64: Speed(1100, 1440)}, dims=(0, 32), masks=("causal",)),
        *_SM90_FORWARD_64[1:],
    ),
    64: _SM90_FORWARD_64,
    96: (
        Row("192x112x16:2-speculative", {96: Speed(1380, 1600)}, dims=(64, 96), when=tile_time.long_if_causal),
        Row("192x96x16:2-speculative", {96: Speed(1380, 1400)}, dims=(64, 96)),
        Row("128x128x12:2-speculative", {96: Speed(930, 1350)}, dims=(0, 96)),
        Row("128x64x12:2-plain", _LATER),
        Row("128x208x12:2-plain", {96: Speed(930, 2310)}, when=tile_time.one_key_tile, any_length=False),
        Row("64x128x8:2-speculative", {96: Speed(500, 950)}, dims=(0, 128), any_length=False),
        Row("64x64x8:2-plain", {96: Speed(350, 560)}, any_length=False),
    ),
    128: (
        Row(
            "128x128x12:2+multicast-speculative",
            {128: Speed(2000, 1370)},
            dims=(96, 192),
            when=tile_time.long_sequences,
            any_length=False,
        ),
        Row(
            "128x128x12:2-speculative-shared_end-bits",
            {96: Speed(930, 1350), 128: Speed(2000, 1370)},
            dims=(96, 192),
        ),
        Row(
            "128x64x12:2-speculative",
            _BY_MEASUREMENTS,
            dims=(96, 128),
            masks=("full", "causal"),
            measured=tile_time.half_key_tiles,
        ),
        Row("128x64x12:2-plain", _LATER, masks=("local",)),
        Row("64x128x8:2-speculative", {96: Speed(500, 950), 128: Speed(1000, 1070)}, dims=(0, 128), any_length=False),
        Row(
            "64x64x8:2-plain",
            {96: Speed(350, 560), 128: Speed(600, 640)},
            measured=tile_time.half_query_tiles,
            any_length=False,
        ),
    ),
    256: (
        Row("128x64x12:2-speculative-shared_end-bits", {256: Speed(2700, 1120)}, dims=(128, 256)),
        Row("64x64x8:2-speculative", {256: Speed(1400, 900)}, dims=(128, 256), any_length=False),
    ),
}
# With terms that ask for the tile table score_mod, three warpgroups have no registers for a wide tile.
_SM90_FORWARD_SCORE_MOD: _Table = {
    64: (
        Row("192x64x16:2-plain", {64: Speed(1760, 1140)}),  # with ALiBi; with a bias a key tile takes 2.15 us
        Row("128x128x12:2-plain", {64: Speed(860, 1120)}),
    ),
    128: _SM90_FORWARD[128],
    256: _SM90_FORWARD[256],
}
# Nor with two edges of a mask.
_SM90_FORWARD_LOCAL: _Table = {
    64: (Row("128x128x12:2-speculative-bits", _LONG, dims=(0, 96)),),
    96: (
        Row("192x96x16:2-speculative-bits", _LONG, dims=(64, 96)),
        Row("128x128x12:2-speculative-bits", _LONG, dims=(0, 96)),
        Row("128x64x12:2-plain", _LATER),
    ),
    128: _SM90_FORWARD[128],
    256: _SM90_FORWARD[256],
}
# NOTES-ranges.md
_SM90_FORWARD_RANGES: _Table = {
    64: (
        Row("192x128x16:2-speculative-halves", _LONG, dims=(32, 64)),
        Row("128x128x12:2-speculative", _LONG, dims=(0, 96)),
        Row("64x128x8:2-speculative", _LATER, dims=(0, 128)),
        Row("64x64x8:2-plain", _LATER),
    ),
    128: (
        Row("128x128x12:2-speculative", _LONG, dims=(0, 128)),
        Row("128x64x12:2-plain", _LATER),
        Row("64x128x8:2-speculative", _LATER, dims=(0, 128)),
        Row("64x64x8:2-plain", _LATER),
    ),
    256: (
        Row("128x64x12:2-speculative", _LONG, dims=(128, 256)),
        Row("64x64x8:2-speculative", _LATER, dims=(128, 256)),
    ),
}
# By the wider head dim.
_SM90_FORWARD_WIDE: _Table = {WIDE_MAX_HEAD_DIM: (Row("64x64x12:2+wide", _NO_OTHER),)}
_SM90_FORWARD_MLA: _Table = {max(MLA_HEAD_DIMS): (Row("64x64x12:2+mla", _NO_OTHER),)}
# The later tiles are for features that leave the first too few registers.
_SM90_FORWARD_E4M3: _Table = {
    64: (
        Row("192x128x16:2+e4m3-speculative", _LONG, dims=(0, 64)),
        Row("128x128x12:2+e4m3-speculative", _LATER, dims=(0, 192)),
    ),
    192: (
        Row("128x128x12:2+e4m3-speculative", _LONG, dims=(0, 192)),
        Row("128x64x12:2+e4m3-plain", _LATER),
    ),
    256: (
        Row("128x64x12:2+e4m3-speculative-bits", _LONG, dims=(192, 256)),
        Row("64x64x8:2+e4m3-plain", _LATER),
    ),
}
_SM90_FORWARD_E4M3_LOCAL: _Table = {
    64: (
        Row("128x128x12:2+e4m3-speculative-bits", _LONG, dims=(0, 192)),
        Row("128x64x12:2+e4m3-plain", _LATER),
    ),
    192: (Row("128x64x12:2+e4m3-plain", _LONG), Row("64x64x8:2+e4m3-plain", _LATER)),
    256: _SM90_FORWARD_E4M3[256],
}
# By the wider head dim, whose codes of a tile a warpgroup has in registers. Windows and score terms leave the other
# warpgroups registers for fewer keys.
_SM90_FORWARD_E4M3_CACHE: _Table = {
    64: (
        Row("192x96x16:2+e4m3_cache-speculative", _LONG, dims=(32, 64)),
        Row("128x128x12:2+e4m3_cache-plain", _LATER),
    ),
    128: (
        Row("128x128x12:2+e4m3_cache-speculative", _LONG, dims=(64, 128)),
        Row("128x64x12:2+e4m3_cache-plain", _LATER),
    ),
    256: (Row("128x64x12:2+e4m3_cache-plain", _LONG), Row("64x64x8:2+e4m3_cache-plain", _LATER)),
}
_SM90_FORWARD_E4M3_CACHE_TERMS: _Table = {
    64: (Row("128x128x12:2+e4m3_cache-plain", _LONG), Row("128x64x12:2+e4m3_cache-plain", _LATER)),
    128: (Row("128x64x12:2+e4m3_cache-plain", _LONG), Row("64x64x8:2+e4m3_cache-plain", _LATER)),
    256: _SM90_FORWARD_E4M3_CACHE[256],
}


def _backward(text: str, when: Rule = always, dims: tuple[int, int] = ANY_DIMS) -> Row:
    """Returns the row of a backward; one with a rule over sizes is not for sequences of any lengths."""
    return Row(text, _BY_RULES, dims, when=when, any_length=when in (always, key_stages))


_SM90_BACKWARD_64: _Rows = (
    _backward("64x64x12:4,3-plain", few_keys),
    _backward("128x64x12:3,2-plain", few_keys),
    _backward("64x128x16:4,3k2+per_head", per_head),
    _backward("128x128x16:3,2k2+per_head", per_head),
)
_SM90_BACKWARD_96: _Rows = (
    _backward("64x64x12:3,2-plain", few_keys),
    _backward("64x128x16:3,2k2+per_head", per_head),
    _backward("64x128x16:3,2+query_heads", query_heads),
    _backward("64x128x16:3,2+ds_registers-shared_end", dims=(64, 128)),
    _backward("64x128x16:3,2-plain"),
)
_SM90_BACKWARD_128: _Rows = (
    _backward("64x64x12:3,2-plain", few_keys),
    _backward("64x128x16:3,2k2+per_head", per_head),
    _backward("64x128x16:3,2+per_head", per_head),
    _backward("64x128x16:3,2k2+query_heads", query_heads),
    _backward("64x128x16:3,2+query_heads", query_heads),
)
_SM90_BACKWARD: _Table = {
    64: (
        *_SM90_BACKWARD_64,
        _backward("128x128x16:3,2k2+key_registers-plain", key_stages),
        _backward("128x128x16:3,2k2+ds_registers-shared_end", dims=(0, 64)),
        _backward("128x128x16:3,2k2-plain"),
    ),
    96: _SM90_BACKWARD_96,
    128: (
        *_SM90_BACKWARD_128,
        _backward("64x128x16:3,2k2+ds_registers-plain"),
        _backward("64x128x16:3,2k2-plain"),
        _backward("64x128x16:3,2-plain"),
    ),
    192: (_backward("64x64x16:3,2+2cta"), _backward("64x64x16:2,2+2cta")),
    256: (_backward("64x64x16:2,2+2cta"),),
}
# Without a mask one stage of K is 1 to 2 % faster at d 128 from s 4096 on, and as fast at s 2048; under a causal mask
# it loses 1 % at s 2048. At d 64 parts of key tiles are slower with the default usage level.
_SM90_BACKWARD_FULL: _Table = {
    **_SM90_BACKWARD,
    64: (
        *_SM90_BACKWARD_64,
        _backward("128x128x16:3,2@7k2+key_registers-shared_end", key_stages, dims=(0, 64)),
        *_SM90_BACKWARD[64][5:],
    ),
    128: (
        *_SM90_BACKWARD_128,
        _backward("64x128x16:3,2+ds_registers-shared_end", dims=(64, 128)),
        *_SM90_BACKWARD[128][6:],
    ),
}
_SM90_BACKWARD_WIDE: _Table = {WIDE_MAX_HEAD_DIM: (_backward("64x64x12:2,2+wide"),)}
# Key stages of narrow heads: with a mask, two are 2 to 7 % faster in variant key_registers, and were slower in the
# standard variant, unless the gradients are deterministic; with dropout, two leave little shared memory for its bits.
_SM90_BACKWARD_MASKED: _Table = {
    **_SM90_BACKWARD,
    64: (
        *_SM90_BACKWARD_64,
        _backward("128x128x16:3,2+query_heads", query_heads),
        _SM90_BACKWARD[64][4],
        _backward("128x128x16:3,2+key_registers-plain"),
        _backward("128x128x16:3,2+ds_registers-plain"),
        _backward("128x128x16:3,2-plain"),
    ),
}
# A tile of the bias takes the shared memory of the second key stage, and of narrow heads that of 64 queries.
_SM90_BACKWARD_BIAS: _Table = {
    64: (
        _backward("64x128x16:4,3k2+per_head", per_head),
        _backward("64x128x16:4,3+query_heads", query_heads),
        _backward("64x128x16:4,3k2-plain"),
        _backward("64x128x16:4,3-plain"),
    ),
    96: _SM90_BACKWARD_96[1:],
    128: (_SM90_BACKWARD_128[2], *_SM90_BACKWARD_128[4:], *_SM90_BACKWARD_96[3:]),
}
_SM90_BACKWARD_SCORE_ROWS: _Table = {
    192: (  # dK and dV leave few registers
        _backward("64x128x16:5,4q32+query_heads", query_heads),
        _backward("64x128x16:5,4q32-plain"),
    )
}
_SM90_BACKWARD_RANGES: _Table = {
    64: (
        _backward("128x128x16:3,2k2+key_registers-plain"),
        _backward("128x128x16:3,2k2+ds_registers-plain"),
        _backward("128x128x16:3,2-plain"),
        _backward("64x128x16:3,2-plain"),
        _backward("64x64x12:4,3-plain"),
    ),
    96: (_backward("64x128x16:3,2+ds_registers-plain"), _backward("64x64x12:3,2-plain")),
    128: (
        _backward("64x128x16:3,2k2+ds_registers-plain"),
        _backward("64x128x16:3,2+ds_registers-plain"),
        _backward("64x128x16:3,2k2-plain"),
        _backward("64x64x12:3,2-plain"),
    ),
}
SM90: dict[str, _Table] = {
    "forward": _SM90_FORWARD,
    "forward score_mod": _SM90_FORWARD_SCORE_MOD,
    "forward local": _SM90_FORWARD_LOCAL,
    "forward ranges": _SM90_FORWARD_RANGES,
    "forward wide": _SM90_FORWARD_WIDE,
    "forward mla": _SM90_FORWARD_MLA,
    "forward e4m3": _SM90_FORWARD_E4M3,
    "forward e4m3 cache": _SM90_FORWARD_E4M3_CACHE,
    "forward e4m3 cache terms": _SM90_FORWARD_E4M3_CACHE_TERMS,
    "forward e4m3 local": _SM90_FORWARD_E4M3_LOCAL,
    "backward": _SM90_BACKWARD,
    "backward full": _SM90_BACKWARD_FULL,
    "backward masked": _SM90_BACKWARD_MASKED,
    "backward bias": _SM90_BACKWARD_BIAS,
    "backward score_rows": _SM90_BACKWARD_SCORE_ROWS,
    "backward ranges": _SM90_BACKWARD_RANGES,
    "backward wide": _SM90_BACKWARD_WIDE,
}


def sm90_rows(kind: ProblemKind) -> tuple[Row, ...]:
    """Returns the rows of the sm90 family for problems of a kind, in the order in which they are tried."""
    table, head_dim = table_key(kind)
    return tuple(row for row in SM90[table][head_dim] if kind.form in row.masks or kind.form.has_ranges)


def sm90_tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """Returns the tiles of `sm90_rows`."""
    kind = ProblemKind.of(problem)
    return tuple(row.tile_for(kind) for row in sm90_rows(kind))


def nearest_row(kind: ProblemKind, tile: TileConfig) -> Row:
    """Returns the row of the tile, else the first with the most in common: variant, tile_m and tile_n, any lengths."""
    variant = STANDARD if tile.variant == SPLIT_KV else tile.variant

    def in_common(row: Row) -> tuple[bool, ...]:
        own = row.tile
        has_its_size = (own.tile_m, own.tile_n) == (tile.tile_m, tile.tile_n)
        return own.variant == variant, replace(tile, options=own.options) == own, has_its_size, row.any_length

    return max(sm90_rows(kind), key=in_common)


def with_nearest_options(problem: Problem, tile: TileConfig) -> TileConfig:
    """Returns a tile of the sm90 family; one that leaves its options open gets those of the nearest row."""
    if tile.options is not None:
        return tile
    kind = ProblemKind.of(problem)
    return with_options(kind, tile, nearest_row(kind, tile).options_for(kind))


def table_key(kind: ProblemKind) -> tuple[str, int]:
    """Returns the key of a kind's rows in SM90: (name of the table, widest head dim that they serve)."""
    widest = max(kind.dims)
    has_terms = any(term.needs_registers_sm90 for term in registry.of_features(kind.features))
    if kind.is_mla:
        name, served = "forward mla", kind.head_dim
    elif kind.dtype == FLOAT8:
        name, served = "forward e4m3 local" if kind.form.has_left else "forward e4m3", kind.head_dim_value
    elif registry.KV8 in kind.features:
        name = "forward e4m3 cache terms" if kind.form.has_left or has_terms else "forward e4m3 cache"
        served = widest
    elif widest > SM90_MAX_HEAD_DIM:
        name, served = f"{kind.direction} wide", widest
    elif kind.form.has_ranges:
        served = kind.accumulator_head_dim if kind.direction == "backward" else kind.head_dim_value
        name = f"{kind.direction} ranges"
    elif kind.direction == "backward":
        is_masked = (not kind.form.sees_all and not kind.deterministic) or "dropout" in kind.features
        plain = "backward" if kind.deterministic else "backward full"
        name, served = "backward masked" if is_masked else plain, kind.accumulator_head_dim
        name = "backward bias" if "bias" in kind.features and served <= NARROW_HEAD_DIM else name
        name = "backward score_rows" if splits_score_rows(kind) else name
    elif has_terms:
        name, served = "forward score_mod", kind.head_dim_value
    else:
        name, served = "forward local" if kind.form.has_left else "forward", kind.head_dim_value
    return name, min(size for size in SM90[name] if size >= served)


def splits_score_rows(problem: Shape | ProblemKind | Build) -> bool:
    """Returns whether these head dims leave the sm90 backward registers for scores of a part of a query tile."""
    dims = problem.head_dim, problem.head_dim_value
    return max(dims) > NARROW_HEAD_DIM and all(
        dim <= most for dim, most in zip(dims, SCORE_ROWS_HEAD_DIMS, strict=True)
    )
