"""Backwards of the sm90 family with a bias, and its gradient: their machine code, with late copies and products."""

from __future__ import annotations

import pytest

from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.testing.cases import Case
from tests.emulation.test_ds_registers import check
from tests.support.machine_code import MachineCode

NUM_SMS = 1
DS = "64x128x16:3,2+ds_registers"


@pytest.mark.parametrize(
    ("tile", "line", "vector_bytes", "is_eager"),
    [
        (DS, "backward bf16_d128_q150_s144_b1_h1_full_bias seed=1", 16, False),
        (DS, "backward f16_d128_q100_s136_b1_h2k1_causal_br_bias11qk seed=2", 16, True),
        (DS, "backward bf16_d128_q96_s144_b1_h1_full_bias bias_inputs=hidden_rows seed=3", 16, True),
        ("64x128x16:3,2", "backward bf16_d96_q150_s142_b1_h1_causal_br_bias seed=4", 4, True),
        ("64x128x16:4,3k2", "backward f16_d64_q150_s150_b1_h1_causal_window50_bias_deterministic seed=5", 4, False),
        ("64x128x16:3,2", "backward bf16_d128_q70_s141_b1_h1_full_bias bias_layout=transposed seed=6", 2, False),
        ("64x128x16:3,2", "backward bf16_d128_q70_s144_b1_h1_causal_bias1hq1 seed=7", 2, True),
        ("64x128x16:3,2", "backward f16_d128_q70_s144_b1_h1_causal_bias_alibi_sinks seed=8", 16, True),
        ("64x128x16:3,2+per_head", "backward bf16_d128_q64_s64_b1_h2_full_bias seed=9", 16, True),
        ("64x128x16:5,4q32", "backward bf16_d192v128_q100_s144_b1_h1_causal_bias seed=10", 16, False),
        (DS, "backward bf16_d128_q150_s144_b1_h1_full_biasgrad seed=11", 16, False),
        (DS, "backward f16_d128_q150_s264_b1_h2k1_causal_br_biasgrad seed=12", 16, True),
        ("64x128x16:3,2", "backward bf16_d96_q150_s136_b1_h2_causal_bias11qkgrad seed=13", 16, False),
        (
            "64x128x16:4,3k2",
            "backward f16_d64_q270_s264_b1_h1_causal_window30_biasgrad_deterministic seed=14",
            16,
            True,
        ),
        ("64x128x16:3,2+per_head", "backward bf16_d128_q64_s64_b1_h2_full_biasgrad seed=15", 16, False),
        ("64x128x16:5,4q32", "backward bf16_d192v128_q100_s144_b1_h1_causal_biasgrad seed=16", 16, False),
        ("64x64x12:4,3", "backward bf16_d64_q150_s72_b1_h1_causal_br_biasgrad_sinks seed=17", 16, True),
        (DS, "backward bf16_d128_q70_s264_b1_h1_causal_biasgrad seed=18", 16, False),
        (DS, "backward bf16_d128_q100_s136_b1_h2_full_biasb1qksum seed=19", 16, True),
        ("64x128x16:4,3k2", "backward f16_d64_q70_s150_b1_h2k1_causal_br_biasb1qksum_sinks seed=20", 4, False),
        ("64x128x16:4,3", "backward f16_d64_q200_s264_b1_h3_causal_br_biasb1qksum seed=21", 16, False),
        ("64x128x16:3,2", "backward bf16_d96_q150_s136_b1_h2_full_biasb1qksum seed=22", 16, True),
        ("64x128x16:4,3", "backward bf16_d64_q70_s72_b1_h2k1_full_biasb1qksum seed=23", 16, True),
    ],
)
def test_gradients(tile: str, line: str, vector_bytes: int, is_eager: bool, machine_code: MachineCode) -> None:
    case = Case.parse(line)
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse(tile), NUM_SMS, family="sm90")
    assert plan.build.bias_vector_bytes == vector_bytes
    check(case, plan, machine_code(plan), is_eager=is_eager)


def test_blocks_share_the_pairs_of_a_tile(machine_code: MachineCode) -> None:
    case = Case.parse("backward bf16_d64_q70_s72_b1_h9k3_causal_biasb1qksum seed=16")
    tile = TileConfig.parse("64x128x16:4,3")
    plan = planner.plan_with_tile(case.problem(), "sm_90a", tile, 2, family="sm90")
    assert plan.launches[-1].grid == (2, 1, 1), "one tile"
    assert plan.workspace.zero_bytes == 8 * 4, "a count for each warp"
    check(case, plan, machine_code(plan), is_eager=True)


class BiasOfEachHead(Case):
    """A case whose bias has every axis in full, while its gradient is summed over some."""

    def problem(self) -> Problem:
        found = super().problem()
        return found.replace(bias=Tensor.contiguous(found.shape.bias, found.dtype))


def test_the_pairs_of_a_tile_have_biases_of_their_own(machine_code: MachineCode) -> None:
    case = BiasOfEachHead.parse("backward bf16_d64_q70_s136_b1_h3_causal_biasb1qksum seed=17")
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse("64x128x16:4,3"), NUM_SMS, family="sm90")
    assert plan.build.grad_bias_mode == "h"
    check(case, plan, machine_code(plan), is_eager=False)
