"""Run on the GPU: runs forward and backward through the public functions, checks the results, times the kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cutlass_py_attn.api import attention
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.cli.run_cpu import relative_error
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.reference.numpy_reference import Array
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.launch import bind_problem
from cutlass_py_attn.testing import accuracy, inputs

SEED = 1
WARM_UPS = 3
REPEATS = 20
GRADIENTS = ("grad_query", "grad_key", "grad_value")

Kernels = Callable[[Build], Artifact]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one pass, and its rate of useful work."""

    direction: str
    milliseconds: float
    tflops: float


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


def run(spec: ProblemSpec, kernels: Kernels) -> Result:
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
    return Result(dtype, mask.name, errors, tuple(checks), timings)


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
        for _ in range(WARM_UPS):
            bound(pointers, stream)
        times = []
        for _ in range(REPEATS):
            timer = driver.StreamTimer(stream)
            timer.start()
            bound(pointers, stream)
            timer.stop()
            times.append(timer.milliseconds())
    median = statistics.median(times)
    return Timing(problem.direction, median, problem.flops / median / 1e9)


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
