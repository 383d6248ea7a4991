"""Tests of carrying records over: what is the same keeps its record, and what changed is named alone."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Launch, Plan
from cutlass_py_attn.problem import spec
from cutlass_py_attn.testing.cases import Case
from tests.cases import random_cases
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.release import build_ptx, carry_over, digests, feature_ptx, features, fuzz, launches, record, verify_gpu
from tools.release.carry_over import Compiled
from tools.tuning import plan_rows, plan_space

ROOT = Path(__file__).resolve().parents[2]
RUNS = 3
SM80, SM90 = NUMBERS = (1, 400_000)  # kernel numbers of a kernel, and of several with tensor maps
TODAY = {"kernels": "today", "launch": "today", "checks": "today"}
MERGED = "sm_90/merge_sm80_bf16_d128_varlen_8x16"


class InProcess:
    """Stands in for processes."""

    def __init__(self, processes: int, builds: Sequence[Build] = ()) -> None:
        carry_over._start(builds)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *arguments: Iterable[Any]) -> Iterable[Any]:
        return map(function, *arguments)


def cubin_of(build: Build) -> str:
    return record.sha256(fakes.artifact(build).cubin)


@pytest.fixture(autouse=True)
def sources(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The digests of today's sources, of which a compiler makes what `fakes` has."""
    monkeypatch.setattr(fuzz, "RUNS", RUNS)
    monkeypatch.setattr(carry_over, "pool", InProcess)
    monkeypatch.setattr(carry_over, "_compiled", lambda choices: Compiled(choices[0], cubin_of(choices[0])))
    found = dict(TODAY)
    monkeypatch.setattr(digests, "of", lambda root: dict(found))
    return found


def summary_of(numbers: Sequence[int]) -> fuzz.Summary:
    """What a run of these kernel numbers on a GPU gives."""
    found = carry_over.compiled(numbers, 1)
    drawn = carry_over.groups(numbers, carry_over.at_hand({}, found)[0], 1)
    passed = [(case, attempt.build, 0.5) for each in drawn for case, attempt in each.attempts if attempt.build]
    return fuzz.Summary(tuple(passed), (), carry_over.counts(drawn) | {"failed": 0})


