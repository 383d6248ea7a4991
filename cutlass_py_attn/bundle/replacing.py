"""Replacing: puts a folder of new files in the place of an older one, in one step, and deletes known files alone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CANNOT_EXCHANGE: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # the system or the file system
_NOT_EMPTY: Final = (errno.ENOTEMPTY, errno.EEXIST)
_SHOWN: Final = 3

Known = Callable[[Path], Collection[str]]


def replace_folder(path: Path, files: Mapping[str, bytes], known: Known) -> None:
    """Writes `files` into the folder `path` and removes the known files of it: completely, or not at all.

    known: returns the files of a folder that an earlier call wrote and nobody changed.
    The new files are written to a folder beside `path`, which then takes its place. The caller holds the lock of the
    folder above. NotSupported: there are other files in the folder. OSError: the disk is full, for example. The folder
    then is as it was.
    """
    staged = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    made = staged / "new"
    try:
        for name, data in files.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            _write(made / name, data, path / name)
        if path.is_dir():
            shutil.copymode(path, made)
        old = _put(made, path, known)
    except BaseException:
        _remove(made, files)
        raise
    else:
        _remove(made, old)
    finally:
        with contextlib.suppress(OSError):
            staged.rmdir()


def folder_refusals(path: Path, old: Collection[str], shown: Path | None = None) -> Iterator[Refusal]:
    """Yields why the folder cannot be replaced: it holds something else than the files `old`.

    shown: the folder's name in the text, if that is another one.
    """
    others = sorted(_others(path, old))
    if others:
        names = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
        rule = f"holds {names}, which no export wrote, or which changed since"
        yield Refusal("folder", f"'{shown or path}'", rule, "move that away, or name a new folder")


def _write(made: Path, data: bytes, path: Path) -> None:
    """Writes a new file that will be at `path`, which an error names."""
    try:
        made.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _put(made: Path, path: Path, known: Known) -> Collection[str]:
    """Moves the folder `made` to `path`; what was there is then at `made`. Returns the known files of that."""
    try:
        made.rename(path)  # which does not exist, or is empty
        return ()
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
    exchange(made, path)
    try:
        old = known(made)
        # Again: compiling takes long enough for somebody to put a file there.
        if refusals := [*folder_refusals(made, old, path)]:
            raise NotSupported(refusals)
    except BaseException:
        exchange(made, path)
        raise
    return old


def _others(path: Path, known: Collection[str]) -> Iterator[str]:
    """Yields what the folder holds besides known files and the folders above them. A link to a folder is no folder."""
    folders = {parent.as_posix() for name in known for parent in PurePosixPath(name).parents}
    for above, names, files in os.walk(path, onerror=_raise):
        inside = Path(above)
        for name in (*names, *files):
            relative = (inside / name).relative_to(path).as_posix()
            is_folder = name in names and not (inside / name).is_symlink()
            if relative not in (folders if is_folder else known):
                yield relative


def _raise(error: OSError) -> None:
    raise error


def exchange(one: Path, other: Path) -> None:
    """Exchanges two folders: in one step if the file system can do that, else by renaming each."""
    code = _renameat2(one, other)
    if code and code not in _CANNOT_EXCHANGE:
        raise OSError(code, os.strerror(code), str(other))
    if code:
        aside = one.with_name("aside")
        other.rename(aside)
        try:
            one.rename(other)
        finally:
            aside.rename(one if other.exists() else other)


def _renameat2(one: Path, other: Path) -> int:
    """Exchanges two names by Linux's system call; returns its error code, 0 for success."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return errno.ENOSYS
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    failed = call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return ctypes.get_errno() if failed else 0


def _remove(folder: Path, names: Collection[str]) -> None:
    """Removes these files of a folder, and the folders that are empty then; follows no link out of it."""
    for above, folders, files, handle in os.fwalk(folder, topdown=False) if folder.exists() else ():
        for name in files:
            if (Path(above) / name).relative_to(folder).as_posix() in names:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=handle)
        for name in folders:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=handle)
    with contextlib.suppress(OSError):
        folder.rmdir()
