"""Plans of mask functions: their kernels, what launches read, what is refused, and what is written of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import MaskFunction
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.plan.build_json import expect_known
from cutlass_py_attn.plan.explain import explain
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import DIRECTIONS, Shape, Tensor
from cutlass_py_attn.runtime import params
from cutlass_py_attn.runtime.binding import _problem_mismatches
from tests.support.listed_plans import ARCH, with_ranges
from tests.support.refusals import expect_raised

NUM_SMS = 132
BATCH, HEADS, QUERIES, KEYS = 2, 4, 200, 300
IDS = np.zeros((BATCH, KEYS), np.int32)
ARGUMENTS: dict[str, Any] = {"ids": IDS, "width": 7, "marked": np.ones(KEYS, bool), "step": -3}


def documents(batch: Any, head: Any, query: Any, key: Any, ids: Any, width: Any, marked: Any, step: Any) -> Any:
    return (ids[batch, query] == ids[batch, key]) & (query - key < width) & marked[key + step]


def per_head(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % (head + 1) == 0


def diagonals(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % 3 == 0


MASK = MaskFunction(documents, ARGUMENTS, Causal())


def with_mask(mask: MaskFunction, problem: Problem) -> Problem:
    """Returns the problem with a mask function, whose arrays are contiguous."""
    layouts = {name: Tensor.contiguous(array.shape, str(array.dtype)) for name, array in mask.arrays().items()}
    return problem.replace(mask=mask.band, **layouts, **mask.numbers())


def problem_of(direction: str, mask: MaskFunction = MASK, dtype: str = "bfloat16") -> Problem:
    shape = Shape(BATCH, QUERIES, KEYS, HEADS, 128, 128, 2)
    return with_mask(mask, Problem.dense(direction, shape, dtype))


def plan_of(direction: str, mask: MaskFunction = MASK) -> Plan:
    return planner.plan(problem_of(direction, mask), ARCH, NUM_SMS)


def roles(plan: Plan) -> list[str]:
    symbols = (launch.symbol.removeprefix(plan.build.symbol) for launch in plan.launches)
    return ["_".join(symbol.split("_")[1:-1]) or "main" for symbol in symbols]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_program_is_the_form(direction: str) -> None:
    """The kernel is that of ranges of keys, with fields for integers and arrays behind those of the lists."""
    problem = problem_of(direction)
    assert problem.refusals() == []
    build = planner.plan(problem, ARCH, NUM_SMS).build
    assert (build.mask, build.form.name, build.form.program) == (f"ranges {MASK.program}", "ranges", str(MASK.program))
    assert problem.form == build.form
    assert (build.form.has_ranges, build.form.has_left, build.form.has_right, build.form.sees_all) == (True,) + (
        False,
    ) * 3
    plain = replace(build, mask="ranges")
    arrays = (("mask_array_0", 2), ("mask_array_1", 1))
    assert abi.fields_of(build) == (
        *abi.fields_of(plain),
        *((f"mask_scalar_{number}", "i32") for number in range(2)),
        *(
            field
            for name, rank in arrays
            for field in (
                (name, "i64"),
                *((f"{name}_axis_{axis}", "i64") for axis in range(rank)),
                *((f"{name}_size_{axis}", "i32") for axis in range(rank)),
            )
        ),
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_symbols_differ_by_the_program(direction: str) -> None:
    """And not by the values of arguments, nor by what the function is within if that is in memory or not."""
    digest = MASK.program.digest
    symbol = plan_of(direction).build.symbol
    assert f"_ranges_{digest}_" in symbol
    others = [MaskFunction(per_head), MaskFunction(diagonals), MaskFunction(lambda b, h, i, j: (i - j) % 5 == 0)]
    assert len({symbol, *(plan_of(direction, mask).build.symbol for mask in others)}) == 4
    ranges = KeyRanges(*np.zeros((2, 1, 1, QUERIES), np.int32))
    within = (Full(), ranges, BlockSparse(np.ones((1, 1, 2, 3), bool)))
    same = [MASK.with_arguments(width=9, ids=IDS[:, :77]), *(replace(MASK, within=other) for other in within)]
    assert {plan_of(direction, mask).build for mask in same} == {plan_of(direction).build}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("function", [diagonals, per_head, documents])
def test_launches_and_workspace(direction: str, function: Any) -> None:
    """The pairs are computed between ranges and lists, once for all sequences and heads that the program asks for."""
    mask = MaskFunction(function, ARGUMENTS if function is documents else {})
    plan, axes = plan_of(direction, mask), (2 if function is documents else 1, 4 if function is per_head else 1)
    build = plan.build
    others = ["main"] if direction == "forward" else ["delta", "main", "finish"]
    assert roles(plan) == ["ranges", "pairs", "lists", "order", *others]
    tiles = -(-QUERIES // build.tile_m) * axes[0] * axes[1]
    pairs = plan.launches[1]
    assert (pairs.grid, pairs.block, pairs.shared_memory_bytes) == ((tiles, 1, 1), (512, 1, 1), 128)
    assert plan.launches[0].grid == (tiles, 1, 1)
    depends = [launch.is_dependent for launch in plan.launches]
    assert (
        depends == [False, True, True, True, True]
        if direction == "forward"
        else [False, True, True, True, False, True, True]
    )
    edge = Tensor.contiguous((*axes, QUERIES), "int32")
    ranges = planner.plan(
        Problem.dense(direction, problem_of(direction).shape, "bfloat16").replace(key_start=edge, key_end=edge),
        ARCH,
        NUM_SMS,
    )
    assert plan.workspace == ranges.workspace
    planned = dict(plan.params)
    assert [planned[name] for name in ("ranges_batch", "ranges_heads", "device_sms")] == [*axes, NUM_SMS]


def test_the_grid_of_long_sequences() -> None:
    """A block has a word of 32 key tiles."""
    shape = Shape(1, 5000, 70000, 4, 128, 128, 4)
    plan = planner.plan(with_mask(MaskFunction(diagonals), Problem.dense("forward", shape, "bfloat16")), ARCH, NUM_SMS)
    words = ceil_div(ceil_div(70000, plan.build.tile_n), 32)
    assert plan.launches[1].grid == (ceil_div(5000, plan.build.tile_m) * words, 1, 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operands_and_numbers(direction: str) -> None:
    """Arrays have any strides, and the struct has their sizes."""
    ids, marked = Tensor((2, 300), (1, 7), "int32", 4), Tensor((300,), (-2,), "uint8", 1)
    problem = problem_of(direction).replace(mask_array_0=ids, mask_array_1=marked)
    assert problem.refusals() == []
    operands = problem.operands()
    numbers = params.numbers(problem, operands)
    assert operands["mask_array_0"].strides == {"mask_array_0_axis_0": 1, "mask_array_0_axis_1": 7}
    assert operands["mask_array_1"].strides == {"mask_array_1_axis_0": -2}
    assert not operands["mask_array_0"].is_written
    assert {name: numbers[name] for name in operands["mask_array_0"].strides} == operands["mask_array_0"].strides
    aligned = params.alignments(problem, operands)
    assert (aligned["mask_array_0"], aligned["mask_array_1"]) == (4, 1)
    plan = planner.plan(problem, ARCH, NUM_SMS)
    known = dict(launch_rules.params(problem, plan.build))
    assert {name: number for name, number in known.items() if "mask_array" in name or "scalar" in name} == {
        "mask_scalar_0": 7, "mask_scalar_1": -3, "mask_array_0_size_0": 2, "mask_array_0_size_1": 300,
        "mask_array_1_size_0": 300,
    }  # fmt: skip
    fields = {name for name, _ in abi.fields_of(plan.build)}
    assert {name for name in (*numbers, *known) if name.startswith("mask_")} <= fields


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_json_of_problem_and_plan(direction: str) -> None:
    problem, plan = problem_of(direction), plan_of(direction)
    assert from_json(json.loads(json.dumps(to_json(problem)))) == problem
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "mask",
    [
        "ranges le 2 3",
        "ranges arrays; scalars 0; le 2 9",
        "ranges arrays; scalars 0; le  2 3",
        "full arrays; scalars 0; le 2 3",
        "ranges ",
    ],
)
def test_builds_of_no_program_are_unknown(mask: str) -> None:
    """Names of files and functions follow from a Build: its program must be one that a trace gives."""
    build = plan_of("forward").build
    expect_known(build)
    with pytest.raises(ValueError, match="mask"):
        expect_known(replace(build, mask=mask))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_explain(direction: str) -> None:
    plan = plan_of(direction)
    text = explain(plan)
    assert f"bfloat16, ranges {MASK.program}" in text
    assert "of 2 sequences and 1 query heads" in text
    assert "four kernels, one of which computes the mask function, write the tile lists" in text
    assert f"{plan.build.symbol}_pairs_" in text


IN_MEMORY = "together with ranges of keys, visible blocks or a mask function"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("name", "arch", "words"),
    [
        (
            "bf16_d128_q200_s300_b2_h4_full",
            "sm_80",
            "no kernel of sm_80 takes ranges of keys, visible blocks or a mask",
        ),
        (
            "bf16_d128_q200_s300_b2_h4_full",
            "sm_90",
            "no kernel of sm_90 takes ranges of keys, visible blocks or a mask",
        ),
        ("bf16_d128_q200_s300_b2_h4_full_alibi", ARCH, f"do not take alibi {IN_MEMORY}"),
        ("bf16_d128_q200_s300_b2_h4_full_dropout0.5_alibi", ARCH, f"do not take alibi, dropout {IN_MEMORY}"),
        ("bf16_d128_q200_s300_b2_h4_full_bias", ARCH, f"do not take bias {IN_MEMORY}"),
        ("bf16_d128_q200_s300_b2_h4_full_dropout0.1", ARCH, f"do not take dropout {IN_MEMORY}"),
        ("f32_d64_q200_s300_b2_h4_full", ARCH, f"do not take float32 {IN_MEMORY}"),
        ("bf16_d320_q200_s300_b2_h4_full", ARCH, "with head dims 320 and 320 and keys of bfloat16"),
    ],
)
def test_what_the_planner_refuses(name: str, arch: str, words: str, direction: str) -> None:
    """In a sentence that names the mask that was given, and the remedy."""
    dense = parse(name).problem(direction)
    for problem, field in (
        (with_mask(MASK, dense), "mask_program"),
        (with_ranges(with_mask(MASK, dense)), "key_start"),
    ):
        expect_raised(lambda problem=problem: planner.plan(problem, arch), [f"{field}: {words}"])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bf16_d256_q200_s300_b2_h4_full", {}, "in a backward with head dims 256 and 256"),
        ("bf16_d128_s300_b2_h4_full", {"deterministic": True}, f"do not take deterministic gradients {IN_MEMORY}"),
        ("bf16_d128_s300_b2_h4_full", {"grad_key": None}, f"do not take choice of gradients {IN_MEMORY}"),
        ("bf16_d128_s300_b2_h4_full", {"num_splits_key": 2}, f"do not take num_splits_key {IN_MEMORY}"),
    ],
)
def test_what_the_planner_refuses_in_a_backward(name: str, changes: dict[str, Any], words: str) -> None:
    problem = with_mask(MASK, parse(name).problem("backward")).replace(**changes)
    expect_raised(lambda: planner.plan(problem, ARCH), [f"mask_program: {words}"])


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_devices_are_refused(capability: tuple[int, int]) -> None:
    for direction in DIRECTIONS:
        problem = problem_of(direction)
        expect_raised(
            lambda problem=problem: planner.plans_on(problem, capability),  # type: ignore[misc]
            ["mask_program: takes ranges of keys, visible blocks or a mask function"],
        )
    assert planner.plans_on(problem, (9, 0))[0].build.form.program


def test_a_plan_of_another_function_is_not_bound() -> None:
    plan = plan_of("forward")

    def differing(mask: MaskFunction) -> list[str]:
        return [text.partition(" = ")[0] for text in _problem_mismatches(plan, problem_of("forward", mask))]

    assert differing(MASK) == []
    assert differing(MASK.with_arguments(width=8)) == ["problem.mask_scalar_0"]
    assert differing(MASK.with_arguments(ids=IDS[:, :40])) == ["problem.mask_array_0_size_1"]
    assert "problem.mask" in differing(MaskFunction(per_head))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_head_dim_has_a_kernel(head_dim: int, dtype: str) -> None:
    for direction in DIRECTIONS[: 2 if head_dim <= 128 else 1]:
        shape = Shape(BATCH, QUERIES, KEYS, HEADS, head_dim, head_dim, 2)
        problem = with_mask(MASK, Problem.dense(direction, shape, dtype))
        build: Build = planner.plan(problem, ARCH).build
        assert (build.family, build.form.program) == ("sm90", str(MASK.program))
        sinks = problem.replace(sinks=Tensor.contiguous((HEADS,), "float32"))
        assert planner.plan(sinks, ARCH).build.form.program
