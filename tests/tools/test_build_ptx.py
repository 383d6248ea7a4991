"""Build PTX: --suite compiles what the whole of tests/gpu needs, or what a family of kernels has of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.testing.cases import ARCH, SM90_ARCH, Case, builds_of
from tests.cases import suite
from tools.release import build_ptx, record

CASES = tuple(map(Case.parse, ("forward bf16_d64_s128_b1_h1_full", "forward bf16_d128_q1_s999_b1_h8k2_full")))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Runs --suite; returns the kernels that it compiles and the commands that it runs, without doing either."""
    needed: list[Any] = []
    commands: list[Any] = []
    monkeypatch.setattr(suite, "builds", lambda arch: builds_of(CASES, arch))
    monkeypatch.setattr(build_ptx, "build_new_term", lambda folder: needed.append("new term"))
    monkeypatch.setattr(build_ptx, "build_into", lambda folder, builds: needed.extend(builds))
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append((command, options)))

    def run(*options: str) -> tuple[list[Any], list[Any]]:
        monkeypatch.setattr(sys, "argv", ["build_ptx", "--suite", str(tmp_path), *options])
        assert build_ptx.main() == 0
        return needed, commands

    return run


def test_one_command_compiles_all_that_tests_need(
    built: Callable[..., tuple[list[Any], list[Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    needed, commands = built()
    assert needed[0] == "new term"
    portable = builds_of(CASES, ARCH)
    hopper = [choices for choices in builds_of(CASES, SM90_ARCH) if choices[0].family == "sm90"]
    assert needed[1:] == [*portable, *hopper]
    assert hopper
    assert [command[1:] for command, _ in commands] == [
        ["-m", f"tests.gpu.hosts.test_jax_{name}", str(tmp_path)] for name in ("sharding", "context")
    ]
    assert all(options == {"cwd": build_ptx.ROOT, "check": True} for _, options in commands)
    for _, name, _ in (command[1:] for command, _ in commands):
        assert 'if __name__ == "__main__":\n    build(' in (build_ptx.ROOT / f"{name.replace('.', '/')}.py").read_text()


def test_without_jax_its_programs_are_left_out(
    built: Callable[..., tuple[list[Any], list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, commands = built()
    assert commands == []
    assert "JAX is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "has_term"), [("sm80", True), ("sm90", False)])
def test_one_family(built: Callable[..., tuple[list[Any], list[Any]]], family: str, has_term: bool) -> None:
    needed, commands = built("--family", family)
    assert commands == []
    assert ("new term" in needed) == has_term
    archs = {choices[0].arch for choices in needed if choices != "new term"}
    assert archs == {SM90_ARCH if family == "sm90" else ARCH}


def test_a_part_of_the_suite_is_compiled_alone(
    built: Callable[..., tuple[list[Any], list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of keys have kernels on sm_90a alone."""
    ranges = [Case.parse(f"forward bf16_d64_s128_b1_h1_full_{word}") for word in ("ranges11", "rangesb1runs")]
    monkeypatch.setattr(suite, "builds", lambda arch: builds_of((*CASES, *ranges), arch))
    needed, commands = built("--only", "_ranges")
    assert [record.name_of(choices[0]) for choices in needed] == ["sm_90a/fwd_sm90_bf16_d64_ranges_192x128"]
    assert commands == []
