"""Tests of kernels/sm90_family/tile_options.py: with which options the planner has a tile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.kernels.sm90_common import shared_tiles
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape
from tests.cases import suite


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("bf16_d32_s8192_b4_h32_full", "192x128x16:2-speculative"),
        ("bf16_d32_s8192_b4_h32_causal", "192x128x16:2-speculative-halves"),
        ("bf16_d64_s8192_b4_h32_full", "192x128x16:2-speculative-halves"),
        ("bf16_d64_s8192_b4_h32k8_causal", "192x128x16:2-speculative-halves"),
        ("bf16_d96_s8192_b4_h16_full", "192x112x16:2-speculative"),
        ("bf16_d96_s2048_b4_h16_causal", "192x96x16:2-speculative"),
        ("bf16_d128_s8192_b4_h16_full", "128x128x12:2-speculative-shared_end"),
        ("bf16_d128_s8192_b4_h16_causal", "128x128x12:2+multicast-speculative"),
        ("bf16_d128_n4000,300_h16k4_causal", "128x128x12:2-speculative"),
        ("bf16_d128_q300_s8192_b4_h16k4_causal_br_paged16", "128x128x12:2-speculative"),
        ("bf16_d128v64_s8192_b4_h16_full", "192x128x16:2-plain"),
        ("bf16_d192v128_s8192_b4_h16_full", "128x128x12:2-speculative-shared_end"),
        ("bf16_d192v128_s8192_b4_h16_causal", "128x128x12:2+multicast-speculative"),
        ("bf16_d256_s8192_b4_h8_full", "128x64x12:2-speculative-shared_end"),
        ("bf16_d192_s8192_b4_h16_causal", "128x64x12:2-speculative"),
        ("bf16_d128_s1024_b1_h8_causal", "64x128x8:2-speculative"),
        ("bf16_d128_s128_b8_h16_full", "128x64x12:2-speculative"),
        ("bf16_d128_s128_b64_h16_causal", "128x64x12:2-speculative"),
        ("bf16_d64_s197_b256_h12_full", "128x208x12:2-plain"),
        ("f16_d128_s8192_b4_h16k4_full", "128x128x12:2-shared_end"),
        ("f16_d128_n4000,300_h16_full", "128x128x12:2-plain"),
        ("f16_d64_s8192_b4_h32_causal", "192x128x16:2-plain"),
        ("e4m3_d128_s8192_b4_h16_full", "128x128x12:2+e4m3-speculative"),
        ("bf16_d128_s8192_b4_h16_full_sinks", "128x128x12:2-speculative"),
        ("bf16_d128_s8192_b4_h16_causal_window1024", "128x128x12:2-speculative-bits"),
        ("bf16_d64_s16384_b2_h32_causal_window1024", "128x128x12:2-speculative-bits"),
        ("bf16_d96_s16384_b2_h16_causal_window1024", "192x96x16:2-speculative-bits"),
        ("bf16_d256_s16384_b2_h8_causal_window1024", "128x64x12:2-speculative-bits"),
        ("bf16_d128_s8192_b4_h16_causal_window1024_alibi", "128x128x12:2-plain"),
        ("e4m3_d64_s8192_b4_h16_causal", "192x128x16:2+e4m3-speculative"),
        ("e4m3_d64_s16384_b2_h16_causal_window1024", "128x128x12:2+e4m3-speculative-bits"),
        ("e4m3_d128_s16384_b2_h16_causal_window1024", "128x64x12:2+e4m3-plain"),
        ("e4m3_d192_s8192_b4_h16_causal", "128x128x12:2+e4m3-speculative"),
        ("e4m3_d256_s8192_b4_h16_full", "128x64x12:2+e4m3-speculative"),
        ("bf16_d64_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead", "192x96x16:2+e4m3_cache-speculative"),
        ("bf16_d128_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead", "128x128x12:2+e4m3_cache-speculative"),
        ("bf16_d128_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalerow", "128x128x12:2+e4m3_cache-plain"),
        ("bf16_d256_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead", "128x64x12:2+e4m3_cache-plain"),
        ("bf16_d64_s8192_b4_h16_full_dropout0.1", "192x64x16:2-plain"),
    ],
)
def test_options_of_the_chosen_tile(name: str, tile: str) -> None:
    build = planner.plan_forward(parse(name).problem("forward"), "sm_90a").build
    assert TileConfig.of(build) == TileConfig.parse(tile)


@pytest.mark.parametrize(
    ("name", "has_option"),
    [
        ("bf16_d128_s8192_b4_h16_full", True),
        ("f16_d128_s8192_b4_h16k4_full", True),
        ("bf16_d96_s8192_b4_h16_full", True),
        ("bf16_d64_s8192_b4_h32_full_sinks", True),
        ("bf16_d128_s8192_b4_h16_causal", False),
        ("bf16_d128_n4000,300_h16_full", False),
        ("bf16_d128_s8192_b4_h16_full_dropout0.1", False),
        ("bf16_d128_s8192_b4_h16_full_softcap30", False),
        ("bf16_d128_s8192_b4_h16_full_deterministic", False),
        ("bf16_d128_s128_b64_h16_full", False),
        ("bf16_d256_s8192_b4_h16_full", False),
    ],
)
def test_backwards_whose_blocks_share_the_last_key_tiles(name: str, has_option: bool) -> None:
    build = planner.plan_backward(parse(name).problem("backward"), "sm_90a").build
    assert build.options == (("shared_end",) if has_option else ())


def test_options_are_no_part_of_the_symbol_but_of_the_digest() -> None:
    problem = parse("bf16_d64_s8192_b4_h32_full").problem("forward")
    plain = planner.plan_with_tile(problem, "sm_90a", TileConfig.parse("192x128x16:2-plain")).build
    chosen = planner.plan_forward(problem, "sm_90a").build
    assert (plain.symbol, plain.shared_memory) == (chosen.symbol, chosen.shared_memory)
    assert plain.digest != chosen.digest


def test_the_last_query_tiles_are_shared_if_they_are_few() -> None:
    """Of 4096 tiles 4 remain after 31 rounds of 132 blocks, 68 after 15; few keys are not shared."""
    for name, shared, splits in (
        ("bf16_d128_s8192_b4_h16_full", 4, 32),
        ("bf16_d128_s2048_b16_h16_full", 4, 8),
        ("bf16_d128_q8192_s1409_b4_h16_full", 4, 6),
        ("bf16_d128_q8192_s1408_b4_h16_full", 0, 1),
        ("bf16_d128_s512_b64_h16_full", 0, 1),
        ("bf16_d128_s4096_b1_h6_full", 60, 2),
        *((f"bf16_d128_s{s}_b{b}_h4_full", 0, 1) for s, b in ((768, 8), (1024, 6), (1536, 4), (2048, 3))),
        ("bf16_d128_s4096_b4_h16_full", 0, 1),
        ("bf16_d128_s512_b4_h8_full", 0, 1),
    ):
        plan = planner.plan_forward(parse(name).problem("forward"), "sm_90a", 132)
        assert (len(plan.launches), plan.num_splits_key) == (1 + (splits > 1), splits), name
        sizes = {buffer.name: buffer.bytes for buffer in plan.workspace.buffers}
        rows = shared * 128 * splits
        assert sizes == ({"partial_output": rows * 128 * 4, "partial_logsumexp": rows * 4} if shared else {}), name
        assert not shared or plan.launches[1].grid == (shared * 32, 1, 1)
    for name, splits in (  # what a block must save is half of the keys at d 256
        ("bf16_d256_q8192_s705_b4_h16_full", 6),
        ("bf16_d256_q8192_s704_b4_h16_full", 1),
        ("bf16_d192v128_q8192_s1153_b4_h16_full", 5),
        ("bf16_d192v128_q8192_s1152_b4_h16_full", 1),
    ):
        assert planner.plan_forward(parse(name).problem("forward"), "sm_90a", 132).num_splits_key == splits, name
    for case in suite.SHARED_END:
        assert planner.plan_forward(case.problem(), "sm_90a", 132).num_splits_key > 1, case.line
    for case in suite.SHARED_QUERIES:
        assert dict(planner.plan(case.problem(), "sm_90a", 132).params)["num_splits_query"] > 1, case.line


@pytest.mark.parametrize(
    ("name", "tiles", "splits"),
    [
        ("bf16_d128_s8192_b4_h16_full", 4, 33),
        ("bf16_d128_s16384_b2_h16_full", 4, 33),
        ("bf16_d128_s4096_b4_h16_full", 68, 5),  # one round of parts would be one of whole tiles
        ("bf16_d128_s4096_b4_h16k8_full", 100, 1),
        ("bf16_d128_s2048_b16_h16_full", 4, 16),  # no part has fewer than two query tiles
        ("bf16_d128_q200_s2048_b16_h16_full", 4, 1),  # four query tiles
        ("bf16_d128_s1024_b2_h8_full", 128, 1),  # nearly as many tiles as SMs
        ("bf16_d128_s1024_b1_h4_full", 32, 4),  # fewer
        ("bf16_d128_s2048_b1_h2_full", 32, 4),
    ],
)
def test_the_queries_of_the_last_key_tiles_are_shared_if_these_are_few(name: str, tiles: int, splits: int) -> None:
    problem = parse(name).problem("backward")
    build = next(build for build in planner.builds(problem, "sm_90a") if build.options)
    plan = planner.plan_of_build(problem, build, 132)
    found = dict(plan.params)
    shape = problem.shape
    assert -(-shape.num_keys // 128) * shape.num_heads_key * shape.batch % 132 == tiles % 132
    assert (found["num_splits_query"], found["shared_key_tiles"]) == (splits, tiles if splits > 1 else 0)
    sizes = {buffer.name: buffer.bytes for buffer in plan.workspace.buffers}
    assert sizes.get("shared_sums", 0) == (tiles * (128 * 256 * 4 + 8 * 4) if splits > 1 else 0)
    assert plan.workspace.zero_bytes == 0


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9000), st.integers(1, 140))
def test_parts_never_take_longer_than_whole_tiles(heads: int, key_tiles: int, num_queries: int, num_sms: int) -> None:
    """Each SM takes the next whole tile or part when it is done, so that the last ones take a round at most."""
    problem = Problem.dense("backward", Shape(1, num_queries, key_tiles * 128, heads, 128, 128), "bfloat16", Full())
    build = planner.plan_with_tile(problem, "sm_90a", TileConfig.parse("64x128x16:3,2+ds_registers-shared_end")).build
    found = launch_rules.values(problem, build, num_sms)
    shared, splits, query_tiles = found["shared_key_tiles"], found["num_splits_query"], -(-num_queries // 64)
    whole = heads * key_tiles - shared
    assert (splits > 1) == (shared > 0)
    assert shared in (0, heads * key_tiles % num_sms)
    if shared:
        assert query_tiles // splits >= shared_tiles.LEAST_PART_TILES
        assert whole % num_sms == 0
        parts = -(-shared * splits // num_sms) * (-(-query_tiles // splits) + shared_tiles.PART_TILES)
        assert parts + shared_tiles.LEAST_SAVED_QUERY_TILES <= query_tiles


def test_cases_of_the_gpu_suite_have_every_speculative_tile() -> None:
    builds = {planner.plan_forward(case.problem(), "sm_90a").build for case in suite.SPECULATIVE}
    assert all("speculative" in build.options for build in builds)
    found = {(build.columns, build.mask, build.variant) for build in builds}
    assert found >= {
        (32, "full", ""), (64, "full", ""), (64, "causal", ""), (96, "full", ""), (96, "causal", ""),
        (128, "full", ""), (128, "causal", ""), (128, "causal", "multicast"), (192, "full", ""), (256, "causal", ""),
        *((columns, "local", "") for columns in (64, 96, 128, 256)), *((n, "causal", "e4m3_cache") for n in (64, 128)),
        *((columns, "full", "e4m3") for columns in (64, 128, 256)), (64, "local", "e4m3"), (192, "causal", "e4m3"),
    }  # fmt: skip
