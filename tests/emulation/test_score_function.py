"""Kernels of a score function: their machine code executed, in the sm90 family."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import builder, planner
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing.cases import Case
from tests.cases.nearness import NAME, nearness
from tests.support.backward_block import BackwardBlock
from tests.support.block_emulator import EmulatedBlock, emulate
from tests.support.machine_code import MachineCode

ERROR = 0.004  # relative L2 error of 16-bit operands
WEIGHTS = np.array([[0.5, -0.3], [0.2, 0.9]], np.float32)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with nearness():
        yield


@pytest.mark.parametrize(
    ("line", "tile"),
    [
        ("forward bf16_d64_q200_s300_b2_h2k1_causal_br", "192x64x16:2"),
        ("forward f16_d128_q130_s200_b2_h2_full_softcap4", "64x64x8:2"),
        ("backward bf16_d128_q200_s300_b2_h2k1_causal", "64x64x12:3,2"),
        ("backward f16_d64_q130_s200_b2_h2_full", "64x64x12:4,3"),
    ],
)
def test_results(line: str, tile: str, machine_code: MachineCode) -> None:
    case = Case.parse(f"{line} seed=3")
    arrays = case.arrays()
    weights = Tensor.contiguous(WEIGHTS.shape, "float32")
    problem = case.problem().replace(score_terms=((NAME, weights),))
    build, refused = builder.build_for(problem, "sm_90a", TileConfig.parse(tile), "sm90")
    assert not refused
    plan = planner.plan_of_build(problem, build, 2)
    operands = [arrays[name] for name in ("query", "key", "value")]
    terms = numpy_reference.ReferenceScoreMod(softcap=problem.softcap, score_terms={NAME: WEIGHTS})
    output, logsumexp = numpy_reference.forward(*operands, mask=problem.mask, score_mod=terms)
    expected, block = {"output": output}, EmulatedBlock
    if case.direction == "backward":
        block = BackwardBlock
        arrays |= {"output": output.astype(arrays["query"].dtype), "logsumexp": logsumexp}
        gradients = numpy_reference.backward(
            arrays["grad_output"], *operands, arrays["output"], logsumexp, mask=problem.mask, score_mod=terms
        )
        expected = {f"grad_{name}": getattr(gradients, name) for name in problem.gradients}
    outputs = (*expected, *(("logsumexp",) if case.direction == "forward" else ()))
    arrays |= {NAME: WEIGHTS}
    results = emulate(
        problem, plan, machine_code(plan).ptx, arrays, seed=7, block=block, outputs=outputs, is_eager=False
    )
    for name, truth in expected.items():
        error = np.linalg.norm(results[name].astype(np.float64) - truth)
        assert error < ERROR * np.linalg.norm(truth), name
