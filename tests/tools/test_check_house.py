"""Tests of tools/check_house.py: each rule finds a small offence of its own, and a clean tree passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_house

SCRIPT = Path(check_house.__file__)
README = """# Clean
```sh
pip install x && python -m pytest -n 2
```
"""
CI = "pip install x\npython -m pytest -n 2\n"
CLEAN = '"""One: a module."""\n'
ONE = "cutlass_py_attn/one.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The smallest tree without a finding."""
    for name, text in (("README.md", README), (".ci/run", CI), (ONE, CLEAN)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def findings(tree: Path, body: str = "", *, name: str = ONE, head: str = CLEAN) -> list[str]:
    """The findings in the clean tree when file `name` has `body` after `head`."""
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + body)
    return [str(finding) for finding in check_house.check(tree)]


def test_clean_tree_passes(tree: Path) -> None:
    assert findings(tree) == []


@pytest.mark.parametrize("value", ["at", "at if ahead else other", "(at, 1)"])
def test_a_pipeline_state_has_one_name(tree: Path, value: str) -> None:
    body = f"    second = {value}\n    while ahead:\n        at.advance()\n"
    kernel = f"@cute.jit\ndef consume(self, at, other, ahead):\n{body}"
    assert findings(tree, kernel) == [f"{ONE}:4: second name of a pipeline state, found at, allowed one"]
    assert findings(tree, kernel.replace("@cute.jit\n", "")) == [], "no kernel"
    assert findings(tree, kernel.replace("at.advance()", "at.index")) == [], "no state that is advanced"
    assert findings(tree, kernel.replace(f"= {value}", "= copy_of(at)")) == [], "a state of its own"


@pytest.mark.parametrize("root", ["work", "home"])
def test_machine_paths(tree: Path, root: str) -> None:
    assert "machine path" in findings(tree, f"x = '/{root}/me/file'\n")[0]
    assert findings(tree, f"x = 'docs/{root}/file'\n") == []
    findings(tree)
    found = findings(tree, f"see /{root}/me\n", name="notes.md", head="")
    assert found == [f"notes.md:1: machine path, found /{root}/, allowed relative paths"]


def test_test_command_must_be_the_one_of_ci(tree: Path) -> None:
    (tree / ".ci" / "run").write_text(CI.replace("-n 2", "-n 4"))
    assert "test command, found 'python -m pytest -n 2'" in findings(tree)[0]
    (tree / "README.md").write_text(README.replace("-m pytest", "-m unittest"))
    assert "test command, found none" in findings(tree)[0]


@pytest.mark.parametrize(("body", "code"), [("", 0), (f"# /{'home'}/me\n", 1)])
def test_exit_code(tree: Path, body: str, code: int) -> None:
    lines = findings(tree, body)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, SCRIPT, tree], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code
    assert done.stdout.splitlines() == [*lines, f"check_house: {len(lines)} findings"]
