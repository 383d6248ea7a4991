"""Grids: the rule by which each entry's grid follows from a problem, as text that Python, C and others read alike.

The names in a rule are the numbers of Problem's shape, `num_sms`, and `num_splits_key` as the plan has it; `tiles` are
those of a room alone. `ceil_div(a, b)` rounds up, `div(a, b)` down. Beyond 65535 heads or batches a launch is cut into
several.
"""

from __future__ import annotations

from cutlass_py_attn import hopper, kernels
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import DELTA_ROWS
from cutlass_py_attn.streams import blocks_of_tile, sums_of_tile

Rule = tuple[str, str, str]

BIAS_AXES = ("bias_batch", "bias_heads", "bias_queries", "bias_keys")


def grid_rule(build: Build, symbol: str) -> Rule:
    """(x, y, z) of the entry `symbol`."""
    role = next(role for role, name in kernels.entries(build).items() if name == symbol)
    return grid_rules(build)[role]


def grid_rules(build: Build, bias_axes: tuple[str, ...] = BIAS_AXES) -> dict[str, Rule]:
    """(x, y, z) of each entry, by its role; bias_axes: the sizes of grad_bias."""
    if build.kind == "room":
        return {"main": ("tiles", "1", "1")}
    return _forward(build) if build.kind == "forward" else _backward(build, bias_axes)


def _forward(build: Build) -> dict[str, Rule]:
    if build.family == "hopper":
        query_tiles = f"ceil_div(num_queries, {build.tile_m * hopper.cluster(build)})"
        return {"main": _persistent(build, f"{query_tiles} * num_heads * batch")}
    if build.family == "decode":
        rows = f"ceil_div(num_queries * group, {build.tile_m})"
        main = f"{rows} * num_splits_key", "num_heads_key", "batch"
        return {"main": main, "combine": ("num_queries", "num_heads", "batch")}
    query_tiles = f"ceil_div(num_queries, {build.tile_m})"
    return {"main": (_times(query_tiles, blocks_of_tile(build)), "num_heads", "batch")}


def _backward(build: Build, bias_axes: tuple[str, ...]) -> dict[str, Rule]:
    query_tiles = f"ceil_div(num_queries, {build.tile_m})"
    main = _times("num_splits_key", blocks_of_tile(build)), "num_heads_key", "batch"
    if build.family == "hopper":
        keys = build.tile_n * hopper.cluster(build)
        items = "" if build.whole_heads else f"ceil_div(num_keys, {keys}) * "
        main = _persistent(build, f"{items}num_heads_key * batch")
    batch, heads, queries, keys_of_bias = bias_axes
    return {
        "main": main,
        "delta": (_times(query_tiles, ceil_div(build.tile_m, DELTA_ROWS)), "num_heads", "batch"),
        "finish": (_times(query_tiles, sums_of_tile(build)), "num_heads", "batch"),
        "bias": (f"ceil_div({queries}, {build.tile_m}) * ceil_div({keys_of_bias}, {build.tile_n})", heads, batch),
        "sinks": ("num_heads", "1", "1"),
    }


def _persistent(build: Build, items: str) -> Rule:
    """A block for each multiprocessor, or a cluster for as many as it has blocks, which takes several items in turn."""
    together = hopper.cluster(build)
    if together == 1:
        return f"min(num_sms, {items})", "1", "1"
    return f"{together} * max(min(div(num_sms, {together}), {items}), 1)", "1", "1"


def _times(rule: str, factor: int) -> str:
    return rule if factor == 1 else f"{rule} * {factor}"
