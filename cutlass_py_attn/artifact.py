"""Artifact: what compiling a Build gives (PTX, cubin, resources, parameters), and a folder of them."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_py_attn.errors import Stale
from cutlass_py_attn.plan import Build, build_from


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter: offset and size in bytes as the cubin states them."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry of a cubin. Frame, spills and static shared memory in bytes (per thread, per thread, per block)."""

    symbol: str
    registers: int
    frame_bytes: int
    spill_bytes: int
    static_shared_memory_bytes: int
    threads: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled Build: `kernels` in the order of the plan's launches; `toolchain` names the compiler, `allocation`
    the register settings and warp grids that held, which differ from the build's where those spilled."""

    build: Build
    ptx: str
    cubin: bytes
    kernels: tuple[Kernel, ...]
    toolchain: str
    allocation: str

    def kernel(self, symbol: str) -> Kernel:
        """The entry of that symbol; Stale when the cubin has none."""
        for kernel in self.kernels:
            if kernel.symbol == symbol:
                return kernel
        raise Stale(
            f"symbol {symbol!r}: the artifact holds {', '.join(k.symbol for k in self.kernels)}; compile the plan again"
        )

    @property
    def main(self) -> Kernel:
        """The kernel that gives the build its name; the first where a backward has none of that name."""
        return self.kernel(f"{self.build.symbol}_0") if self.build.has_main else self.kernels[0]

    @property
    def registers(self) -> int:
        """Registers a thread of the main kernel."""
        return self.main.registers

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters of the main kernel."""
        return self.main.parameters

    def describe(self) -> dict[str, Any]:
        """Everything but PTX and cubin, as a JSON object."""
        return {
            "build": dataclasses.asdict(self.build),
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "toolchain": self.toolchain,
            "allocation": self.allocation,
        }

    def files(self) -> dict[str, bytes]:
        """What a Folder holds of it: each file's path below the folder and its bytes, the description last."""
        stem = f"{self.build.arch}/{self.build.symbol}"
        description = json.dumps(self.describe(), indent=1, sort_keys=True)
        return {
            f"{stem}.ptx": self.ptx.encode(),
            f"{stem}.cubin": self.cubin,
            f"{stem}.json": description.encode(),
        }


def artifact_from(description: dict[str, Any], ptx: str, cubin: bytes) -> Artifact:
    """The artifact of a `describe` object and its two texts; ValueError or KeyError when it is damaged."""
    kernels = tuple(
        Kernel(**{**item, "parameters": tuple(Parameter(**parameter) for parameter in item["parameters"])})
        for item in description["kernels"]
    )
    build, names = build_from(description["build"]), description["toolchain"]
    return Artifact(build, ptx, cubin, kernels, names, description["allocation"])


class Folder:
    """Artifacts as files `<arch>/<symbol>.json|ptx|cubin`: what a machine without the compiler launches from."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __call__(self, build: Build) -> Artifact:
        """The artifact of `build`; Stale says what is missing or differs, and what to do."""
        stem = self.path / build.arch / build.symbol
        remedy = f"build it with: cutlass-py-attn build --arch {build.arch} --symbol {build.symbol} -o {self.path}"
        description = stem.with_name(stem.name + ".json")
        if not description.is_file():
            raise Stale(f"{build.symbol} for {build.arch}: not in {self.path}; {remedy}")
        found = self._read(description)
        if found.build != build:
            raise Stale(f"{build.symbol} for {build.arch}: {self.path} holds another plan of this name; {remedy}")
        return found

    def all(self) -> list[Artifact]:
        """Every artifact of the folder, sorted by file name."""
        return [self._read(path) for path in sorted(self.path.glob("*/*.json"))]

    def put(self, artifact: Artifact) -> None:
        """Write the three files; each appears whole or not at all, the description last."""
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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
