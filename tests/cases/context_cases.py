"""Context cases: calls whose rows are split over ranks that share one GPU, and every kernel that their parts need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.problem.masks import CausalBottomRight, Full
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import GRADIENTS, ProblemSpec, SequenceLengths, parse
from cutlass_py_attn.problem.split_rows import (
    ALL_GATHER,
    RING,
    ULYSSES,
    ZIGZAG,
    Chunk,
    Ring,
    chunks,
    is_causal,
    joined,
    keys_around,
    window_of,
)
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.score_terms.dropout import Dropout

Split = tuple[str, str | None]  # strategy and load balance
DTYPE: Final = "bfloat16"  # of the operands of all cases


@dataclass(frozen=True, slots=True)
class ContextCase:
    """A call on all rows, and how these are split. name: as in ProblemSpec. ranks: numbers of them."""

    name: str
    splits: tuple[Split, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> ProblemSpec:
        """The call on all rows."""
        return parse(self.name)

    @property
    def rows(self) -> int:
        """Rows of all ranks; those of packed sequences follow one another."""
        spec = self.spec
        return sum(each.num_queries for each in spec.sequences) or spec.num_queries

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns every array of the call on all rows, drawn anew: operands, the gradient of the output, and terms."""
        spec, rng = self.spec, np.random.default_rng(3)
        batch = 1 if spec.sequences else spec.batch
        heads = {"query": spec.num_heads, "key": spec.num_heads_key, "value": spec.num_heads_key}
        heads["grad_output"] = spec.num_heads
        shapes: dict[str, tuple[int, ...]] = {
            name: (batch, self.rows, count, spec.head_dim) for name, count in heads.items()
        }
        if spec.bias:
            shapes["bias"] = 1, spec.num_heads, self.rows, self.rows
        if spec.sinks:
            shapes["sinks"] = (spec.num_heads,)
        if spec.alibi:
            shapes["alibi_slopes"] = (spec.num_heads,)
        found = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        if spec.alibi:
            found["alibi_slopes"] = np.abs(found["alibi_slopes"])
        return found

    def options(self) -> dict[str, Any]:
        """Returns the options of the call on all rows that are no arrays."""
        spec = self.spec
        found: dict[str, Any] = {"mask": spec.mask, "softcap": spec.softcap}
        if spec.dropout_p:
            found["dropout"] = Dropout(spec.dropout_p, 7, 11)
        if spec.sequences:
            starts = np.cumsum([0, *(each.num_queries for each in spec.sequences)]).astype(np.int32)
            found["sequences"] = VariableLength(starts, starts, spec.num_queries, spec.num_keys)
        return found

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the operands that have a gradient."""
        return tuple(GRADIENTS[letter] for letter in self.spec.gradients)

    def parts(self) -> Iterator[ProblemSpec]:
        """Yields the calls of one GPU that every rank makes."""
        for strategy, order in self.splits:
            for size in self.ranks:
                for rank in range(size):
                    yield from _PARTS[strategy](self, size, rank, order == ZIGZAG)


_ALL: Final = ((ALL_GATHER, None), (ALL_GATHER, ZIGZAG), (ULYSSES, ZIGZAG), (RING, None), (RING, ZIGZAG))
CASES: Final = (
    ContextCase("bf16_d64_s512_b2_h8k4_causal_deterministic", _ALL, (2, 4)),
    ContextCase("bf16_d64_s512_b2_h8k4_full_deterministic", _ALL, (2,)),
    ContextCase(
        "bf16_d64_s512_b2_h8k4_causal_window100_sinks_deterministic", ((ALL_GATHER, ZIGZAG), (RING, None)), (4,)
    ),
    ContextCase("bf16_d64_s512_b2_h8k4_causal_biassum_deterministic", ((ALL_GATHER, ZIGZAG), (RING, ZIGZAG)), (2,)),
    ContextCase("bf16_d64_s512_b2_h8k4_causal_dropout0.3_softcap4_deterministic", ((ULYSSES, ZIGZAG),), (2,)),
    ContextCase("bf16_d64_s512_b2_h8k4_causal_alibi_deterministic", ((ALL_GATHER, ZIGZAG),), (4,)),
    ContextCase("bf16_d64_n100,1,250,161_h8k4_causal_deterministic", ((ALL_GATHER, ZIGZAG), (ULYSSES, ZIGZAG)), (2,)),
)


def problems() -> Iterator[Problem]:
    """Yields the problems of one GPU: of whole calls, and of their parts."""
    for case in CASES:
        for spec in dict.fromkeys((case.spec, *case.parts())):
            yield from (spec.problem(direction) for direction in DIRECTIONS)


def builds(arch: str) -> list[tuple[Build, ...]]:
    """Every kernel of the cases, once; each with the kernels to fall back to if ptxas spills."""
    return list(dict.fromkeys([*(planner.builds(problem, arch) for problem in problems()), *merges(arch)]))


def merges(arch: str) -> list[tuple[Build, ...]]:
    """The kernels that merge outputs of the ring, and those that add gradients: of rows, of a bias and of sinks."""
    found = [*merge_problems(CASES[0].spec.head_dim)]
    for case in CASES:
        if case.spec.bias:
            chunk = case.rows // (2 * case.ranks[0])  # keys of a tile of the ring
            found.append(MergeProblem.into_total((1, 1, 1, chunk), DTYPE, is_sum=True, is_last=False))
            found.append(MergeProblem.into_total((1, 1, 1, case.rows), DTYPE, is_sum=True, is_last=True))
        if case.spec.sinks:
            found.append(MergeProblem.into_total((1, 1, 1, case.spec.num_heads), "float32", is_sum=True, is_last=False))
    return [(plan_merge(problem, arch).build,) for problem in found]


def merge_problems(head_dim: int) -> Iterator[MergeProblem]:
    """Yields a problem of each kernel that merges or adds rows (..., head_dim) of bfloat16 calls.

    Two outputs are merged in their own dtype, more into a float32 total. Gradients are added to a float32 total, which
    is rounded with the last of them; totals of several ranks are added in float32.
    """
    shape = 1, 1, 1, head_dim
    yield MergeProblem.dense(shape, DTYPE)
    yield MergeProblem.into_total(shape, DTYPE, is_sum=False, is_last=False)
    yield MergeProblem.into_total(shape, DTYPE, is_sum=True, is_last=False)
    yield MergeProblem.into_total(shape, DTYPE, is_sum=True, is_last=True)
    yield MergeProblem.into_total(shape, "float32", is_sum=True, is_last=False)


def _gathered(case: ContextCase, size: int, rank: int, zigzag: bool) -> Iterator[ProblemSpec]:
    """Yields the calls of a rank's runs of rows, with the keys that they see."""
    spec = case.spec
    rows = case.rows // size
    if spec.sequences:
        for chunk in chunks(size, zigzag, rows, rank):
            mask = CausalBottomRight(window_of(spec.mask)) if is_causal(spec.mask) else spec.mask
            yield spec.replace(sequences=_lengths(spec, chunk), mask=mask)
    elif isinstance(spec.mask, Full):
        yield spec.replace(num_queries=rows)
    else:
        for chunk in chunks(size, zigzag, rows, rank):
            first, last, mask = keys_around(spec.mask, chunk.start, chunk.count, spec.num_keys)
            yield spec.replace(num_queries=chunk.count, num_keys=last - first, mask=mask)


