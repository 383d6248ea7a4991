"""Launch rules: grids, workspace, tensor maps and struct fields of a Build as expressions over the sizes of a Problem.

The planner evaluates the expressions for a Plan. A bundle prints them, so a host computes the same numbers for its own
sizes.

    name                                        value
    batch, num_heads, num_queries, num_keys     sizes of the problem; num_keys and num_queries of the longest sequence
    num_heads_key, tokens_q, tokens_k           heads of key and value; rows of all sequences together
    num_sms                                     multiprocessors of the device
    query_row, query_head, ...                  strides of a tensor in elements
    group, num_splits_key, total_tiles, ...     what `definitions` computes from the names above
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from cutlass_py_attn import integers
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.backward_parts.kernel import grad_bias_grid, num_splits, parts_bytes
from cutlass_py_attn.kernels.backward_parts.layout import dq_piece_columns, dq_pieces
from cutlass_py_attn.kernels.catalogue import fused_kernel_of, kernel_of
from cutlass_py_attn.kernels.common.layout import RAGGED_ROWS, RAGGED_STRIDE_BYTES
from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.sm80_split_d.layout import blocks_per_tile
from cutlass_py_attn.kernels.sm90 import kernel as sm90
from cutlass_py_attn.kernels.sm90 import shared_tiles
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import (
    ONE,
    Expr,
    Grid,
    Name,
    Number,
    ceil_div,
    contiguous_strides,
    maximum,
    minimum,
    round_up,
    step,
    times,
)
from cutlass_py_attn.launch.grad_bias import uses_wgmma
from cutlass_py_attn.launch.names import (
    BATCH,
    MAX_PAGES,
    NUM_HEADS,
    NUM_HEADS_KEY,
    NUM_KEYS,
    NUM_PAGES,
    NUM_QUERIES,
    NUM_SPLITS_KEY,
    PAGE_SIZE,
    TOKENS_K,
    TOKENS_Q,
    TOTAL_KEY_TILES,
    TOTAL_TILES,
)
from cutlass_py_attn.launch.variants import PER_HEAD, QUERY_HEADS, SHARED_END, WIDE
from cutlass_py_attn.problem.operands import Operand, of_tensor
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import BIASES, F32_BYTES, LSE_PADDING, OPERAND_BYTES, RANGES_PADDING, WORD_BYTES
from cutlass_py_attn.problem.validation import MAX_LENGTH
from cutlass_py_attn.score_terms import registry

LOG2_E: Final = math.log2(math.e)
MAX_GRID_YZ: Final = 65535  # of CUDA, along y and z of a grid
MAX_INT32: Final = 2**31 - 1  # of an i32 field, of an int32 array, and of a grid along x
BIAS_AXES: Final = tuple(
    map(Name, ("bias_batch", "bias_heads", "bias_queries", "bias_keys"))
)  # the sizes of grad_bias, if not known
# By what an axis counts.
SIZES: Final[dict[str, Expr]] = {
    **{str(name): name for name in (BATCH, NUM_HEADS, NUM_HEADS_KEY, NUM_QUERIES, NUM_KEYS, TOKENS_Q, TOKENS_K)},
    **{str(name): name for name in (NUM_PAGES, PAGE_SIZE, MAX_PAGES)},
    "tokens": TOKENS_K,
    "bounds": BATCH + 1,
    "padded_queries": round_up(NUM_QUERIES, LSE_PADDING),
    "padded_ranges": round_up(NUM_QUERIES, RANGES_PADDING),
}
# Row strides from one page of value to the next; 0 if there is one page.
VALUE_PAGE_ROWS: Final = step(NUM_PAGES, Name("value_page"), 0) // maximum(Name("value_row"), 1)


@dataclass(frozen=True, slots=True)
class BufferRule:
    """One workspace buffer: its bytes, the condition under which it exists, and whether a memset zeroes it."""

    name: str
    bytes: Expr
    is_zeroed: bool = False
    condition: Expr = ONE


def sizes(problem: Problem) -> dict[str, int]:
    """Returns the sizes of the problem by the names that expressions use."""
    return problem.shape.sizes | ({} if problem.pages is None else page_sizes(problem))


def page_sizes(problem: Problem) -> dict[str, int]:
    """Returns the sizes of a paged problem's pools and table by the names of their struct fields.

    Without pages in the pools the table has no entries for a kernel, so that wrong lengths of keys are not believed.
    """
    pages = problem.pages
    assert pages is not None
    num_pages, page_size = problem.key.shape[:2]
    return {
        "page_size": page_size,
        "max_pages": pages.max_pages if num_pages else 0,
        "table_entries": pages.table_entries if num_pages else 0,
        "num_pages": num_pages,
    }


def values(problem: Problem, build: Build, num_sms: int) -> dict[str, int]:
    """Returns the values of all names but strides: sizes, num_sms and definitions."""
    found = sizes(problem) | {"num_sms": num_sms}
    for name, rule in definitions(problem, build).items():
        found[name] = rule.evaluate(found)
    return found


def definitions(problem: Problem, build: Build) -> dict[str, Expr]:
    """Returns numbers that other expressions and struct fields name, each in terms of those before it."""
    found: dict[str, Expr] = {"group": NUM_HEADS // maximum(NUM_HEADS_KEY, 1)}
    if build.shares_chunks:
        found |= decode.schedule(problem, build)
    elif build.family == "decode":
        found["num_splits_key"] = decode.num_splits_key(build)
    elif build.shares_query_tiles:
        found |= shared_tiles.query_tiles(build)
    if build.kind == "backward":
        found |= {"num_splits_key": _num_splits_key(problem, build), **total_tiles(problem, build)}
        found |= shared_tiles.key_tiles(build) if SHARED_END in build.options else {}
    return found


def _num_splits_key(problem: Problem, build: Build) -> Expr:
    """Returns the blocks that share one (batch, key head) of a backward: the caller's number, else the family's."""
    if problem.num_splits_key is not None:
        return maximum(minimum(min(problem.num_splits_key, MAX_LENGTH), ceil_div(NUM_KEYS, build.tile_n)), 1)
    return maximum(fused_kernel_of(build).num_splits_key(build), 1)


def total_tiles(problem: Problem, build: Build) -> dict[str, Expr]:
    """Returns the query tiles of one head over the whole batch, and its key tiles if dK and dV have sums.

    With variable lengths, sequence b starts at tile cu_seqlens_q[b] // tile_m + b, so that each has its last tile; key
    tiles likewise.
    """
    is_varlen = problem.shape.tokens is not None
    sides = {"total_tiles": (TOKENS_Q, NUM_QUERIES, build.tile_m)}
    if build.variant == QUERY_HEADS:
        sides["total_key_tiles"] = (TOKENS_K, NUM_KEYS, build.tile_n)
    return {
        name: tokens // rows + BATCH if is_varlen else BATCH * ceil_div(length, rows)
        for name, (tokens, length, rows) in sides.items()
    }


def grid(build: Build, symbol: str) -> Grid:
    """Returns the grid of the entry `symbol`, with the sizes of grad_bias as the names BIAS_AXES."""
    role = next(role for role, name in entry_points.entries(build).items() if name == symbol)
    return grids(build)[role]


def grids(build: Build, bias_sizes: tuple[Expr, ...] = BIAS_AXES) -> dict[str, Grid]:
    """Returns (x, y, z) of each entry by its role; bias_sizes: the sizes of grad_bias.

    The planner cuts a grid with more than MAX_GRID_YZ heads or batches into several launches.
    """
    main = kernel_of(build).main_grid(build)
    if build.kind != "backward":
        combine_grid = (shared_tiles if build.shares_query_tiles else decode).combine_grid(build)
        combine = {"combine": combine_grid} if build.has_combine else {}
        return {"main": main, **combine}
    finish_kv = {"finish_kv": sm90.finish_kv_grid(build)} if build.variant == QUERY_HEADS else {}
    query_tiles = ceil_div(NUM_QUERIES, build.tile_m)
    bias = {"bias": grad_bias_grid(build, bias_sizes)} if "bias" in entry_points.entries(build) else {}
    return {
        "main": main,
        "delta": (times(query_tiles, integers.ceil_div(build.tile_m, entry_points.DELTA_ROWS)), NUM_HEADS, BATCH),
        "finish": (times(query_tiles, dq_pieces(build)), NUM_HEADS, BATCH),
        **finish_kv,
        **bias,
        "sinks": (NUM_HEADS, ONE, ONE),
    }


def grids_of(problem: Problem, build: Build) -> dict[str, Grid]:
    """Returns the grid of each entry by its role, for this problem's grad_bias."""
    return grids(build) if problem.grad_bias is None else grids(build, shape(of_tensor(problem, "grad_bias")))


