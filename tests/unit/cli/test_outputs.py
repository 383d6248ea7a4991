"""Tests of what ends a command early: places that cannot be written, Ctrl-C, a missing compiler, mistyped names."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result

from cutlass_py_attn import extras
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench import harness
from cutlass_py_attn.bundle import replacing
from cutlass_py_attn.cli import artifacts, catalogue, main
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.inspection import sass
from cutlass_py_attn.launch.build import Build
from tests.support import fakes

ROOT = Path(__file__).resolve().parents[3]
CASE = "f32_d64_s64_b1_h1_full"
BUILD = ("build", "--arch", "sm_80", "--kind", "forward", "--dtype", "f32", "--head-dim", "64", "--mask", "full")


def invoke(*arguments: object) -> Result:
    """Runs `cutlass-py-attn`; the result's output holds stderr too."""
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Build]:
    """Made-up artifacts in place of compiled ones; the builds that were asked for."""
    found: list[Build] = []

    def source(build: Build) -> tuple[Artifact, str]:
        found.append(build)
        return fakes.artifact(build), "0.5 s"

    monkeypatch.setattr(artifacts, "compiler", lambda: source)
    return found


# Places that cannot be written


def commands_that_write(place: Path) -> dict[str, tuple[object, ...]]:
    """Returns a command for each option that names a file or folder to write."""
    return {
        "build": (*BUILD, "-o", place),
        "export": ("export", "--problem", CASE, "--arch", "sm_80", "-o", place),
        "inspect": ("inspect", "--problem", CASE, "--arch", "sm_80", "--no-steps", "--html", place / "page.html"),
        "bench": ("bench", "--case", CASE, "-o", place / "rows.json"),
    }


