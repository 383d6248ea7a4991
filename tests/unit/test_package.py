"""Tests of the package as a whole: what its wheel holds, what it exports, and which packages its remedies install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cutlass_py_attn
from cutlass_py_attn import extras
from cutlass_py_attn.artifact import Folder

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def fresh_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs another process of this Python in the checkout."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_wheel_has_what_is_no_module() -> None:
    """The marker of a package with types, templates, and the C source that is compiled where the wheel is installed."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="the build backend is not installed")
    files = {item.distribution_path for item in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {
        "cutlass_py_attn/py.typed",
        "cutlass_py_attn/__init__.py",
        "cutlass_py_attn/bundle/templates/header.h.j2",
        "cutlass_py_attn/jax/native_handler.c",
    } <= files


def test_remedies_install_the_packages_of_the_extras() -> None:
    declared = PROJECT["optional-dependencies"]
    assert {name: tuple(declared[name]) for name in extras.PACKAGES} == extras.PACKAGES
    assert tuple(PROJECT["dependencies"]) == extras.REQUIRED


def test_a_remedy_names_no_package_of_this_project() -> None:
    """This project is in no index, so pip finds the packages of its extras only by their own names."""
    assert extras.remedy("compile") == "pip install nvidia-cutlass-dsl==4.8.1"
    assert extras.remedy("cli") == "pip install 'click>=8.2' 'rich>=14' 'jinja2>=3.1'"
    sources = [*(ROOT / "cutlass_py_attn").rglob("*.py")]
    naming = [path.name for path in sources if re.search(r"pip install [\"']?cutlass-py-attn", path.read_text())]
    assert not naming


def test_types_of_the_public_functions_are_public() -> None:
    names = {"AttentionOptions", "BackwardOptions", "Build", "ForwardOptions", "Mask"}
    assert names <= set(cutlass_py_attn.__all__)
    assert all(getattr(cutlass_py_attn, name).__name__ == name for name in names)


@pytest.mark.parametrize("name", ["jax", "torch_ops"])
def test_subpackages_are_attributes(name: str) -> None:
    if name == "jax":
        pytest.importorskip("jax")
    done = fresh_python("-c", f"import cutlass_py_attn as c; print({name!r} in dir(c), c.{name}.__name__)")
    assert done.stdout.split() == ["True", f"cutlass_py_attn.{name}"], done.stderr


def test_the_package_is_a_program() -> None:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    done = fresh_python("-m", "cutlass_py_attn", "--version")
    assert done.stdout == f"cutlass-py-attn, version {cutlass_py_attn.__version__}\n", done.stderr
    assert PROJECT["version"] == cutlass_py_attn.__version__


def test_folders_compare_by_path(tmp_path: Path) -> None:
    """A function of a build is part of cache keys: a new object for the same folder must not compile or bind again."""
    assert Folder(tmp_path) == Folder(str(tmp_path))
    assert len({Folder(tmp_path), Folder(tmp_path / "."), Folder(tmp_path / "other")}) == 2
    assert Folder(tmp_path) != tmp_path
    assert repr(Folder(tmp_path)) == f"Folder({str(tmp_path)!r})"
