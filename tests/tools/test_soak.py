"""Tests of the soak run: steady and growing memory, wrong results, early ends, and a short run on the fake driver."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing.cases import Case
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.lab.race import soak, soak_table
from tools.lab.race.soak_samples import BOUNDS_MIB, LEAST_SAMPLES, MIB, Sample, memory_of, resident_mib
from tools.release import record


def series(count: int, *, seconds: float = 10.0, warm: float = 100.0, **per_second: float) -> list[Sample]:
    """Returns samples that fill up for `warm` seconds, wobble, and grow by `per_second` MiB."""
    found = []
    for number in range(1, count + 1):
        now = number * seconds
        level = 500.0 + min(now, warm) * 3 + 20 * (number % 2)
        grown = {name: level + now * per_second.get(name, 0.0) for name in BOUNDS_MIB}
        found.append(Sample(now, number, **grown))
    return found


def test_memory_that_fills_up_in_the_warm_up_is_steady() -> None:
    memory = memory_of(series(180), is_shared=False)
    assert memory.is_steady
    assert memory.warm_up_seconds == 300
    assert memory.growth == dict.fromkeys(BOUNDS_MIB, 0.0)


@pytest.mark.parametrize("name", BOUNDS_MIB)
def test_memory_that_grows(name: str) -> None:
    """At 0.07 MiB a second: 1 KiB in each of 72 calls."""
    memory = memory_of(series(180, **{name: 0.07}), is_shared=False)
    (objection,) = memory.objections
    assert objection.startswith(f"{name} memory grew by 7")
    assert "after a warm-up of 300 s: must be 64.0 MiB or less" in objection
    assert memory_of(series(180, **{name: 0.04}), is_shared=False).is_steady


def test_used_memory_of_a_shared_gpu_says_nothing() -> None:
    samples = series(180, device=5.0)
    assert not memory_of(samples, is_shared=False).is_steady
    memory = memory_of(samples, is_shared=True)
    assert memory.is_steady
    assert set(memory.bounds) == set(memory.growth) == {"arrays", "pool", "host"}
    assert not memory_of(series(180, device=5.0, arrays=0.07), is_shared=True).is_steady


def test_the_warm_up_lasts_until_every_problem_was_called() -> None:
    samples = series(180, warm=600)
    assert not memory_of(samples, is_shared=False).is_steady
    memory = memory_of(samples, is_shared=False, prepared=600)
    assert memory.is_steady
    assert memory.warm_up_seconds == 600


def test_too_few_samples_are_no_proof() -> None:
    for samples in ([], series(LEAST_SAMPLES - 1)):
        (objection,) = memory_of(samples, is_shared=False).objections
        assert "must be 8 or more" in objection


def test_resident_memory() -> None:
    """Of new pages: an allocator may reuse those that the process has already."""
    with mmap.mmap(-1, 64 << 20) as pages:
        before = resident_mib()
        for first in range(0, len(pages), mmap.PAGESIZE):
            pages[first] = 1
        assert 60 < resident_mib() - before < 70


@dataclass
class FakeJob:
    """Gives zeros; from call `wrong_from` on other bits."""

    name: str = "job"
    wrong_from: int = 10**9
    may_differ: set[str] = field(default_factory=set)
    ratio: float = 0.5
    calls: int = 0
    prepared: int = 0

    def prepare(self) -> None:
        self.prepared += 1

    def run(self, stream: int) -> Iterator[soak.Results]:
        self.calls += 1
        time.sleep(0.001)
        yield {"output": np.full(3, float(self.calls >= self.wrong_from))}

    def ratios(self, found: soak.Results) -> Mapping[str, float]:
        return {"output": self.ratio}

    def free(self) -> set[str]:
        return self.may_differ


@dataclass
class Clock:
    """The time of a run: a second for each sample, of which a run has as many however slow the machine is.

    It stands still until there were some calls.
    """

    now: float = 0.0
    least_calls: int = 20

    def sample(self, start: float, calls: int, arrays: int) -> Sample:
        self.now += calls >= self.least_calls
        return Sample(self.now - start, calls, 1, arrays / MIB, 1, 1)

    def run(self, *jobs: soak.Job, seconds: float = 30, threads: int = 2) -> soak.Outcome:
        return soak.soak(jobs, seconds, threads, interval=0.005, sample=self.sample)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_right_results_pass(clock: Clock, driver_log: FakeDriver) -> None:
    jobs = [FakeJob(f"job {number}") for number in range(5)]
    outcome = clock.run(*jobs)
    line = outcome.line()
    assert outcome.has_passed
    assert all(job.prepared == 1 and job.calls for job in jobs)
    assert line["calls"] == sum(line["jobs"].values()) == sum(job.calls for job in jobs)
    assert (line["passed"], line["ended_early"], line["worst"], line["threads"]) == (True, False, 0.5, 2)
    assert len(line["samples"]) >= LEAST_SAMPLES
    assert json.loads(json.dumps(line)) == line


def test_other_bits_end_the_run(clock: Clock, driver_log: FakeDriver) -> None:
    outcome = clock.run(FakeJob(wrong_from=5))
    assert not outcome.has_passed
    assert outcome.ended_by == "a failure"
    assert outcome.progress.failures[0] == "job: AssertionError: output: other bits than the first call"
    assert outcome.seconds < 20


def test_a_driver_that_fails_at_a_sample_ends_the_run_with_a_record(clock: Clock, driver_log: FakeDriver) -> None:
    def broken(start: float, calls: int, arrays: int) -> Sample:
        raise DriverError("cuMemGetInfo(): CUDA_ERROR_ILLEGAL_ADDRESS")

    outcome = soak.soak([FakeJob()], 30, 2, interval=0.005, sample=broken)
    assert outcome.ended_by == "a failure"
    failure = outcome.progress.failures[0]
    assert failure == "sample of the memory: DriverError: cuMemGetInfo(): CUDA_ERROR_ILLEGAL_ADDRESS"
    assert not outcome.has_passed
    assert outcome.seconds < 20


def test_sums_in_any_order_are_compared_with_float64(clock: Clock, driver_log: FakeDriver) -> None:
    assert clock.run(FakeJob(wrong_from=5, may_differ={"output"})).has_passed
    outcome = clock.run(FakeJob(ratio=1.5))
    assert "error / allowed {'output': 1.5}" in outcome.progress.failures[0]


@dataclass
class KeepingJob(FakeJob):
    """Keeps a MiB of each call."""

    kept: list[int] = field(default_factory=list)

    def run(self, stream: int) -> Iterator[soak.Results]:
        self.kept.append(driver.allocate_now(MIB, "an array"))
        yield from super().run(stream)


def test_arrays_that_stay_on_the_gpu_fail(clock: Clock, driver_log: FakeDriver) -> None:
    job = KeepingJob()
    outcome = clock.run(job, threads=1)
    assert outcome.progress.failures == [f"{len(job.kept)} MiB of arrays are left on the GPU"]
    assert outcome.samples[-1].arrays > outcome.samples[0].arrays
    assert not outcome.has_passed
    for address in job.kept:
        driver.free_now(address)


def test_a_run_that_ends_before_every_problem_was_called_fails(clock: Clock, driver_log: FakeDriver) -> None:
    clock.least_calls = 1
    slow = [FakeJob(f"job {number}") for number in range(10_000)]
    outcome = clock.run(*slow, seconds=10, threads=1)
    assert outcome.progress.failures == ["the run ended before every problem was called"]


def test_sigterm_ends_the_run_early(clock: Clock, driver_log: FakeDriver) -> None:
    def killed(start: float, calls: int, arrays: int) -> Sample:
        os.kill(os.getpid(), signal.SIGTERM)  # while the run handles it: before, it would end this process
        return clock.sample(start, calls, arrays)

    before = signal.getsignal(signal.SIGTERM)
    line = soak.soak([FakeJob()], 60, 2, interval=0.005, sample=killed).line()
    assert (line["ended_early"], line["ended_by"], line["requested_seconds"]) == (True, "SIGTERM", 60)
    assert line["seconds"] < 30
    assert signal.getsignal(signal.SIGTERM) is before


class UncheckedJob(soak.BoundJob):
    """The fake driver computes nothing: its results stay NaN and have no reference."""

    def ratios(self, found: soak.Results) -> Mapping[str, float]:
        assert all(np.isnan(array.astype(np.float32)).all() for array in found.values())
        return {}


def test_a_short_run_on_the_fake_driver_frees_all_it_allocates(clock: Clock, driver_log: FakeDriver) -> None:
    lines = ("forward bf16_d64_q20_s30_b1_h2_causal", "backward f16_d64_q20_s30_b1_h2_full_deterministic")
    jobs = [UncheckedJob(Case.parse(line), "sm80", fakes.artifact) for line in lines]
    outcome = clock.run(*jobs, seconds=10)
    assert outcome.progress.failures == []
    assert set(outcome.progress.calls) == {job.name for job in jobs}
    allocated, freed = (len(driver_log.of(name)) for name in ("cuMemAlloc", "cuMemFree"))
    assert allocated == freed > 0
    created, destroyed = (len(driver_log.of(name)) for name in ("cuStreamCreate", "cuStreamDestroy"))
    assert created == destroyed == 2


def test_the_table_has_a_row_for_each_run(clock: Clock, driver_log: FakeDriver, tmp_path: Path) -> None:
    assert soak_table.table(tmp_path) == soak_table.NOT_RUN
    about = {"gpu": "GPU", "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef"}
    for is_shared, job in ((False, FakeJob()), (True, FakeJob(wrong_from=5))):  # the second one fails
        line = clock.run(job, threads=1).line()
        record.append(tmp_path / soak_table.RECORD, [{**about, "is_shared": is_shared, **line}])
    _, _, right, wrong = [line.split(" | ") for line in soak_table.table(tmp_path).splitlines()]
    assert right[0] == "| GPU, 2026-01-02, commit 0123456789ab"
    assert (right[3], right[5], right[6]) == ("1", "0", "0.50")
    assert right[1] == "30"
    assert right[7] == "arrays 0.0, device 0.0, host 0.0, pool 0.0 |"
    assert wrong[1].endswith(", ended by a failure before 30, shared GPU, failed")
    assert wrong[5] == "1"  # of two threads both may fail
