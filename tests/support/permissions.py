"""Permissions: takes this process's permissions for a path away, for a time."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION_3 = 0x20080522  # of the kernel's interface: two words of each set of capabilities
PAST_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Takes this user's permissions for the path away, those of root too; folders above it stay as they are."""
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(0)
    try:
        with without_privileges():
            yield
    finally:
        path.chmod(before)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Lets permissions count for this thread of root as for any user; other users have no capability to lose."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves

    def call(name: str) -> None:
        if getattr(libc, name)(header, sets):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    call("capget")
    effective = sets[0]
    sets[0] &= ~PAST_PERMISSIONS
    call("capset")
    try:
        yield
    finally:
        sets[0] = effective
        call("capset")
