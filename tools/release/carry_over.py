"""Carry over: shows without a GPU that today's sources give what the records ran, and writes that to the records.

python -m tools.release.carry_over [--kernels FOLDER] [--processes 2]

A record of a GPU run holds for its machine code and its launches. Sources whose digests changed since, by a rename or a
move, may give the same. This tool compiles the kernels of the records, launches every problem of theirs on the fake
driver, and compares both with the records. The records of what is the same get the digests of today's sources. What
differs is named, and is to run again on a GPU, alone:

python -m tools.release.fuzz --changed --kernels FOLDER --record ptx/features.json
python -m tools.release.verify_gpu --changed --kernels FOLDER

After such a run, the tool adds the hashes of its launches. Exit code 1 if something must run on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.launch.build import Build, build_from
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.problem import spec
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels
from tests.cases import random_cases
from tools.release import build_ptx, digests, feature_ptx, features, fuzz, launches, record
from tools.release.fuzz_run import Attempt
from tools.tuning import plan_rows, plan_space

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as it is compiled today. cubin_sha256: "" if it does not compile."""

    build: Build
    cubin_sha256: str

    @property
    def name(self) -> str:
        """Its name in the records."""
        return record.name_of(self.build)


@dataclass(frozen=True, slots=True)
class Group:
    """The launches of a kernel number today: their hash, how many problems they are of, and each with its case."""

    number: int
    sha256: str
    problems: int
    attempts: tuple[tuple[Case, Attempt], ...]

    @property
    def kernels(self) -> set[str]:
        """Names of the kernels."""
        return {record.name_of(attempt.build) for _, attempt in self.attempts if attempt.build is not None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What of a record is other today: kernels by name, and kernel numbers whose launches must run again."""

    kernels: tuple[str, ...]
    groups: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.kernels or self.groups)

    def to_json(self, sources: Mapping[str, str]) -> record.Json:
        """Returns it as the record has it, with the digests of today's sources."""
        return {"digests": dict(sources), "kernels": list(self.kernels), "groups": list(self.groups)}


def _compiled(choices: build_ptx.Choices) -> Compiled:
    from cutlass_py_attn.compilation.compiler import artifact_for

    try:
        artifact = build_ptx.first_compiled(choices, artifact_for)
    except CompileError:
        return Compiled(choices[0], "")
    return Compiled(artifact.build, record.sha256(artifact.cubin))


def _needed(number: int) -> list[build_ptx.Choices]:
    return fuzz.needed([number], fuzz.RUNS, fuzz.FAMILIES)


_available: Kernels | None = None  # of a process of `groups`


def _start(builds: Sequence[Build]) -> None:
    global _available
    _available = launches.available(builds)


def _group(number: int) -> Group:
    assert _available is not None, "_start has not run in this process"
    drawn = launches.Drawn(random_cases.cases([number], fuzz.RUNS), _available)
    return Group(number, drawn.sha256, drawn.problems, tuple(drawn.attempts))


def pool(processes: int, builds: Sequence[Build] = ()) -> ProcessPoolExecutor:
    """Returns new processes, in which `_group` has these kernels at hand."""
    context = get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(builds,))


def compiled(numbers: Sequence[int], processes: int, ran: Collection[str] = ()) -> list[Compiled]:
    """Returns the kernels of random cases, each compiled or from the cache: those of `fuzz --build`, in its order.

    ran: names of kernels that ran; kernels to fall back to are compiled too if they are among them
    """
    with pool(processes) as workers:
        choices = list(dict.fromkeys(each for found in workers.map(_needed, numbers) for each in found))
        found = list(_counted("kernels", workers.map(_compiled, choices), len(choices)))
        missing = {*ran} - {each.name for each in found}
        others = dict.fromkeys((build,) for each in choices for build in each[1:] if record.name_of(build) in missing)
        return [*found, *workers.map(_compiled, others)]


def of_folder(folder: Path) -> list[Compiled]:
    """Returns the kernels of a folder that was built from today's sources."""
    return [Compiled(artifact.build, record.sha256(artifact.cubin)) for artifact in Folder(folder).all()]


