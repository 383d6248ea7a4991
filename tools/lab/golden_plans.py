"""Golden plans: the plans of drawn problems before and after a change of the planner that must keep them.

python -m tools.lab.golden_plans --write FILE      on the commit before the change
python -m tools.lab.golden_plans --compare FILE    after it; exit code 1 if a plan differs

A line of the file is a case and the hash of all its plans, their reasons too, for each of TARGETS and SM_COUNTS. A
problem that a target refuses counts as refused, whatever the words. It needs neither a GPU nor the compiler.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import planner
from cutlass_py_attn.testing.cases import Case
from tests.cases import random_cases
from tools.release.fuzz import KINDS

TARGETS: Final = ("sm_80", "sm_90", "sm_90a", "sm_120")
SM_COUNTS: Final = (16, 108, 132)
RUNS: Final = 20  # problems of each kernel number
SHOWN: Final = 10  # differences


def cases(runs: int = RUNS) -> list[Case]:
    """Returns `runs` random cases of each kernel number of the fuzz tool."""
    numbers = chain.from_iterable(kind.numbers for kind in KINDS.values())
    return list(random_cases.cases(numbers, runs))


def digests(case: Case) -> dict[tuple[str, int], str]:
    """Returns the hash of a case's plans, the best first, of each target and number of multiprocessors."""
    problem = case.problem()
    hashes = {}
    for target in TARGETS:
        for count in SM_COUNTS:
            try:
                text = "\n".join(plan.to_json() for plan in planner.plans(problem, target, count))
            except NotSupported:
                text = "refused"
            hashes[target, count] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashes


def lines(some: Sequence[Case]) -> list[str]:
    """Returns a line of each case: its hash of each target and number of multiprocessors, and the case."""
    return [f"{' '.join(digests(case).values())} {case.line}" for case in some]


def all_lines(drawn: Sequence[Case], processes: int) -> Iterator[str]:
    """Yields the line of every case, computed in several processes."""
    parts = [drawn[start : start + 50] for start in range(0, len(drawn), 50)]
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from chain.from_iterable(pool.map(lines, parts))


def differences(before: Iterable[str], after: Iterable[str]) -> tuple[int, list[str]]:
    """Returns how many cases both files have, and a line for each target and number with another hash."""
    pairs = [(target, count) for target in TARGETS for count in SM_COUNTS]
    old, new = (
        {line.split(" ", len(pairs))[-1]: line.split(" ")[: len(pairs)] for line in text} for text in (before, after)
    )
    shared = [case for case in new if case in old]
    return len(shared), [
        f"{target} of {count} multiprocessors: {case}"
        for case in shared
        for (target, count), one, other in zip(pairs, old[case], new[case], strict=True)
        if one != other
    ]


def main() -> int:
    """Writes or compares; exit code 1 if a plan differs, or if the files share no case."""
    parser = argparse.ArgumentParser(
        prog="golden_plans", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="file to write")
    action.add_argument("--compare", type=Path, metavar="FILE", help="file to compare with")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"problems of each kernel number ({RUNS})")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    today = list(all_lines(cases(given.runs), given.processes))
    if given.write:
        given.write.write_text("\n".join(today) + "\n")
        print(f"{len(today)} problems in {given.write}")
        return 0
    count, changed = differences(given.compare.read_text().splitlines(), today)
    print(*changed[:SHOWN], sep="\n", end="\n" if changed else "")
    print(
        f"{count} of {len(today)} problems compared: {len(changed)} of {count * len(TARGETS) * len(SM_COUNTS)} differ"
    )
    return int(bool(changed) or not count)


if __name__ == "__main__":
    sys.exit(main())
