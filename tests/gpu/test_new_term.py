"""Forward and backward with a score term that a user registers, against the reference in float64."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import attention_backward, attention_forward
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing.check import Kernels
from tests.cases.distance_squared import DTYPE, SHAPE, distance_squared
from tests.cases.nearness import NAME, nearness

Array = npt.NDArray[Any]

SCALE: Final = {"distance_squared": 1.0, NAME: 500.0}  # of the slopes, from -1e-3 to 1e-4
# Relative error in the Frobenius norm: a few roundings of float16, 2^-11 each. Slopes that are 1 % off give 5e-3.
ALLOWED: Final = 2e-3


def _error(found: Array, truth: Array) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("registered", [distance_squared, nearness])
@pytest.mark.parametrize("of_batch", [False, True], ids=["slopes of all batches", "slopes of each batch"])
def test_results_are_those_of_the_reference(of_batch: bool, registered: Any, kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    b, m, n, h, hk = SHAPE.batch, SHAPE.num_queries, SHAPE.num_keys, SHAPE.num_heads, SHAPE.num_heads_key
    shapes = (b, m, h, SHAPE.head_dim), (b, n, hk, SHAPE.head_dim), (b, n, hk, SHAPE.head_dim_value)
    query, key, value = (rng.standard_normal(shape).astype(DTYPE) for shape in shapes)
    grad_output = rng.standard_normal((b, m, h, SHAPE.head_dim_value)).astype(DTYPE)
    slopes = rng.uniform(-1e-3, 1e-4, (b, h) if of_batch else (h,)).astype(np.float32)
    with registered() as term:
        terms: dict[str, Any] = {term.name: slopes * SCALE[term.name]}
        output, lse = attention_forward(query, key, value, mask=Causal(), score_terms=terms, kernels=kernels)
        gradients = attention_backward(
            grad_output, query, key, value, output, lse, mask=Causal(), score_terms=terms, kernels=kernels
        )
        wide = [tensor.astype(np.float64) for tensor in (query, key, value, grad_output)]
        score_mod = numpy_reference.ReferenceScoreMod(score_terms=terms)
        truth, truth_lse = numpy_reference.forward(*wide[:3], mask=Causal(), score_mod=score_mod)
        expected = numpy_reference.backward(wide[3], *wide[:3], truth, truth_lse, mask=Causal(), score_mod=score_mod)
    assert _error(output, truth) < ALLOWED
    np.testing.assert_allclose(lse[..., :m], truth_lse[..., :m], rtol=1e-4, atol=1e-4)
    for name in ("query", "key", "value"):
        assert _error(getattr(gradients, name), getattr(expected, name)) < ALLOWED, name
