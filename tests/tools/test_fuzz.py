"""Tests of the random cases' tool without a GPU: what is launched and recorded, and how failures are reduced."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import DriverError, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import E4M3_CACHE, WIDE
from cutlass_py_attn.plan.planner import builds_on, plan, plans_on
from cutlass_py_attn.problem import drawn_functions
from cutlass_py_attn.problem.tensors import SHORT_NAMES
from cutlass_py_attn.testing import guarded_check, layouts
from cutlass_py_attn.testing.cases import Case
from tests.cases import random_cases
from tests.support import fakes
from tests.support.fake_launch import on_hopper, stored
from tools.release import digests, features, fuzz, fuzz_run, record
from tools.release.fuzz_run import Attempt, Outcome

HOPPER = Case.parse("forward bf16_d64_q40_s50_b1_h2_causal seed=4")
GENERIC = Case.parse("forward f32_d64_q40_s50_b1_h2_causal seed=4")
DECODE = Case.parse("forward f16_d64_q1_s300_b1_h2_full seed=5")
SPLIT_D = Case.parse("forward f16_d520_q10_s20_b1_h1_full seed=8")
TWENTY = [random_cases.draw(kernel, run) for kernel in range(10) for run in range(2)]


def builds_of(case: Case) -> list[Build]:
    return [plan.build for plan in plans_on(case.problem(), (9, 0), 132)]


def drawn_of(name: str, runs: int) -> list[Case]:
    """That many cases of each kernel number of an option."""
    return list(random_cases.cases((fuzz.KINDS | fuzz.UNRECORDED)[name].numbers, runs))


def artifact(build: Build) -> Artifact:
    return fakes.artifact(build)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[Build, float]:
    """A GPU whose kernels give the reference's results times a factor; the factors of wrong kernels by build."""
    factors: dict[Build, float] = {}
    given: dict[str, tuple[Case, guarded_check.Expected]] = {}
    expect = guarded_check.expect

    def expecting(case: Case) -> guarded_check.Expected:
        given["last"] = case, expect(case)
        return given["last"][1]

    def results(build: Build) -> dict[str, np.ndarray]:
        right = stored(*given["last"])
        return {name: array * array.dtype.type(factors.get(build, 1.0)) for name, array in right.items()}

    monkeypatch.setattr(guarded_check, "expect", expecting)
    monkeypatch.setattr(guarded_check, "guarded_launch", on_hopper(results))
    return factors


def families(outcome: Outcome) -> list[str]:
    return [features.family_of(each.build) for each in outcome.attempts if each.build]


@pytest.mark.parametrize(
    ("case", "expected"),
    [(HOPPER, ["sm90", "sm80"]), (GENERIC, ["sm80"]), (DECODE, ["decode"]), (SPLIT_D, ["sm80 split-D"])],
)
def test_a_case_says_which_kernels_ran(case: Case, expected: list[str], hopper: dict[Build, float]) -> None:
    outcome = fuzz_run.run_case(case, artifact)
    assert families(outcome) == expected
    assert all(each.passed and not each.is_fallback for each in outcome.attempts)


def test_one_of_four_cases_of_another_family_runs_on_sm80_kernels_too(hopper: dict[Build, float]) -> None:
    found = [families(fuzz_run.run_case(HOPPER.replace(seed=seed), artifact)) for seed in range(8)]
    assert found == [["sm90", "sm80"], *[["sm90"]] * 3] * 2


def test_a_kernel_that_is_not_at_hand_is_a_recorded_fallback(hopper: dict[Build, float]) -> None:
    def generic_only(build: Build) -> Artifact:
        if build.family != "sm80":
            raise Stale(f"{build.symbol}: not in the folder")
        return artifact(build)

    (only,) = fuzz_run.run_case(HOPPER, generic_only).attempts
    assert only.build is not None
    assert only.build.family == "sm80"
    assert only.is_fallback
    summary = fuzz.summarise([Outcome(HOPPER, (only,))])
    assert summary.counts == {"problems": 1, "launches": 1, "refused": 0, "fallbacks": 1, "failed": 0}


def test_generic_kernels_that_are_not_at_hand_are_no_failure(hopper: dict[Build, float]) -> None:
    def own_only(build: Build) -> Artifact:
        if build.family == "sm80":
            raise Stale(f"{build.symbol}: not in the folder")
        return artifact(build)

    assert families(fuzz_run.run_case(HOPPER, own_only)) == ["sm90"]


