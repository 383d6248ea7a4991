"""Plans of mask form "ranges": which kernels have it, what they have beside those of other forms, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cutlass_py_attn.errors import DoesNotFit, NotSupported
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import build_rules, launch_rules, planner
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.plan.explain import explain
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import RANGES, Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import DIRECTIONS, RANGE_BYTES, Shape, Tensor
from cutlass_py_attn.runtime import params
from tests.support.listed_plans import ARCH, BACKWARD, FORWARD, ranges_build, with_ranges
from tests.support.refusals import expect_raised

NUM_SMS = 132
TILES = {"forward": FORWARD, "backward": BACKWARD}
LISTS = ("ranges", "lists", "order")
ARRAYS = ("key_ranges", "tile_states", "tile_entries", "list_sizes", "work_list")
STRIDES = tuple(f"{name}_{axis}" for name in ("key_start", "key_end") for axis in ("batch", "head", "row"))
BLOCKS = "visible_blocks", *(f"visible_blocks_{axis}" for axis in ("batch", "head", "row", "column"))
SIZES = "ranges_batch", "ranges_heads", "device_sms", "mask_block_rows", "mask_block_columns", "mask_block_heads"
FIELDS = (
    *((name, "i64") for name in ("key_start", *STRIDES[:3], "key_end", *STRIDES[3:], *BLOCKS, *ARRAYS)),
    *((name, "i32") for name in SIZES),
)
REMEDY = "use another mask, or a bias of -inf"


def problem_of(direction: str, head_dim: int = 128) -> Problem:
    return Problem.dense(direction, Shape(2, 200, 300, 4, head_dim, head_dim, 2), "bfloat16")


def plan_of(direction: str, axes: tuple[int, int] | None = None) -> Plan:
    return planner.plan(with_ranges(problem_of(direction), axes), ARCH, NUM_SMS)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_the_form_adds(direction: str, head_dim: int) -> None:
    """Fields behind those of the struct, and in the backward a buffer of ranges for each stage of grad_output."""
    problem, tile = problem_of(direction, head_dim), TILES[direction][head_dim]
    full, _ = build_for(problem, ARCH, TileConfig.parse(tile), "sm90")
    build = ranges_build(with_ranges(problem), tile)
    assert "_ranges_" in build.symbol
    assert sorted({*abi.fields_of(build)} - {*abi.fields_of(full)}) == sorted(FIELDS)
    assert abi.fields_of(build) == (*abi.fields_of(full), *abi.LISTED_TILES)
    added = {buffer.name: buffer.bytes for buffer in build.shared_memory if buffer not in full.shared_memory}
    stage = build.block_queries * RANGE_BYTES
    assert added.get("key_ranges", 0) == (0 if direction == "forward" else build.grad_output_stages * stage)
    assert build.shared_memory_bytes <= architecture(ARCH).shared_memory_per_block


@pytest.mark.parametrize(
    ("name", "tile", "changes", "field"),
    [
        ("bf16_d128_q200_s300_b2_h4_full_alibi", "128x128x12:2", {}, "features"),
        ("bf16_d128_q200_s300_b2_h4_full_dropout0.1", "128x128x12:2", {}, "features"),
        ("bf16_d128_n200x300,100x64_h4_full", "128x128x12:2", {}, "features"),
        ("bf16_d64_q200_s300_b2_h4_full", "64x128x8:2-speculative-shared_end", {}, "options"),
        ("bf16_d128_q200_s300_b2_h4_full", "64x128x16:3,2", {"deterministic": True}, "deterministic"),
        ("bf16_d192v128_q200_s300_b2_h4_full", "64x128x16:2,2q32", {}, "score_rows"),
        ("bf16_d64_q64_s64_b2_h4_full", "64x128x16:4,3k2+per_head", {}, "features"),
    ],
)
def test_what_no_kernel_body_has(name: str, tile: str, changes: dict[str, Any], field: str) -> None:
    config = TileConfig.parse(tile)
    problem = parse(name).problem("backward" if config.grad_output_stages else "forward").replace(**changes)
    build, wrong = build_for(problem, ARCH, config, "sm90")
    assert wrong == []
    found = [*build_rules.refusals(replace(build, mask=str(RANGES)))]
    assert [refusal.field for refusal in found] == [field]
    if field == "features":
        assert "ranges of keys" in found[0].rule


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 200), (800, 200, 1)),
        ((2, 4, 200), (1, 2, 8)),
        ((1, 4, 200), (800, 200, 1)),
        ((2, 1, 200), (400, 7, 2)),
        ((1, 1, 200), (0, 0, 1)),
    ],
)
def test_operands(shape: tuple[int, ...], strides: tuple[int, ...], direction: str) -> None:
    """Fields of the struct get their numbers from each array; the strides of what broadcasts are 0."""
    start, end = Tensor(shape, strides, "int32", 4), Tensor.contiguous(shape, "int32")
    problem = problem_of(direction).replace(key_start=start, key_end=end, mask=Causal())
    assert (problem.refusals(), problem.form) == ([], RANGES)
    assert from_json(to_json(problem)) == problem
    operands = problem.operands()
    numbers = params.numbers(problem, operands)
    build = ranges_build(problem, TILES[direction][128])
    known = {**launch_rules.values(problem, build, NUM_SMS)}
    for edge, tensor in (("key_start", start), ("key_end", end)):
        operand = operands[edge]
        steps = [0 if size == 1 else stride for size, stride in zip(shape, tensor.strides, strict=True)]
        named = dict(zip((f"{edge}_{axis}" for axis in ("batch", "head", "row")), steps, strict=True))
        assert (operand.strides, operand.is_written) == (named, False)
        assert {name: numbers[name] for name in named} == named
        sizes = [launch_rules.SIZES[axis].evaluate(known) for axis in operand.axes if axis in launch_rules.SIZES]
        assert sizes == [size for size in shape if size > 1]
        assert params.alignments(problem, operands)[edge] == 4


def test_rows_of_the_tables() -> None:
    """Every head dim has a kernel, in a forward up to 256 and in a backward up to 128."""
    for direction, widest in (("forward", 256), ("backward", 128)):
        for head_dim in range(8, widest + 8, 8):
            for heads_key, mask in ((1, None), (4, Causal(50))):
                shape = Shape(2, 200, 300, 4, head_dim, head_dim, heads_key)
                build = planner.plan(with_ranges(Problem.dense(direction, shape, "float16", mask)), ARCH).build
                assert (build.family, build.mask) == ("sm90", "ranges")
    first = {
        (direction, head_dim): str(
            TileConfig.of(planner.plan(with_ranges(problem_of(direction, head_dim)), ARCH).build)
        )
        for direction, head_dims in (("forward", (64, 96, 128, 256)), ("backward", (64, 96, 128)))
        for head_dim in head_dims
    }
    assert first == {
        ("forward", 64): "192x128x16:2,0@5-speculative-halves",
        ("forward", 96): "128x128x12:2,0@5-speculative",
        ("forward", 128): "128x128x12:2,0@5-speculative",
        ("forward", 256): "128x64x12:2,0@5-speculative",
        ("backward", 64): "128x128x16:3,2@5k2+key_registers-plain",
        ("backward", 96): "64x128x16:3,2@5+ds_registers-plain",
        ("backward", 128): "64x128x16:3,2@5k2+ds_registers-plain",
    }


@pytest.mark.parametrize("axes", [(2, 4), (1, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_launches_and_workspace(direction: str, axes: tuple[int, int]) -> None:
    """Three kernels of 128 threads write the lists before the main one: a tile a block, a list a warp, a record each.

    A backward has one list for the two query heads of a group.
    """
    plan = plan_of(direction, axes)
    build, forward = plan.build, direction == "forward"
    query_tiles, key_tiles = -(-200 // build.tile_m), -(-300 // build.tile_n)
    tables = axes[0] * axes[1]
    if forward:
        lists, work_tiles, visited = tables * query_tiles, 2 * 4 * query_tiles, key_tiles
    else:
        lists, work_tiles, visited = axes[0] * max(axes[1] // 2, 1) * key_tiles, 2 * 2 * key_tiles, query_tiles
    others = ["main"] if forward else ["delta", "main", "finish"]
    roles = ["_".join(launch.symbol.removeprefix(build.symbol).split("_")[1:-1]) or "main" for launch in plan.launches]
    assert roles == [*LISTS, *others]
    assert [launch.grid for launch in plan.launches[:3]] == [
        (query_tiles * tables, 1, 1), (-(-lists // 4), 1, 1), (-(-work_tiles // 128), 1, 1),
    ]  # fmt: skip
    assert {launch.block for launch in plan.launches[:3]} == {(128, 1, 1)}
    assert [launch.shared_memory_bytes for launch in plan.launches[:3]] == [(build.tile_m + 4) * RANGE_BYTES, 0, 0]
    assert not any(launch.tensor_maps for launch in plan.launches[:3])
    depends = {role: launch.is_dependent for role, launch in zip(roles, plan.launches, strict=True)}
    assert [role for role in depends if not depends[role]] == (["ranges"] if forward else ["ranges", "delta"])
    buffers = {buffer.name: buffer.bytes // 4 for buffer in plan.workspace.buffers}
    assert {name: buffers[name] for name in ARRAYS} == {
        "key_ranges": tables * 256 * 2,
        "tile_states": tables * query_tiles * 2,  # a word has 32 key tiles
        "tile_entries": lists * visited,
        "list_sizes": lists * 4,
        "work_list": work_tiles * 8,
    }
    planned = dict(plan.params)
    assert [planned[name] for name in ("ranges_batch", "ranges_heads", "device_sms")] == [*axes, NUM_SMS]


def test_lists_that_32_bits_do_not_number_are_refused() -> None:
    """Each of 128 heads has 4096 lists of 4096 tiles; lists that all heads share are a 128th of these."""
    problem = Problem.dense("forward", Shape(1, 2**19, 2**19, 128, 128, 128, 8), "bfloat16")
    with pytest.raises(NotSupported, match="elements of tile_entries = 2147483648: must be at most 2147483647"):
        planner.plan(with_ranges(problem), ARCH)
    assert planner.plan(with_ranges(problem, (1, 1)), ARCH).workspace.buffers[2].bytes == 2**26


IN_MEMORY = "ranges of keys, visible blocks or a mask function"
WITH_RANGES = f"kernels of sm_90a do not take {{}} together with {IN_MEMORY}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("name", "arch", "rule"),
    [
        (
            "bf16_d128_q200_s300_b2_h4_full",
            "sm_80",
            f"no kernel of sm_80 takes {IN_MEMORY}",
        ),
        (
            "bf16_d128_q1_s4000_b2_h4_full_softcap3",
            "sm_80",
            f"no kernel of sm_80 takes {IN_MEMORY}",
        ),
        (
            "bf16_d128_q200_s300_b2_h4_full",
            "sm_90",
            f"no kernel of sm_90 takes {IN_MEMORY}",
        ),
        ("bf16_d128_q200_s300_b2_h4_full_alibi", ARCH, WITH_RANGES.format("alibi")),
        ("bf16_d128_q200_s300_b2_h4_full_dropout0.5_alibi", ARCH, WITH_RANGES.format("alibi, dropout")),
        ("bf16_d128_q200_s300_b2_h4_full_bias", ARCH, WITH_RANGES.format("bias")),
        ("bf16_d128_q200_s300_b2_h4_full_dropout0.1", ARCH, WITH_RANGES.format("dropout")),
        ("bf16_d128_q200_s0_b2_h4_full", ARCH, WITH_RANGES.format("axes without an index")),
        ("f32_d64_q200_s300_b2_h4_full", ARCH, WITH_RANGES.format("float32")),
        (
            "bf16_d320_q200_s300_b2_h4_full",
            ARCH,
            f"takes {IN_MEMORY} in a {{}} with head dims 320 and 320 and keys of bfloat16",
        ),
    ],
)
def test_what_the_planner_refuses(name: str, arch: str, rule: str, direction: str) -> None:
    problem = with_ranges(parse(name).problem(direction))
    refused(problem, rule.format(direction), arch)


def refused(problem: Problem, rule: str, arch: str = ARCH) -> None:
    """Asserts that no plan computes the problem, and what is said."""
    expect_raised(lambda: planner.plan(problem, arch), [f"key_start: {rule}"])
    capability = (8, 0) if arch == "sm_80" else (9, 0)
    if arch != "sm_90":  # whose devices have the kernels of sm_90a
        expect_raised(lambda: planner.plans_on(problem, capability), [f"key_start: {rule}"])


@pytest.mark.parametrize(
    ("name", "direction", "changes", "rule"),
    [
        ("bf16_d256_q200_s300_b2_h4_full", "backward", {}, "in a backward with head dims 256 and 256"),
        ("bf16_d192v128_q200_s300_b2_h4_full", "backward", {}, "in a backward with head dims 192 and 128"),
        ("e4m3_d128_q200_s300_b2_h4_full", "forward", {}, "and keys of float8_e4m3fn"),
        ("bf16_d128_q200_s300_b2_h4_full_kv8", "forward", {}, "and keys of float8_e4m3fn"),
        (
            "bf16_d128_s300_b2_h4_full",
            "backward",
            {"deterministic": True},
            WITH_RANGES.format("deterministic gradients"),
        ),
        ("bf16_d128_s300_b2_h4_full", "backward", {"grad_key": None}, WITH_RANGES.format("choice of gradients")),
        ("bf16_d128_s300_b2_h4_full", "backward", {"num_splits_key": 2}, WITH_RANGES.format("num_splits_key")),
        ("bf16_d128_s300_b2_h4_full", "forward", {"scale": -1.0}, WITH_RANGES.format("a scale below 0")),
    ],
)
def test_what_the_planner_refuses_in_one_direction(
    name: str, direction: str, changes: Mapping[str, Any], rule: str
) -> None:
    refused(with_ranges(parse(name).problem(direction)).replace(**changes), rule)


def test_a_tile_that_reads_no_lists_is_refused() -> None:
    problem = with_ranges(problem_of("forward"))
    with pytest.raises(DoesNotFit, match="ranges of keys"):
        planner.plan_with_tile(problem, ARCH, TileConfig.parse("128x128x12:2+multicast"))
    plan = planner.plan_with_tile(problem, ARCH, TileConfig.parse("128x64x12:2"))
    assert (plan.build.options, plan.build.mask) == ((), "ranges")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_json_of_a_plan(direction: str) -> None:
    plan = plan_of(direction, (1, 4))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_explain(direction: str) -> None:
    text = explain(plan_of(direction, (1, 4)))
    assert "bfloat16, ranges" in text
    assert "ranges of keys, or visible blocks of 128 x 128: of 1 sequences and 4 query heads" in text
    assert [*filter(text.__contains__, ARRAYS)] == [*ARRAYS]
