"""Files: writes a bundle's folder, completely or not at all, and reads it without compiler or CUDA toolkit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from cutlass_py_attn.artifact import Artifact, NoPermission, unreadable
from cutlass_py_attn.bundle import header, reading
from cutlass_py_attn.bundle.arguments import export_objections, listed
from cutlass_py_attn.bundle.manifest import Target, manifest, sealed, sha256
from cutlass_py_attn.bundle.reading import AGAIN, MANIFEST, ExportedPass
from cutlass_py_attn.bundle.replacing import objection, replace_folder
from cutlass_py_attn.errors import CompileError, NotSupported, Stale
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.arch import architecture, runs_on
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import path_objections, shown
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.launch import Bound, bind

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


def export_bundle(
    folder: str | os.PathLike[str],
    problems: Iterable[Problem],
    archs: Iterable[str],
    *,
    name: str = "attention",
    kernels: Callable[[Build], Artifact] | None = None,
) -> Bundle:
    """Writes the kernels of `problems` (one for each direction) for every target of `archs` into `folder`.

    The folder then holds <arch>/<symbol>.cubin, .ptx and .json, manifest.json and the C header <name>.h, whose
    functions have the prefix `name`. For sm_90a the sm90 kernels are exported if they support the problem, else those
    of sm_90.
    kernels: returns the Artifact of a Build; None compiles. The files of an older bundle are replaced; a folder with
    any other file is refused. The folder is written completely or not at all.

    NotSupported lists every objection. CompileError: no plan of a problem compiles. Stale: `kernels` has none of them.
    NoPermission: this user may not read an older bundle in the folder.
    """
    problems, archs = listed(problems), listed(archs)
    if reasons := export_objections(folder, problems, archs, name, kernels):
        raise NotSupported(reasons)
    path = Path(os.path.realpath(folder))
    _check(path, problems, archs, name)
    source = kernels or _compiler()
    targets = [_best(problem, arch, source) for problem in problems for arch in archs]
    unique = {(target.problem.direction, target.plan.build): target for target in targets}
    ordered = sorted(unique.values(), key=_preference)
    files: dict[str, bytes] = {}
    for target in ordered:
        files |= target.artifact.files()
    described = manifest(name, ordered, files)
    text = header.render(described).encode()
    described["files"][f"{name}.h"] = {"bytes": len(text), "sha256": sha256(text)}
    files |= {f"{name}.h": text, MANIFEST: json.dumps(sealed(described), indent=1).encode()}
    replace_folder(path, files, reading.listed_files)
    return load_bundle(folder)


def load_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """Returns the bundle of a folder; Stale names what is missing, damaged or of another version."""
    return Bundle(folder)


class Bundle:
    """The kernels of a bundle, which may be passed as `kernels` to attention_forward and attention_backward.

    manifest: the JSON object of manifest.json. artifacts: the kernels of its targets. The constructor reads every file
    that the manifest lists, compares it with its sha256, and reads no other.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if reasons := path_objections("folder", folder):
            raise NotSupported(reasons)
        self.path = Path(folder)
        contents = reading.read(self.path)
        self.manifest = contents.manifest
        self.artifacts = contents.artifacts
        self._passes = contents.passes

    def __call__(self, build: Build) -> Artifact:
        """Returns the artifact of `build`; Stale if the bundle does not have it, or if another version compiled it."""
        if not isinstance(build, Build):
            raise NotSupported(f"build = {shown(build)}: must be a Build; pass the field `build` of a plan")
        for artifact in self.artifacts:
            if artifact.build == build:
                artifact.expect_abi(f"{AGAIN} to {self.path}")
                return artifact
        raise Stale(f"{build.symbol} for {build.arch}: {self.path} has {self._shown()}; export this problem")

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions of the bundle: forward, backward or both."""
        return tuple(self._passes)

    def problem(self, direction: str) -> Problem:
        """Returns the exported problem of this direction."""
        return self._pass(direction).problem

    def plans(self, direction: str) -> tuple[Plan, ...]:
        """Returns the exported plans of this direction, the preferred target first."""
        return self._pass(direction).plans

    def bind(self, direction: str, problem: Problem | None = None, device: int = 0) -> Bound:
        """Binds the kernels of this direction on GPU `device`.

        problem: None for the exported one, or another problem that the kernels serve.
        Stale: the bundle has no kernels for the problem or the GPU. Other errors as `launch.bind`.
        """
        wanted = self.problem(direction) if problem is None else problem
        if reasons := planner.problem_objections(wanted):
            raise NotSupported(reasons)
        gpu = driver.device(driver.checked_ordinal(device))
        known = [plan.build for plan in self.plans(direction)]
        running = [build for build in known if runs_on(architecture(build.arch), gpu.compute_capability)]
        if not running:
            major, minor = gpu.compute_capability
            archs = ", ".join(build.arch for build in known)
            raise Stale(f"{self.path} is for {archs}: {gpu.name} has compute capability {major}.{minor}; export for it")
        found = [
            plan
            for build in running
            for plan in planner.plans(wanted, build.arch, gpu.num_sms)
            if plan.build == build
        ]  # fmt: skip
        if not found:
            raise Stale(f"this {direction} problem needs other kernels than {self._shown()}; export it")
        fitting = [plan for plan in found if plan.build.shared_memory_bytes <= gpu.shared_memory_per_block]
        plan = (fitting or found)[0]
        return bind(self(plan.build), plan, wanted, gpu.ordinal)

    def _pass(self, direction: str) -> ExportedPass:
        if not isinstance(direction, str) or direction not in self._passes:
            raise NotSupported(
                f"direction = {direction!r}: {self.path} has {', '.join(self.directions)}; export it too"
            )
        return self._passes[direction]

    def _shown(self) -> str:
        return ", ".join(f"{artifact.build.symbol} for {artifact.build.arch}" for artifact in self.artifacts)


def _compiler() -> Callable[[Build], Artifact]:
    from cutlass_py_attn.compilation.compiler import artifact_for

    return artifact_for


def _check(path: Path, problems: Sequence[Problem], archs: Sequence[str], name: str) -> None:
    """Raises NotSupported with every objection to the arguments of an export."""
    reasons = [reason for problem in problems for reason in problem.reasons()]
    directions = [problem.direction for problem in problems]
    if not problems:
        reasons.append("problems is empty: must be a forward, a backward or one of each; pass one")
    if len(set(directions)) < len(directions):
        reasons.append(f"problems are {', '.join(directions)}: must be one for each direction; export the others apart")
    if not archs:
        reasons.append("archs is empty: must name at least one target, such as sm_80; pass one")
    if not _NAME.fullmatch(name):
        reasons.append(
            f"name = {name!r}: must be lower-case letters, digits and _, as the prefix of C functions; correct it"
        )
    reasons += _folder_objections(path)
    reasons += [reason for arch in archs for reason in planner.arch_objections(arch)]
    if reasons:
        raise NotSupported(reasons)


def _folder_objections(path: Path) -> Iterator[str]:
    """Yields why an export cannot replace what is at the path."""
    try:
        if not path.exists():
            return
        if not path.is_dir():
            yield f"folder {path}: is a file; name a new folder"
        elif reason := objection(path, reading.listed_files(path)):
            yield reason
    except NoPermission:
        raise
    except PermissionError as error:
        raise unreadable(error.filename) from error


def _best(problem: Problem, arch: str, kernels: Callable[[Build], Artifact]) -> Target:
    """Returns the first plan for the target whose kernels compile or exist.

    A bundle serves every length, so kernels and tiles for short or for long sequences only are left out.
    """
    limits = architecture(arch)
    own = not limits.is_portable
    if own:
        plans = planner.plans_on(problem, limits.compute_capability, any_length=True)
    else:
        plans = planner.plans(problem, arch, any_length=True)
    first: CompileError | Stale | None = None
    for plan in plans:
        try:
            return Target(problem, plan, kernels(plan.build), architecture(plan.build.arch).num_sms)
        except (CompileError, Stale) as error:
            first = first or error
    assert first is not None
    raise first


def _preference(target: Target) -> tuple[bool, bool, tuple[int, int]]:
    """Sort key: forward before backward, then targets for one generation alone, then the newest target."""
    limits = target.plan.architecture
    major, minor = limits.compute_capability
    return target.problem.direction == "backward", limits.is_portable, (-major, -minor)
