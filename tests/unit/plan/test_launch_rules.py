"""Tests of plan/launch_rules.py: grids and workspace of every kernel body, against numbers that are written out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.launch_rules import MAX_INT32, expect_int32
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan, plan_with_tile
from cutlass_py_attn.problem.masks import Causal, Full, Mask, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor

KIB = 1024
LONG = Shape(2, 1000, 900, 6, 128, 128, num_heads_key=3)
SHORT = Shape(9, 128, 128, 16, 64, 64)
WIDE = Shape(2, 1000, 900, 6, 256, 256, num_heads_key=3)
SPLIT = Shape(2, 1000, 900, 6, 512, 512)
DECODE = Shape(2, 4, 4096, 8, 128, 128, num_heads_key=2)
VARLEN = Shape(4, 300, 200, 2, 128, 128, tokens=(700, 600))
GROUPED_VARLEN = Shape(4, 300, 200, 4, 128, 128, num_heads_key=2, tokens=(700, 600))
LONGEST, SHORTER = (Shape(4, queries, 4096, 16, 64, 64) for queries in (4096, 4095))
WIDE_VALUE = Shape(2, 1000, 900, 6, 64, 128, num_heads_key=3)


def planned(direction: str, shape: Shape, tile: str, num_sms: int = 16, *, deterministic: bool = False) -> Plan:
    problem = Problem.dense(direction, shape, "bfloat16", Causal()).replace(deterministic=deterministic)
    family = "decode" if shape is DECODE else "sm80" if "x8:" in tile or "x4:" in tile else "sm90"
    return plan_with_tile(problem, "sm_90a", TileConfig.parse(tile), num_sms, family=family)


GRIDS: dict[str, tuple[Plan, dict[str, tuple[int, int, int]]]] = {
    "sm80 forward": (planned("forward", LONG, "128x64x4:1"), {"0": (8, 6, 2)}),
    "sm80 split-D forward": (planned("forward", SPLIT, "64x64x8:2c256+split_d"), {"0": (16 * 2, 6, 2)}),
    "sm80 backward": (
        planned("backward", LONG, "64x128x8:2,2", 1),
        {"delta_1": (16 * 4, 6, 2), "0": (6, 3, 2), "finish_2": (16, 6, 2)},
    ),
    "sm80 deterministic backward": (
        planned("backward", LONG, "64x128x8:2,2", 1, deterministic=True),
        {"delta_1": (16 * 4, 6, 2), "0": (8, 3, 2), "finish_2": (16, 6, 2)},
    ),
    "sm90 forward": (planned("forward", LONG, "128x128x12:2"), {"0": (16, 1, 1)}),
    "sm90 forward with more SMs than work": (planned("forward", LONG, "128x128x12:2", 132), {"0": (96, 1, 1)}),
    # 22 query tiles of each of 64 heads are 16 rounds of 88 blocks and 15.8 of 89.
    "sm90 forward, the last rounds dealt": (planned("forward", LONGEST, "192x128x16:2", 88), {"0": (88, 4, 1)}),
    "sm90 forward of fewer rounds": (planned("forward", LONGEST, "192x128x16:2", 89), {"0": (89, 1, 1)}),
    "sm90 forward of fewer queries": (planned("forward", SHORTER, "192x128x16:2", 88), {"0": (88, 1, 1)}),
    "sm90 multicast forward": (planned("forward", LONG, "128x128x12:2+multicast", 15), {"0": (14, 1, 1)}),
    "sm90 wide forward": (planned("forward", SPLIT, "64x64x12:2+wide"), {"0": (2 * 8, 6, 2)}),
    "sm90 backward": (
        planned("backward", LONG, "64x128x16:3,2", 132),
        {"delta_1": (16 * 4, 6, 2), "0": (8 * 3 * 2, 1, 1), "finish_2": (16, 6, 2)},
    ),
    "sm90 backward, one block per head": (
        planned("backward", SHORT, "128x128x16:3,2+per_head", 132),
        {"delta_1": (8, 16, 9), "0": (132, 1, 1)},
    ),
    "sm90 backward by query heads": (
        planned("backward", LONG, "64x128x16:3,2+query_heads", 132),
        {"delta_1": (16 * 4, 6, 2), "0": (8 * 6 * 2, 1, 1), "finish_2": (16, 6, 2), "finish_kv_3": (8 * 2, 3, 2)},
    ),
    "sm90 2-CTA backward": (
        planned("backward", WIDE, "64x64x16:2,2+2cta", 132),
        {"delta_1": (16 * 4, 6, 2), "0": (2 * 8 * 3 * 2, 1, 1), "finish_2": (16, 6, 2)},
    ),
    "sm90 wide backward": (
        planned("backward", SPLIT, "64x64x12:2,2+wide"),
        {"delta_1": (16 * 4, 6, 2), "0": (2 * (8 + 8 + 8), 6, 2)},
    ),
    "decode": (planned("forward", DECODE, "16x128x8:2", 16), {"0": (4, 2, 2), "combine_1": (4, 8, 2)}),
    "decode without splits": (planned("forward", DECODE, "16x128x8:2", 1), {"0": (1, 2, 2)}),
}


@pytest.mark.parametrize(("plan", "grids"), GRIDS.values(), ids=GRIDS)
def test_grids(plan: Plan, grids: dict[str, tuple[int, int, int]]) -> None:
    found = {launch.symbol.removeprefix(f"{plan.symbol}_"): launch.grid for launch in plan.launches}
    assert found == grids


WORKSPACES: dict[str, tuple[Plan, dict[str, int], int]] = {
    # (buffers, how many of the first are zeroed)
    "forward": (planned("forward", LONG, "128x64x4:1"), {}, 0),
    "sm80 backward": (
        planned("backward", LONG, "64x128x8:2,2"),
        {"grad_query_accum": 6 * 32 * 64 * 512, "delta": 6 * 32 * 256, "logsumexp_log2": 6 * 32 * 256},
        1,
    ),
    "sm80 deterministic backward": (
        planned("backward", LONG, "64x128x8:2,2", deterministic=True),
        {
            "grad_query_accum": 6 * 32 * 64 * 512,
            "dq_semaphore": 6 * 32 * 4,
            "tile_count_semaphore": 3 * 2 * 4,
            "delta": 6 * 32 * 256,
            "logsumexp_log2": 6 * 32 * 256,
        },
        3,
    ),
    "sm90 backward with variable lengths": (
        planned("backward", VARLEN, "64x128x16:3,2"),
        {
            "grad_query_accum": 2 * (10 + 4) * 64 * 512,
            "tile_count_semaphore": 4,
            "delta": 2 * 14 * 256,
            "logsumexp_log2": 2 * 14 * 256,
        },
        0,
    ),
    "sm90 backward, one block per head": (
        planned("backward", SHORT, "128x128x16:3,2+per_head", 132),
        {"grad_query_accum": 132 * 32 * KIB, "delta": 16 * 9 * 512, "logsumexp_log2": 16 * 9 * 512},
        0,
    ),
    "sm90 backward by query heads": (
        planned("backward", WIDE_VALUE, "64x128x16:3,2+query_heads"),
        {
            "grad_query_accum": 6 * 32 * 64 * 256,
            "grad_key_accum": 3 * 16 * 128 * 256,
            "grad_value_accum": 3 * 16 * 128 * 512,
            "tile_count_semaphore": 4,
            "delta": 6 * 32 * 256,
            "logsumexp_log2": 6 * 32 * 256,
        },
        4,
    ),
    "sm90 backward by query heads with variable lengths": (
        planned("backward", GROUPED_VARLEN, "64x128x16:3,2+query_heads"),
        {
            "grad_query_accum": 4 * (10 + 4) * 64 * 512,
            "grad_key_accum": 2 * (4 + 4) * 128 * 512,
            "grad_value_accum": 2 * (4 + 4) * 128 * 512,
            "tile_count_semaphore": 4,
            "delta": 4 * 14 * 256,
            "logsumexp_log2": 4 * 14 * 256,
        },
        4,
    ),
    "decode": (
        planned("forward", DECODE, "16x128x8:2", 16),
        {"partial_output": 2 * 8 * 4 * 4 * 512, "partial_logsumexp": 2 * 8 * 4 * 4 * 4},
        0,
    ),
}


@pytest.mark.parametrize(("plan", "buffers", "num_zeroed"), WORKSPACES.values(), ids=WORKSPACES)
def test_workspace(plan: Plan, buffers: dict[str, int], num_zeroed: int) -> None:
    space = plan.workspace
    assert {buffer.name: buffer.bytes for buffer in space.buffers} == buffers
    assert all(buffer.offset % 256 == 0 for buffer in space.buffers)
    last = space.buffers[num_zeroed - 1] if num_zeroed else None
    assert space.zero_bytes == (last.offset + last.bytes if last else 0)


def test_tensor_maps() -> None:
    """(columns, rows, heads, batch) of a dense operand; a map of sequences ends with each of them."""
    plan = planned("forward", LONG, "128x128x12:2")
    query, key, _ = plan.launches[0].tensor_maps
    assert (query.field, query.sizes, query.strides) == ("query", (128, 1000, 6, 2), (6 * 128, 128, 1000 * 6 * 128))
    assert (key.sizes, key.box, key.swizzle_bytes) == ((128, 900, 3, 2), (64, 128, 1, 1), 128)
    main = next(launch for launch in planned("backward", VARLEN, "64x128x16:3,2").launches if launch.tensor_maps)
    query = main.tensor_maps[0]
    assert query.sizes == (128, 2**30, 2, 701, 2**30 + 1)
    assert query.strides == (256, 128, 256, 2**34 // 2 - 256)
    assert query.box == (64, 64, 1, 1, 1)


def test_tensor_map_of_the_gradient_of_a_bias() -> None:
    """(keys, queries, heads, batch), in strips of 64 of the keys of a tile, with all its queries."""
    grad_bias = Tensor((2, 4, 300, 304), (4 * 300 * 312, 300 * 312, 312, 1), "bfloat16")
    problem = Problem.dense("backward", Shape(2, 300, 304, 4, 128, 128), "bfloat16", Causal())
    found = plan(problem.replace(bias=grad_bias, grad_bias=grad_bias), "sm_90a")
    main = next(launch for launch in found.launches if launch.tensor_maps)
    assert [each.field for each in main.tensor_maps] == ["query", "grad_output", "key", "value", "grad_bias"]
    last = main.tensor_maps[-1]
    assert (last.sizes, last.strides) == ((304, 300, 4, 2), (312, 300 * 312, 4 * 300 * 312))
    assert (last.box, last.swizzle_bytes) == ((64, 64, 1, 1), 128)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_numbers_that_no_field_holds_are_refused(arch: str) -> None:
    """Every size alone is allowed; the query tiles of a head are an i32 field."""
    huge = Problem.dense("backward", Shape(65535, 2**29, 64, 1, 8, 8), "bfloat16")
    huge.check()
    with pytest.raises(NotSupported, match=r"total_tiles = \d+: must be at most 2147483647; call once for each slice"):
        plan(huge, arch)
    most = Problem.dense("backward", Shape(65535, 2**20, 64, 1, 8, 8), "bfloat16")
    assert dict(plan(most, arch).params)["total_tiles"] <= MAX_INT32


def test_fields_hold_32_bits_with_a_sign() -> None:
    expect_int32([("least", -(2**31)), ("most", 2**31 - 1)])
    for number in (-(2**31) - 1, 2**31):
        with pytest.raises(NotSupported, match=f"other = {number}: must be at most"):
            expect_int32([("most", 2**31 - 1), ("other", number)])


def test_key_tiles_that_no_field_holds_are_refused() -> None:
    huge = Problem.dense("backward", Shape(65535, 64, 2**29, 2, 8, 8, num_heads_key=1), "bfloat16")
    with pytest.raises(NotSupported, match=r"total_key_tiles = \d+: must be at most 2147483647; call once for each"):
        plan_with_tile(huge, "sm_90a", TileConfig.parse("128x128x16:3,2+query_heads"))


@pytest.mark.parametrize(
    ("changes", "variant", "said"),
    [
        ({}, "query_heads", "a block computes a key tile of one query head and adds dK and dV in float32: 2 warp"),
        ({"deterministic": True}, "ds_registers", "a block computes a key tile of all query heads of a group: 2 warp"),
        ({"mask": Full()}, "ds_registers", "a block computes a key tile of all query heads of a group: 2 warp"),
    ],
)
def test_which_grouped_backwards_add_by_query_heads(changes: dict[str, Any], variant: str, said: str) -> None:
    problem = Problem.dense("backward", LONG, "bfloat16", Causal()).replace(**changes)
    found = plan(problem, "sm_90a", 10)
    assert (found.build.variant, found.build.features) == (variant, ("grouped",))
    assert (f"_{variant}_" in found.symbol) or not variant
    assert said in found.explain()
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("shape", "mask", "fewest"),
    [
        (LONG, Causal(), 10),  # 8 * 3 * 2 key tiles, fewer than 5 for each of 10 SMs
        (LONG, Window(100, 20), 10),
        (GROUPED_VARLEN, Causal(), 4),  # 2 for the longest sequence, so at most 2 * 2 * 4
        (dataclasses.replace(GROUPED_VARLEN, tokens=(700, 300)), Causal(), 3),  # at most (2 + 4) * 2 of 300 keys
    ],
)
def test_few_key_tiles_for_each_sm_are_computed_by_query_heads(shape: Shape, mask: Mask, fewest: int) -> None:
    problem = Problem.dense("backward", shape, "bfloat16", mask)
    variants = [plan(problem, "sm_90a", num_sms).build.variant for num_sms in (fewest - 1, fewest)]
    assert variants == ["ds_registers", "query_heads"]


def test_only_kernels_by_query_heads_have_the_fields_of_their_sums() -> None:
    grouped, single = (
        plan(Problem.dense("backward", Shape(2, 1000, 900, 6, 128, 128, heads), "bfloat16", Causal()), "sm_90a").build
        for heads in (3, 6)
    )
    assert abi.fields_of(single) == abi.BACKWARD
    assert abi.fields_of(grouped) == (*abi.BACKWARD, *abi.QUERY_HEADS_FIELDS)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_grids_that_no_launch_has_are_refused(arch: str) -> None:
    wide = Problem.dense("forward", Shape(1, 2**29, 64, 1, 65536, 65536), "bfloat16")
    with pytest.raises(NotSupported, match=r"blocks of fwd_sm80_.* = \d+: must be at most 2147483647; call once"):
        plan(wide, arch)
