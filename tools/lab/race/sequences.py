"""Sequences: random sequences of calls of the Python API on a GPU, or on a simulated one, against the NumPy reference.

python -m tools.lab.race.sequences --build FOLDER                                 compiles the kernels; needs no GPU
python -m tools.lab.race.sequences --kernels FOLDER --processes 12 --record FILE  runs on a GPU; no compiler, but torch
python -m tools.lab.race.sequences --simulated --processes 2 --record FILE        runs without a GPU; needs a C compiler

sequence_machine.py has the rules. Each process runs chunks of sequences with seeds of their own; a chunk ends at its
first failure, whose sequence is printed, and the run goes on with the next one. `--only SEED` runs that chunk alone and
shrinks its failure. --record adds the run to the folder of docs/data/tests.md's table of attempts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis.stateful import run_state_machine_as_test

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.errors import CompileError, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check
from tools.docs import attempts
from tools.lab.race.sequence_hosts import FOREIGN, LAYOUTS, GpuHost, Host
from tools.lab.race.sequence_machine import CASES, SequenceMachine, Tally
from tools.release import record

CHUNK: Final = 50  # sequences of one seed
STEPS: Final = 14
WHAT: Final = "sequences of calls of the Python API"


@dataclass
class Outcome:
    """What a chunk, or all of them, did."""

    sequences: int = 0
    results: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Adds another outcome."""
        self.sequences += other.sequences
        self.results += other.results
        self.steps += other.steps
        self.worst = max(self.worst, other.worst)
        self.failures += other.failures

    def table(self) -> str:
        """Returns the numbers as text."""
        steps = [f"{name:18} {count:7}" for name, count in sorted(self.steps.items())]
        wrong = len(self.failures)
        return "\n".join(
            [
                *steps,
                f"{'sequences':18} {self.sequences:7}",
                f"{'results compared':18} {self.results:7}",
                f"{'wrong sequences':18} {wrong:7}",
                f"worst error / allowed {self.worst:.3f}",
            ]
        )


def machine_of(host: Host) -> type[SequenceMachine]:
    """Returns the machine on a host, with a tally of its own."""
    return type("Machine", (SequenceMachine,), {"host": host, "tally": Tally()})


def run_chunk(machine: type[SequenceMachine], seed: int, count: int, steps: int = STEPS, shrinks: bool = False) -> None:
    """Runs sequences of one seed; raises the error of the first that fails, with its steps as notes."""
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    with_seed(seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=steps,
            phases=phases,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
        _min_steps=steps - 2,
    )


_host: Host | None = None


def _host_of(kernels: Path | None) -> Host:
    """Returns the host of this process. kernels: folder for a GPU; None for a simulated one."""
    global _host
    if _host is None:
        if kernels is None:
            from tests.support.fake_driver import FakeDriver
            from tests.support.simulated_host import SimulatedHost

            _host = SimulatedHost(FakeDriver())
        else:
            driver.call("cuCtxSetCurrent", driver.device(0).context)
            _host = GpuHost(check.kernels_from(kernels))
    return _host


def outcome_of(kernels: Path | None, seed: int, count: int, shrinks: bool = False) -> Outcome:
    """Runs a chunk in this process."""
    machine = machine_of(_host_of(kernels))
    failures = []
    tally = machine.tally
    try:
        run_chunk(machine, seed, count, shrinks=shrinks)
    except Exception as error:  # of any kind: the record counts it
        notes = "\n".join(getattr(error, "__notes__", []))
        first = tally.failures[0] if tally.failures else f"{type(error).__name__}: {error}"
        failures.append(f"seed {seed}: {first}\n{notes}")
    return Outcome(tally.sequences, tally.results, Counter(tally.steps), tally.worst, failures)


