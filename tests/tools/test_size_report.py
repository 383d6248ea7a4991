"""Tests of the size report: what counts as a line, and where."""

from __future__ import annotations

from pathlib import Path

from tools.lab import size_report


def test_lines_by_folder_and_lines_that_name_families(tmp_path: Path) -> None:
    texts = {
        "cutlass_py_attn/errors.py": "a\nb\n",
        "cutlass_py_attn/plan/one.py": "family = 'sm80'\nother = 1\n",
        "cutlass_py_attn/kernels/sm90/two.py": "SM90 = 'sm90'\n",
        "tests/unit/plan/test_one.py": "a\n\nb\n",
        "tools/check.py": "a\n",
        "docs/page.md": "a\nb\n",
        "docs/reference.md": "a\nb\nc\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert size_report.sizes(tmp_path) == {
        "cutlass_py_attn": 2,
        "cutlass_py_attn/kernels": 1,
        "cutlass_py_attn/plan": 2,
        "docs": 2,
        size_report.OF_FAMILIES: 1,
        "tests/unit": 3,
        "tools": 1,
    }


def test_the_report_has_the_change_against_the_base() -> None:
    base = {"cutlass_py_attn/plan": 12, "cutlass_py_attn/gone": 3, "tests/unit": 4}
    lines = size_report.report({"cutlass_py_attn/plan": 10, "tools": 2, "tests/unit": 4}, base).splitlines()
    assert [line.split() for line in lines] == [
        ["cutlass_py_attn/gone", "0", "-3"],
        ["cutlass_py_attn/plan", "10", "-2"],
        ["tests/unit", "4", "+0"],
        ["tools", "2", "+2"],
        ["all", "of", "the", "package", "10", "-5"],
        ["all", "of", "tests", "and", "tools", "6", "+2"],
    ]
