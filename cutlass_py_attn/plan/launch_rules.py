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
from typing import Final

from cutlass_py_attn import integers
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.backward_parts.kernel import grad_bias_grid
from cutlass_py_attn.kernels.backward_parts.layout import dq_pieces
from cutlass_py_attn.kernels.catalogue import fused_kernel_of, kernel_of
from cutlass_py_attn.kernels.common.layout import RAGGED_ROWS, RAGGED_STRIDE_BYTES
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
from cutlass_py_attn.launch.names import (
    BATCH,
    GROUP,
    MASK_BLOCK_COLUMNS,
    MASK_BLOCK_HEADS,
    MASK_BLOCK_ROWS,
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
)
from cutlass_py_attn.launch.variants import QUERY_HEADS
from cutlass_py_attn.problem.mask_program import MASK_SCALARS
from cutlass_py_attn.problem.operands import Operand, axes_of, of_tensor
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import BIASES, LSE_PADDING, MASK_ARRAYS, OPERAND_BYTES, VISIBLE_BLOCKS
from cutlass_py_attn.problem.validation import MAX_LENGTH
from cutlass_py_attn.score_terms import registry

LOG2_E: Final = math.log2(math.e)
MAX_GRID_YZ: Final = 65535  # of CUDA, along y and z of a grid
MAX_INT32: Final = 2**31 - 1  # of an i32 field, of an int32 array, and of a grid along x
BIAS_AXES: Final = tuple(
    map(Name, ("bias_batch", "bias_heads", "bias_queries", "bias_keys"))
)  # the sizes of grad_bias, if not known
COUNTED: Final = ("tile_entries",)  # workspace buffers of 32-bit words whose places are 32-bit numbers
# By what an axis counts.
SIZES: Final[dict[str, Expr]] = {
    **{str(name): name for name in (BATCH, NUM_HEADS, NUM_HEADS_KEY, NUM_QUERIES, NUM_KEYS, TOKENS_Q, TOKENS_K)},
    **{str(name): name for name in (NUM_PAGES, PAGE_SIZE, MAX_PAGES)},
    "tokens": TOKENS_K,
    "bounds": BATCH + 1,
    "padded_queries": round_up(NUM_QUERIES, LSE_PADDING),
    f"{VISIBLE_BLOCKS}_2": ceil_div(NUM_QUERIES, MASK_BLOCK_ROWS),
    f"{VISIBLE_BLOCKS}_3": ceil_div(NUM_KEYS, MASK_BLOCK_COLUMNS),
}
# Row strides from one page of value to the next; 0 if there is one page.
VALUE_PAGE_ROWS: Final = step(NUM_PAGES, Name("value_page"), 0) // maximum(Name("value_row"), 1)


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
    if build.kind == "backward":
        found |= {"num_splits_key": _num_splits_key(problem, build), **total_tiles(problem, build)}
    return found | fused_kernel_of(build).definitions(problem, build)


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
    kernel = kernel_of(build)
    own = {"main": kernel.main_grid(build), **kernel.other_grids(build)}
    if build.kind != "backward":
        return own
    query_tiles = ceil_div(NUM_QUERIES, build.tile_m)
    bias = {"bias": grad_bias_grid(build, bias_sizes)} if "bias" in entry_points.entries(build) else {}
    return {
        **own,
        "delta": (times(query_tiles, integers.ceil_div(build.tile_m, entry_points.DELTA_ROWS)), NUM_HEADS, BATCH),
        "finish": (times(query_tiles, dq_pieces(build)), NUM_HEADS, BATCH),
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
    numbers = {name: values[name] for name in ("batch", "num_heads", "num_queries", "num_keys", "group")}
    numbers |= {
        "window_left": left,
        "window_right": right,
        "bottom_right": int(problem.mask.bottom_right),
    }
    if problem.has_ragged_rows:
        numbers |= {name: values[name] for name, _ in abi.VARLEN}
    if problem.form.has_ranges:
        rows, columns = problem.block_size
        heads = mask_block_heads(problem).evaluate(values)
        names = map(str, (MASK_BLOCK_ROWS, MASK_BLOCK_COLUMNS, MASK_BLOCK_HEADS))
        numbers |= dict(zip(names, (rows, columns, heads), strict=True))
        numbers |= dict(zip(MASK_SCALARS, problem.mask_scalars or (), strict=False))
        for name in MASK_ARRAYS:
            array = getattr(problem, name)
            numbers |= {} if array is None else {f"{name}_size_{axis}": size for axis, size in enumerate(array.shape)}
    if problem.pages is not None:
        numbers |= page_sizes(problem)
        numbers |= {"value_page_rows": _value_page_rows(problem)} if build.maps_value else {}
    for term in registry.in_struct(problem.features):
        numbers |= term.sizes(problem)
    if problem.direction == "backward":
        numbers |= {name: total.evaluate(values) for name, total in total_tiles(problem, build).items()}
    return tuple(numbers.items())


def mask_block_heads(problem: Problem) -> Expr:
    """Returns how many query heads have the same visible blocks."""
    blocks = problem.visible_blocks
    heads = "" if blocks is None else axes_of(problem, VISIBLE_BLOCKS, blocks.shape)[1]
    return GROUP if heads == str(NUM_HEADS_KEY) else ONE


def edges_of(build: Build) -> tuple[str, ...]:
    """Returns the struct fields with the edges of a mask that a build reads: both of one with ranges of keys."""
    return ("window_left", "window_right") if build.form.has_ranges else build.form.parameters


def _value_page_rows(problem: Problem) -> int:
    names = {str(NUM_PAGES): problem.value.shape[0], **of_tensor(problem, "value").strides}
    return int(VALUE_PAGE_ROWS.evaluate(names))


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
    if build.form.has_ranges:
        found[str(MASK_BLOCK_HEADS)] = mask_block_heads(problem)
    return {"keep_scale": ONE, **found, "scale_log2": Name("scale") * LOG2_E}
