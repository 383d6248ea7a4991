"""Tests of testing/accuracy.py: every seeded fault is caught by the suite's own comparison, honest kernels by none."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing import accuracy, inputs
from tests.support import faulty_backward

Array = npt.NDArray[Any]
CAUSAL = masks.Causal()
ROWS, CHANNELS = 1024, 64
CHANGED_FROM = 200
# What is small against the rounding of its tile can only break a law that holds bit for bit.
ONLY_BY_LAW = {"dq + 0.01 on one element"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem with its truth and its yardstick."""

    family: str
    tensors: tuple[Array, ...]
    truth: dict[str, Array]
    low: dict[str, Array]


@functools.cache
def case(family: str, dtype: str, rows: int = ROWS, mask: masks.Mask = CAUSAL) -> Case:
    shape = Shape(1, rows, rows, 1, CHANNELS, CHANNELS)
    tensors = inputs.make(family, shape, dtype, mask, 0)
    query, key, value, grad_output = tensors

    def results(precision: str) -> dict[str, Array]:
        output, lse = numpy_reference.forward(query, key, value, mask=mask, precision=precision)
        gradients = numpy_reference.backward(
            grad_output, query, key, value, output, lse, mask=mask, precision=precision
        )
        return dict(zip(faulty_backward.NAMES, (output, *gradients[:3]), strict=True))

    return Case(family, tensors, results("float64"), results(dtype))


def checked(subject: Case, kernel: dict[str, Array]) -> list[accuracy.CheckResult]:
    """The accuracy checks of the four tensors of a kernel."""
    found: list[accuracy.CheckResult] = []
    for name in faulty_backward.NAMES:
        absolute = accuracy.FLOORS[kernel[name].dtype.name].absolute * inputs.MAGNITUDE[subject.family]
        found += accuracy.check(name, kernel[name], subject.truth[name], subject.low[name], absolute=absolute)
    return found


def causality_holds(fault: str) -> bool:
    """Other keys and values behind a row must not move one bit of the rows before."""
    query, key, value, grad_output = case("gaussian", "bfloat16", 512).tensors
    other_key, other_value = key.copy(), value.copy()
    other_key[:, CHANGED_FROM:] *= -1
    other_value[:, CHANGED_FROM:] = 1e4
    first = faulty_backward.run((query, key, value, grad_output), CAUSAL, "bfloat16", fault)
    second = faulty_backward.run((query, other_key, other_value, grad_output), CAUSAL, "bfloat16", fault)
    return np.array_equal(first["dq"][:, :CHANGED_FROM], second["dq"][:, :CHANGED_FROM])


def factor_two_holds(fault: str) -> bool:
    """Twice the output's gradient gives exactly twice the three gradients."""
    query, key, value, grad_output = case("gaussian", "bfloat16", 512).tensors
    first = faulty_backward.run((query, key, value, grad_output), CAUSAL, "bfloat16", fault)
    second = faulty_backward.run((query, key, value, 2 * grad_output), CAUSAL, "bfloat16", fault)
    return all(np.array_equal(second[name], 2 * first[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("fault", faulty_backward.FAULTS)
def test_every_fault_is_caught(fault: str) -> None:
    """By the comparison with the reference; the faults of ONLY_BY_LAW by a law at least."""

    def passes(family: str) -> bool:
        subject = case(family, "bfloat16")
        kernel = faulty_backward.run(subject.tensors, CAUSAL, "bfloat16", fault)
        return accuracy.passed(checked(subject, kernel))

    if passes("gaussian") and passes("needle"):
        assert fault in ONLY_BY_LAW
        assert not (causality_holds(fault) and factor_two_holds(fault))


@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "three tf32")],
)
@pytest.mark.parametrize("family", sorted(inputs.MAGNITUDE))
def test_honest_kernels_pass(family: str, dtype: str, arithmetic: str) -> None:
    for mask in (masks.Full(), CAUSAL):
        subject = case(family, dtype, 512, mask)
        results = checked(subject, faulty_backward.run(subject.tensors, mask, arithmetic))
        assert accuracy.passed(results), accuracy.worst(results)


def test_the_laws_hold_without_a_fault() -> None:
    assert causality_holds("")
    assert factor_two_holds("")


@functools.cache
def one_tf32(family: str) -> dict[str, Array]:
    """Returns the results of a float32 backward with single TF32 products."""
    return faulty_backward.run(case(family, "float32", 512).tensors, CAUSAL, "one tf32")


@pytest.mark.parametrize("name", faulty_backward.NAMES)
@pytest.mark.parametrize("family", ["gaussian", "gaussian_x3", "needle"])
def test_a_single_tf32_product_is_not_float32(family: str, name: str) -> None:
    verdicts = checked(case(family, "float32", 512), one_tf32(family))
    assert not accuracy.passed(v for v in verdicts if v.tensor == name)


@pytest.mark.parametrize("rule", ["tile", "maximum", "slope"])
def test_each_rule_is_needed(rule: str) -> None:
    subject = case("gaussian", "bfloat16", 512)
    dtype, truth = ml_dtypes.bfloat16, subject.truth["dk"]
    spoilt = truth.copy()
    if rule == "tile":
        spoilt[:, 448:] *= -1
    elif rule == "maximum":
        spoilt[0, 0, 0, 0] += 1
    else:
        spoilt *= 1.006
    results = accuracy.check("dk", spoilt.astype(dtype), truth, subject.low["dk"])
    assert rule in {result.rule for result in results if result.worst > 1}


