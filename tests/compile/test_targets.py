"""Every target of launch/arch.py: its fused kernels compile within the limits of their plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cutlass_py_attn.compilation.cubin import read
from cutlass_py_attn.launch.arch import ARCHITECTURES, architecture
from cutlass_py_attn.plan.planner import plan_backward, plan_forward
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support.machine_code import MachineCode

SHAPE = Shape(1, 8192, 8192, 8, 64, 64)  # so long that the kernels of sm_90a are those that ptx/ shows
SAME = {"sm_87": "sm_80", "sm_89": "sm_86"}  # the same code apart from its target: one backward is enough


@pytest.mark.parametrize(
    ("arch", "direction"),
    [
        *((arch, "forward") for arch in ARCHITECTURES),
        *((arch, "backward") for arch in ARCHITECTURES if arch not in SAME),
    ],
)
def test_fused_kernels_of_a_target(arch: str, direction: str, machine_code: MachineCode) -> None:
    problem = Problem.dense(direction, SHAPE, "bfloat16", Causal())
    plan = plan_forward(problem, arch) if direction == "forward" else plan_backward(problem, arch)
    made = machine_code(plan)
    limits = architecture(arch)
    assert read(made.cubin).sm == int("".join(map(str, limits.compute_capability)))
    assert re.search(rf"\.target {arch}\b", made.ptx)
    assert max(launch.shared_memory_bytes for launch in plan.launches) <= limits.shared_memory_per_block
    assert all(kernel.spill_bytes == kernel.frame_bytes == 0 for kernel in made.kernels)
    vectors, bulk = r"red\.relaxed\.gpu\.global\.add\.v4\.f32", r"cp\.reduce\.async\.bulk\S*\.add\.f32"
    reductions = re.findall(bulk if plan.build.family == "sm90" else vectors, made.ptx)
    assert bool(reductions) == (direction == "backward" and limits.vector_red)


@pytest.mark.parametrize(("arch", "other"), SAME.items())
def test_targets_of_the_same_code(arch: str, other: str) -> None:
    problem = Problem.dense("backward", SHAPE, "bfloat16", Causal())
    assert replace(plan_backward(problem, arch).build, arch=other) == plan_backward(problem, other).build