def run_all(kernels: Path | None, count: int, first_seed: int, processes: int) -> Outcome:
    """Runs `count` sequences or a few more in several processes."""
    total = Outcome()
    chunks = -(-count // CHUNK)
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        jobs = [pool.submit(outcome_of, kernels, first_seed * 10_000 + number, CHUNK) for number in range(chunks)]
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            total.add(job.result())
            print(f"sequences: {done} of {chunks} chunks, {len(total.failures)} failed", file=sys.stderr, flush=True)
    return total


def every_build() -> list[Build]:
    """Returns the kernels that sequences may ask for on an H100 or H200: each case in each layout, and the cache.

    An array of an unknown library may have every layout; those of other libraries ask for no other kernel.
    """
    from tests.support.simulated_host import SimulatedHost

    host = _host_of(None)
    assert isinstance(host, SimulatedHost)
    machine = machine_of(host)()
    place = host.places.index(FOREIGN)
    for line in CASES:
        machine.start(0, line, place)
        for layout in range(len(LAYOUTS)):
            machine.make(line, 0, place, layout)
            last = len(machine.calls) - 1
            for out in range(len(LAYOUTS)):
                machine.call(last, 0, 1, out)
            machine.bound(last, 0, False)
        machine.teardown()
    machine.start(0, CASES[0], place)
    machine.start_cache(place, 0, 0)
    machine.append((20, 20))
    for queries in (1, 2):
        for bottom_right, in_parts in ((False, False), (True, False), (False, True)):
            machine.decode(queries, bottom_right, in_parts)
    machine.teardown()
    return host.builds


def build_all(folder: Path, processes: int) -> None:
    """Compiles every kernel into a folder; those with spills are left out, as a call leaves them out."""
    builds = every_build()
    print(f"{len(builds)} kernels")
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, line in enumerate(pool.map(_compile, [folder] * len(builds), builds), 1):
            print(f"{number:3}/{len(builds)} {line}", flush=True)


def _compile(folder: Path, build: Build) -> str:
    from cutlass_py_attn.compilation.compiler import artifact_for

    try:
        Folder(folder)(build)
    except Stale:
        try:
            Folder(folder).put(artifact_for(build))
        except CompileError as error:
            return f"{build.symbol}: {error}"
    return build.symbol


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds or runs; exit code 1 if a sequence fails."""
    parser = argparse.ArgumentParser(
        prog="sequences", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into this folder")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="run on a GPU with the kernels of this folder")
    parser.add_argument("--simulated", action="store_true", help="run on a simulated GPU")
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, metavar="SEED", help="run the chunk of this seed and shrink its failure")
    parser.add_argument("--record", type=Path, help="write the JSON record to this file")
    given = parser.parse_args(arguments)
    if given.build:
        build_all(given.build.resolve(), given.processes)
        return 0
    if given.simulated == bool(given.kernels):
        parser.error("--build, --kernels or --simulated is needed, one of them")
    kernels = given.kernels.resolve() if given.kernels else None
    start = time.monotonic()
    if given.only is not None:
        total = outcome_of(kernels, given.only, CHUNK, shrinks=True)
    else:
        total = run_all(kernels, given.sequences, given.seed, given.processes)
    seconds = time.monotonic() - start
    print("\n".join(total.failures))
    print(f"{total.table()}\nseed {given.seed}, {seconds:.0f} s, {given.processes} processes")
    if given.record:
        where = {"gpu": "a simulated GPU"} if kernels is None else record.about_run()
        attempts.write(
            given.record,
            {
                **where,
                "what": WHAT,
                "count": total.sequences,
                "wrong": len(total.failures),
                "commit": commit(),
                "seed": given.seed,
                "seconds": round(seconds, 1),
                "processes": given.processes,
                "steps": dict(sorted(total.steps.items())),
                "results": total.results,
                "worst": round(total.worst, 4),
                "failures": total.failures,
            },
        )
    return 1 if total.failures or total.sequences < (0 if given.only else given.sequences) else 0


if __name__ == "__main__":
    sys.exit(main())
