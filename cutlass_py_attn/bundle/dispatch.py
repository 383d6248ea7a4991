"""Dispatch: which kernel of several computes a call: what its machine code fixes, and the order in which to try it.

A kernel takes a call if the call has its facts, its conditions hold, and the device runs it. The first such kernel is
chosen: decode before sm90 before sm80, wide loads before narrow ones, the newest target first. A kernel that is for
calls of some sizes alone is tried for these before the others of its family, and for other calls after them
(`preferred_when`): decode kernels for their number of query rows, sm90 kernels for long sequences or few key tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.plan import decode, planner, sm90
from cutlass_py_attn.plan.arch import architecture
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.expressions import Expression
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.plan.variants import MULTICAST, QUERY_HEADS
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import SHORT_NAMES

ALWAYS: Final = "1"
NEVER: Final = "0"
_FAMILIES: Final = ("decode", "sm90", "sm80")  # in the order in which they are tried


@dataclass(frozen=True, slots=True)
class Facts:
    """What the machine code of a kernel fixes.

    features: sorted features of the Problem, and options of its pages that only the rules of launches have
    gradients: those that a backward writes
    grad_bias_axes: for each axis (batch, heads, queries, keys) whether grad_bias has it in full; () for no grad_bias
    num_splits_key: the caller's number of splits of a backward; 0 for the plan's
    """

    direction: str
    dtype: str
    head_dim: int
    head_dim_value: int
    mask: str
    features: tuple[str, ...]
    gradients: tuple[str, ...]
    deterministic: bool
    grad_bias_axes: tuple[bool, ...]
    num_splits_key: int


def facts_of(problem: Problem, build: Build) -> Facts:
    """Returns the facts of the kernels that were exported for a problem."""
    backward = problem.direction == "backward"
    return Facts(
        problem.direction,
        build.dtype,
        build.head_dim,
        build.head_dim_value,
        build.mask,
        (*build.features, *_of_pages(problem)),
        build.gradients if backward else (),
        build.deterministic,
        () if problem.grad_bias is None else tuple(size != 1 for size in problem.grad_bias.shape),
        (problem.num_splits_key or 0) if backward else 0,
    )


def _of_pages(problem: Problem) -> tuple[str, ...]:
    """Returns the options of a paged problem that change the rules of its launches, not its machine code."""
    pages = problem.pages
    given = {} if pages is None else {"invariant": pages.invariant, "page_indptr": pages.page_indptr}
    return tuple(name for name, is_set in given.items() if is_set)


def family_order(build: Build) -> int:
    """Returns the position of the build's family in the order in which families are tried."""
    return _FAMILIES.index(build.family)


def order_key(build: Build) -> tuple[int | bool, ...]:
    """Sort key of kernels with the same facts: the first is tried first."""
    limits = architecture(build.arch)
    major, minor = limits.compute_capability
    loads = build.vector_bytes, build.bias_vector_bytes, build.grad_bias_vector_bytes
    return (
        family_order(build),
        *(-size for size in loads),
        limits.is_portable,
        -major,
        -minor,
        build.tile_m,
        build.tile_n,
    )


def preferred_when(build: Build) -> Expression:
    """Returns the rule that is 1 if the planner has this kernel for a call of such sizes, among those that take it.

    Never 1 for a kernel whose sizes no rule describes: the planner chooses it for the lengths of one problem.
    """
    if build.variant == MULTICAST:
        return f"min(num_queries, num_keys) >= {sm90.MULTICAST_LENGTH}"
    if build.variant == QUERY_HEADS:
        return f"{sm90.QUERY_HEADS_WORK_TILES} * num_sms > {_key_tiles(build)} * num_heads_key"
    if build.body.lengths != "any":
        return NEVER
    if build.family != "decode":
        return ALWAYS
    kind = build.dtype, build.head_dim, build.head_dim_value, build.has("paged")
    rows = _rows_of_tile(*kind, build.arch, str(TileConfig.of(build)))
    if not rows:
        return NEVER
    if len(rows) == _most_rows(build.has("paged")):
        return ALWAYS
    return f"(num_queries * group >= {rows[0]}) * (num_queries * group <= {rows[-1]})"


def _key_tiles(build: Build) -> Expression:
    """Returns the key tiles of one head over the whole batch; num_keys is the length of the longest sequence."""
    tiles = f"batch * ceil_div(num_keys, {build.tile_n})"
    return f"min({tiles}, div(tokens_k, {build.tile_n}) + batch)" if build.has("varlen") else tiles


def _most_rows(is_paged: bool) -> int:
    return decode.PERSISTENT_MAX_ROWS if is_paged else decode.MAX_ROWS


@functools.lru_cache(maxsize=256)
def _rows_of_tile(
    dtype: str, head_dim: int, head_dim_value: int, is_paged: bool, arch: str, tile: str
) -> tuple[int, ...]:
    """Returns the numbers of query rows of a key head for which the planner's first decode kernel has this tile."""
    short, paged = SHORT_NAMES[dtype], "_paged16" if is_paged else ""

    def is_first(rows: int) -> bool:
        text = f"{short}_d{head_dim}v{head_dim_value}_q1_s{decode.MIN_KEYS}_b1_h{rows}k1_full{paged}"
        return str(TileConfig.of(planner.builds(spec.parse(text).problem("forward"), arch)[0])) == tile

    return tuple(rows for rows in range(1, _most_rows(is_paged) + 1) if is_first(rows))
