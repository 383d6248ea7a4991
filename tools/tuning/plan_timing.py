"""Plan timing: times the candidates of one case on this machine's GPU, in rounds of one launch each."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bench import harness
from cutlass_py_attn.bench.timing import WARM_UPS, milliseconds, sm_clock_mhz
from cutlass_py_attn.errors import AttentionError, DriverError
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.runtime import arrays, driver, frameworks
from cutlass_py_attn.runtime.binding import Bound, bind, bind_problem
from cutlass_py_attn.testing import accuracy

Array = npt.NDArray[Any]
Results = dict[str, Array]

NAN_WORD: Final = 0xFFFFFFFF  # NaN in every float type


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of one candidate.

    objection: why it has no timing; "" if it has one
    median_ms: median time of a launch (ms); None without a timing
    spread: (slowest - fastest) / median of the rounds
    sm_clock_mhz: SM clock in the last round (MHz); None if the driver does not tell
    error: largest difference from the first candidate's result, as a fraction of the tolerance; 0 if bits are equal
    """

    objection: str = ""
    median_ms: float | None = None
    spread: float | None = None
    sm_clock_mhz: int | None = None
    error: float | None = None


def measure(
    case: ProblemSpec, direction: str, found: Mapping[str, Artifact], forward: harness.Kernels, rounds: int
) -> dict[str, Timing]:
    """Returns the timings by candidate; the first candidate is the reference for the results of the others.

    found: artifacts by candidate
    forward: the forward kernels whose results a backward reads

    A fault on the device ends the run, because nothing can be measured after it: DriverError names the candidate.
    """
    gpu = driver.device(0)
    with gpu.current(), ExitStack() as stack:
        stream = driver.create_stream()
        stack.callback(_behind_a_fault, driver.destroy_stream, stream)
        operands = harness.Operands(case, stream)
        if direction == "backward":
            before = bind_problem(case.problem("forward"), forward)
            before(operands.pointers(before.tensor_names), stream)
            driver.synchronise(stream)
        bounds, timings = _bound(case, direction, found, gpu.num_sms)
        size = max((bound.workspace_bytes for bound in bounds.values()), default=0)
        workspace = driver.allocate_now(size, "the workspace of the candidates") if size else None
        if workspace is not None:
            stack.callback(_behind_a_fault, driver.free_now, workspace)
        stack.callback(_behind_a_fault, driver.synchronise, stream)
        errors = _errors(bounds, operands, stream, workspace, direction)
        timings |= {name: Timing(why) for name, why in errors.items() if isinstance(why, str)}
        good = {name: bound for name, bound in bounds.items() if name not in timings}
        replays = {
            name: stack.enter_context(
                harness.captured(
                    bound, operands.pointers(bound.tensor_names), stream, workspace if bound.workspace_bytes else None
                )
            )
            for name, bound in good.items()
        }
        for name, timing in in_rounds(replays, stream, rounds).items():
            error = errors[name]
            assert isinstance(error, float)
            timings[name] = dataclasses.replace(timing, error=round(error, 4))
    return {name: timings[name] for name in found}


