"""Tile options: with which options the planner has a tile of the tables, and which builds can have them.

docs/tuning.md says what each option gained, and which were slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.sm90_e4m3 import ONE_PART_COLUMNS
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.variants import (
    BITS,
    DEFERRED,
    E4M3,
    E4M3_CACHE,
    HALVES,
    HIDDEN,
    MULTICAST,
    SHARED_END,
    SPECULATIVE,
    STANDARD,
)
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.score_terms import registry

# Features with which scores are scaled products alone, and every key of a tile without a mask has its weight; sinks are
# added when all keys are seen.
PLAIN_FEATURES: Final = frozenset((*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.FLOAT16_OUTPUT, "sinks"))
WARPGROUP_ROWS: Final = 64  # query rows of a tile that a warpgroup computes
MOST_BITS_KEYS: Final = 128  # keys of a tile, of which a thread holds a quarter of each row: a bit of a word each
VARIANTS_WITH_OPTIONS: Final = (STANDARD, MULTICAST, E4M3, E4M3_CACHE)
HALVES_MULTIPLE: Final = 32  # keys of a tile, whose halves are operands of O = P V in steps of 16


@dataclass(frozen=True, slots=True)
class OptionRule:
    """The options of a tile that were measured to be faster.

    tile_m, tile_n: the tile
    columns: the head dims that it was measured with, more than the first and up to the second
    options: as in `TileConfig.options`; of them the tile has those that are possible for the problem
    """

    tile_m: int
    tile_n: int
    columns: tuple[int, int]
    options: tuple[str, ...]

    def is_for(self, problem: Problem, tile: TileConfig) -> bool:
        """Returns whether the planner has this tile with the options."""
        least, most = self.columns
        dims = problem.shape.head_dim, problem.shape.head_dim_value
        is_tile = (tile.tile_m, tile.tile_n) == (self.tile_m, self.tile_n)
        return is_tile and all(least < dim <= most for dim in dims)


# Of bf16 and f16 forwards on an H200. Halves are slower than whole key tiles with 128 columns. Not measured are the
# options of tiles with 64 query rows, 64 or 96 keys or more than 128 columns, of (128, 128) up to 96, and of windows.
RULES: Final = (
    OptionRule(192, 128, (0, 32), (SPECULATIVE,)),
    OptionRule(192, 128, (32, 64), (SPECULATIVE, HALVES)),
    OptionRule(192, 112, (64, 96), (SPECULATIVE,)),
    OptionRule(192, 96, (64, 96), (SPECULATIVE,)),
    OptionRule(128, 128, (0, 96), (SPECULATIVE,)),
    OptionRule(128, 128, (96, 192), (SPECULATIVE, SHARED_END)),
    OptionRule(128, 64, (128, 256), (SPECULATIVE, SHARED_END)),
    OptionRule(64, 128, (0, 128), (SPECULATIVE,)),
    OptionRule(64, 64, (128, 256), (SPECULATIVE,)),
)


def with_options(problem: Problem, tile: TileConfig) -> TileConfig:
    """Returns a tile of the sm90 family with the options that the planner has it with."""
    if problem.direction != "forward" or tile.variant not in (STANDARD, MULTICAST):
        return tile
    decided = problem.features, problem.mask.form
    possible = dict.fromkeys((SPECULATIVE, HALVES), _may_speculate(problem.features))
    possible[SHARED_END] = tile.variant == STANDARD and _has_equal_tiles(*decided)
    options = next((rule.options for rule in RULES if rule.is_for(problem, tile)), ())
    return replace(tile, options=tuple(name for name in options if possible[name]))


def _may_speculate(features: tuple[str, ...]) -> bool:
    """Returns whether weights may be computed with the maxima before a key tile."""
    return PLAIN_FEATURES.issuperset(features)


def _has_equal_tiles(features: tuple[str, ...], mask: str) -> bool:
    """Returns whether all query tiles take equally long, and the parts of one can be joined by their logsumexps."""
    return {"grouped"}.issuperset(features) and mask == "full"


def objections(build: Build) -> Iterator[str]:
    """Yields every reason why no kernel body can be built with the options, as `tile_rules.objections` has them."""
    what = f"options = {build.options!r}"
    is_forward = (build.kind, build.family) == ("forward", "sm90") and build.variant in VARIANTS_WITH_OPTIONS
    if build.options and not is_forward:
        yield f"{what}: only the standard, multicast, {E4M3} and {E4M3_CACHE} sm90 forwards have options; use ()"
        return
    if SPECULATIVE in build.options and not _may_speculate(build.features):
        yield (
            f"{what}: option {SPECULATIVE} is for scores without dropout, scales of rows and score terms other than "
            "sinks; use none of its options"
        )
    is_equal = build.variant == STANDARD and _has_equal_tiles(build.features, build.mask)
    if SHARED_END in build.options and not is_equal:
        yield (
            f"{what}: option {SHARED_END} is for the standard variant, full masks and equal lengths, without score "
            "terms, dropout and pages; use another option"
        )
    if HIDDEN in build.options and (build.variant == E4M3 or build.mask == "full" or build.tile_m == WARPGROUP_ROWS):
        yield (
            f"{what}: option {HIDDEN} is for masks and tiles of several warpgroups, and not for variant {E4M3}; use "
            "another option"
        )
    if BITS in build.options and (build.mask == "full" or build.tile_n > MOST_BITS_KEYS):
        yield f"{what}: option {BITS} is for masks and tiles of up to {MOST_BITS_KEYS} keys; use another option"
    if DEFERRED in build.options and (build.variant != E4M3 or build.columns_value > ONE_PART_COLUMNS):
        yield (
            f"{what}: option {DEFERRED} is for variant {E4M3} and head_dim_value up to {ONE_PART_COLUMNS}; use another "
            "option"
        )
    if HALVES in build.options and SPECULATIVE not in build.options:
        yield f"{what}: option {HALVES} is part of option {SPECULATIVE}; use both"
    if HALVES in build.options and build.tile_n % HALVES_MULTIPLE:
        yield f"tile_n = {build.tile_n}: both halves have multiples of 16 keys; use a multiple of {HALVES_MULTIPLE}"
