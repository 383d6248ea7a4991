"""Tests of kernels/decode/kernel.py: which problems are decode steps, and which features the decode kernels refuse."""

from __future__ import annotations

import pytest

from cutlass_py_attn.kernels.decode import kernel as decode
from cutlass_py_attn.kernels.decode.layout import MAX_QUERIES, team_output_bytes
from cutlass_py_attn.launch.split_kv import MAX_SPLITS, fewest_splits
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse


@pytest.mark.parametrize(
    ("direction", "queries", "keys", "is_step"),
    [
        ("forward", 1, decode.MIN_KEYS, True),
        ("forward", MAX_QUERIES, 4096, True),
        ("forward", MAX_QUERIES + 1, 4096, False),
        ("forward", 1, decode.MIN_KEYS - 1, False),
        ("backward", 1, 4096, False),
        ("backward", 4096, 4096, False),
        ("forward", 4096, 100, False),
    ],
)
def test_decode_steps_are_forwards_of_few_queries_and_many_keys(
    direction: str, queries: int, keys: int, is_step: bool
) -> None:
    problem = parse(f"f16_d64_q{queries}_s{keys}_b1_h2_full").problem(direction)
    assert decode.is_decode_step(problem) == is_step
    assert (plan(problem, "sm_80").build.family == "decode") == is_step
    with_sinks = parse(f"f16_d64_q{queries}_s{keys}_b1_h2_full_sinks").problem(direction)
    assert bool(decode.rejection_reason(with_sinks)) == is_step


@pytest.mark.parametrize(
    ("row_blocks", "key_tiles", "num_sms", "splits"),
    [(4, 0, 132, 1), (4, 1, 132, 1), (0, 5, 132, 5), (1, 5, 132, 5), (132, 5, 132, 1), (66, 8, 132, 2),
     (1, 10 * MAX_SPLITS, 10 * MAX_SPLITS, MAX_SPLITS)],
)  # fmt: skip
def test_splits_are_the_fewest_that_share_the_work(row_blocks: int, key_tiles: int, num_sms: int, splits: int) -> None:
    assert fewest_splits(row_blocks, key_tiles, num_sms) == splits


@pytest.mark.parametrize(
    ("name", "output"),
    [("f16_d64_q1_s600_b2_h2_full", 9 * 512), ("bf16_d128_q1_s8192_b64_h32k8_full_paged16", 17 * 512)],
)
def test_the_output_of_a_team_is_aligned_like_a_stage(name: str, output: int) -> None:
    """16 rows of float32, each padded by 16 bytes, in whole pieces of 512 bytes."""
    build = plan(parse(name).problem("forward"), "sm_90").build
    assert (build.family, build.tile_m) == ("decode", 16)
    assert team_output_bytes(build) == output


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("bf16_d128_q1_s8192_b1_h32k8_full", "16x128x8:3"),
        ("bf16_d128_q1_s8192_b64_h32k8_full", "16x128x8:3"),
        ("bf16_d128_q1_s8192_b500_h32_full", "16x128x8:3"),
        ("f32_d128_q1_s8192_b64_h32k8_full", "16x64x4:3"),
        ("bf16_d64_q1_s8192_b64_h32k8_full", "16x128x4:3"),
        ("bf16_d256_q1_s8192_b64_h32k8_full", "16x64x4:2"),
        ("bf16_d128_q16_s8192_b64_h32k8_full", "64x128x8:2"),
        ("bf16_d128_q16_s8192_b64_h32k8_full_paged16", "64x128x8:3+persistent"),
        ("bf16_d128_q1_s8192_b64_h32k8_full_paged16", "16x64x4:3+persistent"),
    ],
)
def test_the_tile_of_a_decode_kernel(name: str, tile: str) -> None:
    build = plan(parse(name).problem("forward"), "sm_90a").build
    assert (build.family, TileConfig.of(build)) == ("decode", TileConfig.parse(tile))
