"""C compilers for tests: which command compiles, with which warnings, and the compiler's words if it fails."""

from __future__ import annotations

import shutil
import subprocess

import pytest

WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
STRICT = (*WARNINGS, "-Wpedantic", "-Wconversion")  # a header is compiled with its includer's warnings


def compiler(language: str) -> str:
    """Returns the command that compiles "c" or "c++"; skips the test if there is none."""
    found = shutil.which({"c": "gcc", "c++": "g++"}[language])
    if found is None:
        pytest.skip(f"no {language} compiler")
    return found


def build(command: list[str]) -> None:
    """Runs a compiler; its words are the failure's."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
