"""Few query tiles of many keys in C libraries: variant split_kv is exported, and preferred where the planner has it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cutlass_py_attn import export_bundle, export_library
from cutlass_py_attn.bundle.dispatch import order_key, preferred_when
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_family.row import NEVER
from cutlass_py_attn.kernels.sm90_family.tiles import sm90_tiles
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import MULTICAST, SPLIT_KV, STANDARD
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from tests.support import fakes

FEW = "bf16_d128_q512_s8192_b1_h4_causal_br"
DIMS, MASKS = ("d64", "d96", "d128", "d256", "d64v128"), ("full", "causal", "causal_br")
SIZES = ("q60_s16000", "q500_s1100", "q512_s8192", "s2048", "s4096", "q4096_s1000")
HEADS = ("b1_h1", "b1_h4", "b2_h8k2")
PACKED = ("n512x8192,10x100,20x30_h4", "n500x3000,400x2000_h4", "n64x8192,64x8000,3x9000_h8k2", "n2000x2000_h4")


def problem_of(text: str) -> Problem:
    return parse(text).problem("forward")


def in_parts(problem: Problem) -> dict[Build, TileConfig]:
    """The kernels of variant split_kv for a problem, whether they are faster or not, and the tile of each."""
    found = {}
    for tile in sm90_tiles(problem):
        if tile.variant == STANDARD and sm90_choice.applies(problem, tile, 132):
            split = TileConfig(tile.tile_m, tile.tile_n, tile.warps, tile.query_stages, variant=SPLIT_KV)
            build, refused = build_for(problem, "sm_90a", split, "sm90")
            if not refused:
                found[build] = split
    return found


def is_preferred(rule: Expr, problem: Problem, build: Build, num_sms: int) -> bool:
    """Whether the rule of the build's kernel is 1 for a problem."""
    numbers = {"window_right": problem.mask.edges[1], "bottom_right": int(problem.mask.bottom_right)}
    return bool(rule.evaluate(launch_rules.values(problem, build, num_sms) | numbers))


def planned(problem: Problem, num_sms: int) -> tuple[set[tuple[int, int]], TileConfig]:
    """The tiles that the planner has in parts, and the one that it has without."""
    tiles = sm90_choice.applicable(problem, num_sms)
    parts = {(tile.tile_m, tile.tile_n) for tile in tiles if tile.variant == SPLIT_KV}
    return parts, next(tile for tile in tiles if tile.variant != SPLIT_KV)


def cases(dims: str, mask: str) -> list[Problem]:
    texts = [f"{sizes}_{heads}_{mask}" for sizes, heads in itertools.product(SIZES, HEADS)]
    texts += [f"{sizes}_{mask}{pages}" for sizes, pages in itertools.product(PACKED, ("", "_paged16"))]
    texts += [f"{sizes}_b1_h4_{mask}_paged64" for sizes in SIZES]
    return [problem_of(f"bf16_{dims}_{text}") for text in texts]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS)
def test_kernels_in_parts_are_preferred_where_the_planner_has_them(dims: str, mask: str) -> None:
    """The rule compares with the tiles that a library has. The planner may have one of 64 rows for short sequences,
    which is faster than parts of a few sizes more."""
    rules: dict[Build, str] = {}
    seen = set()
    for problem, num_sms in itertools.product(cases(dims, mask), (132, 78)):
        parts, usual = planned(problem, num_sms)
        for build, tile in in_parts(problem).items():
            rule = rules.setdefault(build, preferred_when(build))
            found, wanted = is_preferred(rule, problem, build, num_sms), (tile.tile_m, tile.tile_n) in parts
            if not (found and usual.tile_m == 64):
                assert found == wanted, (problem, num_sms, str(tile))
            seen.add(found)
    assert seen == {True, False}


