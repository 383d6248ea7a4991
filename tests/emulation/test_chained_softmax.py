"""kernels/sm90_forward/chained_softmax.py and softmax_poly_exp2.py: their machine code on given scores, executed."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support.ptx_floats import FloatThreads
from tests.support.ptx_threads import Array
from tests.support.traced import compile_traced

KINDS = {
    "exact": {"emulates_exp2": False, "is_lazy": False},
    "lazy": {"emulates_exp2": False, "is_lazy": True},
    "emulated": {"emulates_exp2": True, "is_lazy": False},
}
SCALE = 0.3
QUADS, QUAD, ROWS, TILES, COLUMNS = 8, 4, 2, 2, 32


@functools.cache
def compiled(name: str) -> tuple[Any, str]:
    """Returns the build whose parameters the kernel has, and its PTX."""
    support = pytest.importorskip("tests.support.softmax_kernel")
    build = planner.plan(Problem.dense("forward", Shape(1, 64, 64, 1, 64, 64), "bfloat16", Full()), "sm_90a").build
    return build, compile_traced(build, support.trace(**KINDS[name])).ptx


def run(name: str, scores: Array) -> tuple[Array, Array]:
    """Returns what should be the sum of the weights, and the logsumexp, of scores (quad, row, tile, lane, column)."""
    build, ptx = compiled(name)
    query = np.ascontiguousarray(scores.transpose(0, 3, 2, 1, 4), np.float32)
    output = np.zeros((QUADS * QUAD, ROWS, 2), np.float32)
    memory = np.concatenate([np.zeros(256, np.uint8), *(each.reshape(-1).view(np.uint8) for each in (query, output))])
    struct = np.zeros(1, abi.numpy_struct(abi.fields_of(build)))
    for field, value in (("query", 256), ("output", 256 + query.nbytes), ("scale_log2", SCALE * math.log2(math.e))):
        struct[field] = value
    FloatThreads(ptx, (1, 1), QUADS * QUAD, memory, struct).run()
    found = memory[256 + query.nbytes :].view(np.float32).reshape(QUADS, QUAD, ROWS, 2)
    assert np.array_equal(found, np.broadcast_to(found[:, :1], found.shape), equal_nan=True), "a quad shares its rows"
    return found[:, 0, :, 0], found[:, 0, :, 1]


def scores_of(rng: Any) -> Array:
    return rng.standard_normal((QUADS, ROWS, TILES, QUAD, COLUMNS)).astype(np.float32) * 20


@pytest.mark.parametrize("name", KINDS)
def test_weights_and_logsumexp(name: str) -> None:
    """Rows whose maximum grows little or much in the second tile, and rows with no key in one tile or in both."""
    scores = scores_of(np.random.default_rng(1))
    scores[0, 0, 1] += 300
    scores[1, 0, 0] = scores[2, 0, 1] = scores[3, 0] = -np.inf
    total, logsumexp = run(name, scores)
    with np.errstate(divide="ignore"):
        expected = np.log(np.exp(scores.astype(np.float64) * SCALE).sum(axis=(2, 3, 4)))
    seen = np.isfinite(expected)
    np.testing.assert_allclose(total, seen, rtol=1e-5)
    np.testing.assert_allclose(logsumexp, expected, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tile", [0, 1])
def test_a_score_that_is_nan_makes_its_row_nan(name: str, tile: int) -> None:
    """In any column, that of the polynomial included; other rows do not change."""
    scores = scores_of(np.random.default_rng(2))
    expected = run(name, scores)
    columns = [0, 1, 2, 3, 17, 30, 31]
    for quad, column in enumerate(columns):
        scores[quad, 1, tile, quad % QUAD, column] = np.nan
    for clean, found in zip(expected, run(name, scores), strict=True):
        assert np.isnan(found[: len(columns), 1]).all()
        np.testing.assert_array_equal(found[:, 0], clean[:, 0])
        np.testing.assert_array_equal(found[len(columns) :], clean[len(columns) :])
