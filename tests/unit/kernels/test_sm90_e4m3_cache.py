"""Plans of the Hopper forward over e4m3 caches: when it is chosen, tiles, memory, parameters, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.errors import DoesNotFit
from cutlass_py_attn.kernels.sm90_e4m3_cache.layout import MOST_VECTORS, registers, rows_at_once, vectors_of_tile
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import E4M3_CACHE
from cutlass_py_attn.plan import build_rules, planner, preconditions
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor
from tests.support.refusals import expect

PREFILL = "bf16_d128_q512_s8192_b4_h32k8_causal_br_paged16_kv8_descalehead"


def problem_of(name: str) -> Problem:
    return parse(name).problem("forward")


def plan_of(name: str, arch: str = "sm_90a") -> Plan:
    """Returns the best plan of a spec."""
    return planner.plan(problem_of(name), arch)


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        (PREFILL, "fwd_sm90_bf16_d128_causal_grouped_kv8_paged_e4m3_cache_128x128"),
        (PREFILL.replace("paged16_", ""), "fwd_sm90_bf16_d128_causal_grouped_kv8_e4m3_cache_128x128"),
        ("bf16_d128_q200_s900_b4_h4_full_kv8_descalerow", "fwd_sm90_bf16_d128_full_kv8_kv8row_e4m3_cache_128x128"),
        ("f16_d64_q300_s900_b1_h4_full_paged1_kv8", "fwd_sm90_f16_d64_full_kv8_paged_e4m3_cache_192x96"),
        ("f16_d64_q300_s900_b1_h4_full_alibi_kv8", "fwd_sm90_f16_d64_full_alibi_kv8_e4m3_cache_128x128"),
        ("bf16_d96_q300_s900_b1_h4_causal_paged16_kv8", "fwd_sm90_bf16_d96_causal_kv8_paged_e4m3_cache_128x128"),
        ("bf16_d192v128_q300_s900_b1_h4_full_kv8", "fwd_sm90_bf16_d192v128_full_kv8_e4m3_cache_128x64"),
        ("f16_d256_n300x900,64x0_h4_full_paged8_kv8", "fwd_sm90_f16_d256_full_kv8_paged_varlen_e4m3_cache_128x64"),
    ],
)  # fmt: skip
def test_plans(name: str, symbol: str) -> None:
    """The planner's choice, its registers, and its shared memory, which has 16-bit tiles and no codes."""
    plan = plan_of(name)
    build = plan.build
    assert plan.symbol == symbol
    assert parse_symbol(build.symbol, build.arch).build == build
    assert build.tile_n % rows_at_once(build) == 0
    assert vectors_of_tile(build) <= MOST_VECTORS
    converting, computing = registers(build)
    assert 128 * (converting + build.tile_m // 64 * computing) <= 65536
    assert build.buffer("key").bytes == 2 * build.tile_n * build.columns * 2
    assert ("key_scales" in {buffer.name for buffer in build.shared_memory}) == build.has("kv8row")
    (launch,) = plan.launches
    assert [it.field for it in launch.tensor_maps] == ["query"], "threads load key and value"
    assert "value_page_rows" not in dict(abi.fields_of(build))
    assert Plan.from_json(plan.to_json()) == plan


def test_a_thread_has_the_vectors_of_the_wider_operand() -> None:
    """64 rows of 192 and of 128 columns: four threads of 128 have a row, so that each has two rows."""
    build = plan_of("bf16_d192v128_q300_s900_b1_h4_full_kv8").build
    assert rows_at_once(build) == 32
    assert vectors_of_tile(build) == 2 * 3


def test_few_rows_have_a_decode_kernel() -> None:
    for name in (PREFILL.replace("q512", "q32"), PREFILL.replace("q512", "q1").replace("paged16_", "")):
        assert plan_of(name).build.family == "decode"
    assert plan_of(PREFILL.replace("q512", "q33")).build.variant == E4M3_CACHE


def test_explain() -> None:
    text = plan_of(PREFILL).explain()
    assert "variant          e4m3_cache" in text
    assert "key and value    e4m3 codes, converted to bfloat16; scales of the operand, each key head" in text
    assert "2 warpgroups compute S and O, one loads keys and values and converts them to 16 bits" in text


def with_pools(page: int, row: int, address: int = 16) -> Problem:
    """A problem whose pools have other strides of pages and rows (bytes)."""
    problem = problem_of(PREFILL)
    pools = {
        name: replace(it, strides=(page, row, *it.strides[2:]), alignment=address)
        for name in ("key", "value")
        for it in (getattr(problem, name),)
    }
    return problem.replace(**pools)


def test_pages_may_have_any_size_and_strides_of_16_bytes() -> None:
    """The kernel has no tensor maps of pools, and none of their conditions."""
    for problem in (problem_of(PREFILL.replace("paged16", "paged1")), with_pools(page=16 * 1024 + 16, row=1024)):
        plan = planner.plan(problem, "sm_90a")
        assert plan.build == plan_of(PREFILL).build
        said = [text for _, text in preconditions.conditions(problem, plan.build)]
        assert not any("sm80" in text or "tensor map" in text for text in said if "query" not in text)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (problem_of("bf16_d72_q300_s900_b1_h4_full_kv8"), "rows aligned to less than 16 bytes"),
        (with_pools(page=16 * 1032, row=1032), "rows aligned to less than 16 bytes"),
        (problem_of("bf16_d64_q300_s900_b1_h4_full_scale-0.5_kv8"), "a scale below 0"),
    ],
    ids=["head_dim", "pools", "scale"],
)
def test_what_the_sm80_family_serves(problem: Problem, reason: str) -> None:
    plan = planner.plan(problem, "sm_90a")
    assert plan.build.family == "sm80"
    assert f"the sm90 family takes no {reason}" in plan.explain()


