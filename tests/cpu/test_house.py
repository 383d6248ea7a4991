"""Tests of tools/check_house.py: each rule sees its own small offence, and a clean tree passes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "check_house.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_house", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_house"] = module
    spec.loader.exec_module(module)
    return module


house = _load()

README = """# Clean
```sh
pip install x && python -m pytest tests/cpu -n 2
```
```
cutlass_py_attn/
  one.py        One.
  sub/
    two.py      Two.
```
"""
CI = "pip install x\npython -m pytest tests/cpu -n 2\n"
CLEAN = '"""One: a module."""\n'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The smallest tree without an objection."""
    for name, text in (("README.md", README), (".ci/run", CI), ("cutlass_py_attn/one.py", CLEAN),
                       ("cutlass_py_attn/sub/two.py", CLEAN)):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def objections(tree: Path, body: str = "", *, head: str = CLEAN) -> list[str]:
    """What check_house prints for the clean tree with `body` added to one.py."""
    (tree / "cutlass_py_attn" / "one.py").write_text(head + body)
    return [str(item) for item in house.check(tree)]


def function(lines: int, decorator: str = "") -> str:
    """A function of exactly that many lines."""
    return f"{decorator}def long():\n" + "    x = 1\n" * (lines - 1)


def test_clean_tree_passes(tree: Path) -> None:
    assert objections(tree) == []


def test_file_length(tree: Path) -> None:
    assert objections(tree, "x = 1\n" * 449) == []
    assert objections(tree, "x = 1\n" * 450) == [
        "cutlass_py_attn/one.py:451: file length, found 451 lines, allowed 450"
    ]


def test_function_length(tree: Path) -> None:
    assert objections(tree, function(60)) == []
    assert objections(tree, function(61)) == ["cutlass_py_attn/one.py:2: length of long, found 61 lines, allowed 60"]


@pytest.mark.parametrize("decorator", ["@cute.kernel\n", "@cute.jit\n", "@cute.jit(preprocess=True)\n"])
def test_kernel_length(tree: Path, decorator: str) -> None:
    assert objections(tree, function(150, decorator)) == []
    assert len(objections(tree, function(151, decorator))) == 1


def test_parameters(tree: Path) -> None:
    eight = ", ".join(f"a{i}" for i in range(8))
    assert objections(tree, f"class C:\n    def f(self, {eight}, *, {eight.replace('a', 'k')}): ...\n") == []
    assert "positional parameters of f, found 9" in objections(tree, f"def f({eight}, a8): ...\n")[0]
    keywords = f"def f(*, {eight}, a8): ...\n"
    assert "keyword-only parameters of f, found 9" in objections(tree, keywords)[0]


def nested(depth: int, last: str = "pass") -> str:
    """`depth` if blocks in each other."""
    rows = [f"{'    ' * (level + 1)}if a{level}:" for level in range(depth)]
    return "\n".join(["def deep():", *rows, f"{'    ' * (depth + 1)}{last}", ""])


def test_nesting(tree: Path) -> None:
    assert objections(tree, nested(3)) == []
    assert "nesting of deep, found 4, allowed 3" in objections(tree, nested(4))[0]
    assert objections(tree, "@cute.kernel\n" + nested(4)) == []
    chain = "def f():\n    if a:\n        pass\n" + "    elif b:\n        pass\n" * 5
    assert objections(tree, chain) == []


@pytest.mark.parametrize(
    "block",
    [
        "try:\n{0}\nfinally:\n    pass",
        "try:\n    pass\nexcept ValueError:\n{0}",
        "match a:\n    case 1:\n{0}",
    ],
)
def test_nesting_counts_every_kind_of_block(block: str) -> None:
    inner = "if a:\n    if b:\n        if c:\n            pass"
    text = block.format("\n".join(f"        {line}" for line in inner.splitlines()))
    body = house.ast.parse(text).body
    assert house._depth(body) == 4


@pytest.mark.parametrize(
    "comment",
    [
        "x = self.value", "call(x)", "import os", "return x", "for i in range(3):", "if x == 1:", "x[0] = 1",
        "name = 'text'", "del x", "f(x, y=1)",
    ],
)  # fmt: skip
def test_commented_out_code(tree: Path, comment: str) -> None:
    found = objections(tree, f"# {comment}\n")
    assert [text for text in found if "commented-out code" in text] == found
    assert len(found) == 1


