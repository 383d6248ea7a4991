"""Tests of plan/resources.py: registers for accumulators, by hand."""

from __future__ import annotations

import pytest

from cutlass_py_attn.plan import resources
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 64), (64, 128)])
def test_accumulators_share_the_threads_of_a_block(head_dims: tuple[int, int]) -> None:
    spec = parse("bf16_d{}v{}_q200_s300_b2_h2_causal".format(*head_dims))
    forward, backward = (plan(spec.problem(direction), "sm_80").build for direction in ("forward", "backward"))
    tile_m, tile_n = forward.tile_m, forward.tile_n
    scores, output = tile_m * tile_n, tile_m * head_dims[1]
    assert resources.accumulator_registers(forward) == (scores + output) // forward.threads
    tile_m, tile_n = backward.tile_m, backward.tile_n
    scores, gradients = tile_m * tile_n, tile_n * sum(head_dims)  # S and dP, dK and dV
    assert resources.accumulator_registers(backward) == (2 * scores + gradients) // backward.threads
