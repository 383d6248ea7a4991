"""Private folder: files that other users could not have written, which a cache may trust, and leftovers in it.

The user's GPU and the user's process run what is cached, with the user's rights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NATIVE_LIBRARIES: Final = "cutlass_py_attn_jax"  # folder beside the kernels' cache
UNFINISHED: Final = "part_"  # start of the names of files and folders there that are being written

_OF_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS: Final = 40  # as Linux follows
_OLD: Final = 3600.0  # seconds after which no process still writes a temporary file
_COMPILATION: Final = re.compile(r"cutlass_py_attn(_jax)?\.[a-z0-9_]{8}")  # as tempfile names the folders of compilers


def cache_root() -> Path:
    """Returns $XDG_CACHE_HOME, else ~/.cache. A relative path is ignored, as the XDG specification says.

    RuntimeError: there is no home directory.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def refusal(folder: Path) -> str:
    """Returns why a folder that exists must not be a cache, "" if it may: who else could exchange its files.

    Only the user and root may own the folder, no other user may write to it, and it is no symbolic link. That holds for
    every folder above it too, but in one with the sticky bit, such as /tmp, others may create files of their own. A
    folder above may be a link of the user or root, as ~/.cache often is; then it holds for the folders of both.
    """
    if not hasattr(os, "geteuid"):
        return ""  # Windows has no owners and modes of this kind
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link; set XDG_CACHE_HOME to the folder above the one that it leads to"
    if _is_foreign(found):
        return f"it belongs to user {found.st_uid}; set XDG_CACHE_HOME to a folder of your own"
    if found.st_mode & _OF_OTHERS:
        return f"other users may write to it (mode {stat.S_IMODE(found.st_mode):04o}); empty it and run chmod 700 on it"
    for above in _folders_above(folder):
        status = above.lstat()
        if _is_foreign(status):
            return f"it lies below {above}, of user {status.st_uid}; set XDG_CACHE_HOME to a folder of your own"
        is_shared = status.st_mode & _OF_OTHERS and not status.st_mode & stat.S_ISVTX
        if is_shared and not stat.S_ISLNK(status.st_mode):
            mode = stat.S_IMODE(status.st_mode)
            return f"other users may rename it in {above} (mode {mode:04o}); run chmod go-w on that folder"
    return ""


def read_private(path: Path, limit: int | None = None, owner: int | None = None) -> bytes | None:
    """Returns the contents of a file; None unless it is a regular file of this user or root that no other may write.

    limit: the most bytes that it may have. owner: another user that counts as this one.
    The file that is opened is the file that is checked and read.
    """

    def open_file(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe has no writer to wait for

    try:
        with open(path, "rb", opener=open_file) as file:
            status = os.fstat(file.fileno())
            is_own = status.st_uid == owner or not _is_foreign(status)
            is_short = limit is None or status.st_size <= limit
            is_private = is_own and not status.st_mode & _OF_OTHERS
            return file.read(limit) if is_private and is_short and stat.S_ISREG(status.st_mode) else None
    except OSError:
        return None


def sweep(folder: Path, prefix: str = "") -> None:
    """Deletes the temporary files of a private folder that processes left when they were killed, over an hour ago."""
    with contextlib.suppress(OSError):
        if refusal(folder):
            return
        for entry in list(os.scandir(folder)):
            if entry.name.startswith(prefix) and _is_old(entry):
                _delete(entry)


def sweep_compilations() -> None:
    """Deletes the folders of compilations that were killed over an hour ago, among the system's temporary files."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _COMPILATION.fullmatch(entry.name) and _is_old(entry):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU:
                    _delete(entry)


def _is_old(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return entry.stat(follow_symlinks=False).st_mtime < time.time() - _OLD
    return False


def _delete(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(entry.path)


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid not in (0, os.geteuid())


def _folders_above(folder: Path) -> Iterator[Path]:
    """Yields every folder, and every link, through which the system walks from the root to a folder."""
    parts, at, links = [*reversed(folder.absolute().parts[:-1])], Path(os.sep), 0
    while parts:
        part = parts.pop()
        at = at.parent if part == os.pardir else at / part
        yield at
        if at.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(folder))
            parts += reversed(Path(os.readlink(at)).parts)
            at = at.parent
