"""Stand-in driver: this process's libcuda is libcuda.c beside this file, and its log is read here.

It is loaded before cuda-python looks for libcuda.so.1 and answers to that name, so the whole process has it:
run tests that need a real GPU in another one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("libcuda.c")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-Wl,-soname,libcuda.so.1")


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
    """One driver call: its name, its text (symbol, cubin), its numbers, and a launch's parameter bytes."""

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
        """Blocks of a launch's clusters; 0 where its attributes say anything else."""
        return self.numbers[8]


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


@functools.cache
def library() -> Path:
    """The stand-in, compiled into a folder of its own that lives as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="stand_in_")
    _folders.append(folder)
    made = Path(folder.name) / "libcuda.so.1"
    command = compiler()
    assert command is not None
    subprocess.run([command, *FLAGS, "-o", str(made), str(SOURCE), "-ldl"], check=True)
    return made


_folders: list[tempfile.TemporaryDirectory[str]] = []


class StandIn:
    """The log and the faults of the stand-in."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
        self._library.stand_in_records.restype = ctypes.POINTER(_Record)

    def clear(self) -> None:
        """Forget the log and the fault."""
        self._library.stand_in_clear()

    def leave(self) -> None:
        """Let no context be current in this thread."""
        self._library.stand_in_leave()

    def fail(self, name: str, code: int) -> None:
        """Let the next call of `name` return `code`."""
        self._library.stand_in_fail(name.encode(), code)

    def without_memory(self, without: bool) -> None:
        """Whether memory is cleared in name only: for addresses where there is none."""
        self._library.stand_in_without_memory(without)

    @property
    def calls(self) -> list[Call]:
        """Every call since `clear`, in order."""
        records: Any = self._library.stand_in_records()
        found = (records[i] for i in range(self._library.stand_in_count()))
        return [Call(r.call.decode(), r.text.decode(), tuple(r.numbers), bytes(r.bytes)[: r.byte_count]) for r in found]

    @property
    def names(self) -> list[str]:
        """Names of `calls`, without context switches."""
        return [call.name for call in self.calls if call.name != "cuCtxSetCurrent"]

    def of(self, name: str) -> list[Call]:
        """The calls of that name."""
        return [call for call in self.calls if call.name == name]
