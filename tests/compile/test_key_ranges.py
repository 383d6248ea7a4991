"""Kernels of mask form "ranges": none spills."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.entry_points import entries
from cutlass_py_attn.launch.variants import KEY_REGISTERS
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape, Tensor
from tests.support.listed_plans import ARCH, with_ranges
from tests.support.machine_code import MachineCode

SINKS = Tensor.contiguous((16,), "float32")


def problems() -> Iterator[Problem]:
    """Yields problems of all rows of the tile tables: with groups of heads and sinks or without, in both dtypes."""
    for direction, head_dim in product(("forward", "backward"), (32, 64, 96, 128, 192, 256)):
        if direction == "backward" and head_dim > 128:
            continue
        for dtype, heads_key, has_sinks in (("bfloat16", 16, False), ("bfloat16", 4, True), ("float16", 4, False)):
            problem = Problem.dense(direction, Shape(2, 4096, 4096, 16, head_dim, head_dim, heads_key), dtype)
            if has_sinks:
                problem = problem.replace(sinks=SINKS, grad_sinks=SINKS if direction == "backward" else None)
            yield with_ranges(problem)


def first_plan(problem: Problem) -> Plan:
    """Returns the plan that is tried first; in float16 the second behind key_registers, which spills."""
    plans = planner.plans_on(problem, (9, 0))
    return plans[problem.dtype == "float16" and plans[0].build.variant == KEY_REGISTERS]


@pytest.mark.parametrize("problem", problems(), ids=lambda problem: planner.plan(problem, ARCH).symbol)
def test_machine_code(problem: Problem, machine_code: MachineCode) -> None:
    build = first_plan(problem).build
    made = machine_code(build)
    main = next(kernel for kernel in made.kernels if kernel.symbol == entries(build)["main"])
    assert main.registers == architecture(ARCH).register_limit(build.threads)
    assert not any(kernel.spill_bytes or kernel.frame_bytes for kernel in made.kernels)
