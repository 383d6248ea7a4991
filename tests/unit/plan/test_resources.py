"""Tests of plan/resources.py: registers for accumulators, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.kernels.sm80_split_d import layout as split_d
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.plan import resources
from cutlass_py_attn.plan.planner import plan
from cutlass_py_attn.problem.spec import parse
from tests.support.refusals import expect


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 64), (64, 128)])
def test_accumulators_share_the_threads_of_a_block(head_dims: tuple[int, int]) -> None:
    spec = parse("bf16_d{}v{}_q200_s300_b2_h2_causal".format(*head_dims))
    forward, backward = (plan(spec.problem(direction), "sm_80").build for direction in ("forward", "backward"))
    tile_m, tile_n = forward.tile_m, forward.tile_n
    scores, output = tile_m * tile_n, tile_m * head_dims[1]
    assert fused_kernel_of(forward).accumulators(forward) == (scores + output) // forward.threads
    tile_m, tile_n = backward.tile_m, backward.tile_n
    scores, gradients = tile_m * tile_n, tile_n * sum(head_dims)  # S and dP, dK and dV
    assert fused_kernel_of(backward).accumulators(backward) == (2 * scores + gradients) // backward.threads


def test_a_decode_tile_with_too_many_accumulators_is_refused() -> None:
    build = plan(parse("f16_d64_q1_s600_b2_h2_full").problem("forward"), "sm_90").build
    assert build.warps_scores == (1, 4)
    limits = architecture("sm_90")
    for tile_n, needed in ((1024, 160), (2048, 288)):  # 16 rows of 1 of 4 teams, and O: 16 x (tile_n / 4 + 64) / 32
        wide = dataclasses.replace(build, tile_n=tile_n)
        assert fused_kernel_of(wide).accumulators(wide) == needed
        found = [each for each in resources.refusals(wide, limits) if each.field == "accumulators"]
        assert bool(found) == (needed > 255)
    none = dataclasses.replace(build, tile_n=2048, warps_scores=(0, 0))  # refused for its warps
    assert not any(each.field == "accumulators" for each in resources.refusals(none, limits))


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("f16_d128_q500_s600_b2_h2_causal", ""),
        ("bf16_d96_q500_s600_b2_h2_causal", ""),
        ("f16_d64_q500_s600_b2_h2_causal", "_softcap3"),  # narrow heads have large tiles without score terms
        ("f16_d128_n400x500,20_h2_causal", "_softcap3"),  # the lengths of sequences take registers too
        ("f32_d64_q500_s600_b2_h2_causal", "_softcap3"),
    ],
)
def test_dropout_has_the_forward_tile_of_plain_attention_where_registers_suffice(name: str, like: str) -> None:
    dropped, other = (plan(parse(name + each).problem("forward"), "sm_90").build for each in ("_dropout0.3", like))
    assert (dropped.tile_m, dropped.tile_n) == (other.tile_m, other.tile_n)


@pytest.mark.parametrize(("name", "grids"), [("f16_d288", ((2, 4), (4, 2))), ("f32_d256", ((2, 4), (1, 8)))])
def test_warps_of_the_split_d_forward_read_the_fewest_operands(name: str, grids: tuple[tuple[int, int], ...]) -> None:
    """S has 64 x 128 elements: 2 x 4 warps read 4 * 64 + 2 * 128 vectors, 4 x 2 read 2 * 64 + 4 * 128."""
    build = plan(parse(f"{name}_q200_s300_b2_h2_causal").problem("forward"), "sm_90").build
    assert (build.tile_m, build.tile_n, build.warps) == (64, 128, 8)
    assert (build.warps_scores, build.warps_grad_q) == grids


@pytest.mark.parametrize(("feature", "tile"), [("", (192, 128)), ("_softcap3", (192, 128)), ("_alibi", (192, 64)),
                                               ("_bias", (192, 64))])  # fmt: skip
def test_terms_that_need_registers_have_smaller_tiles_in_the_sm90_forward(feature: str, tile: tuple[int, int]) -> None:
    build = plan(parse(f"f16_d64_q4000_s4100_b2_h2_causal{feature}").problem("forward"), "sm_90a").build
    assert (build.tile_m, build.tile_n) == tile


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("bf16_d64", (128, 128)),
        ("bf16_d96v32", (64, 64)),  # as 96: narrow heads have the tile of the wider
        ("bf16_d128", (64, 128)),
        ("bf16_d192v64", (64, 96)),  # as 129: wide ones that of the mean, but none of the narrow tiles
        ("bf16_d64v192", (64, 96)),
    ],
)
def test_the_head_dim_that_decides_the_tile_of_a_backward(name: str, tile: tuple[int, int]) -> None:
    build = plan(parse(f"{name}_q200_s300_b2_h2_causal").problem("backward"), "sm_90").build
    assert (build.tile_m, build.tile_n) == tile


def test_dk_and_dv_are_split_only_when_both_do_not_fit() -> None:
    build = plan(parse("f16_d512_q200_s300_b2_h2_causal").problem("backward"), "sm_90").build
    columns = build.block_columns + build.block_columns_value
    most, rest = divmod(split_d.DK_DV_REGISTERS[2] * build.threads, columns)
    assert rest == 0
    fitting, wider = (dataclasses.replace(build, tile_n=tile_n) for tile_n in (most, most + 1))
    assert not split_d.splits_dk_dv(fitting)
    assert split_d.splits_dk_dv(wider)


@pytest.mark.parametrize("grid", ["warps_scores", "warps_grad_v", "warps_grad_k", "warps_grad_q"])
def test_warps_that_do_not_divide_a_product_of_the_backward_are_refused(grid: str) -> None:
    limits = architecture("sm_80")
    build = plan(parse("bf16_d128_q200_s300_b2_h2_causal").problem("backward"), limits.name).build
    assert (build.warps, build.tile_m, build.tile_n, getattr(build, grid)) == (8, 64, 128, (2, 4))
    assert resources.refusals(build, limits) == []
    for warps, reason in (((1, 4), "must have 8 warps in all"), ((1, 8), ""), ((16, 1), "must have 8 warps in all")):
        found = resources.refusals(dataclasses.replace(build, **{grid: warps}), limits)
        expect(found, [f"{grid}: {reason}"] * bool(reason))


def test_a_problem_that_no_tile_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_tiles = dataclasses.replace(FAMILIES["sm80"], tiles=lambda problem, num_sms, any_length: ())
    monkeypatch.setitem(FAMILIES, "sm80", without_tiles)
    with pytest.raises(NotSupported, match="no tile fits: the tile table has no tile for it; use a smaller head"):
        plan(parse("bf16_d128_q200_s300_b2_h2_causal").problem("forward"), "sm_80")
