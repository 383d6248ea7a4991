"""Disk cache of artifacts: one file each, shared by processes. A damaged or foreign file is a miss.

The files are those of cuda.core's FileStreamProgramCache: a mapping of bytes with atomic replacement, which evicts the
least recently read entry. The class needs no driver; importing it takes 0.1 s in addition to NumPy, once per process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import stat
import struct
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from cutlass_py_attn.artifact import Artifact, artifact_from
from cutlass_py_attn.compilation import registry
from cutlass_py_attn.compilation.private_folder import cache_root, refusal
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.abi_digest import abi_digest
from cutlass_py_attn.plan.build_json import read_build
from cutlass_py_attn.problem import typed_json
from cutlass_py_attn.score_terms import registry as score_terms

Files = MutableMapping[bytes, bytes]

FORMAT: Final = b"cutlass_py_attn artifact 1\n"
FINDINGS: Final = b"cutlass_py_attn findings 1\n"
MAX_BYTES: Final = 1 << 30
ENTRIES: Final = "entries"  # folder of FileStreamProgramCache
_LENGTHS: Final = struct.Struct("<QQ")  # bytes of the description and of the PTX; the cubin follows them
_DIGEST_BYTES: Final = 32


def default_folder() -> Path:
    """Returns `$XDG_CACHE_HOME/cutlass_py_attn`, else `~/.cache/cutlass_py_attn`; RuntimeError: there is no home."""
    return cache_root() / "cutlass_py_attn"


class Cache:
    """Artifacts by (build, sources, toolchain) in one folder.

    If the folder is unusable, every lookup is a miss; a warning says why, once. The entries are readable for the user
    alone, whatever the umask: a `Folder` is for kernels that several users share.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = folder
        self._files = _open(folder)

    def get(self, build: Build, toolchain: str) -> Artifact | None:
        """Returns the artifact of `build`; None on a miss."""
        if self._files is None:
            return None
        try:
            data = self._files.get(key(build, toolchain))
        except OSError:
            return None
        artifact = unpack(data) if data else None
        matches = artifact is not None and (artifact.build, artifact.toolchain) == (build, toolchain)
        return artifact if matches else None

    def put(self, artifact: Artifact) -> None:
        """Stores `artifact` and replaces a damaged entry. A full or read-only disk is a warning, not an error."""
        self._store(key(artifact.build, artifact.toolchain), pack(artifact))

    def get_findings(self, build: Build, toolchain: str) -> str | None:
        """Returns why `build` does not compile within its plan; None if that is not cached."""
        if self._files is None:
            return None
        try:
            data = self._files.get(_findings_key(build, toolchain)) or b""
        except OSError:
            return None
        start = len(FINDINGS) + _DIGEST_BYTES
        text = data[start:]
        return text.decode(errors="replace") if data[:start] == FINDINGS + hashlib.sha256(text).digest() else None

    def put_findings(self, build: Build, toolchain: str, findings: str) -> None:
        """Stores why `build` does not compile within its plan: finding out takes as long as compiling a few kernels."""
        text = findings.encode()
        self._store(_findings_key(build, toolchain), FINDINGS + hashlib.sha256(text).digest() + text)

    def clear(self) -> int:
        """Deletes every entry, and returns how many there were."""
        if self._files is None:
            return 0
        count = len(self._files)
        self._files.clear()
        return count

    def _store(self, entry: bytes, data: bytes) -> None:
        if self._files is not None:
            try:
                self._files[entry] = data
            except OSError as error:
                _warn(self._folder, error)


def key(build: Build, toolchain: str) -> bytes:
    """Returns the cache key: a hash of build, sources, registered score terms, compiler and file format."""
    parts = [build.digest.encode(), _source_digest(build), toolchain.encode(), FORMAT]
    parts += [digest.encode()] if (digest := score_terms.source_digest(build.features)) else []
    return hashlib.sha256(b"\0".join(parts)).digest()


def _findings_key(build: Build, toolchain: str) -> bytes:
    return hashlib.sha256(key(build, toolchain) + FINDINGS).digest()


def pack(artifact: Artifact) -> bytes:
    """Returns a container: format line, sha256 of the rest, two lengths, description as JSON, PTX, cubin."""
    description = json.dumps(artifact.describe(), sort_keys=True).encode()
    ptx = artifact.ptx.encode()
    body = _LENGTHS.pack(len(description), len(ptx)) + description + ptx + artifact.cubin
    return FORMAT + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> Artifact | None:
    """Returns the artifact of a `pack` container; None if it is damaged, truncated or something else."""
    start = len(FORMAT) + _DIGEST_BYTES
    body = data[start:]
    if data[:start] != FORMAT + hashlib.sha256(body).digest():
        return None
    try:
        description_bytes, ptx_bytes = _LENGTHS.unpack_from(body)
        texts = body[_LENGTHS.size :]
        ptx = texts[description_bytes : description_bytes + ptx_bytes].decode()
        description = typed_json.as_object(typed_json.parse(texts[:description_bytes]), "artifact")
        if "abi" not in description:  # of an earlier version, but the key covers the sources of the kernel parameters
            description["abi"] = abi_digest(read_build(description.get("build")))
        return artifact_from(description, ptx, texts[description_bytes + ptx_bytes :])
    except (struct.error, ValueError):
        return None


def _source_digest(build: Build) -> bytes:
    """Returns the sha256 over the sources that decide the machine code of `build`."""
    total = hashlib.sha256()
    for name in registry.sources_of(build):
        total.update(name.encode() + b"\0" + _file_digest(name))
    return total.digest()


@functools.cache
def _file_digest(name: str) -> bytes:
    """Returns the sha256 of a file of the package; each is read once, as Python reads its imports."""
    return hashlib.sha256((Path(__file__).parents[1] / name).read_bytes()).digest()


def _open(folder: str | os.PathLike[str] | None) -> Files | None:
    """Opens the folder as a mapping; None if that is impossible."""
    try:
        store = importlib.import_module("cuda.core.utils").FileStreamProgramCache
    except ImportError:
        return None  # cuda.core is needed for the cache, not for compiling
    try:
        path = default_folder() if folder is None else Path(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := _refusal(path):
            warnings.warn(f"kernels are not cached in {path}: {reason}", stacklevel=2)
            return None
        files: Files = store(path.resolve(), max_size_bytes=MAX_BYTES)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _warn(folder, error)
        return None
    return files


def _refusal(path: Path) -> str:
    """Returns why the folder, or that of its entries, must not be a cache; "" if it may."""
    entries = path / ENTRIES
    if reason := refusal(path):
        return reason
    entries.mkdir(mode=0o700, exist_ok=True)
    is_closed = not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return "" if is_closed else refusal(entries)


def _warn(folder: str | os.PathLike[str] | None, error: Exception) -> None:
    """Says that kernels are compiled again in every process, and why."""
    with contextlib.suppress(RuntimeError):
        folder = default_folder() if folder is None else folder
    warnings.warn(not_cached(folder, error), stacklevel=2)


def not_cached(folder: str | os.PathLike[str] | None, error: Exception) -> str:
    """Returns the sentence for an error because of which kernels are not cached in a folder; None for no folder."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    place = "on disk" if folder is None else f"in {os.fspath(folder)}"
    return f"kernels are not cached {place}: {reason}; set XDG_CACHE_HOME to a folder that you may write to"