def groups(numbers: Sequence[int], builds: Sequence[Build], processes: int) -> list[Group]:
    """Returns the launches of each kernel number, with these kernels at hand."""
    with pool(processes, builds) as workers:
        return list(_counted("kernel numbers", workers.map(_group, numbers), len(numbers)))


def _counted(what: str, found: Iterable[Any], count: int) -> Iterator[Any]:
    """Yields what is found, and says how far it is."""
    for number, each in enumerate(found, 1):
        print(f"\r{number} of {count} {what}", end="" if number < count else "\n", file=sys.stderr, flush=True)
        yield each


def at_hand(recorded: Mapping[str, Sequence[str]], today: Iterable[Compiled]) -> tuple[list[Build], list[str]]:
    """Returns the kernels that are at hand in a run as it was recorded, and the names of those that changed.

    recorded: cubins of each kernel that ran, by name

    Kernels that differ in numbers of stages have one name, and a folder holds the last of them that was built. Of a
    name, those are at hand that ran; if there are none any more, or if no kernel of that name ran, it is the last one.
    """
    named: dict[str, list[Compiled]] = {}
    for each in today:
        named.setdefault(each.name, []).append(each)
    builds = []
    for name, found in named.items():
        ran = [each.build for each in found if each.cubin_sha256 in recorded.get(name, ())]
        builds += ran or [found[-1].build]
    made = {(each.name, each.cubin_sha256) for each in today}
    changed = [name for name, cubins in recorded.items() if not all((name, cubin) in made for cubin in cubins)]
    return builds, changed


def compared(recorded: record.Json, changed: Sequence[str], today: Sequence[Group], is_same_code: bool) -> Comparison:
    """Returns what changed: launched kernels, and groups whose launches are others or are of such a kernel.

    changed: names of kernels whose cubins are others
    is_same_code: whether the record is of today's sources; launches that it has no hash of are then today's
    """
    launched = {name for group in today for name in group.kernels}
    kernels = tuple(sorted(name for name in launched if name in changed or name not in recorded["kernels"]))
    others = []
    for group in today:
        before = recorded["groups"].get(str(group.number), "")
        is_same = before == group.sha256 or (is_same_code and not before)
        if not is_same or group.kernels & {*kernels}:
            others.append(group.number)
    return Comparison(kernels, tuple(others))


def counts(today: Sequence[Group]) -> record.Json:
    """Returns the numbers of problems, launches and fallbacks, and the rows, as a run of these launches has them."""
    attempts = [pair for group in today for pair in group.attempts]
    made = [(case, attempt.build, 0.0) for case, attempt in attempts if attempt.build is not None]
    return {
        "problems": sum(group.problems for group in today),
        "launches": len(made),
        "fallbacks": sum(attempt.is_fallback for _, attempt in attempts),
        "rows": features.tally(made),
    }


def disagreements(recorded: record.Json, today: Sequence[Group]) -> list[str]:
    """Returns what the last run counted otherwise than its launches that were found without a GPU.

    Its launches are those without a hash.
    """
    unhashed = [group for group in today if not recorded["groups"][str(group.number)]]
    if not unhashed:
        return []
    found, ran = counts(unhashed), (recorded["reruns"] or [recorded])[-1]
    names = [name for name in ("problems", "launches", "fallbacks") if ran[name] != found[name]]
    lines = [f"{name}: {ran[name]} ran, {found[name]} were found" for name in names]
    if recorded["reruns"]:
        return lines
    numbers = ("family", "feature", "dtype", "direction", "problems")
    before, after = ({tuple(row[name] for name in numbers) for row in each["rows"]} for each in (recorded, found))
    return [*lines, *(f"{row}: counted once" for row in sorted(before ^ after))]


def completed(recorded: record.Json, today: Sequence[Group]) -> record.Json:
    """Returns the record with the hashes of all launches, with their counts, and without kernels of none of them."""
    found, launched = counts(today), {name for group in today for name in group.kernels}
    return {
        **recorded,
        **found,
        "kernels": {name: cubins for name, cubins in recorded["kernels"].items() if name in launched},
        "groups": {str(group.number): group.sha256 for group in today},
        "rows": features.with_worst(found["rows"], recorded["rows"])[: len(found["rows"])],
    }


