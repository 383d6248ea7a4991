"""Grids: the rule by which each entry's grid follows from a problem, as text that Python can evaluate.

The names in a rule are the numbers of Problem's shape (`bias_*`: of grad_bias; `tiles`: of a room alone), `num_sms`,
and `num_splits_key` as the plan has it; `ceil_div(a, b)` rounds up. Beyond 65535 heads or batches a launch is cut into
several.
"""

from __future__ import annotations

from cutlass_py_attn import kernels
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import DELTA_ROWS
from cutlass_py_attn.streams import blocks_of_tile, sums_of_tile

Rule = tuple[str, str, str]


def grid_rule(build: Build, symbol: str) -> Rule:
    """(x, y, z) of the entry `symbol`."""
    if build.kind == "room":
        return "tiles", "1", "1"
    role = next(role for role, name in kernels.entries(build).items() if name == symbol)
    return _forward(build, role) if build.kind == "forward" else _backward(build, role)


def _forward(build: Build, role: str) -> Rule:
    if role == "combine":
        return "num_queries", "num_heads", "batch"
    if build.family == "decode":
        return f"ceil_div(num_queries * group, {build.tile_m}) * num_splits_key", "num_heads_key", "batch"
    if build.family == "hopper":
        return _persistent(f"ceil_div(num_queries, {build.tile_m}) * num_heads * batch")
    return _times(f"ceil_div(num_queries, {build.tile_m})", blocks_of_tile(build)), "num_heads", "batch"


def _backward(build: Build, role: str) -> Rule:
    query_tiles = f"ceil_div(num_queries, {build.tile_m})"
    if role == "main" and build.family == "hopper":
        return _persistent(f"ceil_div(num_keys, {build.tile_n}) * num_heads_key * batch")
    if role == "main":
        return _times("num_splits_key", blocks_of_tile(build)), "num_heads_key", "batch"
    if role == "delta":
        return _times(query_tiles, ceil_div(build.tile_m, DELTA_ROWS)), "num_heads", "batch"
    if role == "finish":
        return _times(query_tiles, sums_of_tile(build)), "num_heads", "batch"
    if role == "bias":
        tiles = f"ceil_div(bias_queries, {build.tile_m}) * ceil_div(bias_keys, {build.tile_n})"
        return tiles, "bias_heads", "bias_batch"
    return "num_heads", "1", "1"


def _persistent(items: str) -> Rule:
    """A block for each multiprocessor, which takes several items in turn."""
    return f"min(num_sms, {items})", "1", "1"


def _times(rule: str, factor: int) -> str:
    return rule if factor == 1 else f"{rule} * {factor}"
