"""Random problems of `append_to_cache` and `merge_states`, run on a GPU and compared with the reference.

An append is compared byte by byte, in all of the memory that its arrays lie in: rows that are skipped, gaps between
rows and the bytes around the arrays keep their values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import ceil_div, round_up
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import LAST, STANDARD, SUM, SUM_LAST, TOTAL
from cutlass_py_attn.plan.append import SCALES_OF, plan_append
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.append import CACHES, SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.quantization import SCALE_COLUMNS
from cutlass_py_attn.problem.tensors import E4M3, LSE_PADDING, ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.reference import serving
from cutlass_py_attn.runtime import driver, fill
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.runtime.binding import Bound, bind
from cutlass_py_attn.testing.check import Kernels

Array = npt.NDArray[Any]

SHOWN_DTYPE, SHOWN_HEAD_DIM = "bfloat16", 128
RESULTS: Final = ("output", "logsumexp")  # of a merge
SEEDS: Final = 240  # random problems of each kind that tests/gpu runs
GUARD: Final = 256  # bytes before and after every array
# (dtype, head_dim, head_dim_value): whole vectors, rows that end within a step of their threads, single elements.
APPEND_DIMS: Final = (
    ("bfloat16", 128, 128),
    ("float16", 64, 64),
    ("bfloat16", 72, 40),
    ("float16", 7, 3),
    ("float32", 96, 32),
)
# The same of latent caches of e4m3 codes: their rows, and rows whose last tile has fewer columns.
LATENT_DIMS: Final = (
    ("bfloat16", 512, 64),
    ("float16", 512, 64),
    ("float32", 512, 64),
    ("bfloat16", 200, 40),
    ("bfloat16", 300, 6),
    ("float16", 7, 3),
)
MERGE_DIMS: Final = (("bfloat16", 128), ("float16", 64), ("bfloat16", 40), ("float16", 7), ("float32", 96))
SCALE_FORMS: Final = ("none", "tensor", "head", "row")
LAYOUTS: Final = ("nhd", "hnd", "interleaved", "halves", "gaps")
# rows, pages: the codes of each row or page come first, then its scales, then its other columns.
LATENT_LAYOUTS: Final = ("nhd", "hnd", "gaps", "rows", "pages")
PAGE_SIZES: Final = (1, 2, 16, 64, 12)


@dataclass(frozen=True)
class Placed:
    """An array in host memory: the bytes around it, its layout, and its offset in the bytes."""

    memory: Array
    tensor: Tensor
    offset: int

    def view(self, memory: Array | None = None) -> Array:
        """Returns the array, in these bytes or in others of the same layout."""
        dtype = numpy_dtype(self.tensor.dtype)
        strides = tuple(stride * dtype.itemsize for stride in self.tensor.strides)
        buffer = self.memory if memory is None else memory
        return np.ndarray(self.tensor.shape, dtype, buffer, self.offset, strides)


class _Draw:
    """Draws the arrays of one problem. guard: random bytes, so that a wrong write is seen."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one_of(self, choices: Any) -> Any:
        """Returns one of these choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def place(self, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None, gap: int = 0) -> Placed:
        """Places an array in bytes of its own.

        order: axes from the slowest to the fastest; None for row-major. gap: elements after a row.
        """
        order = order or tuple(range(len(shape)))
        strides, step = [1] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step = step * max(shape[axis], 1) + (gap if axis == len(shape) - 1 else 0)
        size = step * numpy_dtype(dtype).itemsize
        memory = self.rng.integers(0, 256, size + 2 * GUARD, np.uint8)
        return Placed(memory, Tensor(shape, tuple(strides), dtype), GUARD)

    def numbers(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Returns normal numbers, some of them large, tiny, infinite or NaN."""
        values = self.rng.standard_normal(shape, np.float32)
        special = np.array([np.inf, -np.inf, np.nan, 1e30, -460.0, 1e-30, 0.0, -0.0, 448.0, 464.0], np.float32)
        where = self.rng.random(shape) < 0.02
        with np.errstate(over="ignore"):
            return np.where(where, self.rng.choice(special, shape), values).astype(numpy_dtype(dtype))


