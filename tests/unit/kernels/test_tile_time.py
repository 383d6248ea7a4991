"""kernels/sm90_family/tile_time.py: the tiles of short sm90 forwards, at the lengths where the choice changes."""

from __future__ import annotations

import pytest

from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.kernels.problem_kind import ProblemKind, sizes
from cutlass_py_attn.kernels.sm90_family import tile_time, tiles
from cutlass_py_attn.kernels.sm90_family.row import NEVER
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse

SMS = 132
LONG, LONG_96, SQUARE, SINGLE = "192x128", "192x112", "128x128", "128x208"
FEW, FEWEST, HALF = "64x128", "64x64", "128x64"

# Microseconds of bf16 forwards on an H200, see kernels/sm90_forward/NOTES-short.md.
MEASURED = {
    "d64_s197_b256_h12_full": {LONG: 199.2, SQUARE: 156.4, SINGLE: 137.3},
    "d64_s197_b256_h12_causal": {LONG: 221.2, SQUARE: 142.8, SINGLE: 145.8},
    "d64_s128_b256_h12_full": {LONG: 68.0, SQUARE: 55.7},
    "d64_s256_b128_h12_full": {LONG: 100.8, SQUARE: 79.0},
    "d64_s256_b128_h12_causal": {LONG: 115.8, SQUARE: 76.5},
    "d64_s384_b64_h32_full": {LONG: 184.8, SQUARE: 201.8},
    "d64_s512_b8_h12_full": {LONG: 27.2, SQUARE: 22.6},
    "d64_s512_b64_h32_full": {LONG: 325.9, SQUARE: 337.8},
    "d64_s512_b64_h32_causal": {LONG: 293.9, SQUARE: 258.6},
    "d64_s1024_b1_h12_full": {LONG: 19.5, SQUARE: 17.4},
    "d64_s1024_b4_h12_full": {LONG: 45.9, SQUARE: 38.2},
    "d64_s2048_b1_h8_full": {LONG: 31.2, SQUARE: 25.4},
    "d96_s197_b256_h12_full": {SQUARE: 179.3, SINGLE: 159.7},
}
# The same for few work tiles, as a tenth of a graph of ten calls; in order: 128 rows, then 64x128 and 64x64.
MEASURED_OF_TEN = {
    "d64_s64_b64_h16_full": (20.3, 16.2, 10.9),
    "d64_s64_b1_h16_full": (5.1, 4.2, 3.6),
    "d64_s128_b8_h16_full": (5.6, 6.0, 6.3),
    "d64_s256_b8_h16_full": (9.7, 12.5, 13.5),
    "d64_s512_b1_h16_full": (8.7, 7.0, 7.5),
    "d64_s1024_b1_h4_full": (13.2, 10.1, 11.2),
    "d64_s1024_b1_h16_full": (13.4, 18.0, 20.3),
    "d96_s256_b1_h16_full": (7.2, 5.8, 5.7),
    "d96_s1024_b1_h4_full": (14.7, 11.4, 12.4),
    "d128_s64_b1_h4_full": (6.2, 5.0, 3.9),
    "d128_s64_b64_h16_full": (27.0, 22.5, 19.7),
    "d128_s128_b8_h4_full": (6.7, 5.4, 4.9),
    "d128_s256_b1_h16_full": (8.1, 6.4, 6.1),
    "d128_s256_b8_h16_full": (12.9, 16.1, 17.0),
    "d128_s512_b1_h16_full": (10.9, 8.9, 9.1),
    "d128_s512_b8_h16_full": (34.8, 47.4, 54.8),
    "d128_s1024_b1_h4_full": (16.3, 12.8, 13.5),
    "d128_s1024_b1_h16_full": (17.4, 23.0, 25.0),
    "d128_s1024_b8_h4_full": (30.3, 42.5, 46.7),
    "d128_s512_b1_h16_causal": (12.0, 9.2, 9.3),
    "d128_s512_b8_h16_causal": (29.7, 39.2, 45.4),
    "d128_s1024_b8_h4_causal": (22.1, 30.4, 32.6),
    "d256_s256_b1_h16_full": (10.6, 8.3),
    "d256_s1024_b1_h4_full": (24.1, 19.1),
}
# The same in another run; in order: 128x128, 128x64, 64x128 and 64x64.
MEASURED_OF_FOUR = {
    "d128_s128_b8_h16_causal": (8.43, 8.05, 7.96, 6.87),
    "d128_s128_b8_h16_full": (7.82, 6.53, 7.27, 7.04),
    "d128_s128_b64_h16_causal": (39.32, 37.42, 52.78, 44.54),
    "d128_s512_b8_h4_causal": (12.24, 12.14, 11.37, 10.95),
}


