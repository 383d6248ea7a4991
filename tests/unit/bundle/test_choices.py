"""Tests of the rules by which a C library chooses among all kernels of a kind: as the planner, size by size."""

from __future__ import annotations

import functools
import random

import pytest

from cutlass_py_attn.bundle.dispatch import ALWAYS, order_key, preferred_when
from cutlass_py_attn.bundle.manifest import names_of
from cutlass_py_attn.bundle.rules import rules_of
from cutlass_py_attn.kernels.problem_kind import ProblemKind
from cutlass_py_attn.kernels.sm90_backward import kernel as sm90_backward
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_family.row import NEVER
from cutlass_py_attn.kernels.sm90_family.tiles import sm90_rows, sm90_tiles
from cutlass_py_attn.launch import tile_order
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import Expr
from cutlass_py_attn.launch.variants import PER_HEAD, QUERY_HEADS, STANDARD
from cutlass_py_attn.plan import resources
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support.bundles import problem_of

ARCH = "sm_90a"
LENGTHS = (1, 63, 64, 65, 100, 128, 129, 200, 256, 257, 384, 500, 512, 513, 700, 1024, 1500, 2048, 3000, 4096, 9000)
SHORT_LENGTHS = (1, 64, 65, 100, 128, 129, 197, 208, 209, 256, 300, 384, 500, 512, 700, 768, 1024, 1500, 2048, 2049)
MASKS = (Full(), Causal(), CausalBottomRight(), Window(100, 30), Window(1000, 0))
DIMS = ((64, 64), (32, 64), (96, 96), (128, 128), (96, 64))


def kernels(problem: Problem) -> list[Build]:
    """The kernels of all rows of the problem's table that can be built, with whole query tiles and in parts."""
    kind = ProblemKind.of(problem)
    tiles = [row.tile_for(kind) for row in sm90_rows(kind)]
    if not sm90_choice.split_kv_objection(problem):
        tiles += [sm90_choice.in_parts(kind, row) for row in sm90_rows(kind) if row.tile.variant == STANDARD]
    built = (build_for(problem, ARCH, tile, "sm90") for tile in dict.fromkeys(tiles) if ARCH not in tile.not_on)
    return [
        build for build, refused in built
        if not (refused or resources.refusals(build, architecture(ARCH)))
    ]  # fmt: skip


@functools.cache
def preferences(builds: tuple[Build, ...]) -> dict[Build, Expr]:
    """The rule of each kernel of a library with these."""
    return {build: preferred_when(build, builds) for build in builds}


def chosen(problem: Problem, builds: list[Build], num_sms: int) -> Build | None:
    """The kernel that a library with these chooses: the first of those that it prefers."""
    ordered = sorted(builds, key=order_key)
    rules = preferences(tuple(ordered))
    preferred = [build for build in ordered if rules[build] != ALWAYS]
    for build in (*preferred, *(build for build in ordered if build not in preferred)):
        of_build = rules_of(problem, build)
        names = names_of(of_build, num_sms)
        is_taken = all(rule.evaluate(names) for rule, _ in of_build.conditions)
        if is_taken and rules[build].evaluate(names):
            return build
    return None


def planned(problem: Problem, builds: list[Build], num_sms: int) -> Build | None:
    """The planner's first of these kernels."""
    tiles = sm90_choice.applicable(problem, num_sms)
    found = (build_for(problem, ARCH, tile, "sm90")[0] for tile in tiles)
    return next((build for build in found if build in builds), None)


def drawn(draw: random.Random) -> Problem:
    """A backward without score terms, of a few or of many work tiles."""
    heads, group = draw.choice((1, 2, 3, 8)), draw.choice((1, 1, 2, 4))
    mask, dims = draw.choice(MASKS), draw.choice(DIMS)
    queries = draw.choice(LENGTHS)
    keys = queries if draw.random() < 0.5 else draw.choice(LENGTHS)
    batch = draw.choice((1, 2, 5, 16, 64))
    shape = Shape(batch, queries, keys, heads * group, *dims, heads)
    if draw.random() < 0.2:
        fewer = draw.random() * (batch - 1)  # sequences, as if some were shorter
        tokens = queries * batch - int(queries * fewer), keys * batch - int(keys * fewer)
        shape = Shape(batch, queries, keys, heads * group, *dims, heads, tokens)
    deterministic = draw.random() < 0.1
    return Problem.dense("backward", shape, "bfloat16", mask).replace(deterministic=deterministic)


