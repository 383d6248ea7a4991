"""Plans of mask form "ranges": their kernels, and the arrays that these read beside those of a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import builder, planner, resources, tile_lists
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.tile_lists import Order, TileStates
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor

ARCH = "sm_90a"
FORWARD = {64: "192x128x16:2-speculative-halves", 128: "128x128x12:2-speculative"}  # tile by head dim
BACKWARD = {64: "128x128x16:3,2k2+key_registers", 128: "64x128x16:3,2k2+ds_registers"}


@dataclass(frozen=True)
class ListedPlan:
    """A problem with ranges of keys, its plan, and the int32 arrays that its kernels read, by name."""

    problem: Problem
    plan: Plan
    lists: dict[str, npt.NDArray[Any]]


def ranges_build(problem: Problem, tile: str) -> Build:
    """Returns the Build of a tile for a problem with ranges of keys."""
    build, refused = builder.build_for(problem, ARCH, TileConfig.parse(tile), "sm90")
    assert not [*refused, *resources.refusals(build, architecture(ARCH))]
    return build


def listed_plan(
    problem: Problem, tile: str, num_sms: int, ranges: KeyRanges, kept: npt.NDArray[np.bool_] | None = None
) -> ListedPlan:
    """Returns a problem with ranges of keys, and its plan.

    kept: (query tiles, key tiles) of the Build; pairs of other tiles are hidden too
    """
    key_ranges = tile_lists.device_ranges(ranges, problem.shape.num_keys)
    problem = problem.replace(key_ranges=Tensor.contiguous(key_ranges.shape, "int32"))
    assert not problem.refusals()
    build, shape = ranges_build(problem, tile), problem.shape
    order = Order.of(build, num_sms)
    states = tile_lists.tile_states(ranges, shape.num_keys, build.tile_m, build.tile_n)
    if kept is not None:
        states = TileStates(states.visited & kept, states.whole & kept)
    if build.kind == "forward":
        lists = tile_lists.forward_lists(states, shape.batch, shape.num_heads, build.tile_n, order)
    else:
        heads = shape.batch, shape.num_heads_key, shape.group
        lists = tile_lists.backward_lists(states, *heads, build.tile_n, order)
    arrays = {"work_list": lists.work_list, "tile_entries": lists.tile_entries, "key_ranges": key_ranges}
    return ListedPlan(problem, planner.plan_of_build(problem, build, num_sms), arrays)
