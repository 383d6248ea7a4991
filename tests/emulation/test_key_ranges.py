"""Kernels of mask form "ranges": their machine code executed, with that of the kernels that make their tile lists.

Some queries see no key, some keys no query, and some tiles have no visible pair. Lengths are off the tiles, and
persistent blocks have several work tiles.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.launch.tile_lists import RECORD_WORDS
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import ArrayMask, MaskFunction
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing.cases import Case
from tests.support.backward_block import BackwardBlock
from tests.support.block_emulator import EmulatedBlock, emulate
from tests.support.listed_plans import BACKWARD, FORWARD, ranges_build, with_ranges
from tests.support.machine_code import MachineCode
from tests.support.tile_lists import device_ranges, of_work_tiles, records, tile_states, written_records

ERROR = 0.004  # relative L2 error of 16-bit operands
LOGSUMEXP = 1e-3
LISTS = "key_ranges", "work_list", "tile_entries"
EMPTY_TILE = slice(128, 256)  # of queries that see no key


def random_ranges(shape: Shape, seed: int, axes: tuple[int, int]) -> KeyRanges:
    """Returns any ranges of (batch, heads) `axes`; a tenth of them is empty."""
    random = np.random.default_rng(seed)
    edges = np.sort(random.integers(0, shape.num_keys + 1, (2, *axes, shape.num_queries)), axis=0)
    edges[:, random.random(edges.shape[1:]) < 0.1] = 0
    edges[..., EMPTY_TILE] = 0
    return KeyRanges(*edges)


def documents(shape: Shape, seed: int, axes: tuple[int, int]) -> KeyRanges:
    """Returns documents of random lengths, others for each head, within a causal mask."""
    random = np.random.default_rng(seed)
    start, end = np.zeros((2, *axes, shape.num_queries), np.int64)
    for head in np.ndindex(axes):
        cuts = [0, *sorted(random.choice(np.arange(1, shape.num_queries), 3, replace=False)), shape.num_queries]
        for first, last in itertools.pairwise(cuts):
            start[head][first:last], end[head][first:last] = first, last
    return KeyRanges(start, end, Causal())


def everything(shape: Shape, seed: int, axes: tuple[int, int]) -> KeyRanges:
    """Returns ranges of all keys."""
    start = np.zeros((*axes, shape.num_queries), np.int64)
    return KeyRanges(start, start + shape.num_keys)


def expect_lists(plan: Plan, found: dict[str, Any], shape: Shape, mask: ArrayMask, seen: Any) -> None:
    """Compares key_ranges, and the record of every work tile with the tiles of its list.

    seen: (batch, heads, queries, keys) bool; batch and heads of the lists
    """
    build, num_keys = plan.build, shape.num_keys
    if isinstance(mask, KeyRanges):
        expected = device_ranges(mask, num_keys)
        cut = found["key_ranges"].reshape(expected.shape) == expected
        assert cut[:, :, : round_up(shape.num_queries, build.tile_m)].all()
    states = of_work_tiles(tile_states(seen, build.tile_m, build.tile_n), build, shape.group)
    written = written_records(found["work_list"].reshape(-1, RECORD_WORDS), found["tile_entries"])
    assert written == records(build, shape, states, dict(plan.params)["device_sms"])


def check(case: Case, problem: Problem, plan: Plan, ptx: str, mask: ArrayMask, *, is_eager: bool) -> None:
    """Executes the kernels, and compares the results with those in float64 and the tile lists with those of NumPy.

    mask: which keys the queries see
    """
    shape, arrays, options = problem.shape, case.arrays(), {"mask": mask}
    arrays |= mask.arrays()
    operands = [arrays[name] for name in ("query", "key", "value")]
    options["score_mod"] = case.score_mod(arrays)
    output, logsumexp = numpy_reference.forward(*operands, **options)
    expected, block = {"output": output}, EmulatedBlock
    if case.direction == "backward":
        block = BackwardBlock
        arrays |= {"output": output.astype(arrays["query"].dtype), "logsumexp": logsumexp}
        gradients = numpy_reference.backward(arrays["grad_output"], *operands, arrays["output"], logsumexp, **options)
        expected = {f"grad_{name}": getattr(gradients, name) for name in case.problem().gradients}
    found = emulate(
        problem, plan, ptx, arrays, is_eager=is_eager, seed=7, block=block,
        outputs=(*expected, *(("logsumexp",) if case.direction == "forward" else ()), *LISTS),
    )  # fmt: skip
    planned = dict(plan.params)
    of_lists = planned["ranges_batch"], planned["ranges_heads"]
    heads, sizes = (shape.num_heads_key, shape.group), (shape.num_queries, shape.num_keys)
    is_ranges = isinstance(mask, KeyRanges)
    own = mask.materialise(shape.num_keys) if is_ranges else mask.materialise(*of_lists, *sizes)
    expect_lists(plan, found, shape, mask, np.broadcast_to(own, (*of_lists, *sizes)))
    seen = np.broadcast_to(own, (shape.batch, shape.num_heads, *sizes))
    unseen = {
        "query": ~seen.any(axis=3).swapaxes(1, 2),
        "key": ~seen.reshape(shape.batch, *heads, *sizes).any(axis=(2, 3)).swapaxes(1, 2),
    }
    for name, truth in expected.items():
        result = found[name].astype(np.float64)
        assert np.linalg.norm(result - truth) < ERROR * np.linalg.norm(truth), name
        if name != "grad_sinks":
            assert not result[unseen["query" if name in ("output", "grad_query") else "key"]].any(), name
    if case.direction == "forward":
        results = (each[..., : shape.num_queries] for each in (found["logsumexp"], logsumexp))
        np.testing.assert_allclose(*results, rtol=0, atol=LOGSUMEXP)


@pytest.mark.parametrize(
    ("line", "make", "axes", "tile", "num_sms", "is_eager"),
    [
        ("forward bf16_d128_q300_s420_b1_h2k1", random_ranges, (1, 2), FORWARD[128], 1, False),
        ("forward bf16_d128_q384_s384_b2_h1", documents, (2, 1), FORWARD[128], 2, True),
        ("forward bf16_d128_q200_s640_b1_h2", everything, (1, 1), FORWARD[128], 2, False),
        ("forward bf16_d64_q500_s420_b1_h2k1", random_ranges, (1, 1), FORWARD[64], 1, True),
        ("forward bf16_d64_q300_s420_b2_h1_sinks", random_ranges, (1, 1), "128x128x12:2-speculative", 2, False),
        ("forward f16_d128_q300_s300_b1_h1", random_ranges, (1, 1), "128x128x12:2", 1, True),
        ("backward bf16_d128_q300_s420_b1_h2k1", random_ranges, (1, 2), BACKWARD[128], 2, False),
        ("backward bf16_d128_q384_s384_b1_h2", documents, (1, 2), BACKWARD[128], 1, True),
        ("backward bf16_d128_q200_s300_b2_h1", everything, (1, 1), BACKWARD[128], 1, False),
        ("backward bf16_d64_q300_s420_b1_h2k1", random_ranges, (1, 1), BACKWARD[64], 1, True),
        ("backward f16_d128_q300_s300_b1_h2k1_sinks", random_ranges, (1, 2), "64x128x16:3,2+ds_registers", 1, True),
        ("forward bf16_d128_q300_s420_b1_h2k1_softcap2", random_ranges, (1, 2), "128x128x12:2", 2, False),
        ("backward bf16_d128_q300_s420_b1_h2k1_softcap2", random_ranges, (1, 2), "64x128x16:3,2", 2, True),
    ],
)
def test_ranges(
    line: str, make: Any, axes: tuple[int, int], tile: str, num_sms: int, is_eager: bool, machine_code: MachineCode
) -> None:
    case = Case.parse(f"{line}_full seed=3")
    shape = case.problem().shape
    ranges = make(shape, 5, axes)
    problem = with_ranges(case.problem(), axes).replace(mask=ranges.band)
    plan = planner.plan_of_build(problem, ranges_build(problem, tile), num_sms)
    check(case, problem, plan, machine_code(plan).ptx, ranges, is_eager=is_eager)


@pytest.mark.parametrize(
    ("line", "axes", "block_size", "tile", "within"),
    [
        ("forward bf16_d128_q300_s420_b1_h2k1", (1, 2), (128, 128), FORWARD[128], Causal()),
        ("forward bf16_d128_q200_s300_b1_h4k2", (1, 2), (64, 64), "64x64x8:2", Full()),
        ("backward bf16_d128_q300_s420_b1_h4k2", (1, 2), (128, 128), BACKWARD[128], random_ranges),
        ("backward bf16_d64_q300_s420_b1_h1", (1, 1), (64, 192), "64x64x12:4,3", CausalBottomRight()),
    ],
)
def test_blocks(
    line: str, axes: tuple[int, int], block_size: tuple[int, int], tile: str, within: Any, machine_code: MachineCode
) -> None:
    """Some blocks of queries see no block of keys, and some blocks of keys none of queries."""
    case = Case.parse(f"{line}_full seed=3")
    shape = case.problem().shape
    within = within(shape, 5, (1, 1)) if callable(within) else within
    sizes = *axes, *shape.visible_blocks(block_size)[2:]
    visible = np.random.default_rng(11).random(sizes) < 0.6
    visible[:, :, 1], visible[..., -1] = False, False
    mask = BlockSparse(visible, block_size, within)
    ranges = with_ranges(case.problem(), (1, 1)) if isinstance(within, KeyRanges) else case.problem()
    blocks = Tensor.contiguous(sizes, "bool")
    problem = ranges.replace(mask=mask.band, visible_blocks=blocks, block_size=block_size)
    plan = planner.plan_of_build(problem, ranges_build(problem, tile), 2)
    check(case, problem, plan, machine_code(plan).ptx, mask, is_eager=False)


def stripes(shape: Shape, random: np.random.Generator) -> MaskFunction:
    """Returns every third diagonal and all far ones, others in each head; numbers below 0 are divided."""

    def sees(batch: Any, head: Any, query: Any, key: Any, width: Any) -> Any:
        return ((query - key + head) % width == 0) | ((key - query) // 100 < -1)

    return MaskFunction(sees, {"width": 3})


def documents_of_ids(shape: Shape, random: np.random.Generator) -> MaskFunction:
    """Returns the keys of a query's document that are marked, and far ones of a large weight; batches differ."""

    def sees(batch: Any, head: Any, query: Any, key: Any, ids: Any, marked: Any, weight: Any) -> Any:
        is_close = np.minimum(query, 300) < key + 60
        return (ids[batch, query] == ids[batch, key]) & (marked[key] | is_close) | (weight[0, key] > 1.5)

    ids = np.sort(random.integers(0, 4, (shape.batch, max(shape.num_queries, shape.num_keys)), np.int32))
    marked = random.random(shape.num_keys) < 0.5
    return MaskFunction(sees, {"ids": ids, "marked": marked, "weight": random.standard_normal((1, shape.num_keys))})


