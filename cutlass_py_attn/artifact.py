"""Artifact: a compiled Build with PTX, cubin, resources and parameters; and a folder of artifacts."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.plan.build import Build, build_from
from cutlass_py_attn.problem.scalars import path_objections, shown


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
    """

    build: Build
    ptx: str
    cubin: bytes
    kernels: tuple[Kernel, ...]
    toolchain: str
    allocation: str

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
        }

    def files(self) -> dict[str, bytes]:
        """Returns the artifact's files in a Folder: path below the folder and contents, the description last."""
        stem = f"{self.build.arch}/{self.build.symbol}"
        description = json.dumps(self.describe(), indent=1, sort_keys=True)
        return {
            f"{stem}.ptx": self.ptx.encode(),
            f"{stem}.cubin": self.cubin,
            f"{stem}.json": description.encode(),
        }


def artifact_from(description: dict[str, Any], ptx: str, cubin: bytes) -> Artifact:
    """Returns the artifact of a `describe` object, PTX and cubin; ValueError or KeyError if it is damaged."""
    kernels = tuple(
        Kernel(**{**item, "parameters": tuple(Parameter(**parameter) for parameter in item["parameters"])})
        for item in description["kernels"]
    )
    build, names = build_from(description["build"]), description["toolchain"]
    return Artifact(build, ptx, cubin, kernels, names, description["allocation"])


class Folder:
    """Artifacts as files `<arch>/<symbol>.json|ptx|cubin`, for machines without the compiler.

    Folders of one path are equal, so that calls with either share their cached kernels.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if reasons := path_objections("path", path):
            raise NotSupported(reasons)
        self.path = Path(path)

    def __eq__(self, other: object) -> bool:
        return self.path == other.path if isinstance(other, Folder) else NotImplemented

    def __hash__(self) -> int:
        return hash((Folder, self.path))

    def __repr__(self) -> str:
        return f"Folder({str(self.path)!r})"

    def __call__(self, build: Build) -> Artifact:
        """Returns the artifact of `build`; Stale says what is missing or different, and what to do."""
        if not isinstance(build, Build):
            raise NotSupported(f"build = {shown(build)}: must be a Build; pass the field `build` of a plan")
        stem = self.path / build.arch / build.symbol
        remedy = f"build it with: cutlass-py-attn build --arch {build.arch} --symbol {build.symbol} -o {self.path}"
        description = stem.with_name(stem.name + ".json")
        if not description.is_file():
            raise Stale(f"{build.symbol} for {build.arch}: not in {self.path}; {remedy}")
        artifact = self._read(description)
        if artifact.build != build:
            raise Stale(f"{build.symbol} for {build.arch}: {self.path} holds another build of this symbol; {remedy}")
        return artifact

    def all(self) -> list[Artifact]:
        """Returns every artifact of the folder, sorted by path."""
        return [self._read(path) for path in sorted(self.path.glob("*/*.json"))]

    def put(self, artifact: Artifact) -> None:
        """Writes the three files, the description last; each file is complete or absent."""
        if not isinstance(artifact, Artifact):
            raise NotSupported(f"artifact = {shown(artifact)}: must be an Artifact; pass what `compile` returns")
        (self.path / artifact.build.arch).mkdir(parents=True, exist_ok=True)
        for name, data in artifact.files().items():
            _write(self.path / name, data)

    def _read(self, description: Path) -> Artifact:
        name = description.name.removesuffix(".json")
        try:
            ptx = (description.parent / f"{name}.ptx").read_text()
            cubin = (description.parent / f"{name}.cubin").read_bytes()
            return artifact_from(json.loads(description.read_text()), ptx, cubin)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Stale(f"{description}: damaged or from another version ({error}); build it again") from error


def _write(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
