"""Families: what the planner asks about the kernels of one tile table, in the order in which it tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.decode.layout import MAX_QUERIES
from cutlass_py_attn.kernels.decode.tiles import decode_tiles
from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.kernels.sm80 import kernel as sm80
from cutlass_py_attn.kernels.sm80.tiles import sm80_tiles
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_family import tile_time
from cutlass_py_attn.kernels.sm90_family.tiles import sm90_rows, with_nearest_options
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The fused kernels of one tile table: what the planner asks before there is a Build.

    name: the field `family` of their Builds
    needs_wgmma: whether they are compiled for a GPU's own target alone, and not for a portable one
    unsupported_features: what a problem has that they do not take; () if they take it
    reads_all_codes: whether they alone take a query of e4m3 codes, and latent rows of them
    least_page_size: rows of the smallest page that they read
    tiles: the tiles that the planner tries for a problem on so many multiprocessors, the fastest first; those for
        sequences of any length alone if the last argument says so
    every_tile: the tiles that it tries for any sizes, those for the sizes of the problem first
    with_options: a tile of a caller, with options if it leaves them open
    refusals: why the variant of a tile would compute a problem wrongly, which the rules of its Build do not see
    rejection: the end of a sentence that says why they do not compute a problem; "" for a problem that is not theirs
    preference: the end of a sentence that says why the planner prefers the tile of a Build on so many multiprocessors
    order: sort key of Builds that take the same calls: the first is tried first
    preferred_when: the rule that is 1 for sizes of a call for which the planner has a Build, not one of the others
    sizes: the sizes for which it has a Build, in words; "" for any
    """

    name: str
    needs_wgmma: bool = False
    reads_all_codes: bool = False
    least_page_size: int = 1
    unsupported_features: Callable[[Problem], tuple[str, ...]]
    tiles: Callable[[Problem, int, bool], Iterable[TileConfig]]
    every_tile: Callable[[Problem, int], Iterable[TileConfig]]
    with_options: Callable[[Problem, TileConfig], TileConfig] = lambda problem, tile: tile
    refusals: Callable[[Problem, TileConfig], list[Refusal]] = lambda problem, tile: []
    rejection: Callable[[Problem], str] = lambda problem: ""
    preference: Callable[[Problem, Build, int], str] = lambda problem, build, num_sms: ""
    order: Callable[[Build], tuple[int, ...]] = lambda build: (build.tile_m, build.tile_n)
    preferred_when: Callable[[Build, Sequence[Build]], Expr] = lambda build, others: ONE
    sizes: Callable[[Build], str] = lambda build: ""


def _sm90_preference(problem: Problem, build: Build, num_sms: int) -> str:
    return tile_time.reason(problem, build, sm90_rows(ProblemKind.of(problem)), num_sms)


_DECODE: Final = Family(
    name="decode",
    unsupported_features=decode.unsupported_features,
    tiles=lambda problem, num_sms, any_length: decode_tiles(problem),
    every_tile=lambda problem, num_sms: decode_tiles(problem),
    rejection=decode.rejection_reason,
    sizes=lambda build: f"up to {MAX_QUERIES} queries of {decode.MIN_KEYS} keys or more",
)
_SM90: Final = Family(
    name="sm90",
    needs_wgmma=True,
    reads_all_codes=True,
    least_page_size=sm90_choice.LEAST_PAGE_SIZE,
    unsupported_features=sm90_choice.unsupported_features,
    tiles=lambda problem, num_sms, any_length: sm90_choice.applicable(problem, num_sms, any_length=any_length),
    every_tile=sm90_choice.every_tile,
    with_options=with_nearest_options,
    refusals=sm90_choice.refusals,
    rejection=sm90_choice.rejection_reason,
    preference=_sm90_preference,
    order=sm90_choice.order,
    preferred_when=sm90_choice.preferred_when,
    sizes=sm90_choice.sizes_in_words,
)
_SM80: Final = Family(
    name="sm80",
    unsupported_features=sm80.unsupported_features,
    tiles=lambda problem, num_sms, any_length: sm80_tiles(problem),
    every_tile=lambda problem, num_sms: sm80_tiles(problem),
)
FAMILIES: Final[dict[str, Family]] = {family.name: family for family in (_DECODE, _SM90, _SM80)}
