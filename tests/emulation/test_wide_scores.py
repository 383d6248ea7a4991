"""kernels/sm90_wide/scores.py: its machine code, without products, executed against the formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.kernels.sm90_wide.backward_layout import GRAD_KEY, GRAD_QUERY, GRAD_VALUE, Gradient
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.ptx_floats import FloatThreads
from tests.support.ptx_threads import Array
from tests.support.traced import compile_traced

TILES, ROWS = 2, 64  # of queries and of keys
HEADS, THREADS = 2, 128
SLOPES = np.array([9.0, 0.03], np.float32)  # of ALiBi; the second head's scores are computed


def run(problem: Problem, gradient: Gradient, given: dict[str, Array]) -> tuple[Array, Array]:
    """Returns P, for dQ and dK times the derivative of the softcap, and dS of the products `query` and `key`."""
    support = pytest.importorskip("tests.support.wide_scores_kernel")
    build = planner.plan(problem, "sm_90a").build
    assert build.variant == "wide"
    ptx = compile_traced(build, support.trace(gradient)).ptx
    exchanged = np.full(TILES * TILES * THREADS, np.nan, np.float32)
    named = {**given, **{name: np.zeros_like(given["query"]) for name in ("output", "grad_query")}, "value": exchanged}
    starts = dict(zip(named, 256 + np.cumsum([0, *(array.nbytes for array in named.values())]), strict=False))
    memory = np.concatenate([np.zeros(256, np.uint8), *(array.reshape(-1).view(np.uint8) for array in named.values())])
    sizes = {**dict(launch_rules.params(problem, build)), "scale": problem.scale_value, "softcap": problem.softcap}
    struct = np.zeros(1, abi.numpy_struct(abi.BACKWARD))
    for name, value in {**sizes, **starts, "scale_log2": problem.scale_value * math.log2(math.e)}.items():
        struct[name] = value
    FloatThreads(ptx, (TILES, TILES), THREADS, memory, struct).run()
    size = given["query"].nbytes
    found = (memory[starts[name] : starts[name] + size].view(np.float32) for name in ("output", "grad_query"))
    weights, gradients = (array.reshape(given["query"].shape) for array in found)
    return weights, gradients


def expected(problem: Problem, gradient: Gradient, given: dict[str, Array]) -> tuple[Array, Array]:
    """Returns the same in float64."""
    queries, keys = problem.shape.num_queries, problem.shape.num_keys
    scores, slope = given["query"].astype(np.float64) * problem.scale_value, np.ones(1)
    if problem.softcap:
        capped = np.tanh(scores / problem.softcap)
        scores, slope = capped * problem.softcap, 1 - capped**2
    if problem.alibi_slopes is not None:
        i, j = np.ogrid[: scores.shape[0], : scores.shape[1]]
        scores = scores - np.float64(SLOPES[1]) * abs(i + keys - queries - j)
    seen = np.zeros(scores.shape, np.bool_)
    seen[:queries, :keys] = problem.mask.materialise(queries, keys)
    lse, delta = (given[name].reshape(HEADS, -1)[1][:, None] for name in ("logsumexp_log2", "delta"))
    weights = np.where(seen, np.exp(scores - lse * math.log(2)), 0.0) * (slope if gradient.has_ds else 1.0)
    return weights, weights * (given["key"] - delta)


@pytest.mark.parametrize(
    ("gradient", "sizes", "mask", "softcap", "alibi"),
    [
        (GRAD_QUERY, (101, 100), Causal(), 4.0, True),
        (GRAD_QUERY, (61, 128), CausalBottomRight(50), 0.0, False),
        (GRAD_KEY, (101, 100), Causal(), 4.0, True),
        (GRAD_VALUE, (120, 128), CausalBottomRight(50), 4.0, False),
    ],
    ids=lambda value: value.name if isinstance(value, Gradient) else None,
)
def test_weights_and_gradients(
    gradient: Gradient, sizes: tuple[int, int], mask: Mask, softcap: float, alibi: bool
) -> None:
    """Queries past the last have weights of zero, also where the block of dQ has no query at all."""
    changes: dict[str, Any] = {"alibi_slopes": Tensor.contiguous((HEADS,), "float32")} if alibi else {}
    problem = Problem.dense("backward", Shape(1, *sizes, HEADS, 512, 512), "bfloat16", mask)
    problem = problem.replace(softcap=softcap, **changes)
    rng, rows = np.random.default_rng(1), -(-sizes[0] // ROWS) * ROWS
    given = {name: rng.standard_normal((TILES * ROWS, TILES * ROWS), np.float32) for name in ("query", "key")}
    given["query"] *= 8
    lse = rng.random((HEADS, TILES * ROWS), np.float32) * 3 + 2
    lse[:, sizes[0] :] = np.inf  # as the delta kernel leaves rows past the end
    delta = rng.standard_normal((HEADS, TILES * ROWS), np.float32)
    truth = expected(problem, gradient, given | {"logsumexp_log2": lse, "delta": delta})
    given |= {"logsumexp_log2": np.ascontiguousarray(lse[:, :rows]), "delta": np.ascontiguousarray(delta[:, :rows])}
    given["alibi_slopes"] = SLOPES
    for found, wanted in zip(run(problem, gradient, given), truth, strict=True):
        if gradient is not GRAD_QUERY:  # blocks of dK and dV visit no tile without a query
            found, wanted = found[:rows], wanted[:rows]
        assert np.array_equal(found == 0, wanted == 0)
        np.testing.assert_allclose(found, wanted, rtol=3e-3 if softcap else 2e-5, atol=1e-30)
