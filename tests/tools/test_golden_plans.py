"""Tests of golden plans: what counts as a difference, and that a change of the planner is one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.plan import planner
from tools.lab import golden_plans

SOME = golden_plans.cases(1)[:3]
EACH = len(golden_plans.TARGETS) * len(golden_plans.SM_COUNTS)


def test_plans_of_today_are_equal() -> None:
    before = golden_plans.lines(SOME)
    assert golden_plans.differences(before, golden_plans.lines(SOME)) == (3, [])
    assert all(line.endswith(case.line) for line, case in zip(before, SOME, strict=True))


def test_another_grid_is_a_difference_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = golden_plans.lines(SOME[:1]), planner.plans

    def wider(problem: Any, arch: str, count: int) -> Any:
        first, *others = real(problem, arch, count)
        x, y, z = first.launches[0].grid
        launch = dataclasses.replace(first.launches[0], grid=(x + (arch == "sm_90" and count == 132), y, z))
        return [dataclasses.replace(first, launches=(launch, *first.launches[1:])), *others]

    monkeypatch.setattr(planner, "plans", wider)
    expected = f"sm_90 of 132 multiprocessors: {SOME[0].line}"
    assert golden_plans.differences(before, golden_plans.lines(SOME[:1])) == (1, [expected])


def test_only_cases_of_both_files_are_compared() -> None:
    line = golden_plans.lines(SOME[:1])[0]
    other = " ".join(["0" * 16] * EACH) + " " + SOME[1].line
    assert golden_plans.differences([line], [other]) == (0, [])
    assert golden_plans.differences([line, other], [other]) == (1, [])


def test_the_command_writes_compares_and_names_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden_plans, "cases", lambda runs: SOME[:runs])
    monkeypatch.setattr(golden_plans, "all_lines", lambda drawn, processes: golden_plans.lines(drawn))
    path = tmp_path / "plans.txt"

    def run(action: str) -> int:
        monkeypatch.setattr(sys, "argv", ["golden_plans", action, str(path), "--runs", "2"])
        return golden_plans.main()

    assert run("--write") == 0
    assert run("--compare") == 0
    path.write_text("0" + path.read_text()[1:] if path.read_text()[0] != "0" else "1" + path.read_text()[1:])
    assert run("--compare") == 1
    text = capsys.readouterr().out
    assert f"sm_80 of 16 multiprocessors: {SOME[0].line}\n" in text
    assert text.endswith(f"2 of 2 problems compared: 1 of {2 * EACH} differ\n")
    path.write_text("")
    assert run("--compare") == 1
