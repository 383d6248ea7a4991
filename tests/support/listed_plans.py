"""Plans of mask form "ranges": their kernels, and the arrays that these read beside those of a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from cutlass_py_attn.problem.masks import RANGES
from cutlass_py_attn.problem.problem import Problem

ARCH = "sm_90a"
FORWARD = {64: "192x128x16:2-speculative-halves", 128: "128x128x12:2-speculative"}  # tile by head dim
BACKWARD = {64: "128x128x16:3,2k2+key_registers", 128: "64x128x16:3,2k2+ds_registers"}


@dataclass(frozen=True)
class ListedPlan:
    """A plan, and the int32 arrays that its kernels read beside those of its problem, by name."""

    plan: Plan
    lists: dict[str, npt.NDArray[Any]]


def ranges_build(problem: Problem, tile: str) -> Build:
    """Returns the Build of a tile with ranges in place of the problem's mask, which is full."""
    build, refused = builder.build_for(problem, ARCH, TileConfig.parse(tile), "sm90")
    assert not refused
    build, refused = builder.finish(replace(build, mask=str(RANGES)))
    assert not [*refused, *resources.refusals(build, architecture(ARCH))]
    return build


def listed_plan(
    problem: Problem, tile: str, num_sms: int, ranges: KeyRanges, kept: npt.NDArray[np.bool_] | None = None
) -> ListedPlan:
    """Returns the plan of a problem with ranges in place of its mask.

    kept: (query tiles, key tiles) of the Build; pairs of other tiles are hidden too
    """
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
    key_ranges = tile_lists.device_ranges(ranges, shape.num_keys)
    steps = (step // key_ranges.itemsize for step in key_ranges.strides[:2])
    strides = [
        (f"key_ranges_{axis}", step if size > 1 else 0)
        for axis, step, size in zip(("batch", "head"), steps, key_ranges.shape[:2], strict=True)
    ]
    arrays = {"work_list": lists.work_list, "tile_entries": lists.tile_entries, "key_ranges": key_ranges}
    plan = planner.plan_of_build(problem, build, num_sms)
    return ListedPlan(replace(plan, params=(*plan.params, *strides)), arrays)