def carried(recorded: record.Json, today: Mapping[str, str], problems: int) -> record.Json:
    """Returns the record with the digests of today's sources, and what was compared."""
    about = {
        "from": recorded["commit"],
        "to": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "kernels": features.num_kernels(recorded),
        "problems": problems,
    }
    return {**recorded, "digests": dict(today), "carried": about}


def random_cases_of(root: Path, kernels: Path | None, processes: int, *, rehash: bool = False) -> list[str]:
    """Carries the record of the random cases over; returns a line for each reason to run cases on a GPU.

    kernels: folder of today's kernels; None compiles them
    rehash: hash all launches anew if the record is of today's sources
    """
    recorded, today = features.read(root), digests.of(root)
    is_current = not features.objections(root)
    if recorded is None or recorded["digests"]["checks"] != today["checks"] or (is_current and not rehash):
        return features.objections(root)
    is_same_code = recorded["digests"] == today
    if rehash and is_same_code:
        recorded |= {"groups": dict.fromkeys(recorded["groups"], "")}
    numbers = [int(number) for number in recorded["groups"]]
    found = of_folder(kernels) if kernels else compiled(numbers, processes, recorded["kernels"])
    builds, changed = at_hand(recorded["kernels"], found)
    drawn = groups(numbers, builds, processes)
    other = compared(recorded, changed, drawn, is_same_code)
    kernels_of_features = _feature_kernels(root, recorded, today, processes)
    other = Comparison(tuple(sorted({*other.kernels, *kernels_of_features})), other.groups)
    if other:
        features.write(root, {**recorded, "changed": other.to_json(today)})
        return features.objections(root)
    if not is_current and (lines := disagreements(recorded, drawn)):
        return [f"{features.PATH}: the launches found are not those that ran: {line}" for line in lines]
    recorded = completed(recorded, drawn) | {"changed": None}
    if not is_same_code:
        recorded = carried(recorded, today, recorded["problems"])
    features.write(root, recorded)
    print(f"{features.PATH}: {features.num_kernels(recorded)} kernels and {recorded['problems']} problems are the same")
    return []


def _feature_kernels(root: Path, recorded: record.Json, today: Mapping[str, str], processes: int) -> list[str]:
    """Returns the kernels whose PTX is no longer that of feature_ptx; compiles them if the sources changed."""
    committed = feature_ptx.read(root)
    if committed is None or recorded["digests"]["kernels"] == today["kernels"]:
        return []
    made = feature_ptx.compiled(feature_ptx.builds(), processes)
    before = committed["kernels"]
    return [entry["kernel"] for key, entry in made.items() if key in before and before[key] != entry]


def manifest_of(root: Path, processes: int) -> list[str]:
    """Writes today's sources to the entries of the manifest whose kernels are the same; returns a line for each other.

    Comments of the PTX may differ.
    """
    from cutlass_py_attn.compilation import compiler

    manifest, toolchain = record.read_manifest(root), compiler.toolchain()
    entries = manifest["kernels"]
    plans = {record.name_of(plan.build): plan for plan in build_ptx.committed_plans()}
    others = {
        name: plan
        for name, plan in plans.items()
        if name in entries and not record.is_current(entries[name], plan.build, toolchain)
    }
    if not others:
        return []
    made = build_ptx.compile_all([(plan.build,) for plan in others.values()], fresh=False, processes=processes)
    lines = []
    for (name, plan), artifact in zip(others.items(), made, strict=True):
        entry = record.entry(plan, artifact)
        if record.is_same_machine_code(entries[name], entry):
            entries[name] = entry
            (root / "ptx" / f"{name}.ptx").write_bytes(artifact.ptx.encode())
        else:
            lines.append(f"{name}: {record.difference(entries[name], entry)}; run tools/release/build_ptx.py")
    (root / record.MANIFEST).write_text(record.text_of(record.sealed(entries)))
    return lines


