"""Kernel: everything that planner, compiler and hosts ask about one kernel body; Family: about those of one tile table.

A kernel is declared in the module of its rules, and `catalogue` lists it; nothing else lists kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from cutlass_py_attn import refusals
from cutlass_py_attn.launch.arch import Architecture
from cutlass_py_attn.launch.build import Buffer, Build, Warps
from cutlass_py_attn.launch.expressions import ONE, Expr, Grid
from cutlass_py_attn.launch.gemm_spec import MMA_COLUMNS, MMA_ROWS
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.score_terms import registry

Refusals = Iterator[Refusal]
Tile = tuple[int, int]

TERMS: Final = tuple(term.name for term in registry.BUILT_IN)


class Product(NamedTuple):
    """A product of mma.sync: the field of a Build with its warps, these warps, its rows and columns."""

    field: str
    warps: Warps
    m: int
    n: int


@dataclass(frozen=True, slots=True)
class BufferRule:
    """One workspace buffer: its bytes, the condition under which it exists, and whether a memset zeroes it."""

    name: str
    bytes: Expr
    is_zeroed: bool = False
    condition: Expr = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel body.

    kind, family, variant: the fields of its Builds, which tell it from every other kernel
    module: module below cutlass_py_attn.kernels that traces the body
    summary: how thread blocks divide the work
    layouts: layouts of the operands that it implements, of registry.LAYOUTS and registry.OPTIONAL_LAYOUTS
    terms: names of the built-in score terms that it implements
    takes_registered_terms: whether it implements the score terms that users register
    beside_ranges: names of the features that it implements with mask form "ranges"; None if it reads no tile lists
    lengths: "any"; "short", "long" or "few_queries" when the planner chooses the kernel for short or long sequences
        alone, or for few queries and many keys, so that a kernel set for run-time lengths cannot rely on it
    main_grid: the grid of the main kernel of a Build
    other_grids: those of other entries by their roles, but for the entries around every backward
    tensor_maps: the tensor maps of the main kernel in the order of its parameters: (rows, columns) of a tile, by name
    """

    kind: str
    family: str
    variant: str
    module: str
    summary: str
    layouts: tuple[str, ...]
    terms: tuple[str, ...] = ()
    takes_registered_terms: bool = False
    beside_ranges: tuple[str, ...] | None = None
    lengths: str = "any"
    main_grid: Callable[[Build], Grid]
    other_grids: Callable[[Build], Mapping[str, Grid]] = lambda build: {}
    tensor_maps: Callable[[Build], Mapping[str, Tile]]

    @property
    def features(self) -> tuple[str, ...]:
        """Features of a Problem that the kernel implements: its layouts and score terms, sorted."""
        registered = registry.registered() if self.takes_registered_terms else ()
        return tuple(sorted((*self.layouts, *self.terms, *registered)))

    def lacks(self, needed: Problem | Build) -> list[str]:
        """Returns what a Problem or a Build has that the kernel does not implement: features, and ranges of keys."""
        implemented = self.features
        missing = [name for name in needed.features if name not in implemented]
        if not needed.form.has_ranges:
            return missing
        if self.beside_ranges is None:
            return [*missing, "ranges of keys"]
        beside = (name for name in needed.features if name in implemented and name not in self.beside_ranges)
        return [*missing, *(f"{name} with ranges of keys" for name in beside)]


def fixed_order(build: Build) -> tuple[str, ...]:
    """Returns (): all builds of the kernel take the same steps in the same order."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel(Kernel):
    """A kernel body of attention, which has tiles.

    takes_negative_scales: whether scores may be multiplied by a scale below 0
    has_key_stages: whether it has stages of the key tile, and divides the rows of a score product
    refusals: why it cannot be built with a Build's tiles, warps, stages and features
    with_warps: the Build with the warps of each product
    shared_memory: the shared-memory map of a thread block
    products: the products of mma.sync, whose warps must divide their rows and columns
    accumulators: registers of a thread for the accumulators that are alive at the same time
    accumulator_limit: registers that a thread with accumulators may use
    definitions: numbers that other expressions and struct fields name, each in terms of those before it
    num_splits_key: the blocks that share the keys of the same rows; of a backward, one (batch, key head)
    workspace: the workspace buffers in their order; those of a backward begin with what is zeroed
    conditions: what sizes must satisfy beside what they must for all kernels, each with the condition in words
    reason: how the blocks of a plan divide the work, from the values of the plan's names
    steps: the steps of one iteration of its warpgroups, if their order is a choice

    All but `refusals` are asked about Builds without refusals.
    """

    takes_negative_scales: bool = True
    has_key_stages: bool = False
    refusals: Callable[[Build], Refusals]
    with_warps: Callable[[Build], Build]
    shared_memory: Callable[[Build], tuple[Buffer, ...]]
    products: Callable[[Build], tuple[Product, ...]]
    accumulators: Callable[[Build], int]
    accumulator_limit: Callable[[Build, Architecture], int]
    definitions: Callable[[Problem, Build], dict[str, Expr]] = lambda problem, build: {}
    num_splits_key: Callable[[Build], Expr]
    workspace: Callable[[Build], tuple[BufferRule, ...]] = lambda build: ()
    conditions: Callable[[Build], Iterable[tuple[Expr, str]]] = lambda build: ()
    reason: Callable[[Problem, Build, Mapping[str, int]], str]
    steps: Callable[[Build], tuple[str, ...]] = fixed_order


def no_products(build: Build) -> tuple[Product, ...]:
    """Returns (): nothing is multiplied by mma.sync, or each warp multiplies alone."""
    return ()


def no_tensor_maps(build: Build) -> Mapping[str, Tile]:
    """Returns no map: threads load every operand."""
    return {}


def no_splits(build: Build) -> Expr:
    """Returns 1: one block has all keys of its rows."""
    return ONE


def block_registers(build: Build, limits: Architecture) -> int:
    """Returns the registers that a thread may use, if all threads of a block have equally many."""
    return limits.register_limit(build.threads)


def warp_grid(warps: int, m: int, n: int, item_bytes: int) -> Warps:
    """Returns the (rows, columns) of warps over an (m, n) product that read the least shared memory.

    A warp reads m / rows + n / columns operand vectors, so the block reads columns * m + rows * n of them. (0, 0) if no
    grid divides the product.
    """
    at_once = MMA_COLUMNS[item_bytes]
    grids = [(rows, warps // rows) for rows in range(1, warps + 1) if warps % rows == 0]
    fitting = [grid for grid in grids if m % (grid[0] * MMA_ROWS) == 0 and n % (grid[1] * at_once) == 0]
    return min(fitting, key=lambda grid: grid[1] * m + grid[0] * n, default=(0, 0))


def refuse(build: Build, field: str, rule: str, remedy: str) -> Refusal:
    """Returns the refusal of a field of a Build."""
    return refusals.refuse(field, getattr(build, field), rule, remedy)


def listed(choices: tuple[object, ...]) -> str:
    """Returns the choices as words: "a, b or c"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
