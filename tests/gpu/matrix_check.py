"""Matrix check: runs a case of the matrix through the public functions, at the tolerances of xFormers and PyTorch.

xFormers: |found - truth| <= atol + rtol |truth|, with numbers by dtype. PyTorch: the numbers are the errors of an eager
implementation in that dtype, times a factor for each result. The truth is the reference in float64.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.problem.spec import GRADIENTS
from cutlass_py_attn.problem.tensors import OPERANDS, Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray, numpy_dtype
from cutlass_py_attn.score_terms.dropout import Dropout, keep_mask
from cutlass_py_attn.testing.check import Kernels
from cutlass_py_attn.testing.device_memory import GuardedBuffer
from cutlass_py_attn.testing.guarded_check import by_reference
from tests.cases.matrix import MatrixCase

Array = npt.NDArray[Any]
Bounds = tuple[float, float]  # atol, rtol

FORWARD: Final = {"float16": (4e-3, 4e-4), "bfloat16": (2e-2, 5e-3), "float32": (3e-4, 2e-5)}
BACKWARD: Final = {"float16": (0.2, 2e-2), "bfloat16": (0.9, 0.1), "float32": (9e-4, 1e-4)}
LOGSUMEXP: Final = (2e-4, 0.0)
DROPPED_FORWARD: Final = (2e-4, 1e-5)  # in float32
LEAST: Final = {"float16": (1e-3, 1e-3), "bfloat16": (1e-3, 1.6e-2), "float32": (1e-5, 1.3e-6)}
SMALL_MASK: Final = 512  # elements: the gradient of a mask this small has a larger tolerance


class OnDevice:
    """An array in a guarded buffer with any strides and `__cuda_array_interface__`. values: None for an output."""

    def __init__(self, tensor: Tensor, values: Array | None = None) -> None:
        self.tensor = tensor
        self.dtype = numpy_dtype(tensor.dtype)
        self.buffer = GuardedBuffer(tensor, values)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.tensor.shape,
            "typestr": self.dtype.str,
            "data": (self.buffer.address, False),
            "strides": tuple(step * self.dtype.itemsize for step in self.tensor.strides),
            "version": 3,
        }

    def close(self) -> None:
        """Frees the memory."""
        self.buffer.close()


def on_host(array: Any) -> Array:
    """Returns the values; AssertionError if a guard of the buffer changed."""
    if isinstance(array, OnDevice):
        return array.buffer.read()
    if not isinstance(array, DeviceArray):
        return np.asarray(array)
    found = np.empty(array.shape, numpy_dtype(array.dtype))
    if found.nbytes:
        driver.copy_to_host(found.ctypes.data, array.pointer, found.nbytes, 0)
        driver.synchronise(0)
    return found


def spread(case: MatrixCase, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns the arrays of the case's core, repeated for all its batch elements and heads."""
    if case == case.core:
        return arrays
    core = case.core
    batch, heads = np.arange(case.spec.batch) % core.spec.batch, np.arange(case.spec.num_heads) % core.spec.num_heads
    return {name: array[:, :, heads][batch] for name, array in arrays.items()}