def _lengths(spec: ProblemSpec, chunk: Chunk) -> tuple[SequenceLengths, ...]:
    """Returns packed sequences with those of their rows that lie in a run, and the keys that the last of them sees."""
    found, start = [], 0
    for each in spec.sequences:
        last = min(max(start + each.num_queries, chunk.start), chunk.start + chunk.count)
        first = min(max(start, chunk.start), chunk.start + chunk.count)
        seen = min(max(chunk.start + chunk.count - start, 0), each.num_keys) if is_causal(spec.mask) else each.num_keys
        found.append(SequenceLengths(last - first, each.num_keys, seen))
        start += each.num_queries
    return tuple(found)


def _of_heads(case: ContextCase, size: int, rank: int, zigzag: bool) -> Iterator[ProblemSpec]:
    """Yields the call of a rank's heads; one of a single item with dropout."""
    spec = case.spec
    heads = {"num_heads": spec.num_heads // size, "num_heads_key": max(spec.num_heads_key // size, 1)}
    yield spec.replace(**heads, **({"batch": 1} if spec.dropout_p and not spec.sequences else {}))


def _ring(case: ContextCase, size: int, rank: int, zigzag: bool) -> Iterator[ProblemSpec]:
    """Yields the call of a rank's own keys, and those of the tiles; a sink joins the first of them."""
    spec, rows = case.spec, case.rows // size
    ring = Ring(size, zigzag, spec.mask, rows, rows, bool(spec.bias))
    yield spec.replace(num_queries=rows, num_keys=rows, mask=ring.own_mask())
    for step in range(1, size):
        tiles = ring.tiles(rank, step, lambda condition, one, other: one if condition else other)
        for tile in joined([tile for tile in tiles if tile.is_seen], ring.has_bias):
            yield spec.replace(num_queries=tile.rows, num_keys=tile.keys, mask=tile.mask, sinks=False)


_PARTS: Final = {ALL_GATHER: _gathered, ULYSSES: _of_heads, RING: _ring}
