"""Fuzz: random cases over all features on this machine's GPU, compared with the reference in float64.

python -m tools.release.fuzz [--kernels FOLDER] [--record ptx/features.json]
python -m tools.release.fuzz --case "backward bf16_d64_s128_b1_h2_causal seed=3"    one case again, with every ratio
python -m tools.release.fuzz --build FOLDER                                         the kernels; needs no GPU
python -m tools.release.fuzz --list                                                 their names; needs no compiler
python -m tools.release.fuzz --only ranges [--kernels FOLDER]                       problems of one kind
python -m tools.release.fuzz --changed --record ptx/features.json                   what carry_over.py named, again

A case that fails is reduced to a smaller one that fails too. Only kernels at hand are launched: those of --kernels, or
those that the compiler makes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, kernels_from
from tests.cases import random_cases, shrinking
from tools.release import digests, features, fuzz_run, record
from tools.release.fuzz_run import Attempt, Outcome

ROOT: Final = Path(__file__).resolve().parents[2]
RUNS: Final = 72
FAMILIES: Final = ("sm80", "sm90")  # of --build; decode and split-D kernels are built with the sm80 kernels
SHRUNK: Final = 3  # failures that are reduced
TRIES_WHEN_COMPILING: Final = 40

Launch = Callable[[Case, str], Outcome]


@dataclass(frozen=True, slots=True)
class Kind:
    """Kernel numbers that an option draws: of what, the first of them, and how many without the option."""

    what: str
    first: int
    count: int

    @property
    def numbers(self) -> range:
        """The kernel numbers."""
        return range(self.first, self.first + self.count)


KINDS: Final = {  # by name of the option
    "variants": Kind("16-bit and float32 problems without pages", 0, 140),
    "paged": Kind("caches in pages", random_cases.PAGED_FROM, 28),
    "mla": Kind("latent caches", random_cases.MLA_FROM, 12),
    "e4m3": Kind("e4m3 codes", random_cases.E4M3_FROM, 26),
    "shared_end": Kind("forwards whose last query tiles blocks share", random_cases.SHARED_END_FROM, 4),
    "few_tiles": Kind("forwards with few query tiles", random_cases.FEW_TILES_FROM, len(random_cases.FEW_TILES)),
    "shared_queries": Kind("backwards whose last key tiles blocks share", random_cases.SHARED_QUERIES_FROM, 8),
    "bias_backward": Kind("backwards with a bias", random_cases.BIAS_BACKWARD_FROM, len(random_cases.BIAS_BACKWARD)),
    "prompts": Kind("prompts over e4m3 caches", random_cases.PROMPTS_FROM, 8),
    "wide": Kind("forwards of wide heads", random_cases.WIDE_FROM, 6),
}
UNRECORDED: Final = {  # kinds that are drawn with --only
    "ranges": Kind("ranges of keys", random_cases.RANGES_FROM, 48),
    "functions": Kind("mask functions", random_cases.FUNCTIONS_FROM, 48),
}


def numbers_of(kinds: Mapping[str, Kind]) -> list[int]:
    """Returns the kernel numbers of these kinds."""
    return [number for kind in kinds.values() for number in kind.numbers]


def main() -> int:
    """Runs, builds or lists; exit code 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, kind in (KINDS | UNRECORDED).items():
        option, text = f"--{name.replace('_', '-')}", f"kernel numbers of {kind.what} to draw ({kind.count})"
        parser.add_argument(option, type=int, default=kind.count, help=text)
    parser.add_argument(
        "--only",
        choices=[*KINDS, *UNRECORDED],
        help=f"draw this kind alone; without it all but {', '.join(UNRECORDED)}",
    )
    parser.add_argument("--first", type=int, default=0, help="the first kernel number of --variants")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"cases for each kernel number ({RUNS})")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--processes", type=int, help="processes that run cases; all cores, or 1 with the compiler")
    parser.add_argument("--case", help="the line of one case, which runs on every family that takes it")
    parser.add_argument("--record", type=Path, help="write what passed, by family, feature, dtype and direction")
    parser.add_argument(
        "--changed", action="store_true", help="run the kernel numbers that the record has as changed, for --record"
    )
    parser.add_argument("--build", type=Path, help="only build the kernels, into this folder")
    parser.add_argument("--list", action="store_true", help="only list the kernels")
    parser.add_argument("--family", choices=FAMILIES, help="family of the kernels to build or list; both without it")
    given = parser.parse_args()
    kinds = {name: replace(kind, count=getattr(given, name)) for name, kind in (KINDS | UNRECORDED).items()}
    kinds["variants"] = replace(kinds["variants"], first=given.first)
    numbers = numbers_of({name: kinds[name] for name in ([given.only] if given.only else KINDS)})
    if given.build or given.list:
        return _build(given.build, needed(numbers, given.runs, (given.family,) if given.family else FAMILIES))
    if given.case:
        return _run_one(Case.parse(given.case), given.kernels)
    if given.changed:
        numbers = changed_numbers(ROOT)
    cases = list(random_cases.cases(numbers, given.runs))
    processes = given.processes or (os.cpu_count() or 1 if given.kernels else 1)
    start = time.perf_counter()
    summary = summarise(fuzz_run.outcomes(cases, given.kernels, processes))
    print(f"{summary.text} in {time.perf_counter() - start:.0f} s")
    if summary.failed:
        _reduce(summary.failed, given.kernels)
        return 1
    if given.record:
        found = record_of(summary, numbers, driver.device(0).name, kernels_from(given.kernels))
        recorded = features.read(ROOT) if given.changed else None
        found = features.merged(recorded, found) if recorded else found
        given.record.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def changed_numbers(root: Path) -> list[int]:
    """Returns the kernel numbers that the record has as changed; SystemExit if it names none of today's sources."""
    changed = (features.read(root) or {}).get("changed")
    if not changed or changed["digests"] != digests.of(root):
        sys.exit(f"{features.PATH}: has no changed kernels or launches of today's sources; {features.CARRY}")
    found: list[int] = changed["groups"]
    return found