@pytest.mark.parametrize("seed", range(4))
def test_a_library_with_all_kernels_chooses_the_planner_s(seed: int) -> None:
    draw, seen = random.Random(seed), set()
    for _ in range(150):
        problem, num_sms = drawn(draw), draw.choice((132, 78, 16))
        builds = kernels(problem)
        wanted = planned(problem, builds, num_sms)
        assert chosen(problem, builds, num_sms) == wanted, (problem, num_sms)
        if wanted is not None:
            seen.add((wanted.variant, wanted.tile_n))
    assert {PER_HEAD, QUERY_HEADS} <= {variant for variant, _ in seen}
    assert ("", 64) in seen


def drawn_forward(draw: random.Random, dims: tuple[int, int]) -> Problem:
    """A forward of short sequences, or of few query tiles, in most cases without score terms."""
    heads, group = draw.choice((1, 2, 3, 8, 16)), draw.choice((1, 1, 2, 4))
    queries = draw.choice(SHORT_LENGTHS if draw.random() < 0.8 else LENGTHS)
    keys = queries if draw.random() < 0.5 else draw.choice((*SHORT_LENGTHS, *LENGTHS, 16000))
    batch = draw.choice((1, 1, 2, 5, 16, 64, 256))
    shape = Shape(batch, queries, keys, heads * group, *dims, heads)
    mask = draw.choice((Full(), Causal(), CausalBottomRight(), Window(None, 40), Window(1000, 0)))
    problem = Problem.dense("forward", shape, draw.choice(("bfloat16", "float16")), mask)
    return problem.replace(softcap=5.0) if draw.random() < 0.1 else problem


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128)])
def test_a_library_with_all_forwards_chooses_the_planner_s(dims: tuple[int, int]) -> None:
    """Those for short sequences and those whose blocks share the keys of few query tiles too."""
    draw, seen = random.Random(sum(dims)), set()
    for _ in range(150):
        problem, num_sms = drawn_forward(draw, dims), draw.choice((132, 78, 16))
        builds = kernels(problem)
        wanted = planned(problem, builds, num_sms)
        assert wanted is not None
        found = chosen(problem, builds, num_sms)
        assert found == wanted, (problem, num_sms)
        seen.add((wanted.variant, wanted.tile_m, wanted.tile_n))
    tiles = {(tile.tile_m, tile.tile_n) for tile in sm90_tiles(problem)}
    assert len(seen) > (1 if dims == (192, 128) else len(tiles) - 2)


@pytest.mark.parametrize("mask", MASKS)
def test_every_query_tile_sees_a_key_where_the_rule_says_so(mask: Mask) -> None:
    seen = set()
    for queries in (1, 64, 65, 130, 300, 1400):
        for keys in (1, 30, 100, 129, 260, 1400):
            band, tile_m = mask.band(queries, keys), 64
            spans = (
                (tile_order.key_tile_start(band, tile, tile_m, 128), tile_order.key_tile_end(band, tile, tile_m, 128))
                for tile in range(-(-queries // tile_m))
            )
            left, right = mask.edges
            names = {"num_queries": queries, "num_keys": keys, "window_left": left, "window_right": right}
            names["bottom_right"] = int(mask.bottom_right)
            wanted = all(start < end for start, end in spans)
            assert bool(sm90_backward.sees_keys(mask.form, tile_m).evaluate(names)) == wanted, (queries, keys)
            seen.add(wanted)
    assert seen == ({True} if type(mask) in (Full, Causal) else {True, False})


def test_kernels_of_few_work_tiles_are_preferred_for_these() -> None:
    """With score terms, which were not measured, never."""
    few = next(build for build in kernels(problem_of("backward", "bf16_d128_s512_b1_h4_full")) if build.tile_n == 64)
    assert preferred_when(few) not in (ALWAYS, NEVER)
    terms = kernels(problem_of("backward", "bf16_d128_s512_b1_h4_full_softcap30"))
    assert {preferred_when(build) for build in terms if build.tile_n == 64 and build.variant == ""} == {NEVER}
