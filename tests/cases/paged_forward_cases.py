"""Paged forward cases: prefill and chunked prefill over pools of pages, with NaN in every row that is no key.

Entries of the table behind the last key of a sequence are UNUSED_ENTRY, far outside of every pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import builds as builds_of_problem
from cutlass_py_attn.problem.paging import Pages
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import ITEM_BYTES, Tensor
from cutlass_py_attn.reference import paged
from cutlass_py_attn.reference.score_mod import ReferenceScoreMod
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import ARCH

Array = npt.NDArray[Any]

UNUSED_ENTRY: Final = 2**30
SPARE_PAGES: Final = 2  # of a pool, which no sequence has
UNUSED_TOKENS: Final = 3  # rows of packed queries behind the last sequence
# Lengths (queries, keys): off the tiles, a chunk of a prefill, one without keys, one without queries, one query, and
# more queries than keys.
LENGTHS: Final = ((130, 300), (1, 129), (7, 7), (0, 40), (200, 1000), (33, 0), (70, 20), (64, 640))


def _combined(tensor: Tensor) -> Tensor:
    """A half of (pages, 2, page_size, heads, columns): key and value of a page lie side by side."""
    pages, _, _, _ = tensor.strides
    return replace(tensor, strides=(2 * pages, *tensor.strides[1:]))


def _interleaved(tensor: Tensor) -> Tensor:
    """Every second head of (pages, page_size, 2 heads, columns)."""
    _, rows, heads, columns = tensor.shape
    row = 2 * heads * columns
    return replace(tensor, strides=(rows * row, row, 2 * columns, 1))


def _heads_first(tensor: Tensor) -> Tensor:
    """(pages, heads, page_size, columns) in memory."""
    _, rows, heads, columns = tensor.shape
    return replace(tensor, strides=(heads * rows * columns, columns, rows * columns, 1))


def _uneven(tensor: Tensor) -> Tensor:
    """Pages that do not start at a whole number of rows."""
    pages, row, *_ = tensor.strides
    return replace(tensor, strides=(pages + row // 2, *tensor.strides[1:]))


def _shifted(tensor: Tensor) -> Tensor:
    """From an address that is aligned to one element only."""
    return replace(tensor, alignment=ITEM_BYTES[tensor.dtype])


POOLS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "nhd": lambda tensor: tensor,
    "hnd": _heads_first,
    "combined": _combined,
    "interleaved": _interleaved,
    "uneven": _uneven,
    "shifted": _shifted,
}


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A problem over pages.

    name: spec of dtype, head dims, heads, mask and score terms; its sizes are replaced
    page_size: rows of a page
    lengths: (queries, keys) of each sequence; without `is_packed` all have the queries of the longest
    pool: layout of key and value, a name of POOLS
    is_packed: whether query has the queries of all sequences one after another
    has_indptr: whether page_table has the entries of all sequences one after another
    """

    name: str
    page_size: int
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    pool: str = "nhd"
    is_packed: bool = True
    has_indptr: bool = False
    seed: int = 0

    @property
    def label(self) -> str:
        """The case as a word."""
        options = [self.pool, *(["packed"] if self.is_packed else []), *(["indptr"] if self.has_indptr else [])]
        return "_".join([self.name, f"p{self.page_size}", *options, str(self.seed)])

    @property
    def num_queries(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        longest = max(queries for queries, _ in self.lengths)
        return tuple(queries if self.is_packed else longest for queries, _ in self.lengths)

    @property
    def num_keys(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return tuple(keys for _, keys in self.lengths)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each sequence."""
        return tuple(-(-keys // self.page_size) for keys in self.num_keys)

    def problem(self) -> Problem:
        """The problem. The batch is the number of lengths."""
        spec = parse(f"{self.name}_q1_s1_b{len(self.lengths)}")
        dense = spec.problem("forward")
        dtype, heads, heads_key = spec.dtype, spec.num_heads, spec.num_heads_key
        queries, batch = self.num_queries, len(self.lengths)
        rows = (1, sum(queries) + UNUSED_TOKENS) if self.is_packed else (batch, queries[0])
        pool = sum(self.num_pages) + SPARE_PAGES, self.page_size, heads_key
        place = POOLS[self.pool]
        table = (sum(self.num_pages),) if self.has_indptr else (batch, max(self.num_pages))
        return dense.replace(
            query=Tensor.contiguous((*rows, heads, spec.head_dim), dtype),
            key=place(Tensor.contiguous((*pool, spec.head_dim), dtype)),
            value=place(Tensor.contiguous((*pool, spec.head_dim_value), dtype)),
            output=Tensor.contiguous((*rows, heads, spec.head_dim_value), dtype),
            pages=Pages(
                Tensor.contiguous(table, "int32"),
                batch,
                max(queries) if self.is_packed else 0,
                cu_seqlens_q=self.is_packed,
                page_indptr=self.has_indptr,
            ),
        )

    def builds(self, arch: str) -> tuple[Build, ...]:
        """The kernels that serve the case, the best first."""
        return builds_of_problem(self.problem(), arch)


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The arrays of a case by name, and which pages each sequence has."""

    case: PagedCase
    arrays: dict[str, Array]
    pages: tuple[Array, ...]

    def reference(self, precision: str) -> dict[str, Array]:
        """Returns output and logsumexp in that precision."""
        case, problem, arrays = self.case, self.case.problem(), self.arrays
        assert problem.pages is not None
        table = paged.PageTable(
            page_table=arrays["page_table"],
            seqused_k=np.array(case.num_keys),
            cu_seqlens_q=arrays.get("cu_seqlens_q"),
            max_seqlen_q=problem.pages.max_seqlen_q,
            page_indptr=arrays.get("page_indptr"),
        )
        terms = ReferenceScoreMod(
            softcap=problem.softcap, alibi_slopes=arrays.get("alibi_slopes"), sinks=arrays.get("sinks")
        )
        options: dict[str, Any] = {"mask": problem.mask, "scale": problem.scale, "precision": precision}
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        output, logsumexp = paged.forward(query, key, value, table, score_mod=terms, **options)
        return {"output": output, "logsumexp": logsumexp}


def inputs(case: PagedCase) -> PagedInputs:
    """Returns seeded inputs; the keys of a seed are the same for all page sizes, pools and tables."""
    problem, rng = case.problem(), np.random.default_rng(case.seed)
    dtype = numpy_dtype(problem.dtype)
    heads, heads_key = problem.shape.num_heads, problem.shape.num_heads_key
    dims = {"key": problem.shape.head_dim, "value": problem.shape.head_dim_value}
    rows = {
        name: [rng.standard_normal((keys, heads_key, width)).astype(np.float32) for keys in case.num_keys]
        for name, width in dims.items()
    }
    queries = [rng.standard_normal((count, heads, dims["key"])).astype(np.float32) for count in case.num_queries]
    if case.is_packed:
        queries.append(np.full((UNUSED_TOKENS, heads, dims["key"]), np.nan, np.float32))
    found: dict[str, Array] = {"query": np.concatenate(queries).reshape(problem.query.shape).astype(dtype)}
    if problem.alibi_slopes is not None:
        found["alibi_slopes"] = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32)
    if problem.sinks is not None:
        found["sinks"] = rng.standard_normal(heads).astype(np.float32)
    order = np.random.default_rng(case.seed + 1).permutation(problem.key.shape[0])
    pages = np.split(order[: sum(case.num_pages)], np.cumsum(case.num_pages)[:-1])
    for name, sequences in rows.items():
        pool = np.full(getattr(problem, name).shape, np.nan, np.float32)
        for its_pages, values in zip(pages, sequences, strict=True):
            places = np.arange(len(values))
            pool[its_pages[places // case.page_size], places % case.page_size] = values
        found[name] = pool.astype(dtype)
    found |= _lengths(case, tuple(pages))
    return PagedInputs(case, found, tuple(pages))


def _lengths(case: PagedCase, pages: tuple[Array, ...]) -> dict[str, Array]:
    """Returns the table and the lengths."""
    found = {"seqused_k": np.array(case.num_keys, np.int32)}
    if case.is_packed:
        found["cu_seqlens_q"] = np.cumsum([0, *case.num_queries]).astype(np.int32)
    if case.has_indptr:
        found["page_table"] = np.concatenate(pages).astype(np.int32)
        found["page_indptr"] = np.cumsum([0, *case.num_pages]).astype(np.int32)
        return found
    table = np.full((len(pages), max(case.num_pages)), UNUSED_ENTRY, np.int32)
    for row, its_pages in zip(table, pages, strict=True):
        row[: len(its_pages)] = its_pages
    return found | {"page_table": table}


def worst_ratio(given: PagedInputs, found: dict[str, Array]) -> float:
    """Returns error / allowed of output and logsumexp; infinity for NaN, and for a row that no kernel may write."""
    truth, low = given.reference("float64"), given.reference(given.case.problem().dtype)
    inside = sum(given.case.num_queries) if given.case.is_packed else None
    rows = slice(None) if inside is None else (slice(None), slice(inside))
    if inside is not None and not np.isnan(found["output"][:, inside:].astype(np.float64)).all():
        return np.inf
    output, exact, rough = (values["output"][rows].astype(np.float64) for values in (found, truth, low))
    size = float(np.sqrt(np.mean(exact**2))) if exact.size else 0.0
    least = guarded_check.FLOOR[given.case.problem().dtype] * size * guarded_check.LARGEST
    allowed = guarded_check.TIMES_LOW * np.abs(rough - exact).max(initial=0.0) + least
    errors = [np.abs(output - exact).max(initial=0.0) / max(allowed, guarded_check.SMALLEST)]
    for number, count in enumerate(given.case.num_queries):
        computed, expected = (values["logsumexp"][number, :, :count].astype(np.float64) for values in (found, truth))
        finite = np.isfinite(expected)
        if not np.array_equal(computed[~finite], expected[~finite]):
            return np.inf
        error = np.abs(computed[finite] - expected[finite]) / (guarded_check.LOGSUMEXP * (1 + np.abs(expected[finite])))
        errors.append(error.max(initial=0.0))
    return float(np.nan_to_num(np.array(errors), nan=np.inf).max())


@dataclass(frozen=True, slots=True)
class PageSizes:
    """A problem whose results have the same bits for every page size and pool of a kernel family."""

    name: str
    family: str
    page_sizes: tuple[int, ...]
    pools: tuple[str, ...] = ("nhd", "hnd", "combined", "interleaved")
    options: dict[str, Any] = field(default_factory=dict)

    def cases(self) -> list[PagedCase]:
        """The first page size with every pool, and every page size with one of the pools."""
        pairs = [(self.page_sizes[0], pool) for pool in self.pools]
        pairs += [(size, self.pools[number % len(self.pools)]) for number, size in enumerate(self.page_sizes[1:])]
        return [PagedCase(self.name, size, pool=pool, **self.options) for size, pool in pairs]


SM90_PAGES: Final = (16, 32, 64, 128, 256)
SM80_PAGES: Final = (1, 8, 16, 128)
_FEW: Final = ((100, 200), (60, 170))  # short sequences, for which the planner has a tile of its own

SAME_BITS: Final = (
    PageSizes("bf16_d128_h4k2_causal_br", "sm90", SM90_PAGES),
    PageSizes("f16_d64_h4k2_full", "sm90", SM90_PAGES, options={"is_packed": False}),
    PageSizes("bf16_d128_h4k2_causal_br", "sm80", SM80_PAGES),
    PageSizes("f32_d64_h2_full", "sm80", (1, 4, 64), options={"is_packed": False}),
)
# (case, family) of every other mask, head dim and score term.
SINGLE: Final = (
    (PagedCase("bf16_d128_h4k2_causal_br", 64, has_indptr=True), "sm90"),
    (PagedCase("bf16_d128_h4k2_causal_br", 16, pool="hnd", is_packed=False), "sm90"),
    (PagedCase("bf16_d128_h6k1_window_left100_right0", 16, pool="combined"), "sm90"),
    (PagedCase("bf16_d128_h4k2_causal_br_softcap5_sinks", 32), "sm90"),
    (PagedCase("f16_d128_h4k4_causal_br_alibi", 64, is_packed=False), "sm90"),
    (PagedCase("bf16_d256_h2k1_causal_br", 16, pool="hnd"), "sm90"),
    (PagedCase("bf16_d96_h2k1_causal_br", 64), "sm90"),
    (PagedCase("bf16_d192v128_h2_full", 256), "sm90"),
    (PagedCase("f16_d72_h2k1_causal", 32, is_packed=False, has_indptr=True), "sm90"),
    (PagedCase("bf16_d64_h2_full", 16, lengths=_FEW, is_packed=False), "sm90"),
    (PagedCase("bf16_d128_h4k2_causal_br", 16, pool="uneven"), "sm80"),
    (PagedCase("bf16_d128_h4k2_causal_br", 1, has_indptr=True), "sm80"),
    (PagedCase("f16_d40_h4k2_window_left100_right0", 8, pool="shifted"), "sm80"),
    (PagedCase("f32_d128_h4k2_causal_br_softcap5_sinks", 2, pool="interleaved"), "sm80"),
    (PagedCase("f16_d64_h4k1_causal_br_alibi", 1, is_packed=False), "sm80"),
    (PagedCase("bf16_d320_h2k1_causal_br", 16, pool="hnd"), "sm80"),
    (PagedCase("f32_d200_h2_full", 4, is_packed=False), "sm80"),
)
# Launched with wrong lengths, bounds and entries.
WRONG: Final = (
    (PagedCase("bf16_d128_h4k2_causal_br", 64, has_indptr=True), "sm90"),
    (PagedCase("bf16_d128_h4k2_causal_br", 16), "sm90"),
    (PagedCase("bf16_d128_h4k2_causal_br", 1, has_indptr=True), "sm80"),
    (PagedCase("bf16_d128_h4k2_causal_br", 8), "sm80"),
)


def all_cases() -> list[tuple[PagedCase, str]]:
    """Every case with the family that is to serve it."""
    same = [(case, each.family) for each in SAME_BITS for case in each.cases()]
    return [*same, *SINGLE, *WRONG]


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """The kernels of every case's family for a target, once; each with its fallbacks if ptxas spills."""
    found = (tuple(it for it in case.builds(arch) if it.family == family) for case, family in all_cases())
    return list(dict.fromkeys(filter(None, found)))
