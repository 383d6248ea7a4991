"""Tile options: with which options the planner has a tile of the tables, and which builds can have them.

docs/tuning.md says what each option gained, and which were slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    LATE_WAIT,
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
    variants: of the tile
    """

    tile_m: int
    tile_n: int
    columns: tuple[int, int]
    options: tuple[str, ...]
    variants: tuple[str, ...] = (STANDARD, MULTICAST)

    def is_for(self, problem: Problem, tile: TileConfig) -> bool:
        """Returns whether the planner has this tile with the options."""
        least, most = self.columns
        dims = problem.shape.head_dim, problem.shape.head_dim_value
        is_tile = (tile.tile_m, tile.tile_n) == (self.tile_m, self.tile_n) and tile.variant in self.variants
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


@dataclass(frozen=True, slots=True)
class Body:
    """What decides which options a forward kernel of the sm90 family can have; the fields are those of a Build."""

    variant: str
    features: tuple[str, ...]
    mask: str
    tile_m: int
    tile_n: int
    head_dim_value: int

    @property
    def has_plain_scores(self) -> bool:
        """Whether weights may be computed with the maxima before a key tile."""
        return PLAIN_FEATURES.issuperset(self.features)

    @property
    def has_equal_tiles(self) -> bool:
        """Whether all query tiles take equally long, and the parts of one can be joined by their logsumexps."""
        return self.variant == STANDARD and {"grouped"}.issuperset(self.features) and self.mask == "full"

    @property
    def has_hidden_rows(self) -> bool:
        """Whether a mask can hide a key tile from all rows of a warpgroup, but not from all rows of the tile."""
        return self.variant != E4M3 and self.mask != "full" and self.tile_m > WARPGROUP_ROWS

    @property
    def has_mask_words(self) -> bool:
        """Whether a word has a bit for each masked key of a row that a thread holds."""
        return self.mask != "full" and self.tile_n <= MOST_BITS_KEYS

    @property
    def has_parts_of_output(self) -> bool:
        """Whether O gets P V of a key tile by an addition: that of one tile can be deferred to the next."""
        return self.variant == E4M3 and self.head_dim_value <= ONE_PART_COLUMNS

    @property
    def has_halves(self) -> bool:
        """Whether both halves of a key tile are operands of O += P V."""
        return self.tile_n % HALVES_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class Limit:
    """Which bodies can have an option, and with which other option; needs: "" for none."""

    allows: Callable[[Body], bool]
    allowed: str
    needs: str = ""


LIMITS: Final = {
    SPECULATIVE: Limit(
        lambda body: body.has_plain_scores,
        "is for scores without dropout, scales of rows and score terms other than sinks; use none of its options",
    ),
    HALVES: Limit(
        lambda body: body.has_halves, f"is for tiles of a multiple of {HALVES_MULTIPLE} keys; use another", SPECULATIVE
    ),
    SHARED_END: Limit(
        lambda body: body.has_equal_tiles,
        "is for the standard variant, full masks and equal lengths, without score terms, dropout and pages; use "
        "another option",
    ),
    HIDDEN: Limit(
        lambda body: body.has_hidden_rows,
        f"is for masks and tiles of several warpgroups, and not for variant {E4M3}; use another option",
    ),
    BITS: Limit(
        lambda body: body.has_mask_words,
        f"is for masks and tiles of up to {MOST_BITS_KEYS} keys; use another option",
    ),
    LATE_WAIT: Limit(lambda body: True, "is for every body"),
    DEFERRED: Limit(
        lambda body: body.has_parts_of_output,
        f"is for variant {E4M3} and head_dim_value up to {ONE_PART_COLUMNS}; use another option",
    ),
}


def with_options(problem: Problem, tile: TileConfig) -> TileConfig:
    """Returns a tile of the sm90 family with the options that the planner has it with."""
    if problem.direction != "forward":
        return tile
    shape = problem.shape
    body = Body(tile.variant, problem.features, problem.mask.form, tile.tile_m, tile.tile_n, shape.head_dim_value)
    options = next((rule.options for rule in RULES if rule.is_for(problem, tile)), ())
    possible = {name for name in options if LIMITS[name].allows(body)}
    needed = {"", *possible}
    return replace(tile, options=tuple(name for name in options if name in possible and LIMITS[name].needs in needed))


def objections(build: Build) -> Iterator[str]:
    """Yields every reason why no kernel body can be built with the options, as `tile_rules.objections` has them."""
    what = f"options = {build.options!r}"
    is_forward = (build.kind, build.family) == ("forward", "sm90") and build.variant in VARIANTS_WITH_OPTIONS
    if build.options and not is_forward:
        yield f"{what}: only the standard, multicast, {E4M3} and {E4M3_CACHE} sm90 forwards have options; use ()"
        return
    body = Body(build.variant, build.features, build.mask, build.tile_m, build.tile_n, build.head_dim_value)
    for name in build.options:
        limit = LIMITS[name]
        if not limit.allows(body):
            yield f"{what}: option {name} {limit.allowed}"
        if limit.needs and limit.needs not in build.options:
            yield f"{what}: option {name} is part of option {limit.needs}; use both"
