"""Artifact: a compiled Build with PTX, cubin, resources and parameters; and a folder of artifacts."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_py_attn.errors import AttentionError, CompileError, NotSupported, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan.abi_digest import abi_digest
from cutlass_py_attn.plan.build_json import expect_known
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import typed_json
from cutlass_py_attn.problem.scalars import path_refusals
from cutlass_py_attn.refusals import refuse


class NoPermission(AttentionError, PermissionError):
    """This user may not read or write a file of kernels."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter; offset and size in bytes, as the cubin states them."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry of a cubin. Frame and spills in bytes per thread, static shared memory in bytes per block."""

    symbol: str
    registers: int
    frame_bytes: int
    spill_bytes: int
    static_shared_memory_bytes: int
    threads: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled Build.

    kernels: in the order of the plan's launches.
    toolchain: version of the compiler.
    allocation: register options and warp arrangement of the compilation; others than the build's if those spilled.
    abi: digest of the parameters that the kernels read; "" for those of this version.
    """

    build: Build
    ptx: str
    cubin: bytes
    kernels: tuple[Kernel, ...]
    toolchain: str
    allocation: str
    abi: str = ""

    def __post_init__(self) -> None:
        if not self.abi:
            object.__setattr__(self, "abi", abi_digest(self.build))

    def expect_abi(self, remedy: str) -> None:
        """Raises Stale if the kernels read other parameters than this version passes."""
        expected = abi_digest(self.build)
        if self.abi != expected:
            raise Stale(
                f"{self.build.symbol} for {self.build.arch}: its kernels were compiled by a version with other kernel "
                f"parameters (digest {self.abi[:12]}, this version's is {expected[:12]}); {remedy}"
            )

    def kernel(self, symbol: str) -> Kernel:
        """Returns the entry with this symbol; raises Stale when the cubin does not have it."""
        for kernel in self.kernels:
            if kernel.symbol == symbol:
                return kernel
        raise Stale(
            f"symbol {symbol!r}: the artifact holds {', '.join(k.symbol for k in self.kernels)}; compile the plan again"
        )

    @property
    def main(self) -> Kernel:
        """The main kernel; the first kernel for a backward without a main kernel."""
        return self.kernel(f"{self.build.symbol}_0") if self.build.has_main else self.kernels[0]

    @property
    def registers(self) -> int:
        """Registers per thread of the main kernel."""
        return self.main.registers

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of the main kernel."""
        return self.main.parameters

    def describe(self) -> dict[str, Any]:
        """Returns everything but PTX and cubin, as a JSON object."""
        return {
            "build": dataclasses.asdict(self.build),
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "toolchain": self.toolchain,
            "allocation": self.allocation,
            "abi": self.abi,
        }

    def files(self) -> dict[str, bytes]:
        """Returns the artifact's files in a Folder: path below the folder and contents, the description last."""
        stem = f"{self.build.arch}/{self.build.symbol}"
        ptx = self.ptx.encode()
        digests = {"ptx": _sha256(ptx), "cubin": _sha256(self.cubin)}
        description = json.dumps({**self.describe(), "sha256": digests}, indent=1, sort_keys=True)
        return {
            f"{stem}.ptx": ptx,
            f"{stem}.cubin": self.cubin,
            f"{stem}.json": description.encode(),
        }


@dataclass(frozen=True, slots=True)
class _Description:
    """The JSON object of `Artifact.describe`."""

    build: Build
    kernels: tuple[Kernel, ...]
    toolchain: str
    allocation: str
    abi: str


@dataclass(frozen=True, slots=True)
class _Digests:
    """sha256 of the other files of an artifact in a Folder."""

    ptx: str
    cubin: str


def artifact_from(description: object, ptx: str, cubin: bytes) -> Artifact:
    """Returns the artifact of a `describe` object, PTX and cubin; ValueError if it is damaged or of another version."""
    found = typed_json.read(_Description, description, "artifact")
    expect_known(found.build, "artifact.build")
    unprintable = [text for text in _texts(found) if not text.isprintable()]
    if unprintable or not found.abi:
        raise ValueError(f"artifact: {(*unprintable, found.abi)[0]!r} must be printable text")
    negative = [number for kernel in found.kernels for number in _numbers(kernel) if number < 0]
    if negative or not found.kernels:
        raise ValueError(f"artifact.kernels: must be at least one kernel without negative numbers, found {negative}")
    return Artifact(found.build, ptx, cubin, found.kernels, found.toolchain, found.allocation, found.abi)


def artifact_from_files(description: bytes, ptx: bytes, cubin: bytes) -> Artifact:
    """Returns the artifact of the three files of a Folder; ValueError as `artifact_from`, or if they do not match."""
    found = dict(typed_json.as_object(typed_json.parse(description), "artifact"))
    digests = typed_json.read(_Digests, found.pop("sha256", {}), "artifact.sha256")
    artifact = artifact_from(found, ptx.decode(), cubin)
    if digests != _Digests(_sha256(ptx), _sha256(cubin)):
        raise ValueError("PTX or cubin are not those of the description")
    return artifact


def first_available(plans: Iterable[Plan], kernels: Callable[[Build], object]) -> tuple[Plan, Artifact]:
    """Returns the first plan whose Artifact `kernels` returns, and the Artifact.

    A plan is skipped if ptxas cannot compile its build without spills, or if a folder does not hold the build. If
    all plans are skipped, the error of the first plan is raised. NotSupported: `kernels` returns something else.
    """
    first_error: CompileError | Stale | None = None
    for plan in plans:
        try:
            artifact = kernels(plan.build)
        except (CompileError, Stale) as error:
            first_error = first_error or error
            continue
        if not isinstance(artifact, Artifact):
            remedy = "pass a function that returns what `compile` does, such as Folder(path)"
            raise NotSupported(refuse(f"kernels({plan.build.symbol})", artifact, "must be an Artifact", remedy))
        return plan, artifact
    if first_error is None:
        raise ValueError("plans is empty: at least one is needed")
    raise first_error


