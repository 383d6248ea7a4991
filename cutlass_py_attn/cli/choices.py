"""Choices: the builds among which the planner chooses for problems that differ in sizes alone, found without planning.

A plan has launches, a workspace and a reason for every build. The commands that list, name and build kernels need the
builds of many problems, so `Choices` finds each build once, and asks the rules of the planner which comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cutlass_py_attn.kernels.families import FAMILIES, Family
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner, resources
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.problem import Problem


class Choices:
    """The builds of a target for all problems with the dtype, head dims, mask, layout and features of one of them.

    problem: any of them; arch: the target
    """

    def __init__(self, problem: Problem, arch: str) -> None:
        self.problem = problem
        self.arch = arch
        self._limits = architecture(arch)
        self._fitting: dict[tuple[str, TileConfig], Build | None] = {}

    def best(self, problem: Problem, num_sms: int | None = None) -> Build:
        """Returns the build of `planner.plan`: for a problem that differs from this one in sizes alone.

        NotSupported: there is none.
        """
        found = next(self.in_order(problem, num_sms), None)
        return planner.plan(problem, self.arch, num_sms).build if found is None else found

    def in_order(self, problem: Problem, num_sms: int | None = None) -> Iterator[Build]:
        """Yields the builds of `planner.plans` in their order, for a problem as that of `best`."""
        for family in FAMILIES.values():
            if self._takes(problem, family):
                yield from self._fits(family.name, family.tiles(problem, num_sms or self._limits.num_sms, False))

    def of_family(self, family: str) -> Iterator[Build]:
        """Yields every build of a family: the planner chooses each for some sizes, or where an earlier one spills.

        Of two builds with one symbol the first is what the planner chooses.
        """
        if self._takes(self.problem, FAMILIES[family]):
            yield from self._fits(family, FAMILIES[family].every_tile(self.problem, self._limits.num_sms))

    def _takes(self, problem: Problem, family: Family) -> bool:
        is_possible = self._limits.has_wgmma or not family.needs_wgmma
        return is_possible and not family.unsupported_features(problem)

    def _fits(self, family: str, tiles: Iterable[TileConfig]) -> Iterator[Build]:
        """Yields the builds of the tiles that fit the target."""
        for tile in tiles:
            if self.arch in tile.not_on:
                continue
            if (family, tile) not in self._fitting:
                build, refused = build_for(self.problem, self.arch, tile, family)
                fits = not (refused or resources.refusals(build, self._limits))
                self._fitting[family, tile] = build if fits else None
            found = self._fitting[family, tile]
            if found is not None:
                yield found
