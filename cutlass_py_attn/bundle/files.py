"""Files: writes a bundle's folder, completely or not at all, and reads it without compiler or CUDA toolkit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cutlass_py_attn.artifact import Artifact, NoPermission, first_available, locked, unreadable
from cutlass_py_attn.bundle import header, library, reading
from cutlass_py_attn.bundle.arguments import export_refusals, listed
from cutlass_py_attn.bundle.dispatch import facts_of, family_order, order_key
from cutlass_py_attn.bundle.manifest import Target, manifest, sealed, sha256
from cutlass_py_attn.bundle.names import name_refusals
from cutlass_py_attn.bundle.reading import AGAIN, MANIFEST, ExportedProblem
from cutlass_py_attn.bundle.replacing import folder_refusals, replace_folder
from cutlass_py_attn.bundle.rules import ALL_DIRECTIONS, AnyProblem, exported_plans, plans
from cutlass_py_attn.errors import CompileError, NotSupported, Stale
from cutlass_py_attn.launch.arch import architecture, runs_on
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import STANDARD
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.merge import variant_of
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import path_refusals
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import Bound, bind


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
    functions have the prefix `name`. For sm_90a kernels with wgmma are exported if they support the problem, else those
    of sm_90.
    kernels: returns the Artifact of a Build; None compiles. The files of an older bundle are replaced; a folder with
    any other file is refused. The folder is written completely or not at all.

    NotSupported lists every objection. CompileError: no plan of a problem compiles. Stale: `kernels` has none of them.
    NoPermission: this user may not read an older bundle in the folder.
    """
    return _export(folder, problems, archs, name, kernels, is_library=False)


def export_library(
    folder: str | os.PathLike[str],
    problems: Iterable[AnyProblem],
    archs: Iterable[str],
    *,
    name: str = "attention",
    kernels: Callable[[Build], Artifact] | None = None,
) -> Bundle:
    """Writes a C library with the kernels of any number of `problems` for every target of `archs` into `folder`.

    The folder then holds <name>.c and <name>.h, which any C11 compiler makes a library of, with a CMake package, a
    pkg-config file and a Rust crate that build them; and what a bundle holds: <arch>/<symbol>.cubin, .ptx and .json,
    and manifest.json. The functions of the library have the prefix `name`, and choose among the kernels for each call.
    problems: a Problem, AppendProblem or MergeProblem each.
    Other arguments, and the errors, are those of `export_bundle`; NotSupported also for a registered score term, which
    the fixed struct of a library's calls has no fields for, and for a MergeProblem with a float32 total beside other
    outputs, or without logsumexps. Scales of e4m3 codes, given or not, are those of each call.
    """
    return _export(folder, problems, archs, name, kernels, is_library=True)


