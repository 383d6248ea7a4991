"""The sm90 forward of wide heads: registers, and the instructions of its machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cutlass_py_attn.kernels.sm90_wide import layout as sm90_wide
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.machine_code import MachineCode
from tools.release import feature_ptx

STEPS = 3  # of a key tile and its successor in the code of a warpgroup: two in the loop, one for an odd number


def problem_of(dims: tuple[int, int], dtype: str = "bfloat16", mask: Mask | None = None, **changes: Any) -> Problem:
    problem = Problem.dense("forward", Shape(2, 200, 304, 4, *dims), dtype, mask or Full())
    return problem.replace(**changes)


SLOPES = Tensor.contiguous((4,), "float32")
CASES = (
    problem_of((512, 64), sinks=SLOPES),
    problem_of((8, 264), mask=Causal(), bias=Tensor.contiguous((2, 4, 200, 304), "bfloat16")),
)
BUILDS = [
    *(planner.plan(problem, "sm_90a").build for problem in CASES),
    *(build for build in feature_ptx.builds().values() if (build.kind, build.variant) == ("forward", "wide")),
]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.symbol)
def test_machine_code(build: Build, machine_code: MachineCode) -> None:
    """The number of wgmma, TMA, stmatrix and setmaxnreg instructions, and the registers at entry.

    compile() itself rejects spills, a stack frame, and ptxas remarks that wgmma instructions are serialised.
    """
    assert build.variant == "wide"
    made = machine_code(build)
    assert (made.registers, made.main.frame_bytes, made.main.spill_bytes) == (168, 0, 0)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx)
    # Each warpgroup computes S in half of its steps, the first one also before them, and O in all steps and behind
    # them. The step for an odd number is that of a key tile of the first warpgroup: S is that of the second.
    expected = [64] * (4 * build.columns // 16)
    for chunks in sm90_wide.value_chunks(build):
        expected += [chunk.columns for chunk in chunks for _ in range((STEPS + 1) * 64 // 16)]
    assert sorted(map(int, products)) == sorted(expected)
    chunks = [*sm90_wide.key_chunks(build), *sm90_wide.key_chunks(build)]
    chunks += [chunk for of_warpgroup in sm90_wide.value_chunks(build) for chunk in of_warpgroup]
    copies = re.findall(r"cp\.async\.bulk\.tensor\.\dd\S*", made.ptx)
    shared = [copy for copy in copies if "multicast::cluster" in copy]
    assert len(shared) == sum(-(-chunk.strips // 2) for chunk in chunks)
    assert len(copies) - len(shared) == build.columns // 64
    assert re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (?:\t)?(\d+)", made.ptx) == [
        ("dec", "24"),
        ("inc", "240"),
    ]
    assert len(re.findall(r"stmatrix\.sync\.aligned\.m8n8\.x4", made.ptx)) == 2 * 4 + 2 * 4


def test_every_kernel_body_and_length_has_the_same_machine_code() -> None:
    """Neither sizes nor the positions of a mask's edges decide the machine code."""
    first = planner.plan(parse("bf16_d512_q70_s90_b1_h2_causal").problem("forward"), "sm_90a").build
    other = planner.plan(parse("bf16_d512_q9000_s700_b3_h5_causal_br").problem("forward"), "sm_90a").build
    assert first == other
