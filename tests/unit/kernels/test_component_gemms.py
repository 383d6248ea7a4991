"""The component GEMMs: swap A/B, and that the fused backward kernels issue no other products."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.kernels import component_gemms
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.component_gemms.products import doivj, matmul_qk
from cutlass_py_attn.launch.gemm_spec import GemmSpec
from cutlass_py_attn.plan.planner import builds
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape

KERNELS = Path(component_gemms.__file__).parents[1]
# The sources of each backward body.
BODIES = {
    "sm80": ("sm80/backward.py",),
    "sm80_split_d": ("sm80_split_d/backward.py",),
    "sm90": ("sm90_backward/backward.py", "sm90_backward/grad_query.py"),
    "sm90_2cta": ("sm90_backward_2cta/backward.py", "sm90_backward_2cta/grad_query.py"),
}
BUILD = builds(Problem.dense("backward", Shape(1, 512, 512, 2, 128, 64), "bfloat16", Full()), "sm_90a")[0]


class RecordingMma:
    """Returns the tiles that it is asked to partition."""

    def __init__(self, spec: GemmSpec) -> None:
        self.spec = spec

    def operands(self, a: Any, b: Any, thread: Any) -> tuple[Any, Any]:
        """A and B."""
        return a, b


@pytest.mark.parametrize("gemm", [matmul_qk, doivj])
def test_swap_ab_transposes_c(gemm: Any) -> None:
    normal, swapped = gemm.spec(BUILD), gemm.spec(BUILD, swap_ab=True)
    assert (swapped.m, swapped.n, swapped.k) == (normal.n, normal.m, normal.k) == (BUILD.tile_n, BUILD.tile_m, normal.k)
    assert (swapped.a_shape, swapped.b_shape) == (normal.b_shape, normal.a_shape)
    assert (normal.equation, swapped.equation) == (gemm.equation, gemm.transposed_equation)
    assert swapped.swap_ab(gemm.equation) == normal
    assert replace(swapped, m=64).is_swapped
    # The caller names the operands in the same order in both forms.
    assert gemm.operands(RecordingMma(normal), "left", "right", 0) == ("left", "right")
    assert gemm.operands(RecordingMma(swapped), "left", "right", 0) == ("right", "left")


def test_majors_change_places() -> None:
    swapped = replace(matmul_qk.spec(BUILD), a_transposed=True).swap_ab("C^T = B A^T")
    assert (swapped.a_transposed, swapped.b_transposed) == (False, True)


@pytest.mark.parametrize("body", BODIES)
def test_fused_kernels_issue_the_component_gemms_alone(body: str) -> None:
    issued = set()
    for file in BODIES[body]:
        for node in ast.walk(ast.parse((KERNELS / file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "issue":
                issued.add(ast.unparse(node.func.value))
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "cute.gemm"), file
    assert issued == set(COMPONENT_GEMMS)
