"""Plans of the e4m3 forward: tiles, shared memory, parameters, and what no kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import planner, tile_rules
from cutlass_py_attn.plan.sm90_e4m3 import part_columns
from cutlass_py_attn.plan.sm90_smem import registers
from cutlass_py_attn.plan.variants import E4M3
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor


def problem_of(name: str) -> Problem:
    return parse(name).problem("forward")


@pytest.mark.parametrize(
    ("name", "symbol", "columns"),
    [
        ("e4m3_d64_s8192_b4_h16_causal", "fwd_sm90_e4m3_d64_causal_e4m3_192x128", 64),
        ("e4m3_d128_s8192_b4_h16_full", "fwd_sm90_e4m3_d128_full_e4m3_128x128", 128),
        ("e4m3_d80v48_s100_b1_h1_full_f16out", "fwd_sm90_e4m3_d80v48_full_float16_output_e4m3_192x128", 64),
        ("e4m3_d192_s100_b1_h4k2_causal_br", "fwd_sm90_e4m3_d192_causal_grouped_e4m3_128x128", 64),
        ("e4m3_d256_s100_b1_h1_window_left3_right4", "fwd_sm90_e4m3_d256_local_e4m3_128x64", 64),
        ("e4m3_d128_n50x60u30,7_h1_causal_window9", "fwd_sm90_e4m3_d128_local_seqused_varlen_e4m3_128x64", 128),
    ],
)
def test_plans(name: str, symbol: str, columns: int) -> None:
    """The planner's choice, its registers and shared memory, and the columns of a key tile's sum."""
    plan = planner.plan_forward(problem_of(name), "sm_90a")
    build = plan.build
    assert plan.symbol == symbol
    assert part_columns(build) == columns
    assert build.columns % 64 == build.columns_value % 64 == 0
    loading, computing = registers(build)
    assert 128 * (loading + build.tile_m // 64 * computing) <= 65536
    of_value, transposed = build.buffer("value"), build.buffer("value_transposed")
    assert of_value.bytes == transposed.bytes == 2 * build.tile_n * build.columns_value
    (launch,) = plan.launches
    assert [it.swizzle_bytes for it in launch.tensor_maps] == [it.box[0] for it in launch.tensor_maps], "bytes"


def test_later_plans_need_fewer_registers() -> None:
    first, second = planner.plans(problem_of("e4m3_d256_s100_b1_h1_full"), "sm_90a")
    assert (first.build.tile_m, part_columns(first.build)) == (128, 64)
    assert (second.build.tile_m, part_columns(second.build)) == (64, 32)


@pytest.mark.parametrize(
    ("word", "strides"), [("", (0, 0)), ("_descalet", (0, 0)), ("_descaleh", (0, 1)), ("_descalebh", (2, 1))]
)
def test_strides_of_factors(word: str, strides: tuple[int, int]) -> None:
    problem = problem_of(f"e4m3_d64_s100_b3_h4k2_full{word}")
    params = dict(planner.plan_forward(problem, "sm_90a").params)
    for name in SCALES:
        assert (params[f"{name}_batch"], params[f"{name}_head"]) == strides
    assert {*problem.vectors()} == ({*SCALES} if word else set())


def test_explain() -> None:
    text = planner.plan_forward(problem_of("e4m3_d256_s100_b1_h1_full_f16out"), "sm_90a").explain()
    assert "variant          e4m3" in text
    assert "output           float16" in text
    assert "sums of O        each key tile apart, 64 of 256 columns at a time, added in float32" in text
    assert "one warp loads, two transpose values" in text


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("e4m3_d64_s100_b1_h1_full_sinks", "sinks"),
        ("e4m3_d64_s100_b1_h1_full_softcap30", "softcap"),
        ("e4m3_d64_s128_b1_h1_full_paged16", "paged"),
        ("e4m3_d320_s100_b1_h1_full", "head dims beyond 256"),
        ("e4m3_d72_s100_b1_h1_full", "rows aligned to less than 16 bytes"),
        ("e4m3_d64_s100_b1_h1_full_scale-0.5", "a scale below 0"),
    ],
)
def test_what_no_kernel_takes(name: str, missing: str) -> None:
    problem = problem_of(name)
    for ask in (
        lambda: planner.plans(problem, "sm_90a"),
        lambda: planner.plans_on(problem, (9, 0)),
    ):
        with pytest.raises(NotSupported) as caught:
            ask()
        expected = f"query has dtype float8_e4m3fn: the kernel of sm_90a takes no {missing}; use 16-bit operands"
        assert expected in caught.value.reasons


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_other_targets_have_no_kernel(arch: str) -> None:
    with pytest.raises(NotSupported, match=f"the kernel of {arch} takes no targets without wgmma"):
        planner.plan_forward(problem_of("e4m3_d64_s100_b1_h1_full"), arch)


def test_objections() -> None:
    """Each names what was given, what is allowed and what to do."""
    problem = problem_of("e4m3_d64_s100_b3_h4k2_full_descalebh")
    wrong = problem.replace(
        query_scale=Tensor.contiguous((2, 3), "float32"),
        key_scale=Tensor.contiguous((2,), "float16"),
        value_scale=replace(Tensor.contiguous((3, 2), "float32"), strides=(1, 3)),
        output=Tensor.contiguous(problem.output.shape, "float32"),
    )
    allowed = "must be float32 (), (1,), (2,), (3, 2), for the whole operand, each key head, or each batch and key head"
    assert wrong.reasons() == [
        "output has dtype float32: must be bfloat16 or float16 for float8_e4m3fn operands; pass such an array",
        f"query_scale has shape (2, 3) and dtype float32: {allowed}; reshape or cast it",
        f"key_scale has shape (2,) and dtype float16: {allowed}; reshape or cast it",
        "value_scale is strided or misaligned: must be contiguous and 4-byte aligned; copy it",
    ]
    plain = problem_of("bf16_d64_s100_b3_h4_full").replace(key_scale=Tensor.contiguous((1,), "float32"))
    assert plain.reasons() == [
        "key_scale is given, but query has dtype bfloat16: only float8_e4m3fn has factors; leave it out"
    ]
    backward = parse("e4m3_d64_s100_b1_h1_full").problem("backward").reasons()
    assert (
        "query has dtype float8_e4m3fn: must be one of float16, bfloat16, float32 in a backward; dequantise it"
        in backward
    )


def test_variant_and_dtype_belong_together() -> None:
    tile = planner.plan_forward(problem_of("e4m3_d64_s100_b1_h1_full"), "sm_90a").build
    assert tile.variant == E4M3
    wrong = tile_rules.objections(replace(tile, dtype="bfloat16"))
    assert wrong == ["dtype = 'bfloat16': variant e4m3 multiplies float8_e4m3fn; use it, or another variant"]
    assert tile_rules.objections(replace(tile, tile_n=96)) == [
        "tile_n = 96: a transposed value tile has whole strips; use 64 or 128"
    ]
