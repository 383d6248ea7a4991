"""Kernels of mask form "ranges": none spills."""

from __future__ import annotations

import pytest

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.listed_plans import ARCH, BACKWARD, FORWARD, ranges_build, with_ranges
from tests.support.machine_code import MachineCode

SINKS = Tensor.contiguous((16,), "float32")
FIRST = "register usage level 5, "  # of the allocations that the compiler tries; it takes none that spills


@pytest.mark.parametrize(
    ("direction", "head_dim", "heads_key", "has_sinks", "tile"),
    [
        ("forward", 64, 16, False, FORWARD[64]),
        ("forward", 128, 16, False, FORWARD[128]),
        ("forward", 128, 4, True, FORWARD[128]),
        ("forward", 128, 16, False, "128x128x12:2"),
        ("backward", 64, 16, False, BACKWARD[64]),
        ("backward", 128, 16, False, BACKWARD[128]),
        ("backward", 128, 4, True, BACKWARD[128]),
        ("backward", 128, 16, False, "64x128x16:3,2"),
    ],
)
def test_machine_code(
    direction: str, head_dim: int, heads_key: int, has_sinks: bool, tile: str, machine_code: MachineCode
) -> None:
    problem = Problem.dense(direction, Shape(2, 4096, 4096, 16, head_dim, head_dim, heads_key), "bfloat16")
    if has_sinks:
        problem = problem.replace(sinks=SINKS, grad_sinks=SINKS if direction == "backward" else None)
    build = ranges_build(with_ranges(problem), tile)
    made = machine_code(build)
    assert made.allocation.startswith(FIRST)
    assert made.registers == architecture(ARCH).register_limit(build.threads)
    assert not any(kernel.spill_bytes or kernel.frame_bytes for kernel in made.kernels)
