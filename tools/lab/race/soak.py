"""Soak: one process calls mixed problems from many threads for a long time; results stay right and memory steady.

python -m tools.lab.race.soak --seconds 1800 --threads 8 --kernels FOLDER --record FILE

Forward and backward, dense, packed, paged and decode problems, three dtypes and every family of kernels, each thread
on a stream of its own: by attention_forward and attention_backward with NumPy and with device arrays, and by Bound with
arrays between guards, which replays CUDA graphs. The first result of a problem is compared with float64, each later one
with the first, bit for bit; sums whose order the scheduler decides are compared with float64 each time.

Memory is sampled every 10 s (soak_samples.py), and a line on stderr says how far the run is. At the end no array of the
process may be left on the GPU. --record appends a line to a log, of which soak_table.py makes the table of
docs/data/tests.md. --shared says that other programs use the GPU at the same time. SIGTERM and Ctrl-C end the run
early: the record and the table say so.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.bench.harness import commit
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray, numpy_dtype
from cutlass_py_attn.runtime.binding import Bound, bind_problem
from cutlass_py_attn.testing import check, device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, same_bits
from tests.cases import covering_cases, decode_cases, paged_cases, suite
from tools.lab.race.soak_samples import MIB, Memory, Sample, memory_of, resident_mib, rounded
from tools.release import record
from tools.release.verify_gpu import unordered

Array = npt.NDArray[Any]
Results = dict[str, Array]

STEP: Final = 13  # every 13th covering case: head dims, masks and dtypes alternate with other periods
LAUNCHES: Final = 4  # of a Bound job on the same arrays: the stream's launcher serves all but the first
INTERVAL_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05
M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
RETURNED_BYTES: Final = 1 << 20  # arrays of this size go back to the system when they are freed
HOST, DEVICE = "NumPy arrays", "device arrays"


class Job(Protocol):
    """One problem and a way to call it."""

    @property
    def name(self) -> str:
        """What the record calls it."""

    def prepare(self) -> None:
        """Binds kernels, draws inputs, computes the reference; called once, before all else."""

    def run(self, stream: int) -> Iterator[Results]:
        """Calls it on a stream and yields the results of each call."""

    def ratios(self, found: Results) -> Mapping[str, float]:
        """Returns error / allowed of results against float64."""

    def free(self) -> set[str]:
        """Returns the results that may differ from call to call."""


@dataclass
class BoundJob:
    """A case of any feature, launched by one Bound that all threads share, in guarded buffers."""

    case: Case
    family: str
    kernels: Kernels
    _expected: guarded_check.Expected | None = None
    _bound: Bound | None = None

    @property
    def name(self) -> str:
        return f"{self.case.line}, {self.family}"

    def prepare(self) -> None:
        of_family = check.only_family(self.kernels, self.family, self.case.direction)
        self._bound = bind_problem(self.case.problem(), of_family)
        self._expected = guarded_check.expect(self.case)

    def run(self, stream: int) -> Iterator[Results]:
        assert self._expected is not None
        assert self._bound is not None
        problem = self.case.problem()
        tensors = tensors_of(self.case)
        written = {"output", "logsumexp"} if problem.direction == "forward" else set()
        given = {name: array for name, array in self._expected.arrays.items() if name in tensors.keys() - written}
        with device_memory.GuardedLaunch(self._bound, tensors, given, self.case.philox) as guarded:
            for _ in range(LAUNCHES):
                guarded.reset()
                guarded.launch(stream)
                driver.synchronise(stream)
                yield guarded.read()

    def ratios(self, found: Results) -> Mapping[str, float]:
        assert self._expected is not None
        return guarded_check.ratios(self.case, self._expected, found)

    def free(self) -> set[str]:
        assert self._bound is not None
        return unordered(self._bound.plan)


def tensors_of(case: Case) -> dict[str, Any]:
    """Returns every tensor and vector of a case, as `device_memory.guarded_launch` has them."""
    problem = case.problem()
    logsumexp = Tensor.contiguous(problem.shape.logsumexp, "float32")
    return {**problem.tensors(), **problem.vectors(), "logsumexp": logsumexp}


@dataclass
class CallJob:
    """A dense case, called by attention_forward and attention_backward. place: HOST or DEVICE."""

    case: Case
    place: str
    kernels: Kernels
    _arrays: Results = field(default_factory=dict)
    _plan: Plan | None = None

    @property
    def name(self) -> str:
        return f"{self.case.line}, {self.place}"

    def prepare(self) -> None:
        self._plan = bind_problem(self.case.problem(), self.kernels).plan
        self._arrays = self.case.arrays()

    def run(self, stream: int) -> Iterator[Results]:
        given = {
            name: on_device(array, stream) if self.place == DEVICE else array for name, array in self._arrays.items()
        }
        yield {name: on_host(array, stream) for name, array in self._attend(given, stream).items()}

    def _attend(self, given: Mapping[str, Any], stream: int) -> dict[str, Any]:
        spec = self.case.spec
        common: dict[str, Any] = {"mask": spec.mask, "scale": spec.scale, "kernels": self.kernels, "stream": stream}
        operands = given["query"], given["key"], given["value"]
        output, logsumexp = attention_forward(*operands, **common)
        found = {"output": output, "logsumexp": logsumexp}
        if self.case.direction == "backward":
            options: dict[str, Any] = {"deterministic": spec.deterministic, "num_splits_key": spec.num_splits_key}
            query, key, value = operands
            gradients = attention_backward(
                given["grad_output"], query, key, value, output, logsumexp, **options, **common
            )
            found |= dict(zip(check.GRADIENTS, (gradients.query, gradients.key, gradients.value), strict=True))
        return found

    def ratios(self, found: Results) -> Mapping[str, float]:
        return {f"{each.tensor} {each.rule}": each.worst for each in check.results(self.case, self._arrays, found)}

    def free(self) -> set[str]:
        assert self._plan is not None
        return unordered(self._plan)


def on_device(array: Array, stream: int) -> DeviceArray:
    """Returns a copy on the device."""
    found = DeviceArray(array.shape, array.dtype.name, 0, stream)
    dense = np.ascontiguousarray(array)
    if dense.nbytes:
        driver.copy_to_device(found.pointer, dense.ctypes.data, dense.nbytes, stream)
        driver.synchronise(stream)
    return found


def on_host(array: Any, stream: int) -> Array:
    """Returns a result as a NumPy array; waits for the stream."""
    driver.synchronise(stream)
    if isinstance(array, np.ndarray):
        return array
    found = np.empty(array.shape, numpy_dtype(array.dtype))
    if found.nbytes:
        driver.copy_to_host(found.ctypes.data, array.pointer, found.nbytes, stream)
        driver.synchronise(stream)
    return found


def jobs_of(kernels: Kernels) -> list[Job]:
    """Returns the jobs of a run. Their kernels are those of tests/gpu (build_ptx.py --suite)."""
    both = (*covering_cases.FORWARD[::STEP], *covering_cases.BACKWARD[::STEP])
    dense = [case for case in both if case.needs_kernels]
    calls = [CallJob(case, place, kernels) for case in dense for place in (HOST, DEVICE)]
    forwards = tuple(case.replace(direction="forward") for case in suite.VARIABLE_LENGTH)
    heads = (*suite.MANY_HEADS[::4], *suite.FEW_TILES[::4])
    chosen = (*suite.VARIABLE_LENGTH, *forwards, *heads, *suite.LONG_DROPOUT, *suite.LAUNCHERS.values())
    bound = [BoundJob(case, family, kernels) for case in chosen for family in check.families(case)]
    decode = [BoundJob(case, "decode", kernels) for case in (*decode_cases.ALL[::STEP], *paged_cases.DECODE)]
    return [*calls, *bound, *decode]


class Draw:
    """Hands out the jobs to the threads: each of them once, then any of those that were called."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.prepared_at = math.inf  # when the last of them was called for the first time
        self._fresh = iter(jobs)
        self._called: list[Job] = []
        self._count = len(jobs)
        self._lock = threading.Lock()

    def next(self, random: Random) -> tuple[Job | None, bool]:
        """Returns a job, None while there is none, and whether it is the first time."""
        with self._lock:
            fresh = next(self._fresh, None)
            if fresh is not None:
                return fresh, True
            return (random.choice(self._called) if self._called else None), False

    def add(self, job: Job) -> None:
        """Adds a job that was called once."""
        with self._lock:
            self._called.append(job)
            if len(self._called) == self._count:
                self.prepared_at = time.monotonic()


