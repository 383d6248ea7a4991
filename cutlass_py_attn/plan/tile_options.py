"""Tile options: with which options the planner has a tile of the tables, and which builds can have them.

kernels/sm90/NOTES.md says what each option gained, and which were slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.variants import (
    BITS,
    DS_REGISTERS,
    E4M3,
    E4M3_CACHE,
    HALVES,
    KEY_REGISTERS,
    MULTICAST,
    SHARED_END,
    SPECULATIVE,
    SPLIT_KV,
    STANDARD,
)
from cutlass_py_attn.problem.masks import Form
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms import registry

# Features with which scores are scaled products alone, and every key of a tile without a mask has its weight; sinks are
# added when all keys are seen.
PLAIN_FEATURES: Final = frozenset((*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.FLOAT16_OUTPUT, "sinks"))
MOST_BITS_KEYS: Final = 128  # keys of a tile, of which a thread holds a quarter of each row: a bit of a word each
FORWARDS_WITH_OPTIONS: Final = (STANDARD, MULTICAST, SPLIT_KV, E4M3, E4M3_CACHE)
BACKWARDS_WITH_OPTIONS: Final = (STANDARD, DS_REGISTERS, KEY_REGISTERS)  # which have option shared_end alone
HALVES_MULTIPLE: Final = 32  # keys of a tile, whose halves are operands of O = P V in steps of 16


@dataclass(frozen=True, slots=True)
class OptionRule:
    """The options of a tile that were measured to be faster.

    tile_m, tile_n: the tile
    columns: the head dims that it was measured with, more than the first and up to the second
    options: as in `TileConfig.options`; of them the tile has those that are possible for the problem
    variants: of the tile
    masks: forms of the masks that it is for
    direction: of the kernel
    """

    tile_m: int
    tile_n: int
    columns: tuple[int, int]
    options: tuple[str, ...]
    variants: tuple[str, ...] = (STANDARD, MULTICAST, SPLIT_KV)
    masks: tuple[str, ...] = ("full", "causal", "local")
    direction: str = "forward"

    def is_for(self, problem: Problem, tile: TileConfig) -> bool:
        """Returns whether the planner has this tile with the options."""
        is_tile = (tile.tile_m, tile.tile_n) == (self.tile_m, self.tile_n) and tile.variant in self.variants
        if not is_tile or problem.mask.form not in self.masks or problem.direction != self.direction:
            return False
        least, most = self.columns
        shape = problem.shape
        return all(least < dim <= most for dim in (shape.head_dim, shape.head_dim_value))


# Halves are slower than whole key tiles with 128 columns. float16 has shared_end alone.
RULES: Final = (
    OptionRule(192, 128, (0, 32), (SPECULATIVE, HALVES), masks=("causal",)),
    OptionRule(192, 128, (0, 32), (SPECULATIVE,)),
    OptionRule(192, 128, (32, 64), (SPECULATIVE, HALVES)),
    OptionRule(192, 112, (64, 96), (SPECULATIVE,)),
    OptionRule(192, 96, (64, 96), (SPECULATIVE, BITS)),
    OptionRule(128, 128, (0, 96), (SPECULATIVE, BITS)),
    OptionRule(128, 128, (96, 192), (SPECULATIVE, BITS, SHARED_END)),
    OptionRule(128, 64, (96, 128), (SPECULATIVE,), masks=("full", "causal")),
    OptionRule(128, 64, (128, 256), (SPECULATIVE, BITS, SHARED_END)),
    OptionRule(64, 128, (0, 128), (SPECULATIVE,)),
    OptionRule(64, 64, (128, 256), (SPECULATIVE,)),
    OptionRule(192, 128, (0, 64), (SPECULATIVE,), (E4M3,)),
    OptionRule(128, 128, (0, 192), (SPECULATIVE, BITS), (E4M3,)),
    OptionRule(128, 64, (192, 256), (SPECULATIVE, BITS), (E4M3,)),
    OptionRule(192, 96, (32, 64), (SPECULATIVE,), (E4M3_CACHE,)),
    OptionRule(128, 128, (64, 128), (SPECULATIVE,), (E4M3_CACHE,)),
    OptionRule(128, 128, (0, 64), (SHARED_END,), (KEY_REGISTERS, DS_REGISTERS), ("full",), "backward"),
    OptionRule(64, 128, (64, 128), (SHARED_END,), (DS_REGISTERS,), ("full",), "backward"),
)


@dataclass(frozen=True, slots=True)
class Body:
    """What decides which options a kernel of the sm90 family can have; the fields are those of a Build."""

    kind: str
    dtype: str
    variant: str
    features: tuple[str, ...]
    form: Form
    tile_m: int
    tile_n: int
    deterministic: bool

    @classmethod
    def of(cls, problem: Problem | Build, tile: TileConfig | Build) -> Body:
        """Returns the body for a problem with a tile; a Build is both."""
        if isinstance(problem, Build):
            kind, form = problem.kind, problem.form
        else:
            kind, form = problem.direction, problem.mask.form
        deterministic = problem.deterministic
        return cls(kind, problem.dtype, tile.variant, problem.features, form, tile.tile_m, tile.tile_n, deterministic)

    @property
    def has_plain_scores(self) -> bool:
        """Whether weights may be computed with the maxima before a key tile.

        The largest weight of a row is then no power of two, and is rounded with P. Beside the rounding of a float16
        output, this exceeds xFormers' tolerance in rows of one large weight.
        """
        return self.dtype != "float16" and PLAIN_FEATURES.issuperset(self.features)

    @property
    def has_equal_tiles(self) -> bool:
        """Whether all work tiles take equally long, and the parts of one can be joined or added in any order."""
        if self.kind == "forward":
            return self.variant == STANDARD and {"grouped"}.issuperset(self.features) and self.form.sees_all
        is_plain = {"grouped", "sinks"}.issuperset(self.features) and not self.deterministic
        return self.variant in BACKWARDS_WITH_OPTIONS and is_plain and self.form.sees_all

    @property
    def has_mask_words(self) -> bool:
        """Whether a word has a bit for each masked key of a row that a thread holds."""
        return self.form.has_left and self.tile_n <= MOST_BITS_KEYS

    @property
    def has_halves(self) -> bool:
        """Whether both halves of a key tile are operands of O += P V, and S has a product for each."""
        return self.variant != E4M3 and self.tile_n % HALVES_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class Limit:
    """Which bodies can have an option, and with which other option; needs: "" for none."""

    allows: Callable[[Body], bool]
    rule: str
    remedy: str = "use another option"
    needs: str = ""


LIMITS: Final = {
    SPECULATIVE: Limit(
        lambda body: body.has_plain_scores,
        "is for bfloat16 and e4m3, and for scores without dropout, scales of rows and score terms other than sinks",
        "use none of its options",
    ),
    HALVES: Limit(
        lambda body: body.has_halves,
        f"is for tiles of a multiple of {HALVES_MULTIPLE} keys, and not for variant {E4M3}",
        needs=SPECULATIVE,
    ),
    SHARED_END: Limit(
        lambda body: body.has_equal_tiles,
        "is for full masks and equal lengths, without score terms, dropout and pages: for the standard variant of "
        f"forwards, and for the standard variant, {DS_REGISTERS} and {KEY_REGISTERS} of backwards that are not "
        "deterministic",
    ),
    BITS: Limit(
        lambda body: body.has_mask_words,
        f"is for windows and tiles of up to {MOST_BITS_KEYS} keys",
        needs=SPECULATIVE,
    ),
}


def with_options(problem: Problem, tile: TileConfig) -> TileConfig:
    """Returns a tile of the sm90 family with the options that the planner has it with."""
    body = Body.of(problem, tile)
    options = next((rule.options for rule in RULES if rule.is_for(problem, tile)), ())
    possible = {name for name in options if LIMITS[name].allows(body)}
    needed = {"", *possible}
    return replace(tile, options=tuple(name for name in options if name in possible and LIMITS[name].needs in needed))


def refusals(build: Build) -> Iterator[Refusal]:
    """Yields every reason why no kernel body can be built with the options, as `build_rules.refusals` has them."""
    variants = {"forward": FORWARDS_WITH_OPTIONS, "backward": BACKWARDS_WITH_OPTIONS}.get(build.kind, ())
    if build.options and not (build.family == "sm90" and build.variant in variants):
        rule = (
            f"only the standard, {MULTICAST}, {SPLIT_KV}, {E4M3} and {E4M3_CACHE} sm90 forwards and the standard, "
            f"{DS_REGISTERS} and {KEY_REGISTERS} sm90 backwards have options"
        )
        yield refuse("options", build.options, rule, "use ()")
        return
    if build.kind == "backward" and build.options != (SHARED_END,) * len(build.options):
        yield refuse("options", build.options, f"backwards have option {SHARED_END} alone", "use no other")
        return
    body = Body.of(build, build)
    for name in build.options:
        limit = LIMITS[name]
        if not limit.allows(body):
            yield refuse("options", build.options, f"option {name} {limit.rule}", limit.remedy)
        if limit.needs and limit.needs not in build.options:
            yield refuse("options", build.options, f"option {name} is part of option {limit.needs}", "use both")
