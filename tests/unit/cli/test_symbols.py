"""Tests of symbols: what any plan names is listed, built and inspected, and what calls of any size need is built."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bundle import rules
from cutlass_py_attn.cli import artifacts, catalogue
from cutlass_py_attn.cli.choices import Choices
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.cli.selection import Selection
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec, parse, parse_mask
from cutlass_py_attn.problem.tensors import Shape
from tests.support import fakes
from tests.support.drawn_problems import drawn

SEED: Final = 38
DRAWN: Final = 260
# Kernels that were refused by the symbol: one block per head of 64 queries, and the tile of long causal forwards.
REFUSED: Final = (
    Problem.dense("backward", Shape(2, 64, 64, 8, 64, 64, 2), "float16", Causal()),
    Problem.dense("backward", Shape(2, 64, 64, 8, 32, 32), "bfloat16", Causal()),
    Problem.dense("forward", Shape(1, 4096, 4096, 8, 96, 96), "bfloat16", Causal()),
    parse("f16_d96_q300_s200_b2_h4k2_causal_rangesb1_sinks").problem("forward"),
    parse("bf16_d40_q300_s200_b2_h4_full_rangesbh").problem("backward"),
)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up artifacts in place of compiled ones."""
    monkeypatch.setattr(artifacts, "compiler", lambda: lambda build: (fakes.artifact(build), "0.5 s"))
    monkeypatch.setattr(sass, "tool", lambda: None)


def invoke(*arguments: object) -> str:
    """Runs `cutlass-py-attn`, which must succeed, and returns what it prints."""
    done = CliRunner().invoke(group, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def drawn_plans() -> list[Plan]:
    """Returns the best plans of drawn problems, each symbol once; a few problems have no kernel on their target."""
    found: dict[tuple[str, str], Plan] = {}
    for problem, arch, num_sms in drawn(SEED, DRAWN):
        target = arch if isinstance(problem, Problem) else arch.removesuffix("a")
        try:
            plan = rules.plans(problem, target, num_sms)[0]
        except NotSupported:
            continue
        build = found.setdefault((target, plan.symbol), plan).build
        assert build == plan.build, f"two builds are called {plan.symbol}"
    return list(found.values())


def test_the_symbol_of_any_plan_names_its_build() -> None:
    plans = drawn_plans()
    assert len(plans) > 0.75 * DRAWN
    assert {plan.build.family for plan in plans} == {"sm80", "sm90", "decode"}
    wrong = [plan.symbol for plan in plans if parse_symbol(plan.symbol, plan.build.arch).build != plan.build]
    assert wrong == []


def test_the_builds_of_a_problem_are_found_without_planning() -> None:
    """In the order of the planner, with the first of them for problems of other sizes."""
    compared = 0
    for problem, arch, num_sms in drawn(SEED + 1, 40):
        if not isinstance(problem, Problem):
            continue
        with contextlib.suppress(NotSupported):
            expected = [plan.build for plan in planner.plans(problem, arch, num_sms)]
            assert list(Choices(problem, arch).in_order(problem, num_sms)) == expected
            compared += 1
    assert compared > 25


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("problem", REFUSED, ids=["grouped", "d32", "long causal", "ranges", "ranges of a backward"])
def test_what_a_plan_names_is_listed_built_and_inspected(problem: Problem, tmp_path: Path) -> None:
    plan = planner.plan(problem, "sm_90a")
    with pytest.raises(Stale) as missing:
        Folder(tmp_path)(plan.build)
    invoke(*str(missing.value).partition("build it with: cutlass-py-attn ")[2].split())
    assert Folder(tmp_path)(plan.build).build == plan.build
    assert plan.symbol in invoke("list", "--arch", "sm_90a", plan.symbol)
    shown = json.loads(invoke("inspect", plan.symbol, "--arch", "sm_90a", "--no-steps", "--json"))
    assert shown["symbol"] == plan.symbol


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "name", ["bf16_d128_s300_b1_h2_full_ranges11", "f16_d64_q1_s300_b3_h8k2_causal_rangesbhruns_sinks"]
)
def test_every_entry_of_ranges_names_its_kernel(name: str, direction: str) -> None:
    plan = planner.plan(parse(name).problem(direction), "sm_90a")
    assert len(plan.launches) == (4 if direction == "forward" else 6 + plan.build.has("sinks"))
    for launch in plan.launches:
        assert parse_symbol(launch.symbol, "sm_90a").build == plan.build