def _texts(description: _Description) -> Iterator[str]:
    yield from (description.toolchain, description.allocation, description.abi)
    for kernel in description.kernels:
        yield from (kernel.symbol, *(parameter.name for parameter in kernel.parameters))


def _numbers(kernel: Kernel) -> Iterator[int]:
    yield from (kernel.registers, kernel.frame_bytes, kernel.spill_bytes, kernel.static_shared_memory_bytes)
    yield from (kernel.threads, *(number for it in kernel.parameters for number in (it.offset, it.size)))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Folder:
    """Artifacts as files `<arch>/<symbol>.json|ptx|cubin`, for machines without the compiler.

    Folders of one path are equal, so that calls with either share their cached kernels.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if refusals := path_refusals("path", path):
            raise NotSupported(refusals)
        self.path = Path(path)

    def __eq__(self, other: object) -> bool:
        return self.path == other.path if isinstance(other, Folder) else NotImplemented

    def __hash__(self) -> int:
        return hash((Folder, self.path))

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r})"

    def __call__(self, build: Build) -> Artifact:
        """Returns the artifact of `build`.

        Stale says what is missing or different, and what to do. NoPermission: this user may not read the files.
        """
        if not isinstance(build, Build):
            raise NotSupported(refuse("build", build, "must be a Build", "pass the field `build` of a plan"))
        remedy = f"build it with: cutlass-py-attn build --arch {build.arch} --symbol {build.symbol} -o {self.path}"
        description = self.path / build.arch / f"{build.symbol}.json"
        try:
            artifact = _read(description)
        except FileNotFoundError as error:
            raise Stale(f"{build.symbol} for {build.arch}: not in {self.path}; {remedy}") from error
        except (OSError, ValueError) as error:
            raise _unusable(description, error, remedy) from error
        if artifact.build != build:
            raise Stale(f"{build.symbol} for {build.arch}: {self.path} holds another build of this symbol; {remedy}")
        artifact.expect_abi(remedy)
        return artifact

    def all(self) -> list[Artifact]:
        """Returns every artifact of the folder, sorted by path; errors as `__call__`."""
        found = []
        for description in self._descriptions():
            try:
                found.append(_read(description))
            except (OSError, ValueError) as error:
                raise _unusable(description, error, "build it again") from error
        return found

    def put(self, artifact: Artifact) -> None:
        """Writes the three files, the description last; each file is complete or absent.

        Processes that write to one folder take turns, so that the three files are of one artifact. The user's umask
        decides who may read them. NoPermission: this user may not write to the folder. OSError: the disk is full, for
        example.
        """
        if not isinstance(artifact, Artifact):
            raise NotSupported(refuse("artifact", artifact, "must be an Artifact", "pass what `compile` returns"))
        try:
            (self.path / artifact.build.arch).mkdir(parents=True, exist_ok=True)
            with locked(self.path / artifact.build.arch):
                for name, data in artifact.files().items():
                    _write(self.path / name, data)
        except PermissionError as error:
            raise NoPermission(
                f"{error.filename or self.path}: this user may not write there; write to another folder"
            ) from error

    def _descriptions(self) -> list[Path]:
        """Returns the path of every description, sorted."""
        try:
            return sorted(path for folder in self._folders() for path in folder.iterdir() if path.suffix == ".json")
        except PermissionError as error:
            raise _unusable(Path(error.filename), error, "") from error

    def _folders(self) -> list[Path]:
        """Returns the folders of all targets; PermissionError, which Path.is_dir hides from Python 3.14 on."""
        try:
            with os.scandir(self.path) as entries:
                return [self.path / entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []


def _read(description: Path) -> Artifact:
    """Returns the artifact of a description and the two files beside it.

    Files that differ from each other are read again when no process writes to the folder. FileNotFoundError: there is
    no description. Other OSErrors: a file cannot be read. ValueError: they are damaged, of another version, or of
    another kernel than their name says.
    """
    try:
        return _from_files(description)
    except ValueError:
        with locked(description.parent):
            return _from_files(description)


def _from_files(description: Path) -> Artifact:
    """As `_read`, of the files as they are."""
    text = description.read_bytes()
    try:
        ptx, cubin = (description.with_name(f"{description.stem}.{kind}").read_bytes() for kind in ("ptx", "cubin"))
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing") from error
    artifact = artifact_from_files(text, ptx, cubin)
    if (artifact.build.arch, artifact.build.symbol) != (description.parent.name, description.stem):
        raise ValueError(f"it describes {artifact.build.symbol} for {artifact.build.arch}")
    return artifact


def _unusable(path: Path, error: Exception, remedy: str) -> AttentionError:
    """Returns the error for a file that `_read` cannot read."""
    if isinstance(error, PermissionError):
        return unreadable(error.filename or path)
    return Stale(f"{path}: damaged or from another version ({error}); {remedy}")


def unreadable(path: str | os.PathLike[str]) -> NoPermission:
    """Returns the error for a file of kernels that this user may not read."""
    return NoPermission(
        f"{os.fspath(path)}: this user may not read it (permission denied); let its owner allow that, for example with "
        "chmod -R a+rX on the folder"
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager that one process at a time enters for this folder; the system ends it with the process.

    Every process enters if this user cannot read the folder, and on a file system without locks.
    """
    with contextlib.ExitStack() as cleanup:
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            cleanup.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write(path: Path, data: bytes) -> None:
    """Writes a file atomically, with the permissions that the umask leaves."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and not error.filename:  # as a write says that the disk is full
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
