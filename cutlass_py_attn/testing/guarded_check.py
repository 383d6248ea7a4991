"""Guarded check: launches a case of any feature in guarded buffers and compares it with the reference in float64.

An error counts relative to what the reference loses in the kernel's own dtype, over the whole tensor in norm and at
its largest element. Elements that belong to no sequence must stay unwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.backward_parts.kernel import grad_bias_mode
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.quantization import output_dtype
from cutlass_py_attn.problem.spec import GRADIENTS
from cutlass_py_attn.problem.tensors import FLOAT8
from cutlass_py_attn.reference import numpy_reference, paged
from cutlass_py_attn.testing import e4m3_inputs, paged_inputs
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, same_bits, unseen_rows
from cutlass_py_attn.testing.device_memory import GuardedLaunch, guarded_launch

Array = npt.NDArray[Any]

TIMES_LOW: Final = 4.0  # factor of the reference's error in the dtype: in small tensors that error may be small by luck
# Share of the truth's root mean square. A weight of e4m3 has a relative error of up to 2^-4; in `EQUAL_WEIGHTS` all
# weights of a row that count are its largest, which is exact.
FLOOR: Final = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 3e-5, FLOAT8: 4e-2}
EQUAL_WEIGHTS: Final = ("zero_scores", "equal_keys", "one_key")
SMALLEST: Final = float(np.finfo(np.float32).tiny)  # smaller weights are flushed to zero
ONE_KEY: Final = ("needle", "one_key")  # inputs with which one or two keys get all of a row's weight
LARGEST: Final = 3.0  # factor of a single element over the norm's share
SINGLE_KEY: Final = 4.0  # with one visible key, or equal ones, dP - delta is nothing but rounding, of whole rows' sums
LOGSUMEXP: Final = 2e-4
# Share of the truth that a float32 result may be off where no rounding but that of the result itself takes place. It
# shows a keep_scale of 1 in place of 1 / (1 - 1e-6), an error of 1e-6.
EXACT: Final = 3e-7
RARE_DROPOUT: Final = 1e-5
E4M3_TERMS: Final = 32  # products that 8-bit wgmma adds at once
LAST_BIT: Final = 2.0**-13  # of such a sum, which has 14 bits, as a share of it
TRUNCATION: Final = 2.0**-12  # share of a score that each of these sums may be off: it is truncated to 14 bits
ROUNDED: Final = {"float16": 2.0**-12, "bfloat16": 2.0**-9}  # share of a number that code times scale is off
HARDWARE_TANH: Final = 2.0**-11  # largest relative error of the tanh that kernels of 16-bit operands use


@dataclass(frozen=True, slots=True)
class Launched:
    """The results of one launch by name, and the kernel that ran."""

    outputs: dict[str, Array]
    build: Build


@dataclass(frozen=True, slots=True)
class Expected:
    """Inputs and expected results of a case. truth: in float64; low: in the dtype of the output."""

    arrays: dict[str, Array]
    truth: dict[str, Array]
    low: dict[str, Array]


def expect(case: Case) -> Expected:
    """Returns the inputs and the reference's results; needs no GPU."""
    arrays = case.arrays()
    truth = by_reference(case, arrays, "float64")
    low = by_reference(case, arrays, output_dtype(case.spec.dtype))
    if case.direction == "backward":
        stored = {"output": truth["output"].astype(arrays["query"].dtype)}
        arrays |= stored | {"logsumexp": truth["logsumexp"].astype(np.float32)}
        truth = by_reference(case, arrays, "float64")
    names = results_of(case)
    return Expected(arrays, {name: truth[name] for name in names}, {name: low[name] for name in names})


def results_of(case: Case) -> tuple[str, ...]:
    """Returns the names of what the case writes."""
    if case.direction == "forward":
        return "output", "logsumexp"
    return tuple(f"grad_{GRADIENTS[letter]}" for letter in case.spec.gradients)