@pytest.mark.parametrize("command", commands_that_write(Path()))
@pytest.mark.parametrize("below", [".", "new/folder"])
def test_a_place_that_cannot_be_written_is_refused_before_compiling(
    command: str, below: str, tmp_path: Path, compiled: list[Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run", lambda *_, **__: compiled.append(None))  # type: ignore[arg-type]
    (tmp_path / "file").write_text("in the way")
    done = invoke(*commands_that_write(tmp_path / "file" / below)[command])
    assert (done.exit_code, compiled) == (2, []), done.output
    assert "cannot be written (" in done.output or "is a file" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_full_target_is_one_sentence(compiled: list[Build], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(sass, "tool", lambda: None)
    done = invoke("inspect", "--problem", CASE, "--arch", "sm_80", "--no-steps", "--html", "/dev/full")
    assert done.exit_code == 1
    assert done.output == (
        "Error: /dev/full: cannot be written (No space left on device); free space, or name another place\n"
    )


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_is_one_sentence(
    tmp_path: Path, compiled: list[Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((Folder, "put"), (replacing, "_put")):
        monkeypatch.setattr(owner, name, no_space)
    for command in ("build", "export"):
        done = invoke(*commands_that_write(tmp_path / "out")[command])
        assert done.exit_code == 1
        assert done.output.endswith(
            f"Error: {tmp_path}/out: cannot be written (No space left on device); free space, or name another place\n"
        )


def test_a_probe_leaves_nothing_behind(tmp_path: Path, compiled: list[Build]) -> None:
    done = invoke(*BUILD, "--symbol", "fwd_sm80_f32_d64_full", "-o", tmp_path / "new" / "folder")
    assert done.exit_code == 2, "two ways to name kernels"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "rows.json").write_text("[1]")
    assert invoke("bench", "--case", "nonsense", "-o", tmp_path / "rows.json").exit_code == 1
    assert (tmp_path / "rows.json").read_text() == "[1]"


def test_other_errors_of_the_system_have_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "some/file")

    monkeypatch.setattr(catalogue, "entries", refuse)
    done = invoke("list")
    assert (done.exit_code, done.output) == (1, "Error: some/file: Permission denied\n")


# Ctrl-C


def test_ctrl_c_is_130_and_keeps_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(build: Build) -> tuple[Artifact, str]:
        if build.head_dim == 96:
            raise KeyboardInterrupt
        return fakes.artifact(build), "0.5 s"

    monkeypatch.setattr(artifacts, "compiler", lambda: source)
    done = invoke(*BUILD, "--head-dim", "96", "-o", tmp_path)
    assert (done.exit_code, done.output.strip()) == (130, "Interrupted.")
    assert {artifact.build.head_dim for artifact in Folder(tmp_path).all()} == {64}


def test_ctrl_c_ends_the_process_with_130() -> None:
    code = (
        "import os, signal, cutlass_py_attn.cli.catalogue as catalogue\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "catalogue.entries = lambda arch: os.kill(os.getpid(), signal.SIGINT)\n"
        "import sys; sys.argv = ['cutlass-py-attn', 'list']\n"
        "from cutlass_py_attn.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


# Missing compiler


@pytest.mark.parametrize("command", ["build", "export", "inspect", "run"])
def test_a_missing_compiler_names_what_pip_finds(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> NoReturn:
        raise CompileError("nothing here")

    monkeypatch.setattr(artifacts, "toolchain", missing)
    monkeypatch.setattr("cutlass_py_attn.cli.run.first_gpu", lambda: None)
    done = invoke(*{**commands_that_write(tmp_path / "out"), "run": ("run", "--problem", CASE)}[command])
    assert done.exit_code == 1
    assert done.output == (
        f"Error: there is no compiler, so nothing can be compiled: {extras.remedy('compile')}; "
        "or launch prebuilt kernels with --kernels\n"
    )


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["cutlass-py-attn", "--version"])
    with pytest.raises(SystemExit):
        main.main()
    assert warnings.formatwarning(UserWarning("so"), UserWarning, "file.py", 3) == "Warning: so\n"


# Mistyped names


@pytest.mark.usefixtures("few_kernels")
@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (("buidl",), "did you mean build?"),
        (("build", "--acrh", "sm_80"), "Did you mean '--arch'?"),
        (("build", "--arch", "sm90a", "-o", "x"), "did you mean sm_90a"),
        (("build", "--arch", "sm_80", "--kind", "forwad", "-o", "x"), "did you mean forward?"),
        (("build", "--arch", "sm_80", "--mask", "casual", "-o", "x"), "did you mean causal?"),
        (("run", "--mask", "windwo_left3"), "did you mean window?"),
        (("run", "--problem", "bf16_d64_s64_b1_h1_ful"), "did you mean full?"),
        (("export", "--arch", "sm_80,sm90a", "--problem", CASE, "-o", "x"), "did you mean sm_90a"),
        (("bench", "--case", "bf16_d64_s64_b1_h1_full_sofcap3"), "did you mean softcap?"),
        (("bench", "--only", "casual"), "did you mean causal?"),
        (("inspect", "fwd_sm80_bf16_d128_casual", "--arch", "sm_80"), "did you mean fwd_sm80_bf16_d128_causal"),
        (("inspect", "bwd_sm80_f16_d72_ful", "--arch", "sm_80"), "did you mean bwd_sm80_f16_d72_full"),
        (("inspect", "matmul_kq_sm80_bf16_d128", "--arch", "sm_80"), "did you mean matmul_qk_sm80_bf16_d128"),
        (("list", "bwd", "casual"), "did you mean causal?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistyped_name_gets_the_nearest(arguments: tuple[str, ...], suggestion: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code in (1, 2)
    assert suggestion in done.output


def test_counts_agree_with_their_nouns(tmp_path: Path, compiled: list[Build]) -> None:
    symbols = "fwd_sm80_f32_d64_full", "fwd_sm80_f32_d96_full"
    named = [word for symbol in symbols for word in ("--symbol", symbol)]
    assert f"1 kernel in {tmp_path}\n" in invoke("build", "--arch", "sm_80", *named[:2], "-o", tmp_path).output
    assert f"2 kernels in {tmp_path}\n" in invoke("build", "--arch", "sm_80", *named, "-o", tmp_path).output


# Masks by their words


@pytest.mark.parametrize(
    ("masks", "forms"),
    [
        (("all",), ["full", "causal"]),
        (("causal_br_window64", "window_left100_right30", "causal_window8"), ["local"]),
        (("full", "window_left5_right5"), ["full", "local"]),
        (("window_right0",), ["causal"]),
    ],
)
def test_build_takes_any_mask(masks: tuple[str, ...], forms: list[str], tmp_path: Path, compiled: list[Build]) -> None:
    options = [word for mask in masks for word in ("--mask", mask)]
    done = invoke(*BUILD[:-2], *options, "-o", tmp_path)
    assert done.exit_code == 0, done.output
    assert [build.mask for build in compiled if build.family == "sm80"] == forms
    assert [build.mask for build in compiled if build.family == "decode"] == forms, "calls of few queries and many keys"


@pytest.mark.parametrize("mask", ["all", "causal_br_window3", "window_left5_right2"])
def test_run_takes_any_mask(mask: str, compiled: list[Build], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutlass_py_attn.cli.run.first_gpu", lambda: None)
    done = invoke("run", "--dtype", "f32", "--head-dim", "64", "--mask", mask, "--json")
    assert done.exit_code == 0, done.output
    checked = {check["mask"] for check in json.loads(done.output)["checks"]}
    assert checked == ({"full", "causal", "causal_br"} if mask == "all" else {mask})
