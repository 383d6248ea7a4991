"""Mutation run: changes host and plan code in a copy of the tree, one small change at a time, and runs its tests.

python -m tools.lab.mutation.mutate --record FILE [--count 220] [--seed 1]    draws mutants and runs all of them
python -m tools.lab.mutation.mutate --record FILE --survivors all             runs the survivors of a record again
python -m tools.lab.mutation.mutate --record FILE --survivors unexplained     those that survivors.toml does not have
python -m tools.lab.mutation.mutate --record FILE --show ID                   the change of one mutant

A mutant's tests are those that execute its statement, and those of its module; the fastest first, until one fails.
Lines at module level, which every import executes, have the tests of the files that use their name. Neither mutmut
(which changes no module level and no decorated function) nor cosmic-ray (which selects no tests) does this.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import queue
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.bench.harness import commit
from tools.lab.mutation import tables
from tools.lab.mutation.operators import Mutant, mutants
from tools.lab.mutation.tree import ROOT, copy_tree

VERSION: Final = 1  # of the operators and of the selection: another version draws and counts otherwise
FILES: Final = (
    *(
        f"cutlass_py_attn/{package}/*.py"
        for package in ("api", "bundle", "jax", "launch", "plan", "problem", "runtime")
    ),
    "cutlass_py_attn/compilation/cache*.py",
    "cutlass_py_attn/artifact.py",
)
TESTS: Final = ("tests/unit/**/test_*.py", "tests/compile/test_jax*.py")
MEMORY_BYTES: Final = 12 << 30
FIRST_FILES: Final = 3  # test files of a mutant's first run; most mutants need no second
TESTS_SECONDS: Final = 60.0  # of a run, as the map has them; the slowest tests that exceed it are left out
STARTUP_SECONDS, TIMES_TESTS = 120.0, 10.0  # a run's time limit: this, and so many times what its tests take

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class TestMap:
    """Which tests execute a line. tests: names and seconds; lines: for each file, numbers of tests by line."""

    tests: list[tuple[str, float]]
    lines: dict[str, dict[int, list[int]]]

    @classmethod
    def read(cls, path: Path) -> TestMap:
        found = json.loads(path.read_text())
        lines = {file: {int(line): tests for line, tests in each.items()} for file, each in found["lines"].items()}
        return cls([(name, seconds) for name, seconds in found["tests"]], lines)

    def of(self, mutant: Mutant, root: Path) -> list[str]:
        """Returns the tests of a mutant, the fastest first: those that execute its statement, and those of its module,
        some of which execute it in another process.
        """
        lines, (first, last) = self.lines.get(mutant.file, {}), mutant.statement
        numbers = {number for line in range(first, last + 1) for number in lines.get(line, ())}
        if mutant.at_import:
            numbers |= self._users(mutant, root)
        package, _, module = mutant.file.removeprefix("cutlass_py_attn/").rpartition("/")
        unit = "/".join(filter(None, ("tests/unit", package, f"test_{module}")))
        own = unit, f"tests/compile/test_{package}.py", f"tests/compile/test_{package}_{module}"
        numbers |= {number for number, (name, _) in enumerate(self.tests) if name.partition("::")[0] in own}
        return [name for name, _ in sorted((self.tests[number] for number in numbers), key=lambda test: test[1])]

    def stages(self, mutant: Mutant, root: Path) -> list[list[str]]:
        """Returns the tests of a mutant in two runs: first those of few files, because pytest imports whole files."""
        seconds = dict(self.tests)
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.of(mutant, root):
            by_file[test.partition("::")[0]].append(test)
        own = f"/test_{Path(mutant.file).name}"
        files = sorted(by_file, key=lambda file: (not file.endswith(own), -len(by_file[file])))
        runs = []
        for some in (files[:FIRST_FILES], files[FIRST_FILES:]):
            fastest = sorted((test for file in some for test in by_file[file]), key=seconds.__getitem__)
            ends = itertools.accumulate(seconds[test] for test in fastest)
            runs.append([test for test, end in zip(fastest, ends, strict=True) if end <= TESTS_SECONDS] or fastest[:1])
        return [run for run in runs if run]

    def _users(self, mutant: Mutant, root: Path) -> set[int]:
        """The tests of every file that has the name which a statement that imports execute defines."""
        text = (root / mutant.file).read_text().splitlines()[mutant.statement[0] - 1]
        name = re.search(r"(?:def|class)?\s*(\w+)", text)
        word = re.compile(rf"\b{name[1] if name else ''}\b")
        files = [file for file in self.lines if word.search((root / file).read_text())]
        return {number for file in files for tests in self.lines[file].values() for number in tests}


def drawn(root: Path, count: int, seed: int, patterns: Sequence[str] = FILES) -> list[Mutant]:
    """Returns `count` mutants of the files, or a few more: each file has its share, and each operator in a file."""
    rng = random.Random(seed)
    files = sorted(path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern))
    found = {file: mutants(file, (root / file).read_text()) for file in files}
    weights = {file: len(each) ** 0.5 for file, each in found.items()}
    share = count / sum(weights.values())
    return [each for file in files for each in _draw(found[file], round(weights[file] * share), rng)]


def _draw(found: Sequence[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    by_operator: dict[str, list[Mutant]] = defaultdict(list)
    for each in found:
        by_operator[each.operator].append(each)
    chosen: list[Mutant] = []
    while by_operator and len(chosen) < count:
        operator = rng.choice(sorted(by_operator))
        chosen.append(by_operator[operator].pop(rng.randrange(len(by_operator[operator]))))
        if not by_operator[operator]:
            del by_operator[operator]
    return sorted(chosen, key=lambda each: each.span)


class Trials:
    """Copies of the tree, one for each process, in which mutants are run."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder = folder
        self.copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(processes):
            copy = folder / f"copy{number}"
            copy_tree(copy)
            self.copies.put(copy)
        self.map_file = folder / "map.json"

    @contextlib.contextmanager
    def copy(self) -> Iterator[Path]:
        """Context manager of a copy that no other thread uses."""
        taken = self.copies.get()
        try:
            yield taken
        finally:
            self.copies.put(taken)

    def map_tests(self) -> TestMap:
        """Returns the map of the unchanged tree: runs the tests of the files that changed since the folder's map."""
        known = json.loads(self.map_file.read_text()) if self.map_file.exists() else _NO_MAP
        digests = {
            path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for pattern in TESTS
            for path in sorted(ROOT.glob(pattern))
        }
        stale = [file for file, digest in digests.items() if known["digests"].get(file) != digest]
        if stale:
            part = self.map_file.with_name("part.json")
            with self.copy() as copy:
                environment = _environment(copy) | {"MUTATION_MAP": str(part)}
                # With the limit of a mutant's run: a test that needs more is left out, and kills none.
                subprocess.run(
                    _pytest(stale),
                    cwd=copy,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    preexec_fn=_limit_memory,
                    check=False,
                )
            known = _merged(known, json.loads(part.read_text()), digests, stale)
            self.map_file.write_text(json.dumps(known))
        return TestMap.read(self.map_file)

    def run(self, mutant: Mutant, tests: Sequence[str], limit_seconds: float) -> tuple[str, str]:
        """Returns ("killed", by what) or ("survived", "")."""
        with self.copy() as copy:
            path = copy / mutant.file
            text, status = path.read_text(), path.stat()
            path.write_text(mutant.applied(text))
            try:
                return self._outcome(copy, tests, limit_seconds)
            finally:
                path.write_text(text)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the compiled file remains current

    def _outcome(self, copy: Path, tests: Sequence[str], limit_seconds: float) -> tuple[str, str]:
        result, names = copy / ".result", copy / ".tests"
        result.unlink(missing_ok=True)
        names.write_text("\n".join(tests))
        environment = _environment(copy) | {
            "MUTATION_TESTS": str(names),
            "MUTATION_RESULT": str(result),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            _pytest((*dict.fromkeys(test.partition("::")[0] for test in tests), "-x")),
            cwd=copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit_memory,
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "killed", "time limit"
        if code == 0:
            return "survived", ""
        return "killed", result.read_text() if result.exists() else "import"


_NO_MAP: Final[Json] = {"tests": [], "lines": {}, "digests": {}}


def _merged(old: Json, new: Json, digests: Mapping[str, str], stale: Sequence[str]) -> Json:
    """Returns the map with the tests of the stale files replaced."""
    files = [name.partition("::")[0] for name, _ in old["tests"]]
    kept = [number for number, file in enumerate(files) if file in digests and file not in stale]
    places = {number: place for place, number in enumerate(kept)}
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file, by_line in old["lines"].items():
        for line, tests in by_line.items():
            lines[file][line] += [places[number] for number in tests if number in places]
    for file, by_line in new["lines"].items():
        for line, tests in by_line.items():
            lines[file][line] += [len(kept) + number for number in tests]
    return {"tests": [old["tests"][number] for number in kept] + new["tests"], "lines": lines, "digests": digests}


def _pytest(arguments: Sequence[str]) -> list[str]:
    options = ["-p", "tools.lab.mutation.plugin", "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:xdist", "-q"]
    return [sys.executable, "-m", "pytest", *options, "--timeout=60", *arguments]


def _environment(copy: Path) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # With CI set, Hypothesis draws the same examples in each run.
    return os.environ | threads | {"PYTHONPATH": str(copy), "CI": "1", "XDG_CACHE_HOME": str(copy / ".cache")}


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def run_all(trials: Trials, chosen: Sequence[Mutant], processes: int) -> list[Json]:
    """Runs the mutants; returns a row for each, in their order."""
    tests = trials.map_tests()
    seconds = dict(tests.tests)

    def row(mutant: Mutant) -> Json:
        start = time.perf_counter()
        outcome, by, count = "survived", "", 0
        for selected in tests.stages(mutant, ROOT):
            count += len(selected)
            limit = STARTUP_SECONDS + TIMES_TESTS * sum(seconds[name] for name in selected)
            outcome, by = trials.run(mutant, selected, limit)
            if outcome == "killed":
                break
        shown = f"{outcome:8} {time.perf_counter() - start:5.1f} s {mutant.id}"
        print(f"{shown} {mutant.file}:{mutant.line} {by}", flush=True)
        return _row(mutant) | {"tests": count, "outcome": outcome, "killed_by": by}

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        return list(pool.map(row, chosen))


def _row(mutant: Mutant) -> Json:
    names = ("id", "file", "line", "scope", "operator", "before", "after")
    return {name: getattr(mutant, name) for name in names}


def package_of(file: str) -> str:
    """Returns the package of a file, or its name for a file at the top."""
    return "/".join(file.split("/")[1:-1]) or file.split("/")[-1]


def summary(rows: Sequence[Json]) -> dict[str, dict[str, int]]:
    """Returns for each package how many mutants were killed and how many survived."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        counts.setdefault(package_of(row["file"]), {"killed": 0, "survived": 0})[row["outcome"]] += 1
    return counts


def again(rows: Sequence[Json], explained: Collection[str], trials: Trials, processes: int) -> list[Json]:
    """Returns the rows with the survivors run again; a survivor that the sources no longer have is dropped.

    explained: ids of survivors that are not run
    """
    survivors = {row["id"] for row in rows if row["outcome"] == "survived"} - set(explained)
    files = sorted({row["file"] for row in rows if row["id"] in survivors})
    found = [each for file in files for each in mutants(file, (ROOT / file).read_text()) if each.id in survivors]
    new = {row["id"]: row for row in run_all(trials, found, processes)}
    return [new.get(row["id"], row) for row in rows if row["id"] in new or row["id"] not in survivors]


def show(mutant_id: str) -> str:
    """Returns the change of a mutant of the current sources."""
    files = sorted(path.relative_to(ROOT).as_posix() for pattern in FILES for path in ROOT.glob(pattern))
    for file in files:
        for each in mutants(file, (ROOT / file).read_text()):
            if each.id == mutant_id:
                return f"{file}:{each.line} {each.scope}, {each.operator}:\n- {each.before}\n+ {each.after}"
    return f"{mutant_id}: no mutant of the current sources"


def main() -> int:
    """Runs mutants and writes the record."""
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="the file with the results")
    parser.add_argument("--count", type=int, default=220, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--survivors", choices=("all", "unexplained"), help="only run survivors of the record again")
    parser.add_argument("--show", metavar="ID", help="only print the change of a mutant")
    parser.add_argument("--work", type=Path, help="folder of the copies and the map, kept for another run")
    given = parser.parse_args()
    if given.show:
        print(show(given.show))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        trials = Trials(given.work or Path(temporary), given.processes)
        if given.survivors:
            old = json.loads(given.record.read_text())
            explained = tables.explanations(ROOT) if given.survivors == "unexplained" else {}
            seed, rows = old["seed"], again(old["mutants"], explained, trials, given.processes)
        else:
            seed, rows = given.seed, run_all(trials, drawn(ROOT, given.count, given.seed), given.processes)
    found = {
        "version": VERSION,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "summary": summary(rows),
        "mutants": rows,
    }
    given.record.parent.mkdir(parents=True, exist_ok=True)
    given.record.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(rows)} mutants, {sum(row['outcome'] == 'survived' for row in rows)} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