def _export(
    folder: str | os.PathLike[str],
    given: Iterable[AnyProblem],
    given_archs: Iterable[str],
    name: str,
    kernels: Callable[[Build], Artifact] | None,
    *,
    is_library: bool,
) -> Bundle:
    problems, archs = listed(given), listed(given_archs)
    if refusals := export_refusals(folder, problems, archs, name, kernels):
        raise NotSupported(refusals)
    path = Path(os.path.realpath(folder))
    _check(path, problems, archs, name, is_library)
    if is_library:  # its calls say what is given
        problems = tuple(map(_without_options, problems))
    source = kernels or _compiler()
    targets = [_best(problem, arch, source) for problem in problems for arch in archs]
    if is_library:
        targets += [it for problem in problems for arch in archs for it in _for_its_lengths(problem, arch, source)]
    unique: dict[tuple[object, ...], Target] = {}
    for target in targets:
        unique.setdefault(_identity(target, is_library), target)
    ordered = sorted(unique.values(), key=_preference)
    files: dict[str, bytes] = {}
    for target in ordered:
        files |= target.artifact.files()
    described = manifest(name, ordered, files)
    made = library.render(described, files) if is_library else {f"{name}.h": header.render(described).encode()}
    described["files"] |= {file: {"bytes": len(data), "sha256": sha256(data)} for file, data in made.items()}
    files |= {**made, MANIFEST: json.dumps(sealed(described), indent=1).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        replace_folder(path, files, reading.intact_files)
        return load_bundle(folder)


def _without_options(problem: AnyProblem) -> AnyProblem:
    """Returns the problem without what each call of a library may have: a seed on the device, grad_logsumexp."""
    if not isinstance(problem, Problem):
        return problem
    return problem.replace(philox_on_device=False, grad_logsumexp=None)


def _identity(target: Target, is_library: bool) -> tuple[object, ...]:
    """Returns what two targets with the same kernels for the same calls have in common."""
    build = target.plan.build
    return (facts_of(target.problem, build), build) if is_library else (target.problem.direction, build)


def load_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """Returns the bundle of a folder; Stale names what is missing, damaged or of another version."""
    return Bundle(folder)


class Bundle:
    """The kernels of a bundle, which may be passed as `kernels` to attention_forward and attention_backward.

    manifest: the JSON object of manifest.json. artifacts: the kernels of its targets. The constructor reads every file
    that the manifest lists, compares it with its sha256, and reads no other.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if refusals := path_refusals("folder", folder):
            raise NotSupported(refusals)
        self.path = Path(folder)
        contents = reading.read(self.path)
        self.manifest = contents.manifest
        self.artifacts = contents.artifacts
        self._exported = contents.problems

    def __call__(self, build: Build) -> Artifact:
        """Returns the artifact of `build`; Stale if the bundle does not have it, or if another version compiled it."""
        if not isinstance(build, Build):
            raise NotSupported(refuse("build", build, "must be a Build", "pass the field `build` of a plan"))
        for artifact in self.artifacts:
            if artifact.build == build:
                artifact.expect_abi(f"{AGAIN} to {self.path}")
                return artifact
        raise Stale(f"{build.symbol} for {build.arch}: {self.path} has {self._shown()}; export this problem")

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions of the bundle: forward, backward or both; of a library also append and merge."""
        found = {item.problem.direction for item in self._exported}
        return tuple(direction for direction in ALL_DIRECTIONS if direction in found)

    @property
    def problems(self) -> tuple[AnyProblem, ...]:
        """The exported problems."""
        return tuple(item.problem for item in self._exported)

    def problem(self, direction: str) -> AnyProblem:
        """Returns the exported problem of this direction; NotSupported for a library that has several."""
        found = self._of(direction)
        if len(found) > 1:
            rule = f"{self.path} has {len(found)} such problems"
            raise NotSupported(refuse("direction", direction, rule, "see `problems`"))
        return found[0].problem

    def plans(self, direction: str) -> tuple[Plan, ...]:
        """Returns the exported plans of this direction, the preferred target of each problem first."""
        return tuple(plan for item in self._of(direction) for plan in item.plans)

    def bind(self, direction: str, problem: AnyProblem | None = None, device: int = 0) -> Bound:
        """Binds the kernels of this direction on GPU `device`.

        problem: None for the exported one, or another problem that the kernels serve.
        Stale: the bundle has no kernels for the problem or the GPU. Other errors as `binding.bind`.
        """
        wanted = self.problem(direction) if problem is None else problem
        if refusals := _problem_refusals(wanted):
            raise NotSupported(refusals)
        gpu = driver.device(driver.checked_ordinal(device))
        known = [plan.build for plan in self.plans(direction)]
        running = [build for build in known if runs_on(architecture(build.arch), gpu.compute_capability)]
        if not running:
            major, minor = gpu.compute_capability
            archs = ", ".join(build.arch for build in known)
            raise Stale(f"{self.path} is for {archs}: {gpu.name} has compute capability {major}.{minor}; export for it")
        targets = dict.fromkeys(build.arch for build in sorted(running, key=order_key))
        planned = (plan for arch in targets for plan in plans(wanted, arch, gpu.num_sms))
        found = sorted((plan for plan in planned if plan.build in running), key=lambda plan: family_order(plan.build))
        if not found:
            raise Stale(f"this {direction} problem needs other kernels than {self._shown()}; export it")
        fitting = [plan for plan in found if plan.build.shared_memory_bytes <= gpu.shared_memory_per_block]
        plan = (fitting or found)[0]
        return bind(self(plan.build), plan, wanted if isinstance(wanted, Problem) else None, gpu.ordinal)

    def _of(self, direction: str) -> list[ExportedProblem]:
        found = [item for item in self._exported if item.problem.direction == direction]
        if not found:
            rule = f"{self.path} has {', '.join(self.directions)}"
            raise NotSupported(refuse("direction", direction, rule, "export it too"))
        return found

    def _shown(self) -> str:
        return ", ".join(f"{artifact.build.symbol} for {artifact.build.arch}" for artifact in self.artifacts)


def _compiler() -> Callable[[Build], Artifact]:
    from cutlass_py_attn.compilation.turns import artifact_for

    return artifact_for


def _problem_refusals(problem: object) -> list[Refusal]:
    """Returns why a value is no problem that a bundle may have."""
    return [] if isinstance(problem, (AppendProblem, MergeProblem)) else planner.problem_refusals(problem)


def _check(path: Path, problems: Sequence[AnyProblem], archs: Sequence[str], name: str, is_library: bool) -> None:
    """Raises NotSupported with every objection to the arguments of an export."""
    refusals = [refusal for problem in problems for refusal in problem.refusals()]
    refusals += _program_refusals([problem for problem in problems if isinstance(problem, Problem)])
    directions = [problem.direction for problem in problems]
    library = "export a library with export_library (--library)"
    if not problems:
        refusals.append(refuse("problems", problems, "must be a forward, a backward or one of each", "pass one"))
    if len(set(directions)) < len(directions) and not is_library:
        rule = "must be one for each direction"
        refusals.append(refuse("problems", directions, rule, f"{library}, or export the others apart"))
    if is_library:
        refusals += _term_refusals([problem for problem in problems if isinstance(problem, Problem)])
        refusals += _total_refusals([problem for problem in problems if isinstance(problem, MergeProblem)])
    else:
        kinds = {type(problem).__name__ for problem in problems if not isinstance(problem, Problem)}
        refusals += [refuse("problems", kind, "must be Problems", library) for kind in sorted(kinds)]
    if not archs:
        refusals.append(refuse("archs", archs, "must name at least one target, such as sm_80", "pass one"))
    refusals += name_refusals(name)
    refusals += _folder_refusals(path)
    refusals += [refusal for arch in archs for refusal in planner.arch_refusals(arch)]
    if refusals:
        raise NotSupported(refusals)


def _program_refusals(problems: Sequence[Problem]) -> Iterator[Refusal]:
    """Yields why exported calls cannot pass what mask functions take."""
    rule = "must be None, for the structs of exported calls have no fields for the arrays of mask functions"
    for program in dict.fromkeys(problem.mask_program for problem in problems):
        if program is not None:
            yield refuse("mask_program", program, rule, "launch these kernels from Python, or export another mask")


def _total_refusals(problems: Sequence[MergeProblem]) -> Iterator[Refusal]:
    """Yields why a library's calls cannot say that a merge has a float32 total, or adds."""
    variants = {variant_of(problem) for problem in problems if not problem.refusals()} - {STANDARD}
    rule = "a library has merges of outputs of one dtype, with logsumexps, for its calls say one dtype"
    for variant in sorted(variants):
        yield refuse("variant of a merge", variant, rule, "pass output_a and output in the dtype of output_b")


def _term_refusals(problems: Sequence[Problem]) -> Iterator[Refusal]:
    """Yields why a library's calls cannot pass the score terms of a problem."""
    names = {name for problem in problems if not problem.refusals() for name, _ in problem.score_terms}
    rule = "must be built-in terms, for the struct of a library's calls has their fields alone"
    for name in sorted(names):
        yield refuse("score_terms", name, rule, "export a bundle of this problem with export_bundle")


def _folder_refusals(path: Path) -> Iterator[Refusal]:
    """Yields why an export cannot replace what is at the path."""
    try:
        with locked(path.parent):
            try:
                mode = path.stat().st_mode  # from Python 3.14 on, Path.exists hides that this user may not ask
            except (FileNotFoundError, NotADirectoryError):
                return
            if not stat.S_ISDIR(mode):
                yield Refusal("folder", f"'{path}'", "must not be a file", "name a new folder")
            else:
                yield from folder_refusals(path, reading.intact_files(path))
    except NoPermission:
        raise
    except PermissionError as error:
        raise unreadable(error.filename) from error


def _best(problem: AnyProblem, arch: str, kernels: Callable[[Build], Artifact]) -> Target:
    """Returns the first plan for the target whose kernels compile or exist.

    A bundle serves every length, so kernels and tiles for short or for long sequences only are left out.
    """
    plan, artifact = first_available(exported_plans(problem, arch), kernels)
    return Target(problem, plan, artifact, architecture(plan.build.arch).num_sms)


def _for_its_lengths(problem: AnyProblem, arch: str, kernels: Callable[[Build], Artifact]) -> Iterator[Target]:
    """Yields a target for each variant that the planner has for the lengths of the problem before that for any."""
    limits = architecture(arch)
    if not isinstance(problem, Problem) or limits.is_portable:
        return
    for_any = planner.plans(problem, arch, any_length=True)[0].build
    variants: set[str] = set()
    for plan in itertools.takewhile(lambda plan: plan.build != for_any, planner.plans(problem, arch)):
        if plan.build.variant not in variants:
            with contextlib.suppress(CompileError, Stale):
                yield Target(problem, *first_available([plan], kernels), limits.num_sms)
                variants.add(plan.build.variant)


def _preference(target: Target) -> tuple[int, bool, tuple[int, int]]:
    """Sort key: forward, backward, append, merge, then targets for one generation alone, then the newest target."""
    limits = target.plan.architecture
    major, minor = limits.compute_capability
    return ALL_DIRECTIONS.index(target.problem.direction), limits.is_portable, (-major, -minor)
