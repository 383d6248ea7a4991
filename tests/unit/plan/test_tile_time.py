"""plan/tile_time.py: the tiles of short sm90 forwards, at the lengths where the choice changes."""

from __future__ import annotations

import pytest

from cutlass_py_attn.plan import planner, tile_time, tiles
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.spec import parse

SMS = 132
LONG, SQUARE, SINGLE = "192x128", "128x128", "128x208"


def tiles_of(name: str, num_sms: int = SMS) -> list[str]:
    """Returns the tiles of the sm90 plans of a forward, the first to try first."""
    builds = [plan.build for plan in planner.plans(parse(name).problem("forward"), "sm_90a", num_sms)]
    return [f"{build.tile_m}x{build.tile_n}" for build in builds if build.family == "sm90"]


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ("s1_b1_h1_full", SQUARE),
        ("s128_b256_h12_full", SQUARE),
        ("s192_b256_h12_full", LONG),  # no query is padding
        ("s193_b256_h12_full", SINGLE),
        ("s197_b256_h12_full", SINGLE),
        ("s197_b1_h1_full", SINGLE),
        ("s208_b256_h12_full", SINGLE),
        ("s209_b256_h12_full", SQUARE),  # a second tile of 208 keys would be all padding
        ("s256_b256_h12_full", SQUARE),
        ("s384_b256_h12_full", LONG),  # two whole tiles of 192 queries, three whole ones of 128 keys
        ("s512_b8_h12_full", SQUARE),  # both are three rounds of work tiles
        ("s512_b64_h32_full", LONG),  # many rounds: 192 queries a round need fewer
        ("s197_b256_h12_causal", SQUARE),  # half of the keys of the first queries are never visited
        ("s512_b64_h32_causal", LONG),
        ("s1024_b32_h32_full", LONG),
        ("s1024_b32_h32_causal", LONG),
        ("s1024_b1_h1_full", LONG),  # less than a tenth would be saved
        ("s2048_b16_h32_full", LONG),
        ("s2048_b1_h1_causal", LONG),
        ("s2049_b1_h1_full", LONG),
        ("q100_s2048_b4_h8_full", LONG),
        ("s197_b256_h12k4_full", SINGLE),
        ("s197_b256_h12_full_softcap30", LONG),  # speeds with score terms are not known
        ("s197_b256_h12_causal_window64", SQUARE),
    ],
)
def test_the_tile_of_d64(sizes: str, tile: str) -> None:
    assert tiles_of(f"bf16_d64_{sizes}")[0] == tile
    assert tiles_of(f"f16_d64_{sizes}")[0] == tile


@pytest.mark.parametrize(
    ("lengths", "tile"),
    [
        ("n200,200", SINGLE),
        ("n200,40", SQUARE),  # a mean of 120 rows
        ("n4096,8", LONG),
        ("n256,1,1,1", SQUARE),
    ],
)
def test_variable_lengths_count_as_their_mean(lengths: str, tile: str) -> None:
    assert tiles_of(f"bf16_d64_{lengths}_h512_full")[0] == tile


def test_the_single_tile_needs_the_longest_sequence() -> None:
    """A mean of 197 keys is not enough: some sequence would need a second tile."""
    assert tiles_of("bf16_d64_n197,197_h512_full")[0] == SINGLE
    assert SINGLE not in tiles_of("bf16_d64_n209,185_h512_full")


@pytest.mark.parametrize("dims", ["d96", "d128", "d192v64", "d256"])
def test_other_head_dims_keep_the_order_of_their_table(dims: str) -> None:
    problem = parse(f"bf16_{dims}_s197_b256_h12_full").problem("forward")
    assert tiles_of(f"bf16_{dims}_s197_b256_h12_full") == [
        f"{tile.tile_m}x{tile.tile_n}"
        for tile in tiles.sm90_tiles(problem)
        if not tile.variant and (tile.tile_m, tile.tile_n) != (128, 208)
    ]


def test_the_other_tiles_remain_to_fall_back_to() -> None:
    assert tiles_of("bf16_d64_s197_b256_h12_full") == [SINGLE, LONG, SQUARE]
    assert tiles_of("bf16_d64_s209_b256_h12_full") == [SQUARE, LONG]
    assert tiles_of("bf16_d64_s8192_b4_h32_full") == [LONG, SQUARE]


