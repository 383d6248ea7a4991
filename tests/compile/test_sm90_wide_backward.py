"""The sm90 backward of wide heads: registers, and the instructions of its machine code."""

from __future__ import annotations

import re

import pytest

from cutlass_py_attn.compilation.compiler import compile as compile_now
from cutlass_py_attn.plan import planner, sm90_wide_backward
from cutlass_py_attn.plan.sm90_wide_backward import GRAD_KEY, GRAD_QUERY, GRAD_VALUE
from cutlass_py_attn.problem.spec import parse

# In the code of a warpgroup: steps of a tile and its successor, two in the loop and one for an odd number, and the last
# tile. It computes scores in half of the steps, the first warpgroup also before them; the step for an odd number is one
# of the first warpgroup's tiles: its successor's scores are those of the second.
RESULTS, SCORES = 4, 2
STORED_WORDS = 64 * 64 // 128 // 2 // 4  # stmatrix.x4 of P or dS of a tile, by four warps


@pytest.mark.slow
def test_machine_code() -> None:
    """The number of wgmma, TMA, stmatrix and setmaxnreg instructions, and the registers at entry.

    compile() itself rejects spills, a stack frame, and ptxas remarks that wgmma instructions are serialised.
    """
    build = planner.plan(parse("f16_d8v264_q200_s300_b2_h2_full").problem("backward"), "sm_90a").build
    assert build.variant == "wide"
    made = compile_now(build)
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


def test_lengths_and_edges_do_not_decide_the_machine_code() -> None:
    first = planner.plan(parse("bf16_d512_q70_s90_b1_h2_causal").problem("backward"), "sm_90a").build
    other = planner.plan(parse("bf16_d512_q9000_s700_b3_h5_causal_br").problem("backward"), "sm_90a").build
    assert first == other
