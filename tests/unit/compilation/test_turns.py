"""Tests of turns: processes that need one build at once compile it once, and none waits for a dead one."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import compiler, turns
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.planner import plan_forward
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support import fakes

pytest.importorskip("cuda.core.utils")

BUILD = plan_forward(Problem.dense("forward", Shape(1, 64, 64, 1, 64, 64), "bfloat16", Causal()), "sm_90").build
FORK = multiprocessing.get_context("fork")


def compiling(log: Path, seconds: float = 0.3) -> Callable[[Build], Artifact]:
    """Returns a compiler that takes some time and notes each compilation in a file."""

    def compile(build: Build) -> Artifact:
        with log.open("a") as file:
            file.write("compiled\n")
        time.sleep(seconds)
        return dataclasses.replace(fakes.artifact(build), toolchain="compiler 1")

    return compile


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes its compilations here, in a process that has compiled nothing."""
    monkeypatch.setattr(compiler, "compile", compiling(tmp_path / "log"))
    monkeypatch.setattr(compiler, "toolchain", lambda: "compiler 1")
    monkeypatch.setattr(compiler, "_artifacts", {})
    monkeypatch.setattr(turns, "_POLL_SECONDS", 0.01)
    return tmp_path / "log"


def holding(path: Path, ready: Any) -> None:
    """A process that holds the lock of the build, and never ends by itself."""
    with turns._turn(BUILD, path):
        ready.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path: Path, log: Path) -> Any:
    ready = FORK.Event()
    process = FORK.Process(target=holding, args=(tmp_path / "cache", ready), daemon=True)
    process.start()
    assert ready.wait(20)
    yield process
    process.kill()
    process.join()


def test_racing_processes_compile_once(tmp_path: Path, log: Path) -> None:
    processes = [FORK.Process(target=turns.artifact_for, args=(BUILD, tmp_path / "cache")) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "compiled\n"
    assert list((tmp_path / "cache" / turns.LOCKS).iterdir()) == []


def test_racing_threads_compile_once_and_another_build_does_not_wait(tmp_path: Path, log: Path) -> None:
    other = dataclasses.replace(BUILD, arch="sm_80")
    made: list[Artifact] = []
    threads = [
        threading.Thread(target=lambda build=build: made.append(turns.artifact_for(build, tmp_path / "cache")))
        for build in (BUILD, BUILD, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(artifact.build.arch for artifact in made) == ["sm_80", "sm_90", "sm_90"]
    assert log.read_text() == "compiled\n" * 2


def test_a_dead_process_holds_nothing(tmp_path: Path, log: Path, holder: Any) -> None:
    (lock,) = (tmp_path / "cache" / turns.LOCKS).iterdir()
    threading.Timer(0.2, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    turns.artifact_for(BUILD, tmp_path / "cache")
    assert time.monotonic() - begin < 20
    assert not lock.exists()


def test_a_wait_is_said_and_has_an_end(tmp_path: Path, log: Path, holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped, for example, keeps its lock."""
    monkeypatch.setattr(turns, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(turns, "_MOST_SECONDS", 0.3)
    with pytest.warns(UserWarning, match=f"waiting for another process that compiles {BUILD.symbol} for sm_90") as said:
        turns.artifact_for(BUILD, tmp_path / "cache")
    assert len(said) == 1
    assert said[0].filename == __file__
    assert log.read_text() == "compiled\n"
    assert turns.artifact_for(BUILD, tmp_path / "cache").build == BUILD, "from memory, without a wait"


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EACCES])
@pytest.mark.parametrize("place", ["open", "flock"])
def test_without_locks_each_process_compiles(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, code: int, place: str
) -> None:
    """As on a read-only disk, or on NFS without a lock daemon."""
    opened = os.open

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if place == "flock":
        monkeypatch.setattr(fcntl, "flock", refuse)
    else:
        is_lock = lambda path: os.fspath(path).endswith(BUILD.digest)  # noqa: E731
        monkeypatch.setattr(os, "open", lambda path, *rest: refuse() if is_lock(path) else opened(path, *rest))
    assert turns.artifact_for(BUILD, tmp_path / "cache").build == BUILD
    assert log.read_text() == "compiled\n"


def test_an_unfit_cache_has_no_locks(tmp_path: Path, log: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.warns(UserWarning, match="kernels are not cached"):
        turns.artifact_for(BUILD, shared)
    assert list(shared.iterdir()) == []


def test_a_failed_compilation_ends_the_turn(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(build: Build) -> Artifact:
        raise RuntimeError("no memory")

    monkeypatch.setattr(compiler, "compile", failing)
    with pytest.raises(RuntimeError, match="no memory") as caught:
        turns.artifact_for(BUILD, tmp_path / "cache")
    monkeypatch.setattr(compiler, "compile", compiling(log, 0))
    with warnings.catch_warnings(action="error"):
        assert turns.artifact_for(BUILD, tmp_path / "cache").build == BUILD
    assert caught.tb is not None, "whoever keeps the error keeps no lock"


def test_locks_of_killed_processes_are_swept(tmp_path: Path, log: Path) -> None:
    locks = tmp_path / "cache" / turns.LOCKS
    locks.mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    for name, age in (("old", 7200), ("young", 60)):
        (locks / name).touch()
        os.utime(locks / name, (time.time() - age, time.time() - age))
    turns.artifact_for(BUILD, tmp_path / "cache")
    assert [path.name for path in locks.iterdir()] == ["young"]
