"""Faults of machines and processes on the GPU: what tools/docs/faults.toml lists, with proof that nothing else changed.

Faults that harm their process, or take all memory, are caused by programs of their own (fault_programs.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime.binding import bind
from cutlass_py_attn.testing import check, device_memory
from cutlass_py_attn.testing.cases import ARCH, PTX_ARCH, Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from tests.cases import covering_cases, suite
from tests.gpu import fault_programs
from tests.gpu.test_laws import differing, operands_of
from tools.docs import faults_table

ROOT = Path(__file__).resolve().parents[2]
FAULTS = faults_table.read()
CASE = fault_programs.CASE
SMALL = Case.parse("backward bf16_d128_q203_s129_b2_h3_causal_splits1 seed=7")
SECONDS = 120  # of a program
ROW, CHANNEL, HEAD = 70, 5, 1  # of the value that is not finite


def start(program: str, kernels: Kernels, *arguments: object) -> subprocess.Popen[str]:
    """Starts a program of fault_programs."""
    folder = str(kernels.path) if isinstance(kernels, Folder) else ""
    command = [sys.executable, "-m", "tests.gpu.fault_programs", program, folder, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """Waits for a program and returns what it printed: pairs of type and text."""
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, f"exit code {process.returncode}\n{errors}"
    return [(name, text) for name, text in json.loads(output.splitlines()[-1])]


def caused(fault: str, found: list[tuple[str, str]], count: int = 1) -> None:
    """Compares errors with the entry of the fault."""
    assert len(found) == count
    for name, text in found:
        assert FAULTS[fault].objection(name, text) == ""


@contextmanager
def refused(fault: str) -> Iterator[None]:
    """Context manager for code that raises the entry's error."""
    with pytest.raises(AttentionError) as error:
        yield
    assert FAULTS[fault].objection(type(error.value).__name__, str(error.value)) == ""


@pytest.mark.device_memory(gib=None)
@pytest.mark.expected_seconds(8)
def test_no_memory_for_the_workspace(kernels: Kernels) -> None:
    caused("device memory runs out at the workspace", finish(start("workspace", kernels)))


@pytest.mark.device_memory(gib=None)
@pytest.mark.expected_seconds(8)
def test_no_memory_for_a_result(kernels: Kernels) -> None:
    caused("device memory runs out at a result", finish(start("result", kernels)))


@pytest.mark.device_memory(gib=None)
@pytest.mark.expected_seconds(8)
def test_no_memory_for_a_copy(kernels: Kernels) -> None:
    caused("device memory runs out at the copy of a NumPy array", finish(start("copy", kernels)))


@pytest.mark.device_memory(gib=None)
@pytest.mark.expected_seconds(8)
def test_no_memory_for_kernels(kernels: Kernels) -> None:
    caused("device memory runs out when kernels are loaded", finish(start("load", kernels)))


def test_a_destroyed_context(kernels: Kernels) -> None:
    """Every later call of that process is refused; other processes are not affected."""
    with watched(kernels):
        found = finish(start("destroyed", kernels))
    caused("the context of the GPU is destroyed", found, count=2)


def test_a_forked_child(kernels: Kernels) -> None:
    caused("a process forks after a call, and the child calls", finish(start("forked", kernels)), count=2)


# Cubins


@contextmanager
def watched(kernels: Kernels) -> Iterator[None]:
    """Checks that operands and results of an earlier call keep their bytes, and that the next call gives the same."""
    with device_memory.guarded_launch(SMALL.problem(), operands_of(SMALL, SMALL.arrays()), kernels) as guarded:
        expected = guarded.run()
        yield
        assert differing(expected, guarded.read()) == [], "results of an earlier call"
        assert differing(expected, guarded.run()) == [], "the next call"


def generic(kernels: Kernels, direction: str) -> tuple[Problem, Plan, Artifact]:
    """Returns a problem, its plan for sm80 kernels, and their artifact."""
    problem = suite.LONG[0].replace(direction=direction).problem()
    plan = planner.plan(problem, ARCH)
    return problem, plan, kernels(plan.build)


def test_kernels_of_another_gpu(kernels: Kernels) -> None:
    problem, plan, artifact = generic(kernels, "forward")
    build = replace(plan.build, arch="sm_120")
    with watched(kernels), refused("kernels are for another GPU"):
        bind(replace(artifact, build=build), replace(plan, build=build), problem)
    bind(artifact, plan, problem)


def test_a_cubin_of_another_gpu(kernels: Kernels) -> None:
    """A valid cubin for sm_80 in place of ours."""
    problem, plan, artifact = generic(kernels, "forward")
    foreign = kernels(planner.plan(covering_cases.PTX_CASES[0].problem(), PTX_ARCH).build)
    with watched(kernels), refused("the driver finds no code for its GPU in a cubin"):
        bind(replace(artifact, cubin=foreign.cubin), plan, problem)
    bind(artifact, plan, problem)


def test_a_cubin_of_other_kernels(kernels: Kernels) -> None:
    """The cubin of the backward in place of the forward's."""
    problem, plan, artifact = generic(kernels, "forward")
    _, _, other = generic(kernels, "backward")
    with watched(kernels), refused("a cubin has other kernels than its description"):
        bind(replace(artifact, cubin=other.cubin), plan, problem)
    bind(artifact, plan, problem)