def by_reference(case: Case, arrays: dict[str, Array], precision: str) -> dict[str, Array]:
    """Returns all results in that precision; gradients use the output and logsumexp of `arrays` if they are there."""
    values = e4m3_inputs.dequantised(case.problem(), arrays)
    operands = [values[name] for name in ("query", "key", "value")]
    options: dict[str, Any] = {
        "mask": case.mask_of(arrays),
        "scale": case.spec.scale,
        "score_mod": case.score_mod(arrays),
    }
    if precision == "float64" and "output" in arrays:
        output, logsumexp = arrays["output"], arrays["logsumexp"]
    elif case.spec.page_size:
        table = paged_inputs.page_table(arrays, case.spec.num_queries)
        query, key, value = operands
        output, logsumexp = paged.forward(query, key, value, table, precision=precision, **options)
    else:
        output, logsumexp = numpy_reference.forward(*operands, precision=precision, **options)
    found = {"output": output, "logsumexp": logsumexp}
    if case.direction == "backward":
        query, key, value = operands
        options |= {"precision": precision, "grad_logsumexp": arrays.get("grad_logsumexp")}
        gradients = numpy_reference.backward(arrays["grad_output"], query, key, value, output, logsumexp, **options)
        found |= {f"grad_{name}": getattr(gradients, name) for name in GRADIENTS.values()}
    return found


def guarded_case(case: Case, expected: Expected, kernels: Kernels) -> GuardedLaunch:
    """Returns the kernels of a case bound to guarded buffers."""
    return guarded_launch(case.problem(), expected.arrays, kernels, case.philox)


def launch(case: Case, expected: Expected, kernels: Kernels) -> Launched:
    """Returns the results of one launch and the kernel that ran; AssertionError if a guard element changed."""
    with guarded_case(case, expected, kernels) as guarded:
        return Launched(guarded.run(), guarded.bound.plan.build)


def check_case(case: Case, expected: Expected, kernels: Kernels) -> dict[str, Array]:
    """Returns the results of one launch; AssertionError if one is too far from the expected one."""
    found = launch(case, expected, kernels).outputs
    _assert_accurate(case, expected, found)
    return found


def check_decode(case: Case, kernels: Kernels) -> dict[str, float]:
    """Returns `ratios` of a decode case; AssertionError if one is above 1, bits differ between two launches, or
    another kernel served it."""
    expected = expect(case)
    with guarded_case(case, expected, kernels) as guarded:
        assert guarded.bound.plan.build.family == "decode", case.line
        found, again = guarded.run(), guarded.run()
    assert all(same_bits(found[name], again[name]) for name in found), case.line
    return _assert_accurate(case, expected, found)


def check_repeated(case: Case, kernels: Kernels) -> Build:
    """Returns the kernel that served a case; AssertionError if bits differ between launches or one is inaccurate."""
    expected = expect(case)
    with guarded_case(case, expected, kernels) as guarded:
        found, again, build = guarded.run(), guarded.run(), guarded.bound.plan.build
    assert all(same_bits(found[name], again[name]) for name in found), case.line
    _assert_accurate(case, expected, found)
    return build


def _assert_accurate(case: Case, expected: Expected, found: dict[str, Array]) -> dict[str, float]:
    worst = ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in worst.values()), f"{worst}: {case.line}"
    return worst


def ratios(case: Case, expected: Expected, found: dict[str, Array]) -> dict[str, float]:
    """Returns error / allowed by result: above 1 is a failure; infinity for a NaN that the truth does not have."""
    return {name: _ratio(case, expected, name, found[name]) for name in results_of(case)}