def test_a_folder_without_the_kernels_of_a_case_fails(
    hopper: dict[Build, float], capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(build: Build) -> Artifact:
        raise Stale(f"{build.symbol}: not in the folder")

    outcome = fuzz_run.run_case(HOPPER, nothing)
    (attempt,) = outcome.attempts
    assert attempt.is_absent
    assert not fuzz_run.fails(outcome), "nothing to reduce"
    assert fuzz.summarise([outcome]).counts["failed"] == 1
    assert "Stale: " in capsys.readouterr().out


def test_a_wrong_kernel_fails_with_its_name_and_line(
    hopper: dict[Build, float], capsys: pytest.CaptureFixture[str]
) -> None:
    hopper[builds_of(HOPPER)[0]] = 1.1
    outcome = fuzz_run.run_case(HOPPER, artifact)
    assert [each.passed for each in outcome.attempts] == [False, True]
    summary = fuzz.summarise([outcome])
    assert summary.counts["failed"] == len(summary.failed) == 1
    assert len(summary.passed) == 1
    shown = capsys.readouterr().out
    assert "sm_90a/fwd_sm90_bf16_d64_causal" in shown
    assert f'python -m tools.release.fuzz --case "{HOPPER.line}"' in shown


def test_refused_and_empty_cases_launch_nothing(hopper: dict[Build, float]) -> None:
    outcome = fuzz_run.run_case(HOPPER.replace(num_heads_key=0, num_heads=0), artifact)
    assert outcome.attempts == ()
    assert fuzz.summarise([outcome]).counts["refused"] == 1


def test_a_fault_of_the_gpu_stops_the_process(monkeypatch: pytest.MonkeyPatch, driver_log: object) -> None:
    launched = []

    def fails(case: Case, *_: object) -> guarded_check.Launched:
        launched.append(case)
        raise DriverError("illegal address")

    monkeypatch.setattr(guarded_check, "launch", fails)
    monkeypatch.setattr(fuzz_run, "_can_launch", lambda: False)
    fuzz_run.start(Path("folder"))
    found = fuzz_run.run_cases([HOPPER, GENERIC, DECODE])
    assert launched == [HOPPER]
    assert [fuzz_run.fails(each) for each in found] == [True, False, False]
    assert found[1].attempts[0].error == f"not run: {HOPPER.line} broke the process before"
    assert not any(each.passed for outcome in found for each in outcome.attempts)


def test_a_process_of_the_pool_returns_outcomes(tmp_path: Path) -> None:
    """The processes start anew, and what they return can be sent."""
    empty = HOPPER.replace(num_heads_key=0, num_heads=0)
    with fuzz_run.pool(1, tmp_path) as pool:
        assert pool.submit(fuzz_run.run_case, empty, Folder(tmp_path)).result() == Outcome(empty)
    outcome = Outcome(HOPPER, (Attempt(builds_of(HOPPER)[0], {"output": 0.5}),))
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def fake_launch(fails: bool, build: Build) -> Outcome:
    return Outcome(HOPPER, (Attempt(build, {"output": 2.0 if fails else 0.5}),))


def test_a_failure_is_reduced_with_kernels_of_its_family() -> None:
    build = builds_of(HOPPER)[0]
    case = Case.parse("forward bf16_d64_q90_s120_b3_h6_causal_br inputs=needle layout=padded seed=9")
    asked = []

    def launch(candidate: Case, family: str) -> Outcome:
        asked.append(family)
        if candidate.spec.mask.name != "causal_br" or candidate.layout != "padded":
            return Outcome(candidate, (Attempt(None, error="Stale: not in the folder", is_absent=True),))
        return fake_launch(candidate.spec.num_keys >= 40, build)

    smallest, attempt = fuzz.reduced(case, Attempt(build, {"output": 3.0}), launch)
    assert smallest.line == "forward bf16_d64_q1_s40_b1_h1_causal_br layout=padded"
    assert attempt.ratios == {"output": 2.0}
    assert set(asked) == {"sm90"}


def test_the_record_counts_launches_by_family(hopper: dict[Build, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "of", lambda root: {"kernels": "k", "launch": "l", "checks": "j"})
    cases = (HOPPER, HOPPER.replace(seed=1), GENERIC, DECODE, SPLIT_D)
    summary = fuzz.summarise(fuzz_run.run_case(case, artifact) for case in cases)
    recorded = json.loads(json.dumps(fuzz.record_of(summary, [3, 4], "H200", artifact)))
    assert (recorded["problems"], recorded["launches"], recorded["fallbacks"]) == (5, 6, 0)
    assert recorded["kernels"] == {
        record.name_of(build): [record.sha256(artifact(build).cubin)] for _, build, _ in summary.passed
    }
    assert recorded["groups"] == {"3": "", "4": ""}, "to be hashed without a GPU"
    assert recorded["digests"] == {"kernels": "k", "launch": "l", "checks": "j"}
    rows = {(r["family"], r["dtype"], r["direction"]): r for r in recorded["rows"] if r["feature"] == "any problem"}
    counts = {key[:2]: row["problems"] for key, row in rows.items()}
    assert counts == {
        ("sm90", "bf16"): 2, ("sm80", "bf16"): 1, ("sm80", "f32"): 1, ("decode", "f16"): 1, ("sm80 split-D", "f16"): 1,
    }  # fmt: skip
    text = features.table(recorded)
    assert text.startswith("5 random problems in 6 launches of 5 kernels on H200, ")
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        f"### {family} kernels" for family in features.FAMILIES
    ]
    assert f"| any problem | 2 ({rows['sm90', 'bf16', 'forward']['worst']:.2f}) |" in text
    assert "| feature | forward bf16 |\n" in text, "a column without launches is left out"


def test_every_drawn_dtype_has_a_column() -> None:
    """Of the tables, and of the record's rows."""
    for kind in fuzz.KINDS.values():
        for case in random_cases.cases([kind.first], 2):
            (row, *_) = features.tally([(case, builds_of(HOPPER)[0], 0.5)])
            assert (row["feature"], row["problems"]) == ("any problem", 1)
            assert (row["dtype"], row["direction"]) in features.COLUMNS


def test_a_record_of_another_format_is_missing(tmp_path: Path) -> None:
    path = tmp_path / features.PATH
    path.parent.mkdir()
    path.write_text(json.dumps({"gpu": "H200", "sources": "today", "rows": []}))
    assert features.read(tmp_path) is None
    (line,) = features.objections(tmp_path)
    assert "MISSING, or of another format; run python -m tools.release.fuzz --record" in line


def test_drawn_cases_have_every_input_family_dtype_and_few_queries() -> None:
    drawn = [case for name in ("variants", "paged", "mla", "e4m3", "ranges", "functions") for case in drawn_of(name, 3)]
    counts = Counter(name for case in drawn for name, has in features.FEATURES.items() if has(case))
    assert set(counts) == set(features.FEATURES), set(features.FEATURES) - set(counts)
    decode = Counter(SHORT_NAMES[c.spec.dtype] for c in drawn if features.FEATURES["few queries against many keys"](c))
    assert set(decode) == {"f16", "bf16", "f32"}
    exact = {
        (case.direction, case.spec.dtype)
        for case in drawn
        for name in guarded_check.results_of(case)
        if guarded_check.is_exact(case, name)
    }
    assert {("forward", "float32"), ("backward", "float32")} <= exact, "a dropped factor of rare dropout shows"
    assert any(case.inputs == "saturated" and case.spec.dtype == "bfloat16" for case in drawn)
    for case in drawn:
        assert Case.parse(case.line) == case


def test_a_case_is_drawn_alike_every_time() -> None:
    assert random_cases.draw(7, 3) == random_cases.draw(7, 3)
    assert len({case.line for case in TWENTY}) == len(TWENTY)


def test_the_listing_has_both_families(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(random_cases, "cases", lambda numbers, runs: [HOPPER, GENERIC, DECODE, SPLIT_D])
    monkeypatch.setattr(sys, "argv", ["fuzz", "--list"])
    assert fuzz.main() == 0
    *names, last = capsys.readouterr().out.splitlines()
    assert last == "5 kernels: 2 sm80, 1 decode, 1 sm80 split-D, 1 sm90"
    assert len(names) == 5
    monkeypatch.setattr(sys, "argv", ["fuzz", "--list", "--family", "sm90"])
    assert fuzz.main() == 0
    (name, last) = capsys.readouterr().out.splitlines()
    assert name.startswith("sm_90a/fwd_sm90_bf16_d64_causal")
    assert last == "1 kernel: 1 sm90"


def test_only_a_kind_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The kinds that the record has not are drawn alone, and without --only none of them is."""
    drawn: list[int] = []
    monkeypatch.setattr(random_cases, "cases", lambda numbers, runs: drawn.extend(numbers) or [])
    for arguments in ([], ["--only", "wide"], ["--only", "ranges", "--ranges", "2"]):
        monkeypatch.setattr(sys, "argv", ["fuzz", "--list", *arguments])
        assert fuzz.main() == 0
        found, first = set(drawn), random_cases.RANGES_FROM
        assert (
            found
            == {
                0: set(fuzz.numbers_of(fuzz.KINDS)),
                2: set(fuzz.KINDS["wide"].numbers),
                4: {first, first + 1},
            }[len(arguments)]
        )
        drawn.clear()
    assert not set(fuzz.UNRECORDED) & set(fuzz.KINDS)
    assert max(fuzz.numbers_of(fuzz.KINDS)) < random_cases.RANGES_FROM


def test_the_numbers_of_ranges_draw_problems_that_kernels_take() -> None:
    """A run with --only ranges has 3 000 and more, of every family, memory layout and axis, for few kernels."""
    assert fuzz.UNRECORDED["ranges"].count * fuzz.RUNS >= 3000
    drawn = drawn_of("ranges", 12)
    assert all(Case.parse(case.line) == case and case.needs_kernels for case in drawn)
    builds = {plan(case.problem(), "sm_90a").build for case in drawn}
    assert len(builds) < 50
    assert {build.mask for build in builds} == {"ranges"}
    for direction in ("forward", "backward"):
        ours = [case for case in drawn if case.direction == direction]
        assert {case.spec.range_family for case in ours} == set(random_cases.RANGE_FAMILIES)
        assert {case.range_layout for case in ours} == set(layouts.RANGE_LAYOUTS)
        assert {case.spec.ranges for case in ours} == {"11", "b1", "1h", "bh"}
        assert {case.spec.mask.form for case in ours} == {"full", "causal", "local"}
        assert {case.spec.dtype for case in ours} == {"bfloat16", "float16"}
        assert max(case.spec.batch * case.spec.num_heads for case in ours) > 132
    empty = [not case.spec.key_ranges(case.seed).materialise(case.spec.num_keys).any(axis=3).all() for case in drawn]
    assert 0.3 < np.mean(empty) < 0.9


def test_the_numbers_of_functions_draw_problems_that_kernels_take() -> None:
    """A run with --only functions has 3 000 and more, of every function within every mask, for some 40 kernels."""
    assert fuzz.UNRECORDED["functions"].count * fuzz.RUNS >= 3000
    drawn = drawn_of("functions", 12)
    assert all(Case.parse(case.line) == case and case.needs_kernels for case in drawn)
    builds = {plan(case.problem(), "sm_90a").build for case in drawn}
    assert len(builds) < 60
    assert {build.form.name for build in builds} == {"ranges"}
    assert all(build.form.program for build in builds)
    for direction in ("forward", "backward"):
        ours = [case for case in drawn if case.direction == direction]
        assert {case.spec.mask_function for case in ours} == set(drawn_functions.FUNCTIONS)
        assert {case.spec.mask.form for case in ours} == {"full", "causal", "local"}
        assert {case.spec.ranges for case in ours} == {"", "11", "b1", "1h", "bh"}
        assert {case.spec.block_share for case in ours} == {None, *random_cases.BLOCK_SHARES}
        assert {case.spec.block_axes for case in ours} == {"", "b", "h", "bh"}
        assert {case.spec.block_size for case in ours} == {64, 128}
        assert {case.range_layout for case in ours} == set(layouts.RANGE_LAYOUTS)
        assert {case.spec.dtype for case in ours} == {"bfloat16", "float16"}
        assert {case.spec.sinks for case in ours} == {True, False}
        assert {case.spec.num_heads_key == case.spec.num_heads for case in ours} == {True, False}
        assert {32, 64, 96, 128} <= {case.spec.head_dim for case in ours}
        assert max(case.spec.batch * case.spec.num_heads for case in ours) > 132


def test_the_numbers_of_e4m3_draw_enough_problems_of_every_kind() -> None:
    """A default run has at least 300 of operands and of caches, all forwards that a kernel takes."""
    of_both = drawn_of("e4m3", 25)
    drawn = [case for case in of_both if case.spec.dtype == "float8_e4m3fn"]
    assert len(drawn) >= 300
    assert len(of_both) - len(drawn) >= 300
    assert all(case.spec.e4m3_cache != (case.spec.dtype == "float8_e4m3fn") for case in of_both)
    assert {case.spec.descale for case in drawn} == {"", "tensor", "head", "batch"}
    assert {case.spec.head_dim for case in drawn} >= {64, 128, 256}
    assert {case.spec.mask.form for case in drawn} == {"full", "causal", "local"}
    assert {bool(case.spec.sequences) for case in drawn} == {True, False}
    assert all(case.needs_kernels for case in drawn)
    assert all(Case.parse(case.line) == case for case in of_both[::20])


def test_the_numbers_of_prompts_and_of_latent_codes_draw_enough_problems() -> None:
    """A default run has at least 300 problems of the sm90 kernels of e4m3 caches, and of latent caches of codes."""
    prompts = drawn_of("prompts", 9)
    assert all(case.spec.e4m3_cache and case.needs_kernels for case in prompts)
    chosen = [builds_on(case.problem(), (9, 0))[0] for case in prompts]
    kernels = [build for build in chosen if build.variant == E4M3_CACHE]
    assert len(kernels) / len(prompts) * fuzz.KINDS["prompts"].count * fuzz.RUNS >= 300
    assert {build.has("kv8row") for build in kernels} == {build.has("paged") for build in kernels} == {True, False}
    latent = drawn_of("mla", 1)
    counts = Counter(case.spec.e4m3_cache for case in latent)
    assert min(counts[False], counts[True]) * fuzz.RUNS >= 300


def test_the_numbers_of_wide_heads_draw_enough_forwards() -> None:
    """A default run has at least 300 problems of the sm90 forward of wide heads."""
    drawn = drawn_of("wide", 9)
    assert all(case.direction == "forward" and Case.parse(case.line) == case for case in drawn)
    kernels = [builds_on(case.problem(), (9, 0))[0] for case in drawn if case.needs_kernels]
    wide = {build for build in kernels if build.variant == WIDE}
    assert sum(build in wide for build in kernels) / len(drawn) * fuzz.KINDS["wide"].count * fuzz.RUNS >= 300
    assert {build.dtype for build in wide} == {"bfloat16", "float16"}
    assert len({build.mask for build in wide}) > 1


def test_the_numbers_of_shared_ends_draw_problems_whose_last_query_tiles_blocks_share() -> None:
    """And others, with tiles for whole rounds or with few keys."""
    drawn = drawn_of("shared_end", 25)
    splits = [dict(plan(case.problem(), "sm_90a").params).get("num_splits_key", 1) for case in drawn]
    shared = [case for case, parts in zip(drawn, splits, strict=True) if parts > 1]
    assert 30 <= len(shared) <= len(drawn) - 30
    assert {(case.spec.dtype, case.spec.head_dim) for case in shared} == {
        ("bfloat16", 128), ("float16", 256), ("bfloat16", 192), ("float16", 104),
    }  # fmt: skip
    assert "rising" in {case.inputs for case in shared}


def test_the_numbers_of_shared_queries_draw_backwards_whose_last_key_tiles_blocks_share() -> None:
    """A default run has at least 100 that share, in one round of parts and in several, and others."""
    drawn = drawn_of("shared_queries", fuzz.RUNS)
    assert all(case.direction == "backward" and Case.parse(case.line) == case for case in drawn)
    splits = [dict(plan(case.problem(), "sm_90a", 132).params).get("num_splits_query", 1) for case in drawn]
    shared = [(case, parts) for case, parts in zip(drawn, splits, strict=True) if parts > 1]
    assert 100 <= len(shared) <= len(drawn) - 20
    assert {(case.spec.dtype, case.spec.head_dim) for case, _ in shared} == {
        ("bfloat16", 64), ("bfloat16", 128), ("float16", 96), ("float16", 104), ("float16", 128),
    }  # fmt: skip
    assert {case.spec.num_heads > case.spec.num_heads_key for case, _ in shared} == {True, False}
    assert {case.spec.sinks for case, _ in shared} == {True, False}
    assert len({parts for _, parts in shared}) > 4