def test_kernels_for_any_length_have_the_tiles_for_long_sequences() -> None:
    """Those that a bundle exports."""
    problem = parse("bf16_d64_s197_b256_h12_full").problem("forward")
    found = planner.plans(problem, "sm_90a", SMS, any_length=True)
    ours = [plan for plan in found if plan.build.family == "sm90"]
    assert [f"{plan.build.tile_m}x{plan.build.tile_n}" for plan in ours] == [LONG, SQUARE]
    assert "estimated" not in ours[0].reason
    assert planner.plans_on(problem, (9, 0), SMS, any_length=True)[:2] == ours
    backward = parse("bf16_d128_s256_b64_h16_full").problem("backward")
    assert "per_head" in [plan.build.variant for plan in planner.plans(backward, "sm_90a", SMS)]
    assert {plan.build.body.lengths for plan in planner.plans(backward, "sm_90a", SMS, any_length=True)} == {"any"}


def test_fewer_multiprocessors_are_more_rounds() -> None:
    """288 tiles of 192 queries or 384 of 128: as many rounds on 132 multiprocessors, but not on 96."""
    assert [tiles_of("bf16_d64_s512_b8_h12_full", sms)[0] for sms in (132, 96)] == [SQUARE, LONG]


def test_the_estimate_in_numbers() -> None:
    """6144 tiles of 128 queries are 47 rounds; each work tile visits 2 tiles of 128 keys and takes 32 keys more."""
    problem = parse("bf16_d64_s197_b256_h12_full").problem("forward")
    found = tile_time.estimate(problem, TileConfig(128, 128, 12, 2), SMS)
    assert found == pytest.approx(47 * 128 * (2 * 128 + 32) / 365)
    causal = parse("bf16_d64_s197_b256_h12_causal").problem("forward")
    found = tile_time.estimate(causal, TileConfig(128, 128, 12, 2), SMS)
    assert found == pytest.approx(3072 * 128 * (3 * 128 + 2 * 32) / 365 / SMS)
    one = parse("bf16_d64_s197_b1_h1_causal").problem("forward")
    assert tile_time.estimate(one, TileConfig(128, 128, 12, 2), SMS) == pytest.approx(128 * (2 * 128 + 32) / 365)


def test_estimates_reproduce_what_was_measured() -> None:
    """TFLOP/s of bf16 d 64 at s 197 and s 512, see docs/performance.md, as ratios of the times."""
    measured = {
        "s197_b256_h12_full": {LONG: 151, SQUARE: 190, SINGLE: 221},
        "s512_b8_h12_full": {LONG: 228, SQUARE: 265},
    }
    for sizes, rates in measured.items():
        problem = parse(f"bf16_d64_{sizes}").problem("forward")
        for tile in tiles.sm90_tiles(problem):
            name = f"{tile.tile_m}x{tile.tile_n}"
            if name in rates:
                estimated, usual = (tile_time.estimate(problem, it, SMS) for it in (tile, TileConfig(192, 128, 16, 2)))
                assert estimated is not None
                assert usual is not None
                assert usual / estimated == pytest.approx(rates[name] / rates[LONG], rel=0.05)


def test_explain_says_why() -> None:
    plan = planner.plan(parse("bf16_d64_s197_b256_h12_full").problem("forward"), "sm_90a", SMS)
    assert plan.symbol == "fwd_sm90_bf16_d64_full_128x208"
    assert (
        "tile 128x208 because the estimated time of these short sequences is 70% of that with 192x128, which is faster "
        "for long ones"
    ) in plan.explain()
    usual = planner.plan(parse("bf16_d64_s2048_b16_h32_full").problem("forward"), "sm_90a", SMS)
    assert "estimated" not in usual.explain()


def test_an_empty_problem_has_no_estimate() -> None:
    problem = parse("bf16_d64_q0_s197_b1_h1_full").problem("forward")
    assert tile_time.estimate(problem, TileConfig(128, 128, 12, 2), SMS) is None
