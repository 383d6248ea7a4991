"""kernels/sm90_wide/backward.py: the main kernel executed for all clusters of a small problem, and its instructions."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.kernels.sm90_wide import backward_layout as sm90_wide_backward
from cutlass_py_attn.kernels.sm90_wide.backward_layout import GRAD_KEY, GRAD_QUERY, GRAD_VALUE
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.tensors import LSE_PADDING
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.cluster_emulator import CANARY, Cluster
from tests.support.machine_code import MachineCode
from tests.support.ptx_threads import Array

GUARD = 4096  # bytes before and after each tensor
ROWS = 64  # of a query tile
ERROR = 2e-3  # largest, relative to the norm or to the largest element; float16 has 11 bits
GRADIENTS = ("grad_query", "grad_key", "grad_value")
# Two key tiles and two query tiles a cluster, some of them partial or outside, and two query heads of a group.
CASE = "backward f16_d8v264_q70_s200_b1_h2k1_causal"
# In the code of a warpgroup: steps of a tile and its successor, two in the loop and one for an odd number, and the last
# tile. It computes scores in half of the steps, the first warpgroup also before them; the step for an odd number is one
# of the first warpgroup's tiles: its successor's scores are those of the second.
RESULTS, SCORES = 4, 2
STORED_WORDS = 64 * 64 // 128 // 2 // 4  # stmatrix.x4 of P or dS of a tile, by four warps


def statistics(case: Case, arrays: dict[str, Array], total_tiles: int) -> dict[str, Array]:
    """Returns what the delta kernel writes: delta and the logsumexp in base 2, (heads, rows of whole tiles)."""
    shape = case.spec.num_heads, total_tiles * ROWS
    found = {"delta": np.zeros(shape, np.float32), "logsumexp_log2": np.full(shape, np.inf, np.float32)}
    products = arrays["output"].astype(np.float32) * arrays["grad_output"].astype(np.float32)
    tiles = -(-case.problem().shape.num_queries // ROWS)
    for each in case.sequences:
        first = each.queries.start // ROWS + each.index if case.spec.sequences else each.index * tiles
        rows = slice(first * ROWS, first * ROWS + each.num_queries)
        lse = arrays["logsumexp"][each.index, :, : each.num_queries]
        found["logsumexp_log2"][:, rows] = np.where(np.isfinite(lse), lse * math.log2(math.e), np.inf)
        found["delta"][:, rows] = np.where(np.isfinite(lse), products[each.batch, each.queries].sum(-1).T, 0.0)
    return found


def emulate(case: Case, seed: int, machine_code: MachineCode) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the gradients and what they should be, in float64."""
    problem, arrays = case.problem(), case.arrays()
    plan = planner.plan(problem, "sm_90a")
    assert plan.build.variant == "wide"
    made = machine_code(plan)
    forward = guarded_check.by_reference(case, arrays, "float64")
    padded = -(-problem.shape.num_queries // LSE_PADDING) * LSE_PADDING
    assert forward["logsumexp"].shape[2] == padded
    arrays |= {"output": forward["output"].astype(arrays["query"].dtype), "logsumexp": forward["logsumexp"]}
    truth = guarded_check.by_reference(case, arrays, "float64")
    numbers: dict[str, Any] = dict(plan.params)
    placed = arrays | statistics(case, arrays, numbers["total_tiles"])
    for name in GRADIENTS:
        placed[name] = np.full(truth[name].shape, np.nan, arrays["query"].dtype)
    starts, end = {}, GUARD
    for name, array in placed.items():
        starts[name] = end
        end += -(-array.nbytes // 256) * 256 + GUARD
    memory = np.full(end, CANARY, np.uint8)
    for name, array in placed.items():
        memory[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    before = memory.copy()
    for name, tensor in problem.tensors().items():
        axes = zip(("batch", "row", "head"), tensor.strides, strict=False)
        numbers |= {f"{name}_{axis}": step for axis, step in axes}
    scale = problem.scale_value
    numbers |= {**starts, "scale": scale, "scale_log2": scale * math.log2(math.e), "softcap": problem.softcap}
    struct = np.zeros(1, abi.numpy_struct(abi.fields_of(plan.build)))
    for name in struct.dtype.names or ():
        struct[name] = numbers.get(name, 0)
    (launch,) = (each for each in plan.launches if each.tensor_maps)
    cluster = Cluster(made.ptx, launch, memory, struct, starts, arrays["query"].dtype, seed)
    for batch in range(launch.grid[2]):
        for head in range(launch.grid[1]):
            for number in range(launch.grid[0] // 2):
                cluster.run(number, head, batch)
    found = {}
    for name in GRADIENTS:
        part = slice(starts[name], starts[name] + placed[name].nbytes)
        found[name] = memory[part].view(placed[name].dtype).reshape(placed[name].shape).astype(np.float64)
        before[part] = memory[part]
    assert np.array_equal(memory, before), "something else was written"
    return found, {name: truth[name] for name in GRADIENTS}


@pytest.mark.slow
def test_gradients(machine_code: MachineCode) -> None:
    case = Case.parse(CASE)
    found, truth = emulate(case, seed=1, machine_code=machine_code)
    for name in GRADIENTS:
        error = found[name] - truth[name]
        assert np.linalg.norm(error) < ERROR * np.linalg.norm(truth[name]), name
        assert np.abs(error).max() < ERROR * np.abs(truth[name]).max(), name


@pytest.mark.slow
def test_machine_code(machine_code: MachineCode) -> None:
    """The number of wgmma, TMA, stmatrix and setmaxnreg instructions, and the registers at entry.

    compile() itself rejects spills, a stack frame, and ptxas remarks that wgmma instructions are serialised.
    """
    made = machine_code(planner.plan(Case.parse(CASE).problem(), "sm_90a"))
    build = made.build
    assert (made.registers, made.main.frame_bytes, made.main.spill_bytes) == (168, 0, 0)
    products: list[int] = []
    shared = resident = 0
    for gradient in (GRAD_QUERY, GRAD_KEY, GRAD_VALUE):
        scores = [chunk for chunks in sm90_wide_backward.score_chunks(build, gradient) for chunk in chunks]
        results = [chunk for chunks in sm90_wide_backward.result_chunks(build, gradient) for chunk in chunks]
        products += [64] * (2 * SCORES * sum(chunk.columns for chunk in scores) // 16)
        products += [chunk.columns for chunk in results for _ in range(RESULTS * 64 // 16)]
        shared += sum(-(-chunk.strips // 2) for chunk in (*scores, *scores, *results))
        resident += sum(sm90_wide_backward.columns_of(build, operand) // 64 for operand, _ in gradient.products)
    found = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", made.ptx)
    assert sorted(map(int, found)) == sorted(products)
    copies = re.findall(r"cp\.async\.bulk\.tensor\.\dd\S*", made.ptx)
    assert len([copy for copy in copies if "multicast::cluster" in copy]) == shared
    assert len(copies) - shared == resident
    assert re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32 (?:\t)?(\d+)", made.ptx) == [
        ("dec", "24"),
        ("inc", "240"),
    ]
    assert len(re.findall(r"stmatrix\.sync\.aligned\.m8n8\.x4", made.ptx)) == 3 * 2 * SCORES * STORED_WORDS
