"""Run on the GPU: runs forward and backward through the public functions, checks the results, times the kernels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cutlass_py_attn.api import attention
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bench.harness import Operands
from cutlass_py_attn.cli.run_cpu import relative_error
from cutlass_py_attn.cli.selection import directions_of
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec, SequenceLengths
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.reference.numpy_reference import Array
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.binding import Bound, bind_problem
from cutlass_py_attn.testing import accuracy, guarded_check, inputs
from cutlass_py_attn.testing.cases import Case

SEED = 1
WARM_UPS = 3
REPEATS = 20
# What `run_problem` compares with float64 at most.
CHECKED_LENGTH = 1024
CHECKED_SEQUENCES = 4
GRADIENTS = ("grad_query", "grad_key", "grad_value")

Kernels = Callable[[Build], Artifact]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one pass, and its rate of useful work."""

    direction: str
    milliseconds: float
    tflops: float


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One direction of a problem.

    problem: its name. checked: the name of what was compared with float64, which has smaller sizes.
    ratios: error / allowed of each result.
    """

    problem: str
    checked: str
    symbol: str
    ratios: dict[str, float]
    timing: Timing

    @property
    def passed(self) -> bool:
        """Whether every result is within its tolerance; NaN is not."""
        return all(ratio <= 1 for ratio in self.ratios.values())


@dataclass(frozen=True, slots=True)
class Result:
    """One dtype and mask: relative L2 errors by tensor, every accuracy check, and the times."""

    dtype: str
    mask: str
    errors: dict[str, float]
    checks: tuple[accuracy.CheckResult, ...]
    timings: tuple[Timing, ...]

    @property
    def passed(self) -> bool:
        """Whether every rule holds."""
        return accuracy.passed(self.checks)


def run(spec: ProblemSpec, mask_name: str, kernels: Kernels) -> Result:
    """Runs forward and backward on gaussian inputs; returns errors of the first and last head, and times of all."""
    dtype, mask = spec.dtype, spec.mask
    query, key, value, grad_output = inputs.make("gaussian", spec.shape, dtype, mask, SEED)
    operands = {"query": query, "key": key, "value": value}
    output, logsumexp = attention.attention_forward(query, key, value, mask=mask, kernels=kernels)
    gradients = attention.attention_backward(
        grad_output, query, key, value, output, logsumexp, mask=mask, kernels=kernels
    )
    found = {
        "output": output,
        **dict(zip(GRADIENTS, (gradients.query, gradients.key, gradients.value), strict=True)),
    }
    arrays = {**operands, "grad_output": grad_output, "output": output, "logsumexp": logsumexp}
    errors, checks = _check(arrays, found, dtype, mask)
    timings = tuple(_timed(spec.problem(direction), arrays, kernels) for direction in DIRECTIONS)
    return Result(dtype, mask_name, errors, tuple(checks), timings)


def run_problem(spec: ProblemSpec, kernels: Kernels) -> Iterator[ProblemResult]:
    """Checks a problem with any features at reduced sizes, and times it in full; yields a result for each direction."""
    reduced = reduced_sizes(spec)
    ratios = {direction: _ratios(Case(direction, reduced), kernels) for direction in directions_of(spec)}
    with driver.device(0).current(), _stream() as stream:
        operands = Operands(spec, stream)
        for direction, found in ratios.items():
            bound = bind_problem(spec.problem(direction), kernels)
            milliseconds = _median(bound, operands.pointers(bound.tensor_names), stream)
            timing = Timing(direction, milliseconds, spec.flops(direction) / milliseconds / 1e9)
            yield ProblemResult(spec.name, reduced.name, bound.plan.symbol, found, timing)


def reduced_sizes(spec: ProblemSpec) -> ProblemSpec:
    """Returns the problem with one group of heads, one batch element or a few sequences, and lengths up to a limit."""
    return spec.replace(
        sequences=tuple(map(_reduced_lengths, spec.sequences[:CHECKED_SEQUENCES])),
        batch=1,
        num_queries=min(spec.num_queries, CHECKED_LENGTH),
        num_keys=min(spec.num_keys, CHECKED_LENGTH),
        num_heads=spec.num_heads // max(spec.num_heads_key, 1),
        num_heads_key=1,
    )


def _reduced_lengths(lengths: SequenceLengths) -> SequenceLengths:
    used = None if lengths.used_keys is None else min(lengths.used_keys, CHECKED_LENGTH)
    return SequenceLengths(min(lengths.num_queries, CHECKED_LENGTH), min(lengths.num_keys, CHECKED_LENGTH), used)


def _ratios(case: Case, kernels: Kernels) -> dict[str, float]:
    """Returns error / allowed of each result; infinity for all of them if a kernel wrote outside of its tensors."""
    expected = guarded_check.expect(case)
    try:
        return guarded_check.ratios(case, expected, guarded_check.launch(case, expected, kernels).outputs)
    except AssertionError:
        return dict.fromkeys(guarded_check.results_of(case), math.inf)


def _corner_heads(tensor: Array) -> Array:
    """Returns the first head of the first batch element and the last head of the last one, (2, rows, 1, channels)."""
    return np.stack([tensor[0, :, :1], tensor[-1, :, -1:]])


def _check(
    arrays: dict[str, Array], found: dict[str, Array], dtype: str, mask: masks.Mask
) -> tuple[dict[str, float], list[accuracy.CheckResult]]:
    names = ("query", "key", "value", "grad_output")
    truth, low = (_reference([_corner_heads(arrays[n]) for n in names], mask, kind) for kind in ("float64", dtype))
    logsumexp = np.stack([arrays["logsumexp"][0, :1], arrays["logsumexp"][-1, -1:]])
    checks = [accuracy.check_logsumexp(logsumexp, truth["logsumexp"])]
    errors = {}
    for name, tensor in found.items():
        corner = _corner_heads(tensor)
        errors[name] = relative_error(corner, truth[name])
        checks += accuracy.check(name, corner, truth[name], low[name])
    return errors, checks


def _reference(operands: list[Array], mask: masks.Mask, precision: str) -> dict[str, Array]:
    query, key, value, grad_output = operands
    output, logsumexp = numpy_reference.forward(query, key, value, mask=mask, precision=precision)
    gradients = numpy_reference.backward(
        grad_output, query, key, value, output, logsumexp, mask=mask, precision=precision
    )
    return {"output": output, "logsumexp": logsumexp, **dict(zip(GRADIENTS, gradients[:3], strict=True))}


def _timed(problem: Problem, arrays: dict[str, Array], kernels: Kernels) -> Timing:
    """Returns the median over REPEATS launches with all operands on the device, by CUDA events."""
    bound = bind_problem(problem, kernels)
    with (
        bound.device.current(),
        _stream() as stream,
        _on_device(bound.tensor_names, problem, arrays, stream) as pointers,
    ):
        median = _median(bound, pointers, stream)
    return Timing(problem.direction, median, problem.flops / median / 1e9)


def _median(bound: Bound, pointers: Mapping[str, int], stream: int) -> float:
    """Returns the median milliseconds of REPEATS launches, by CUDA events."""
    for _ in range(WARM_UPS):
        bound(pointers, stream)
    times = []
    for _ in range(REPEATS):
        timer = driver.StreamTimer(stream)
        timer.start()
        bound(pointers, stream)
        timer.stop()
        times.append(timer.milliseconds())
    return statistics.median(times)


@contextmanager
def _stream() -> Iterator[int]:
    stream = driver.create_stream()
    try:
        yield stream
    finally:
        driver.destroy_stream(stream)


@contextmanager
def _on_device(
    names: tuple[str, ...], problem: Problem, arrays: dict[str, Array], stream: int
) -> Iterator[dict[str, int]]:
    """Yields addresses: device copies of the arrays, and zeros for the tensors without one."""
    shapes = {name: tensor.shape for name, tensor in problem.tensors().items()}
    pointers: dict[str, int] = {}
    try:
        for name in names:
            array = arrays.get(name)
            like = arrays["query"].dtype
            host = np.zeros(shapes[name], like) if array is None else np.ascontiguousarray(array)
            pointers[name] = driver.allocate_now(host.nbytes, name)
            driver.copy_to_device(pointers[name], host.ctypes.data, host.nbytes, stream)
            driver.synchronise(stream)
        yield pointers
    finally:
        for address in pointers.values():
            driver.free_now(address)
