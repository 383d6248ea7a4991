"""Tests of the mutation run and of the kernel faults: operators, selection of tests, and the committed records."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support import fake_launch, fakes
from tests.support.fake_driver import FakeDriver
from tools.lab.mutation import kernel_faults, mutate, operators, tables, tree

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = '''"""Sample."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nothing == 1

LIMIT = 4


def first(count: int = 2, *, wide: bool = False) -> int:
    """Returns 1 < 2."""
    if count <= LIMIT and not wide:
        raise ValueError("0 < 1")
    return max(count // 3, pow(count, 2)) + 1
'''.replace("import nothing == 1", "LARGE = 1 < 2")
EXPECTED = {
    ("constant", "4", "5"),
    ("constant", "4", "3"),
    ("constant", "2", "3"),
    ("constant", "2", "1"),
    ("boolean", "False", "True"),
    ("condition", "count <= LIMIT and not wide", "True"),
    ("condition", "count <= LIMIT and not wide", "False"),
    ("and, or", "count <= LIMIT and not wide", "count <= LIMIT or not wide"),
    ("comparison", "count <= LIMIT", "count < LIMIT"),
    ("not dropped", "not wide", "wide"),
    ("statement dropped", 'raise ValueError("0 < 1")', "pass"),
    ("arithmetic", "max(count // 3, pow(count, 2)) + 1", "max(count // 3, pow(count, 2)) - 1"),
    ("rounding up", "count // 3", "-(-(count) // 3)"),
    ("min, max, any, all", "max", "min"),
    ("arguments swapped", "max(count // 3, pow(count, 2))", "max(pow(count, 2), count // 3)"),
    ("arguments swapped", "pow(count, 2)", "pow(2, count)"),
    ("constant", "3", "4"),
    ("constant", "3", "2"),
    ("constant", "1", "2"),
    ("constant", "1", "0"),
}


def changes(text: str) -> list[operators.Mutant]:
    return operators.mutants("sample.py", text)


def test_every_operator_finds_its_changes_and_no_text_or_type_is_changed() -> None:
    found = changes(SAMPLE)
    assert {(each.operator, each.before, each.after) for each in found} == EXPECTED
    for each in found:
        assert ast.dump(ast.parse(each.applied(SAMPLE))) != ast.dump(ast.parse(SAMPLE))


def test_a_mutant_keeps_its_id_when_its_line_moves() -> None:
    before, after = changes(SAMPLE), changes(SAMPLE.replace("LIMIT = 4", "\n\nLIMIT = 4"))
    assert [each.id for each in before] == [each.id for each in after]
    assert [each.line + 2 for each in before] == [each.line for each in after]
    assert len({each.id for each in before}) == len(before)


def test_a_mutant_of_another_text_is_refused() -> None:
    with pytest.raises(AssertionError, match="not the text that was drawn from"):
        changes(SAMPLE)[0].applied(SAMPLE.replace("LIMIT = 4", "LIMITS = 4"))


def test_the_tests_of_a_mutant_are_those_of_its_statement_the_fastest_first(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE)
    by_change = {(each.before, each.after): each for each in changes(SAMPLE)}
    lines = {line: [] for line in range(1, 12)} | {13: [0, 1, 2], 15: [2]}
    tests = mutate.TestMap([("slow", 3.0), ("fast", 0.1), ("other", 1.0)], {"sample.py": lines})
    assert tests.of(by_change["not wide", "wide"], tmp_path) == ["fast", "other", "slow"]
    assert tests.of(by_change["count // 3", "-(-(count) // 3)"], tmp_path) == ["other"]
    assert tests.of(by_change['raise ValueError("0 < 1")', "pass"], tmp_path) == []  # no test executes it
    more = mutate.TestMap([*tests.tests, ("tests/unit/test_sample.py::test", 0.01)], {"sample.py": lines})
    assert more.of(by_change["count // 3", "-(-(count) // 3)"], tmp_path) == [
        "tests/unit/test_sample.py::test",
        "other",
    ]
    # Every import executes the constant: the tests of the file that uses it.
    assert tests.of(by_change["4", "5"], tmp_path) == ["fast", "other", "slow"]


def test_drawing_is_by_the_seed_and_takes_every_file() -> None:
    files = ("tools/lab/mutation/tree.py", "tools/lab/mutation/tables.py")
    drawn = [mutate.drawn(ROOT, 20, seed, files) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {each.file for each in drawn[0]} == set(files)
    assert len({each.id for each in drawn[0]}) == len(drawn[0]) in range(19, 22)


def test_every_survivor_of_the_record_is_explained() -> None:
    record, why = tables.read(ROOT, tables.MUTANTS), tables.explanations(ROOT)
    assert record is not None
    survived = {row["id"] for row in record["mutants"] if row["outcome"] == "survived"}
    assert set(why) == survived
    assert all(len(reason.split()) >= 5 for reason in why.values())


def test_the_record_of_mutants_is_sound() -> None:
    record = tables.read(ROOT, tables.MUTANTS)
    assert record is not None
    rows = record["mutants"]
    assert len(rows) >= 150
    assert len({row["id"] for row in rows}) == len(rows)
    assert re.fullmatch("[0-9a-f]{40}", record["commit"])
    assert record["version"] == mutate.VERSION
    assert record["summary"] == mutate.summary(rows)
    for row in rows:
        assert set(row) == {
            *("id", "file", "line", "scope", "operator", "before", "after"),
            *("tests", "outcome", "killed_by"),
        }
        assert (row["outcome"], bool(row["killed_by"])) in {("killed", True), ("survived", False)}
    packages = {mutate.package_of(row["file"]) for row in rows}
    assert packages == {"api", "artifact.py", "bundle", "compilation", "jax", "plan", "problem", "runtime"}


@pytest.mark.parametrize("fault", kernel_faults.FAULTS, ids=lambda fault: fault.folder)
def test_every_kernel_fault_applies_to_the_source(fault: kernel_faults.Fault, tmp_path: Path) -> None:
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / fault.file).read_text())
    fault.apply(tmp_path)
    changed = path.read_text()
    assert changed != (ROOT / fault.file).read_text()
    ast.parse(changed)
    path.write_text(changed.replace(fault.after, ""))
    with pytest.raises(ValueError, match="0 times: must be once"):
        fault.apply(tmp_path)


def test_kernel_faults_cover_both_families_and_directions() -> None:
    builds = [fault.build for fault in kernel_faults.FAULTS]
    kinds = {(build.family, build.kind) for build in builds}
    assert kinds >= {(family, kind) for family in ("sm80", "sm90") for kind in ("forward", "backward")}
    assert ("decode", "forward") in kinds
    assert len({fault.folder for fault in kernel_faults.FAULTS}) == len(builds) >= 16


# How a fault of a term changes the reference, and how far it must be beyond the allowed error.
TERM_FAULTS: dict[str, tuple[str, Callable[[Any], Any], float]] = {
    "softcap times 1.01 in a bfloat16 backward": ("softcap", lambda softcap: softcap * 1.01, 5.0),
    "sink + 0.02": ("sinks", lambda sinks: sinks + np.float32(0.02), 20.0),
    "sink + 0.02 in its bfloat16 gradient": ("sinks", lambda sinks: sinks + np.float32(0.02), 2.0),
}


@pytest.mark.parametrize("name", TERM_FAULTS)
def test_the_inputs_of_a_kernel_fault_show_it(name: str) -> None:
    """Of a kernel that rounds as the reference in the case's dtype does, and of one that is exact but for the fault."""
    (fault,) = (each for each in kernel_faults.FAULTS if each.name == name)
    case, (term, changed, least) = fault.case, TERM_FAULTS[name]
    expected = guarded_check.expect(case)
    score_mod = case.score_mod(expected.arrays)
    wrong = replace(score_mod, **{term: changed(getattr(score_mod, term))})
    with mock.patch.object(Case, "score_mod", return_value=wrong):
        found = guarded_check.by_reference(case, expected.arrays, "float64")
    stored = fake_launch.stored(case, replace(expected, truth={each: found[each] for each in expected.truth}))
    assert max(guarded_check.ratios(case, expected, stored).values()) > least
    rounded = fake_launch.stored(case, replace(expected, truth=expected.low))
    ratios = guarded_check.ratios(case, expected, rounded)
    ratios.pop("logsumexp", None)  # kernels keep it in float32
    assert max(ratios.values()) < 0.5


@pytest.mark.usefixtures("driver_log")
def test_only_chooses_the_faults_that_are_launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[str] = []

    def run(folder: Path, fault: kernel_faults.Fault) -> dict[str, bool]:
        launched.append(fault.name)
        return {"is_caught": True}

    monkeypatch.setattr(kernel_faults, "_run", run)
    assert kernel_faults.main(["--kernels", str(tmp_path), "--only", "causal diagonal"]) == 0
    assert launched == ["causal diagonal + 1", "causal diagonal - 1"]
    for wrong in (["--only", "no such fault"], ["--only", "sign", "--record", str(tmp_path / "record.json")]):
        with pytest.raises(SystemExit):
            kernel_faults.main(["--kernels", str(tmp_path), *wrong])
    assert len(launched) == 2


def test_the_record_of_kernel_faults_is_sound() -> None:
    """The record is of the commit that it names; a fault that is new since then is not in it."""
    record = tables.read(ROOT, tables.KERNEL_FAULTS)
    if record is None:
        assert "Not run yet" in tables.kernel_faults(ROOT)
        return
    assert len(record["faults"]) >= 16
    for row in record["faults"]:
        passed, failed = (kernel_faults.passes(row[kind]) for kind in ("unchanged", "faulty"))
        assert (row["is_caught"], passed, failed) == (True, True, False), row["name"]


def test_a_result_that_is_too_far_or_a_failed_launch_does_not_pass() -> None:
    assert kernel_faults.passes({"output": 0.2, "logsumexp": 1.0})
    assert not kernel_faults.passes({"output": 0.2, "logsumexp": 1.01})
    assert not kernel_faults.passes({"output": "infinity"})
    assert not kernel_faults.passes({"launch": "Stale: no kernel"})


def test_tables_show_survivors_and_faults(tmp_path: Path) -> None:
    row = {"id": "a", "file": "cutlass_py_attn/plan/x.py", "scope": "f", "before": "a |\n b", "after": "b"}
    rows = [row | {"outcome": "survived"}, row | {"id": "b", "outcome": "killed"}]
    record = {"date": "2026-01-01", "commit": "0" * 40, "seed": 1, "summary": mutate.summary(rows), "mutants": rows}
    fault = {"name": "sign", "file": "cutlass_py_attn/kernels/y.py", "shown_by": ["sm80", "forward f16"]}
    fault |= {"unchanged": {"output": 0.25}, "faulty": {"output": "infinity"}, "is_caught": True}
    faults = {"gpu": "H200", "date": "2026-01-01", "commit": "0" * 40, "faults": [fault]}
    (tmp_path / "tools/lab/mutation/results").mkdir(parents=True)
    (tmp_path / tables.MUTANTS).write_text(json.dumps(record))
    (tmp_path / tables.KERNEL_FAULTS).write_text(json.dumps(faults))
    (tmp_path / tables.SURVIVORS).write_text('a = "Both give the same."')
    assert "| `plan` | 2 | 1 | 1 |" in tables.mutants(tmp_path)
    assert tables.survivors(tmp_path).splitlines()[2:] == [
        "| `plan/x.py`, `f` | `a \\| b` → `b` | Both give the same. |"
    ]
    line = "| sign | `kernels/y.py` | sm80, `forward f16` | 0.25 (output) | output: infinity |"
    assert line in tables.kernel_faults(tmp_path)


def test_the_map_keeps_the_tests_of_files_that_did_not_change() -> None:
    old = {
        "tests": [["a.py::x", 1.0], ["b.py::y", 2.0], ["c.py::z", 3.0]],
        "lines": {"s.py": {"1": [0, 1], "2": [2], "3": [1]}},
    }
    new = {"tests": [["b.py::new", 0.5]], "lines": {"s.py": {"2": [0]}, "t.py": {"7": [0]}}}
    found = mutate._merged(old, new, {"a.py": "0", "b.py": "1"}, ["b.py"])  # c.py is gone
    assert found["tests"] == [["a.py::x", 1.0], ["b.py::new", 0.5]]
    assert found["lines"] == {"s.py": {"1": [0], "2": [1], "3": []}, "t.py": {"7": [1]}}


def test_a_copy_of_the_tree_has_the_files_of_the_checkout(tmp_path: Path) -> None:
    tree.copy_tree(tmp_path, "tools/lab/mutation")
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    assert {"tools/lab/mutation/tree.py", "tools/lab/mutation/operators.py"} <= copied
    changed = tmp_path / "tools/lab/mutation/tree.py"
    changed.write_text("changed")
    tree.copy_tree(tmp_path, "tools/lab/mutation")
    assert changed.read_bytes() == (ROOT / "tools/lab/mutation/tree.py").read_bytes()


def test_a_fault_without_its_kernel_is_no_fault_that_was_caught(driver_log: FakeDriver, tmp_path: Path) -> None:
    fault = next(each for each in kernel_faults.FAULTS if each.shown_by == kernel_faults.FORWARD_SM80_BIAS)
    expected = guarded_check.expect(fault.case)
    with pytest.raises(Stale, match=fault.build.symbol):
        kernel_faults.ratios_of(fault, expected, Folder(tmp_path))
    # The fake driver launches nothing, so that the results are far from the reference.
    Folder(tmp_path).put(fakes.artifact(fault.build))
    found = kernel_faults.ratios_of(fault, expected, Folder(tmp_path))
    assert not kernel_faults.passes(found)