class Arrays:
    """Counts the bytes of this process that cuMemAlloc gave and cuMemFree has not taken back."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._allocate, self._free = driver.allocate_now, driver.free_now

    @property
    def bytes(self) -> int:
        """Returns the bytes of this moment."""
        return sum(self._sizes.copy().values())

    def allocate(self, size: int, purpose: str) -> int:
        """Does what driver.allocate_now does."""
        address = self._allocate(size, purpose)
        self._sizes[address] = size
        return address

    def free(self, address: int) -> None:
        """Does what driver.free_now does. The address may belong to another thread as soon as it is free."""
        size = self._sizes.pop(address, 0)
        try:
            self._free(address)
        except AttentionError:
            self._sizes[address] = size
            raise


@contextmanager
def counted_arrays() -> Iterator[Arrays]:
    """Context manager that counts the arrays that are allocated in it."""
    found = Arrays()
    with mock.patch.object(driver, "allocate_now", found.allocate), mock.patch.object(driver, "free_now", found.free):
        yield found


@dataclass
class Progress:
    """What the threads have done. first: the first results of each job; failures: of any call."""

    first: dict[str, Results] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """Returns the number of calls that passed."""
        with self.lock:
            return sum(self.calls.values())

    def fail(self, text: str) -> None:
        """Adds a failure."""
        with self.lock:
            self.failures.append(text)

    def compare(self, job: Job, found: Results) -> None:
        """Counts a call; AssertionError if a result is wrong."""
        with self.lock:
            first = self.first.get(job.name)
        different = {name for name in found if first is None or not same_bits(found[name], first[name])}
        wrong = different - job.free() if first is not None else set()
        assert not wrong, f"{', '.join(sorted(wrong))}: other bits than the first call"
        if different:
            self._compare_with_float64(job.ratios(found))
        with self.lock:
            self.first.setdefault(job.name, found)
            self.calls[job.name] = self.calls.get(job.name, 0) + 1

    def _compare_with_float64(self, ratios: Mapping[str, float]) -> None:
        failed = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
        assert not failed, f"error / allowed {failed}"
        with self.lock:
            self.worst = max(self.worst, *ratios.values(), 0.0)


def work(draw: Draw, progress: Progress, stop: threading.Event, seed: int) -> None:
    """Calls random jobs on a stream of its own until `stop` is set; one thread's part."""
    random = Random(seed)
    job: Job | None = None
    try:
        with driver.device(0).current(), device_memory.stream() as stream:
            while not stop.is_set():
                job, is_fresh = draw.next(random)
                if job is None:
                    stop.wait(POLL_SECONDS)
                    continue
                if is_fresh:
                    job.prepare()
                for found in job.run(stream):
                    progress.compare(job, found)
                if is_fresh:
                    draw.add(job)
    except Exception as error:  # of any kind: the record names it, and the run ends
        progress.fail(f"{job.name if job else 'no job'}: {type(error).__name__}: {error}")
        stop.set()


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[list[str]]:
    """Context manager in which SIGTERM and SIGINT set `stop`; yields the names of those that came."""
    came: list[str] = []

    def handle(number: int, _: object) -> None:
        came.append(signal.Signals(number).name)
        stop.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def sample_now(start: float, calls: int, arrays: int) -> Sample:
    """Returns the memory of this moment. arrays: the bytes of Arrays."""
    free, total = driver.call("cuMemGetInfo")
    pool = driver.call("cuDeviceGetDefaultMemPool", driver.device(0).handle)
    kind = driver.bindings().CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    reserved = int(driver.call("cuMemPoolGetAttribute", pool, kind))
    used = (int(total) - int(free)) / MIB
    return Sample(time.monotonic() - start, calls, used, arrays / MIB, reserved / MIB, resident_mib())


