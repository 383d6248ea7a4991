"""Reading: a bundle's manifest and the files that it lists, after a comparison of each with what was written.

A bundle may come from elsewhere. Only files that the manifest lists are read, only below the bundle's folder, and
every value that this package uses has the type that it expects.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cutlass_py_attn.artifact import Artifact, artifact_from_files, unreadable
from cutlass_py_attn.bundle.manifest import FORMAT, SEAL, Json, sealed, sha256
from cutlass_py_attn.bundle.rules import ALL_DIRECTIONS, AnyProblem, from_json
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import typed_json

MANIFEST: Final = "manifest.json"
AGAIN: Final = "export it again"
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_BELOW: Final = re.compile(rf"{_PART}(?:/{_PART})*")  # a path that cannot leave the folder
_ARTIFACT: Final = ("json", "ptx", "cubin")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """What the manifest says about one of the other files."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExportedProblem:
    """A problem of a bundle and the plans of its targets, the preferred one first."""

    problem: AnyProblem
    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A bundle as it was read. artifacts: those of the plans, sorted by arch and symbol."""

    manifest: Json
    problems: tuple[ExportedProblem, ...]
    artifacts: tuple[Artifact, ...]


def read(path: Path) -> Contents:
    """Returns the contents of a bundle's folder.

    A folder that an export replaces meanwhile is read again. Stale names what is missing, damaged or of another
    version. NoPermission: this user may not read a file.
    """
    while True:
        manifest = _manifest(path)
        try:
            return _contents(path, manifest)
        except Stale:
            if _manifest(path) == manifest:
                raise


def _contents(path: Path, manifest: Json) -> Contents:
    """Returns what a manifest lists."""
    try:
        listed = _listed(manifest)
        problems = _problems(manifest)
    except ValueError as error:
        raise Stale(f"{path / MANIFEST}: damaged or from another version ({error}); {AGAIN}") from error
    files = {name: _file(path / name, facts) for name, facts in listed.items()}
    plans = [plan for item in problems for plan in item.plans]
    artifacts = {(plan.build.arch, plan.symbol): _artifact(path, plan, files) for plan in plans}
    return Contents(manifest, problems, tuple(artifact for _, artifact in sorted(artifacts.items())))


def intact_files(path: Path) -> set[str]:
    """Returns the files of an older export that are as it wrote them, and its manifest: those that may be deleted.

    The manifest may be of any version. It lists nothing if its seal is not that of its text. A link is no such file,
    nor is what lies behind one, nor a file that was changed.
    """
    found = _known_manifest(path / MANIFEST)
    try:
        listed = _listed(found)
    except ValueError:
        return set()
    return {MANIFEST, *(name for name, facts in listed.items() if _is_intact(path, name, facts))}


def _known_manifest(path: Path) -> Json:
    """Returns the manifest of an older export; an empty object if there is none whose seal is right."""
    if path.is_symlink():
        return {}
    try:
        found = typed_json.as_object(typed_json.parse(_contents_of(path)), MANIFEST)
    except PermissionError as error:
        raise unreadable(path) from error
    except (OSError, ValueError):
        return {}
    is_ours = str(found.get("format")).startswith(FORMAT.rpartition(" ")[0])
    return found if is_ours and sealed(found)[SEAL] == found.get(SEAL) else {}


def _is_intact(path: Path, name: str, facts: ListedFile) -> bool:
    """Returns whether a listed file is what the export wrote, and no link leads to it."""
    own = path / name
    way = [own.parents[at] for at in range(name.count("/"))]
    try:
        if any(above.is_symlink() for above in (own, *way)):
            return False
        data = _contents_of(own)
    except PermissionError as error:
        raise unreadable(own) from error
    except OSError:
        return False
    return len(data) == facts.bytes and sha256(data) == facts.sha256


def _contents_of(path: Path) -> bytes:
    """Returns the contents of a regular file; OSError for anything else, of which a pipe would wait for a writer."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", os.fspath(path))
        return file.read()


def _manifest(path: Path) -> Json:
    try:
        found = typed_json.parse(_contents_of(path / MANIFEST))
    except PermissionError as error:
        raise unreadable(path / MANIFEST) from error
    except (OSError, ValueError) as error:
        raise Stale(f"{path}: no bundle, its {MANIFEST} cannot be read ({error}); {AGAIN}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise Stale(f"{path / MANIFEST}: format {given!r}, this version reads {FORMAT!r}; {AGAIN}")
    if sealed(found)[SEAL] != found.get(SEAL):
        raise Stale(f"{path / MANIFEST}: differs from what was written; {AGAIN}, to a new folder")
    return found


def _listed(manifest: Json) -> dict[str, ListedFile]:
    """Returns the other files by name; ValueError if a name leaves the folder."""
    found = {}
    for name, facts in typed_json.as_object(manifest.get("files"), "files").items():
        if not _BELOW.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"files has {name!r}: must be another file below the folder")
        found[name] = typed_json.read(ListedFile, facts, f"files.{name}")
    return found


def _problems(manifest: Json) -> tuple[ExportedProblem, ...]:
    found = []
    for number, item in enumerate(_nonempty(manifest.get("problems"), "problems")):
        where = f"problems[{number}]"
        data = typed_json.as_object(item, where)
        problem = from_json(typed_json.as_object(data.get("problem"), f"{where}.problem"), str(data.get("direction")))
        if problem.direction not in ALL_DIRECTIONS or problem.direction != data.get("direction"):
            raise ValueError(f"{where}.direction = {data.get('direction')!r}: must be that of its problem")
        targets = _nonempty(data.get("targets"), f"{where}.targets")
        plans = [Plan.from_object(typed_json.as_object(target, f"{where}.targets").get("plan")) for target in targets]
        found.append(ExportedProblem(problem, tuple(plans)))
    return tuple(found)


def _nonempty(data: object, where: str) -> list[object]:
    """Returns a list with items; ValueError for anything else."""
    if not isinstance(data, list) or not data:
        raise ValueError(f"{where}: must be a list that is not empty")
    return data


def _file(path: Path, facts: ListedFile) -> bytes:
    """Returns the contents of a listed file."""
    try:
        data = _contents_of(path)
    except PermissionError as error:
        raise unreadable(path) from error
    except OSError as error:
        raise Stale(f"{path}: cannot be read ({error.strerror}); copy the whole folder, or {AGAIN}") from error
    if len(data) != facts.bytes or sha256(data) != facts.sha256:
        raise Stale(f"{path}: differs from what was written; delete it and {AGAIN}")
    return data


def _artifact(path: Path, plan: Plan, files: Mapping[str, bytes]) -> Artifact:
    """Returns the artifact of a target's plan."""
    stem = f"{plan.build.arch}/{plan.symbol}"
    try:
        artifact = artifact_from_files(*(files[f"{stem}.{kind}"] for kind in _ARTIFACT))
    except KeyError as error:
        raise Stale(f"{path / MANIFEST}: does not list {error.args[0]}; {AGAIN}") from error
    except ValueError as error:
        raise Stale(f"{path / stem}.json: damaged or from another version ({error}); {AGAIN}") from error
    if artifact.build != plan.build:
        raise Stale(f"{path / stem}.json: is of another build than the plan in {MANIFEST}; {AGAIN}")
    return artifact
