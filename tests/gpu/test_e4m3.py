"""Forwards of e4m3 operands on a GPU: accuracy of random problems, equal bits, long rows, outliers and needles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import Causal, Full, Window, attention_forward, quantize_e4m3
from cutlass_py_attn.reference import quantization
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Kernels, same_bits
from cutlass_py_attn.testing.device_memory import guarded_launch
from tests.cases import suite

HEAD_DIM, SAMPLED = 128, 64
# Relative error of the output (norm) against float64 of the operands that the kernel reads.
OF_CODES = 4e-2
OF_ONE_SIGN = 3e-3  # rounding errors of the weights cancel in a long sum; what an accumulator cuts off does not


@pytest.mark.parametrize("case", suite.e4m3_cases()[-suite.E4M3_KERNELS * suite.E4M3_RUNS :], ids=lambda it: it.line)
def test_random_problems(case: Case, kernels: Kernels) -> None:
    """Within the allowance, and with the same bits in three launches."""
    expected = guarded_check.expect(case)
    with guarded_launch(case.problem(), expected.arrays, kernels) as guarded:
        found, *others = (guarded.run() for _ in range(3))
    assert all(same_bits(found[name], other[name]) for other in others for name in found)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("case", suite.E4M3_EXACT, ids=lambda it: it.line)
def test_equal_weights_are_exact(case: Case, kernels: Kernels) -> None:
    """Only the rounding of the output remains."""
    guarded_check.check_case(case, guarded_check.expect(case), kernels)


def sampled_rows(arrays: dict[str, Any], rows: Any, scale: float, mask: Any) -> Any:
    """Returns O of some rows of the only head, in float64."""
    query, key, value = (arrays[name][0, :, 0].astype(np.float64) for name in ("query", "key", "value"))
    scores = scale * query[rows] @ key.T
    seen = mask.sees(rows[:, None], np.arange(len(key))[None], len(query), len(key))
    weights = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(1, keepdims=True)), 0)
    return weights @ value / weights.sum(1, keepdims=True)


def distance(found: Any, truth: Any) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(4096, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("length", [8192, 131072])
@pytest.mark.parametrize("inputs", ["gaussian", "one sign", "outliers", "needle"])
def test_long_rows(
    inputs: str, length: int, mask: Any, kernels: Kernels, record_property: Callable[[str, float], None]
) -> None:
    """Sums of one sign show what the 14 bits of an accumulator would lose; a needle has most of a row's weight."""
    rng = np.random.default_rng(length)
    shape = 1, length, 1, HEAD_DIM
    arrays = {name: rng.standard_normal(shape, np.float32) for name in ("query", "key", "value")}
    if inputs == "one sign":
        arrays["value"] = np.abs(arrays["value"])
    if inputs == "outliers":
        for name in ("query", "key"):
            arrays[name] += 10 * rng.standard_normal(shape, np.float32) * (rng.random(shape, np.float32) < 0.001)
    if inputs == "needle":
        arrays["query"] = 2 * arrays["key"] + 0.1 * arrays["query"]
    made = {name: quantize_e4m3(it, rotate=inputs == "outliers" and name != "value") for name, it in arrays.items()}
    factors = {f"{name}_scale": factor for name, (_, factor) in made.items()}
    codes = [code for code, _ in made.values()]
    output, _ = attention_forward(*codes, mask=mask, kernels=kernels, **factors)
    rows = np.sort(rng.choice(length, SAMPLED, replace=False))
    values = {name: quantization.dequantise(code, factor) for name, (code, factor) in made.items()}
    scale, found = 1 / math.sqrt(HEAD_DIM), output[0, rows, 0].astype(np.float64)
    of_codes = distance(found, sampled_rows(values, rows, scale, mask))
    of_operands = distance(found, sampled_rows(arrays, rows, scale, mask))
    record_property("error of the codes", of_codes)
    record_property("error of the operands", of_operands)
    assert of_codes <= (OF_ONE_SIGN if inputs == "one sign" else OF_CODES)
