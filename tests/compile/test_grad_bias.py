"""kernels/backward_parts/grad_bias.py, grad_sinks.py: entries, grids and shared memory, and that they compile."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product

import pytest

from cutlass_py_attn.kernels.backward_parts.grad_bias_layout import grad_bias_build, grad_bias_chunk
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.smem import tile_bytes
from cutlass_py_attn.plan.plan import Launch, Plan
from cutlass_py_attn.plan.planner import plan_backward
from cutlass_py_attn.problem.masks import FORMS, Causal, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import OPERANDS, Shape, Tensor
from tests.support.machine_code import MachineCode

SHAPE = Shape(2, 300, 500, 4, 64, 64)
SUMMED = {  # shape of grad_bias by the axes that are summed over
    "": (2, 4, 300, 500),
    "b": (1, 4, 300, 500),
    "bh": (1, 1, 300, 500),
    "bhq": (1, 1, 1, 500),
    "k": (2, 4, 300, 1),
    "bhqk": (1, 1, 1, 1),
}
MASKS = {"full": Full(), "causal": Causal(), "local": Window(40, 20)}


def problem(shape: Shape, dtype: str, grad_bias: tuple[int, ...], *, mask: str = "full", alone: bool = True) -> Problem:
    """A backward with a bias and sinks and both gradients; `alone` without those of query, key and value."""
    given = Problem.dense("backward", shape, dtype, MASKS[mask])
    sinks = Tensor.contiguous((shape.num_heads,), "float32")
    given = given.replace(bias=Tensor.contiguous(shape.bias, dtype), sinks=sinks, grad_sinks=sinks)
    given = given.replace(grad_bias=Tensor.contiguous(grad_bias, dtype))
    return given.replace(**{f"grad_{name}": None for name in OPERANDS}) if alone else given


def launch_of(plan: Plan, role: str) -> Launch:
    """The launch of the entry with that role."""
    return next(launch for launch in plan.launches if launch.symbol == entry_points.entries(plan.build)[role])


@pytest.mark.parametrize(
    ("summed", "alone", "softcap", "expected"),
    [
        ("", False, 0.0, "main"),
        ("", False, 5.0, "none"),
        ("", True, 0.0, "none"),
        ("b", False, 0.0, "b"),
        ("bhq", True, 0.0, "bhq"),
        ("k", True, 5.0, "k"),
    ],
)
def test_which_kernel_computes_the_gradient(summed: str, alone: bool, softcap: float, expected: str) -> None:
    given = problem(SHAPE, "bfloat16", SUMMED[summed], alone=alone).replace(softcap=softcap)
    build = plan_backward(given, "sm_90").build
    assert build.grad_bias_mode == expected
    others = [] if alone else ["main", "finish"]
    own = [] if expected == "main" else ["bias"]
    found = entry_points.entries(build)
    assert sorted(found) == sorted(["delta", *others, *own, "sinks"])
    order = [role for role in ("main", "delta", "finish", "bias", "sinks") if role in found]
    assert [found[role].rsplit("_", 1)[1] for role in order] == [str(number) for number in range(len(order))]


@pytest.mark.parametrize("summed", SUMMED)
def test_one_block_for_each_tile_of_the_gradient(summed: str) -> None:
    plan = plan_backward(problem(SHAPE, "bfloat16", SUMMED[summed]), "sm_90")
    build = plan.build
    query_tiles = 1 if "q" in summed else -(-300 // build.tile_m)
    key_tiles = 1 if "k" in summed else -(-500 // build.tile_n)
    launch = launch_of(plan, "bias")
    assert launch.grid == (query_tiles * key_tiles, 1 if "h" in summed else 4, 1 if "b" in summed else 2)
    assert launch.block == (build.threads, 1, 1)
    sinks = launch_of(plan, "sinks")
    assert (sinks.grid, sinks.block) == ((4, 1, 1), (entry_points.ROW_THREADS, 1, 1))
    assert sinks.shared_memory_bytes == 4 * entry_points.ROW_THREADS // 32


def test_a_grid_in_pieces() -> None:
    shape = replace(SHAPE, batch=70000, num_queries=8, num_keys=8)
    plan = plan_backward(problem(shape, "bfloat16", (70000, 1, 8, 8)), "sm_90")
    pieces = [launch for launch in plan.launches if launch.symbol == entry_points.entries(plan.build)["bias"]]
    assert [launch.grid for launch in pieces] == [(1, 1, 65535), (1, 1, 4465)]
    assert dict(pieces[1].param_overrides) == {"first_head": 0, "first_batch": 65535}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
def test_shared_memory_fits_and_buffers_are_disjoint(dtype: str, arch: str) -> None:
    for head_dim, mask in product((8, 32, 64, 96, 128, 160, 192, 256, 512, 2048), FORMS):
        shape = replace(SHAPE, head_dim=head_dim, head_dim_value=72)
        build = grad_bias_build(plan_backward(problem(shape, dtype, SUMMED["bh"], mask=mask), arch).build)
        assert build.shared_memory_bytes <= architecture(arch).shared_memory_per_block
        for first, second in pairwise(build.shared_memory):
            assert first.offset + first.bytes <= second.offset
        # The sums of all warps and the finished tile go to the place of the first ring.
        left, scores = build.buffer("left").bytes, tile_bytes(dtype, build.tile_m, build.tile_n)
        assert left >= max(scores, 4 * build.warps * max(build.tile_m, build.tile_n))


def test_shared_memory_does_not_grow_with_the_head() -> None:
    shapes = [replace(SHAPE, head_dim=head_dim) for head_dim in (512, 1024, 65536)]
    plans = [plan_backward(problem(shape, "bfloat16", SUMMED["b"]), "sm_90") for shape in shapes]
    assert len({launch_of(plan, "bias").shared_memory_bytes for plan in plans}) == 1
    assert {grad_bias_chunk(plan.build) for plan in plans} == {128}


@pytest.mark.parametrize(
    ("dtype", "head_dim", "mask", "summed", "arch"),
    [
        ("bfloat16", 64, "local", "b", "sm_90"),
        ("float16", 192, "causal", "bhq", "sm_80"),
        ("float32", 96, "full", "bhqk", "sm_86"),
    ],
)
def test_entries_compile_without_atomics(
    dtype: str, head_dim: int, mask: str, summed: str, arch: str, machine_code: MachineCode
) -> None:
    shape = replace(SHAPE, head_dim=head_dim, head_dim_value=40, num_heads_key=2)
    plan = plan_backward(problem(shape, dtype, SUMMED[summed], mask=mask), arch)
    made = machine_code(plan)  # refuses spills, wrong names and static shared memory
    assert [kernel.symbol for kernel in made.kernels] == list(entry_points.entries(plan.build).values())
    assert not re.search(r"\b(atom|red)\.", made.ptx)
    assert {"mma.sync", "cp.async.cg"} <= set(re.findall(r"mma\.sync|cp\.async\.cg", made.ptx))
