"""Plan space: which tiles could serve a case of the benchmark, and what rules each out before it is compiled.

A tile is written {tile_m}x{tile_n}x{warps}[:{query_stages}[,{grad_output_stages}]][@{register usage level}]
[c{column_block}][q{query_block}][k{key_stages}][h][m], h for whole heads, m for multicast, as in 64x128x16:3,2 or
64x64x8:3,3@5c256.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from cutlass_py_attn import budget, hopper, plan_table, planner, shared_memory
from cutlass_py_attn.bench_cases import Case
from cutlass_py_attn.device import architecture
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.gemm.gemm import WARPGROUP_WARPS
from cutlass_py_attn.plan import Build
from cutlass_py_attn.plan_table import Tile
from cutlass_py_attn.problem import Problem

FAMILIES: Final = ("hopper", "generic")
ARCHS: Final = {"hopper": "sm_90a", "generic": "sm_90"}
RESIDENT: Final = 256  # head dims beyond this are computed a block of columns at a time
MAX_WGMMA_COLUMNS: Final = 256
WARPGROUP_ROWS: Final = 64  # of the result of one wgmma
DEPTH: Final = 16  # what one wgmma of 16 bits sums over
_TILE: Final = re.compile(
    r"(\d+)x(\d+)x(\d+)(?::(\d+)(?:,(\d+))?)?(?:@(\d+))?(?:c(\d+))?(?:q(\d+))?(?:k(\d+))?(h)?(m)?"
)

_NUMBERS: Final = (
    *("tile_m", "tile_n", "warps", "query_stages", "grad_output_stages", "register_usage_level"),
    *("column_block", "query_block", "key_stages", "whole_heads", "multicast"),
)

Axes = dict[str, tuple[int, ...]]

_LEVELS: Final = (5, 3)
# What is tried of each number of a Tile, by family, direction and whether the head is streamed.
_GRIDS: Final[dict[tuple[str, str, bool], Axes]] = {
    ("hopper", "forward", False): {
        "tile_m": (128, 192),
        "tile_n": (64, 80, 96, 112, 128, 144, 160, 176),
        "warps": (12, 16),
        "query_stages": (2, 3),
    },
    ("hopper", "backward", False): {
        "tile_m": (64, 128),
        "tile_n": (64, 128),
        "warps": (16,),
        "query_stages": (2, 3, 4),
        "grad_output_stages": (1, 2, 3),
        "key_stages": (1, 2),
        "register_usage_level": _LEVELS,
    },
    ("generic", "forward", False): {
        "tile_m": (64, 128),
        "tile_n": (32, 64, 96, 128),
        "warps": (4, 8),
        "register_usage_level": _LEVELS,
    },
    ("generic", "backward", False): {
        "tile_m": (32, 64, 128),
        "tile_n": (32, 64, 96, 128),
        "warps": (4, 8),
        "query_stages": (1, 2),
        "grad_output_stages": (1, 2),
        "register_usage_level": _LEVELS,
    },
    ("generic", "forward", True): {
        "tile_m": (64,),
        "tile_n": (64, 128),
        "warps": (8,),
        "query_stages": (2, 3, 4, 5),
        "column_block": (128, 256, 512),
    },
    ("generic", "backward", True): {
        "tile_m": (32, 64),
        "tile_n": (64,),
        "warps": (8,),
        "query_stages": (2, 3, 4, 5),
        "grad_output_stages": (2, 3, 4, 5),
        "column_block": (128, 256, 512),
    },
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One tile for one direction of a case. why_not is empty where nothing rules it out before it is compiled; is_row:
    whether it is a row of the plan table that the planner would take."""

    build: Build
    why_not: tuple[str, ...] = ()
    is_row: bool = False

    @property
    def name(self) -> str:
        """The tile as text."""
        return name_of(self.build)


def name_of(build: Build) -> str:
    """The text of the tile that gives this build."""
    return text_of(
        Tile(
            build.tile_m,
            build.tile_n,
            build.warps,
            build.query_stages,
            build.grad_output_stages,
            build.register_usage_level,
            column_block=build.column_block,
            query_block=build.query_block,
            key_stages=build.key_stages,
            whole_heads=build.whole_heads,
            multicast=build.multicast,
        )
    )


def text_of(tile: Tile) -> str:
    """Every number of a tile, in the form that `parse_tile` reads."""
    block = f"c{tile.column_block}" if tile.column_block else ""
    block += f"q{tile.query_block}" if tile.query_block else ""
    block += f"k{tile.key_stages}" if tile.key_stages > 1 else ""
    block += ("h" if tile.whole_heads else "") + ("m" if tile.multicast else "")
    stages = f":{tile.query_stages},{tile.grad_output_stages}"
    return f"{tile.tile_m}x{tile.tile_n}x{tile.warps}{stages}@{tile.register_usage_level}{block}"


def parse_tile(text: str) -> Tile:
    """The tile of such a text, what it leaves out as in a Tile; NotSupported shows the form."""
    found = _TILE.fullmatch(text)
    if found is None:
        raise NotSupported(
            f"tile {text!r}: must be like 64x128x16:3,2 or 64x64x8:3,3@5c256 (query rows, key rows, warps, stages of "
            "query and of grad_output, register usage level, column block, query block, key tiles, h: whole heads, m: "
            "multicast); correct it"
        )
    numbers = dict(zip(_NUMBERS, found.groups(), strict=True))
    given: dict[str, Any] = {
        name: number in ("h", "m") or int(number) for name, number in numbers.items() if number is not None
    }
    return replace(Tile(0, 0, 0), **given)