@pytest.mark.parametrize("stray", [np.nan, np.inf, -np.inf])
def test_strays_fail_and_are_named(stray: float) -> None:
    subject = case("gaussian", "float32", 128)
    kernel = subject.truth["dq"].astype(np.float32)
    kernel[0, 77, 0, 5] = stray
    (result,) = accuracy.check("dq", kernel, subject.truth["dq"], subject.low["dq"])
    assert result == accuracy.CheckResult("dq", "finite", math.inf, "batch 0 head 0 row 77 channel 5, 1 elements")


def test_an_overflow_of_low_is_no_licence() -> None:
    truth = np.full((1, 64, 1, 8), 3.0)
    low = np.full(truth.shape, np.inf, np.float32)
    assert accuracy.passed(accuracy.check("dv", truth.astype(np.float16), truth, low))
    assert not accuracy.passed(accuracy.check("dv", (1.1 * truth).astype(np.float16), truth, low))


def test_an_infinity_that_truth_has_too_is_left_out() -> None:
    truth = np.ones((1, 64, 1, 8))
    truth[0, 3] = np.nan
    assert accuracy.passed(accuracy.check("dv", truth.astype(np.float32), truth, truth))
    assert not accuracy.passed(accuracy.check("dv", np.ones(truth.shape, np.float32), truth, truth))


def test_rows_without_keys_must_be_exactly_zero() -> None:
    truth = np.random.default_rng(0).standard_normal((1, 100, 2, 8))
    truth[:, :30] = 0
    unseen = np.arange(100) < 30
    kernel = truth.astype(np.float32)
    assert accuracy.passed(accuracy.check("output", kernel, truth, truth))
    assert accuracy.passed(accuracy.check("dq", kernel, truth, truth, unseen=unseen))
    kernel[0, 4, 1, 2] = 1e-30
    rules = {v.rule: v for v in accuracy.check("output", kernel, truth, truth)}
    assert rules["zero"] == accuracy.CheckResult("output", "zero", math.inf, "batch 0 head 1 row 4 channel 2")
    assert not accuracy.passed(accuracy.check("dq", kernel, truth, truth, unseen=unseen))
    assert accuracy.passed(accuracy.check("dq", kernel, truth, truth))


def test_a_single_key_passes_although_its_gradients_cancel() -> None:
    mask, shape = masks.Full(), Shape(1, 40, 1, 1, CHANNELS, CHANNELS)
    tensors = inputs.make("gaussian", shape, "bfloat16", mask, 0)
    query, key, value, grad_output = tensors
    kernel = faulty_backward.run(tensors, mask, "bfloat16")["dq"]
    results = []
    for precision in ("float64", "bfloat16"):
        output, lse = numpy_reference.forward(query, key, value, mask=mask, precision=precision)
        results.append(
            numpy_reference.backward(grad_output, query, key, value, output, lse, mask=mask, precision=precision)[0]
        )
    assert accuracy.passed(accuracy.check("dq", kernel, results[0], results[1], absolute=1e-4))


def test_shapes_dtypes_and_empty_tensors() -> None:
    truth = np.ones((1, 4, 1, 8))
    (result,) = accuracy.check("dq", truth[:, :3].astype(np.float32), truth, truth)
    assert (result.rule, result.worst) == ("shape", math.inf)
    with pytest.raises(ValueError, match="float64"):
        accuracy.check("dq", truth, truth, truth)
    with pytest.raises(ValueError, match="same shape"):
        accuracy.check("dq", truth.astype(np.float32), truth, truth[:, :3])
    empty = np.ones((1, 0, 1, 8))
    assert accuracy.check("dq", empty.astype(np.float32), empty, empty) == []


def test_logsumexp_is_absolute_and_infinities_are_exact() -> None:
    truth = np.full((1, 2, 32), np.inf)
    truth[:, :, :20] = np.linspace(-3, 9, 20)
    truth[:, :, :4] = -np.inf
    kernel = truth.astype(np.float32)
    assert accuracy.check_logsumexp(kernel, truth).worst < 0.1

    def with_value(row: int, value: float) -> accuracy.CheckResult:
        changed = kernel.copy()
        changed[0, 1, row] = value
        return accuracy.check_logsumexp(changed, truth)

    assert with_value(7, float(truth[0, 1, 7]) + 5e-5).worst == pytest.approx(0.5, abs=0.05)
    assert with_value(7, float(truth[0, 1, 7]) + 2e-4).location == "batch 0 head 1 row 7"
    for row, value in [
        (7, np.nan),
        (7, -np.inf),
        (2, 0.0),
        (2, np.inf),
        (25, -np.inf),
        (25, 1e30),
        (25, np.nan),
    ]:
        assert with_value(row, value).worst == math.inf
    assert accuracy.check_logsumexp(kernel[:, :, :20], truth).rule == "shape"
    assert accuracy.check_logsumexp(kernel[:0], truth[:0]).worst == 0


def test_worst_is_by_tensor() -> None:
    results = [
        accuracy.CheckResult("dq", "tile", 0.2, ""),
        accuracy.CheckResult("dq", "slope", 0.7, ""),
        accuracy.CheckResult("dk", "tile", 1.0, ""),
    ]
    assert accuracy.worst(results) == {"dq": 0.7, "dk": 1.0}
    assert accuracy.passed(results)
    assert not accuracy.passed([*results, accuracy.CheckResult("dv", "zero", math.inf, "")])
    assert not accuracy.passed([accuracy.CheckResult("dv", "tile", math.nan, "")])
