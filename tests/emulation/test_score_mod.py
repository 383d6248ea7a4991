"""kernels/common/score_mod.py: the machine code of score terms on given products, executed against the reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import launch_rules, planner
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.reference.score_mod import HeadScoreMod, ReferenceScoreMod, SeqlenInfo
from cutlass_py_attn.score_terms.softcap import SOFTCAP
from tests.cases.distance_squared import distance_squared
from tests.support.ptx_floats import FloatThreads
from tests.support.ptx_threads import Array
from tests.support.traced import compile_traced

SLOPES = np.array([[9.0, 9.0], [9.0, -0.003]], np.float32)  # the scores of the second batch and head are computed
ALIBI = np.array([9.0, 0.3], np.float32)
BATCH = HEAD = 1


def run(problem: Problem, products: Array, arrays: dict[str, Array], tiles: tuple[int, int]) -> Array:
    """The scores in base 2 that the kernel computes of the products."""
    score_mod_kernel = pytest.importorskip("tests.support.score_mod_kernel")
    build = planner.plan(problem, "sm_90").build
    assert (build.family, build.tile_m, build.tile_n) == ("sm80", *tiles)
    ptx = compile_traced(build, score_mod_kernel.trace).ptx
    named = {"query": products, "output": np.zeros_like(products), **arrays}
    starts = dict(zip(named, 256 + np.cumsum([0, *(array.nbytes for array in named.values())]), strict=False))
    memory = np.concatenate([np.zeros(256, np.uint8), *(array.reshape(-1).view(np.uint8) for array in named.values())])
    struct = np.zeros(1, abi.numpy_struct(abi.fields_of(build)))
    sizes: dict[str, Any] = {**dict(launch_rules.params(problem, build)), "scale": problem.scale_value}
    sizes |= {"scale_log2": problem.scale_value * math.log2(math.e), "softcap": problem.softcap}
    sizes["distance_squared_batch"] = problem.shape.num_heads
    for name, value in {**sizes, **starts}.items():
        struct[name] = value
    grid = products.shape[0] // build.tile_m, products.shape[1] // build.tile_n
    FloatThreads(ptx, grid, build.threads, memory, struct).run()
    start = int(starts["output"])
    return memory[start : start + products.nbytes].view(np.float32).reshape(products.shape)


@pytest.mark.parametrize(
    ("sizes", "mask", "softcap", "alibi"),
    [((128, 128), Full(), 0.0, False), ((101, 120), Causal(), 0.0, False), ((128, 99), Causal(), 4.0, True)],
)
def test_scores(sizes: tuple[int, int], mask: Mask, softcap: float, alibi: bool) -> None:
    rng = np.random.default_rng(1)
    products = rng.standard_normal((128, 128)).astype(np.float32) * 8
    with distance_squared() as term:
        arrays = {term.name: SLOPES} | ({"alibi_slopes": ALIBI} if alibi else {})
        problem = Problem.dense("forward", Shape(2, *sizes, 2, 64, 64), "bfloat16", mask)
        problem = problem.replace(
            softcap=softcap,
            alibi_slopes=Tensor.contiguous((2,), "float32") if alibi else None,
            score_terms=((term.name, Tensor.contiguous((2, 2), "float32")),),
        )
        found = run(problem, products, arrays, (128, 64))
        given = ReferenceScoreMod(score_terms={term.name: SLOPES}, alibi_slopes=ALIBI if alibi else None)
        sequence = SeqlenInfo(BATCH, BATCH, slice(0, sizes[0]), slice(0, sizes[1]))
        head = HeadScoreMod.create(given, sequence, HEAD)
        rows, keys = slice(0, sizes[0]), slice(0, sizes[1])
        expected = products[rows, keys].astype(np.float64) * problem.scale_value
        if softcap:
            expected, _ = SOFTCAP.reference_capped(expected, softcap, lambda values: values)
        added = head.sum_of_added(rows, keys, np.dtype(np.float64), lambda values: values)
    assert added is not None
    visible = mask.materialise(*sizes)
    expected = np.where(visible, (expected + added) * math.log2(math.e), -np.inf)
    np.testing.assert_allclose(found[rows, keys], expected, rtol=1e-5, atol=1e-4)
    assert np.isneginf(found[:, sizes[1] :]).all()