def in_rounds(replays: Mapping[str, Callable[[], None]], stream: int, rounds: int) -> dict[str, Timing]:
    """Runs each replay once a round, so that a drifting clock affects all equally; the first rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    clocks: dict[str, int | None] = {}
    for number in range(WARM_UPS + rounds):
        for name, replay in replays.items():
            elapsed = milliseconds(replay, stream)
            if number >= WARM_UPS:
                times[name].append(elapsed)
            if number == WARM_UPS + rounds - 1:
                clocks[name] = sm_clock_mhz()
    found = {}
    for name, each in times.items():
        median = statistics.median(each)
        spread = (max(each) - min(each)) / median
        found[name] = Timing(median_ms=round(median, 4), spread=round(spread, 4), sm_clock_mhz=clocks[name])
    return found


def _bound(
    case: ProblemSpec, direction: str, found: Mapping[str, Artifact], num_sms: int
) -> tuple[dict[str, Bound], dict[str, Timing]]:
    """Returns the candidates that bind on this GPU, and the reasons of the others."""
    problem = case.problem(direction)
    bounds, refused = {}, {}
    for name, artifact in found.items():
        try:
            bounds[name] = bind(artifact, planner.plan_of_build(problem, artifact.build, num_sms), problem)
        except AttentionError as error:
            refused[name] = Timing(f"not bound: {error}")
    return bounds, refused


def _errors(
    bounds: Mapping[str, Bound], operands: harness.Operands, stream: int, workspace: int | None, direction: str
) -> dict[str, float | str]:
    """Returns for each candidate the difference from the first one's result, or what is wrong with its own."""
    names = ("output", "logsumexp") if direction == "forward" else tuple(f"grad_{name}" for name in OPERANDS)
    found: dict[str, float | str] = {}
    first: Results | None = None
    for candidate, bound in bounds.items():
        written = [name for name in names if name in bound.tensor_names]
        for name in written:
            _fill(operands.arrays[name], stream)
        try:
            bound(operands.pointers(bound.tensor_names), stream, workspace=workspace if bound.workspace_bytes else None)
            driver.synchronise(stream)
        except DriverError as error:
            raise DriverError(f"candidate {candidate}: {error}; leave it out with --tiles") from error
        results = {name: read(operands.arrays[name], stream) for name in written}
        found[candidate] = disagreement(results, first)
        if first is None and found[candidate] == 0:
            first = results
    return found


def disagreement(results: Results, first: Results | None) -> float | str:
    """Returns the largest difference as a fraction of the tolerance, or a text if it is more than 1.

    first: results of the first candidate; None to check only that every element is a number

    The tolerance allows an error of half a unit in the last place of the first candidate's elements, because a rounding
    may go either way in both results.
    """
    broken = [name for name, values in results.items() if np.isnan(values).any()]
    if broken:
        return f"wrong: {', '.join(broken)} has elements that are no numbers"
    if first is None:
        return 0.0
    verdicts: list[accuracy.CheckResult] = []
    for name, values in results.items():
        if values.tobytes() == first[name].tobytes():
            continue
        if name == "logsumexp":
            verdicts.append(accuracy.check_logsumexp(values, first[name]))
            continue
        truth = first[name].astype(np.float64)
        rounded = truth * (1 + accuracy.FLOORS[values.dtype.name].ulp / 2)
        verdicts += accuracy.check(name, values, truth, rounded)
    worst = max(verdicts, key=lambda verdict: verdict.worst, default=None)
    if worst is None or worst.worst <= 1:
        return worst.worst if worst else 0.0
    times, place = f"{worst.worst:.1f} times as far from the first as allowed", f"{worst.rule}, {worst.location}"
    return f"wrong: {worst.tensor} is {times} ({place})"


def read(array: arrays.DeviceArray, stream: int) -> Array:
    """Returns the first head of the first batch entry and the last head of the last one.

    Shape (2, rows, 1, columns), or (2, 1, rows) of the logsumexp.
    """
    size = array.nbytes // array.shape[0]
    entry = np.empty(array.shape[1:], frameworks.numpy_dtype(array.dtype))
    axis = entry.ndim - 2  # of the heads: (rows, heads, columns) or (heads, rows)
    found = []
    for number, head in ((0, 0), (array.shape[0] - 1, entry.shape[axis] - 1)):
        driver.copy_to_host(entry.ctypes.data, array.pointer + number * size, size, stream)
        driver.synchronise(stream)
        found.append(np.take(entry, [head], axis))
    return np.stack(found)


def _behind_a_fault(release: Callable[[int], None], handle: int) -> None:
    """Releases a resource; after a fault the release fails too, but the fault is the error to report."""
    with contextlib.suppress(DriverError):
        release(handle)


def _fill(array: arrays.DeviceArray, stream: int) -> None:
    """Writes NaN to every element, so that an element that the kernel does not write is found."""
    words = array.nbytes // 4
    driver.memset_words(array.pointer, words * 4, NAN_WORD, words, 1, stream)