def launch_condition(build: Build, role: str) -> Expr:
    """Returns the condition for the launch of an entry."""
    if role != "combine":
        return ONE
    return Name("num_teams") + Name("fixed_chunks") > 1 if build.shares_chunks else NUM_SPLITS_KEY > 1


def workspace(build: Build) -> tuple[BufferRule, ...]:
    """Returns the workspace buffers in their order.

    grad_query_accum: (num_heads, total_tiles, tile_m, columns) float32 sum of dQ
    dq_semaphore: (num_heads, total_tiles) int32 semaphore of each query tile, if deterministic
    grad_key_accum, grad_value_accum: (num_heads_key, total_key_tiles, tile_n, columns) float32 sums of dK and dV, if
        work tiles are those of query heads
    shared_sums: of each of the last key tiles, if blocks share their queries, the float32 sums of dK and dV and the
        int32 counts of the parts that warps have added
    tile_count_semaphore: int32 count of blocks or key tiles that have started
    delta, logsumexp_log2: (num_heads, total_tiles, tile_m) float32

    grad_bias_counts, grad_bias_parts: of tiles of grad_bias, if blocks share them, the int32 counts of the parts that
        warps have stored, and the float32 parts

    With one block per head, grad_query_accum has one key head for each block, and nothing is zeroed. Variant wide has
    no sums in memory. Where `entry_points.delta_clears_sums`, the delta kernel writes the zeros.
    """
    if build.has_combine:
        condition = ONE if build.shares_chunks else launch_condition(build, "combine")
        parts = shared_tiles.parts_bytes(build) if build.shares_query_tiles else decode.workspace(build)
        return tuple(BufferRule(name, size, condition=condition) for name, size in parts.items())
    if build.kind == "forward":
        return ()
    rows = NUM_HEADS * TOTAL_TILES * (build.tile_m * F32_BYTES)
    statistics = BufferRule("delta", rows), BufferRule("logsumexp_log2", rows)
    if uses_wgmma(build):
        shared_counts, shared_parts = _grad_bias_parts(build)
        return shared_counts, *_sums(build), *statistics, shared_parts
    return *_sums(build), *statistics


