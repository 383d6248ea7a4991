"""Permissions: takes this process's permissions for a path away, for a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Takes this user's permissions for the path away; root gets another user's permissions."""
    before, is_root = stat.S_IMODE(path.stat().st_mode), os.geteuid() == 0
    path.chmod(0)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(before)
