"""Sanitize: which kernels are launched, which results are wrong, and how a run that an error ended goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing import inputs as case_inputs
from cutlass_py_attn.testing.cases import Case
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tests.support.ptx_threads import Array
from tools.lab.race import sanitize, stress_run
from tools.release import record

ROOT = Path(__file__).resolve().parents[2]
SHOWN = record.read_manifest(ROOT)["kernels"]
PACKED = [case for case in stress_run.FEATURES if case.spec.sequences and not case.spec.page_size]


def inputs(case: Case) -> guarded_check.Expected:
    """Returns the inputs alone; a backward gets a synthetic output and logsumexp."""
    arrays = case.arrays()
    if case.direction == "backward":
        arrays |= {"output": arrays["grad_output"], "logsumexp": np.zeros(case.shape.logsumexp, np.float32)}
    return guarded_check.Expected(arrays, {}, {})


def zeros(shape: Shape, *_: object) -> tuple[Array, ...]:
    """In place of random operands."""
    return tuple(np.zeros(shape.of(name), np.float32) for name in case_inputs.NAMES)


def test_every_shown_kernel_is_sanitized(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched, so that neither a reference nor any numbers are needed."""
    monkeypatch.setattr(guarded_check, "expect", inputs)
    monkeypatch.setitem(case_inputs.FAMILIES, "gaussian", zeros)
    found, variants = set(), set()
    with driver.device(0).current():
        for each in sanitize.launches(fakes.artifact):
            with each.launch() as guarded:
                found.add(record.name_of(guarded.bound.plan.build))
                variants.add(guarded.bound.plan.build.variant)
    assert set(SHOWN) - found == set()
    assert {"wide", "e4m3", "mla", "e4m3_cache", "persistent"} <= variants


@pytest.mark.parametrize("case", PACKED, ids=lambda case: f"{case.direction}-{case.spec.head_dim}")
def test_rows_of_no_sequence_have_no_result(case: Any) -> None:
    """A kernel leaves them as they were: NaN. NaN in any other row, and a wrong number, are told."""
    expected = guarded_check.expect(case)
    honest: dict[str, Array] = {}
    for name, truth in expected.truth.items():
        dtype = np.float32 if name == "logsumexp" else expected.arrays["query"].dtype
        honest[name] = truth.astype(dtype)
        if name == "logsumexp":
            for number, each in enumerate(case.spec.sequences):
                honest[name][number, :, -(-each.num_queries // 32) * 32 :] = np.nan
        else:
            rows = case.spec.num_tokens[1 if name in ("grad_key", "grad_value") else 0]
            assert rows < truth.shape[1]
            honest[name][:, rows:] = np.nan
    wrong = sanitize.with_features(case, fakes.artifact).wrong
    assert wrong(honest) == []
    for name, array in honest.items():
        for value in (np.nan, 9):
            changed = array.copy()
            changed[(0, 0, 5) if name == "logsumexp" else (0, 5, 0)] = value
            assert wrong({**honest, name: changed}) == [name]


class Played:
    """In place of bound kernels: `run` gives the results."""

    def __init__(self, run: Callable[[], dict[str, Array]]) -> None:
        self.pointers: dict[str, int] = {}
        self.read = run

    def bound(self, pointers: dict[str, int]) -> None:
        """Launches nothing."""

    def reset(self) -> None:
        """Fills nothing."""

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def run(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Exit code and lines of tools/lab/race/sanitize.py on three cases: the second is not written, the third fails."""

    def fail() -> dict[str, Array]:
        raise DriverError("cuStreamSynchronize(0): CUDA_ERROR_LAUNCH_FAILED")

    results = {
        "forward one": lambda: {"output": np.zeros(3)},
        "forward two": lambda: {"output": np.array([0, np.nan]), "logsumexp": np.zeros(2)},
        "backward three": fail,
    }
    found = [
        sanitize.Launch(name, lambda given=given: Played(given), sanitize.unwritten)  # type: ignore[misc, arg-type]
        for name, given in results.items()
    ]
    monkeypatch.setattr(sanitize, "launches", lambda kernels: iter(found))

    def command(*options: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["sanitize", "--kernels", "folder", *options])
        code = sanitize.main()
        return code, capsys.readouterr().out.splitlines()

    return command


def test_an_error_of_a_launch_says_how_to_go_on(run: Callable[..., tuple[int, list[str]]]) -> None:
    code, lines = run()
    assert code == 1
    assert lines[:3] == ["1 forward one", "2 forward two", "3 backward three"]
    assert lines[-2] == "wrong: forward two: output"
    end = "case 3 ended the run (cuStreamSynchronize(0): CUDA_ERROR_LAUNCH_FAILED)"
    assert lines[-1] == f"sanitize: 2 cases, 1 wrong; {end}; the cases after it run with --skip 3"


def test_a_changed_guard_does_not_end_the_run(
    run: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(case: sanitize.Launch) -> list[str]:
        raise AssertionError("9 elements outside the tensor changed")

    monkeypatch.setattr(sanitize, "wrong_results", changed)
    code, lines = run("--skip", "1")
    assert (code, lines[-1]) == (1, "sanitize: 2 cases, 2 wrong")
    assert lines[-2] == "wrong: backward three: 9 elements outside the tensor changed"


@pytest.mark.parametrize(
    ("options", "code", "names"),
    [
        (("--only", "one"), 0, ["1 forward one"]),
        (("--only", "forward"), 1, ["1 forward one", "2 forward two"]),
        (("--skip", "1", "--only", "forward"), 1, ["2 forward two"]),
        (("--skip", "3"), 1, []),
        (("--only", "no such case"), 1, []),
    ],
)
def test_some_cases_run(
    run: Callable[..., tuple[int, list[str]]], options: tuple[str, ...], code: int, names: list[str]
) -> None:
    found, lines = run(*options)
    assert found == code
    assert [line for line in lines if line[0].isdigit()] == names
    assert lines[-1].startswith(f"sanitize: {len(names)} cases, ")
