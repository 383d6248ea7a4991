"""Cache folder: what the disk cache of this user holds, and whether kernels can be cached there."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_py_attn.compilation.cache import Cache, default_folder, not_cached, unpack
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
    """Yields every entry of a cache, in no order."""
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            artifact = unpack(data)
            if artifact is None:
                yield Entry("", "", "", len(data))
            else:
                yield Entry(artifact.build.symbol, artifact.build.arch, artifact.toolchain, len(data))


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
