"""Tests of plan/tile_options.py: with which options the planner has a tile."""

from __future__ import annotations

import pytest

from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.testing import suite


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
        ("bf16_d128v64_s8192_b4_h16_full", "192x128x16:2"),
        ("bf16_d192v128_s8192_b4_h16_full", "128x128x12:2-speculative-shared_end"),
        ("bf16_d192v128_s8192_b4_h16_causal", "128x128x12:2+multicast-speculative"),
        ("bf16_d256_s8192_b4_h8_full", "128x64x12:2-speculative-shared_end"),
        ("bf16_d192_s8192_b4_h16_causal", "128x64x12:2-speculative"),
        ("bf16_d128_s1024_b1_h8_causal", "64x128x8:2-speculative"),
        ("bf16_d128_s128_b8_h16_full", "128x64x12:2-speculative"),
        ("bf16_d128_s128_b64_h16_causal", "128x64x12:2-speculative"),
        ("bf16_d64_s197_b256_h12_full", "128x208x12:2"),
        ("f16_d128_s8192_b4_h16k4_full", "128x128x12:2-shared_end"),
        ("f16_d128_n4000,300_h16_full", "128x128x12:2"),
        ("f16_d64_s8192_b4_h32_causal", "192x128x16:2"),
        ("e4m3_d128_s8192_b4_h16_full", "128x128x12:2+e4m3-speculative"),
        ("bf16_d128_s8192_b4_h16_full_sinks", "128x128x12:2-speculative"),
        ("bf16_d128_s8192_b4_h16_causal_window1024", "128x128x12:2-speculative-bits"),
        ("bf16_d64_s16384_b2_h32_causal_window1024", "128x128x12:2-speculative-bits"),
        ("bf16_d96_s16384_b2_h16_causal_window1024", "192x96x16:2-speculative-bits"),
        ("bf16_d256_s16384_b2_h8_causal_window1024", "128x64x12:2-speculative-bits"),
        ("bf16_d128_s8192_b4_h16_causal_window1024_alibi", "128x128x12:2"),
        ("e4m3_d64_s8192_b4_h16_causal", "192x128x16:2+e4m3-speculative"),
        ("e4m3_d64_s16384_b2_h16_causal_window1024", "128x128x12:2+e4m3-speculative-bits"),
        ("e4m3_d128_s16384_b2_h16_causal_window1024", "128x64x12:2+e4m3"),
        ("e4m3_d192_s8192_b4_h16_causal", "128x128x12:2+e4m3-speculative"),
        ("e4m3_d256_s8192_b4_h16_full", "128x64x12:2+e4m3-speculative"),
        ("bf16_d64_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead", "192x96x16:2+e4m3_cache-speculative"),
        ("bf16_d128_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead", "128x128x12:2+e4m3_cache-speculative"),
        ("bf16_d128_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalerow", "128x128x12:2+e4m3_cache"),
        ("bf16_d256_q600_s2300_b2_h4k2_causal_br_paged16_kv8_descalehead", "128x64x12:2+e4m3_cache"),
        ("bf16_d64_s8192_b4_h16_full_dropout0.1", "192x64x16:2"),
    ],
)
def test_options_of_the_chosen_tile(name: str, tile: str) -> None:
    build = planner.plan_forward(parse(name).problem("forward"), "sm_90a").build
    assert TileConfig.of(build) == TileConfig.parse(tile)


def test_options_are_no_part_of_the_symbol_but_of_the_digest() -> None:
    problem = parse("bf16_d64_s8192_b4_h32_full").problem("forward")
    plain = planner.plan_with_tile(problem, "sm_90a", TileConfig.parse("192x128x16:2")).build
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
        assert not shared or plan.launches[1].grid == (shared * 128, 1, 1)
    for name, splits in (  # what a block must save is half of the keys at d 256
        ("bf16_d256_q8192_s705_b4_h16_full", 6),
        ("bf16_d256_q8192_s704_b4_h16_full", 1),
        ("bf16_d192v128_q8192_s1153_b4_h16_full", 5),
        ("bf16_d192v128_q8192_s1152_b4_h16_full", 1),
    ):
        assert planner.plan_forward(parse(name).problem("forward"), "sm_90a", 132).num_splits_key == splits, name
    for case in suite.SHARED_END:
        assert planner.plan_forward(case.problem(), "sm_90a", 132).num_splits_key > 1, case.line


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