def _ratio(case: Case, expected: Expected, name: str, found: Array) -> float:
    truth, low = expected.truth[name], expected.low[name].astype(np.float64)
    if found.shape != truth.shape:
        return np.inf
    if name == "logsumexp":
        return _logsumexp_ratio(case, found.astype(np.float64), truth, _logsumexp_allowance(case, expected))
    inside = _inside(case, name, truth.shape)
    outside = found[~inside].astype(np.float64)
    # A vectorised store of grad_bias may write zeros past the last key of a sequence.
    if not (np.isnan(outside) | ((outside == 0) & (name == "grad_bias"))).all():
        return np.inf
    if case.spec.has_array_mask and _reaches_unseen_rows(case, expected, name, found):
        return np.inf
    error = np.where(inside, found.astype(np.float64) - truth, 0.0)
    if not np.isfinite(error).all():
        return np.inf
    if not error.any():
        return 0.0
    lost = np.where(inside, low - truth, 0.0)
    count = max(int(inside.sum()), 1)
    mean = np.sqrt((np.where(inside, truth, 0.0) ** 2).sum() / count)
    # The terms of a gradient that cancels are about as large as a sum over the keys of rounded products.
    least = _floor(case, expected, name) * (mean + _cancelling_terms(case, name) * _magnitude(expected, name))
    least += SMALLEST
    in_norm = np.sqrt((error**2).sum() / count) / (TIMES_LOW * np.sqrt((lost**2).sum() / count) + least)
    largest = np.abs(error).max() / (TIMES_LOW * np.abs(lost).max() + LARGEST * least * np.sqrt(np.log2(count + 1)))
    return float(max(in_norm, largest))


def _reaches_unseen_rows(case: Case, expected: Expected, name: str, found: Array) -> bool:
    """Whether a result is not exactly zero in a row that no visible pair reaches."""
    unseen = unseen_rows(case, expected.arrays)
    return name in unseen and bool(found[unseen[name]].any())


def _floor(case: Case, expected: Expected, name: str) -> float:
    """Returns the share of the truth that a result may always be off."""
    floor = FLOOR[case.spec.dtype]
    if case.spec.dtype == FLOAT8 and case.inputs in EQUAL_WEIGHTS:
        floor = FLOOR["bfloat16"]
    if case.spec.dtype != "float32":
        return floor + _tanh_error(case, expected)
    if is_exact(case, name):
        return EXACT
    return floor * max(1.0, _score_size(case, expected))  # an error of a score is a relative error of its weight


def is_exact(case: Case, name: str) -> bool:
    """Whether every element of a result is a single product of a weight of 1, a small integer and the factor of rare
    dropout, which is 1 but for a few bits."""
    spec = case.spec
    is_rare = case.inputs == "zero_scores" and 0 < spec.dropout_p <= RARE_DROPOUT
    if not is_rare or spec.bias or spec.alibi or spec.sinks:
        return False
    has_diagonal = (spec.mask.left, spec.mask.right) == (0, 0)
    if name == "grad_value":
        has_diagonal = has_diagonal or max(spec.num_queries, spec.num_keys) <= 1
        return has_diagonal and spec.num_heads == spec.num_heads_key
    return name == "output" and (has_diagonal or spec.num_keys <= 1)


def _score_size(case: Case, expected: Expected) -> float:
    """Returns the root mean square of the scores, at most the softcap. A needle's query is a sum of keys."""
    terms = case.spec.head_dim if case.inputs in ONE_KEY else np.sqrt(case.spec.head_dim)
    values = e4m3_inputs.dequantised(case.problem(), expected.arrays)
    size = _size(values["query"]) * _size(values["key"]) * terms
    return float(min(size * abs(case.problem().scale_value), case.spec.softcap or np.inf))


def _tanh_error(case: Case, expected: Expected) -> float:
    """Returns the error of a score by the hardware's tanh; 0 without softcap."""
    return HARDWARE_TANH * _score_size(case, expected) if case.spec.softcap else 0.0


def _size(array: Array) -> float:
    array = array.astype(np.float64)
    return float(np.sqrt(np.nanmean(array**2))) if np.isfinite(array).any() else 0.0  # unused rows of pages are NaN


def _magnitude(expected: Expected, name: str) -> float:
    """Returns the size of a gradient's terms relative to inputs of about one; 1 for smaller inputs."""
    factors = {"grad_query": ("key",), "grad_key": ("query",), "grad_bias": (), "grad_sinks": ()}
    names = ("value", "grad_output", *factors[name]) if name in factors else ()
    return float(np.prod([max(1.0, _size(expected.arrays[each])) for each in names]))


