"""Matrix check: runs a case of matrix.py through the public functions, and compares at the two suites' tolerances.

xFormers: |found - truth| <= atol + rtol |truth| with numbers by dtype. PyTorch: those numbers are what an eager
implementation of that dtype loses, times a factor by result. The truth is the reference in float64.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import driver
from cutlass_py_attn.arrays import DeviceArray, numpy_dtype
from cutlass_py_attn.attention import Gradients, attention_backward, attention_forward
from cutlass_py_attn.options import VariableLength
from cutlass_py_attn.philox import Dropout, keep_mask
from cutlass_py_attn.problem import OPERANDS, Tensor
from tests.gpu.check import Kernels
from tests.gpu.drawn import NAMES
from tests.gpu.drawn_check import by_reference
from tests.gpu.matrix import Case
from tests.gpu.memory import Buffer

Array = npt.NDArray[Any]
Bounds = tuple[float, float]  # atol, rtol

FORWARD: Final = {"float16": (4e-3, 4e-4), "bfloat16": (2e-2, 5e-3), "float32": (3e-4, 2e-5)}
BACKWARD: Final = {"float16": (0.2, 2e-2), "bfloat16": (0.9, 0.1), "float32": (9e-4, 1e-4)}
LOGSUMEXP: Final = (2e-4, 0.0)
DROPPED_FORWARD: Final = (2e-4, 1e-5)  # in float32
LEAST: Final = {"float16": (1e-3, 1e-3), "bfloat16": (1e-3, 1.6e-2), "float32": (1e-5, 1.3e-6)}
SMALL_MASK: Final = 512  # elements: the gradient of so small a mask may be further off


class OnDevice:
    """An array in a guarded buffer, with any strides, as `__cuda_array_interface__` shows it; no values: an output."""

    def __init__(self, tensor: Tensor, values: Array | None = None) -> None:
        self.tensor = tensor
        self.dtype = numpy_dtype(tensor.dtype)
        self.buffer = Buffer(tensor, values)

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
        """Give the memory back."""
        self.buffer.close()


def on_host(array: Any) -> Array:
    """The values; AssertionError where something around a guarded buffer has changed."""
    if isinstance(array, OnDevice):
        return array.buffer.read()
    if not isinstance(array, DeviceArray):
        return np.asarray(array)
    found = np.empty(array.shape, numpy_dtype(array.dtype))
    if found.nbytes:
        driver.copy_to_host(found.ctypes.data, array.pointer, found.nbytes, 0)
        driver.synchronise(0)
    return found


def spread(one: Case, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays of a case's core, repeated for all its batches and heads."""
    if one == one.core:
        return arrays
    core = one.core
    batch, heads = np.arange(one.batch) % core.batch, np.arange(one.heads) % core.heads
    return {name: array[:, :, heads][batch] for name, array in arrays.items()}


def options_of(one: Case, given: dict[str, Any]) -> dict[str, Any]:
    """What both directions take; `given` are the operands by name, of any library."""
    shape, numbers = one.shape, (one.philox_seed, one.philox_offset)
    if one.on_device:
        numbers = given["philox_seed"], given["philox_offset"]
    sequences = None
    if one.lengths:
        bounds = given["cu_seqlens_q"], given["cu_seqlens_k"]
        sequences = VariableLength(*bounds, shape.num_queries, shape.num_keys, given.get("seqused_k"))
    return {
        "mask": one.mask_object,
        "scale": one.scale or None,
        "bias": given.get("bias"),
        "dropout": Dropout(one.dropout_p, *numbers) if one.dropout_p else None,
        "sequences": sequences,
    }


def attend(one: Case, arrays: dict[str, Array], kernels: Kernels, **more: Any) -> dict[str, Array]:
    """Everything that the case writes, by name; strided operands and results lie in guarded buffers."""
    with ExitStack() as stack:
        given, targets = (arrays, {}) if one.is_dense else _placed(one, arrays, stack)
        found = results(one, given, targets, kernels=kernels, **more)
        assert all(found[name] is target for name, target in targets.items())
        host = {name: on_host(array) for name, array in found.items()}
        for array in given.values():
            on_host(array)
        return host