def options_of(case: MatrixCase, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of both directions. given: the operands by name, of any library."""
    shape, numbers = case.shape, (case.philox_seed, case.philox_offset)
    if case.spec.philox_on_device:
        numbers = given["philox_seed"], given["philox_offset"]
    sequences = None
    if case.spec.sequences:
        bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
        sequences = VariableLength(*bounds, shape.num_queries, shape.num_keys, given.get("seqused_k"))
    return {
        "mask": case.spec.mask,
        "scale": case.spec.scale,
        "bias": given.get("bias"),
        "dropout": Dropout(case.spec.dropout_p, *numbers) if case.spec.dropout_p else None,
        "sequences": sequences,
    }


def attend(case: MatrixCase, arrays: dict[str, Array], kernels: Kernels, **more: Any) -> dict[str, Array]:
    """Returns everything that the case writes, by name; strided operands and results are in guarded buffers."""
    with ExitStack() as stack:
        given, targets = (arrays, {}) if case.is_dense else _on_device(case, arrays, stack)
        found = results(case, given, targets, kernels=kernels, **more)
        assert all(found[name] is target for name, target in targets.items())
        host = {name: on_host(array) for name, array in found.items()}
        for array in given.values():
            on_host(array)
        return host


def results(case: MatrixCase, given: dict[str, Any], targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns everything that the case writes, in the operands' library."""
    options = options_of(case, given) | more
    query, key, value = (given[name] for name in OPERANDS)
    output, logsumexp = attention_forward(query, key, value, out=targets.get("output"), **options)
    found = {"output": output, "logsumexp": logsumexp}
    if case.direction == "backward":
        names = tuple(GRADIENTS[letter] for letter in case.spec.gradients)
        gradients = attention_backward(
            given["grad_output"],
            query,
            key,
            value,
            output,
            logsumexp,
            gradients=names,
            out=Gradients(**{name: targets.get(f"grad_{name}") for name in names}),
            deterministic=case.spec.deterministic,
            num_splits_key=case.spec.num_splits_key,
            **options,
        )
        found |= {f"grad_{name}": getattr(gradients, name) for name in names}
    return found


def _on_device(case: MatrixCase, arrays: dict[str, Array], stack: ExitStack) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the operands and arrays for the results on the device, in the problem's layouts."""
    problem = case.problem()
    tensors = problem.tensors() | problem.vectors()
    written = ("output", *(f"grad_{name}" for name in problem.gradients))

    def put(name: str, values: Array | None) -> OnDevice:
        return stack.enter_context(closing(OnDevice(tensors[name], values)))

    given = {name: put(name, array) for name, array in arrays.items() if name in tensors}
    return given, {name: put(name, None) for name in written}


def expect_close(case: MatrixCase, name: str, found: Array, truth: Array, bounds: Bounds) -> None:
    """Raises AssertionError with the worst element unless all errors are at most atol + rtol |truth|.

    truth: that of the core.
    """
    axis = 1 if name in ("logsumexp", "grad_bias") else 2
    shape = list(truth.shape)
    if case.batch_period:
        shape[0] = case.spec.batch
    if case.head_period:
        shape[axis] = case.spec.num_heads
        truth = np.take(truth, np.arange(case.spec.num_heads) % truth.shape[axis], axis)
    assert found.shape == tuple(shape), f"{name} has shape {found.shape}, must have {tuple(shape)}: {case.line}"
    atol, rtol = bounds
    limit = atol + rtol * np.abs(np.where(np.isfinite(truth), truth, 0.0))
    for start in range(0, len(found), max(len(truth), 1)):
        part = found[start : start + len(truth)].astype(np.float64)
        wanted, allowed = truth[: len(part)], limit[: len(part)]
        with np.errstate(invalid="ignore"):
            if (np.abs(part - wanted) <= allowed).all():
                continue
            error = np.where(part == wanted, 0.0, np.abs(part - wanted))  # equal infinities are equal
        if (error <= allowed).all():
            continue
        ratio = np.nan_to_num(error / allowed, nan=np.inf)
        place = np.unravel_index(int(ratio.argmax()), ratio.shape)
        raise AssertionError(
            f"{name}: error {ratio[place]:.3g} times the allowed one at {tuple(map(int, place))} from batch {start} "
            f"on: {part[place]} instead of {wanted[place]}; {case.line}"
        )


def expect_xformers(case: MatrixCase, kernels: Kernels) -> dict[str, Array]:
    """Runs the case, compares every result, and returns the results."""
    arrays = case.core.arrays()
    found = attend(case, spread(case, arrays), kernels)
    truth = by_reference(case.core, arrays, "float64")
    for name, array in found.items():
        expect_close(case, name, array, truth[name], xformers_bounds(case, name))
    return found


def xformers_bounds(case: MatrixCase, name: str) -> Bounds:
    """Returns the tolerance of xFormers for this result."""
    if name == "logsumexp":
        return LOGSUMEXP
    atol, rtol = (FORWARD if name == "output" else BACKWARD)[case.spec.dtype]
    if not case.spec.dropout_p:
        return atol, rtol
    if name == "output":  # 16-bit results grow with 1 / (1 - p), and so does their rounding
        kept = 1 - case.spec.dropout_p
        return DROPPED_FORWARD if case.spec.dtype == "float32" else (atol / kept, rtol / kept)
    if name in ("grad_query", "grad_key") and case.spec.dtype != "float32":
        return 2 * atol + 0.15, 2 * rtol
    return atol, rtol


def expect_pytorch(case: MatrixCase, kernels: Kernels, factors: dict[str, float] | None = None) -> dict[str, Array]:
    """Runs the case, compares every result, and returns the results. factors: by name; None for those of the case."""
    arrays = case.core.arrays()
    found = attend(case, spread(case, arrays), kernels)
    expect_by_pytorch(case, arrays, found, factors or factors_of(case))
    return found


def expect_by_pytorch(
    case: MatrixCase,
    arrays: dict[str, Array],
    found: dict[str, Array],
    factors: dict[str, float],
    logsumexp: Bounds = LOGSUMEXP,
) -> None:
    """Compares results of the case. arrays: those of the core."""
    truth, low = (by_reference(case.core, arrays, precision) for precision in ("float64", case.spec.dtype))
    for name, array in found.items():
        bounds = logsumexp if name == "logsumexp" else pytorch_bounds(case, truth[name], low[name], factors[name])
        expect_close(case, name, array, truth[name], bounds)


def pytorch_bounds(case: MatrixCase, truth: Array, low: Array, factor: float) -> Bounds:
    """Returns the tolerance of PyTorch, or less.

    PyTorch's largest relative error is unbounded if the truth is near zero, so the error relative to the norm of the
    whole tensor replaces it.
    """
    least_atol, least_rtol = LEAST[case.spec.dtype]
    error = low.astype(np.float64) - truth
    size = float(np.linalg.norm(truth))
    relative = float(np.linalg.norm(error)) / size if size else 0.0
    return factor * max(float(np.abs(error).max(initial=0.0)), least_atol), factor * max(relative, least_rtol)


def factors_of(case: MatrixCase) -> dict[str, float]:
    """Returns PyTorch's factors of the tolerance, by result."""
    if case.spec.bias:
        query, key = 2.0, 12.0 * (1.75 if case.spec.dropout_p else 1.0)
    else:
        query = 2.0 if case.spec.dropout_p else 1.5
        key = 8.0 * query
    mask = case.problem().bias
    bias = 22.0 if mask is not None and math.prod(mask.shape) <= SMALL_MASK else 12.0
    return {"output": 1.0, "grad_query": query, "grad_key": key, "grad_value": 1.0, "grad_bias": bias}


def expect_probe(case: MatrixCase, kernels: Kernels) -> dict[str, Array]:
    """Runs a dense probe. Its output and the gradient of its values must be zero exactly where dropout drops."""
    found = attend(case, case.arrays(), kernels)
    kept = kept_by(case)
    assert np.array_equal(shown(found["output"], case.spec.num_keys), kept), case.line
    if case.direction == "backward":
        assert np.array_equal(shown(found["grad_value"], case.spec.num_queries).swapaxes(2, 3), kept), case.line
    return found


def shown(weights: Array, count: int) -> Array:
    """Returns where a probe's result (batch, rows, heads, columns) is not zero, as (batch, heads, rows, count)."""
    return weights.transpose(0, 2, 1, 3)[..., :count] != 0


def kept_by(case: MatrixCase) -> Array:
    """Returns the weights that dropout keeps in a dense problem, bool (batch, heads, queries, keys)."""
    sizes = case.spec.shape.bias
    dropout = Dropout(case.spec.dropout_p, case.philox_seed, case.philox_offset)
    rows = math.prod(sizes[:3])  # the Philox stream runs over the rows of all batch elements and heads
    return keep_mask(dropout, 0, rows, case.spec.num_keys).reshape(sizes)


def binomial_p_values(trials: int, chance: float) -> Array:
    """Returns the exact two-sided binomial p-value of every count from 0 to `trials`."""
    counts = np.arange(trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    logarithms = factorials[-1] - factorials - factorials[::-1]
    logarithms += counts * math.log(chance) + (trials - counts) * math.log1p(-chance)
    order = np.argsort(logarithms)
    found = np.empty(trials + 1)
    found[order] = np.cumsum(np.exp(logarithms[order]))
    return found


def normal_p_value(count: int, trials: int, chance: float) -> float:
    """Returns the two-sided p-value of a count by the normal approximation, for many trials."""
    deviation = abs(count - trials * chance) / math.sqrt(trials * chance * (1 - chance))
    return math.erfc(deviation / math.sqrt(2))


def name_of(case: MatrixCase) -> str:
    """Returns the test id of a case: its line without direction, seed and inputs."""
    _, *words = case.line.split()
    return "_".join(word for word in words if not word.startswith(("seed=", "inputs=")))
