"""Plan space: the tiles that a search tries for a case of the benchmark, and why some are never compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from cutlass_py_attn.bench import cases as bench_cases
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels import families
from cutlass_py_attn.kernels.problem_kind import is_mla
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import MLA, SPLIT_D, STANDARD, TWO_CTA, WIDE
from cutlass_py_attn.plan import planner, resources
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import FLOAT8
from cutlass_py_attn.refusals import refuse

FAMILIES: Final = ("sm90", "sm80")
ARCHS: Final = {"sm90": "sm_90a", "sm80": "sm_90"}
MAX_HEAD_DIM: Final = 256  # beyond, kernels split the head dim over blocks or warpgroups

Axes = dict[str, tuple[int | str, ...]]

_LEVELS: Final = (5, 3)
# Values of each field of a TileConfig that a search tries, by family, direction and whether the head dim is split.
_GRIDS: Final[dict[tuple[str, str, bool], Axes]] = {
    ("sm90", "forward", False): {
        "tile_m": (64, 128, 192),
        "tile_n": (64, 80, 96, 112, 128, 144, 160, 176),
        "warps": (8, 12, 16),
        "query_stages": (2, 3),
    },
    ("sm90", "forward", True): {
        "tile_m": (64,),
        "tile_n": (64,),
        "warps": (12,),
        "query_stages": (2, 3),
        "variant": (WIDE,),
    },
    ("sm90", "backward", False): {
        "tile_m": (64, 128),
        "tile_n": (64, 128),
        "warps": (16,),
        "query_stages": (2, 3, 4),
        "grad_output_stages": (1, 2, 3),
        "key_stages": (1, 2),
        "variant": (STANDARD, TWO_CTA),
        "register_usage_level": _LEVELS,
    },
    ("sm90", "backward", True): {
        "tile_m": (64,),
        "tile_n": (64,),
        "warps": (12,),
        "query_stages": (2,),
        "grad_output_stages": (2,),
        "variant": (WIDE,),
    },
    ("sm80", "forward", False): {
        "tile_m": (64, 128),
        "tile_n": (32, 64, 96, 128),
        "warps": (4, 8),
        "register_usage_level": _LEVELS,
    },
    ("sm80", "backward", False): {
        "tile_m": (32, 64, 128),
        "tile_n": (32, 64, 96, 128),
        "warps": (4, 8),
        "query_stages": (1, 2),
        "grad_output_stages": (1, 2),
        "register_usage_level": _LEVELS,
    },
    ("sm80", "forward", True): {
        "tile_m": (64,),
        "tile_n": (64, 128),
        "warps": (8,),
        "query_stages": (2, 3, 4, 5),
        "head_dim_split": (128, 256, 512),
        "variant": (SPLIT_D,),
    },
    ("sm80", "backward", True): {
        "tile_m": (32, 64),
        "tile_n": (64,),
        "warps": (8,),
        "query_stages": (2, 3, 4, 5),
        "grad_output_stages": (2, 3, 4, 5),
        "head_dim_split": (128, 256, 512),
        "variant": (SPLIT_D,),
    },
}


_MLA_GRID: Final[Axes] = {  # keys that contain the values
    "tile_m": (64,),
    "tile_n": (64,),
    "warps": (12,),
    "query_stages": (2,),
    "register_usage_level": _LEVELS,
    "variant": (MLA,),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile for one direction of a case.

    build: what the tile gives
    objections: why the tile is not compiled; empty if nothing rules it out
    is_row: whether it is a tile of the tables that the planner would choose
    """

    build: Build
    objections: tuple[str, ...] = ()
    is_row: bool = False

    @property
    def name(self) -> str:
        """The text form of the tile."""
        return str(TileConfig.of(self.build))


def searched(case: ProblemSpec, direction: str, family: str) -> Problem:
    """Returns the problem whose tiles are searched; NotSupported if this family has no kernel to search for it."""
    if direction not in bench_cases.directions(case):
        raise NotSupported(
            f"case {case.name!r}: has no {direction}; search its {', '.join(bench_cases.directions(case))}"
        )
    problem = case.problem(direction)
    problem.check()
    unsupported = sm90_choice.unsupported_features(problem) if family == "sm90" else ()
    if unsupported:
        raise NotSupported(
            f"case {case.name!r} {direction}: the sm90 family takes no {', '.join(unsupported)}; use --family sm80"
        )
    has_sm80 = problem.dtype != FLOAT8 and not problem.form.has_ranges  # else the sm90 family alone
    if has_sm80 and any(build.family == "decode" for build in planner.builds(problem, ARCHS["sm80"])):
        raise NotSupported(f"case {case.name!r}: decode kernels compute it, whose tiles are not searched; leave it out")
    return problem


def grid(problem: Problem, family: str) -> Iterator[TileConfig]:
    """Yields every tile of the default grid."""
    widest = max(problem.shape.head_dim, problem.shape.head_dim_value)
    axes = _GRIDS[family, problem.direction, widest > MAX_HEAD_DIM]
    if family == "sm90" and is_mla(problem):
        axes = _MLA_GRID
    for values in product(*axes.values()):
        fields: dict[str, Any] = dict(zip(axes, values, strict=True))
        yield TileConfig(**fields)


def candidates(problem: Problem, family: str, arch: str, given: Sequence[TileConfig] = ()) -> list[Candidate]:
    """Returns the tiles of the tables that the planner chooses, in its order, then `given` or the default grid.

    Each build occurs once.
    """
    rows = [Candidate(build, is_row=True) for build in planner.builds(problem, arch) if build.family == family]
    tried = (_candidate(problem, family, arch, tile) for tile in given or grid(problem, family))
    found: dict[Build, Candidate] = {}
    for one in (*rows, *tried):
        found.setdefault(one.build, one)
    return list(found.values())


def _candidate(problem: Problem, family: str, arch: str, tile: TileConfig) -> Candidate:
    """Returns the candidate of a tile, with the options that `plan_with_tile` gives it."""
    limits, tile = architecture(arch), families.FAMILIES[family].with_options(problem, tile)
    build, refused = build_for(problem, arch, tile, family)
    refused = refused or resources.refusals(build, limits)
    if family == "sm90" and not refused and not sm90_choice.applies(problem, tile, limits.num_sms):
        slower = refuse("variant", tile.variant, "the standard variant is faster for these lengths", "use that")
        refused = sm90_choice.refusals(problem, tile) or [slower]
    return Candidate(build, tuple(map(str, refused)))