def results(one: Case, given: dict[str, Any], targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The same in the operands' library."""
    options = options_of(one, given) | more
    query, key, value = (given[name] for name in OPERANDS)
    output, logsumexp = attention_forward(query, key, value, out=targets.get("output"), **options)
    found = {"output": output, "logsumexp": logsumexp}
    if one.direction == "backward":
        names = tuple(NAMES[letter] for letter in one.grads)
        gradients = attention_backward(
            given["grad_output"],
            query,
            key,
            value,
            output,
            logsumexp,
            gradients=names,
            out=Gradients(**{name: targets.get(f"grad_{name}") for name in names}),
            deterministic=one.deterministic,
            num_splits_key=one.splits or None,
            **options,
        )
        found |= {f"grad_{name}": getattr(gradients, name) for name in names}
    return found


def _placed(one: Case, arrays: dict[str, Array], stack: ExitStack) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands and arrays for the results on the device, laid out as the problem says."""
    problem = one.problem()
    tensors = problem.tensors() | problem.vectors()
    written = ("output", *(f"grad_{name}" for name in problem.gradients))

    def put(name: str, values: Array | None) -> OnDevice:
        return stack.enter_context(closing(OnDevice(tensors[name], values)))

    given = {name: put(name, array) for name, array in arrays.items() if name in tensors}
    return given, {name: put(name, None) for name in written}


def expect_close(one: Case, name: str, found: Array, truth: Array, bounds: Bounds) -> None:
    """AssertionError with the worst element unless all are within atol + rtol |truth|; truth: that of the core."""
    axis = 1 if name in ("logsumexp", "grad_bias") else 2
    shape = list(truth.shape)
    if one.batch_period:
        shape[0] = one.batch
    if one.head_period:
        shape[axis] = one.heads
        truth = np.take(truth, np.arange(one.heads) % truth.shape[axis], axis)
    assert found.shape == tuple(shape), f"{name} has shape {found.shape}, must have {tuple(shape)}: {one.line}"
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
            f"{name}: error {ratio[place]:.3g} times what is allowed at {tuple(map(int, place))} from batch {start} "
            f"on: {part[place]} instead of {wanted[place]}; {one.line}"
        )


def expect_xformers(one: Case, kernels: Kernels) -> dict[str, Array]:
    """Run the case and compare every result; what was found."""
    arrays = one.core.arrays()
    found = attend(one, spread(one, arrays), kernels)
    truth = by_reference(one.core, arrays, "float64")
    for name, array in found.items():
        expect_close(one, name, array, truth[name], xformers_bounds(one, name))
    return found


def xformers_bounds(one: Case, name: str) -> Bounds:
    """What xFormers allows for this result."""
    if name == "logsumexp":
        return LOGSUMEXP
    atol, rtol = (FORWARD if name == "output" else BACKWARD)[one.dtype]
    if not one.dropout_p:
        return atol, rtol
    if name == "output":  # 16-bit results grow with 1 / (1 - p), and so does their rounding
        return DROPPED_FORWARD if one.dtype == "float32" else (atol / (1 - one.dropout_p), rtol / (1 - one.dropout_p))
    if name in ("grad_query", "grad_key") and one.dtype != "float32":
        return 2 * atol + 0.15, 2 * rtol
    return atol, rtol


def expect_pytorch(one: Case, kernels: Kernels, factors: dict[str, float] | None = None) -> dict[str, Array]:
    """Run the case and compare every result; what was found. factors: by name, those of the case otherwise."""
    arrays = one.core.arrays()
    found = attend(one, spread(one, arrays), kernels)
    expect_by_pytorch(one, arrays, found, factors or factors_of(one))
    return found


def expect_by_pytorch(
    one: Case,
    arrays: dict[str, Array],
    found: dict[str, Array],
    factors: dict[str, float],
    logsumexp: Bounds = LOGSUMEXP,
) -> None:
    """Compare results of the case; arrays: those of the core."""
    truth, low = (by_reference(one.core, arrays, precision) for precision in ("float64", one.dtype))
    for name, array in found.items():
        bounds = logsumexp if name == "logsumexp" else pytorch_bounds(one, truth[name], low[name], factors[name])
        expect_close(one, name, array, truth[name], bounds)


def pytorch_bounds(one: Case, truth: Array, low: Array, factor: float) -> Bounds:
    """What PyTorch allows, or less: its largest relative error has no bound where the truth is near zero, so here
    the error relative to the whole tensor's norm takes its place."""
    least_atol, least_rtol = LEAST[one.dtype]
    error = low.astype(np.float64) - truth
    size = float(np.linalg.norm(truth))
    relative = float(np.linalg.norm(error)) / size if size else 0.0
    return factor * max(float(np.abs(error).max(initial=0.0)), least_atol), factor * max(relative, least_rtol)


def factors_of(one: Case) -> dict[str, float]:
    """PyTorch's factors of the tolerance, by result."""
    if one.bias:
        query, key = 2.0, 12.0 * (1.75 if one.dropout_p else 1.0)
    else:
        query = 2.0 if one.dropout_p else 1.5
        key = 8.0 * query
    mask = one.problem().bias
    bias = 22.0 if mask is not None and math.prod(mask.shape) <= SMALL_MASK else 12.0
    return {"output": 1.0, "grad_query": query, "grad_key": key, "grad_value": 1.0, "grad_bias": bias}


def expect_probe(one: Case, kernels: Kernels) -> dict[str, Array]:
    """Run a dense probe: its output, and the gradient of its values, are zero exactly where dropout dropped."""
    found = attend(one, one.arrays(), kernels)
    kept = kept_by(one)
    assert np.array_equal(shown(found["output"], one.keys), kept), one.line
    if one.direction == "backward":
        assert np.array_equal(shown(found["grad_value"], one.queries).swapaxes(2, 3), kept), one.line
    return found


def shown(weights: Array, count: int) -> Array:
    """Where a probe's result [batch, rows, heads, columns] is not zero, as [batch, heads, rows, count]."""
    return weights.transpose(0, 2, 1, 3)[..., :count] != 0


def kept_by(one: Case) -> Array:
    """bool [batch, heads, queries, keys] of what dropout keeps of a dense problem."""
    rows = one.batch * one.heads * one.queries  # all batches and heads follow each other in the stream
    kept = keep_mask(Dropout(one.dropout_p, one.philox_seed, one.philox_offset), 0, rows, one.keys)
    return kept.reshape(one.batch, one.heads, one.queries, one.keys)


def binomial_p_values(trials: int, chance: float) -> Array:
    """p-value of every count from 0 to `trials`: how likely are counts that are no likelier (exact, two-sided)."""
    counts = np.arange(trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(counts[1:]))])
    logarithms = factorials[-1] - factorials - factorials[::-1]
    logarithms += counts * math.log(chance) + (trials - counts) * math.log1p(-chance)
    order = np.argsort(logarithms)
    found = np.empty(trials + 1)
    found[order] = np.cumsum(np.exp(logarithms[order]))
    return found


def normal_p_value(count: int, trials: int, chance: float) -> float:
    """The same for many trials."""
    deviation = abs(count - trials * chance) / math.sqrt(trials * chance * (1 - chance))
    return math.erfc(deviation / math.sqrt(2))


def name_of(one: Case) -> str:
    """A test's id."""
    words = one.line.split()
    return "_".join(word.split("=", 1)[1] for word in words if not word.startswith(("seed=", "family=", "direction=")))
