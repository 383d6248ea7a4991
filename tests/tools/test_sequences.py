"""Tests of the sequence machine: on a simulated GPU sequences pass, and each seeded fault of the host code fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.runtime import arrays, binding, driver, fill, frameworks, lifetimes, output_checks, params
from tests.support import simulated_kernels
from tests.support.fake_driver import FakeDriver
from tests.support.simulated_host import SimulatedHost, clear_caches
from tools.docs import attempts
from tools.lab.race import sequence_machine, sequences
from tools.lab.race.sequence_machine import SequenceMachine

Patch = pytest.MonkeyPatch
MOST = 20  # sequences until a seeded fault shows


@pytest.fixture
def machine(driver_log: FakeDriver) -> Iterator[type[SequenceMachine]]:
    """The machine on a simulated GPU, with empty caches."""
    yield sequences.machine_of(SimulatedHost(driver_log))
    clear_caches()
    sequence_machine.bound_of.cache_clear()
    lifetimes.kept.clear()


# Seeded faults


def keeps_nothing(patch: Patch) -> None:
    """Operands of a call on another stream than their allocator's are not kept."""
    patch.setattr(lifetimes, "keep", lambda *_: None)


def waits_for_no_producer(patch: Patch) -> None:
    """A call does not wait for the stream on which its operands were written."""
    patch.setattr(driver, "order_streams", lambda producer, consumer: None)


def clears_on_the_default_stream(patch: Patch) -> None:
    """The workspace and rows of no sequence are cleared on the legacy default stream."""
    clear = driver.memset_zero
    patch.setattr(driver, "memset_zero", lambda address, size, stream: clear(address, size, 0))


def frees_on_the_default_stream(patch: Patch) -> None:
    """The workspace is freed on the legacy default stream."""
    free = driver.free
    patch.setattr(driver, "free", lambda address, stream: free(address, 0))


