"""Cache folder: what the disk cache of this user holds, and whether kernels can be cached there."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_py_attn.compilation.cache import Cache, default_folder, unpack

PROBE_BYTES = 4096  # enough for a full disk to refuse


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache. symbol, arch: of its kernel; "" for a note that a build does not compile."""

    symbol: str
    arch: str
    toolchain: str
    bytes: int


def entries(folder: Path | None = None) -> Iterator[Entry]:
    """Yields every entry, in no order. folder: None for the user's cache."""
    for path in (folder or default_folder()).rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            artifact = unpack(data)
            if artifact is None:
                yield Entry("", "", "", len(data))
            else:
                yield Entry(artifact.build.symbol, artifact.build.arch, artifact.toolchain, len(data))


def objection(folder: Path | None = None) -> str:
    """Returns why kernels cannot be cached in the folder; "" if they can. Creates the folder, as a compilation does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Cache(folder)
    if caught:
        return str(caught[-1].message)
    path = folder or default_folder()
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return (
            f"kernels are not cached in {path}: {error.strerror}; set XDG_CACHE_HOME to a folder that you may write to"
        )
    return ""