def return_freed_arrays() -> None:
    """Makes malloc return large arrays to the system when they are freed, so that resident memory is what is in use.

    By default glibc keeps freed blocks of up to 32 MiB in the heap of each thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run. ended_by: "" if it ran for all of `requested` seconds, else a signal or "a failure". prepared: seconds
    until every job was called once."""

    requested: float
    seconds: float
    prepared: float
    threads: int
    ended_by: str
    progress: Progress
    samples: tuple[Sample, ...]
    memory: Memory

    @property
    def has_passed(self) -> bool:
        """Whether every job was called, every result was right, and memory was steady and all of it freed."""
        return not self.progress.failures and self.memory.is_steady

    def line(self) -> dict[str, Any]:
        """Returns the fields for the record."""
        progress = self.progress
        return {
            "passed": self.has_passed,
            "requested_seconds": self.requested,
            "seconds": round(self.seconds, 1),
            "prepared_seconds": round(self.prepared, 1),
            "ended_early": bool(self.ended_by),
            "ended_by": self.ended_by,
            "threads": self.threads,
            "calls": progress.total,
            "jobs": dict(sorted(progress.calls.items())),
            "worst": round(progress.worst, 4),
            "failures": progress.failures,
            "memory": self.memory.line(),
            "samples": list(map(rounded, self.samples)),
        }


