"""TileConfig: one tile of a fused kernel, and its text form such as 64x128x16:3,2@5k2+per_head-option."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import OPTIONS, PLAIN, STANDARD, WITH_OPTIONS
from cutlass_py_attn.problem.scalars import python_value
from cutlass_py_attn.refusals import Refusal, refuse

_TEXT: Final = re.compile(
    r"(N)x(N)x(N)(?::(N)(?:,(N))?)?(?:@(N))?(?:c(N))?(?:q(N))?(?:k(N))?(?:\+(\w+))?((?:-[a-z]\w*)*)".replace(
        "N", "[0-9]{1,9}"
    )
)
_INTEGERS: Final = (
    *("tile_m", "tile_n", "warps", "query_stages", "grad_output_stages", "register_usage_level"),
    *("head_dim_split", "score_rows", "key_stages"),
)
_FIELDS: Final = (*_INTEGERS, "variant", "options")
BLACKWELL: Final = ("sm_100", "sm_120")


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile of a fused kernel: what `plan_with_tile` takes and what the tile tables hold.

    tile_m, tile_n: query rows and key rows of a tile
    warps: warps of a thread block
    query_stages, grad_output_stages: pipeline stages of query (in a forward: of key and value) and grad_output; 0
        grad_output stages for a forward
    register_usage_level: ptxas --register-usage-level, 0 to 10; 5 is the default of ptxas
    not_on: targets for which ptxas spills at every level; the planner skips the tile there
    head_dim_split: head-dim columns that one block of a split-D kernel accumulates; 0 for all columns
    score_rows: query rows of one score product of a backward with wgmma; 0 for all rows of the tile
    key_stages: key tiles in flight per thread block of a backward with wgmma
    variant: kernel body, a name of variants.py; "" for the standard one
    options: how the body computes, names of `variants.OPTIONS`; () for none, None to leave them to `plan_with_tile`

    The text form is {tile_m}x{tile_n}x{warps}[:{query_stages}[,{grad_output_stages}]][@{register_usage_level}]
    [c{head_dim_split}][q{score_rows}][k{key_stages}][+{variant}][-{option}]..., with -plain for no options. `str`
    writes it and `parse` reads it.
    """

    tile_m: int
    tile_n: int
    warps: int
    query_stages: int = 1
    grad_output_stages: int = 0
    register_usage_level: int = 5
    not_on: tuple[str, ...] = ()
    head_dim_split: int = 0
    score_rows: int = 0
    key_stages: int = 1
    variant: str = STANDARD
    options: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in (*_INTEGERS, "not_on"):
            object.__setattr__(self, name, python_value(getattr(self, name)))

    def __str__(self) -> str:
        options = f"c{self.head_dim_split}" if self.head_dim_split else ""
        options += f"q{self.score_rows}" if self.score_rows else ""
        options += f"k{self.key_stages}" if self.key_stages != 1 else ""
        options += f"+{self.variant}" if self.variant else ""
        options += "" if self.options is None else "".join(f"-{name}" for name in self.options or (PLAIN,))
        stages = f"{self.query_stages},{self.grad_output_stages}"
        return f"{self.tile_m}x{self.tile_n}x{self.warps}:{stages}@{self.register_usage_level}{options}"

    @staticmethod
    def of(build: Build) -> TileConfig:
        """Returns the tile of a Build, such as that of `plan.build`, to change some of its fields.

        Its options are () for a kernel body without options that can have some, so that it names this kernel and no
        other.
        """
        if not isinstance(build, Build):
            raise NotSupported(refuse("build", build, "must be a Build", "pass the field `build` of a plan"))
        fields: dict[str, Any] = {name: getattr(build, name) for name in _FIELDS}
        has_choice = build.family == "sm90" and can_have_options(build.kind, build.variant)
        return TileConfig(**fields | {"options": build.options or (() if has_choice else None)})

    @staticmethod
    def parse(text: str) -> TileConfig:
        """Returns the tile of a text form; parts that the text omits have their defaults.

        NotSupported if `text` has another form.
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            rule = (
                "must be like 64x128x16:3,2 or 64x64x8:3,3@5c256+split_d (tile_m, tile_n, warps, query_stages, "
                "grad_output_stages, register usage level, head_dim_split, score_rows, key_stages, variant, options)"
            )
            raise NotSupported(refuse("tile", text, rule, "correct it"))
        parts = {name: part for name, part in zip(_FIELDS, found.groups(), strict=True) if part is not None}
        fields: dict[str, Any] = {name: int(part) for name, part in parts.items() if name in _INTEGERS}
        names = tuple(parts["options"].split("-")[1:])
        options = () if names == (PLAIN,) else names or None
        return TileConfig(**fields, variant=parts.get("variant", STANDARD), options=options)


Tiles = Mapping[int, tuple[TileConfig, ...]]  # by the widest head dim that the tiles serve


def can_have_options(direction: str, variant: str) -> bool:
    """Returns whether kernels of a variant of the sm90 family can have options."""
    return variant in WITH_OPTIONS.get(direction, ())


def tile_refusals(tile: object) -> list[Refusal]:
    """Returns why this is no tile of integers; `build_rules` says which integers a kernel can have."""
    if not isinstance(tile, TileConfig):
        return [refuse("tile", tile, "must be a TileConfig", "create one with TileConfig.parse")]
    found = [
        refuse(f"tile.{name}", getattr(tile, name), "must be an int", "correct it")
        for name in _INTEGERS
        if type(getattr(tile, name)) is not int
    ]
    if not isinstance(tile.variant, str):
        found.append(
            refuse("tile.variant", tile.variant, f"must be a str, {STANDARD!r} for the standard one", "name it")
        )
    options = () if tile.options is None else tile.options
    if not isinstance(options, tuple) or list(options) != [name for name in OPTIONS if name in options]:
        rule = f"must be a tuple of some of {', '.join(OPTIONS)}, in this order and each once, or None"
        found.append(refuse("tile.options", tile.options, rule, "correct it"))
    if not isinstance(tile.not_on, tuple):
        found.append(refuse("tile.not_on", tile.not_on, "must be a tuple of targets", "pass () for none"))
    return found
