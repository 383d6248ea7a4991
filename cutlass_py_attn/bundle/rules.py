"""Rules: the numbers of a launch as short expressions, which a host of any language evaluates for its own sizes.

A rule is arithmetic (+ - *, comparisons, brackets) over names and the functions below; it reads alike in Python and in
C. Sizes and strides are 64-bit integers, factors float64. What the names stand for is in `numbers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from cutlass_py_attn import decode, planner
from cutlass_py_attn.grids import Rule, grid_rules
from cutlass_py_attn.hopper import RAGGED_BYTES, RAGGED_ROWS
from cutlass_py_attn.parts.integers import ceil_div, round_up
from cutlass_py_attn.plan import Build, TensorMap
from cutlass_py_attn.problem import BIASES, F32_BYTES, ITEM_BYTES, WORD_BYTES, Problem, Tensor
from cutlass_py_attn.streams import blocks_of_tile, sum_columns, sums_of_tile

NAME: Final = re.compile(r"(?<![\w.])[a-z_][a-z0-9_]*")
LOG2_E: Final = math.log2(math.e)
WHOLE: Final = ("batch", "num_heads", "num_queries", "num_keys")  # the axes of a bias


def _step(size: int, stride: int, other: int) -> int:
    return other if size == 1 else stride


# What a rule may call. step: the stride of an axis, or `other` where the axis has one index, along which nothing steps.
FUNCTIONS: Final[dict[str, Callable[..., int]]] = {
    "ceil_div": ceil_div,
    "div": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "round_up": round_up,
    "min": min,
    "max": max,
    "step": _step,
    "fewest_splits": decode.fewest_splits,
}


def evaluate(rule: str, names: Mapping[str, float]) -> Any:
    """The value of a rule made here, NameError for a name it lacks; not for text from elsewhere."""
    return eval(rule, {"__builtins__": {}}, {**FUNCTIONS, **names})


def names_of(rule: str) -> set[str]:
    """The names that a rule reads, functions apart."""
    return set(NAME.findall(rule)) - FUNCTIONS.keys()


def definitions(problem: Problem, build: Build) -> dict[str, str]:
    """Numbers that other rules and struct fields name, each by those before it."""
    found = {"group": "div(num_heads, max(num_heads_key, 1))"}
    if build.family == "decode":
        groups = f"{_row_tiles(build)} * num_heads_key * batch"
        found["num_splits_key"] = f"fewest_splits({groups}, ceil_div(num_keys, {build.tile_n}), num_sms)"
    if build.kind == "backward":
        tokens = problem.sequences is not None
        tiles = f"div(tokens_q, {build.tile_m}) + batch" if tokens else f"batch * ceil_div(num_queries, {build.tile_m})"
        found |= {"num_splits_key": _num_splits_key(problem, build), "total_tiles": tiles}
    return found


def _num_splits_key(problem: Problem, build: Build) -> str:
    key_tiles = f"ceil_div(num_keys, {build.tile_n})"
    if problem.num_splits_key is not None:
        return f"min({problem.num_splits_key}, {key_tiles})"
    if build.deterministic or build.family == "hopper":
        return key_tiles
    return f"min({key_tiles}, ceil_div({planner.SPLIT_WAVES} * num_sms, max(batch * num_heads_key, 1)))"


def _row_tiles(build: Build) -> str:
    return f"ceil_div(num_queries * group, {build.tile_m})"


def grids(problem: Problem, build: Build) -> dict[str, Rule]:
    """The grid of each entry, by its role."""
    return grid_rules(build) if problem.grad_bias is None else grid_rules(build, bias_axes(problem.grad_bias))


def when(build: Build, name: str) -> str:
    """The condition for a launch (by its role) or a part of the workspace; "1" where it is always there."""
    optional = build.family == "decode" and name in ("combine", "partial_output", "partial_logsumexp")
    return "num_splits_key > 1" if optional else "1"


def workspace(build: Build) -> dict[str, str]:
    """Bytes of each part of the workspace, in its order."""
    if build.family == "decode":
        rows = "batch * num_heads * num_queries * num_splits_key"
        output = f"{rows} * {build.columns_value * F32_BYTES}"
        return {"partial_output": output, "partial_logsumexp": f"{rows} * {F32_BYTES}"}
    if build.kind == "forward":
        return {}
    found = {}
    if "query" in build.gradients:
        sums = f"num_heads * total_tiles * {sums_of_tile(build)}"
        found["grad_query_accum"] = f"{sums} * {build.tile_m * sum_columns(build) * F32_BYTES}"
        if build.deterministic:
            found["turn"] = f"{sums} * {WORD_BYTES}"
    if build.family == "hopper":
        found["started"] = str(WORD_BYTES)
    elif build.deterministic:
        found["started"] = f"num_heads_key * batch * {blocks_of_tile(build) * WORD_BYTES}"
    rows = f"num_heads * total_tiles * {build.tile_m * F32_BYTES}"
    return found | {"delta": rows, "logsumexp_log2": rows}


def shape(problem: Problem, name: str) -> tuple[str, ...]:
    """The sizes of a tensor: [batch, rows, heads, columns], or [batch, heads, queries, keys] of a bias."""
    tensor = problem.tensors()[name]
    if name in BIASES:
        return bias_axes(tensor)
    of_key = name.removeprefix("grad_") in ("key", "value")
    batch, rows = "batch", "num_keys" if of_key else "num_queries"
    if problem.sequences is not None:
        batch, rows = "1", "tokens_k" if of_key else "tokens_q"
    return batch, rows, "num_heads_key" if of_key else "num_heads", str(tensor.shape[3])


def bias_axes(tensor: Tensor) -> tuple[str, ...]:
    """The sizes of the axes of a bias or its gradient: 1 where it broadcasts, or is summed."""
    return tuple("1" if size == 1 else name for size, name in zip(tensor.shape, WHOLE, strict=True))


def tensor_map(problem: Problem, recipe: TensorMap) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(sizes, strides) of a map in elements, innermost axis first; the innermost stride, 1, is left out."""
    batch, rows, heads, columns = shape(problem, recipe.field)
    axes = (rows, "row"), (heads, "head"), (batch, "batch")
    strides = tuple(f"step({size}, {recipe.field}_{axis}, {columns})" for size, axis in axes)
    if problem.sequences is None:
        return (columns, rows, heads, batch), strides
    row, head, _ = strides
    around = f"{RAGGED_BYTES // RAGGED_ROWS // ITEM_BYTES[problem.dtype]} - {row}"
    sizes = columns, str(RAGGED_ROWS), heads, f"{rows} + 1", str(RAGGED_ROWS + 1)
    return sizes, (row, head, row, around)


def fields(problem: Problem, build: Build, inputs: Collection[str]) -> dict[str, str]:
    """The struct fields that are numbers, by name: an input, a definition, or what the problem fixes."""
    found = {name: str(value) for name, value in planner.sizes(problem, build)}
    found |= {name: name for name in (*definitions(problem, build), *inputs)}
    return {"keep_scale": "1", **found, "scale_log2": f"scale * {LOG2_E!r}"}
