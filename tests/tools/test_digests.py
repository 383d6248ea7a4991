"""Tests of the digests: edits of the code that launches or checks change them, edits of the prose do not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.release import digests

ROOT = Path(__file__).resolve().parents[2]
TEXT = '''"""Title."""

import math  # a module


class A:
    """A class."""

    size: int = 1

    def area(self, *, factor: float = 2.0) -> float:
        """Returns the area."""
        return self.size * factor  # in metres
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code that the digests cover."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in (digests.PACKAGE, "tools"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return root


def changed_by(root: Path, name: str, edit: Callable[[str], str]) -> set[str]:
    """The digests that an edit of a file changes."""
    path, before = root / name, digests.of(root)  # hashes of texts are kept
    text = path.read_text()
    assert edit(text) != text, "the edit must match"
    path.write_text(edit(text))
    try:
        return {key for key, value in digests.of(root).items() if value != before[key]}
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  # in metres", ""),
        ('"""Returns the area."""', '"""Returns the area of the square."""'),
        ('        """Returns the area."""\n', ""),
        ('"""Title."""\n', ""),
        ("self.size * factor", "(\n            self.size\n            * factor\n        )"),
        ("\n\n\nclass", "\nclass"),
    ],
)
def test_prose_and_formatting_do_not_count(tmp_path: Path, before: str, after: str) -> None:
    assert digest(tmp_path, TEXT) == digest(tmp_path, TEXT.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.size * factor", "factor * self.size"),
        ("2.0", "2"),
        ("size: int = 1", "size: int = 2"),
        ("*, factor", "factor"),
        ("import math", "import cmath"),
        ("self.size * factor", "self.size / factor"),
        ("        return self.size * factor", "        pass"),
        ("2.0", "None"),
    ],
)
def test_code_counts(tmp_path: Path, before: str, after: str) -> None:
    assert digest(tmp_path, TEXT) != digest(tmp_path, TEXT.replace(before, after))


def digest(folder: Path, text: str) -> str:
    (folder / "a.py").write_text(text)
    return digests.code_sha256(folder / "a.py")


def digest_of(folder: Path, **texts: str) -> str:
    """The digest of files of these names."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return digests.files_sha256(folder, [f"{name}.py" for name in texts])


def test_where_a_statement_stands_does_not_count(tmp_path: Path) -> None:
    importing = TEXT.replace("import math", "import math\nfrom tools.a import A") + "\n\nB = 2\n"
    parted = {"c": TEXT, "b": "from tools.c import A\n\nB = 2\n"}
    assert digest_of(tmp_path, a=importing) == digest_of(tmp_path, other=importing) == digest_of(tmp_path, **parted)
    assert digest_of(tmp_path, a="B = 1\n", b="B = 2\n") != digest_of(tmp_path, a="B = 1\n", b="B = 1\n")
    assert digest_of(tmp_path, a="B = 1\n", b="B = 1\n") != digest_of(tmp_path, a="B = 1\n")


@pytest.mark.parametrize("line", ["{}\n\nB = 2\n", "def f():\n    {}\n    return g()\n"])
def test_imports_count_by_the_names_that_they_give(tmp_path: Path, line: str) -> None:
    own = "from cutlass_py_attn.launch.abi import g"
    moved = "from cutlass_py_attn.plan.tile_tables import g"
    assert digest(tmp_path, line.format(own)) == digest(tmp_path, line.format(moved))
    assert digest(tmp_path, line.format(own)) != digest(tmp_path, line.format(own.replace("import g", "import h as g")))
    assert digest(tmp_path, line.format("from math import g")) != digest(tmp_path, line.format("from cmath import g"))


def test_imports_for_types_do_not_count(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\n\n"
    assert digest(tmp_path, f"{typed}if TYPE_CHECKING:\n    from tools import a\n") == digest(tmp_path, typed)


def test_other_files_count_with_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.j2").write_text("# a comment\n")
    before = digests.code_sha256(tmp_path / "a.j2")
    (tmp_path / "a.j2").write_text("# comment\n")
    assert digests.code_sha256(tmp_path / "a.j2") != before


def test_the_launch_covers_parameters_launchers_and_plans() -> None:
    found = digests.launch_files(ROOT)
    names = ("params", "fill", "binding", "plan_launchers", "kernel_launch", "driver_calls", "tensor_maps", "driver")
    assert {f"cutlass_py_attn/runtime/{name}.py" for name in names} <= set(found)
    plans = (
        "plan/planner",
        "plan/launch_rules",
        "kernels/sm90_family/tiles",
        "launch/abi",
        "launch/entry_points",
        "launch/split_kv",
    )
    kernels = ("kernels/sm80/kernel", "kernels/sm90_forward/kernel", "kernels/decode/kernel")
    assert {f"cutlass_py_attn/{name}.py" for name in (*plans, *kernels)} <= set(found)


def test_the_checks_cover_the_verifier_the_random_cases_and_what_they_import() -> None:
    found = digests.check_files(ROOT)
    names = ("check", "guarded_check", "accuracy", "inputs", "cases", "device_memory", "layouts")
    assert {f"cutlass_py_attn/testing/{name}.py" for name in names} <= set(found)
    assert {f"tests/cases/{name}.py" for name in ("random_cases", "covering_cases", "decode_cases")} <= set(found)
    assert {f"tools/release/{name}.py" for name in ("verify_gpu", "fuzz", "fuzz_run")} <= set(found)


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "changed"),
    [
        ("tools/release/verify_gpu.py", r"\n        check\.assert_accurate\(case, found\)", "", {"checks"}),
        ("tools/release/verify_gpu.py", r"assert error <= allowed", "assert error >= 0", {"checks"}),
        ("tools/release/fuzz_run.py", r"ratio <= 1 for", "ratio <= 9 for", {"checks"}),
        ("cutlass_py_attn/testing/guarded_check.py", r"TIMES_LOW: Final = 4\.0", "TIMES_LOW: Final = 40.0", {"checks"}),
        ("cutlass_py_attn/runtime/fill.py", r"\Z", "\nCHANGED = 1\n", {"launch"}),
        (
            "cutlass_py_attn/runtime/plan_launchers.py",
            r"MIN_GRAPH_LAUNCHES: Final = \d+",
            "MIN_GRAPH_LAUNCHES = 9",
            {"launch"},
        ),
        ("cutlass_py_attn/kernels/common/combine.py", r"\Z", "\nCHANGED = 1\n", {"kernels"}),
        ("cutlass_py_attn/testing/guarded_check.py", r"\Z", "\n# A comment.\n", set()),
        ("tools/release/verify_gpu.py", r'"""Verify GPU:', '"""Verifier:', set()),
        ("cutlass_py_attn/kernels/common/combine.py", r"\Z", "\n# A comment.\n", set()),
        ("cutlass_py_attn/api/results.py", r"\Z", "\nCHANGED = 1\n", set()),
    ],
)
def test_an_edit_changes_the_digests_of_what_it_decides(
    checkout: Path, name: str, pattern: str, replacement: str, changed: set[str]
) -> None:
    assert changed_by(checkout, name, lambda text: re.sub(pattern, replacement, text, count=1)) == changed