def soak(
    jobs: Sequence[Job],
    seconds: float,
    threads: int,
    *,
    interval: float = INTERVAL_SECONDS,
    is_shared: bool = False,
    sample: Callable[[float, int, int], Sample] = sample_now,
) -> Outcome:
    """Runs the jobs from `threads` threads for `seconds`, and samples the memory every `interval` seconds."""
    progress, stop, samples = Progress(), threading.Event(), list[Sample]()
    start = time.monotonic()
    draw = Draw(jobs)
    with stopped_by_signals(stop) as signals, counted_arrays() as arrays:
        workers = [threading.Thread(target=work, args=(draw, progress, stop, seed)) for seed in range(threads)]
        for worker in workers:
            worker.start()
        while not stop.is_set() and (left := start + seconds - time.monotonic()) > 0:
            stop.wait(min(interval, left))
            try:
                samples.append(sample(start, progress.total, arrays.bytes))
                print(f"soak: {rounded(samples[-1])}", file=sys.stderr, flush=True)
            except AttentionError as error:  # a kernel's fault fails every call to the driver, this one too
                progress.fail(f"sample of the memory: {type(error).__name__}: {error}")
                break
        stop.set()
        for worker in workers:
            worker.join()
        gc.collect()
        left = arrays.bytes
    run = time.monotonic() - start
    ended_by = signals[0] if signals else "a failure" if progress.failures else ""
    prepared = min(draw.prepared_at - start, run)
    if not math.isfinite(draw.prepared_at):
        progress.fail("the run ended before every problem was called")
    if left:
        progress.fail(f"{left / MIB:g} MiB of arrays are left on the GPU")
    memory = memory_of(samples, is_shared=is_shared, prepared=prepared)
    return Outcome(seconds, run, prepared, threads, ended_by, progress, tuple(samples), memory)


def main() -> int:
    """Runs and writes the record; exit code 0 if every result was right and memory was steady."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=1800, help="how long to run; the threads compute the references in this time"
    )
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--record", type=Path, help="append the JSON record to this log")
    parser.add_argument(
        "--shared", action="store_true", help="other programs use the GPU: its used memory is not compared"
    )
    given = parser.parse_args()
    for name in ("seconds", "threads"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name} = {getattr(given, name)}: must be above 0")
    return_freed_arrays()
    with driver.device(0).current():
        jobs = jobs_of(check.kernels_from(given.kernels))
        print(f"soak: {len(jobs)} jobs", file=sys.stderr, flush=True)
        outcome = soak(jobs, given.seconds, given.threads, is_shared=given.shared)
    line = {**record.about_run(), "commit": commit(), "is_shared": given.shared, **outcome.line()}
    if given.record:
        record.append(given.record, [line])
    print("\n".join([*outcome.progress.failures, *outcome.memory.objections]))
    ended = f", ended by {outcome.ended_by}" if outcome.ended_by else ""
    verb = "passed" if outcome.has_passed else "FAILED"
    print(
        f"soak: {verb}: {outcome.progress.total} calls in {outcome.seconds:.0f} s{ended}; {outcome.memory.growth} MiB"
    )
    return 0 if outcome.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
