"""On the GPU: runs forward and backward through the public functions, judges them and times their kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cutlass_py_attn import attention, driver, inputs, judge, masks, reference
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.cli.on_host import relative_error
from cutlass_py_attn.launch import bind_problem
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import Problem, Shape
from cutlass_py_attn.reference import Array

SEED = 1
WARM_UPS = 3
REPEATS = 20
GRADIENTS = ("grad_query", "grad_key", "grad_value")

Kernels = Callable[[Build], Artifact]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of one pass and the useful work in it."""

    direction: str
    milliseconds: float
    tflops: float


@dataclass(frozen=True, slots=True)
class Result:
    """One dtype and mask: relative L2 errors by tensor, every verdict, and the times."""

    dtype: str
    mask: str
    errors: dict[str, float]
    verdicts: tuple[judge.Verdict, ...]
    timings: tuple[Timing, ...]

    @property
    def passed(self) -> bool:
        """Whether every rule holds."""
        return judge.passed(self.verdicts)


def run(shape: Shape, dtype: str, mask_name: str, kernels: Kernels) -> Result:
    """Forward and backward of one random problem: errors of its first and last head, times of the whole."""
    mask = masks.from_name(mask_name)
    query, key, value, grad_output = inputs.make("gaussian", shape, dtype, mask, SEED)
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
    errors, verdicts = _judged(arrays, found, dtype, mask)
    timings = tuple(
        _timed(Problem.dense(direction, shape, dtype, mask), arrays, kernels) for direction in ("forward", "backward")
    )
    return Result(dtype, mask_name, errors, tuple(verdicts), timings)


def _corner_heads(tensor: Array) -> Array:
    """The first head of the first batch and the last head of the last, as two batches of one head (BMHK)."""
    return np.stack([tensor[0, :, :1], tensor[-1, :, -1:]])


def _judged(
    arrays: dict[str, Array], found: dict[str, Array], dtype: str, mask: masks.Mask
) -> tuple[dict[str, float], list[judge.Verdict]]:
    names = ("query", "key", "value", "grad_output")
    truth, low = (_reference([_corner_heads(arrays[n]) for n in names], mask, kind) for kind in ("float64", dtype))
    logsumexp = np.stack([arrays["logsumexp"][0, :1], arrays["logsumexp"][-1, -1:]])
    verdicts = [judge.judge_logsumexp(logsumexp, truth["logsumexp"])]
    errors = {}
    for name, tensor in found.items():
        corner = _corner_heads(tensor)
        errors[name] = relative_error(corner, truth[name])
        verdicts += judge.judge(name, corner, truth[name], low[name])
    return errors, verdicts


def _reference(operands: list[Array], mask: masks.Mask, precision: str) -> dict[str, Array]:
    query, key, value, grad_output = operands
    output, logsumexp = reference.forward(query, key, value, mask=mask, precision=precision)
    gradients = reference.backward(grad_output, query, key, value, output, logsumexp, mask=mask, precision=precision)
    return {"output": output, "logsumexp": logsumexp, **dict(zip(GRADIENTS, gradients[:3], strict=True))}


def _timed(problem: Problem, arrays: dict[str, Array], kernels: Kernels) -> Timing:
    """Median over REPEATS launches with everything already on the device, by CUDA events."""
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
            start, end = driver.Event(), driver.Event()
            start.record(stream)
            bound(pointers, stream)
            end.record(stream)
            times.append(end.milliseconds_since(start))
    median = statistics.median(times)
    return Timing(problem.direction, median, problem.flops / median / 1e9)


@contextmanager
def _stream() -> Iterator[int]:
    stream = driver.new_stream()
    try:
        yield stream
    finally:
        driver.destroy_stream(stream)


@contextmanager
def _on_device(
    names: tuple[str, ...], problem: Problem, arrays: dict[str, Array], stream: int
) -> Iterator[dict[str, int]]:
    """Device copies of the arrays, and room for the tensors that have none."""
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
