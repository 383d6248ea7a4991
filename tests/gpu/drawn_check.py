"""Check of drawn problems: launched in guarded buffers, compared with the reference in float64.

An error counts against what the reference loses in the kernel's own dtype: over the whole tensor in norm, and at its
largest. Elements that belong to no sequence must stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import reference
from cutlass_py_attn.planner import bias_gradient
from tests.gpu import memory
from tests.gpu.check import Kernels, same_bits
from tests.gpu.drawn import NAMES, Drawn

Array = npt.NDArray[Any]

TIMES_LOW: Final = 4.0  # of the same reference's error: small tensors may be right by luck
FLOOR: Final = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}  # of the truth's root mean square
LARGEST: Final = 3.0  # how much more than the norm's share a single element may take
SINGLE_KEY: Final = 4.0  # with one key in sight dP - delta is nothing but rounding, of whole rows' sums
LOGSUMEXP: Final = 2e-4


@dataclass(frozen=True, slots=True)
class Expected:
    """Inputs and expected results of a problem. truth in float64, low in the problem's dtype."""

    arrays: dict[str, Array]
    truth: dict[str, Array]
    low: dict[str, Array]


def expect(drawn: Drawn) -> Expected:
    """By the reference; needs no GPU."""
    arrays = drawn.arrays()
    truth = by_reference(drawn, arrays, "float64")
    low = by_reference(drawn, arrays, drawn.dtype)
    if drawn.direction == "backward":
        stored = {"output": truth["output"].astype(arrays["query"].dtype)}
        arrays |= stored | {"logsumexp": truth["logsumexp"].astype(np.float32)}
        truth = by_reference(drawn, arrays, "float64")
    names = results_of(drawn)
    return Expected(arrays, {name: truth[name] for name in names}, {name: low[name] for name in names})


def results_of(drawn: Drawn) -> tuple[str, ...]:
    """What the problem writes."""
    if drawn.direction == "forward":
        return "output", "logsumexp"
    return tuple(f"grad_{NAMES[letter]}" for letter in drawn.grads)


def by_reference(drawn: Drawn, arrays: dict[str, Array], precision: str) -> dict[str, Array]:
    """All results in that precision; gradients from the output and logsumexp given, where they are."""
    operands = [arrays[name] for name in ("query", "key", "value")]
    options: dict[str, Any] = {"mask": drawn.mask_object, "scale": drawn.scale or None, "terms": drawn.terms(arrays)}
    if precision == "float64" and "output" in arrays:
        output, logsumexp = arrays["output"], arrays["logsumexp"]
    else:
        output, logsumexp = reference.forward(*operands, precision=precision, **options)
    found = {"output": output, "logsumexp": logsumexp}
    if drawn.direction == "backward":
        gradients = reference.backward(
            arrays["grad_output"], *operands, output, logsumexp, precision=precision, **options
        )
        found |= {f"grad_{name}": getattr(gradients, name) for name in NAMES.values()}
    return found


def launch(drawn: Drawn, expected: Expected, kernels: Kernels) -> dict[str, Array]:
    """The results of one launch; AssertionError when a guard has changed."""
    numbers = {}
    if drawn.dropout_p and not drawn.on_device:
        numbers = {"philox_seed": drawn.philox_seed, "philox_offset": drawn.philox_offset}
    with memory.placed(drawn.problem(), expected.arrays, kernels, numbers) as placed:
        return placed.run()


def expect_agreement(drawn: Drawn, expected: Expected, kernels: Kernels) -> dict[str, Array]:
    """The results of one launch; AssertionError for one that is too far from what is expected."""
    found = launch(drawn, expected, kernels)
    _judged(drawn, expected, found)
    return found


def expect_decode(drawn: Drawn, kernels: Kernels) -> dict[str, float]:
    """`findings` of a decode launched twice; AssertionError for one above 1, other bits, or another kernel."""
    expected = expect(drawn)
    with memory.placed(drawn.problem(), expected.arrays, kernels) as placed:
        assert placed.bound.plan.build.family == "decode", drawn.line
        found, again = placed.run(), placed.run()
    assert all(same_bits(found[name], again[name]) for name in found), drawn.line
    return _judged(drawn, expected, found)


def _judged(drawn: Drawn, expected: Expected, found: dict[str, Array]) -> dict[str, float]:
    """`findings`; AssertionError for one above 1."""
    worst = findings(drawn, expected, found)
    assert all(ratio <= 1 for ratio in worst.values()), f"{worst}: {drawn.line}"
    return worst