@pytest.mark.parametrize(
    "comment",
    [
        "ds = p * (dp - delta)", "4  dV += P^T dO", "(tile_m, tile_n)", "fmt: skip", "type: ignore[arg-type]",
        "if needed:", "the call f(x) is slow", "p = exp2(s * scale_log2 - lse_log2)", "head_dim",
    ],
)  # fmt: skip
def test_prose_and_equations_are_not_code(tree: Path, comment: str) -> None:
    assert objections(tree, f"# {comment}\n") == []


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX"])
def test_unfinished_marks_need_an_issue(tree: Path, word: str) -> None:
    assert objections(tree, f"# {word} (#12): widen the tile\n") == []
    assert "unfinished mark" in objections(tree, f"# {word}: widen the tile\n")[0]


@pytest.mark.parametrize("name", ["hdim", "blk", "blk_m", "nheads", "kBlockM", "n_hdim"])
def test_forbidden_names(tree: Path, name: str) -> None:
    assert f"name, found {name}," in objections(tree, f"{name} = 1\n")[0]


def test_names_that_merely_contain_a_forbidden_one(tree: Path) -> None:
    assert objections(tree, "block = num_heads = 1\n") == []


@pytest.mark.parametrize("root", ["work", "home"])
def test_machine_paths(tree: Path, root: str) -> None:
    assert "machine path" in objections(tree, f"x = '/{root}/me/file'\n")[0]
    assert objections(tree, f"x = 'docs/{root}/file'\n") == []
    objections(tree)
    (tree / "notes.md").write_text(f"see /{root}/me\n")
    assert [str(item) for item in house.check(tree)] == [
        f"notes.md:1: machine path, found /{root}/, allowed relative paths"
    ]


def test_opening_docstring(tree: Path) -> None:
    assert "no docstring" in objections(tree, "x = 1\n", head="")[0]
    assert "no docstring" in objections(tree, head='\n"""Late: a docstring."""\n')[0]
    assert "ends with a full stop" in objections(tree, head='"""Half a\n\nsentence."""\n')[0]


@pytest.mark.parametrize("value", ["at", "at if ahead else other", "(at, 1)"])
def test_a_pipeline_state_has_one_name(tree: Path, value: str) -> None:
    body = f"    second = {value}\n    while ahead:\n        at.advance()\n"
    kernel = f"@cute.jit\ndef consume(self, at, other, ahead):\n{body}"
    assert objections(tree, kernel) == [
        "cutlass_py_attn/one.py:4: second name of a pipeline state, found at, allowed one"
    ]
    assert objections(tree, kernel.replace("@cute.jit\n", "")) == [], "no kernel"
    assert objections(tree, kernel.replace("at.advance()", "at.index")) == [], "no state that moves"
    assert objections(tree, kernel.replace(f"= {value}", "= behind(at)")) == [], "a state of its own"


def test_star_import(tree: Path) -> None:
    assert "from cutlass import *" in objections(tree, "from cutlass import *\n")[0]


def test_file_map_misses_a_file(tree: Path) -> None:
    (tree / "cutlass_py_attn" / "sub" / "three.py").write_text(CLEAN)
    found = objections(tree)
    assert len(found) == 1
    assert "no line for cutlass_py_attn/sub/three.py" in found[0]


def test_file_map_names_a_file_that_is_gone(tree: Path) -> None:
    (tree / "cutlass_py_attn" / "sub" / "two.py").unlink()
    found = objections(tree)
    assert len(found) == 1
    assert found[0].startswith("README.md:9: file map, found cutlass_py_attn/sub/two.py, which does not exist")


def test_file_map_needs_sentences(tree: Path) -> None:
    (tree / "README.md").write_text(README.replace("  One.", ""))
    assert "one.py without a sentence" in objections(tree)[0]


def test_test_command_must_be_the_one_of_ci(tree: Path) -> None:
    (tree / ".ci" / "run").write_text(CI.replace("-n 2", "-n 4"))
    assert "test command, found 'python -m pytest tests/cpu -n 2'" in objections(tree)[0]
    (tree / "README.md").write_text(README.replace("-m pytest", "-m unittest"))
    assert "test command, found none" in objections(tree)[0]


@pytest.mark.parametrize(("body", "code"), [("", 0), ("from a import *\n", 1)])
def test_exit_code(tree: Path, body: str, code: int) -> None:
    lines = objections(tree, body)
    done = subprocess.run([sys.executable, SCRIPT, tree], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines() == [*lines, f"check_house: {len(lines)} objections"]