def searched(case: Case, direction: str, family: str) -> Problem:
    """The problem whose tiles are searched; NotSupported where this family has no kernel to search for it."""
    if direction not in case.directions:
        raise NotSupported(f"case {case.name!r}: has no {direction}; search its {', '.join(case.directions)}")
    problem = case.problem(direction)
    problem.check()
    lacking = hopper.lacking(problem) if family == "hopper" else ()
    if lacking:
        raise NotSupported(
            f"case {case.name!r} {direction}: the Hopper family takes no {', '.join(lacking)}; use --family generic"
        )
    if any(build.family == "decode" for build in planner.builds(problem, ARCHS["generic"])):
        raise NotSupported(f"case {case.name!r}: decode kernels serve it, whose tiles are not searched; leave it out")
    return problem


def grid(problem: Problem, family: str) -> Iterator[Tile]:
    """Every tile of the default grid."""
    widest = max(problem.shape.head_dim, problem.shape.head_dim_value)
    axes = _GRIDS[family, problem.direction, family == "generic" and widest > RESIDENT]
    for numbers in product(*axes.values()):
        named: dict[str, Any] = dict(zip(axes, numbers, strict=True))
        yield replace(Tile(0, 0, 0), **named)


def candidates(problem: Problem, family: str, arch: str, given: Sequence[Tile] = ()) -> list[Candidate]:
    """The rows of the plan table that the planner takes, in its order, then `given` or the default grid: each build
    once."""
    rows = [Candidate(build, is_row=True) for build in planner.builds(problem, arch) if build.family == family]
    tried = (_candidate(problem, family, arch, tile) for tile in given or grid(problem, family))
    found: dict[Build, Candidate] = {}
    for one in (*rows, *tried):
        found.setdefault(one.build, one)
    return list(found.values())


def _candidate(problem: Problem, family: str, arch: str, tile: Tile) -> Candidate:
    build = planner._build(problem, arch, tile, family)
    against_rules = tuple(_hopper_objections(build)) if family == "hopper" else ()
    if build.whole_heads and not hopper.suits_heads(problem, tile, architecture(arch).num_sms):
        against_rules += ("whole_heads = True: heads are too few or too long, or some queries see no key",)
    if build.multicast and not hopper.suits_multicast(problem):
        against_rules += ("multicast = True: for long dense causal forwards without terms",)
    return Candidate(build, against_rules or tuple(budget.objections(build, architecture(arch))))


def _hopper_objections(build: Build) -> Iterator[str]:
    """What the Hopper kernels' division of a block into warpgroups does not allow."""
    if build.kind == "backward":
        others, served = hopper.LOADERS + hopper.DQ_WARPGROUPS, [hopper.CONSUMERS]
    else:
        others, served = hopper.LOADERS, [rows // WARPGROUP_ROWS for rows in shared_memory.FORWARD_REGISTERS]
    consumers = build.warps // WARPGROUP_WARPS - others
    if consumers not in served:
        yield f"warps = {build.warps}: the kernel has registers for {_listed(served)} warpgroups that multiply"
        return
    rules = (_backward_rules if build.kind == "backward" else _forward_rules)(build, consumers)
    yield from (f"{name} = {getattr(build, name)}: {why}" for name, is_met, why in rules if not is_met)


def _forward_rules(build: Build, consumers: int) -> Iterator[tuple[str, bool, str]]:
    """(field, whether it is as the Hopper forward needs it, why)."""
    yield "tile_m", build.tile_m == consumers * WARPGROUP_ROWS, f"each warpgroup owns {WARPGROUP_ROWS} rows"
    yield "tile_n", build.tile_n % DEPTH == 0, f"P V sums over {DEPTH} keys at once"
    yield "tile_n", build.tile_n <= MAX_WGMMA_COLUMNS, f"wgmma has up to {MAX_WGMMA_COLUMNS} columns"


def _backward_rules(build: Build, consumers: int) -> Iterator[tuple[str, bool, str]]:
    """(field, whether it is as the Hopper backward needs it, why)."""
    yield "query_stages", build.query_stages > 1, "a slot is held until the next tile is multiplied"
    staged = build.block_queries == build.tile_m and not _is_wide(build)
    yield "key_stages", build.key_stages in ((1, 2) if staged else (1,)), "two where a block works on whole query tiles"
    yield "multicast", not build.multicast, "the forward's alone"
    yield "whole_heads", staged or not build.whole_heads, "sums of dQ come back through the place of what is sent"
    if _is_wide(build):
        yield "tile_m", build.tile_m == WARPGROUP_ROWS, f"dQ of both blocks is {WARPGROUP_ROWS} rows"
        yield "tile_n", build.tile_n == WARPGROUP_ROWS, f"a warpgroup has one gradient of {WARPGROUP_ROWS} keys"
        yield "grad_output_stages", build.grad_output_stages > 1, "a slot is held until the next tile is multiplied"
        return
    yield "tile_m", build.tile_m % WARPGROUP_ROWS == 0, f"dQ leaves by {WARPGROUP_ROWS} rows"
    yield "tile_n", build.tile_n == consumers * WARPGROUP_ROWS, f"each warpgroup of the keys owns {WARPGROUP_ROWS}"
    block, slots = build.block_queries, build.grad_output_stages
    yield "query_block", not (build.query_block and build.has("dropout")), "bits of weights are drawn for whole tiles"
    yield "query_block", build.tile_m % block == block % DEPTH == 0, f"a tile is blocks, of multiples of {DEPTH} rows"
    yield "grad_output_stages", slots * block % build.tile_m == 0, "as many slots of dS hold whole query tiles"


def _is_wide(build: Build) -> bool:
    return not build.query_block and max(build.head_dim, build.head_dim_value) > plan_table.NARROW


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))