def estimates(problem: Problem) -> dict[str, float]:
    """Returns the estimated nanoseconds of a short forward with each tile whose speed is known."""
    kind, values = ProblemKind.of(problem), sizes(problem, SMS)
    return {
        f"{row.tile.tile_m}x{row.tile.tile_n}": tile_time.whole_time(kind, row.tile, speed).evaluate(values) / SMS
        for row in tiles.sm90_rows(kind)
        if (speed := tile_time.speed_of(kind, row)) is not None
    }


def tiles_of(name: str, num_sms: int = SMS) -> list[str]:
    """Returns the tiles of the sm90 plans of a forward, the first to try first."""
    builds = [plan.build for plan in planner.plans(parse(name).problem("forward"), "sm_90a", num_sms)]
    return [f"{build.tile_m}x{build.tile_n}" for build in builds if build.family == "sm90"]


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ("s1_b1_h1_full", FEWEST),
        ("s128_b256_h12_full", SQUARE),
        ("s192_b256_h12_full", LONG),  # no query is padding
        ("s193_b256_h12_full", SINGLE),
        ("s197_b256_h12_full", SINGLE),
        ("s197_b1_h1_full", FEW),
        ("s208_b256_h12_full", SINGLE),
        ("s209_b256_h12_full", SQUARE),  # a second tile of 208 keys would be all padding
        ("s256_b256_h12_full", SQUARE),
        ("s384_b256_h12_full", LONG),  # two whole tiles of 192 queries, three whole ones of 128 keys
        ("s512_b8_h12_full", SQUARE),  # both are three rounds of work tiles
        ("s512_b64_h32_full", LONG),  # many rounds: 192 queries a round need fewer
        ("s197_b256_h12_causal", SQUARE),  # half of the keys of the first queries are never visited
        ("s512_b64_h32_causal", SQUARE),
        ("s1024_b32_h32_full", LONG),
        ("s1024_b32_h32_causal", SQUARE),
        ("s1024_b1_h12_full", SQUARE),  # one round
        ("s2048_b1_h8_full", SQUARE),  # 88 or 128 work tiles on 132 multiprocessors
        ("s2048_b16_h32_full", LONG),
        ("s2048_b16_h32_causal", LONG),  # less than a twentieth would be saved
        ("s2049_b1_h8_full", LONG),
        ("s197_b256_h12k4_full", SINGLE),
        ("s197_b256_h12_full_softcap30", LONG),  # speeds with score terms are not known
        ("s197_b256_h12_causal_window64", SQUARE),
        ("n197,197_h512_full", LONG),  # variable lengths
    ],
)
def test_the_tile_of_d64(sizes: str, tile: str) -> None:
    assert tiles_of(f"bf16_d64_{sizes}")[0] == tile
    assert tiles_of(f"f16_d64_{sizes}")[0] == tile


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ("s128_b256_h12_full", SQUARE),
        ("s197_b256_h12_full", SINGLE),
        ("s209_b256_h12_full", SQUARE),
        ("s512_b8_h12_full", SQUARE),
        ("s513_b8_h12_full", LONG_96),
        ("s1024_b1_h4_full", FEW),
        ("s2048_b16_h16_full", LONG_96),
        ("s2048_b16_h16_causal", "192x96"),
        ("s4095_b4_h16_causal", "192x96"),
        ("s4096_b4_h16_causal", LONG_96),
        ("s8192_b4_h16_full", LONG_96),
        ("s197_b256_h12_full_sinks", LONG_96),
        ("s197_b256_h12_causal_window64", "192x96"),
    ],
)
def test_the_tile_of_d96(sizes: str, tile: str) -> None:
    assert tiles_of(f"bf16_d96_{sizes}")[0] == tile


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ("s64_b64_h16_full", FEWEST),
        ("s65_b8_h16_full", HALF),
        ("s128_b8_h16_full", HALF),
        ("s128_b8_h16k4_full", HALF),
        ("s128_b64_h16_causal", HALF),
        ("q128_s64_b64_h16_full", FEWEST),
        ("s129_b64_h16_full", FEWEST),  # of a second tile of 128 queries, 127 would be padding
        ("s128_b8_h16_causal", FEWEST),
        ("s128_b8_h17_causal", HALF),  # more than two blocks of 64 queries for each multiprocessor
        ("s128_b8_h8_full", FEWEST),
        ("s128_b8_h9_full", HALF),
        ("s128_b8_h16_full_softcap30", SQUARE),
        ("n128,128_h64_full", SQUARE),
    ],
)
def test_the_tile_of_one_tile_of_d128(sizes: str, tile: str) -> None:
    assert tiles_of(f"bf16_d128_{sizes}")[0] == tile
    assert tiles_of(f"f16_d128_{sizes}")[0] == tile


