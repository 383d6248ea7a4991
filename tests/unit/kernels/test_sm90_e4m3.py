"""Plans of the e4m3 forward: tiles, shared memory, parameters, and what no kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.sm90_e4m3.layout import part_columns, registers
from cutlass_py_attn.launch.variants import E4M3
from cutlass_py_attn.plan import build_rules, planner
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import OPERANDS, Tensor
from cutlass_py_attn.runtime import params
from tests.support.refusals import expect, expect_among


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
    ("word", "strides"), [("", (0, 0)), ("_descaletensor", (0, 0)), ("_descalehead", (0, 1)), ("_descalebatch", (2, 1))]
)
def test_strides_of_scales(word: str, strides: tuple[int, int]) -> None:
    problem = problem_of(f"e4m3_d64_s100_b3_h4k2_full{word}")
    given = params.numbers(problem, problem.operands())
    for name in SCALES:
        assert (given.get(f"{name}_batch", 0), given.get(f"{name}_head", 0)) == strides
    assert {*problem.vectors()} == ({*SCALES} if word else set())


def test_codes_may_be_bytes() -> None:
    problem = problem_of("e4m3_d64_s100_b3_h4k2_full")
    as_bytes = {name: Tensor.contiguous(getattr(problem, name).shape, "uint8") for name in OPERANDS}
    of_bytes = planner.plan_forward(problem.replace(**as_bytes), "sm_90a")
    assert of_bytes == planner.plan_forward(problem, "sm_90a")


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
        expect_among(caught.value.refusals, f"query.dtype: the kernel of sm_90a takes no {missing}")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_other_targets_have_no_kernel(arch: str) -> None:
    with pytest.raises(NotSupported, match=f"the kernel of {arch} takes no targets without wgmma"):
        planner.plan_forward(problem_of("e4m3_d64_s100_b1_h1_full"), arch)


def test_variant_and_dtype_belong_together() -> None:
    tile = planner.plan_forward(problem_of("e4m3_d64_s100_b1_h1_full"), "sm_90a").build
    assert tile.variant == E4M3
    wrong = build_rules.refusals(replace(tile, dtype="bfloat16"))
    expect(wrong, ["dtype: variant e4m3 multiplies float8_e4m3fn"])
    expect(build_rules.refusals(replace(tile, tile_n=96)), ["tile_n: a transposed value tile has whole strips"])
