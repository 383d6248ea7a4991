"""Cache folder: what the disk cache of this user holds, and whether kernels can be cached there."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_py_attn.compilation.cache import ENTRIES, Cache, default_folder, not_cached, unpack
from cutlass_py_attn.compilation.private_folder import (
    NATIVE_LIBRARIES,
    UNFINISHED,
    read_private,
    sweep,
    sweep_compilations,
)
from cutlass_py_attn.compilation.turns import LOCKS
from cutlass_py_attn.errors import NotSupported

PROBE_BYTES = 4096  # enough for a full disk to refuse


def user_folder() -> Path:
    """Returns the folder of this user's cache; NotSupported if there is neither a home directory nor XDG_CACHE_HOME."""
    try:
        return default_folder()
    except RuntimeError as error:
        raise NotSupported(f"there is no folder for the kernel cache: {error}; set XDG_CACHE_HOME") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache. symbol, arch: of its kernel; "" for a note that a build does not compile."""

    symbol: str
    arch: str
    toolchain: str
    bytes: int


def entries(folder: Path) -> Iterator[Entry]:
    """Yields every entry of a cache, in no order. An entry that another process deletes meanwhile is none."""
    for above, _, names in os.walk(folder / ENTRIES):
        for name in names:
            data = read_private(Path(above, name))
            artifact = unpack(data) if data is not None else None
            if artifact is not None:
                yield Entry(artifact.build.symbol, artifact.build.arch, artifact.toolchain, len(data or b""))
            elif data is not None:
                yield Entry("", "", "", len(data))


def clear(folder: Path) -> int:
    """Deletes every entry, and what killed processes left in the caches and among temporary files; returns the count.

    Temporary files of the last hour stay, which a process may still write.
    """
    count = Cache(folder).clear()
    sweep(folder / LOCKS)
    sweep(folder.with_name(NATIVE_LIBRARIES), UNFINISHED)
    sweep_compilations()
    return count


def objection(folder: Path) -> str:
    """Returns why kernels cannot be cached in a folder; "" if they can. Creates the folder, as a compilation does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Cache(folder)
    if caught:
        return str(caught[-1].message)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return not_cached(folder, error)
    return ""
