"""Tests of the kernels of a registered score term: they compile without spills, and read the term's fields."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.cases.distance_squared import distance_squared

compiler = pytest.importorskip("cutlass_py_attn.compilation.compiler")
pytest.importorskip("cutlass")

PASSES: dict[str, dict[str, Any]] = {
    "forward": {},
    "backward": {},
    "forward with others": {"softcap": 2.0, "alibi_slopes": Tensor.contiguous((4,), "float32")},
}


@pytest.mark.parametrize("which", PASSES)
def test_compiles(which: str) -> None:
    shape = Shape(2, 256, 256, 4, 64, 64)
    slopes = Tensor.contiguous((2, 4), "float32")
    with distance_squared() as term:
        problem = Problem.dense(which.split()[0], shape, "bfloat16", Causal())
        problem = problem.replace(score_terms=((term.name, slopes),), **PASSES[which])
        build = plan(problem, "sm_90").build
        artifact = compiler.compile(build)
        offsets = {name: offset for name, offset, _ in abi.layout(abi.fields_of(build))}
    assert (artifact.main.spill_bytes, artifact.main.frame_bytes) == (0, 0)
    for name in (term.name, f"{term.name}_batch"):
        assert re.search(rf"ld\.param\.\w+\s+[^;]*_param_0\+{offsets[name]}\]", artifact.ptx), name
