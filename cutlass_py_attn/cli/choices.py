"""Choices: the builds among which the planner chooses for problems that differ in sizes alone, found without planning.

A plan has launches, a workspace and a reason for every build. The commands that list, name and build kernels need the
builds of many problems, so `Choices` finds each build once, and asks the rules of the planner which comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from cutlass_py_attn.plan import decode, planner, resources, sm80, sm90
from cutlass_py_attn.plan.arch import architecture
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.tile_options import with_options
from cutlass_py_attn.plan.tiles import decode_tiles, sm80_tiles, sm90_tiles
from cutlass_py_attn.plan.variants import SPLIT_KV, STANDARD
from cutlass_py_attn.problem.problem import Problem

FAMILIES: Final = ("decode", "sm90", "sm80")  # in the order of the planner


class Choices:
    """The builds of a target for all problems with the dtype, head dims, mask, layout and features of one of them.

    problem: any of them; arch: the target
    """

    def __init__(self, problem: Problem, arch: str) -> None:
        self.problem = problem
        self.arch = arch
        self._limits = architecture(arch)
        self._fitting: dict[tuple[str, TileConfig], Build | None] = {}
        self._sm90_tiles: tuple[TileConfig, ...] | None = None

    def best(self, problem: Problem, num_sms: int | None = None) -> Build:
        """Returns the build of `planner.plan`: for a problem that differs from this one in sizes alone.

        NotSupported: there is none.
        """
        found = next(self.in_order(problem, num_sms), None)
        return planner.plan(problem, self.arch, num_sms).build if found is None else found

    def in_order(self, problem: Problem, num_sms: int | None = None) -> Iterator[Build]:
        """Yields the builds of `planner.plans` in their order, for a problem as that of `best`."""
        for family in FAMILIES:
            if self._takes(problem, family):
                yield from self._fits(family, self._tiles_for(problem, family, num_sms))

    def of_family(self, family: str) -> Iterator[Build]:
        """Yields every build of a family: the planner chooses each for some sizes, or where an earlier one spills.

        Of two builds with one symbol the first is what the planner chooses.
        """
        if not self._takes(self.problem, family):
            return
        if family != "sm90":
            yield from self._fits(family, self._tiles_for(self.problem, family, None))
            return
        tiles = self._of_sm90(self.problem)
        preferred = sm90.applying(self.problem, tiles, self._limits.num_sms)
        standard = [tile for tile in tiles if tile.variant == STANDARD]
        in_parts = [with_options(self.problem, replace(tile, variant=SPLIT_KV)) for tile in standard]
        shares_keys = in_parts and not sm90.objections(self.problem, in_parts[0])
        yield from self._fits(family, dict.fromkeys((*preferred, *tiles, *(in_parts if shares_keys else ()))))

    def _takes(self, problem: Problem, family: str) -> bool:
        if family == "sm90":
            return self._limits.has_wgmma and not sm90.unsupported_features(problem)
        return not (decode if family == "decode" else sm80).unsupported_features(problem)

    def _tiles_for(self, problem: Problem, family: str, num_sms: int | None) -> Iterable[TileConfig]:
        """Returns the tiles of a family that the planner tries, in its order."""
        if family == "sm90":
            return sm90.applicable(problem, self._of_sm90(problem), num_sms or self._limits.num_sms)
        return decode_tiles(problem) if family == "decode" else sm80_tiles(problem)

    def _of_sm90(self, problem: Problem) -> tuple[TileConfig, ...]:
        if self._sm90_tiles is None:
            self._sm90_tiles = sm90_tiles(problem)
        return self._sm90_tiles

    def _fits(self, family: str, tiles: Iterable[TileConfig]) -> Iterator[Build]:
        """Yields the builds of the tiles that fit the target."""
        for tile in tiles:
            if self.arch in tile.not_on:
                continue
            if (family, tile) not in self._fitting:
                build, objections = build_for(self.problem, self.arch, tile, family)
                fits = not (objections or resources.objections(build, self._limits))
                self._fitting[family, tile] = build if fits else None
            found = self._fitting[family, tile]
            if found is not None:
                yield found
