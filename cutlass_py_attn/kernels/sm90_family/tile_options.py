"""Tile options: which kernel bodies of the sm90 family can have an option; the rows of the tile tables say which have.

kernels/sm90_family/NOTES.md says what each option gained, and which were slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import can_have_options
from cutlass_py_attn.launch.variants import (
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
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms import registry

if TYPE_CHECKING:
    from cutlass_py_attn.launch.tile_config import TileConfig

# Features with which scores are scaled products alone, and every key of a tile without a mask has its weight; sinks are
# added when all keys are seen.
PLAIN_FEATURES: Final = frozenset((*registry.LAYOUTS, registry.PAGED, registry.KV8, registry.FLOAT16_OUTPUT, "sinks"))
MOST_BITS_KEYS: Final = 128  # keys of a tile, of which a thread holds a quarter of each row: a bit of a word each
HALVES_MULTIPLE: Final = 32  # keys of a tile, whose halves are operands of O = P V in steps of 16


def _has_plain_scores(kind: ProblemKind, tile: TileConfig | Build) -> bool:
    """Returns whether weights may be computed with the maxima before a key tile.

    The largest weight of a row is then no power of two, and is rounded with P. Beside the rounding of a float16 output,
    this exceeds xFormers' tolerance in rows of one large weight.
    """
    return kind.dtype != "float16" and PLAIN_FEATURES.issuperset(kind.features)


def _has_equal_tiles(kind: ProblemKind, tile: TileConfig | Build) -> bool:
    """Returns whether all work tiles take equally long, and the parts of one can be joined or added in any order."""
    if kind.direction == "forward":
        return tile.variant == STANDARD and kind.form.sees_all and kind.has_no_more_than("grouped")
    return kind.form.sees_all and kind.has_no_more_than("grouped", "sinks") and not kind.deterministic


def _has_mask_words(kind: ProblemKind, tile: TileConfig | Build) -> bool:
    """Returns whether a word has a bit for each masked key of a row that a thread holds."""
    return kind.form.has_left and tile.tile_n <= MOST_BITS_KEYS


def _has_halves(kind: ProblemKind, tile: TileConfig | Build) -> bool:
    """Returns whether both halves of a key tile are operands of O += P V, and S has a product for each."""
    return tile.variant != E4M3 and tile.tile_n % HALVES_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class Limit:
    """Which kernel bodies can have an option, and with which other option; needs: "" for none."""

    allows: Callable[[ProblemKind, TileConfig | Build], bool]
    rule: str
    remedy: str = "use another option"
    needs: str = ""


LIMITS: Final = {
    SPECULATIVE: Limit(
        _has_plain_scores,
        "is for bfloat16 and e4m3, and for scores without dropout, scales of rows and score terms other than sinks",
        "use none of its options",
    ),
    HALVES: Limit(
        _has_halves,
        f"is for tiles of a multiple of {HALVES_MULTIPLE} keys, and not for variant {E4M3}",
        needs=SPECULATIVE,
    ),
    SHARED_END: Limit(
        _has_equal_tiles,
        "is for full masks and equal lengths, without score terms, dropout and pages: for the standard variant of "
        f"forwards, and for the standard variant, {DS_REGISTERS} and {KEY_REGISTERS} of backwards that are not "
        "deterministic",
    ),
    BITS: Limit(
        _has_mask_words,
        f"is for windows and tiles of up to {MOST_BITS_KEYS} keys",
        needs=SPECULATIVE,
    ),
}


def possible(kind: ProblemKind, tile: TileConfig | Build) -> tuple[str, ...]:
    """Returns the options that a kernel body of the sm90 family can have."""
    if not can_have_options(kind.direction, tile.variant):
        return ()
    names = LIMITS if kind.direction == "forward" else (SHARED_END,)
    allowed = [name for name in names if LIMITS[name].allows(kind, tile)]
    return tuple(name for name in allowed if LIMITS[name].needs in ("", *allowed))


def with_options(kind: ProblemKind, tile: TileConfig, options: Iterable[str]) -> TileConfig:
    """Returns a tile of the sm90 family with those of the options that its kernel body can have.

    An option that needs another one goes with it. A variant without options has None.
    """
    if not can_have_options(kind.direction, tile.variant):
        return replace(tile, options=None)
    allowed = possible(kind, tile)
    return replace(tile, options=tuple(name for name in options if name in allowed))


def refusals(build: Build) -> Iterator[Refusal]:
    """Yields every reason why no kernel body can be built with the options, as `build_rules.refusals` has them."""
    if build.options and not (build.family == "sm90" and can_have_options(build.kind, build.variant)):
        rule = (
            f"only the standard, {MULTICAST}, {SPLIT_KV}, {E4M3} and {E4M3_CACHE} sm90 forwards and the standard, "
            f"{DS_REGISTERS} and {KEY_REGISTERS} sm90 backwards have options"
        )
        yield refuse("options", build.options, rule, "use ()")
        return
    if build.kind == "backward" and build.options != (SHARED_END,) * len(build.options):
        yield refuse("options", build.options, f"backwards have option {SHARED_END} alone", "use no other")
        return
    kind = ProblemKind.of(build)
    for name in build.options:
        limit = LIMITS[name]
        if not limit.allows(kind, build):
            yield refuse("options", build.options, f"option {name} {limit.rule}", limit.remedy)
        if limit.needs and limit.needs not in build.options:
            yield refuse("options", build.options, f"option {name} is part of option {limit.needs}", "use both")