def tree(shape: Shape, random: np.random.Generator) -> MaskFunction:
    """Returns the keys whose bits are set in words of 32, as of a tree; keys behind the words see the last one."""

    def sees(batch: Any, head: Any, query: Any, key: Any, words: Any) -> Any:
        return (words[query, key // 32] >> (key % 32)) & 1 != 0

    words = random.integers(-(2**31), 2**31, (shape.num_queries, 10)).astype(np.int32)
    words[EMPTY_TILE] = 0
    return MaskFunction(sees, {"words": words})


def integers(random: np.random.Generator, size: int) -> npt.NDArray[np.int32]:
    """Returns int32, the least, the largest, small ones and 0 among them."""
    drawn = random.integers(-(2**31), 2**31, size)
    drawn[::3] = random.choice([0, 1, -1, 2**31 - 1, -(2**31), 31, 32, -33, 7, -7], len(drawn[::3]))
    return drawn.astype(np.int32)


def divisions(shape: Shape, random: np.random.Generator) -> MaskFunction:
    """Returns keys by the lowest bits of quotients, remainders, products and shifts of any numbers."""

    def sees(batch: Any, head: Any, query: Any, key: Any, left: Any, right: Any) -> Any:
        a, b = left[query], right[key]
        numbers = (a // b) ^ (b % a) ^ (a * b) ^ (a << b) ^ (a >> b)
        return ((numbers >> 16) ^ (numbers >> 5) ^ numbers) & 1 == 0

    return MaskFunction(sees, {"left": integers(random, shape.num_queries), "right": integers(random, shape.num_keys)})


def choices(shape: Shape, random: np.random.Generator) -> MaskFunction:
    """Returns keys by the lowest bits of sums and choices of any numbers, and by bools and floats."""

    def sees(batch: Any, head: Any, query: Any, key: Any, left: Any, right: Any, weight: Any, most: Any) -> Any:
        a, b = left[query], right[key]
        numbers = (a + b) ^ (b - a) ^ np.minimum(a, b) ^ np.maximum(b, most) ^ abs(a) ^ ~b ^ (a < b) ^ (b | 6)
        floats = np.where(weight[query] < weight[key], np.minimum(weight[key], 0.5), query)
        is_small = np.where(floats > 1, a != b, floats == b) ^ ((a == b) == (weight[key] != 0.0))
        numbers = np.where(is_small, numbers, numbers >> 7)
        return ((numbers >> 5) ^ numbers) & 1 == 0

    weight = random.choice([-0.5, 0.0, 0.5, 1.0, 3.0], max(shape.num_queries, shape.num_keys))
    arrays = {"left": integers(random, shape.num_queries), "right": integers(random, shape.num_keys)}
    return MaskFunction(sees, {**arrays, "weight": weight, "most": -5})


@pytest.mark.parametrize(
    ("line", "make", "within", "tile", "is_eager"),
    [
        ("forward bf16_d128_q300_s420_b1_h4k2", stripes, Causal(), FORWARD[128], False),
        ("forward bf16_d64_q300_s300_b2_h1", documents_of_ids, Full(), "128x128x12:2-speculative", True),
        ("forward bf16_d128_q300_s420_b1_h1", tree, CausalBottomRight(), "64x64x8:2", True),
        ("forward bf16_d64_q130_s200_b1_h1", divisions, Full(), "64x64x8:2", True),
        ("forward bf16_d64_q130_s200_b1_h1", choices, Full(), "64x64x8:2", True),
        ("backward bf16_d128_q300_s420_b1_h4k2", stripes, random_ranges, BACKWARD[128], False),
        ("backward bf16_d64_q300_s300_b2_h2k1", documents_of_ids, Causal(), BACKWARD[64], True),
        ("backward bf16_d64_q300_s300_b1_h1", tree, Full(), "64x64x12:4,3", True),
    ],
)
def test_functions(line: str, make: Any, within: Any, tile: str, is_eager: bool, machine_code: MachineCode) -> None:
    case = Case.parse(f"{line}_full seed=3")
    shape = case.problem().shape
    within = within(shape, 5, (1, 1)) if callable(within) else within
    drawn = make(shape, np.random.default_rng(13))
    mask = MaskFunction(drawn.function, drawn.arguments, within)
    layouts = {name: Tensor.contiguous(array.shape, array.dtype.name) for name, array in mask.arrays().items()}
    problem = case.problem().replace(mask=mask.band, **layouts, **mask.numbers())
    problem.check()
    plan = planner.plan_of_build(problem, ranges_build(problem, tile), 2)
    check(case, problem, plan, machine_code(plan).ptx, mask, is_eager=is_eager)
