"""Decode kernels (split-KV): which problems they take, their warps, grids and workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.decode_smem import MAX_QUERIES, team_warps
from cutlass_py_attn.plan.expressions import Expression, Grid
from cutlass_py_attn.plan.tile_rules import DECODE_LEAST_COPY, DECODE_MAX_HEAD_DIM
from cutlass_py_attn.plan.variants import STANDARD, VARIANTS
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import F32_BYTES, ITEM_BYTES, OPERANDS, Shape

MAX_ROWS: Final = 64  # queries of all heads of a group
MIN_KEYS: Final = 256


def unsupported_features(problem: Problem) -> tuple[str, ...]:
    """Returns what the problem has that the decode kernels do not take; empty if they take it."""
    shape, item_bytes = problem.shape, ITEM_BYTES[problem.dtype]
    widest = DECODE_MAX_HEAD_DIM[item_bytes]
    tensors = (getattr(problem, name) for name in (*OPERANDS, "output"))
    present = {
        "backward": problem.direction == "backward",
        f"more than {MAX_QUERIES} queries": shape.num_queries > MAX_QUERIES,
        f"fewer than {MIN_KEYS} keys": shape.num_keys < MIN_KEYS,
        f"more than {MAX_ROWS} queries of a group of heads": shape.num_queries * shape.group > MAX_ROWS,
        f"head dims beyond {widest}": max(shape.head_dim, shape.head_dim_value) > widest,
        f"rows aligned to less than {DECODE_LEAST_COPY} bytes": min(t.vector_bytes for t in tensors)
        < DECODE_LEAST_COPY,
    }
    features = VARIANTS["forward", "decode", STANDARD].features
    found = [name for name in problem.features if name not in features]
    return (*found, *(name for name, is_present in present.items() if is_present))


def is_decode_step(problem: Problem) -> bool:
    """Returns whether the lengths are those of a decode step: few queries and many keys."""
    shape = problem.shape
    return problem.direction == "forward" and shape.num_queries <= MAX_QUERIES and shape.num_keys >= MIN_KEYS


def rejection_reason(problem: Problem) -> str:
    """Returns the end of a sentence: why no decode kernel computes this decode step; empty for other problems."""
    found = unsupported_features(problem) if is_decode_step(problem) else ()
    return f"; a decode kernel takes no {', '.join(found)}" if found else ""


def with_warps(build: Build) -> Build:
    """Returns the build with its warps over (rows, teams)."""
    rows = team_warps(build.tile_m, build.columns_value, build.item_bytes)
    return replace(build, warps_scores=(rows, build.warps // rows))


def row_tiles(build: Build) -> Expression:
    """Returns the tiles of the query rows of one key head."""
    return f"ceil_div(num_queries * group, {build.tile_m})"


def num_splits_key(build: Build) -> Expression:
    """Returns the blocks that share the keys of the same query rows, see split_kv.py."""
    row_blocks = f"{row_tiles(build)} * num_heads_key * batch"
    return f"fewest_splits({row_blocks}, ceil_div(num_keys, {build.tile_n}), num_sms)"


def main_grid(build: Build) -> Grid:
    """Returns the grid of the main kernel."""
    return f"{row_tiles(build)} * num_splits_key", "num_heads_key", "batch"


def workspace(build: Build) -> dict[str, Expression]:
    """Returns the bytes of each workspace buffer of a plan with several splits.

    partial_output: (splits, columns_value) float32 per query row
    partial_logsumexp: (splits,) float32 per query row, in base 2
    """
    rows = "batch * num_heads * num_queries * num_splits_key"
    return {
        "partial_output": f"{rows} * {build.columns_value * F32_BYTES}",
        "partial_logsumexp": f"{rows} * {F32_BYTES}",
    }


def reason(shape: Shape, build: Build, splits: int) -> str:
    """Returns how the kernels of this plan divide the work."""
    rows = shape.num_queries * shape.group
    return (
        f"decode kernels (mma.sync, cp.async): {rows} query rows of a key head in tiles of {build.tile_m}, {splits} "
        "blocks share the keys of each"
    )
