"""Tests of the choice of sm90 tiles: backwards with few key tiles get blocks of 64 keys."""

from __future__ import annotations

import pytest

from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.spec import parse

SMS = 132


def plans(name: str, num_sms: int = SMS, *, any_length: bool = False) -> list[Plan]:
    found = planner.plans(parse(name).problem("backward"), "sm_90a", num_sms, any_length=any_length)
    return [plan for plan in found if plan.build.family == "sm90"]


@pytest.mark.parametrize(
    ("name", "num_sms", "keys", "variant"),
    [
        ("bf16_d64_s512_b1_h16_full", SMS, 64, ""),  # 128 key tiles of 64 keys
        ("bf16_d64_s512_b1_h17_full", SMS, 128, "key_registers"),  # 136 are more than one for each SM
        ("bf16_d64_s512_b1_h17_full", 136, 64, ""),
        ("bf16_d64_s512_b1_h33_causal", SMS, 64, ""),  # 264 key tiles: two for each SM
        ("bf16_d64_s512_b1_h34_causal", SMS, 128, "key_registers"),
        ("bf16_d128_s128_b1_h100_causal", SMS, 128, "per_head"),
        ("f16_d96_s512_b2_h8_causal", SMS, 64, ""),
        ("bf16_d128_s1024_b1_h8_full", SMS, 64, ""),
        ("bf16_d128_s8192_b4_h16_causal", SMS, 128, "ds_registers"),
        ("bf16_d128_s512_b1_h16_full_deterministic", SMS, 64, ""),
        ("bf16_d128_q128_s512_b1_h16k4_full", SMS, 128, "query_heads"),
        ("bf16_d128_s512_b1_h16k4_full", SMS, 128, "ds_registers"),  # parts of 16 key tiles
        ("bf16_d128_s512_b1_h16k4_full_deterministic", SMS, 64, ""),
        ("bf16_d128_s512_b1_h16k4_causal", SMS, 128, "query_heads"),
        ("bf16_d128_s128_b1_h33_full", SMS, 64, ""),
        ("bf16_d128_s128_b1_h34_full", SMS, 128, "per_head"),  # one key tile of 128 keys a head
        ("bf16_d128_s64_b1_h4_full", SMS, 128, "per_head"),
        ("bf16_d64_s128_b1_h66_full", SMS, 64, ""),
        ("bf16_d64_s128_b1_h67_full", SMS, 128, "per_head"),
        ("bf16_d128_s2048_b1_h32k4_full", SMS, 128, "ds_registers"),  # parts of 64 key tiles of whole groups
        ("bf16_d128_s2048_b1_h40k5_full", SMS, 128, "ds_registers"),
        ("bf16_d128_s512_b1_h16_full_dropout0.1", SMS, 128, ""),  # its bits are for two warpgroups
        (
            "bf16_d128_n512,512_h8_causal",
            SMS,
            128,
            "ds_registers",
        ),  # variable lengths, windows and terms were not measured
        ("bf16_d128_s512_b1_h16_causal_window64", SMS, 128, "ds_registers"),
        ("bf16_d128_s512_b1_h16_full_alibi", SMS, 128, ""),
        ("bf16_d192v128_s512_b1_h4_causal", SMS, 128, ""),
        ("bf16_d192v128_s512_b1_h16k4_full", SMS, 128, "query_heads"),  # head dims without parts of key tiles
        ("bf16_d64v128_s1024_b1_h8_full", SMS, 64, ""),
        ("bf16_d256_s512_b1_h4_causal", SMS, 64, "2cta"),
    ],
)
def test_the_keys_of_a_backward_tile(name: str, num_sms: int, keys: int, variant: str) -> None:
    first = plans(name, num_sms)[0]
    assert (first.build.tile_n, first.build.variant) == (keys, variant)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("bf16_d64_s8192_b4_h32_full", "key_registers"),
        ("f16_d40v64_s8192_b4_h32k16_causal", "key_registers"),  # padded to 64
        ("bf16_d64_s8192_b4_h32_causal_window1024_scale0", "key_registers"),
        ("f16_d128_s8192_b4_h16_full", "ds_registers"),
        ("f16_d104v120_n8192,4000_h16k8_causal_scale-0.1", "ds_registers"),  # padded to 128
        ("f16_d128_s8192_b4_h16_full_scale0", ""),  # S cannot start from a quotient by the scale
        ("bf16_d128_s8192_b4_h16_causal_window1024", "ds_registers"),  # 1.031 times as fast as the standard variant
        ("f16_d128_s8192_b4_h16_causal_window1024", ""),  # ptxas spills
        ("f16_d32_s8192_b4_h16_full_scale0", "ds_registers"),
        ("f16_d96_s8192_b4_h16_causal_window1024", "ds_registers"),
        ("f16_d128v64_s8192_b4_h16_full", ""),
        ("f16_d128v96_s8192_b4_h16_causal", ""),
        ("bf16_d64_s8192_b4_h32_full_deterministic", "key_registers"),
        ("bf16_d128_s8192_b4_h16_full_deterministic", "ds_registers"),
        ("bf16_d96_s8192_b4_h16_causal_deterministic_sinks", "ds_registers"),
        ("bf16_d128_s8192_b4_h16_causal_window1024_deterministic", "ds_registers"),
        ("f16_d128_s8192_b4_h16_causal_window1024_deterministic", ""),
        ("bf16_d128_s8192_b4_h16_full_softcap4", ""),
        ("bf16_d64_s8192_b4_h32_causal_alibi", ""),
        ("bf16_d128_s8192_b4_h16_causal_sinks", "ds_registers"),
        ("bf16_d64_s8192_b4_h64k8_causal_window128_sinks", "key_registers"),
        ("bf16_d64_s8192_b4_h32_full_dropout0.1", ""),
    ],
)
def test_long_plain_backwards_keep_ds_in_registers(name: str, variant: str) -> None:
    assert plans(name)[0].build.variant == variant
    assert plans(name)[-1].build.variant == "", "the standard variant is there if another spills"
    assert plans(name, any_length=True)[0].build.variant == variant


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("bf16_d64_s2048_b16_h32_causal", 2),  # 452 instead of 424 TFLOP/s with one
        ("bf16_d64_s16384_b2_h32_causal", 2),  # 606 instead of 596
        ("f16_d64_s8192_b4_h32_causal", 2),  # 572 instead of 561
        ("bf16_d64_s8192_b4_h32_causal_window1024", 1),  # two were not measured
        ("bf16_d64_s8192_b4_h32_causal_deterministic", 2),
        ("bf16_d64_s8192_b4_h32_full", 2),  # 621 instead of 607
    ],
)
def test_key_tiles_in_flight_with_keys_in_registers(name: str, stages: int) -> None:
    build = plans(name)[0].build
    assert (build.variant, build.key_stages) == ("key_registers", stages)


