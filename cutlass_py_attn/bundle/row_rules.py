"""Row rules: the launches of `append_to_cache` and `merge_states` for other sizes and strides, as expressions.

What `launch_rules` and `preconditions` are for attention. The names are those of the struct's fields, and

    tokens_k    append: rows of key and value, which are those of new tokens
    num_pages   append: pages of the cache
    batch       merge: batch size, or the number of sequences
    tokens_q    merge of packed outputs: rows of all sequences together
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import ONE, Expr, Name, Number, call, step
from cutlass_py_attn.launch.names import (
    BATCH,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_PAGES,
    NUM_QUERIES,
    PAGE_SIZE,
    TOKENS_K,
    TOKENS_Q,
)
from cutlass_py_attn.plan.preconditions import Condition
from cutlass_py_attn.problem import append, merge
from cutlass_py_attn.problem.append import (
    CACHES,
    GIVEN_SCALES,
    NO_SCALES,
    ROW_SCALES,
    SCALES,
    TILE_SCALES,
    AppendProblem,
)
from cutlass_py_attn.problem.merge import OUTPUTS, MergeProblem

RowProblem = AppendProblem | MergeProblem

DIRECTIONS: Final = ("append", "merge")
_SLICES: Final = "call once for each slice"
_FEATURES: Final[dict[str, tuple[str, ...]]] = {
    NO_SCALES: (),
    GIVEN_SCALES: ("e4m3_cache",),
    ROW_SCALES: ("e4m3_cache", "row_scales"),
    TILE_SCALES: ("e4m3_cache", "tile_scales"),
}
_PAGE_AXES: Final = ("page", "row", "head")
_PAGE_SIZES: Final = (NUM_PAGES, PAGE_SIZE, NUM_HEADS_KEY)


def direction_of(problem: RowProblem) -> str:
    """Returns "append" or "merge"."""
    return DIRECTIONS[isinstance(problem, MergeProblem)]


def dtype_of(problem: RowProblem) -> str:
    """Returns the dtype of the new rows, or of the outputs."""
    return problem.key.dtype if isinstance(problem, AppendProblem) else problem.output_a.dtype


def features_of(problem: RowProblem) -> tuple[str, ...]:
    """Returns what a kernel has besides its dtype and columns: how an append scales, or "varlen" of a packed merge."""
    if isinstance(problem, MergeProblem):
        return ("varlen",) if problem.is_packed else ()
    return _FEATURES[problem.scales]


def sizes(problem: RowProblem) -> dict[str, int]:
    """Returns the sizes of the problem by the names that expressions use."""
    if isinstance(problem, AppendProblem):
        num_pages, page_size = problem.key_cache.shape[:2]
        return {
            "tokens_k": problem.tokens,
            "num_heads_key": problem.num_heads_key,
            "page_size": page_size,
            "num_pages": num_pages,
        }
    packed = {"tokens_q": problem.output_a.shape[1]} if problem.is_packed else {}
    return {
        "batch": problem.batch,
        "num_queries": problem.num_queries,
        "num_heads": problem.output_a.shape[2],
        **packed,
    }


def shapes(problem: RowProblem) -> dict[str, tuple[Expr, ...]]:
    """Returns the sizes of each array of rows by its name, columns last.

    Scales of an e4m3 cache have one column, or the tiles of a row as columns.
    """
    if isinstance(problem, AppendProblem):
        columns = {"key": Number(problem.key.shape[2]), "value": Number(problem.value.shape[2])}
        rows = {name: (TOKENS_K, NUM_HEADS_KEY, columns[name]) for name in ("key", "value")}
        pools = {name: (*_PAGE_SIZES, columns[name.removesuffix("_cache")]) for name in CACHES}
        tiles = Number(problem.key_scale.shape[-1]) if problem.key_scale and problem.scales == TILE_SCALES else ONE
        return {**rows, **pools, **{name: (*_PAGE_SIZES, tiles) for name in SCALES if name in problem.tensors()}}
    outer = (ONE, TOKENS_Q) if problem.is_packed else (BATCH, NUM_QUERIES)
    return dict.fromkeys(OUTPUTS, (*outer, NUM_HEADS, Number(problem.output.shape[3])))


def stride_names(problem: RowProblem, name: str) -> tuple[Name, ...]:
    """Returns the names of an array's strides, without that of contiguous columns."""
    if isinstance(problem, MergeProblem):
        axes: tuple[str, ...] = ("batch", "row", "head")
    else:
        axes = _PAGE_AXES if name in (*CACHES, *SCALES) else ("row", "head")
        axes += ("tile",) if name in SCALES and problem.scales == TILE_SCALES else ()
    return tuple(Name(f"{name}_{axis}") for axis in axes)


def definitions(problem: RowProblem) -> dict[str, Expr]:
    """Returns numbers that grids and struct fields name, in terms of the sizes."""
    if isinstance(problem, AppendProblem):
        return {"num_rows": TOKENS_K * NUM_HEADS_KEY, "num_slots": NUM_PAGES * PAGE_SIZE}
    return {"num_rows": BATCH * NUM_QUERIES * NUM_HEADS}


def conditions(problem: RowProblem, build: Build) -> list[Condition]:
    """Returns every condition on sizes and strides; each expression is 1 (true) for the planned problem."""
    found = [(Name(name) >= 1, f"{name} must be at least 1; with none there is nothing to launch")
             for name in sizes(problem)]  # fmt: skip
    if isinstance(problem, MergeProblem) and problem.is_packed:
        says = "num_queries, of the longest sequence, must be at most tokens_q"
        found += [(NUM_QUERIES <= TOKENS_Q, says), (TOKENS_Q <= merge.MAX_ROWS, _most("tokens_q"))]
    return [*found, *_strides(problem, build), *_overlaps(problem)]


def limits(problem: RowProblem) -> list[Condition]:
    """Returns every condition on the definitions."""
    found = [(Name("num_rows") <= append.MAX_ROWS, _most("num_rows"))]
    if isinstance(problem, AppendProblem):
        says = f"num_pages * page_size must be at most {append.MAX_SLOTS}; use several caches"
        found.append((Name("num_slots") <= append.MAX_SLOTS, says))
    return found


def _most(name: str) -> str:
    return f"{name} must be at most {append.MAX_ROWS}; {_SLICES}"


def _strides(problem: RowProblem, build: Build) -> Iterator[Condition]:
    """Strides of rows are multiples of the elements of one load."""
    unit = build.vector_bytes // build.item_bytes
    for name, shape in shapes(problem).items():
        for size, stride in zip(shape, stride_names(problem, name), strict=False):
            if unit > 1 and name not in SCALES:
                yield (step(size, stride, 0) % unit).equals(0), f"{stride} must be a multiple of {unit} elements"


def _overlaps(problem: RowProblem) -> Iterator[Condition]:
    """No two indices of an array that is written have the same element."""
    for name in problem.outputs if isinstance(problem, AppendProblem) else ("output",):
        strides = (*stride_names(problem, name), ONE)
        pairs = chain.from_iterable(zip(shapes(problem)[name], strides, strict=False))
        says = f"rows of {name} overlap: its strides must be those of an array of these sizes; set them with the sizes"
        yield call("distinct", *pairs).equals(1), says
