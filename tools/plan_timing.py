"""Plan timing: the candidates of one case on this machine's GPU, in rounds in which each has its turn."""

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

from cutlass_py_attn import arrays, bench, driver, guests, judge, planner
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bench_cases import Case
from cutlass_py_attn.bench_timing import WARM_UPS, milliseconds, sm_clock_mhz
from cutlass_py_attn.errors import AttentionError, DriverError
from cutlass_py_attn.launch import Bound, bind, bind_problem
from cutlass_py_attn.problem import OPERANDS

Array = npt.NDArray[Any]
Results = dict[str, Array]

NAN_WORD: Final = 0xFFFFFFFF  # NaN in every float type


@dataclass(frozen=True, slots=True)
class Timing:
    """What one candidate gave; `objection` says why it has no numbers.

    spread: (slowest - fastest) / median of the rounds. error: the largest difference from the first candidate's result,
    of what the judge allows; 0 where every bit is the same.
    """

    objection: str = ""
    median_ms: float | None = None
    spread: float | None = None
    sm_clock_mhz: int | None = None
    error: float | None = None


def measure(
    case: Case, direction: str, found: Mapping[str, Artifact], forward: bench.Kernels, rounds: int
) -> dict[str, Timing]:
    """Timings by candidate, the first being what the others' results are compared with.

    found: artifacts by candidate. forward: gives the kernels whose results a backward reads. A fault on the device ends
    the run: its DriverError names the candidate, for nothing can be measured behind it.
    """
    gpu = driver.device(0)
    with gpu.current(), ExitStack() as stack:
        stream = driver.new_stream()
        stack.callback(_behind_a_fault, driver.destroy_stream, stream)
        operands = bench.Operands(case, stream)
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
                bench.captured(
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
    """Each replay once a round, so that a clock that drifts drifts for all; the first rounds warm up."""
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
    case: Case, direction: str, found: Mapping[str, Artifact], num_sms: int
) -> tuple[dict[str, Bound], dict[str, Timing]]:
    """The candidates that this GPU takes, and why it does not take the others."""
    problem = case.problem(direction)
    bounds, refused = {}, {}
    for name, artifact in found.items():
        try:
            bounds[name] = bind(artifact, planner._plan(problem, artifact.build, num_sms), problem)
        except AttentionError as error:
            refused[name] = Timing(f"not bound: {error}")
    return bounds, refused


def _errors(
    bounds: Mapping[str, Bound], operands: bench.Operands, stream: int, workspace: int | None, direction: str
) -> dict[str, float | str]:
    """Of each candidate the difference from the first one's result, or what is wrong with its own."""
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
    """The largest difference of what the judge allows, a text where it is more; first None: only whether every element
    is a number.

    The judge's yardstick is an error of half a unit in the last place of the first one's elements: both results stand
    where a rounding may have gone the other way.
    """
    broken = [name for name, values in results.items() if np.isnan(values).any()]
    if broken:
        return f"wrong: {', '.join(broken)} has elements that are no numbers"
    if first is None:
        return 0.0
    verdicts: list[judge.Verdict] = []
    for name, values in results.items():
        if values.tobytes() == first[name].tobytes():
            continue
        if name == "logsumexp":
            verdicts.append(judge.judge_logsumexp(values, first[name]))
            continue
        truth = first[name].astype(np.float64)
        rounded = truth * (1 + judge.FLOORS[values.dtype.name].ulp / 2)
        verdicts += judge.judge(name, values, truth, rounded)
    worst = max(verdicts, key=lambda verdict: verdict.worst, default=None)
    if worst is None or worst.worst <= 1:
        return worst.worst if worst else 0.0
    times, place = f"{worst.worst:.1f} times as far from the first as allowed", f"{worst.rule}, {worst.where}"
    return f"wrong: {worst.tensor} is {times} ({place})"


def read(array: arrays.DeviceArray, stream: int) -> Array:
    """The first head of the first batch entry and the last of the last: [2, rows, 1, columns], of the logsumexp
    [2, 1, rows]."""
    size = array.nbytes // array.shape[0]
    entry = np.empty(array.shape[1:], guests.numpy_dtype(array.dtype))
    axis = entry.ndim - 2  # of the heads: [rows, heads, columns] or [heads, rows]
    found = []
    for number, head in ((0, 0), (array.shape[0] - 1, entry.shape[axis] - 1)):
        driver.copy_to_host(entry.ctypes.data, array.pointer + number * size, size, stream)
        driver.synchronise(stream)
        found.append(np.take(entry, [head], axis))
    return np.stack(found)


def _behind_a_fault(release: Callable[[int], None], handle: int) -> None:
    """Give something back; behind a fault that fails too, and the fault is the error to report."""
    with contextlib.suppress(DriverError):
        release(handle)


def _fill(array: arrays.DeviceArray, stream: int) -> None:
    """NaN in every element, so that one which is not written is found."""
    words = array.nbytes // 4
    driver.fill_words(array.pointer, words * 4, NAN_WORD, words, 1, stream)