def _grad_bias_parts(build: Build) -> tuple[BufferRule, BufferRule]:
    """Returns the buffers of blocks that share tiles of grad_bias; the first is zeroed."""
    shared = num_splits(build) > 1
    counts, parts = (BufferRule(name, size, condition=shared) for name, size in parts_bytes(build).items())
    return replace(counts, is_zeroed=True), parts


def _sums(build: Build) -> tuple[BufferRule, ...]:
    """Returns the buffers of sums of gradients, and counters."""
    if build.variant == PER_HEAD:
        return (BufferRule("grad_query_accum", sm90.per_head_accum_bytes(build)),)
    if build.variant == WIDE:
        return ()
    return tuple(_accumulated(build))


def _accumulated(build: Build) -> list[BufferRule]:
    """Returns the buffers that begin as zeros: the sums of gradients, and counters."""
    found = []
    is_zeroed = not entry_points.delta_clears_sums(build)
    if "query" in build.gradients:
        pieces = times(NUM_HEADS * TOTAL_TILES, dq_pieces(build))
        piece_bytes = build.tile_m * dq_piece_columns(build) * F32_BYTES
        found.append(BufferRule("grad_query_accum", pieces * piece_bytes, is_zeroed=is_zeroed))
        if build.deterministic:
            found.append(BufferRule("dq_semaphore", pieces * WORD_BYTES, is_zeroed=is_zeroed))
    if build.variant == QUERY_HEADS:
        for name, columns in (("grad_key_accum", build.columns), ("grad_value_accum", build.columns_value)):
            size = NUM_HEADS_KEY * TOTAL_KEY_TILES * (build.tile_n * columns * F32_BYTES)
            found.append(BufferRule(name, size, is_zeroed=True))
    if SHARED_END in build.options:
        found.append(BufferRule("shared_sums", shared_tiles.sums_bytes(build), condition=Name("shared_key_tiles") > 0))
    if build.family == "sm90":
        found.append(BufferRule("tile_count_semaphore", Number(WORD_BYTES), is_zeroed=is_zeroed))
    elif build.deterministic:
        counters = NUM_HEADS_KEY * BATCH * (blocks_per_tile(build) * WORD_BYTES)
        found.append(BufferRule("tile_count_semaphore", counters, is_zeroed=True))
    return found


