"""Tests of kernels/sm90_family/row.py: a row is one whole decision, and a change of one changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.kernels.sm90_family import tile_time, tiles
from cutlass_py_attn.kernels.sm90_family.row import NEVER, Row, Speed
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.expressions import ONE
from cutlass_py_attn.launch.tile_config import TileConfig, tile_refusals
from cutlass_py_attn.launch.variants import WITH_OPTIONS
from cutlass_py_attn.plan import planner, resources
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from tests.support.listed_plans import with_ranges

ARCH = "sm_90a"
WORDS = {"full": "full", "causal": "causal", "local": "causal_window100"}  # of the mask of each form
SHORT = "bf16_d64_s197_b256_h12_full"


def rows() -> dict[Row, list[tuple[str, int]]]:
    """Every row with its tables: the name of each, and the widest head dim that it serves."""
    places: dict[Row, list[tuple[str, int]]] = {}
    for name, table in tiles.SM90.items():
        for head_dim, listed in table.items():
            for row in listed:
                places.setdefault(row, []).append((name, head_dim))
    return places


def problems_of(name: str, head_dim: int, row: Row) -> Iterator[Problem]:
    """Problems whose table has the row, some of which its kernel body computes."""
    direction, _, rest = name.partition(" ")
    dtype = "e4m3" if rest in ("e4m3", "e4m3 local") else "bf16"
    cache = "_kv8" if "cache" in rest else ""
    terms = {"score_mod": ("_alibi", "_softcap5_alibi"), "e4m3 cache terms": ("_alibi", ""), "bias": ("_bias",)}
    value = {"mla": "576v512", "score_rows": "192v128"}.get(rest, str(head_dim))
    has_ranges = rest == "ranges"
    for mask in (WORDS[form] for form in row.masks):
        for term in terms.get(rest, ("", "_deterministic") if direction == "backward" else ("",)):
            for heads in ("h4k1", "h4k2") if value != "576v512" else ("h4k1",):
                mla = "_mla" if value == "576v512" else ""
                problem = parse(f"{dtype}_d{value}_s512_b2_{heads}_{mask}{term}{cache}{mla}").problem(direction)
                yield with_ranges(problem) if has_ranges else problem


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{places[0]} {row.text}") for row, places in rows().items()])
def test_every_row_builds_and_states_its_options_and_its_speed(row: Row) -> None:
    """The options are those that its kernel bodies have; a row without a speed says why."""
    places = rows()[row]
    directions = {name.split()[0] for name, _ in places}
    assert tile_refusals(row.tile) == []
    assert {(row.tile.options is None) == (row.tile.variant not in WITH_OPTIONS[it]) for it in directions} == {True}
    assert row.speed
    assert isinstance(row.speed, str) or set(row.speed) <= set(tile_time.SPEED_DIMS)
    builds = []
    for name, head_dim in places:
        for problem in problems_of(name, head_dim, row):
            kind = ProblemKind.of(problem)
            if row not in tiles.sm90_rows(kind):  # another table has problems of this mask
                continue
            build, refused = build_for(problem, ARCH, row.tile_for(kind), "sm90")
            if not (refused or resources.refusals(build, architecture(ARCH))):
                builds.append(build)
    assert builds
    assert {name for build in builds for name in build.options} == {*(row.tile.options or ())}


def test_a_row_that_says_no_options_is_refused() -> None:
    with pytest.raises(ValueError, match="must say its options; write -plain for none"):
        Row("128x112x12:2", "it was not measured")
    assert Row("128x112x12:2-plain", "it was not measured").tile.options == ()
    assert Row("64x64x12:2+wide", "its body has no options").tile.options is None


def test_a_row_in_front_has_its_options_and_leaves_the_choice_for_short_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are compared with the first of them whose speed is known."""
    new = Row("192x96x16:2-speculative", "it was measured in long sequences alone")
    monkeypatch.setitem(tiles.SM90["forward"], 64, (new, *tiles.SM90["forward"][64]))
    tile_time._choice.cache_clear()

    def first(name: str) -> str:
        return str(TileConfig.of(planner.plan_forward(parse(name).problem("forward"), ARCH, 132).build))

    assert first("bf16_d64_s8192_b4_h32_full") == "192x96x16:2,0@5-speculative"
    assert first(SHORT) == "128x208x12:2,0@5-plain"
    assert first("bf16_d64_s384_b256_h12_full") == "192x96x16:2,0@5-speculative", "nothing saves enough"
    assert first("bf16_d64_q512_s8192_b1_h8_full").endswith("+split_kv-speculative")


