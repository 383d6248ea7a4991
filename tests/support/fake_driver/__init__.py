"""Fake driver: compiles libcuda.c beside this file, loads it as this process's libcuda, and reads its log.

The library is loaded before cuda-python looks for libcuda.so.1 and has that name, so the whole process uses it. Run
tests that need a real GPU in another process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("libcuda.c")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-Wl,-soname,libcuda.so.1")


# Gets the name of a call, its text, the addresses of its numbers and bytes, and the number of bytes. Returns a
# CUresult, or -1 to leave the call to the fake driver.
Taker = Callable[[bytes, bytes, int, int, int], int]
_TAKER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
)


class _Record(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char * 40),
        ("text", ctypes.c_char * 192),
        ("numbers", ctypes.c_uint64 * 18),
        ("byte_count", ctypes.c_int),
        ("bytes", ctypes.c_ubyte * 2048),
    )


@dataclass(frozen=True)
class Call:
    """A logged driver call: name, text (symbol or cubin), numeric arguments, and a launch's parameter bytes."""

    name: str
    text: str
    numbers: tuple[int, ...]
    parameters: bytes

    @property
    def grid(self) -> tuple[int, ...]:
        """Grid of a launch."""
        return self.numbers[0:3]

    @property
    def block(self) -> tuple[int, ...]:
        """Block of a launch."""
        return self.numbers[3:6]

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a launch in bytes."""
        return self.numbers[6]

    @property
    def stream(self) -> int:
        """Stream of a launch."""
        return self.numbers[7]

    @property
    def cluster(self) -> int:
        """Blocks of a launch's clusters; 0 if the launch has attributes that no launch of the package has."""
        return self.numbers[8]

    @property
    def is_dependent(self) -> bool:
        """Whether a launch may start before the one ahead of it ends."""
        return self.numbers[10] == 1


def compiler() -> str | None:
    """Returns the path of a C compiler; None if this machine has none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


def need_compiler(built: str) -> None:
    """Skips the test if there is no C compiler. built: what the test builds, in words."""
    if compiler() is None:
        pytest.skip(f"no C compiler to build {built}")


@functools.cache
def library() -> Path:
    """Compiles the fake driver into a temporary folder that this process deletes at exit; returns its path."""
    folder = tempfile.TemporaryDirectory(prefix="fake_driver_")
    _folders.append(folder)
    target = Path(folder.name) / "libcuda.so.1"
    command = compiler()
    assert command is not None
    subprocess.run([command, *FLAGS, "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target


_folders: list[tempfile.TemporaryDirectory[str]] = []


class FakeDriver:
    """Reads and clears the log, and sets faults."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_driver_records.restype = ctypes.POINTER(_Record)

    def clear(self) -> None:
        """Clears the log and the fault, and completes all work."""
        self._library.fake_driver_clear()

    def clear_context(self) -> None:
        """Makes no context current in this thread, and no stream captured."""
        self._library.fake_driver_clear_context()

    def fail(self, name: str, code: int) -> None:
        """Makes the next call of `name` return `code`."""
        self._library.fake_driver_fail(name.encode(), code)

    def busy(self, busy: bool) -> None:
        """Sets whether the work before every event is still running."""
        self._library.fake_driver_busy(busy)

    def without_memory(self, without: bool) -> None:
        """Sets whether memset calls are only logged: for made-up addresses without memory."""
        self._library.fake_driver_without_memory(without)

    def take(self, taker: Taker | None) -> None:
        """Hands the work of streams to `taker` (simulated_gpu.py); None takes it back."""
        self._taker = None if taker is None else _TAKER(taker)  # ctypes keeps no reference to the function
        self._library.fake_driver_take(self._taker)

    @property
    def calls(self) -> list[Call]:
        """Every call since `clear`, in order."""
        records: Any = self._library.fake_driver_records()
        found = (records[i] for i in range(self._library.fake_driver_count()))
        return [Call(r.call.decode(), r.text.decode(), tuple(r.numbers), bytes(r.bytes)[: r.byte_count]) for r in found]

    @property
    def names(self) -> list[str]:
        """Names of `calls`, without switches of context and capture mode."""
        switches = ("cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode")
        return [call.name for call in self.calls if call.name not in switches]

    def of(self, name: str) -> list[Call]:
        """Returns the calls of that name."""
        return [call for call in self.calls if call.name == name]
