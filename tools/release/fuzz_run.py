"""Fuzz run: launches random cases in several processes, each with the reference of its cases, and says what ran."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import AttentionError, CompileError, DriverError, Stale
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, kernels_from, only_family

# Of the problems that sm90 or decode kernels take, one of as many runs on sm80 kernels too.
GENERIC_EVERY: Final = 4
CHUNK: Final = 12  # cases that one process runs one after another; neighbours share kernels
BLAS_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One launch of a case.

    build: the kernel that ran; None if the launch failed before it was known
    ratios: error / allowed of each result
    error: type and message of what the launch raised; "" if it raised nothing
    is_absent: whether no kernel for the case is at hand
    is_fallback: whether a kernel that the planner prefers was absent
    """

    build: Build | None
    ratios: dict[str, float] = field(default_factory=dict)
    error: str = ""
    is_absent: bool = False
    is_fallback: bool = False

    @property
    def passed(self) -> bool:
        """Whether every result is within its bound."""
        return not self.error and all(ratio <= 1 for ratio in self.ratios.values())

    @property
    def worst(self) -> float:
        """Largest error / allowed."""
        return max(self.ratios.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case with its launches; none for a case that is refused or empty.

    is_broken: whether the process can launch nothing any more.
    """

    case: Case
    attempts: tuple[Attempt, ...] = ()
    is_broken: bool = False


class _Watched:
    """Kernels that note whether one of them was absent."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.has_skipped = False

    def __call__(self, build: Build) -> Artifact:
        try:
            return self._kernels(build)
        except (CompileError, Stale):
            self.has_skipped = True
            raise


def run_case(case: Case, kernels: Kernels, *, generic_every: int = GENERIC_EVERY, family: str = "") -> Outcome:
    """Returns the launches of a case: by the planner's first choice among the kernels, and for one of `generic_every`
    cases that another family runs by the sm80 kernels too.

    family: launch the kernels of this family alone.
    """
    if not case.needs_kernels:
        return Outcome(case)
    expected = guarded_check.expect(case)

    def launch(chosen: Kernels) -> Attempt:
        return attempt(case, expected, chosen)

    if family:
        return _outcome(case, [launch(only_family(kernels, family, case.direction))])
    return _outcome(case, attempts(case, kernels, launch, generic_every))


def attempts(
    case: Case, kernels: Kernels, launch: Callable[[Kernels], Attempt], generic_every: int = GENERIC_EVERY
) -> list[Attempt]:
    """Returns what `launch` gives with the kernels, and for one of `generic_every` cases that another family runs with
    the sm80 kernels too.
    """
    watched = _Watched(kernels)
    first = launch(watched)
    found = [replace(first, is_fallback=first.build is not None and watched.has_skipped)]
    if first.build is not None and first.build.family != "sm80" and case.seed % generic_every == 0:
        generic = launch(only_family(kernels, "sm80", case.direction))
        found += [] if generic.is_absent else [generic]
    return found


def _outcome(case: Case, attempts: Sequence[Attempt]) -> Outcome:
    is_broken = any("DriverError" in each.error for each in attempts) and not _can_launch()
    return Outcome(case, tuple(attempts), is_broken)


def _can_launch() -> bool:
    try:
        driver.call("cuCtxSynchronize")
    except DriverError:
        return False
    return True


def attempt(case: Case, expected: guarded_check.Expected, kernels: Kernels) -> Attempt:
    """Returns what one launch gave."""
    try:
        launched = guarded_check.launch(case, expected, kernels)
    except (AttentionError, AssertionError) as error:
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Attempt(None, error=text, is_absent=isinstance(error, CompileError | Stale))
    ratios = guarded_check.ratios(case, expected, launched.outputs)
    return Attempt(launched.build, ratios)


_kernels: Kernels | None = None  # of this process
_broken_by = ""  # the line of the case after which this process can launch nothing


def start(folder: Path | None) -> None:
    """Prepares a process; folder: of prebuilt kernels, None for the compiler."""
    global _kernels, _broken_by
    _kernels, _broken_by = kernels_from(folder), ""


def run_cases(cases: Sequence[Case], generic_every: int = GENERIC_EVERY, family: str = "") -> list[Outcome]:
    """Returns the outcomes of the cases in a process that `start` has prepared.

    After a fault that leaves the process without a usable GPU, the other cases fail as not run.
    """
    global _broken_by
    found = []
    assert _kernels is not None, "start has not run in this process"
    with driver.device(0).current():
        for case in cases:
            if _broken_by:
                not_run = Attempt(None, error=f"not run: {_broken_by} broke the process before", is_absent=True)
                found.append(Outcome(case, (not_run,), is_broken=True))
                continue
            found.append(run_case(case, _kernels, generic_every=generic_every, family=family))
            _broken_by = case.line if found[-1].is_broken else ""
    return found


def pool(processes: int, folder: Path | None) -> ProcessPoolExecutor:
    """Returns processes that `start` prepares. Each is a new process, with a GPU context and one BLAS thread."""
    for variable in BLAS_THREADS:  # the processes share the cores
        os.environ.setdefault(variable, "1")
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=start, initargs=(folder,))


def outcomes(cases: Sequence[Case], folder: Path | None, processes: int) -> Iterator[Outcome]:
    """Yields the outcome of each case in order, run by that many processes."""
    chunks = [cases[first : first + CHUNK] for first in range(0, len(cases), CHUNK)]
    with pool(processes, folder) as workers:
        for found in workers.map(run_cases, chunks):
            yield from found


class Launcher:
    """Runs single cases in a process of its own, and in a new one after a fault; a context manager."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._process: ProcessPoolExecutor | None = None

    def __call__(self, case: Case, family: str = "") -> Outcome:
        """Returns the outcome of a case with all of its families, or with the kernels of one."""
        if self._process is None:
            self._process = pool(1, self._folder)
        try:
            (found,) = self._process.submit(run_cases, [case], 1, family).result()
        except BrokenProcessPool as error:
            found = Outcome(case, (Attempt(None, error=f"{type(error).__name__}: the process died"),), is_broken=True)
        if found.is_broken:
            self.close()
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fails(outcome: Outcome) -> bool:
    """Whether a launch failed; a kernel that is not at hand is no failure."""
    return any(not each.passed and not each.is_absent for each in outcome.attempts)


def failures(found: Iterable[Outcome]) -> list[tuple[Case, Attempt]]:
    """Returns the launches that failed, absent kernels among them."""
    return [(outcome.case, each) for outcome in found for each in outcome.attempts if not each.passed]