@pytest.mark.parametrize(
    ("name", "tile", "options"),
    [
        ("bf16_d128_s8192_b4_h16_full", "128x128x12:2", ("speculative", "shared_end")),  # a row
        ("bf16_d128_s8192_b4_h16_causal", "128x128x12:3", ("speculative",)),  # a row with other stages
        ("bf16_d128_s8192_b4_h16_causal", "128x112x12:2", ("speculative",)),  # that of the first for any lengths
        ("bf16_d64_s8192_b4_h16_causal", "192x96x16:2", ("speculative", "halves")),
        ("bf16_d64_s8192_b4_h16_causal", "192x112x16:2", ("speculative",)),  # 112 keys have no halves
        ("bf16_d64_s8192_b4_h16_causal", "64x64x8:2", ()),  # a row without options
        ("bf16_d64_s8192_b4_h16_causal", "192x96x16:2-plain", ()),
        ("bf16_d64_s8192_b4_h16_causal", "192x96x16:2-speculative", ("speculative",)),
        ("bf16_d64_s8192_b4_h16_causal_alibi", "128x128x12:2", ()),
        ("bf16_d128_s8192_b4_h16_causal_window1024", "128x112x12:2", ("speculative", "bits")),
        ("bf16_d128_q512_s8192_b1_h4_full", "128x128x12:2+split_kv", ("speculative",)),
        ("bf16_d128_s512_b4_h16_causal", "128x128x12:2+multicast", ("speculative",)),
        ("e4m3_d128_s8192_b4_h16_full", "64x128x8:2+e4m3", ("speculative",)),
    ],
)
def test_a_tile_of_a_caller_has_the_options_of_the_nearest_row(name: str, tile: str, options: tuple[str, ...]) -> None:
    build = planner.plan_with_tile(parse(name).problem("forward"), ARCH, TileConfig.parse(tile)).build
    assert build.options == options


def test_the_planner_s_tile_without_its_options_names_the_planner_s_kernel() -> None:
    """So a candidate is compared with what it would replace."""
    for name in (SHORT, "bf16_d128_s8192_b4_h16_full", "f16_d64_s8192_b4_h32_causal", "bf16_d96_s2048_b4_h16_causal"):
        problem = parse(name).problem("forward")
        for plan in planner.plans(problem, ARCH):
            tile = TileConfig.of(plan.build)
            if plan.build.family == "sm90":
                left_open = planner.plan_with_tile(problem, ARCH, replace(tile, options=None))
                assert left_open.build == plan.build
                assert planner.plan_with_tile(problem, ARCH, TileConfig.parse(str(tile))).build == plan.build


def test_rows_for_some_lengths_are_those_with_a_rule_or_few_query_rows() -> None:
    for row, ((name, head_dim), *_) in rows().items():
        problem = next(problems_of(name, head_dim, row))
        when = row.when_for(ProblemKind.of(problem))
        assert row.any_length or when != ONE or row.tile.tile_m == 64, row.text
        assert when != NEVER or not row.any_length


def test_speeds_hold_for_the_widest_head_dim() -> None:
    row = Row("128x128x12:2-plain", {96: Speed(930, 1350), 128: Speed(2000, 1370)})
    for dims, speed in (("d96", Speed(930, 1350)), ("d128v64", Speed(2000, 1370)), ("d64", None), ("d192v128", None)):
        kind = ProblemKind.of(parse(f"bf16_{dims}_s512_b1_h1_full").problem("forward"))
        assert tile_time.speed_of(kind, row) == speed
