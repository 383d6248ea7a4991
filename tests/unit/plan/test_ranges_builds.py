"""Builds of mask form "ranges": which kernels have it, and what they have beside those of other forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import build_rules, launch_rules, planner
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.masks import RANGES
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import RANGE_BYTES, Shape, Tensor
from cutlass_py_attn.runtime import params
from tests.support.listed_plans import ARCH, BACKWARD, FORWARD, ranges_build

TILES = {"forward": FORWARD, "backward": BACKWARD}
FIELDS = ("work_list", "tile_entries", "key_ranges", "key_ranges_batch", "key_ranges_head")


def with_ranges(problem: Problem) -> Problem:
    return problem.replace(key_ranges=Tensor.contiguous(problem.shape.key_ranges, "int32"))


def problem_of(direction: str, head_dim: int = 128) -> Problem:
    return Problem.dense(direction, Shape(2, 200, 300, 4, head_dim, head_dim, 2), "bfloat16")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("direction", "tiles"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_what_the_form_adds(direction: str, tiles: dict[int, str], head_dim: int) -> None:
    """Fields behind those of the struct, and in the backward a buffer of ranges for each stage of grad_output."""
    problem = problem_of(direction, head_dim)
    full, _ = build_for(problem, ARCH, TileConfig.parse(tiles[head_dim]), "sm90")
    build = ranges_build(with_ranges(problem), tiles[head_dim])
    assert "_ranges_" in build.symbol
    assert abi.fields_of(build) == (*abi.fields_of(full), *((name, "i64") for name in FIELDS))
    added = {buffer.name: buffer.bytes for buffer in build.shared_memory if buffer not in full.shared_memory}
    stage = build.block_queries * RANGE_BYTES
    assert added.get("key_ranges", 0) == (0 if direction == "forward" else build.grad_output_stages * stage)
    assert build.shared_memory_bytes <= architecture(ARCH).shared_memory_per_block


def refused(build: Build) -> list[str]:
    return [refusal.field for refusal in build_rules.refusals(replace(build, mask=str(RANGES)))]


@pytest.mark.parametrize(
    ("name", "tile", "changes", "field"),
    [
        ("bf16_d128_q200_s300_b2_h4_full_softcap3", "128x128x12:2", {}, "features"),
        ("bf16_d128_q200_s300_b2_h4_full_dropout0.1", "128x128x12:2", {}, "features"),
        ("bf16_d128_n200x300,100x64_h4_full", "128x128x12:2", {}, "features"),
        ("bf16_d64_q200_s300_b2_h4_full", "64x128x8:2-speculative-shared_end", {}, "options"),
        ("bf16_d128_q200_s300_b2_h4_full", "64x128x16:3,2", {"deterministic": True}, "deterministic"),
        ("bf16_d192v128_q200_s300_b2_h4_full", "64x128x16:2,2q32", {}, "score_rows"),
        ("bf16_d64_q64_s64_b2_h4_full", "64x128x16:4,3k2+per_head", {}, "mask"),
    ],
)
def test_what_is_refused(name: str, tile: str, changes: dict[str, Any], field: str) -> None:
    config = TileConfig.parse(tile)
    problem = parse(name).problem("backward" if config.grad_output_stages else "forward").replace(**changes)
    build, wrong = build_for(problem, ARCH, config, "sm90")
    assert wrong == []
    assert refused(build) == [field]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["bf16_d128", "f32_d64", "bf16_d320", "bf16_d256", "bf16_d1024"])
def test_other_kernels_refuse_the_form(name: str, direction: str) -> None:
    for arch in (ARCH, "sm_90"):
        for plan in planner.plans(parse(f"{name}_q1_s4000_b2_h4_full").problem(direction), arch):
            has_ranges = plan.build.family == "sm90" and plan.build.variant in ("", "ds_registers", "key_registers")
            assert ("mask" in refused(plan.build)) != has_ranges


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 4, 256, 2), (2048, 512)), ((1, 4, 256, 2), (0, 512)), ((1, 1, 256, 2), (0, 0))]
)
def test_operand(shape: tuple[int, ...], strides: tuple[int, int], direction: str) -> None:
    """Fields of the struct get their numbers from the operand; the strides of what broadcasts are 0."""
    problem = problem_of(direction).replace(key_ranges=Tensor.contiguous(shape, "int32"))
    assert (problem.refusals(), problem.form) == ([], RANGES)
    assert from_json(to_json(problem)) == problem
    operand = problem.operands()["key_ranges"]
    assert [*operand.strides.items()] == [("key_ranges_batch", strides[0]), ("key_ranges_head", strides[1])]
    known = {**launch_rules.values(problem, ranges_build(problem, TILES[direction][128]), 132)}
    sizes = [launch_rules.SIZES[axis].evaluate(known) for axis in operand.axes if axis in launch_rules.SIZES]
    assert sizes == [size for size in shape[:3] if size > 1]
    assert params.numbers(problem)["key_ranges_head"] == strides[1]
    assert params.alignments(problem)["key_ranges"] == 16


def test_the_planner_has_no_lists_for_it() -> None:
    for find in (lambda problem: planner.plan(problem, ARCH), lambda problem: planner.plans_on(problem, (9, 0))):
        with pytest.raises(NotSupported, match="lists of tiles"):
            find(with_ranges(problem_of("forward")))