def _at(placed: Placed, shape: tuple[int, ...], strides: tuple[int, ...], elements: int) -> Placed:
    """Returns a part of a placed array that starts `elements` after its start."""
    item = numpy_dtype(placed.tensor.dtype).itemsize
    tensor = Tensor(shape, strides, placed.tensor.dtype)
    return Placed(placed.memory, tensor, placed.offset + elements * item)


def _aligned(placed: Placed) -> Placed:
    """Returns the array with the alignment that its offset leaves."""
    alignment = min(placed.offset & -placed.offset, 16)
    tensor = placed.tensor
    return Placed(placed.memory, Tensor(tensor.shape, tensor.strides, tensor.dtype, alignment), placed.offset)


@dataclass(frozen=True)
class AppendCase:
    """One `append_to_cache`: its arrays by name, and the problem."""

    arrays: Mapping[str, Placed]

    @property
    def problem(self) -> AppendProblem:
        """The layouts of the arrays."""
        return AppendProblem(**{name: placed.tensor for name, placed in self.arrays.items()})

    @property
    def text(self) -> str:
        """The layouts in one line."""
        return "; ".join(
            f"{name} {it.tensor.shape} {it.tensor.strides} {it.tensor.dtype}" for name, it in self.arrays.items()
        )

    def expected(self) -> dict[int, Array]:
        """Returns the bytes of every memory after the append, by id of the memory."""
        memories = {id(placed.memory): placed.memory.copy() for placed in self.arrays.values()}
        views = {name: placed.view(memories[id(placed.memory)]) for name, placed in self.arrays.items()}
        for name in ("key", "value"):
            serving.append(views[name], views[f"{name}_cache"], views["slots"], views.get(f"{name}_scale"))
        return memories

    def plan(self, arch: str) -> Plan:
        """Returns the plan of the append."""
        return plan_append(self.problem, arch)

    def launch(self, kernels: Kernels, arch: str) -> RowLaunch:
        """Returns the bound kernel with copies of the arrays on the GPU."""
        return RowLaunch(self.plan(arch), kernels, self.arrays, self.problem.outputs)

    def check(self, kernels: Kernels, arch: str) -> tuple[dict[str, float], list[str]]:
        """Runs the append on the GPU. Returns error / allowed of each result, 0, and what is not the reference's."""
        with self.launch(kernels, arch) as launch:
            found, expected = launch.memories(), self.expected()
        wrong = []
        for name, placed in self.arrays.items():
            differ = np.flatnonzero(found[id(placed.memory)] != expected[id(placed.memory)])
            if differ.size:
                first = int(differ[0]) - placed.offset
                wrong.append(f"{name}: {differ.size} bytes differ, the first at {first} ({self.text})")
        return dict.fromkeys(self.problem.outputs, 0.0), wrong


def append_case(seed: int) -> AppendCase:
    """Returns a random append: dims, dtype, scales, layout of the pools, page size, slots."""
    draw = _Draw(seed)
    dtype, head_dim, head_dim_value = draw.one_of(APPEND_DIMS)
    form = draw.one_of(SCALE_FORMS)
    cache = dtype if form == "none" else draw.one_of(("uint8", "float8_e4m3fn"))
    heads = int(draw.rng.integers(1, 9))
    tokens, pages, page_size = _sizes(draw)
    dims = {"key": head_dim, "value": head_dim_value}
    layout = draw.one_of(LAYOUTS if head_dim == head_dim_value else ("nhd", "hnd", "gaps"))
    arrays = _fused_rows(draw, dtype, tokens, heads, dims)
    arrays |= _pools(draw, layout, cache, (pages, page_size, heads), dims)
    slots = draw.place((tokens,), "int64")
    slots.view()[...] = _slots(draw, tokens, pages * page_size)
    arrays["slots"] = slots
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": draw.one_of(((), (1,))),
        "head": (heads,),
        "row": (pages, page_size, heads),
    }
    for name in SCALES if form != "none" else ():
        order = draw.one_of(((0, 1, 2), (0, 2, 1))) if form == "row" else None
        arrays[name] = draw.place(shapes[form], "float32", order)
        if form != "row":
            arrays[name].view()[...] = draw.rng.uniform(0.001, 0.1, shapes[form])
    return AppendCase({name: _aligned(placed) for name, placed in arrays.items()})


