"""Cache: artifacts on disk, one file each, shared by processes; a damaged or foreign file counts as absent.

The files are cuda.core's FileStreamProgramCache (bytes to bytes, atomic replacement, least recently read out
first). It works without a driver; its import costs 0.1 s beside NumPy's, once per process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import struct
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from cutlass_py_attn import kernels
from cutlass_py_attn.artifact import Artifact, artifact_from
from cutlass_py_attn.plan import Build

Files = MutableMapping[bytes, bytes]

FORMAT: Final = b"cutlass_py_attn artifact 1\n"
REFUSAL: Final = b"cutlass_py_attn refusal 1\n"
MAX_BYTES: Final = 1 << 30
_LENGTHS: Final = struct.Struct("<QQ")  # of the description and of the PTX; the cubin takes the rest
_DIGEST_BYTES: Final = 32


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/cutlass_py_attn`, else `~/.cache/cutlass_py_attn`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "cutlass_py_attn"


class Cache:
    """Artifacts by (build, sources, toolchain) in one folder; a folder that cannot be used keeps nothing."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._files = _open(folder)

    def get(self, build: Build, toolchain: str) -> Artifact | None:
        """The artifact kept for `build`, or None."""
        if self._files is None:
            return None
        try:
            data = self._files.get(key(build, toolchain))
        except OSError:
            return None
        found = unpack(data) if data else None
        belongs = found is not None and (found.build, found.toolchain) == (build, toolchain)
        return found if belongs else None

    def put(self, artifact: Artifact) -> None:
        """Keep `artifact`, in place of a damaged entry if any; a full or read-only disk is no error."""
        if self._files is not None:
            with contextlib.suppress(OSError):
                self._files[key(artifact.build, artifact.toolchain)] = pack(artifact)

    def refusal(self, build: Build, toolchain: str) -> str | None:
        """Why the compiler cannot make `build`, if that is known."""
        if self._files is None:
            return None
        try:
            data = self._files.get(_refusal_key(build, toolchain)) or b""
        except OSError:
            return None
        start = len(REFUSAL) + _DIGEST_BYTES
        text = data[start:]
        return text.decode() if data[:start] == REFUSAL + hashlib.sha256(text).digest() else None

    def refuse(self, build: Build, toolchain: str, why: str) -> None:
        """Remember why the compiler cannot make `build`: to find out takes it as long as a few kernels."""
        if self._files is not None:
            with contextlib.suppress(OSError):
                text = why.encode()
                self._files[_refusal_key(build, toolchain)] = REFUSAL + hashlib.sha256(text).digest() + text


def key(build: Build, toolchain: str) -> bytes:
    """The cache key: plan, sources, compiler and file format."""
    parts = [build.digest.encode(), _source_digest(), toolchain.encode(), FORMAT]
    return hashlib.sha256(b"\0".join(parts)).digest()


def _refusal_key(build: Build, toolchain: str) -> bytes:
    return hashlib.sha256(key(build, toolchain) + REFUSAL).digest()


def pack(artifact: Artifact) -> bytes:
    """One container: format line, sha256 of what follows, two lengths, description as JSON, PTX, cubin."""
    description = json.dumps(artifact.describe(), sort_keys=True).encode()
    ptx = artifact.ptx.encode()
    body = _LENGTHS.pack(len(description), len(ptx)) + description + ptx + artifact.cubin
    return FORMAT + hashlib.sha256(body).digest() + body


def unpack(data: bytes) -> Artifact | None:
    """The artifact of a `pack` container; None when it is damaged, cut short or something else."""
    start = len(FORMAT) + _DIGEST_BYTES
    body = data[start:]
    if data[:start] != FORMAT + hashlib.sha256(body).digest():
        return None
    try:
        description_bytes, ptx_bytes = _LENGTHS.unpack_from(body)
        texts = body[_LENGTHS.size :]
        ptx = texts[description_bytes : description_bytes + ptx_bytes].decode()
        return artifact_from(json.loads(texts[:description_bytes]), ptx, texts[description_bytes + ptx_bytes :])
    except (struct.error, ValueError, KeyError, TypeError):
        return None


@functools.cache
def _source_digest() -> bytes:
    """sha256 over the sources that decide machine code: read once, as Python reads its imports."""
    package = Path(__file__).parent
    total = hashlib.sha256()
    for name in kernels.source_modules():
        total.update(name.encode() + b"\0" + hashlib.sha256((package / name).read_bytes()).digest())
    return total.digest()


def _open(folder: str | os.PathLike[str] | None) -> Files | None:
    try:
        store = importlib.import_module("cuda.core.utils").FileStreamProgramCache
    except ImportError:
        return None  # compiling needs no cuda.core, only keeping what was compiled does
    try:
        path = default_folder() if folder is None else Path(folder)
        # The cubins run on the user's GPU as the user: nobody else may put one there.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        files: Files = store(path, max_size_bytes=MAX_BYTES)
    except (OSError, RuntimeError):  # RuntimeError: Path.home() when there is none
        return None
    return files