def run_of(numbers: Sequence[int]) -> features.Json:
    """The record of such a run, whose launches are not hashed."""
    return fuzz.record_of(summary_of(numbers), numbers, "H200", fakes.artifact)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with the complete record of a run."""
    (tmp_path / "ptx").mkdir()
    features.write(tmp_path, run_of(NUMBERS))
    (line,) = features.objections(tmp_path)
    assert "INCOMPLETE" in line
    assert carry(tmp_path) == []
    assert features.objections(tmp_path) == []
    return tmp_path


def carry(root: Path) -> list[str]:
    return carry_over.random_cases_of(root, None, 1)


def read(root: Path) -> features.Json:
    found = features.read(root)
    assert found is not None
    return found


def test_a_run_gets_the_hashes_of_its_launches(root: Path) -> None:
    recorded = read(root)
    assert set(recorded["groups"]) == {"1", "400000"}
    assert all(len(found) == 64 for found in recorded["groups"].values())
    assert recorded["carried"] is None
    assert {row["worst"] for row in recorded["rows"]} == {0.5}


def test_launches_of_another_count_are_not_those_that_ran(tmp_path: Path) -> None:
    (tmp_path / "ptx").mkdir()
    recorded = run_of(NUMBERS)
    features.write(tmp_path, {**recorded, "launches": 100})
    (line,) = carry(tmp_path)
    assert "not those that ran: launches: 100 ran, " in line
    assert read(tmp_path)["groups"] == recorded["groups"]


@pytest.mark.parametrize("edited", ["kernels", "launch"])
def test_other_sources_of_the_same_keep_the_record(root: Path, sources: dict[str, str], edited: str) -> None:
    before = read(root)
    sources[edited] = "after a rename"
    (line,) = features.objections(root)
    assert line.endswith(f"{features.SUBJECTS[edited]} changed since; {features.CARRY}")
    assert carry(root) == features.objections(root) == []
    after = read(root)
    said = after["carried"]
    assert (said["from"], said["kernels"], said["problems"]) == (before["commit"], 2, 2 * RUNS)
    assert after == {**before, "digests": sources, "carried": said}


def test_carrying_over_leaves_what_ran(root: Path, sources: dict[str, str]) -> None:
    """So that hashes that were written for the record stay current."""
    before = features.sha256(root)
    sources["kernels"] = "after a rename"
    assert carry(root) == []
    assert features.sha256(root) == before
    features.write(root, {**read(root), "kernels": {}})
    assert features.sha256(root) != before


def test_other_checks_need_a_run(root: Path, sources: dict[str, str]) -> None:
    sources["checks"] = "edited"
    (line,) = carry(root)
    assert line.endswith(f"{features.SUBJECTS['checks']} changed since; {features.REMEDY}")


def test_a_changed_kernel_is_named_alone(root: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = read(root)
    (kernel, *_) = (name for name in before["kernels"] if name.startswith("sm_90a/fwd_sm90"))

    def compiled(choices: build_ptx.Choices) -> Compiled:
        is_changed = record.name_of(choices[0]) == kernel
        return Compiled(choices[0], "other" if is_changed else cubin_of(choices[0]))

    monkeypatch.setattr(carry_over, "_compiled", compiled)
    sources["kernels"] = "edited"
    (line,) = carry(root)
    said = f"CHANGED: kernels {kernel}; the launches of kernel numbers {SM90}; {features.RUN_CHANGED}"
    assert line == f"{features.PATH}: {said}"
    after = read(root)
    assert after.pop("changed") == {"digests": sources, "kernels": [kernel], "groups": [SM90]}
    assert after == {name: value for name, value in before.items() if name != "changed"}
    assert fuzz.changed_numbers(root) == [SM90]
    assert carry(root) == [line], "it is named until it ran"
    monkeypatch.setattr(carry_over, "_compiled", lambda choices: Compiled(choices[0], cubin_of(choices[0])))
    assert carry(root) == [], "unless it is as before"


def test_a_run_of_what_changed_completes_the_record(
    root: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gets the hashes of its launches again."""
    before = read(root)
    sources["launch"] = "edited"
    plans_on = planner.plans_on
    monkeypatch.setattr(planner, "plans_on", lambda *args: [grown(plan) for plan in plans_on(*args)])
    (line,) = carry(root)
    assert f"the launches of kernel numbers {SM80}, {SM90}" in line
    rerun = run_of([SM80, SM90])
    rerun["rows"][0]["worst"] = 0.75
    features.write(root, features.merged(read(root), rerun))
    (line,) = features.objections(root)
    assert "INCOMPLETE" in line
    assert carry(root) == []
    after = read(root)
    assert (after["digests"], after["changed"]) == (sources, None)
    assert set(after["groups"]) == set(before["groups"])
    assert not {*after["groups"].items()} & {*before["groups"].items()}
    assert "6 of them ran again on H200, " in features.table(after)
    assert after["rows"] == [{**before["rows"][0], "worst": 0.75}, *before["rows"][1:]]
    assert [each["problems"] for each in after["reruns"]] == [2 * RUNS]


def test_rows_of_two_tallies_have_the_larger_ratio() -> None:
    def row(family: str, problems: int, worst: float) -> features.Json:
        key = {"family": family, "feature": "dropout", "dtype": "f16", "direction": "forward"}
        return {**key, "problems": problems, "worst": worst}

    found = features.with_worst(
        [row("sm90", 1, 0.5), row("sm80", 2, 0.2)], [row("decode", 3, 0.1), row("sm80", 4, 0.4)]
    )
    assert found == [row("sm90", 1, 0.5), row("sm80", 2, 0.4), row("decode", 3, 0.1)]


def test_a_kernel_that_is_launched_no_more_leaves_the_record(root: Path, sources: dict[str, str]) -> None:
    before = read(root)
    sources["kernels"] = "edited"
    features.write(root, {**before, "kernels": {**before["kernels"], "sm_90a/gone": ["1"]}})
    assert carry(root) == []
    assert read(root)["kernels"] == before["kernels"]