def latent_append_case(seed: int) -> AppendCase:
    """Returns a random append to a latent cache of e4m3 codes: dims, dtype, layout of the pools, page size, slots."""
    draw = _Draw(seed)
    dtype, *columns = draw.one_of(LATENT_DIMS)
    heads = int(draw.one_of((1, 1, 1, 2)))
    tokens, pages, page_size = _sizes(draw)
    dims = dict(zip(("key", "value"), columns, strict=True))
    arrays = _fused_rows(draw, dtype, tokens, heads, dims)
    arrays |= _latent_pools(draw, draw.one_of(LATENT_LAYOUTS), dtype, (pages, page_size, heads), dims)
    arrays["slots"] = draw.place((tokens,), "int64")
    arrays["slots"].view()[...] = _slots(draw, tokens, pages * page_size)
    return AppendCase({name: _aligned(placed) for name, placed in arrays.items()})


def _sizes(draw: _Draw) -> tuple[int, int, int]:
    """Returns the tokens, the pages and the page size of an append."""
    page_size, tokens = draw.one_of(PAGE_SIZES), int(draw.one_of((1, 3, 17, 64, 200)))
    pages = int(draw.rng.integers(1, 8)) + (tokens // page_size if draw.rng.random() < 0.7 else 0)
    return tokens, pages, page_size


def _slots(draw: _Draw, tokens: int, capacity: int) -> Array:
    """Returns different slots; some are negative, or beyond the cache."""
    free = draw.rng.permutation(capacity)[:tokens]
    slots = np.full(tokens, -1, np.int64)
    slots[: free.size] = free
    draw.rng.shuffle(slots)
    skipped = draw.rng.random(tokens) < 0.1
    outside = np.array([-1, -7, capacity, capacity + 5, 2**40, -(2**63), 2**63 - 1, 2**32], np.int64)
    return np.where(skipped, draw.rng.choice(outside, tokens), slots)


def _fused_rows(draw: _Draw, dtype: str, tokens: int, heads: int, dims: Mapping[str, int]) -> dict[str, Placed]:
    """Returns key and value, dense or as parts of the rows of a fused projection."""
    if draw.rng.random() < 0.5:
        found = {name: draw.place((tokens, heads, columns), dtype) for name, columns in dims.items()}
    else:
        columns = heads * (dims["key"] + dims["value"])
        # Rows of 16 bytes more than they hold, unless single elements are copied.
        row = columns + (3 if columns % 2 else 16 // numpy_dtype(dtype).itemsize)
        whole = draw.place((tokens, row), dtype)
        key = _at(whole, (tokens, heads, dims["key"]), (row, dims["key"], 1), 0)
        value = _at(whole, (tokens, heads, dims["value"]), (row, dims["value"], 1), heads * dims["key"])
        found = {"key": key, "value": value}
    for placed in found.values():
        placed.view()[...] = draw.numbers(placed.tensor.shape, dtype)
    return found


def _pools(
    draw: _Draw, layout: str, dtype: str, sizes: tuple[int, int, int], dims: Mapping[str, int]
) -> dict[str, Placed]:
    """Returns the caches in one of LAYOUTS."""
    pages, page_size, heads = sizes
    columns = dims["key"]
    shape = (pages, page_size, heads, columns)
    if layout == "interleaved":  # heads of key and value take turns
        whole = draw.place((pages, page_size, heads, 2, columns), dtype)
        strides = (page_size * heads * 2 * columns, heads * 2 * columns, 2 * columns, 1)
        return {name: _at(whole, shape, strides, number * columns) for number, name in enumerate(CACHES)}
    if layout == "halves":  # each page has its keys, then its values
        whole = draw.place((pages, 2, page_size, heads, columns), dtype)
        part = page_size * heads * columns
        strides = (2 * part, heads * columns, columns, 1)
        return {name: _at(whole, shape, strides, number * part) for number, name in enumerate(CACHES)}
    order = (0, 2, 1, 3) if layout == "hnd" else (0, 1, 2, 3)
    gap = 16 if layout == "gaps" else 0
    return {
        f"{name}_cache": draw.place((pages, page_size, heads, width), dtype, order, gap) for name, width in dims.items()
    }


def _latent_pools(
    draw: _Draw, layout: str, dtype: str, sizes: tuple[int, int, int], dims: Mapping[str, int]
) -> dict[str, Placed]:
    """Returns the caches and the scales of a latent cache in one of LATENT_LAYOUTS."""
    pages, page_size, heads = sizes
    codes = draw.one_of(E4M3)
    parts = {
        "key_cache": (dims["key"], codes),
        "key_scale": (ceil_div(dims["key"], SCALE_COLUMNS), "float32"),
        "value_cache": (dims["value"], dtype),
    }
    if layout not in ("rows", "pages"):
        order = (0, 2, 1, 3) if layout == "hnd" else (0, 1, 2, 3)
        gap = 16 if layout == "gaps" else 0
        return {name: draw.place((*sizes, columns), kind, order, gap) for name, (columns, kind) in parts.items()}
    rows = 1 if layout == "rows" else page_size * heads  # that follow each other in a part
    items = {name: numpy_dtype(kind).itemsize for name, (_, kind) in parts.items()}
    widths = {name: round_up(columns * items[name], ROW_ALIGNMENT_BYTES) for name, (columns, _) in parts.items()}
    of_page = page_size * heads * sum(widths.values())
    whole, found, first = draw.place((pages, of_page), "uint8"), {}, 0
    for name, (columns, kind) in parts.items():
        row = of_page // (page_size * heads) if layout == "rows" else widths[name]
        strides = tuple(step // items[name] for step in (of_page, row * heads, row))
        found[name] = Placed(whole.memory, Tensor((*sizes, columns), (*strides, 1), kind), whole.offset + first)
        first += rows * widths[name]
    return found


@dataclass(frozen=True)
class MergeCase:
    """One `merge_states`, or a sum: its arrays by name, results included."""

    arrays: Mapping[str, Placed]
    max_seqlen_q: int | None

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the arrays that the kernel writes."""
        return tuple(name for name in RESULTS if name in self.arrays)

    @property
    def problem(self) -> MergeProblem:
        """The layouts of the arrays."""
        tensors = {name: placed.tensor for name, placed in self.arrays.items() if name != "logsumexp"}
        return MergeProblem(**tensors, max_seqlen_q=self.max_seqlen_q)

    def plan(self, arch: str) -> Plan:
        """Returns the plan of the merge."""
        return plan_merge(self.problem, arch)

    def launch(self, kernels: Kernels, arch: str) -> RowLaunch:
        """Returns the bound kernel with copies of the arrays on the GPU."""
        cleared = self.problem.output if self.problem.is_packed else None
        return RowLaunch(self.plan(arch), kernels, self.arrays, self.results, cleared)

    def check(self, kernels: Kernels, arch: str) -> tuple[dict[str, float], list[str]]:
        """Runs the merge on the GPU. Returns error / allowed of each result, and what is wrong."""
        with self.launch(kernels, arch) as launch:
            found = launch.memories()
        inputs = {name: it.view() for name, it in self.arrays.items() if name not in RESULTS}
        expected = [serving.add(**inputs)] if self.problem.is_sum else [*serving.merge(**inputs)]
        results = [self.arrays[name].view(found[id(self.arrays[name].memory)]) for name in self.results]
        ratios = {"output": output_ratio(results[0], expected[0], inputs)}
        if not self.problem.is_sum:
            ratios["logsumexp"] = logsumexp_ratio(results[1], expected[1])
        wrong = [f"{name}: error / allowed is {ratio}" for name, ratio in ratios.items() if not ratio <= 1]
        for name, placed in self.arrays.items():
            before, after = placed.memory.copy(), found[id(placed.memory)].copy()
            if name in RESULTS:
                for memory in (before, after):
                    placed.view(memory)[...] = 0
            if (before != after).any():
                wrong.append(f"{name}: bytes changed that belong to no result")
        return ratios, [f"{text} ({self.problem})" for text in wrong]


@np.errstate(invalid="ignore")
def output_ratio(found: Array, expected: Array, inputs: Mapping[str, Array]) -> float:
    """Returns the largest error / allowed of an output: one unit in the last place of float64's result, rounded.

    Float32's own rounding is allowed too, relative to the two outputs, because they may cancel. A number that is not
    finite must be float64's: otherwise the ratio is infinite.
    """
    sizes = [np.abs(np.nan_to_num(inputs[name].astype(np.float64))) for name in ("output_a", "output_b")]
    rounded = expected.astype(found.dtype)
    ulp = np.spacing(np.abs(rounded)).astype(np.float64) if found.dtype.kind == "f" else _spacing(rounded)
    ratio = np.abs(found.astype(np.float64) - expected) / (ulp + 4e-7 * (sizes[0] + sizes[1]))
    same = np.isnan(expected) & np.isnan(found.astype(np.float64))
    return float(np.where(same, 0.0, np.where(np.isnan(ratio), np.inf, ratio)).max(initial=0.0))


def _spacing(values: Array) -> Array:
    """Returns the units in the last place of bfloat16 numbers, which has 8 bits of mantissa."""
    wide = np.maximum(np.abs(values.astype(np.float64)), 2.0**-126)
    spacing: Array = 2.0 ** (np.floor(np.log2(wide)) - 7)
    return spacing


@np.errstate(invalid="ignore")
def logsumexp_ratio(found: Array, expected: Array) -> float:
    """Returns the largest error / allowed of a logsumexp: one unit in the last place of max(|logsumexp|, 4).

    Infinities must be float64's: otherwise the ratio is infinite.
    """
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite].astype(np.float32)):
        return float("inf")
    allowed = np.spacing(np.maximum(np.abs(expected[finite]), 4).astype(np.float32)).astype(np.float64)
    ratio = np.abs(found[finite] - expected[finite]) / allowed
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


_MERGES: Final = (STANDARD, STANDARD, TOTAL, LAST, SUM, SUM_LAST)


def merge_case(seed: int) -> MergeCase:
    """Returns a random merge: dims, dtype, dense or packed, layout, rows without keys; a float32 total, or a sum."""
    draw = _Draw(seed)
    variant = str(np.random.default_rng((seed, 1)).choice(_MERGES))
    dtype, columns = draw.one_of(MERGE_DIMS)
    heads, longest = int(draw.rng.integers(1, 9)), None
    arrays: dict[str, Placed] = {}
    if draw.rng.random() < 0.5 or variant in (SUM, SUM_LAST):
        batch, queries = int(draw.rng.integers(1, 5)), int(draw.one_of((1, 5, 31, 32, 70)))
        shape, lengths = (batch, queries, heads, columns), [queries] * batch
    else:
        lengths = [int(length) for length in draw.rng.integers(0, 50, draw.rng.integers(1, 5))]
        bounds = np.cumsum([0, *lengths])
        batch, longest = len(lengths), max(lengths) + int(draw.rng.integers(0, 3))
        tokens = max(int(bounds[-1]) + int(draw.rng.integers(0, 4)), longest)
        shape, queries = (1, tokens, heads, columns), longest
        arrays["cu_seqlens_q"] = draw.place((batch + 1,), "int32")
        arrays["cu_seqlens_q"].view()[...] = bounds
    for name in ("output_a", "output_b", "output"):
        kind = "float32" if name in abi.FLOAT32_OUTPUTS[variant] else dtype
        arrays[name] = draw.place(shape, kind, draw.one_of(((0, 1, 2, 3), (0, 2, 1, 3))), draw.one_of((0, 16)))
    for name in ("output_a", "output_b"):
        view = arrays[name].view()
        view[...] = draw.rng.standard_normal(shape).astype(view.dtype)
    if variant in (SUM, SUM_LAST):
        return MergeCase({name: _aligned(placed) for name, placed in arrays.items()}, None)
    for name in ("logsumexp_a", "logsumexp_b", "logsumexp"):
        arrays[name] = draw.place((batch, heads, round_up(queries, LSE_PADDING)), "float32")
    for name in ("logsumexp_a", "logsumexp_b"):
        values = draw.rng.standard_normal(arrays[name].tensor.shape) * draw.one_of((1, 5, 60))
        values[draw.rng.random(values.shape) < 0.1] = -np.inf
        view = arrays[name].view()
        view[...] = np.nan  # of the padding, which nobody reads
        for number, length in enumerate(lengths):
            view[number, :, :length] = values[number, :, :length]
        _poison(draw, arrays, name, lengths)
    return MergeCase({name: _aligned(placed) for name, placed in arrays.items()}, longest)


def _poison(draw: _Draw, arrays: Mapping[str, Placed], name: str, lengths: list[int]) -> None:
    """Writes NaN to the output of some rows whose logsumexp is -inf: they count as nothing."""
    output, logsumexp = arrays[name.replace("logsumexp", "output")].view(), arrays[name].view()
    is_packed, start = "cu_seqlens_q" in arrays, 0
    for number, length in enumerate(lengths):
        rows = output[0, start : start + length] if is_packed else output[number]
        rows[(-np.inf == logsumexp[number, :, :length].T) & (draw.rng.random((length, rows.shape[1])) < 0.5)] = np.nan
        start += length


class RowLaunch:
    """The bound kernel of a plan, with copies on the GPU of the memories that its arrays lie in. A context manager.

    results: names of the arrays that the kernel writes.
    cleared: layout of the result "output", which is cleared before the launch; None for no clearing.
    """

    def __init__(
        self,
        plan: Plan,
        kernels: Kernels,
        arrays: Mapping[str, Placed],
        results: Sequence[str],
        cleared: Tensor | None = None,
    ) -> None:
        self.bound: Bound = bind(kernels(plan.build), plan)
        self._results = {name: arrays[name] for name in results}
        self._cleared = cleared
        self._memories = {id(placed.memory): placed.memory for placed in arrays.values()}
        self._stack = ExitStack()
        self._copies = {number: self._allocate(memory) for number, memory in self._memories.items()}
        self.pointers = {name: self._copies[id(placed.memory)] + placed.offset for name, placed in arrays.items()}

    def _allocate(self, memory: Array) -> int:
        address = driver.allocate_now(memory.nbytes, "a test array")
        self._stack.callback(driver.free_now, address)
        return address

    def __enter__(self) -> RowLaunch:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reset(self) -> None:
        """Restores every memory, and clears the output if the call does."""
        for number, memory in self._memories.items():
            driver.copy_to_device(self._copies[number], memory.ctypes.data, memory.nbytes, 0)
        if self._cleared is not None:
            fill.clear(self._cleared, self.pointers["output"], 0)
        driver.synchronise(0)

    def memories(self) -> dict[int, Array]:
        """Launches on restored memories and returns their bytes afterwards, by id of the memory."""
        self.reset()
        self.bound(self.pointers)
        return self._read()

    def run(self) -> dict[str, Array]:
        """Launches on restored memories and returns the bytes of each result's memory."""
        self.reset()
        self.bound(self.pointers)
        return self.read()

    def read(self) -> dict[str, Array]:
        """Returns the bytes of each result's memory."""
        found = self._read()
        return {name: found[id(placed.memory)] for name, placed in self._results.items()}

    def _read(self) -> dict[int, Array]:
        found = {number: np.empty_like(memory) for number, memory in self._memories.items()}
        for number, memory in found.items():
            driver.copy_to_host(memory.ctypes.data, self._copies[number], memory.nbytes, 0)
        driver.synchronise(0)
        return found


RowCase = AppendCase | MergeCase


@functools.cache
def cases() -> tuple[RowCase, ...]:
    """Returns the random problems of every kind."""
    appends = (make(seed) for seed in range(SEEDS) for make in (append_case, latent_append_case))
    return *appends, *(merge_case(seed) for seed in range(SEEDS))


def builds(arch: str) -> list[tuple[Build, ...]]:
    """Returns every kernel of the random problems, once."""
    return [(build,) for build in dict.fromkeys(case.plan(arch).build for case in cases())]


def of_build(build: Build) -> list[RowCase]:
    """Returns the random problems of a kernel, whose problems launch it."""
    return [case for case in cases() if case.plan(build.arch).build == build and not case.problem.is_empty]


def shown_plans(arch: str) -> list[Plan]:
    """Returns a plan of each kernel that ptx/ shows."""
    key = (1, 1, SHOWN_HEAD_DIM)
    of_one_dtype = (scales for scales in SCALES_OF.values() if scales != TILE_SCALES)
    appends = [AppendProblem.dense(key, (1, 1), SHOWN_DTYPE, scales=scales) for scales in of_one_dtype]
    dtype, codes, columns = LATENT_DIMS[0]
    appends.append(AppendProblem.dense((1, 1, codes), (1, 1), dtype, head_dim_value=columns, scales=TILE_SCALES))
    merges = (
        MergeProblem.dense((1, 1, 1, SHOWN_HEAD_DIM), SHOWN_DTYPE),
        MergeProblem.packed(1, 1, (1, 1, SHOWN_HEAD_DIM), SHOWN_DTYPE),
    )
    return [*(plan_append(it, arch) for it in appends), *(plan_merge(it, arch) for it in merges)]
