"""Native library: which handler launches XLA's calls, and the library of the one in C, compiled on this machine.

The environment variable CUTLASS_PY_ATTN_JAX_HANDLER decides when `cutlass_py_attn.jax` is imported:

- "auto", or not set: the native handler if the machine has an NVIDIA driver, and a C compiler that compiles the
  handler; else the one in Python
- "native": the native handler; the import raises NotSupported if it cannot be compiled
- "python": the one in Python

XLA keeps one handler for each name, so the choice cannot change later.

The library is cached beside the kernels' cache, in `cutlass_py_attn_jax`, under a hash of everything that decides its
machine code. Like a cached kernel, it is used only if no other user could have written it
(`private_folder.refusal`). What was checked is what is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jax

from cutlass_py_attn.compilation import private_folder
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.suggestions import did_you_mean

VARIABLE: Final = "CUTLASS_PY_ATTN_JAX_HANDLER"
AUTO, NATIVE, PYTHON = HANDLERS = "auto", "native", "python"
COMPILERS: Final = ("cc", "gcc", "clang")  # without the variable CC
SOURCE: Final = Path(__file__).with_name("native_handler.c")
FLAGS: Final = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
FOLDER: Final = private_folder.NATIVE_LIBRARIES

_HEADER: Final = Path("xla", "ffi", "api", "c_api.h")
_TIME_LIMIT: Final = 120  # seconds that the compiler may take
_MAX_WORDS: Final = 2000  # characters of the compiler's words in an error
_DIGEST_BYTES: Final = 32
_PART: Final = f"{FOLDER}."  # start of the names of temporary folders


@dataclass(frozen=True, slots=True)
class Choice:
    """The handler of this process. name: NATIVE or PYTHON. reason: why; library: of the native handler."""

    name: str
    reason: str
    library: ctypes.CDLL | None = None


@functools.cache
def choice() -> Choice:
    """Returns the handler that the environment chooses, with its library loaded; constant while the process lives.

    NotSupported: the variable has another value, or demands a native handler that cannot be compiled.
    """
    given = os.environ.get(VARIABLE) or AUTO
    if given not in HANDLERS:
        remedy = did_you_mean(given, HANDLERS, "unset it")
        raise NotSupported(f"{VARIABLE} = {given!r}: must be one of {', '.join(HANDLERS)}; {remedy}")
    if given == PYTHON:
        return Choice(PYTHON, f"{VARIABLE} demands it")
    if given == AUTO and not _has_driver():
        return Choice(PYTHON, "there is no NVIDIA driver (libcuda) on this machine")
    try:
        library, place = load()
    except _NotBuilt as error:
        if given == NATIVE:
            remedy = f"install a C compiler, or set {VARIABLE}={PYTHON}"
            raise NotSupported(
                f"{VARIABLE} = {given!r}: the native handler cannot be compiled: {error}; {remedy}"
            ) from error
        return Choice(PYTHON, f"the native handler cannot be compiled: {error}")
    return Choice(NATIVE, place, library)


class _NotBuilt(Exception):
    """The native handler cannot be compiled or loaded, with the reason."""


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def load() -> tuple[ctypes.CDLL, str]:
    """Returns the library, compiled if it is not cached, and its file, or why it is compiled in each process."""
    command = _command()
    folder, unfit = _folder()
    path = folder / f"{hashlib.sha256(_inputs(command)).hexdigest()}.so"
    if not unfit and (kept := _kept(path)):
        with contextlib.suppress(_NotBuilt):  # of another machine that shares the folder
            return _opened(kept, folder), str(path)
    made = _compiled(command, None if unfit else folder)
    if not unfit:
        try:
            _store(made, path)
            return _opened(made, folder), str(path)
        except OSError as error:
            unfit = error.strerror or str(error)
    return _opened(made, None), f"compiled in each process, as {folder} cannot be its cache: {unfit}"


def _folder() -> tuple[Path, str]:
    """Returns the folder of the cached libraries, and why it cannot be a cache; "" if it can."""
    folder = Path(FOLDER)
    try:
        folder = private_folder.cache_root() / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder, private_folder.refusal(folder)
    except OSError as error:
        return folder, error.strerror or str(error)
    except RuntimeError as error:  # there is no home directory
        return folder, str(error)


def _kept(path: Path) -> bytes:
    """Returns the library of a file of the cache; b"" if it is none, was damaged, or others may have written it."""
    data = private_folder.read_private(path) or b""
    library = data[:-_DIGEST_BYTES]
    return library if _digest(library) == data[-_DIGEST_BYTES:] else b""


def _store(library: bytes, path: Path) -> None:
    """Writes the library into the cache, followed by its digest: the file is whole as soon as it is there."""
    private_folder.sweep(path.parent, private_folder.UNFINISHED)
    handle, part = tempfile.mkstemp(prefix=private_folder.UNFINISHED, dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(library + _digest(library))
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _places(cache: Path | None) -> Iterator[Path]:
    """Yields folders for temporary files: the system's, then the cache, if there is one."""
    found: list[Path] = [] if cache is None else [cache]
    with contextlib.suppress(OSError):  # no folder of the system's can be written
        found.insert(0, Path(tempfile.gettempdir()))
    yield from found


