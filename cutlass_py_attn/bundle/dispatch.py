"""Dispatch: which kernel of several computes a call: what its machine code fixes, and the order in which to try it.

A kernel takes a call if the call has its facts, its conditions hold, and the device runs it. The first such kernel is
chosen: in the order of the families, wide loads before narrow ones, the newest target first. A kernel that is for
calls of some sizes alone is tried for these before the others of its family, and for other calls after them
(`preferred_when`): decode kernels for their number of query rows, others as their family says.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cutlass_py_attn.bundle.rules import AnyProblem
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.decode.tiles import decode_tiles
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Number
from cutlass_py_attn.launch.names import BATCH, GROUP, NUM_HEADS_KEY, NUM_QUERIES
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import resources
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.plan.launch_rules import MAX_GRID_YZ
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import SHORT_NAMES
from cutlass_py_attn.score_terms import registry

ALWAYS: Final = ONE


@dataclass(frozen=True, slots=True)
class Facts:
    """What the machine code of a kernel fixes.

    features: sorted features of the Problem, options of its pages that only the rules of launches have, and
        "value_in_key" of kernels that read value through key alone
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


def facts_of(problem: AnyProblem, build: Build) -> Facts:
    """Returns the facts of the kernels that were exported for a problem."""
    if not isinstance(problem, Problem):
        dims = build.head_dim, build.head_dim_value
        names = problem.direction, build.dtype
        return Facts(*names, *dims, build.mask, problem.features, (), False, (), 0)
    backward = problem.direction == "backward"
    return Facts(
        problem.direction,
        build.dtype,
        build.head_dim,
        build.head_dim_value,
        build.mask,
        (*build.features, *_of_pages(problem), *(("value_in_key",) if build.reads_value_in_key else ())),
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
    return [*FAMILIES].index(build.family)


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
        *FAMILIES[build.family].order(build),
    )


def preferred_when(build: Build, others: Sequence[Build] = ()) -> Expr:
    """Returns the rule that is 1 if the planner has this kernel for a call of such sizes, among those that take it.

    others: the other kernels with the same facts
    """
    if build.family != "decode":
        return FAMILIES[build.family].preferred_when(build, others)
    kind, tile = _Kind.of(build), str(TileConfig.of(build))
    few, many = (
        tuple(rows for rows in range(1, kind.most_rows + 1) if _first_tile(kind, rows, batch) == tile)
        for batch in (1, MAX_GRID_YZ)
    )
    if few == many:
        return _between(few, kind.most_rows)
    changing = next(iter({*few} ^ {*many}))
    batches = range(1, MAX_GRID_YZ)
    of_one = _first_tile(kind, changing, 1)
    limit = bisect_left(batches, True, key=lambda batch: _first_tile(kind, changing, batch + 1) != of_one) + 1
    sequences = BATCH * NUM_HEADS_KEY
    of_few, of_many = _between(few, kind.most_rows), _between(many, kind.most_rows)
    return (sequences <= limit) * of_few + (sequences > limit) * of_many


def _between(rows: Sequence[int], most: int) -> Expr:
    """Returns the rule that is 1 for these numbers of query rows of a key head, which follow each other."""
    if not rows:
        return Number(0)
    of_head = NUM_QUERIES * GROUP
    return ALWAYS if len(rows) == most else (of_head >= rows[0]) * (of_head <= rows[-1])


@dataclass(frozen=True, slots=True)
class _Kind:
    """Decode steps among which the planner chooses a tile by the number of rows and of sequences."""

    dtype: str
    head_dim: int
    head_dim_value: int
    is_paged: bool
    codes: str  # words of an e4m3 cache; "" for a cache of 16 bits
    arch: str

    @staticmethod
    def of(build: Build) -> _Kind:
        codes = ("_kv8" if build.has(registry.KV8) else "") + ("_descalerow" if build.has(registry.KV8_ROW) else "")
        return _Kind(build.dtype, build.head_dim, build.head_dim_value, build.has("paged"), codes, build.arch)

    @property
    def most_rows(self) -> int:
        """Query rows of a key head that some decode kernel takes."""
        return decode.PERSISTENT_MAX_ROWS if self.is_paged or self.codes else decode.MAX_ROWS


@functools.lru_cache(maxsize=4096)
def _first_tile(kind: _Kind, rows: int, batch: int) -> str:
    """Returns the planner's first decode tile for this number of query rows of one key head; "" for none."""
    dims = f"{SHORT_NAMES[kind.dtype]}_d{kind.head_dim}v{kind.head_dim_value}"
    cache = ("_paged16" if kind.is_paged else "") + kind.codes
    text = f"{dims}_q1_s{decode.MIN_KEYS}_b{batch}_h{rows}k1_full{cache}"
    problem, limits = spec.parse(text).problem("forward"), architecture(kind.arch)
    for tile in decode_tiles(problem):
        build, refused = build_for(problem, kind.arch, tile, "decode")
        if kind.arch not in tile.not_on and not (refused or resources.refusals(build, limits)):
            return str(TileConfig.of(build))
    return ""
