"""Tests of the plans of e4m3 caches: which kernel reads them, its stages, and what it refuses."""

from __future__ import annotations

import pytest

from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.errors import DoesNotFit, NotSupported
from cutlass_py_attn.integers import round_up
from cutlass_py_attn.kernels.decode import layout as decode_smem
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import PERSISTENT
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.runtime import params

ARCH = "sm_90"
PAGED = "bf16_d128_q1_s8192_b64_h32k8_full_paged16_kv8"
ROWS = "bf16_d128_q1_s8192_b64_h32k8_full_paged16_kv8_descalerow"
DENSE = "bf16_d128_q1_s8192_b64_h32k8_full_kv8"


def plan_of(name: str, arch: str = ARCH) -> Plan:
    """Returns the best plan of a spec."""
    return planner.plan(parse(name).problem("forward"), arch)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
@pytest.mark.parametrize("name", [PAGED, ROWS, DENSE])
def test_every_target_has_a_persistent_decode_kernel(name: str, arch: str) -> None:
    build = plan_of(name, arch).build
    assert (build.family, build.variant, build.dtype) == ("decode", PERSISTENT, "bfloat16")


@pytest.mark.parametrize(("head_dim", "tiles"), [(64, [(128, 4), (64, 4)]), (256, [(64, 4), (32, 2)])])
def test_decode_tiles_have_16_rows_and_a_fallback_with_fewer_keys(head_dim: int, tiles: list[tuple[int, int]]) -> None:
    problem = parse(DENSE.replace("d128", f"d{head_dim}")).problem("forward")
    builds = [build for build in planner.builds(problem, ARCH) if build.family == "decode"]
    assert [(build.tile_m, build.tile_n, build.warps) for build in builds] == [(16, *tile) for tile in tiles]


def test_explain_names_codes_and_scales() -> None:
    assert "e4m3 codes, converted to float16; scales of each row" in plan_of(ROWS).explain()
    assert plan_of(PAGED).reason.endswith("read on the device, and convert e4m3 codes to float16")
    assert plan_of(DENSE).reason.endswith("share the keys of all sequences, and convert e4m3 codes to float16")


def test_a_stage_has_a_byte_for_each_code_and_scales_of_rows() -> None:
    paged, rows = plan_of(PAGED).build, plan_of(ROWS).build
    keys = decode_smem.team_keys(paged)
    assert sum(decode_smem.stage_bytes(paged)) == keys * 256
    assert sum(decode_smem.stage_bytes(rows)) == round_up(keys * (256 + 8), decode_smem.STAGE_ALIGNMENT)
    assert decode_smem.operand_dtype(paged) == "float16"


def test_dtype_of_codes_grain_of_scales_and_pages_do_not_decide_the_kernel() -> None:
    for name in (
        PAGED + "_descaletensor",
        PAGED + "_descalehead",
        PAGED + "_descalebatch",
        PAGED.replace("paged16", "paged1"),
    ):
        assert plan_of(name).build == plan_of(PAGED).build
    problem = parse(PAGED).problem("forward")
    as_bytes = {name: problem.tensors()[name] for name in ("key", "value")}
    changed = {name: type(tensor)(tensor.shape, tensor.strides, "uint8") for name, tensor in as_bytes.items()}
    assert planner.plan(problem.replace(**changed), ARCH).build == plan_of(PAGED).build


def test_scales_are_at_the_end_of_the_struct() -> None:
    names = [name for name, _ in abi.fields_of(plan_of(PAGED).build)]
    assert names[-10:-5] == [f"key_scale{axis}" for axis in ("", "_batch", "_page", "_row", "_head")]


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("paged16_kv8", (0, 0, 0, 0)),
        ("paged16_kv8_descaletensor", (0, 0, 0, 0)),
        ("paged16_kv8_descalehead", (0, 0, 0, 1)),
        ("paged16_kv8_descalebatch", (8, 0, 0, 1)),
        ("paged16_kv8_descalerow", (0, 128, 8, 1)),
        ("kv8_descalerow", (1000 * 8, 0, 8, 1)),
    ],
)
def test_strides_of_a_scale(name: str, strides: tuple[int, ...]) -> None:
    problem = parse(f"bf16_d128_q1_s1000_b4_h32k8_full_{name}").problem("forward")
    given = params.numbers(problem, problem.operands())
    assert tuple(given.get(f"value_scale_{axis}", 0) for axis in ("batch", "page", "row", "head")) == strides


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bf16_d320_q1_s8192_b4_h32k8_full_kv8", "head dims beyond 256"),
        ("bf16_d6_q1_s8192_b4_h32k8_full_kv8", "rows aligned to less than 4 bytes"),
    ],
)
def test_what_no_kernel_takes_has_a_remedy(name: str, reason: str) -> None:
    with pytest.raises(NotSupported) as caught:
        plan_of(name)
    (refusal,) = caught.value.refusals
    assert (refusal.field, refusal.rule) == ("key.dtype", f"no kernel takes {reason}")
    assert refusal.remedy == "dequantise, each code times its scale"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize(
    "name",
    [
        "bf16_d128_q512_s8192_b4_h32k8_causal_br_paged16_kv8",
        "bf16_d128_q33_s8192_b4_h32k8_causal_br_kv8_descalerow",
        "f16_d64_q1_s8192_b4_h8_full_dropout0.1_kv8",
        "bf16_d256_q300_s300_b1_h2_full_bias_kv8_descalebatch",
    ],
)
def test_prompts_and_other_terms_have_an_sm80_kernel(name: str, arch: str) -> None:
    plan = plan_of(name, arch)
    assert (plan.build.family, plan.build.variant) == ("sm80", "")
    assert "e4m3 codes, converted to" in plan.explain()
    codes = plan.build.buffer("key_codes"), plan.build.buffer("value_codes")
    assert [each.bytes for each in codes] == [
        plan.build.tile_n * columns for columns in (plan.build.columns, plan.build.columns_value)
    ]
    assert parse_symbol(plan.build.symbol, arch).build == plan.build


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        ("16x256x4:2,0", "a team has at most 32 keys"),
        ("16x64x4:1,0", "query_stages = 1"),
    ],
)
def test_tiles_that_cannot_be_built(tile: str, reason: str) -> None:
    problem = parse(PAGED).problem("forward")
    with pytest.raises(DoesNotFit, match=reason):
        planner.plan_with_tile(problem, ARCH, TileConfig.parse(f"{tile}+persistent"))


def test_the_persistent_kernel_takes_no_dense_cache_of_16_bits() -> None:
    problem = parse("bf16_d128_q1_s8192_b64_h32k8_full").problem("forward")
    with pytest.raises(DoesNotFit, match="reads caches in pages or of e4m3 codes"):
        planner.plan_with_tile(problem, ARCH, TileConfig.parse("16x64x4:3,0+persistent"))


@pytest.mark.parametrize("name", [PAGED, ROWS, DENSE, "f16_d64_n1x900u333,4x64u0_h8k2_causal_kv8_descalerow"])
def test_symbols_name_the_kernel(name: str) -> None:
    build = plan_of(name).build
    assert parse_symbol(build.symbol, ARCH).build == build
