"""Turns: processes that need one build at the same time compile it once; the others wait, and read the disk cache.

A process that takes its turn holds a lock (flock) of a file in the folder `locks` of the cache, which the system ends
with the process. Without such locks, as on a read-only disk, each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.compilation import cache, compiler, private_folder
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.score_terms.registry import source_digest

LOCKS: Final = "locks"
_POLL_SECONDS: Final = 0.05
_SILENT_SECONDS: Final = 3.0  # that a process waits without a word
_MOST_SECONDS: Final = 600.0  # that it waits: longer than any compilation takes, as a stopped process keeps its lock


def artifact_for(build: Build, folder: str | os.PathLike[str] | None = None) -> Artifact:
    """Returns what `compiler.artifact_for` does, after any other process that is compiling `build`.

    folder: of the disk cache; None for the user's.
    """
    given = () if folder is None else (folder,)
    if (build, source_digest(build.features)) in compiler._artifacts:
        return compiler.artifact_for(build, *given)
    with _turn(build, folder):
        return compiler.artifact_for(build, *given)


@contextlib.contextmanager
def _turn(build: Build, folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Context manager that one process, and one thread of it, at a time enters for a build."""
    path: Path | None = None
    handle = -1
    try:
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
            path = _locks(folder) / build.digest
            handle = _locked(path, build)
        yield
    finally:
        if path is not None and handle >= 0:
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):  # a forked child has the file open too
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _locks(folder: str | os.PathLike[str] | None) -> Path:
    """Returns the folder of the locks; OSError if the cache is none."""
    path = cache.default_folder() if folder is None else Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := private_folder.refusal(path):
        raise OSError(reason)
    (path / LOCKS).mkdir(mode=0o700, exist_ok=True)
    private_folder.sweep(path / LOCKS)  # of killed processes
    return path / LOCKS


def _locked(path: Path, build: Build) -> int:
    """Returns a handle of the locked file, -1 after the longest time of waiting; OSError where there are no locks."""
    begin, is_silent = time.monotonic(), True
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, handle):
                os.utime(handle)
                return handle
        except BlockingIOError:
            waited = time.monotonic() - begin
            if waited > _MOST_SECONDS:
                os.close(handle)
                return -1
            if is_silent and waited > _SILENT_SECONDS:
                is_silent = False
                warnings.warn(
                    f"waiting for another process that compiles {build.symbol} for {build.arch}", stacklevel=5
                )
            time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    """Returns whether the file of a handle is still at its path: who had the lock before deletes it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