def test_the_whole_symbol_of_any_kernel_is_listed() -> None:
    symbol = "fwd_sm90_bf16_d80_causal_grouped_split_kv_64x64"
    (row,) = json.loads(invoke("list", symbol, "--arch", "sm_90a", "--json"))
    assert row["serves"] == "forward, bfloat16, head dim 80, causal, grouped heads, few queries and many keys"
    done = CliRunner().invoke(group, ["list", symbol, "--arch", "sm_80"])
    assert (done.exit_code, "no kernel matches" in done.output) == (1, True)


@pytest.mark.parametrize(("direction", "head_dim", "mask"), [
    ("forward", 96, "causal"), ("forward", 64, "full"), ("backward", 64, "full"), ("backward", 128, "causal"),
])  # fmt: skip
def test_build_leaves_out_no_kernel_of_calls_of_any_size(direction: str, head_dim: int, mask: str) -> None:
    built = {plan.build for plan in Selection((direction,), ("bfloat16",), (head_dim,), (mask,)).plans("sm_90a")}
    rng = random.Random(f"{direction}{head_dim}{mask}")
    lengths = [(length, length) for length in (4096, 300)] + [
        (int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13))) for _ in range(60)
    ]
    sizes = [(*length, rng.choice((1, 4, 64)), rng.choice((1, 3, 8, 32))) for length in lengths]
    called = [
        ProblemSpec("bfloat16", head_dim, *size, mask=parse_mask(mask)).problem(direction) for size in sizes
    ]  # fmt: skip
    choices = Choices(called[0], "sm_90a")
    assert {choices.best(problem, rng.choice((132, 114, 78))) for problem in called} <= built
    if (direction, head_dim) == ("forward", 96):
        assert "fwd_sm90_bf16_d96_causal_192x112" in {build.symbol for build in built}


@pytest.mark.parametrize("name", ["bf16_d64_s64_b70000_h1_full", "bf16_d64_s0_b1_h1_full", "bf16_d128_s128_b2_h8_full"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_plan_of_any_grid_prints_its_table(name: str, direction: str) -> None:
    """More heads or batches than a grid has are several launches of one kernel, and an empty problem has none."""
    plan = planner.plan(parse(name).problem(direction), "sm_80")
    artifact = fakes.artifact(plan.build)
    rows = list(artifacts.Made(plan, artifact, "prebuilt").rows())
    assert [row["kernel"] for row in rows] == [kernel.symbol.rpartition("_")[0] for kernel in artifact.kernels]
    launched = {launch.symbol.rpartition("_")[0]: launch.shared_memory_bytes for launch in plan.launches}
    assert len(plan.launches) != len(rows) or "b2" in name
    assert [row["shared_memory_bytes"] for row in rows] == [launched.get(row["kernel"], 0) for row in rows]


@pytest.mark.usefixtures("few_kernels")
def test_the_catalogue_has_the_kernels_of_float16_that_the_planner_has() -> None:
    """Most are not planned: they are those of bfloat16."""
    for direction in ("forward", "backward"):
        listed = {entry.symbol for entry in catalogue.entries("sm_90a") if "_f16_d128" in entry.symbol}
        for mask in catalogue.COMMON_MASKS:
            for length, heads in ((128, 512), (64, 1), (4096, 512), (2176, 1)):
                problem = parse(f"f16_d128_s{length}_b1_h{heads}_{mask}").problem(direction)
                symbol = planner.plan(problem, "sm_90a").symbol
                assert symbol in listed or not symbol.startswith(("fwd_sm90", "bwd_sm90"))


@pytest.mark.parametrize("entry", ["", "_0", "_pairs_2"])
def test_a_symbol_does_not_tell_a_mask_function(entry: str) -> None:
    plan = planner.plan(parse("bf16_d64_s640_b2_h4_causal_functiontree").problem("forward"), "sm_90a")
    with pytest.raises(NotSupported) as caught:
        parse_symbol(f"{plan.symbol}{entry}", "sm_90a")
    (reason,) = caught.value.reasons
    assert "stands for a mask function, which no symbol tells; plan a problem with the function" in reason
    done = CliRunner().invoke(group, ["inspect", plan.symbol, "--arch", "sm_90a"])
    assert done.exit_code == 1
    assert "stands for a mask function" in done.output
