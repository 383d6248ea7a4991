"""Tests of the mutation run and of the kernel faults: operators, selection of tests, and the committed records."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.testing import guarded_check
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.lab.mutation import kernel_faults, mutate, operators, tables

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


def test_a_fault_without_its_kernel_is_no_fault_that_was_caught(driver_log: FakeDriver, tmp_path: Path) -> None:
    fault = next(each for each in kernel_faults.FAULTS if each.shown_by == kernel_faults.FORWARD_SM80_BIAS)
    expected = guarded_check.expect(fault.case)
    with pytest.raises(Stale, match=fault.build.symbol):
        kernel_faults.ratios_of(fault, expected, Folder(tmp_path))
    # The fake driver launches nothing, so that the results are far from the reference.
    Folder(tmp_path).put(fakes.artifact(fault.build))
    found = kernel_faults.ratios_of(fault, expected, Folder(tmp_path))
    assert not kernel_faults.passes(found)