def verifications_of(root: Path, processes: int, *, rehash: bool = False) -> list[str]:
    """Carries the verifications of the shown kernels over; returns a line for each that must run again.

    A line of the log gets the hash of its launches while it is of today's sources, and later the digest of other
    sources that launch the same.

    rehash: hash the launches of lines of today's sources anew
    """
    manifest, log = record.read_manifest(root), record.read_log(root / record.LOG)
    suite, launch = record.suite_sha256(root), record.launch_sha256(root)
    open_lines = {}
    for name, entry in manifest["kernels"].items():
        passed = {"cubin_sha256": entry["cubin_sha256"], "suite_sha256": suite}
        lines = [line for line in log if passed.items() <= line.items()]
        current = [line for line in lines if line.get("launch_sha256") == launch]
        for line in (current or [line for line in lines if "launches_sha256" in line])[-1:]:
            if not current or rehash or "launches_sha256" not in line:
                open_lines[name] = line
    builds = [build_from(manifest["kernels"][name]["plan"]) for name in open_lines]
    with pool(processes) as workers:
        found = dict(zip(open_lines, workers.map(launches.of_verification, builds), strict=True))
    for name, line in open_lines.items():
        if line["launch_sha256"] == launch:
            line["launches_sha256"] = found[name]
        elif line["launches_sha256"] == found[name]:
            line |= {"launch_sha256": launch, "carried_to": commit()}
    if open_lines:
        record.write_log(root / record.LOG, log)
        print(f"{record.LOG}: the launches of {len(open_lines)} kernels were compared")
    states = record.states(root, manifest, log, None, {})
    return [f"{name}: {state}" for name, state in states.items() if not state.startswith("verified")]


def measurements_of(root: Path, before: str, processes: int) -> int:
    """Writes today's sources to the measurements of the sources `before` whose kernels are the same.

    Returns how many kernels are others; their tiles have no measurement then.
    """
    log, today = record.read_log(root / plan_rows.LOG), record.sources_digest(root)
    lines = [line for line in log if line["sources"] == before and line["median_ms"] is not None]
    if before == today or not lines:
        return 0
    with pool(processes) as workers:
        found = list(_counted("measured kernels", workers.map(_measured, lines), len(lines)))
    same = [line for line, cubin in zip(lines, found, strict=True) if line["cubin_sha256"] == cubin]
    for line in same:
        line["sources"] = today
    record.write_log(root / plan_rows.LOG, log)
    return len(lines) - len(same)


def _measured(line: record.Json) -> str:
    """Returns the cubin's hash of a measured tile today; "" if it is no kernel any more."""
    problem = plan_space.searched(spec.parse(line["case"]), line["direction"], line["family"])
    tiles = [TileConfig.parse(line["tile"])]
    for each in plan_space.candidates(problem, line["family"], line["arch"], tiles):
        if each.name == line["tile"] and not each.objections:
            return _compiled((each.build,)).cubin_sha256
    return ""


def main() -> int:
    """Compares, and carries over what is the same; exit code 1 if something must run on a GPU."""
    parser = argparse.ArgumentParser(
        prog="carry_over", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=Path, help="kernels of fuzz --build, of today's sources; else they are made")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes that compile and launch")
    parser.add_argument(
        "--rehash",
        action="store_true",
        help="hash launches anew that are of today's sources: how they are hashed changed",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree whose records are carried over")
    given = parser.parse_args()
    before = (features.read(given.root) or {}).get("digests", {}).get("kernels", "")
    lines = [
        *random_cases_of(given.root, given.kernels, given.processes, rehash=given.rehash),
        *manifest_of(given.root, given.processes),
        *verifications_of(given.root, given.processes, rehash=given.rehash),
    ]
    if others := measurements_of(given.root, before, given.processes):
        print(f"{plan_rows.LOG}: {others} measured kernels are others; {plan_rows.REMEDY}")
    said = f"{len(lines)} records need a GPU" if lines else "all records hold"
    print("\n".join([*lines, f"carry_over: {said}"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