def needed(numbers: Iterable[int], runs: int, families: Sequence[str]) -> list[tuple[Build, ...]]:
    """Returns every kernel that the cases need of these families, each with its fallbacks."""
    from tools.release.build_ptx import of_family

    drawn = list(numbers)
    found = (of_family(family, lambda arch: random_cases.builds(drawn, runs, arch)) for family in families)
    return [choices for each in found for choices in each]


def _build(folder: Path | None, kernels: Sequence[tuple[Build, ...]]) -> int:
    from tools.release.build_ptx import build_into

    if folder is not None:
        return build_into(folder, kernels)
    for choices in kernels:
        print(record.name_of(choices[0]))
    counts = Counter(features.family_of(choices[0]) for choices in kernels)
    noun = "kernel" if len(kernels) == 1 else "kernels"
    print(f"{len(kernels)} {noun}: {', '.join(f'{count} {family}' for family, count in counts.items())}")
    return 0


def _run_one(case: Case, folder: Path | None) -> int:
    fuzz_run.start(folder)
    (outcome,) = fuzz_run.run_cases([case], generic_every=1)
    for attempt in outcome.attempts:
        print(_line(case, attempt))
    if not outcome.attempts:
        print(f"refused or empty: {case.line}")
    return int(not all(attempt.passed for attempt in outcome.attempts))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run gave.

    passed: the launches that passed: case, kernel, and worst error / allowed
    failed: the launches that failed
    counts: of problems, launches, refused cases, fallbacks to another kernel, and failures
    """

    passed: tuple[features.Passed, ...]
    failed: tuple[tuple[Case, Attempt], ...]
    counts: dict[str, int]

    @property
    def text(self) -> str:
        """The counts, and the worst error / allowed by family."""
        worst: dict[str, float] = {}
        launches = Counter(features.family_of(build) for _, build, _ in self.passed)
        for _, build, ratio in self.passed:
            family = features.family_of(build)
            worst[family] = max(worst.get(family, 0.0), ratio)
        families = (
            f"{count} {family} (worst error / allowed {worst[family]:.2f})" for family, count in launches.items()
        )
        counts = (f"{count} {name}" for name, count in self.counts.items())
        return f"{', '.join(counts)}; launches that passed: {', '.join(families) or 'none'}"


def summarise(outcomes: Iterable[Outcome]) -> Summary:
    """Returns the summary of outcomes, and prints each failure as it comes."""
    passed: list[features.Passed] = []
    failed: list[tuple[Case, Attempt]] = []
    counts = dict.fromkeys(("problems", "launches", "refused", "fallbacks", "failed"), 0)
    for outcome in outcomes:
        counts["problems" if outcome.attempts else "refused"] += 1
        for attempt in outcome.attempts:
            counts["launches"] += attempt.build is not None
            counts["fallbacks"] += attempt.is_fallback
            if attempt.build is not None and attempt.passed:
                passed.append((outcome.case, attempt.build, attempt.worst))
            else:
                failed.append((outcome.case, attempt))
                print(_line(outcome.case, attempt), flush=True)
    counts["failed"] = len(failed)
    return Summary(tuple(passed), tuple(failed), counts)


def _line(case: Case, attempt: Attempt) -> str:
    shown = " ".join(f"{name} {ratio:.2f}" for name, ratio in attempt.ratios.items())
    kernel = record.name_of(attempt.build) if attempt.build else "no kernel"
    return f'{attempt.error or shown}: {kernel}: python -m tools.release.fuzz --case "{case.line}"'


def _reduce(failed: Iterable[tuple[Case, Attempt]], folder: Path | None) -> None:
    """Prints a smaller case for the first few failures."""
    chosen = [(case, attempt) for case, attempt in failed if not attempt.is_absent][:SHRUNK]
    tries = shrinking.MAX_TRIES if folder else TRIES_WHEN_COMPILING
    with fuzz_run.Launcher(folder) as launch:
        for case, attempt in chosen:
            print(f"smaller than {case.line}:\n  {_line(*reduced(case, attempt, launch, tries))}", flush=True)


def reduced(case: Case, attempt: Attempt, launch: Launch, tries: int = shrinking.MAX_TRIES) -> tuple[Case, Attempt]:
    """Returns the smallest case that fails in the family in which `attempt` failed, and its launch."""
    family = attempt.build.family if attempt.build else ""
    last = attempt

    def fails(candidate: Case) -> bool:
        nonlocal last
        outcome = launch(candidate, family)
        if has_failed := fuzz_run.fails(outcome):
            last = next(each for each in outcome.attempts if not each.passed and not each.is_absent)
        return has_failed

    return shrinking.shrink(case, fails, tries), last


def record_of(summary: Summary, numbers: Iterable[int], gpu: str, kernels: Kernels) -> features.Json:
    """Returns the record of a run of these kernel numbers in which every launch passed, with the kernels that ran.

    tools/release/carry_over.py adds the hashes of the launches.
    """
    cubins: dict[str, set[str]] = {}
    for build in {build for _, build, _ in summary.passed}:
        cubins.setdefault(record.name_of(build), set()).add(record.sha256(kernels(build).cubin))
    return {
        "format": features.FORMAT,
        "gpu": gpu,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "digests": digests.of(ROOT),
        **{name: summary.counts[name] for name in ("problems", "launches", "fallbacks")},
        "kernels": {name: sorted(found) for name, found in sorted(cubins.items())},
        "groups": {str(number): "" for number in numbers},
        "changed": None,
        "reruns": [],
        "carried": None,
        "rows": features.tally(summary.passed),
    }


if __name__ == "__main__":
    sys.exit(main())
