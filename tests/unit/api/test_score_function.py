"""Tests of score functions: the NumPy reference against their formula, what makes kernels differ, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import (
    Causal,
    Full,
    NotSupported,
    ScoreFunction,
    attention_backward,
    attention_forward,
    score_terms,
)
from cutlass_py_attn.plan.planner import plan_forward
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.score_terms import registry

Array = npt.NDArray[Any]
NAME = "drawn"
OPERANDS = np.random.default_rng(0).standard_normal((3, 2, 7, 4, 8)).astype(np.float32)
WEIGHTS = np.array([[0.5, -1.0, 0.0, 2.0], [1.0, 0.25, -0.5, 3.0]], np.float32)


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    yield
    if NAME in registry.registered():
        score_terms.unregister(NAME)


def register(function: Callable[..., Any]) -> ScoreFunction:
    term = ScoreFunction(NAME, function)
    score_terms.register(term)
    return term


def logarithms(query: Any, key: Any, num_queries: Any, num_keys: Any, weight: Any) -> Any:
    return -weight * np.log(1 + np.absolute(query + num_keys - num_queries - key))


def powers(query: Any, key: Any, num_queries: Any, num_keys: Any, weight: Any) -> Any:
    return weight * np.exp2(-key / 4) + np.exp(-(query % 3) / 2) - np.log2(key + 2) / (query + 1)


def choices(query: Any, key: Any, num_queries: Any, num_keys: Any, weight: Any) -> Any:
    same = (query - 3) // 2 == (key - 3) // 2
    return np.where(same & (key >= 1), np.tanh(weight), -np.sqrt(np.maximum(key, 1) * 0.5))


def numbers(query: Any, key: Any, num_queries: Any, num_keys: Any, weight: Any) -> Any:
    return 1.5


@pytest.mark.parametrize("function", [logarithms, powers, choices, numbers])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=lambda mask: mask.name)
@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS[0]], ids=["of each batch", "of all batches"])
def test_results_are_those_of_a_bias_of_the_formula(function: Callable[..., Any], mask: Any, weights: Array) -> None:
    """Called with NumPy's numbers, the function gives what its program adds."""
    register(function)
    query, key, value = OPERANDS
    at = np.arange(7.0)[:, None], np.arange(7.0)[None, :], 7, 7
    each = np.broadcast_to(weights, (2, 4)).astype(np.float64)[:, :, None, None]
    bias = np.broadcast_to(np.asarray(function(*at, each), np.float64), (2, 4, 7, 7)).astype(np.float32)
    options: dict[str, Any] = {"mask": mask, "backend": "reference"}
    expected, lse = attention_forward(query, key, value, bias=bias, **options)
    output, logsumexp = attention_forward(query, key, value, score_terms={NAME: weights}, **options)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logsumexp[..., :7], lse[..., :7], rtol=1e-5, atol=1e-5)
    results = attention_backward(value, query, key, value, output, logsumexp, score_terms={NAME: weights}, **options)
    wanted = attention_backward(value, query, key, value, expected, lse, bias=bias, **options)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(getattr(results, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)


def problem() -> Problem:
    shape = Shape(2, 256, 256, 4, 64, 64)
    operand = (NAME, Tensor.contiguous((4,), "float32"))
    return Problem.dense("forward", shape, "bfloat16", Causal()).replace(score_terms=(operand,))


def test_kernels_are_cached_by_what_the_function_does() -> None:
    """Of the same name: another constant is another kernel, another way to write the function is none."""
    digests = []
    for function in (logarithms, lambda q, k, m, n, w: -w * np.log(abs(q + n - m - k) + 1), powers):
        register(function)
        digests.append(registry.source_digest((NAME,)))
        score_terms.unregister(NAME)
    assert digests[0] != digests[2]
    register(lambda q, k, m, n, w: -w * np.log(1 + abs(q + n - m - k)))
    assert registry.source_digest((NAME,)) == digests[0]


def test_plans_name_the_term() -> None:
    register(logarithms)
    plan = plan_forward(problem(), "sm_90a")
    assert (plan.build.family, plan.build.features) == ("sm90", (NAME,))
    assert plan_forward(problem(), "sm_80").build.family == "sm80"
    assert from_json(to_json(problem())) == problem()


WRONG = {
    "a branch": (lambda q, k, m, n, w: w if q > k else 0.0, "if, and, or, not, a < b < c ask"),
    "a power": (lambda q, k, m, n, w: w ** (q - k), r"\*\* and @ have no operation"),
    "another function": (lambda q, k, m, n, w: w * np.sin(q), "numpy.sin has no operation"),
    "an array": (lambda q, k, m, n, w: np.array([1.0, 2.0]) * w, "ndarray|made an array"),
    "too few parameters": (lambda q, k: q - k, "the function must take query, key, num_queries, num_keys, operand"),
    "a float remainder": (lambda q, k, m, n, w: w % 2, "mod of a float"),
    "no number": (lambda q, k, m, n, w: "near", "str 'near' is no number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str) -> None:
    function, words = WRONG[case]
    with pytest.raises(NotSupported, match=words):
        ScoreFunction(NAME, function)


def test_the_name_is_that_of_a_term() -> None:
    with pytest.raises(NotSupported, match="the name is taken"):
        score_terms.register(ScoreFunction("alibi", logarithms))
    with pytest.raises(NotSupported, match="lower-case letters"):
        score_terms.register(ScoreFunction("Near-By", logarithms))