@pytest.mark.parametrize(
    ("name", "queries"),
    [
        ("bf16_d64_s64_b64_h4_full", 64),  # 10.9 us; 15.0 with 128 queries
        ("bf16_d64_s64_b64_h16_causal", 64),  # 34.1 us; 50.4 with 128 queries
        ("bf16_d64_q64_s128_b64_h4_full", 64),
        ("bf16_d64_q65_s128_b64_h4_full", 128),
        ("bf16_d64_q64_s129_b64_h4_full", 128),
        ("bf16_d64_s64_b64_h16k4_full", 64),
        ("bf16_d96_s256_b64_h16_full", 64),
    ],
)
def test_the_queries_of_a_tile_with_one_block_per_head(name: str, queries: int) -> None:
    first = plans(name)[0]
    assert (first.build.tile_m, first.build.tile_n, first.build.variant) == (queries, 128, "per_head")
    assert "per_head" not in {plan.build.variant for plan in plans(name, any_length=True)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bf16_d128_s8192_b4_h16_full", "2 warpgroups compute dK from dS in registers, and dV, one computes dQ, one"),
        (
            "bf16_d64_s8192_b4_h16_full",
            "compute dK from dS in registers, and dV, one computes dQ from keys in registers",
        ),
    ],
)
def test_the_reason_says_what_is_in_registers(name: str, said: str) -> None:
    assert said in plans(name)[0].explain()


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("bf16_d64_s256_b1_h4_full", (64, 64)),
        ("bf16_d64_s257_b1_h4_full", (128, 64)),
        ("f16_d32_s200_b1_h4_causal", (64, 64)),
        ("bf16_d64_s384_b8_h4_causal", (64, 64)),  # 14.6 us; 16.8 with 128 queries
        ("bf16_d64_s512_b8_h4_causal", (64, 64)),  # 18.6 us; 20.2 with 128 queries
        ("bf16_d64_s513_b1_h16_causal", (128, 64)),
        ("bf16_d96_s65_b1_h4_full", (64, 64)),
        ("bf16_d128_s2048_b1_h4_causal", (64, 64)),
        ("bf16_d128_s2048_b1_h4_full", (64, 128)),  # in parts
    ],
)
def test_the_queries_of_a_tile_of_64_keys(name: str, tile: tuple[int, int]) -> None:
    build = plans(name)[0].build
    assert (build.tile_m, build.tile_n) == tile


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("bf16_d32_s2048_b4_h16_full_bias", "sm80"),
        ("bf16_d64_s2048_b4_h16_full_bias", "sm90"),
        ("bf16_d128_s4094_b4_h16_full_bias", "sm90"),  # rows of the bias are aligned to 4 bytes
        ("bf16_d128_s4095_b4_h16_full_bias", "sm80"),  # to 2 bytes
    ],
)
def test_the_family_of_a_backward_with_a_bias(name: str, family: str) -> None:
    assert planner.plan_backward(parse(name).problem("backward"), "sm_90a", SMS).build.family == family


def test_a_block_of_64_keys_has_one_consumer_warpgroup() -> None:
    plan = plans("bf16_d128_s512_b1_h16_full")[0]
    assert plan.build.threads == 384
    assert plan.launches[1].grid == (128, 1, 1)
    assert "one warpgroup computes dK and dV, one computes dQ, one warp loads" in plan.explain()


def test_kernels_for_any_length_have_128_keys() -> None:
    """A kernel set that also launches longer sequences must not have the tile for few blocks."""
    assert plans("bf16_d128_s512_b1_h16_full")[0].build.tile_n == 64
    assert {plan.build.tile_n for plan in plans("bf16_d128_s512_b1_h16_full", any_length=True)} == {128}
