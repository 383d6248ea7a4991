"""Kernel: everything that planner, compiler and hosts ask about one kernel body; Family: about those of one tile table.

A kernel is declared in the module of its rules, and `catalogue` lists it; nothing else lists kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from cutlass_py_attn.plan.arch import Architecture
from cutlass_py_attn.plan.build import Buffer, Build, Warps
from cutlass_py_attn.plan.expressions import ONE, Expr, Grid, Name
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.score_terms import registry

TERMS: Final = tuple(term.name for term in registry.BUILT_IN)


class Product(NamedTuple):
    """A product of mma.sync: the field of a Build with its warps, these warps, its rows and columns."""

    field: str
    warps: Warps
    m: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel body.

    kind, family, variant: the fields of its Builds, which tell it from every other kernel
    module: module below cutlass_py_attn.kernels that traces the body
    summary: how thread blocks divide the work
    layouts: layouts of the operands that it implements, of registry.LAYOUTS and registry.OPTIONAL_LAYOUTS
    terms: names of the built-in score terms that it implements
    takes_registered_terms: whether it implements the score terms that users register
    lengths: "any"; "short", "long" or "few_queries" when the planner chooses the kernel for short or long sequences
        alone, or for few queries and many keys, so that a kernel set for run-time lengths cannot rely on it
    main_grid: the grid of the main kernel of a Build
    tensor_maps: the names of the tensor maps of the main kernel, in the order of its parameters; () for none
    """

    kind: str
    family: str
    variant: str
    module: str
    summary: str
    layouts: tuple[str, ...]
    terms: tuple[str, ...] = ()
    takes_registered_terms: bool = False
    lengths: str = "any"
    main_grid: Callable[[Build], Grid]
    tensor_maps: Callable[[Build], tuple[str, ...]]

    @property
    def features(self) -> tuple[str, ...]:
        """Features of a Problem that the kernel implements: its layouts and score terms, sorted."""
        registered = registry.registered() if self.takes_registered_terms else ()
        return tuple(sorted((*self.layouts, *self.terms, *registered)))

    def lacks(self, features: Iterable[str]) -> list[str]:
        """Returns those of the features that the kernel does not implement."""
        implemented = self.features
        return [name for name in features if name not in implemented]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel(Kernel):
    """A kernel body of attention, which has tiles.

    refusals: why it cannot be built with a Build's tiles, warps, stages and features
    with_warps: the Build with the warps of each product
    shared_memory: the shared-memory map of a thread block
    products: the products of mma.sync, whose warps must divide their rows and columns
    accumulators: registers of a thread for the accumulators that are alive at the same time
    accumulator_limit: registers that a thread with accumulators may use
    num_splits_key: the blocks that share the keys of the same rows; of a backward, one (batch, key head)
    reason: how the blocks of a plan divide the work, from the values of the plan's names

    Each but the first is asked about Builds without refusals.
    """

    refusals: Callable[[Build], Iterator[Refusal]]
    with_warps: Callable[[Build], Build]
    shared_memory: Callable[[Build], tuple[Buffer, ...]]
    products: Callable[[Build], tuple[Product, ...]]
    accumulators: Callable[[Build], int]
    accumulator_limit: Callable[[Build, Architecture], int]
    num_splits_key: Callable[[Build], Expr]
    reason: Callable[[Problem, Build, Mapping[str, int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The fused kernels of one tile table: what the planner asks before there is a Build.

    name: the field `family` of their Builds
    needs_wgmma: whether they are compiled for a GPU's own target alone, and not for a portable one
    unsupported_features: what a problem has that they do not take; () if they take it
    tiles: the tiles that the planner tries for a problem on so many multiprocessors, the fastest first; those for
        sequences of any length alone if the last argument says so
    refusals: why the variant of a tile would compute a problem wrongly, which the rules of its Build do not see
    rejection: the end of a sentence that says why they do not compute a problem; "" for a problem that is not theirs
    """

    name: str
    needs_wgmma: bool
    unsupported_features: Callable[[Problem], tuple[str, ...]]
    tiles: Callable[[Problem, int, bool], Iterable[TileConfig]]
    refusals: Callable[[Problem, TileConfig], list[Refusal]]
    rejection: Callable[[Problem], str]


def no_products(build: Build) -> tuple[Product, ...]:
    """Returns (): nothing is multiplied by mma.sync, or each warp multiplies alone."""
    return ()


def no_tensor_maps(build: Build) -> tuple[str, ...]:
    """Returns (): threads load every operand."""
    return ()


def no_splits(build: Build) -> Expr:
    """Returns 1: one block has all keys of its rows."""
    return ONE


def gemm_grid(build: Build) -> Grid:
    """Returns the grid of a component GEMM: a block for each tile."""
    return Name("tiles"), ONE, ONE


def block_registers(build: Build, limits: Architecture) -> int:
    """Returns the registers that a thread may use, if all threads of a block have equally many."""
    return limits.register_limit(build.threads)
