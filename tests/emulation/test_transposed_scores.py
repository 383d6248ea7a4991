"""kernels/sm90_backward/transposed_scores.py: its machine code, without products, executed against the formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.ptx_floats import FloatThreads
from tests.support.ptx_threads import Array
from tests.support.traced import compile_traced

TILES = 2  # of queries and of keys
SLOPES = np.array([9.0, 0.03], np.float32)  # of ALiBi; the second head's scores are computed
ROUNDING = 2**-8  # of bfloat16, relative: a weight is rounded, with a softcap its derivative and their product, then dS


def compiled(problem: Problem) -> tuple[Any, str]:
    """Returns the build of an sm90 backward, and the PTX of its steps 2 and 4."""
    scores_kernel = pytest.importorskip("tests.support.scores_kernel")
    build = planner.plan(problem, "sm_90a").build
    assert build.family == "sm90"
    return build, compile_traced(replace(build, warps=build.warps_scores[0]), scores_kernel.trace).ptx


def run(problem: Problem, given: dict[str, Array]) -> tuple[Array, Array]:
    """Returns P and dS of the products `query` and `key`, all tiles."""
    build, ptx = compiled(problem)
    assert given["query"].shape == (TILES * build.block_queries, TILES * build.tile_n)
    named = {**given, "output": np.zeros_like(given["query"]), "grad_query": np.zeros_like(given["query"])}
    starts = dict(zip(named, 256 + np.cumsum([0, *(array.nbytes for array in named.values())]), strict=False))
    memory = np.concatenate([np.zeros(256, np.uint8), *(array.reshape(-1).view(np.uint8) for array in named.values())])
    sizes = {**dict(launch_rules.params(problem, build)), "scale": problem.scale_value, "softcap": problem.softcap}
    struct = np.zeros(1, abi.numpy_struct(abi.BACKWARD))
    for name, value in {**sizes, **starts, "scale_log2": problem.scale_value * math.log2(math.e)}.items():
        struct[name] = value
    FloatThreads(ptx, (TILES, TILES), build.warps_scores[0] * 32, memory, struct).run()
    size = given["query"].nbytes
    found = (memory[starts[name] : starts[name] + size].view(np.float32) for name in ("output", "grad_query"))
    weights, gradient = (array.reshape(given["query"].shape) for array in found)
    return weights, gradient


def expected(problem: Problem, given: dict[str, Array]) -> tuple[Array, Array]:
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
    weights = np.where(seen, np.exp(scores - given["logsumexp_log2"][:, None] * math.log(2)), 0.0)
    return weights, weights * slope * (given["key"] - given["delta"][:, None])


@pytest.mark.parametrize(
    ("dims", "sizes", "mask", "softcap", "alibi"),
    [
        ((128, 96), (128, 200), Full(), 0.0, False),  # at 128 / 128 variant ds_registers has other statistics
        ((128, 128), (128, 200), Full(), 4.0, False),
        ((128, 128), (101, 200), Causal(), 1.5, True),
        ((64, 64), (200, 256), CausalBottomRight(50), 0.0, True),
        ((64, 64), (256, 201), Causal(), 30.0, False),
        ((192, 128), (64, 200), Full(), 0.0, False),
        ((192, 128), (61, 256), CausalBottomRight(50), 0.0, False),
    ],
)
def test_weights_and_gradients(
    dims: tuple[int, int], sizes: tuple[int, int], mask: Mask, softcap: float, alibi: bool
) -> None:
    shape = Shape(150, *sizes, 2, *dims)  # with fewer work tiles a block has 64 keys
    changes: dict[str, Any] = {"alibi_slopes": Tensor.contiguous((2,), "float32")} if alibi else {}
    problem = Problem.dense("backward", shape, "bfloat16", mask).replace(softcap=softcap, **changes)
    rows, columns = TILES * {64: 128, 128: 64, 192: 32}[dims[0]], TILES * 128
    rng = np.random.default_rng(1)
    given = {name: rng.standard_normal((rows, columns), np.float32) for name in ("query", "key")}
    given["query"] *= 8
    given |= {"logsumexp_log2": rng.random(rows, np.float32) * 3 + 2, "delta": rng.standard_normal(rows, np.float32)}
    given["logsumexp_log2"][sizes[0] :] = np.inf  # as the delta kernel leaves rows past the end
    given["alibi_slopes"] = SLOPES
    for found, truth, roundings in zip(run(problem, given), expected(problem, given), (1, 4), strict=True):
        assert np.array_equal(found == 0, truth == 0)
        np.testing.assert_allclose(found, truth, rtol=roundings * ROUNDING, atol=1e-30)