@pytest.mark.parametrize("dims", ["d128", "d192v64", "d256"])
def test_other_head_dims_keep_the_order_of_their_table(dims: str) -> None:
    problem = parse(f"bf16_{dims}_s197_b256_h12_full").problem("forward")
    assert tiles_of(f"bf16_{dims}_s197_b256_h12_full") == [
        f"{tile.tile_m}x{tile.tile_n}"
        for tile in tiles.sm90_tiles(problem)
        if not tile.variant and (tile.tile_m, tile.tile_n) != (128, 208)
    ]


def test_the_other_tiles_remain_to_fall_back_to() -> None:
    assert tiles_of("bf16_d64_s197_b256_h12_full") == [SINGLE, LONG, SQUARE, FEW, FEWEST]
    assert tiles_of("bf16_d64_s209_b256_h12_full") == [SQUARE, LONG, FEW, FEWEST]
    assert tiles_of("bf16_d64_s8192_b4_h32_full") == [LONG, SQUARE, FEW, FEWEST]


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
    assert {kernel_of(plan.build).lengths for plan in planner.plans(backward, "sm_90a", SMS, any_length=True)} == {
        "any"
    }


def test_fewer_multiprocessors_are_more_rounds() -> None:
    """288 tiles of 192 queries or 384 of 128: as many rounds on 132 multiprocessors, but not on 96."""
    assert [tiles_of("bf16_d64_s512_b8_h12_full", sms)[0] for sms in (132, 96)] == [SQUARE, LONG]


def test_the_estimate_in_numbers() -> None:
    """6144 tiles of 128 queries are 47 rounds; each work tile visits 2 tiles of 128 keys."""
    problem = parse("bf16_d64_s197_b256_h12_full").problem("forward")
    assert estimates(problem)[SQUARE] == 7100 + 47 * (860 + 2 * 1120)
    causal = parse("bf16_d64_s197_b256_h12_causal").problem("forward")
    assert estimates(causal)[SQUARE] == pytest.approx(7100 + 3072 * (2 * (860 + 420) + 3 * 1120) / SMS)
    one = parse("bf16_d64_s197_b1_h1_causal").problem("forward")
    assert estimates(one)[SQUARE] == 7100 + 860 + 420 + 2 * 1120


@pytest.mark.parametrize(("name", "measured"), MEASURED.items())
def test_estimates_reproduce_what_was_measured(name: str, measured: dict[str, float]) -> None:
    """Each within a few percent; the first tile of the plans is the fastest, or within the least gain of it."""
    problem = parse(f"bf16_{name}").problem("forward")
    estimated = {tile: time for tile, time in estimates(problem).items() if tile in measured}
    for tile, time in measured.items():
        assert estimated[tile] / 1000 == pytest.approx(time, rel=0.07), tile
    assert min(estimated, key=estimated.__getitem__) == min(measured, key=measured.__getitem__)
    assert tiles_of(f"bf16_{name}")[0] == min(measured, key=measured.__getitem__)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        ("s320_b8_h4_full", (128, 64)),  # 8.5 us of ten calls a graph, 10.4 with 128 keys
        ("s768_b1_h16_full", (128, 64)),  # 13.3, 13.8
        ("s1024_b1_h16_full", (128, 128)),
        ("s384_b64_h4_full", (128, 128)),  # 43.3 in six rounds, 47.0 with 64 keys
        ("s512_b8_h4_causal", (64, 64)),
        ("q128_s8192_b1_h8_full", (64, 128)),  # in parts
    ],
)
def test_one_round_of_query_tiles_of_d128(sizes: str, tile: tuple[int, int]) -> None:
    build = planner.plan(parse(f"bf16_d128_{sizes}").problem("forward"), "sm_90a", SMS).build
    assert (build.tile_m, build.tile_n) == tile