def _cancelling_terms(case: Case, name: str) -> float:
    """Returns the size of the terms that cancel in a gradient of the scores: dP - delta of inputs of about one."""
    if name in ("output", "grad_value"):
        return 0.0
    spec, problem = case.spec, case.problem()
    rows = max(spec.num_queries, 1)
    width = np.sqrt(spec.head_dim_value)
    if name == "grad_sinks":
        return float(width * 0.1)
    factor = 1.0 if name == "grad_bias" else abs(problem.scale_value)
    if spec.dropout_p < 1:
        factor /= 1 - spec.dropout_p
    if case.inputs in (*ONE_KEY, "equal_keys") or _sees_few_keys(case):
        factor *= SINGLE_KEY * np.sqrt(rows)
    if name == "grad_bias" and spec.bias[3] == "1":
        factor *= SINGLE_KEY  # the gradient of a row's scores sums to zero
    return float(0.1 * width * factor / np.sqrt(rows))


def _sees_few_keys(case: Case) -> bool:
    """Whether there are at most two keys, or the mask's window leaves rows with one or two visible ones; with arrays
    of a mask, whether most rows have no more."""
    mask = case.spec.mask
    longest = max((each.num_keys for each in case.spec.sequences), default=case.spec.num_keys)
    if longest <= 2:
        return True
    drawn = case.drawn_mask
    if isinstance(drawn, ArrayMask):
        counts = case.visible(drawn).sum(axis=3)
        if bool((counts > 0).any()) and np.median(counts[counts > 0]) <= 2:
            return True
    if mask.name == "window":
        return mask.right == 1 or (mask.left, mask.right) == (1, 0)
    return mask.left == 0


def _logsumexp_allowance(case: Case, expected: Expected) -> float:
    if case.spec.dtype == FLOAT8:
        # The logsumexp of a row with few keys is a score. The largest of n normal numbers is about sqrt(2 ln n).
        finite = expected.truth["logsumexp"][np.isfinite(expected.truth["logsumexp"])]
        if case.inputs == "rising":  # products of one sign, each truncated where the last bit of their sum is
            return LAST_BIT * case.spec.head_dim * float(np.abs(finite).max(initial=0.0))
        largest = _score_size(case, expected) * float(np.sqrt(2 * np.log(max(finite.size, 3))))
        return TRUNCATION * ceil_div(case.spec.head_dim, E4M3_TERMS) * largest
    if case.spec.has_rope:
        return 4 * ROUNDED[case.spec.dtype] * _score_size(case, expected)
    return 0.0 if case.spec.dtype == "float32" else _tanh_error(case, expected)


def _logsumexp_ratio(case: Case, found: Array, truth: Array, allowance: float) -> float:
    inside = np.isfinite(truth)
    for number, each in enumerate(case.spec.sequences):
        # Past the block of 32 rows in which a sequence ends nothing is written.
        end = -(-each.num_queries // 32) * 32
        found[number, :, end:] = truth[number, :, end:]
    if not np.array_equal(found[~inside], truth[~inside]):
        return np.inf
    error = np.abs(found[inside] - truth[inside]) / (LOGSUMEXP * (1 + np.abs(truth[inside]) * 1e-2) + allowance)
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))


def _inside(case: Case, name: str, shape: tuple[int, ...]) -> Array:
    """Returns which elements belong to some sequence."""
    sequences = case.spec.sequences
    if not sequences or name == "grad_sinks":
        return np.ones(shape, np.bool_)
    if name != "grad_bias":
        rows = case.spec.num_tokens[1 if name in ("grad_key", "grad_value") else 0]
        return np.broadcast_to((np.arange(shape[1]) < rows)[None, :, None, None], shape)
    # A kernel of its own writes all of grad_bias; so does a sum over the sequences.
    if (shape[0] == 1 and len(sequences) > 1) or grad_bias_mode(case.problem()) != "main":
        return np.ones(shape, np.bool_)
    queries = np.array([each.num_queries for each in sequences])
    used = np.array([each.num_keys if each.used_keys is None else each.used_keys for each in sequences])
    row = np.arange(shape[2])[None, None, :, None] < queries[:, None, None, None]
    column = np.arange(shape[3])[None, None, None, :] < used[:, None, None, None]
    return np.broadcast_to(row & column, shape)
