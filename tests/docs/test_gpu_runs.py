"""Tests of the GPU record: it is complete, an edited block is missing from it, and a run reports every block."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs import gpu_runs
from tools.docs.code_block import CodeBlock


def test_gpu_blocks_have_passed_on_a_gpu_as_they_are() -> None:
    assert gpu_runs.unrecorded() == []


def test_an_edited_gpu_block_must_run_again(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    page = tmp_path / "docs/page.md"
    page.write_text("<!-- kernels: a_b c -->\n```python gpu\nlaunch()\n```\n")
    assert gpu_runs.unrecorded(tmp_path) == ["page.md:3"]
    ((block,),) = gpu_runs.programs(tmp_path)
    (tmp_path / gpu_runs.RECORD).write_text(json.dumps({block.sha256: {"gpu": "toy"}}))
    assert gpu_runs.unrecorded(tmp_path) == []
    page.write_text(page.read_text().replace("launch()", "launch(2)"))
    assert gpu_runs.unrecorded(tmp_path) == ["page.md:3"]
    page.write_text(page.read_text().replace("launch(2)", "launch()") + "```text\n1\n```\n")
    assert gpu_runs.unrecorded(tmp_path) == ["page.md:3"]
    assert gpu_runs.kernels_of(page) == ["a_b", "c"]


def test_a_program_ends_with_the_last_gpu_block(tmp_path: Path) -> None:
    infos = ("python", "sh", "python host", "python gpu", "python", "python gpu", "python")
    (tmp_path / "README.md").write_text("\n".join(f"```{info}\npass\n```" for info in infos))
    (program,) = gpu_runs.programs(tmp_path)
    assert [block.info for block in program] == ["python", "python gpu", "python", "python gpu"]


def test_a_run_reports_every_gpu_block() -> None:
    good = [CodeBlock("good.md", 2, "python", "x = 1"), CodeBlock("good.md", 6, "python gpu", "print(x)", "1\n")]
    bad = [CodeBlock("bad.md", 2, "python gpu", "assert False, 'no'")]
    other = [CodeBlock("other.md", 2, "python gpu", "print(2)", "3\n")]
    found = {block.name: failure for block, failure in gpu_runs.run_programs([good, bad, other])}
    assert found["good.md:6"] == ""
    assert found["bad.md:2"] == "AssertionError: no"
    assert found["other.md:2"].startswith("AssertionError: other.md:2: printed\n2\n")


def test_the_gpu_machine_reads_what_build_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runs, "kernels_of", lambda page: [])
    gpu_runs.build(tmp_path)
    assert gpu_runs.read_programs(tmp_path) == gpu_runs.programs()
    code = "import sys; sys.modules['sybil'] = None; from tools.docs import gpu_runs; from pathlib import Path; "
    code += f"print(len(gpu_runs.read_programs(Path({str(tmp_path)!r}))))"
    root = gpu_runs.ROOT
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout
    assert int(printed) == len(gpu_runs.programs())