def test_short_sequences_at_which_a_library_alone_has_parts() -> None:
    """The planner has 64 x 128 whole; of a library without that kernel, 128 x 128 is slower than its parts."""
    problem = problem_of("bf16_d128_q500_s1100_b1_h4_full")
    build = planner.plan(problem_of("bf16_d128_q512_s8192_b1_h4_full"), "sm_90a").build
    parts, usual = planned(problem, 78)
    assert (build.tile_m, build.tile_n) == (128, 128)
    assert ((128, 128) in parts, usual.tile_m) == (False, 64)
    assert is_preferred(preferred_when(build), problem, build, 78)
    short, _ = build_for(problem, "sm_90a", usual, "sm90")
    assert not is_preferred(preferred_when(build, [short]), problem, build, 78)


def test_head_dims_without_a_known_speed_are_never_in_parts() -> None:
    """Of the tile for long sequences, whose query tiles would be whole."""
    problem = problem_of("bf16_d192v128_q512_s8192_b1_h4_full")
    build, refused = build_for(problem, "sm_90a", TileConfig.parse("128x64x12:2+split_kv"), "sm90")
    assert refused == []
    assert planned(problem, 132)[0] == set()
    assert preferred_when(build) == NEVER


def test_a_library_has_both_kernels_and_a_bundle_one(tmp_path: Path) -> None:
    """The problem of a bundle has calls of any lengths with one kernel."""
    problem = problem_of(FEW)
    library = export_library(tmp_path / "library", [problem], ["sm_90a"], kernels=fakes.artifact)
    standard, split = library.plans("forward")
    assert (standard.build.variant, split.build.variant) == (STANDARD, SPLIT_KV)
    assert split == planner.plan(problem, "sm_90a")
    (item,) = library.manifest["problems"]
    assert [target["preferred_when"] for target in item["targets"]] == ["1", str(preferred_when(split.build))]
    assert [launch["role"] for launch in item["targets"][1]["launches"]] == ["main", "combine"]
    bundle = export_bundle(tmp_path / "bundle", [problem], ["sm_90a"], kernels=fakes.artifact)
    assert [plan.build for plan in bundle.plans("forward")] == [standard.build]


def test_few_long_sequences_have_parts_before_clusters(tmp_path: Path) -> None:
    """A library has each variant that the planner has for the lengths of a problem, and tries parts first."""
    problem = problem_of("bf16_d128_s4096_b1_h2_causal")
    library = export_library(tmp_path / "library", [problem], ["sm_90a"], kernels=fakes.artifact)
    builds = [plan.build for plan in library.plans("forward")]
    assert [build.variant for build in builds] == [STANDARD, SPLIT_KV, MULTICAST]
    assert min(builds, key=order_key).variant == SPLIT_KV
    names = {"num_queries": 4096, "num_keys": 4096}
    assert preferred_when(builds[2]).evaluate(names) == 1
    assert is_preferred(preferred_when(builds[1]), problem, builds[1], 132)


@pytest.mark.parametrize("sizes", ["b1_h4_full", "b1_h8k2_causal_br", "b1_h4_causal_paged64"])
@pytest.mark.parametrize("dims", ["d64", "d128", "d256"])
def test_of_several_tiles_in_parts_the_planner_s_is_preferred(dims: str, sizes: str) -> None:
    """A library with the kernels of all of them tries the planner's first, or one of the same estimated time."""
    seen = set()
    for lengths, num_sms in itertools.product(("q60_s16000", "q512_s9000", "q700_s3000", "q1500_s5000"), (132, 78)):
        problem = problem_of(f"bf16_{dims}_{lengths}_{sizes}")
        builds = in_parts(problem)
        preferred = [
            (build.tile_m, build.tile_n)
            for build in sorted(builds, key=order_key)
            if is_preferred(preferred_when(build, [*builds]), problem, build, num_sms)
        ]
        tiles = sm90_choice.applicable(problem, num_sms)
        wanted = [(tile.tile_m, tile.tile_n) for tile in tiles if tile.variant == SPLIT_KV][:1]
        assert preferred == wanted
        seen |= {*wanted}
    assert len(seen) > 1