def findings(drawn: Drawn, expected: Expected, found: dict[str, Array]) -> dict[str, float]:
    """Error / allowed by result; more than 1 is a failure, infinity for NaN where there is none in the truth."""
    return {name: _ratio(drawn, expected, name, found[name]) for name in results_of(drawn)}


def _ratio(drawn: Drawn, expected: Expected, name: str, found: Array) -> float:
    truth, low = expected.truth[name], expected.low[name].astype(np.float64)
    if found.shape != truth.shape:
        return np.inf
    if name == "logsumexp":
        return _logsumexp_ratio(drawn, found.astype(np.float64), truth)
    inside = _inside(drawn, name, truth.shape)
    outside = found[~inside].astype(np.float64)
    # A vector of grad_bias may reach past the last key of a sequence, with zeros.
    if not (np.isnan(outside) | ((outside == 0) & (name == "grad_bias"))).all():
        return np.inf
    error = np.where(inside, found.astype(np.float64) - truth, 0.0)
    if not np.isfinite(error).all():
        return np.inf
    if not error.any():
        return 0.0
    lost = np.where(inside, low - truth, 0.0)
    count = max(int(inside.sum()), 1)
    floor = FLOOR["float32" if name == "grad_sinks" and drawn.dtype == "float32" else drawn.dtype]
    mean = np.sqrt((np.where(inside, truth, 0.0) ** 2).sum() / count)
    # Gradients that cancel are made of terms of about the size of a sum over the keys of rounded products.
    least = floor * (mean + _cancelled(drawn, name))
    in_norm = np.sqrt((error**2).sum() / count) / (TIMES_LOW * np.sqrt((lost**2).sum() / count) + least)
    largest = np.abs(error).max() / (TIMES_LOW * np.abs(lost).max() + LARGEST * least * np.sqrt(np.log2(count + 1)))
    return float(max(in_norm, largest))


def _cancelled(drawn: Drawn, name: str) -> float:
    """Size of what cancels in a gradient of the scores: dP - delta of inputs of about one."""
    if name in ("output", "grad_value"):
        return 0.0
    problem = drawn.problem()
    rows = max(drawn.shape.num_queries, 1)
    width = np.sqrt(problem.shape.head_dim_value)
    if name == "grad_sinks":
        return float(width * 0.1)
    factor = 1.0 if name == "grad_bias" else abs(problem.scale_value)
    if drawn.dropout_p < 1:
        factor /= 1 - drawn.dropout_p
    if drawn.shape.num_keys == 1 or drawn.mask.endswith((":1", ":1:0")):
        factor *= SINGLE_KEY * np.sqrt(rows)
    if name == "grad_bias" and drawn.bias[3] == "1":
        factor *= SINGLE_KEY  # the gradient of a row's scores sums to nothing
    return float(0.1 * width * factor / np.sqrt(rows))


def _logsumexp_ratio(drawn: Drawn, found: Array, truth: Array) -> float:
    inside = np.isfinite(truth)
    for number, (queries, _, _) in enumerate(drawn.lengths):
        # Behind the block of 32 in which a sequence ends nothing is written.
        found[number, :, -(-queries // 32) * 32 :] = truth[number, :, -(-queries // 32) * 32 :]
    if not np.array_equal(found[~inside], truth[~inside]):
        return np.inf
    error = np.abs(found[inside] - truth[inside]) / (LOGSUMEXP * (1 + np.abs(truth[inside]) * 1e-2))
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))


def _inside(drawn: Drawn, name: str, shape: tuple[int, ...]) -> Array:
    """Elements that belong to some sequence."""
    if not drawn.lengths or name == "grad_sinks":
        return np.ones(shape, np.bool_)
    queries, keys, used = zip(*drawn.lengths, strict=True)
    if name != "grad_bias":
        rows = sum(keys) if name in ("grad_key", "grad_value") else sum(queries)
        return np.broadcast_to((np.arange(shape[1]) < rows)[None, :, None, None], shape)
    if 1 in (shape[0],) and len(queries) > 1:
        return np.ones(shape, np.bool_)
    row = np.arange(shape[2])[None, None, :, None] < np.array(queries)[:, None, None, None]
    column = np.arange(shape[3])[None, None, None, :] < np.array(used)[:, None, None, None]
    alone = drawn.problem() and _by_its_own_kernel(drawn)
    return np.ones(shape, np.bool_) if alone else np.broadcast_to(row & column, shape)


def _by_its_own_kernel(drawn: Drawn) -> bool:
    """Whether grad_bias comes from the kernel that writes all of it."""
    return bias_gradient(drawn.problem()) != "main"