def test_another_kernel_under_our_name(kernels: Kernels) -> None:
    """The backward's kernel, renamed: the two names have one length, so that the cubin stays valid."""
    problem, plan, artifact = generic(kernels, "forward")
    _, other_plan, other = generic(kernels, "backward")
    ours = plan.launches[0].symbol.encode()
    theirs = next(each.symbol for each in other_plan.launches if each.symbol.endswith("_0")).encode()
    assert len(ours) == len(theirs)
    with watched(kernels), refused("a cubin has another kernel under the name of ours"):
        bind(replace(artifact, cubin=other.cubin.replace(theirs, ours)), plan, problem)
    bind(artifact, plan, problem)


# Files


@pytest.mark.parametrize("count", [1, 2, 3])
def test_killed_between_write_and_rename(kernels: Kernels, tmp_path: Path, count: int) -> None:
    """A folder with half of another kernel launches the old one or nothing, and is repaired by the next write."""
    case = SMALL.replace(direction="forward", num_splits_key=None)
    arrays = case.arrays()
    expected = check.attend(case, arrays, kernels)
    build = next(plan.build for plan in plans_of(case) if is_there(kernels, plan))
    Folder(tmp_path).put(kernels(build))
    process = start("killed", kernels, tmp_path, count)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    for attempt in ("after the kill", "after the next write"):
        folder = Folder(tmp_path)  # equal to the one before: a call of these arrays is prepared anew
        if attempt == "after the kill" and count > 1:
            with refused("a process is killed while it writes other kernels to a folder"):
                folder(build)
        else:
            found = check.attend(case, arrays, lambda wanted, from_=folder: from_(wanted))
            assert differing(expected, found) == [], attempt
        Folder(tmp_path).put(kernels(build))


def plans_of(case: Case) -> list[Plan]:
    gpu = device_memory.driver.device(0)
    return planner.plans_on(case.problem(), gpu.compute_capability, gpu.num_sms)


def is_there(kernels: Kernels, plan: Plan) -> bool:
    try:
        kernels(plan.build)
    except AttentionError:
        return False
    return True


@pytest.mark.expected_seconds(8)
def test_processes_that_race_for_one_folder_and_one_cache(kernels: Kernels, tmp_path: Path) -> None:
    """Two processes write the same kernels, read them and launch them, again and again: all results are right."""
    fault = FAULTS["processes write the same kernels or bundle at once"]
    assert fault.error == faults_table.NO_ERROR
    (tmp_path / "cache").mkdir(mode=0o700)
    begin = time.time() + 5
    processes = [start("race", kernels, tmp_path, begin) for _ in range(2)]
    expected = ("sha256", fault_programs.digest(check.attend(CASE, CASE.arrays(), kernels)))
    for process in processes:
        assert finish(process) == [expected] * 2 * fault_programs.ROUNDS


# Values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_output"])
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_values_that_are_not_finite(family: str, name: str, value: float, on_this_gpu: None, kernels: Kernels) -> None:
    """One such value in a row of one head. Other heads keep their bits. Rows of the head that do not depend on it keep
    theirs, or are NaN where a weight of 0 meets it. Rows that depend on it are NaN where the reference is."""
    assert FAULTS["NaN or infinity in operands"].error == faults_table.NO_ERROR
    case = suite.LAUNCHERS["backward"]
    arrays = case.arrays()
    given = operands_of(case, arrays)
    wrong = {other: array.copy() for other, array in arrays.items()}
    wrong[name][0, ROW, HEAD, CHANNEL] = value
    with np.errstate(all="ignore"):
        wrong_given = operands_of(case, wrong)
        truth = check.by_reference(case, wrong, "float64")
    not_numbers = np.flatnonzero(np.isnan(wrong_given["logsumexp"][0, HEAD]))
    last = not_numbers.max(initial=-1) if name == "key" else truth["output"].shape[1]
    for direction in ("forward", "backward"):
        if direction == "forward" and name == "grad_output":
            continue
        problem = case.replace(direction=direction).problem()
        of_family = check.only_family(kernels, family, direction)
        with device_memory.guarded_launch(problem, given, of_family) as guarded:
            right = guarded.run()
        with device_memory.guarded_launch(problem, wrong_given, of_family) as guarded:
            found = guarded.run()
        for result in found:
            compare(result, name, right[result], found[result], truth[result], last)


def compare(result: str, name: str, right: Array, found: Array, truth: Array, last: int) -> None:
    """Compares a result, with and without the value in tensor `name`, and the reference with it.

    last: the last query whose row is NaN. The reference has NaN for keys beyond it too, which that query does not see.
    """
    if result == "logsumexp":  # (batch, heads, rows)
        right, found, truth = (np.moveaxis(array, 1, 2)[..., None] for array in (right, found, truth))
    other = 1 - HEAD
    assert same_bits(found[:, :, other], right[:, :, other]), f"{result}: the other head changed"
    wide, before = (array[0, :, HEAD].astype(np.float64) for array in (found, right))
    changed = (wide != before).any(axis=1)
    queries, is_of_keys = truth.shape[1], result in ("grad_key", "grad_value")
    numbers = np.arange(queries)
    # Causal: a query depends on keys up to its own number, a key's gradient on queries from its own number on.
    if name in ("query", "grad_output"):
        depends = numbers <= ROW if is_of_keys else numbers == ROW
    else:
        depends = numbers >= 0 if is_of_keys else numbers >= ROW
    assert np.isnan(wide[changed & ~depends]).any(axis=1).all(), f"{result}: a row that does not depend on it changed"
    missing = depends & np.isnan(truth[0, :, HEAD]).any(axis=1)
    if is_of_keys:
        missing &= numbers <= last
    assert not np.isfinite(wide[missing]).all(axis=1).any(), f"{result}: a row that depends on it is finite"
    if (result, name) == ("output", "query"):
        assert missing.sum() == 1
        assert changed.sum() == 1, "the value reaches its row alone"