@pytest.mark.parametrize(("name", "measured"), MEASURED_OF_TEN.items())
def test_few_work_tiles_have_few_rows(name: str, measured: tuple[float, ...]) -> None:
    """The chosen tile is at most 6 % slower than the fastest that was measured."""
    chosen, rows = tiles_of(f"bf16_{name}")[0], ("128x64",) if name.startswith("d256") else (SQUARE, LONG)
    found = {FEW: measured[1], FEWEST: measured[-1]} | dict.fromkeys(rows, measured[0])
    assert found[chosen] <= 1.06 * min(measured)


@pytest.mark.parametrize(("name", "measured"), MEASURED_OF_FOUR.items())
def test_the_fastest_of_four_is_chosen(name: str, measured: tuple[float, ...]) -> None:
    found = dict(zip((SQUARE, HALF, FEW, FEWEST), measured, strict=True))
    assert tiles_of(f"bf16_{name}")[0] == min(found, key=found.__getitem__)


def test_explain_says_why() -> None:
    plan = planner.plan(parse("bf16_d64_s197_b256_h12_full").problem("forward"), "sm_90a", SMS)
    assert plan.symbol == "fwd_sm90_bf16_d64_full_128x208"
    assert (
        "tile 128x208 because the estimated time of these short sequences is 71% of that with 192x128, which is faster "
        "for long ones"
    ) in plan.explain()
    half = planner.plan(parse("bf16_d128_s128_b8_h16_full").problem("forward"), "sm_90a", SMS)
    assert "tile 128x64 because it was measured to be faster for such short sequences" in half.explain()
    usual = planner.plan(parse("bf16_d64_s2048_b16_h32_full").problem("forward"), "sm_90a", SMS)
    assert "estimated" not in usual.explain()


def test_explain_gives_no_reason_for_a_tile_that_saves_too_little() -> None:
    """The plans after the first are for kernels that spill; the estimate did not choose them."""
    problem = parse("bf16_d64_s512_b64_h32_full").problem("forward")
    tried = [plan for plan in planner.plans(problem, "sm_90a", SMS) if plan.build.family == "sm90"]
    assert [plan.build.tile_m for plan in tried] == [192, 128, 64, 64]
    assert all("estimated" not in plan.explain() for plan in tried)


def test_an_empty_problem_has_no_estimate() -> None:
    for empty in ("q0_s197_b1_h1", "q197_s0_b1_h1"):
        problem = parse(f"bf16_d64_{empty}_full").problem("forward")
        rule = tile_time.is_short(ProblemKind.of(problem))
        assert rule != NEVER
        assert not rule.evaluate(sizes(problem, SMS))


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("bf16_d64_q512_s8192_b1_h8k1_causal_br_sinks", "split_kv"),
        ("bf16_d256_q512_s8192_b1_h4k2_causal_br_softcap50", "split_kv"),
        ("bf16_d64_q512_s8192_b1_h8_full_alibi", "split_kv"),
        ("f16_d128_q300_s4096_b1_h4_full_bias", "split_kv"),
        ("bf16_d128_q512_s8192_b1_h4_full_dropout0.1", ""),  # dropout scales the output after the parts are joined
        ("bf16_d128_q512_s8192_b1_h4_causal_br_window4096", ""),
    ],
)
def test_few_query_tiles_with_score_terms_are_in_parts(name: str, variant: str) -> None:
    assert planner.plan(parse(name).problem("forward"), "sm_90a", SMS).build.variant == variant


def test_short_sequences_beside_a_long_one_are_few_query_tiles() -> None:
    """Of 128 rows: the 562 queries of all sequences are at most 8 tiles of a head, not 4 for each sequence."""
    lengths = parse("bf16_d128_n512x8192,10x100,20x30,20x30_h8_full").problem("forward")
    equal = parse("bf16_d128_n512x8192,512x8192,512x8192,512x8192_h8_full").problem("forward")
    variants = [planner.plan(problem, "sm_90a", SMS).build.variant for problem in (lengths, equal)]
    assert variants == ["split_kv", ""]
