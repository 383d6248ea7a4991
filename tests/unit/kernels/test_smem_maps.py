"""Tests of shared-memory maps: every buffer holds its tile, by sizes that are written out here."""

from __future__ import annotations

import pytest

from cutlass_py_attn.kernels.sm80_split_d.layout import forward_split, tile_and_column_block
from cutlass_py_attn.kernels.sm90_backward import layout as sm90_smem
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.smem import even_chunk
from cutlass_py_attn.launch.variants import PER_HEAD, TWO_CTA
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse

NAMES = ("f16_d64", "f16_d64v128", "bf16_d128v64", "f32_d64v32", "f16_d33v17")


def sizes(build: Build) -> dict[str, int]:
    return {buffer.name: buffer.bytes for buffer in build.shared_memory}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", ["", "_bias"])
def test_the_sm80_forward_holds_its_tiles(name: str, bias: str) -> None:
    problem = parse(f"{name}_q200_s300_b2_h2_causal{bias}").problem("forward")
    build = plan(problem, "sm_80").build
    found, item, (m, n) = sizes(build), build.item_bytes, (build.tile_m, build.tile_n)
    assert found["query"] >= m * max(problem.shape.head_dim, problem.shape.head_dim_value) * item, "also the output"
    assert found["key"] >= n * problem.shape.head_dim * item
    assert found["value"] >= n * problem.shape.head_dim_value * item
    assert found.get("bias", 0) >= (m * n * item if bias else 0)
    assert found["sums"] == 4 * m * 4
    assert not {"key_codes", "value_codes", "key_scales", "value_scales"} & found.keys(), "those of e4m3 caches"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", ["", "_bias"])
def test_the_sm80_backward_holds_its_tiles(name: str, bias: str) -> None:
    problem = parse(f"{name}_q200_s300_b2_h2_causal{bias}").problem("backward")
    build = plan(problem, "sm_80").build
    found, item, (m, n) = sizes(build), build.item_bytes, (build.tile_m, build.tile_n)
    head_dim, head_dim_value, stages = problem.shape.head_dim, problem.shape.head_dim_value, build.query_stages
    least = {
        "key": n * head_dim * item,
        "value": n * head_dim_value * item,
        "query": stages * m * head_dim * item,
        "grad_output": build.grad_output_stages * m * head_dim_value * item,
        "p": m * n * item,
        "ds": m * n * item,
        "logsumexp": stages * m * 4,
        "delta": stages * m * 4,
    } | ({"bias": stages * m * n * item} if bias else {})
    assert {buffer: found.get(buffer, 0) >= size for buffer, size in least.items()} == dict.fromkeys(least, True)


@pytest.mark.parametrize(
    ("name", "accumulators", "registers", "staged"),
    [
        ("bf16_d96", 160, (24, 104, 192), 64 * 96),
        ("bf16_d128v96", 176, (24, 104, 192), 64 * 128),
        ("bf16_d128", 192, (32, 64, 208), 64 * 64),
        ("bf16_d128v64", 160, (24, 104, 192), 64 * 128),
        ("f16_d64", 192, (32, 80, 200), 2 * 32 * 64),  # K^T takes registers of dQ
    ],
)
def test_the_sm90_backward_divides_registers_and_stages_dq(
    name: str, accumulators: int, registers: tuple[int, ...], staged: int
) -> None:
    """dK and dV of 64 keys, and S of all queries of a tile, decide how many registers are left for dQ."""
    build = plan(parse(f"{name}_q500_s600_b2_h2_causal").problem("backward"), "sm_90a", 12).build
    assert (build.columns + build.columns_value) // 2 + build.tile_m == accumulators
    assert sm90_smem.registers(build) == registers
    assert sizes(build)["staging"] == staged * 4


@pytest.mark.parametrize(("name", "columns"), [("bf16_d64", 64), ("bf16_d96", 96), ("bf16_d128", 128)])
def test_one_consumer_warpgroup_leaves_registers_for_all_columns_of_dq(name: str, columns: int) -> None:
    build = plan(parse(f"{name}_q500_s600_b1_h2_causal").problem("backward"), "sm_90a").build
    assert (build.tile_n, build.threads) == (64, 384)
    assert sm90_smem.registers(build) == (32, 120, 240)
    assert sizes(build)["staging"] == 64 * columns * 4