@pytest.mark.parametrize(
    ("name", "tile", "reason"),
    [
        (PREFILL, "128x112x12:2,0", "a warpgroup converts 32 rows at once"),
        ("bf16_d96_q300_s900_b1_h4_full_kv8", "128x96x12:2,0", "a warpgroup converts 64 rows at once"),
        (PREFILL, "64x256x8:2,0", "each of 128 threads copies the scales of one row"),
        ("bf16_d256_q300_s900_b1_h4_full_kv8", "64x128x8:2,0", "a thread has registers for 8 vectors of codes, not 16"),
        (PREFILL, "256x64x20:2,0", "use 8, 12 or 16"),
        ("bf16_d128_q300_s900_b1_h4_full_paged16", "128x128x12:2,0", "converts keys and values of e4m3 codes"),
        (PREFILL + "x", "128x128x12:2,0-shared_end", "option shared_end is for full masks"),
        (PREFILL.replace("head", "row"), "128x128x12:2,0-speculative", "scales of rows"),
    ],
)
def test_tiles_that_cannot_be_built(name: str, tile: str, reason: str) -> None:
    text, dash, options = tile.partition("-")
    chosen = TileConfig.parse(f"{text}+{E4M3_CACHE}{dash}{options}")
    with pytest.raises(DoesNotFit, match=reason):
        planner.plan_with_tile(problem_of(name.removesuffix("x")), "sm_90a", chosen)


def test_other_variants_read_no_codes() -> None:
    build = plan_of(PREFILL).build
    wrong = build_rules.refusals(replace(build, variant=""))
    expect(wrong[:1], ["features: the standard variant of the sm90 forward has no kv8"])


def test_codes_may_be_bytes() -> None:
    problem = problem_of(PREFILL)
    as_bytes = {name: Tensor.contiguous(getattr(problem, name).shape, "uint8") for name in ("key", "value")}
    assert planner.plan(problem.replace(**as_bytes), "sm_90a") == planner.plan(problem, "sm_90a")