def _compiled(command: list[str], cache: Path | None) -> bytes:
    """Returns the library, compiled in the first folder that has room for it; _NotBuilt says why the first has not."""
    first: _NotBuilt | None = None
    for place in _places(cache):
        try:
            with tempfile.TemporaryDirectory(prefix=_PART, dir=place) as made:
                return _compile(command, Path(made)).read_bytes()
        except OSError as error:
            first = first or _not_built(place, error)
        except _NotBuilt as error:
            first = first or error
    raise first or _NotBuilt("there is no folder for temporary files")


def _command() -> list[str]:
    """Returns the compiler and its options but the names of files."""
    text = os.environ.get("CC", "")
    try:
        given = shlex.split(text)
    except ValueError as error:
        raise _NotBuilt(f"CC = {text!r}: must be a command ({error})") from error
    for words in [given] if given else [[name] for name in COMPILERS]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:], *FLAGS, f"-I{jax.ffi.include_dir()}"]
    where = f"CC = {given[0]!r}" if given else ", ".join(COMPILERS)
    raise _NotBuilt(f"there is no C compiler on the PATH ({where})")


def _inputs(command: list[str]) -> bytes:
    """Returns what decides the library: source, header, command, compiler and machine."""
    compiler = Path(command[0]).resolve()
    try:
        header = (Path(jax.ffi.include_dir()) / _HEADER).read_bytes()
        about = compiler.stat()
    except OSError as error:
        raise _NotBuilt(f"{error.filename}: {error.strerror}; install jaxlib again") from error
    version = str(compiler), about.st_size, about.st_mtime_ns, platform.machine(), platform.libc_ver()
    return b"\0".join([_digest(SOURCE.read_bytes()), _digest(header), repr((command, version)).encode()])


def _compile(command: list[str], folder: Path) -> Path:
    """Compiles the library into a folder that no other process uses."""
    made = folder / "handler.so"
    try:
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(made)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(folder)},
            timeout=_TIME_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotBuilt(f"{shlex.join(command)}: {error}") from error
    if done.returncode or not made.is_file():
        raise _NotBuilt(f"{shlex.join(command)}: {done.stderr.strip()[:_MAX_WORDS] or f'exit code {done.returncode}'}")
    return made


def _opened(library: bytes, cache: Path | None) -> ctypes.CDLL:
    """Loads a library that was checked, by a name under which nobody can put another: memory, else a new file.

    cache: another folder for that file, if the system's temporary files may not be executed.
    """
    try:
        return _from_memory(library)
    except (AttributeError, OSError) as error:  # neither Linux nor /proc, or a policy forbids it
        last = _NotBuilt(str(error))
    for place in _places(cache):
        try:
            with tempfile.TemporaryDirectory(prefix=_PART, dir=place) as made:  # a loaded library needs no file
                path = Path(made, "handler.so")
                path.write_bytes(library)
                return ctypes.CDLL(str(path))
        except OSError as error:
            last = _not_built(place, error)
    raise last


def _from_memory(library: bytes) -> ctypes.CDLL:
    """Loads a library from a file that has no name in any folder, and that may be executed wherever the cache is."""
    handle = os.memfd_create(FOLDER)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(library)
        # The handle stays open: the loader takes a later library of the same name for this one.
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except BaseException:
        os.close(handle)
        raise


def _not_built(place: Path, error: OSError) -> _NotBuilt:
    return _NotBuilt(f"{place}: {error.strerror or error}")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