def shares_a_workspace(patch: Patch) -> None:
    """All calls of a Bound use one workspace, on any stream."""
    workspaces: dict[int, arrays.DeviceArray] = {}
    end = SimulatedHost.end

    def launch(self: binding.Bound, pointers: Mapping[str, int], stream: int) -> None:
        with self.device.current():
            if id(self) not in workspaces:
                workspaces[id(self)] = arrays.DeviceArray((self.workspace_bytes // 4,), "float32", 0, 0)
            self(pointers, stream, workspace=workspaces[id(self)].pointer)

    def cleared(host: SimulatedHost) -> list[str]:
        workspaces.clear()
        return end(host)

    patch.setattr(binding.Bound, "_launch_with_pool", launch)
    patch.setattr(SimulatedHost, "end", cleared)


def ignores_out(patch: Patch) -> None:
    """A result is written to a new array, and the caller's is returned."""
    use = arrays.OutputArrays.use

    def ignored(self: arrays.OutputArrays, name: str, array: arrays.Array) -> int:
        use(self, name, array)
        address = self.allocate(name, array.shape, array.dtype)
        self._own, self._outputs[name] = self._outputs[name], array.source  # type: ignore[attr-defined]
        return address

    patch.setattr(arrays.OutputArrays, "use", ignored)


def caches_without_strides(patch: Patch) -> None:
    """The key of a repeated call has no strides."""

    def key(self: Any, array: Any) -> Any:
        return array.shape, array.dtype, array.device if hasattr(array, "device") else 0

    for kind in (type(frameworks.TORCH), type(frameworks.CUPY)):
        patch.setattr(kind, "layout_key", key)


def caches_without_stream(patch: Patch) -> None:
    """A repeated call is launched on the default stream."""
    repeat = calls.PreparedCall.repeat

    def launched(self: calls.PreparedCall, *arguments: Any) -> Any:
        bound = self.bound
        assert bound is not None
        self.bound = lambda pointers, current: bound(pointers, 0)  # type: ignore[assignment]
        try:
            return repeat(self, *arguments)
        finally:
            self.bound = bound

    patch.setattr(calls.PreparedCall, "repeat", launched)


def keeps_old_addresses(patch: Patch) -> None:
    """Later launches with the same workspace have the addresses of the first."""
    write = params.KernelParams.write
    patch.setattr(
        params.KernelParams, "write", lambda self, new, workspace: self._are_encoded or write(self, new, workspace)
    )


def clears_no_ragged_rows(patch: Patch) -> None:
    """Rows that belong to no sequence are not cleared."""
    patch.setattr(fill, "fill", lambda *_: None)


def accepts_overlapping_results(patch: Patch) -> None:
    """A call that must be refused is launched."""
    patch.setattr(output_checks, "refusals", lambda *_: [])


def leaves_an_event(patch: Patch) -> None:
    """A refused call leaves an event."""
    read = arrays.read_operands

    def refused(operands: Mapping[str, Any], stream: int) -> Any:
        event = driver.record_event(stream)
        found = read(operands, stream)
        driver.destroy_event(event)
        return found

    patch.setattr(arrays, "read_operands", refused)


def leaves_the_context(patch: Patch) -> None:
    """A refused call leaves another context current."""
    prepare = calls.prepare

    def refused(*arguments: Any) -> Any:
        try:
            return prepare(*arguments)
        except NotSupported:
            driver.call("cuCtxSetCurrent", driver.device(1).context)
            raise

    patch.setattr(calls, "prepare", refused)


def writes_ahead_of_the_result(patch: Patch) -> None:
    """A kernel writes the element ahead of its output."""
    run = simulated_kernels.run

    def beyond(build: Build, struct: Mapping[str, Any], view: simulated_kernels.View) -> None:
        run(build, struct, view)
        if build.kind == "forward":
            view("output", struct["output"] - 2, (1,), (1,), "float16")[...] = 7

    patch.setattr(simulated_kernels, "run", beyond)


# The fault, and a seed with which few sequences show it.
FAULTS: dict[Callable[[Patch], None], int] = {
    keeps_nothing: 2,
    waits_for_no_producer: 3,
    clears_on_the_default_stream: 6,
    frees_on_the_default_stream: 1,
    shares_a_workspace: 2,
    ignores_out: 3,
    caches_without_strides: 1,
    caches_without_stream: 3,
    keeps_old_addresses: 3,
    clears_no_ragged_rows: 3,
    accepts_overlapping_results: 5,
    leaves_an_event: 3,
    leaves_the_context: 4,
    writes_ahead_of_the_result: 3,
}


def test_sequences(machine: type[SequenceMachine]) -> None:
    sequences.run_chunk(machine, 1, 8)
    assert machine.tally.failures == []
    assert machine.tally.sequences >= 8
    assert machine.tally.results > 50
    assert machine.tally.worst < 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_fails(
    fault: Callable[[Patch], None], machine: type[SequenceMachine], monkeypatch: Patch
) -> None:
    """Hypothesis runs a failing sequence again, which may then fail in another way: the tally has the first."""
    fault(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011
        sequences.run_chunk(machine, FAULTS[fault], MOST)
    assert machine.tally.failures


# The runner and its record


def test_the_runner_writes_a_record(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = sequences.Outcome(2000, 9000, Counter({"forward": 7}), 0.5)
    monkeypatch.setattr(sequences, "run_all", lambda *_: outcome)
    path = tmp_path / attempts.RECORDS / "simulated.json"
    assert sequences.main(["--simulated", "--record", str(path), "--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "worst error / allowed 0.500",
        "seed 3, 0 s, 2 processes",
    ]
    (line,) = attempts.read(tmp_path)
    assert {name: line[name] for name in ("count", "wrong", "seed", "results", "steps")} == {
        "count": 2000, "wrong": 0, "seed": 3, "results": 9000, "steps": {"forward": 7},
    }  # fmt: skip


@pytest.mark.parametrize(("count", "failures"), [(1999, []), (2000, ["seed 10001: other bits"])])
def test_the_runner_fails(
    count: int, failures: list[str], monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If sequences are wrong, or fewer ran than were asked for."""
    monkeypatch.setattr(sequences, "run_all", lambda *_: sequences.Outcome(count, failures=failures))
    assert sequences.main(["--simulated"]) == 1
    assert all(failure in capsys.readouterr().out for failure in failures)


@pytest.mark.parametrize("arguments", [[], ["--simulated", "--kernels", "folder"]])
def test_the_runner_needs_one_host(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sequences.main(arguments)
    assert "--build, --kernels or --simulated is needed" in capsys.readouterr().err


def test_a_chunk_that_fails_is_one_wrong_sequence(machine: type[SequenceMachine], monkeypatch: Patch) -> None:
    waits_for_no_producer(monkeypatch)
    monkeypatch.setattr(sequences, "_host", machine.host)
    outcome = sequences.outcome_of(None, FAULTS[waits_for_no_producer], MOST)
    (failure,) = outcome.failures
    assert failure.startswith("seed 3: ")
    assert "state.start(" in failure, "the steps of the sequence"


# The table of docs/testing.md


def test_the_table_has_a_row_for_each_record(tmp_path: Path) -> None:
    assert attempts.table(tmp_path).startswith("Nothing recorded yet")
    line = {
        "what": "plans",
        "count": 5,
        "wrong": 0,
        "gpu": "NVIDIA H100",
        "date": "2026-01-02T03:04:05",
        "commit": "a" * 40,
    }
    for name, what in (("b", "programs"), ("a", "plans")):
        attempts.write(tmp_path / attempts.RECORDS / f"{name}.json", {**line, "what": what, "seed": 1})
    assert attempts.table(tmp_path).splitlines() == [
        "| what was tried | how many | wrong | where |",
        "| --- | --- | --- | --- |",
        "| plans | 5 | 0 | NVIDIA H100, 2026-01-02, commit aaaaaaaaaaaa |",
        "| programs | 5 | 0 | NVIDIA H100, 2026-01-02, commit aaaaaaaaaaaa |",
    ]


def test_a_record_without_its_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / attempts.RECORDS / "a.json"
    with pytest.raises(ValueError, match="count = '5': must be int"):
        attempts.write(path, {"what": "plans", "count": "5", "wrong": 0, "gpu": "none", "commit": "a"})
    assert not path.exists()
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json: what = None: must be str"):
        attempts.read(tmp_path)