def test_a_rerun_of_another_count_is_not_what_was_named(
    root: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources["launch"] = "edited"
    rerun = run_of([SM90])
    features.write(root, features.merged(read(root), {**rerun, "launches": 100}))
    (line,) = carry(root)
    assert f"not those that ran: launches: 100 ran, {rerun['launches']} were found" in line


def test_launches_that_are_hashed_otherwise_are_hashed_anew(
    root: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the sources are those of the record."""
    before, given = read(root), launches.Launcher._given
    monkeypatch.setattr(launches.Launcher, "_given", lambda self: b"more " + given(self))
    assert carry_over.random_cases_of(root, None, 1, rehash=True) == []
    after = read(root)
    assert not {*after["groups"].items()} & {*before["groups"].items()}
    assert {**after, "groups": before["groups"]} == before
    sources["launch"] = "edited"
    monkeypatch.setattr(launches.Launcher, "_given", given)
    (line,) = carry_over.random_cases_of(root, None, 1, rehash=True)
    assert "CHANGED: the launches of kernel numbers" in line


def test_only_what_was_named_runs_again(root: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Case] = []

    def summarise(outcomes: Iterable[Case]) -> fuzz.Summary:
        ran.extend(outcomes)
        return summary_of([SM90])

    monkeypatch.setattr(fuzz, "ROOT", root)
    monkeypatch.setattr(fuzz, "kernels_from", lambda folder: fakes.artifact)
    monkeypatch.setattr(fuzz.fuzz_run, "outcomes", lambda cases, folder, processes: cases)
    monkeypatch.setattr(fuzz, "summarise", summarise)
    options = ["--changed", "--runs", str(RUNS), "--record", str(root / features.PATH)]
    monkeypatch.setattr(sys, "argv", ["fuzz", *options])
    sources["launch"] = "edited"
    before = read(root) | {"changed": {"digests": dict(sources), "kernels": [], "groups": [SM90]}}
    features.write(root, before)
    assert fuzz.main() == 0
    assert ran == list(random_cases.cases([SM90], RUNS))
    after = read(root)
    assert after["groups"] == {**before["groups"], str(SM90): ""}
    assert (after["digests"], after["reruns"][0]["problems"]) == (sources, RUNS)
    with pytest.raises(SystemExit, match="has no changed kernels or launches of today's sources"):
        fuzz.changed_numbers(root)


def grown(plan: Plan) -> Plan:
    """The plan with one more block along y."""
    return replace(plan, launches=tuple(with_block_more(launch) for launch in plan.launches))


def with_block_more(launch: Launch) -> Launch:
    x, y, z = launch.grid
    return replace(launch, grid=(x, y + 1, z))


def with_wider_box(launch: Launch) -> Launch:
    maps = tuple(replace(each, box=(*each.box[:-1], each.box[-1] + 1)) for each in launch.tensor_maps)
    return replace(launch, tensor_maps=maps)


CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "grid": grown,
    "shared memory": lambda plan: replace(
        plan, launches=tuple(replace(each, shared_memory_bytes=each.shared_memory_bytes - 16) for each in plan.launches)
    ),
    "tensor map": lambda plan: replace(plan, launches=tuple(map(with_wider_box, plan.launches))),
    "number": lambda plan: replace(plan, params=tuple((name, value + 1) for name, value in plan.params)),
    "workspace": lambda plan: replace(plan, workspace=replace(plan.workspace, zero_bytes=16, bytes=16)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_launch_is_named(
    root: Path, sources: dict[str, str], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no kernel is."""
    plans_on, edit = planner.plans_on, CHANGES[change]

    def changed(problem: Any, *args: Any) -> list[Plan]:
        found = list(plans_on(problem, *args))
        return [edit(plan) if plan.build.family == "sm90" else plan for plan in found]

    monkeypatch.setattr(planner, "plans_on", changed)
    monkeypatch.setattr("cutlass_py_attn.runtime.binding._problem_mismatches", lambda plan, problem: ())
    sources["launch"] = "edited"
    (line,) = carry(root)
    assert f"CHANGED: the launches of kernel numbers {SM90}; run " in line


def test_a_kernel_of_features_that_changed_is_named(
    root: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"a case": {"kernel": "sm_90/a", "ptx_body_sha256": "1"}}
    (root / feature_ptx.PATH).write_text(json.dumps({"kernels": entries}))
    monkeypatch.setattr(feature_ptx, "compiled", lambda needed, processes: entries)
    sources["kernels"] = "edited"
    assert carry(root) == []
    changed = {"a case": {"kernel": "sm_90/a", "ptx_body_sha256": "2"}}
    monkeypatch.setattr(feature_ptx, "compiled", lambda needed, processes: changed)
    sources["kernels"] = "edited again"
    (line,) = carry(root)
    assert "CHANGED: kernels sm_90/a; run " in line


def test_of_one_name_those_kernels_are_at_hand_that_ran() -> None:
    """A folder holds the last of several kernels of one name."""
    build = carry_over._needed(SM80)[0][0]
    deep = replace(build, key_stages=build.key_stages + 1)
    assert record.name_of(build) == record.name_of(deep)
    name, found = record.name_of(build), [Compiled(build, "1"), Compiled(deep, "2")]
    assert carry_over.at_hand({}, found) == ([deep], [])
    assert carry_over.at_hand({name: ["1"]}, found) == ([build], [])
    assert carry_over.at_hand({name: ["1", "2"]}, found) == ([build, deep], [])
    assert carry_over.at_hand({name: ["3"]}, found) == ([deep], [name])


def test_kernels_that_others_replace_are_compiled_if_they_ran() -> None:
    """A run without a folder launches kernels of another family too."""
    ((first, *others), *_) = carry_over._needed(SM90)
    name = next(record.name_of(build) for build in others if build.family == "sm80")
    found = {each.name for each in carry_over.compiled([SM90], 1)}
    assert record.name_of(first) in found
    assert name not in found
    assert {each.name for each in carry_over.compiled([SM90], 1, [name])} == found | {name}


def test_launches_are_of_the_problem_alone(root: Path) -> None:
    """Whatever ran before."""
    cases = list(random_cases.cases([SM90], RUNS))
    kernels = launches.available(each.build for each in carry_over.compiled([SM90], 1))
    first = launches.Drawn(cases, kernels)
    launches.Drawn(cases[::-1], kernels)
    again = launches.Drawn(cases, kernels)
    assert (first.sha256, first.attempts) == (again.sha256, again.attempts)
    assert launches.Drawn(cases[1:], kernels).sha256 != first.sha256


# Verifications


@pytest.fixture
def verified(tmp_path: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a kernel that a GPU verified."""
    plan = next(plan for plan in build_ptx.committed_plans() if record.name_of(plan.build) == MERGED)
    ptx = f".entry {plan.launches[0].symbol}(\n"
    build_ptx.write(tmp_path, [plan], [replace(fakes.artifact(plan.build), ptx=ptx)])
    monkeypatch.setattr(build_ptx, "committed_plans", lambda: [plan])
    monkeypatch.setattr(record, "suite_sha256", lambda root: sources["checks"])
    monkeypatch.setattr(record, "launch_sha256", lambda root: sources["launch"])
    (entry,) = record.read_manifest(tmp_path)["kernels"].values()
    line = {"cubin_sha256": entry["cubin_sha256"], "suite_sha256": "today", "launch_sha256": "today", "gpu": "H200"}
    record.append(tmp_path / record.LOG, [line | {"launch_sha256": "before"}, line])
    assert carry_over.verifications_of(tmp_path, 1) == []
    return tmp_path


def test_a_verification_gets_the_hash_of_its_launches(verified: Path) -> None:
    before, last = record.read_log(verified / record.LOG)
    assert "launches_sha256" not in before
    assert len(last["launches_sha256"]) == 64
    text = (verified / record.LOG).read_text()
    assert carry_over.verifications_of(verified, 1) == []
    assert (verified / record.LOG).read_text() == text


def test_other_sources_of_the_same_launches_keep_a_verification(verified: Path, sources: dict[str, str]) -> None:
    (_, before) = record.read_log(verified / record.LOG)
    sources["launch"] = "after a rename"
    assert carry_over.verifications_of(verified, 1) == []
    (_, after) = record.read_log(verified / record.LOG)
    assert after.pop("carried_to")
    assert after == {**before, "launch_sha256": "after a rename"}


def test_other_launches_need_a_verification(
    verified: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources["launch"] = "edited"
    monkeypatch.setattr(launches, "of_verification", lambda build: "other")
    (line,) = carry_over.verifications_of(verified, 1)
    assert line.startswith(f"{MERGED}: STALE: verified on H200, but with other checks or launches")


def test_every_shown_kernel_has_launches_to_compare() -> None:
    builds = [plan.build for plan in build_ptx.committed_plans()]
    kinds = {(build.kind, build.family): build for build in reversed(builds)}
    found = {launches.of_verification(build) for build in kinds.values()}
    assert len(found) == len(kinds) == 9


def test_a_manifest_of_other_sources_is_written_anew(verified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    (plan,) = build_ptx.committed_plans()
    made = replace(fakes.artifact(plan.build), ptx=f"// a comment\n.entry {plan.launches[0].symbol}(\n")
    monkeypatch.setattr(build_ptx, "compile_all", lambda needed, fresh, processes: [made for _ in needed])
    monkeypatch.setattr("cutlass_py_attn.compilation.compiler.toolchain", lambda: made.toolchain)
    monkeypatch.setattr(record, "sources_sha256", lambda build: "after a rename")
    assert carry_over.manifest_of(verified, 1) == []
    manifest = record.read_manifest(verified)
    assert record.is_sealed(manifest)
    assert manifest["kernels"][MERGED]["sources_sha256"] == "after a rename"
    assert record.states(verified, manifest, [], None, {})[MERGED].startswith("UNVERIFIED")
    made = replace(made, cubin=b"other")
    monkeypatch.setattr(record, "sources_sha256", lambda build: "edited")
    (line,) = carry_over.manifest_of(verified, 1)
    assert line.startswith(f"{MERGED}: same PTX, other machine code")
    assert record.read_manifest(verified) == manifest


def test_verify_gpu_runs_what_is_not_verified(
    verified: Path, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_gpu, "ROOT", verified)
    monkeypatch.setattr(verify_gpu, "about_this_run", lambda sanitizer: {})
    monkeypatch.setattr(verify_gpu, "_line", lambda name, entry, kernels: ("passed", {}))
    output = str(verified / "log")
    monkeypatch.setattr(sys, "argv", ["verify_gpu", "--kernels", str(verified), "--output", output, "--changed"])
    for launch, count in (("today", 0), ("edited", 1)):
        sources["launch"] = launch
        assert verify_gpu.main() == 0
        assert f"verify_gpu: {count} of {count} kernels passed" in capsys.readouterr().out


# Measurements


def test_measurements_of_the_same_kernels_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, direction = "bf16_d128_s8192_b4_h16_causal", "backward"
    problem = plan_space.searched(spec.parse(case), direction, "sm90")
    (first, second, *_) = plan_space.candidates(problem, "sm90", "sm_90a", [TileConfig.parse("64x128x12:2,2")])
    line = {"case": case, "direction": direction, "family": "sm90", "arch": "sm_90a", "median_ms": 1.0}
    lines = [
        {**line, "tile": first.name, "cubin_sha256": cubin_of(first.build), "sources": "before"},
        {**line, "tile": second.name, "cubin_sha256": "other", "sources": "before"},
        {**line, "tile": first.name, "cubin_sha256": cubin_of(first.build), "sources": "long ago"},
        {**line, "tile": first.name, "cubin_sha256": "", "sources": "before", "median_ms": None},
    ]
    record.append(tmp_path / plan_rows.LOG, lines)
    monkeypatch.setattr(record, "sources_digest", lambda root: "today")
    assert carry_over.measurements_of(tmp_path, "today", 1) == 0
    assert carry_over.measurements_of(tmp_path, "before", 1) == 1
    sources = [each["sources"] for each in record.read_log(tmp_path / plan_rows.LOG)]
    assert sources == ["today", "before", "long ago", "before"]


# A rename


def test_a_renamed_module_changes_no_digest(tmp_path: Path) -> None:
    """As long as its importers take names from it."""
    folder = tmp_path / "cutlass_py_attn/kernels"
    shutil.copytree(ROOT / "cutlass_py_attn/kernels", folder, ignore=shutil.ignore_patterns("__pycache__"))

    def digest() -> str:
        return digests.files_sha256(folder, sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py")))

    before = digest()
    (folder / "sm90_wide/chunk_ring.py").rename(folder / "sm90_common/ring_of_chunks.py")
    for path in folder.rglob("*.py"):
        path.write_text(re.sub(r"\bsm90_wide\.chunk_ring\b", "sm90_common.ring_of_chunks", path.read_text()))
    assert digest() == before