def shape(operand: Operand) -> tuple[Expr, ...]:
    """Returns the sizes of an array."""
    axes = zip(operand.axes, operand.tensor.shape, strict=True)
    return tuple(SIZES.get(axis, Number(size)) for axis, size in axes)


def strides(operand: Operand) -> tuple[Expr, ...]:
    """Returns the strides of an array (elements): struct fields, and behind them those of contiguous axes."""
    contiguous = contiguous_strides(shape(operand))
    return *map(Name, operand.strides), *contiguous[len(operand.strides) :]


def is_pool(operand: Operand) -> bool:
    """Returns whether the rows of an array are in pages."""
    return operand.axes[0] == "num_pages"


def tensor_map(problem: Problem, name: str) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """Returns (sizes, strides) of a tensor map in elements, innermost axis first, without the innermost 1.

    With one length the axes are (columns, rows, heads, batch), and those of grad_bias (keys, queries, heads, batch).
    With variable lengths a copy must end with its sequence, although the rows of other sequences follow. The kernel
    then reads row r of a sequence, which has n rows and ends before row e, as row RAGGED_ROWS - n + r, so that the map
    itself ends with the sequence; an axis of its own adds e rows. The last axis subtracts RAGGED_ROWS rows: its only
    step wraps around the whole address space.

    Pools have the axes (columns, rows of a page, heads, pages). The map of the tile of value with the last key is like
    that of variable lengths; its rows are those of all pages, with the rows that lie between two pages.
    """
    operand = of_tensor(problem, entry_points.mapped_field(name))
    sizes, steps = shape(operand), strides(operand)
    axes = (0, 2, 1) if operand.name in BIASES else (0, 1, 2)  # outermost, rows, heads
    outer, rows, heads = (sizes[axis] for axis in axes)
    page, row, head = (step(sizes[axis], steps[axis], sizes[3]) for axis in axes)
    if name == entry_points.LAST_VALUE and is_pool(operand):
        rows = (outer - 1) * VALUE_PAGE_ROWS + rows
    elif is_pool(operand) or not problem.has_ragged_rows:
        return (sizes[3], rows, heads, outer), (row, head, page)
    around = RAGGED_STRIDE_BYTES // OPERAND_BYTES[problem.dtype] - row
    return (sizes[3], Number(RAGGED_ROWS), heads, rows + 1, Number(RAGGED_ROWS + 1)), (row, head, row, around)


def params(problem: Problem, build: Build) -> tuple[tuple[str, int], ...]:
    """Returns the struct's integer fields that follow from the problem, without num_splits_key."""
    left, right = problem.mask.edges
    values = sizes(problem) | {"group": problem.shape.group}
    found = {name: values[name] for name in ("batch", "num_heads", "num_queries", "num_keys", "group")}
    found |= {
        "window_left": left,
        "window_right": right,
        "bottom_right": int(problem.mask.bottom_right),
    }
    if problem.has_ragged_rows:
        found |= {name: values[name] for name, _ in abi.VARLEN}
    if problem.pages is not None:
        found |= page_sizes(problem)
        found |= {"value_page_rows": sm90.value_page_rows(problem)} if build.maps_value else {}
    for term in registry.in_struct(problem.features):
        found |= term.sizes(problem)
    if problem.direction == "backward":
        found |= {name: total.evaluate(values) for name, total in total_tiles(problem, build).items()}
    return tuple(found.items())


def expect_int32(numbers: Iterable[tuple[str, int]]) -> None:
    """Raises NotSupported with every number that a 32-bit field or a grid does not hold."""
    reasons = [
        f"{name} = {value}: must be at most {MAX_INT32}; call once for each slice of the batch"
        for name, value in numbers
        if not -MAX_INT32 - 1 <= value <= MAX_INT32
    ]
    if reasons:
        raise NotSupported(reasons)


def fields(problem: Problem, build: Build, inputs: Collection[str]) -> dict[str, Expr]:
    """Returns the struct fields that are numbers, by name: an input, a definition, or what the problem fixes."""
    found: dict[str, Expr] = {name: Number(value) for name, value in params(problem, build)}
    found |= {name: Name(name) for name in (*definitions(problem, build), *inputs)}
    if "value_page_rows" in found:
        found["value_page_rows"] = VALUE_PAGE_ROWS
    return {"keep_scale": ONE, **found, "scale_log2": Name("scale") * LOG2_E}