@pytest.mark.parametrize(
    ("feature", "registers"), [("", (24, 72, 208)), ("_dropout0.3", (32, 64, 208)), ("_softcap3", (24, 72, 208))]
)
def test_dropout_takes_registers_from_dq_in_the_backward_of_one_block_per_head(
    feature: str, registers: tuple[int, ...]
) -> None:
    build = plan(parse(f"bf16_d128_q200_s300_b8_h32_causal{feature}").problem("backward"), "sm_90a").build
    assert build.variant == PER_HEAD
    assert sm90_smem.registers(build) == registers


@pytest.mark.parametrize("name", ["bf16_d192v64", "bf16_d192v128"])
def test_dq_of_wide_heads_is_added_in_pieces_of_few_columns(name: str) -> None:
    build = plan(parse(f"{name}_q500_s600_b2_h2_causal").problem("backward"), "sm_90a").build
    assert sm90_smem.registers(build) == (24, 56, 216)
    assert sm90_smem.grad_query_piece(build) == (64, 32)


@pytest.mark.parametrize("name", ["f16_d288", "f16_d512", "f32_d160", "bf16_d320v512", "f16_d1024"])
def test_the_split_d_forward_holds_its_query_or_loads_it_with_the_keys(name: str) -> None:
    problem = parse(f"{name}_q200_s300_b2_h2_causal").problem("forward")
    build = plan(problem, "sm_90").build
    split, found = forward_split(build), sizes(build)
    assert split.keeps_query == (name != "f16_d1024")
    query = build.tile_m * problem.shape.head_dim * build.item_bytes
    assert found.get("query", 0) >= query * split.keeps_query
    loaded = build.tile_n + (0 if split.keeps_query else build.tile_m)
    assert found["ring"] >= build.query_stages * loaded * split.chunk * build.item_bytes


@pytest.mark.parametrize(
    ("columns", "widest", "chunk"),
    [(512, 128, 128), (512, 512, 512), (300, 128, 128), (288, 256, 160), (40, 8, 32), (16, 64, 32)],
)
def test_chunks_are_as_few_as_possible_and_even(columns: int, widest: int, chunk: int) -> None:
    assert even_chunk(columns, widest) == chunk


def test_blocks_of_a_tile_are_neighbours() -> None:
    assert [tile_and_column_block(block, 2) for block in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_the_sm90_forward_holds_its_tiles_and_two_barriers_of_each_stage() -> None:
    build = plan(parse("bf16_d128v64_q500_s600_b2_h2_full").problem("forward"), "sm_90a").build
    found, stages = sizes(build), build.query_stages
    query_stages = found["query"] // (build.tile_m * 128 * 2)
    assert query_stages == 2
    assert found == {
        "query": 2 * build.tile_m * 128 * 2,
        "key": stages * build.tile_n * 128 * 2,
        "value": stages * build.tile_n * 64 * 2,
        "barriers": 2 * (query_stages + 2 * stages) * 8,
    }


def test_a_block_of_the_2cta_backward_holds_its_tiles() -> None:
    """Half of dQ's columns are of this block, and there are two stages of P and dS."""
    build = plan(parse("bf16_d256v128_q4000_s4096_b2_h2_causal").problem("backward"), "sm_90a").build
    assert (build.variant, build.tile_m, build.tile_n) == (TWO_CTA, 64, 64)
    assert (build.query_stages, build.grad_output_stages) == (3, 2)
    assert sizes(build) == {
        "key": 64 * 256 * 2,
        "value": 64 * 128 * 2,
        "other_key": 64 * 128 * 2,
        "query": 3 * 64 * 256 * 2,
        "grad_output": 2 * 64 * 128 * 2,
        "p_ds": 2 * 64 * 64 * 2,
        "other_ds": 2 * 64 * 64 * 2,
        "logsumexp": 3 * 64 * 4,
        "delta": 2 * 64 * 4,
        "barriers": 2 * 8 * (3 + 2 + 2 + 2),
    }
