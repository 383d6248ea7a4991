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


@pytest.mark.parametrize(
    ("text", "found", "instead"),
    [
        ("The five rooms.", "rooms", "component GEMM"),
        ("Each room has a file.", "Each room", "component GEMM"),
        ("The guest's stream.", "guest", "framework, array library"),
        ("Runs on a stand-in driver.", "stand-in", "fake (a fake driver), placeholder"),
        ("Sequences lie behind\n    each other.", "behind each other", "one after another, concatenated"),
        ("Whose turn it is.", "Whose turn", "the next worker in the order of the semaphore"),
        ("The hopper family.", "hopper family", "sm90 kernels"),
        ("A verdict.", "verdict", "accuracy check, result"),
    ],
)
def test_private_words(tree: Path, text: str, found: str, instead: str) -> None:
    finding = f"private word, found {found!r}, allowed {instead}"
    (inside,) = findings(tree, f'def f():\n    """{text}"""\n')
    assert inside.startswith(f"{ONE}:3: {finding}")
    assert findings(tree, f"x = {text!r}\n") == [], "neither comment nor docstring"
    (comment,) = findings(tree, f"x = 1  # {' '.join(text.split())}\n")
    assert comment.startswith(f"{ONE}:2: {finding}")
    findings(tree)
    (page,) = findings(tree, f"\n{text}\n", name="docs/page.md", head="# Page\n")
    assert page.startswith(f"docs/page.md:3: {finding}")
    (tree / "docs" / "page.md").unlink()
    assert findings(tree, text, name="CHANGELOG.md", head="") == [], "a table of renames spells old words"


@pytest.mark.parametrize(
    "text",
    [
        "There is no room for a third stage.",
        "This leaves the other stage little room.",
        "The `rooms` option.",
        "See docs/guest.md.",
        "Mushrooms.",
        "room_bytes",
    ],
)
def test_words_of_the_field_pass(tree: Path, text: str) -> None:
    assert findings(tree, f"# {text}\n") == []


def test_a_lane_is_a_thread_of_a_warp_except_on_the_host(tree: Path) -> None:
    assert findings(tree, "# Lane 0 stores.\n", name="cutlass_py_attn/kernels/one.py") == []
    name = "cutlass_py_attn/runtime/one.py"
    assert findings(tree, "# The lane.\n", name=name) == [f"{name}:2: private word, found 'lane', allowed launcher"]


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


@pytest.mark.parametrize(("body", "code"), [("", 0), ("# A guest.\n", 1)])
def test_exit_code(tree: Path, body: str, code: int) -> None:
    lines = findings(tree, body)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, SCRIPT, tree], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == code
    assert done.stdout.splitlines() == [*lines, f"check_house: {len(lines)} findings"]
