"""Row: a line of a tile table, which is one tuning decision: a tile with its options, when it is tried, its speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.kernels.sm90_family.tile_options import with_options
from cutlass_py_attn.launch.expressions import ONE, Expr, Number
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import WITH_OPTIONS
from cutlass_py_attn.problem.masks import FORMS

NEVER: Final = Number(0)
ANY_DIMS: Final = 0, 1 << 10


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a tile is computed, in nanoseconds.

    start: of a work tile, beside its key tiles: the first load, the last product, the store
    key_tile: of a key tile
    """

    start: int
    key_tile: int


Rule = Callable[[ProblemKind, TileConfig], Expr]


def always(kind: ProblemKind, tile: TileConfig) -> Expr:
    """Returns the rule of a row for problems of any sizes."""
    return ONE


def never(kind: ProblemKind, tile: TileConfig) -> Expr:
    """Returns the rule of a row for problems of no sizes."""
    return NEVER


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One line of a tile table; a table has the rows in the order in which the planner tries them.

    text: the tile with its options, as `TileConfig.parse` reads it; -plain for none where a kernel body could have some
    speed: by the widest head dim that they hold for, as `tile_time` uses them; or why nothing is known
    dims: both head dims that the options were measured with, more than the first and up to the second; with others the
        tile has none
    masks: forms of the masks that it is for
    when: the sizes for which it is tried
    measured: the sizes for which it was measured to be the fastest of its table, which its speed does not say
    any_length: whether it is for sequences of any lengths, so that a kernel set for run-time lengths can rely on it
    """

    text: str
    speed: Mapping[int, Speed] | str
    dims: tuple[int, int] = ANY_DIMS
    masks: tuple[str, ...] = FORMS
    when: Rule = always
    measured: Rule = never
    any_length: bool = True
    tile: TileConfig = field(init=False)

    def __post_init__(self) -> None:
        tile = TileConfig.parse(self.text)
        if tile.options is None and any(tile.variant in variants for variants in WITH_OPTIONS.values()):
            raise ValueError(f"row {self.text}: must say its options; write -plain for none")
        object.__setattr__(self, "tile", tile)

    def options_for(self, kind: ProblemKind) -> tuple[str, ...]:
        """Returns the options that were measured with these head dims."""
        least, most = self.dims
        return self.tile.options or () if all(least < dim <= most for dim in kind.dims) else ()

    def tile_for(self, kind: ProblemKind) -> TileConfig:
        """Returns the tile, with those of the options that its kernel body can have."""
        return with_options(kind, self.tile, self.options_for(kind))

    def when_for(self, kind: ProblemKind) -> Expr:
        """Returns the rule that is 1 for sizes for which the row is tried."""
        return self.when(kind, self.tile)
