"""Plans of append_to_cache and merge_states: kernel, launch, struct and text for the layouts of their arrays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn.cli import catalogue
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.plan import resources
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.launch_rules import grid
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.append import GIVEN_SCALES, NO_SCALES, ROW_SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.tensors import Tensor
from tests.support.refusals import expect, expect_among

PAGES = (40, 16)


def appended(dims: tuple[int, int] = (128, 128), dtype: str = "bfloat16", scales: str = NO_SCALES) -> AppendProblem:
    """Returns the append of 100 tokens with 8 heads."""
    return AppendProblem.dense((100, 8, dims[0]), PAGES, dtype, head_dim_value=dims[1], scales=scales)


@pytest.mark.parametrize(
    ("dims", "dtype", "scales", "symbol", "vector"),
    [
        ((128, 128), "bfloat16", NO_SCALES, "append_sm80_bf16_d128_8x16", 16),
        ((128, 128), "bfloat16", GIVEN_SCALES, "append_sm80_bf16_d128_e4m3_8x16", 16),
        ((128, 128), "float16", ROW_SCALES, "append_sm80_f16_d128_e4m3_row_8x16", 16),
        ((256, 64), "float16", NO_SCALES, "append_sm80_f16_d256v64_4x32", 16),
        ((64, 64), "float32", NO_SCALES, "append_sm80_f32_d64_8x16", 16),
        ((72, 40), "bfloat16", ROW_SCALES, "append_sm80_bf16_d72v40_e4m3_row_8x16", 16),
        ((20, 20), "bfloat16", NO_SCALES, "append_sm80_bf16_d20_a8_16x8", 8),
        ((7, 3), "float16", NO_SCALES, "append_sm80_f16_d7v3_a2_16x8", 2),
        ((1, 1), "float32", NO_SCALES, "append_sm80_f32_d1_a4_128x1", 4),
        ((1024, 1024), "bfloat16", ROW_SCALES, "append_sm80_bf16_d1024_e4m3_row_4x32", 16),
        ((512, 64), "bfloat16", TILE_SCALES, "append_sm80_bf16_d512v64_e4m3_tile_4x32", 16),
        ((512, 64), "float32", TILE_SCALES, "append_sm80_f32_d512v64_e4m3_tile_4x32", 16),
        ((7, 3), "float16", TILE_SCALES, "append_sm80_f16_d7v3_a2_e4m3_tile_16x8", 2),
    ],
)
def test_the_kernel_of_an_append(dims: tuple[int, int], dtype: str, scales: str, symbol: str, vector: int) -> None:
    """Rows are divided among a power of two threads, each with vectors as wide as every array allows."""
    plan = plan_append(appended(dims, dtype, scales), "sm_90")
    assert (plan.symbol, plan.build.vector_bytes) == (symbol, vector)
    (launch,) = plan.launches
    assert launch.symbol == f"{symbol}_0"
    assert launch.grid == (-(-800 // plan.build.tile_m), 1, 1)
    assert launch.block == (128, 1, 1) == (plan.build.tile_m * plan.build.tile_n, 1, 1)
    assert tuple(map(str, grid(plan.build, launch.symbol))) == (f"ceil_div(num_rows, {plan.build.tile_m})", "1", "1")
    assert not resources.refusals(plan.build, architecture("sm_90"))
    assert parse_symbol(symbol, "sm_90").build == plan.build


@pytest.mark.parametrize(
    ("name", "change", "vector"),
    [
        ("key", {"alignment": 8}, 8),
        ("value_cache", {"alignment": 4}, 4),
        ("key_cache", {"strides": (16 * 1024 + 2, 1024, 128, 1)}, 4),
        ("value", {"strides": (1025, 128, 1)}, 2),
    ],
)
def test_the_narrowest_array_decides_the_vectors(name: str, change: dict[str, object], vector: int) -> None:
    problem = appended()
    tensor = replace(getattr(problem, name), **change)
    assert plan_append(replace(problem, **{name: tensor}), "sm_90").build.vector_bytes == vector


def test_an_e4m3_cache_needs_half_the_alignment() -> None:
    """8 elements are 16 bytes of a row of bfloat16, and 8 bytes of the cache."""
    problem = appended(scales=GIVEN_SCALES)
    for alignment, vector in ((8, 16), (4, 8)):
        cache = replace(problem.key_cache, alignment=alignment)
        plan = plan_append(replace(problem, key_cache=cache), "sm_90")
        assert plan.build.vector_bytes == vector
        assert abi.address_alignments(plan.build)["value_cache"] == vector // 2


def test_the_struct_of_an_append() -> None:
    """Strides of the pools in any order of axes; a scale of each head has no stride along pages and rows."""
    problem = appended(scales=GIVEN_SCALES)
    exchanged = Tensor((*PAGES, 8, 128), (16 * 1024, 128, 16 * 128, 1), "float8_e4m3fn")
    params = dict(plan_append(replace(problem, value_cache=exchanged), "sm_90").params)
    assert [params[f"value_cache_{axis}"] for axis in ("page", "row", "head")] == [16384, 128, 2048]
    assert [params[f"key_cache_{axis}"] for axis in ("page", "row", "head")] == [16384, 1024, 128]
    assert [params[f"key_scale_{axis}"] for axis in ("page", "row", "head")] == [0, 0, 1]
    assert (params["num_slots"], params["page_size"], params["num_rows"]) == (640, 16, 800)
    one = Tensor.contiguous((), "float32")
    params = dict(plan_append(replace(problem, key_scale=one, value_scale=one), "sm_90").params)
    assert params["key_scale_head"] == 0


def test_packed_rows_of_a_latent_cache() -> None:
    """512 codes, 4 scales and 64 columns of 16 bits are 656 bytes: 8 elements at once, with 8 bytes of codes."""
    dense = AppendProblem.dense((100, 1, 512), PAGES, "bfloat16", head_dim_value=64, scales=TILE_SCALES)
    assert (dense.outputs, dense.value_scale) == (("key_cache", "value_cache", "key_scale"), None)
    parts = {"key_cache": (512, 656), "key_scale": (4, 164), "value_cache": (64, 328)}
    caches = {
        name: Tensor((*PAGES, 1, columns), (16 * row, row, row, 1), getattr(dense, name).dtype)
        for name, (columns, row) in parts.items()
    }
    problem = replace(dense, **caches)
    assert problem.reasons() == []
    plan = plan_append(problem, "sm_90")
    params = dict(plan.params)
    assert [params[f"key_scale_{axis}"] for axis in ("page", "row", "head", "tile")] == [16 * 164, 164, 0, 1]
    assert [params[f"value_cache_{axis}"] for axis in ("page", "row", "head")] == [16 * 328, 328, 0]
    assert plan.build == plan_append(dense, "sm_90").build
    alignments = abi.address_alignments(plan.build)
    assert [alignments[name] for name in parts] == [8, 4, 16]
    assert "value_scale" not in alignments


def test_every_field_has_a_value_or_an_address() -> None:
    """The struct of each kernel has the params of its plan, the addresses of its arrays, and no more."""
    problems = [appended(scales=scales) for scales in (NO_SCALES, GIVEN_SCALES, ROW_SCALES, TILE_SCALES)]
    plans = [plan_append(problem, "sm_90") for problem in problems]
    plans += [plan_merge(MergeProblem.packed(3, 20, (50, 4, 64), "float16"), "sm_90")]
    for plan in plans:
        names = {*abi.address_alignments(plan.build), *dict(plan.params)}
        assert names == {name for name, _ in abi.fields_of(plan.build)}


def test_merges() -> None:
    dense = plan_merge(MergeProblem.dense((2, 40, 3, 64), "float16"), "sm_80")
    assert (dense.symbol, dense.launches[0].grid) == ("merge_sm80_f16_d64_16x8", (15, 1, 1))
    packed = plan_merge(MergeProblem.packed(3, 20, (50, 4, 64), "bfloat16"), "sm_80")
    assert (packed.symbol, packed.launches[0].grid) == ("merge_sm80_bf16_d64_varlen_16x8", (15, 1, 1))
    assert dict(packed.params)["tokens_q"] == 50
    assert parse_symbol(packed.symbol, "sm_80").build == packed.build


@pytest.mark.parametrize(
    ("is_sum", "is_last", "name"),
    [(False, False, "a8_total"), (False, True, "a8_last"), (True, False, "a8_sum"), (True, True, "a8_sum_last")],
)
def test_float32_totals(is_sum: bool, is_last: bool, name: str) -> None:
    """Four elements at once: 16 bytes of the total, 8 of the part. A sum has no logsumexp."""
    plan = plan_merge(MergeProblem.into_total((2, 40, 3, 64), "bfloat16", is_sum, is_last), "sm_90")
    assert plan.symbol == f"merge_sm80_bf16_d64_{name}_8x16"
    assert parse_symbol(plan.symbol, "sm_90").build == plan.build
    alignments = abi.address_alignments(plan.build)
    assert (alignments["output_a"], alignments["output_b"], alignments["output"]) == (16, 8, 8 if is_last else 16)
    assert ("logsumexp" in alignments) == (not is_sum)
    wide = plan_merge(MergeProblem.into_total((2, 40, 3, 64), "float32", is_sum, is_last), "sm_90")
    assert wide.symbol == f"merge_sm80_f32_d64_{'sum_' if is_sum else ''}8x16"


def test_totals_that_are_refused() -> None:
    problem = MergeProblem.into_total((2, 40, 3, 64), "bfloat16", False, False)
    part, total, lines = problem.output_b, problem.output_a, problem.logsumexp_a
    for wrong, expected in (
        (MergeProblem(part, total, part), "output_a.dtype: float32"),
        (MergeProblem(part, part, part), "output_a.dtype: float32"),
        (replace(problem, output=replace(part, dtype="float16")), "output.dtype: float32 or bfloat16"),
        (replace(problem, output_a=replace(part, dtype="float16")), "output_a.dtype: bfloat16 as output_b, or float32"),
        (replace(problem, logsumexp_b=None), "logsumexp_b: a Tensor, or both None for a sum"),
        (MergeProblem(total, part, total, cu_seqlens_q=lines), "cu_seqlens_q: None without logsumexps"),
    ):
        expect_among(wrong.refusals(), expected)


def test_nothing_to_launch() -> None:
    assert not plan_append(AppendProblem.dense((0, 8, 128), PAGES, "float16"), "sm_90").launches
    assert not plan_append(AppendProblem.dense((5, 8, 128), (0, 16), "float16"), "sm_90").launches
    assert not plan_merge(MergeProblem.dense((2, 0, 3, 64), "float16"), "sm_90").launches


def test_a_plan_survives_json_and_explains_itself() -> None:
    merge = plan_merge(MergeProblem.dense((1, 1, 1, 8), "float32"), "sm_90")
    for plan in (plan_append(appended(scales=ROW_SCALES), "sm_80"), merge):
        assert Plan.from_json(plan.to_json()) == plan
    text = plan_append(appended(scales=ROW_SCALES), "sm_80").explain()
    assert text.startswith("append append_sm80_bf16_d128_e4m3_row_8x16\n")
    assert "rows            8 a block, 16 threads each" in text
    assert "grid 100 x 1 x 1, block 128 x 1 x 1" in text
    assert "their largest magnitude / 448, and rounded to e4m3" in text
    assert "num_splits_key" not in text
    text = plan_append(appended((512, 64), scales=TILE_SCALES), "sm_80").explain()
    assert "each 128 columns of a row of key are divided by a scale of their own" in text


def test_refused() -> None:
    with pytest.raises(NotSupported) as caught:
        plan_append(replace(appended(), slots=Tensor.contiguous((100,), "int32")), "sm_1")
    expect(caught.value.refusals, ["slots.dtype: int64", "arch: one of sm_80"])
    with pytest.raises(NotSupported, match=r"problem = 'append' \(str\): must be an AppendProblem; create one"):
        plan_append("append", "sm_90")  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match=r"problem = None: must be a MergeProblem; create one"):
        plan_merge(None, "sm_90")  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match=r"scales = 'rows' \(str\): must be one of none, given, row, tile;"):
        appended(scales="rows")
    with pytest.raises(NotSupported, match=r"head_dim = 1025 .*: must be from 1 to 1024"):
        plan_append(appended((1025, 8)), "sm_90")
    with pytest.raises(NotSupported, match=r"num_pages \* page_size = 2147483648 .*: must be at most 2147483647"):
        plan_append(AppendProblem.dense((1, 1, 8), (2**27, 16), "float16"), "sm_90")
    with pytest.raises(NotSupported, match=r"key = None: must be a Tensor; create one"):
        plan_append(replace(appended(), key=None), "sm_90")  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match=r"batch \* num_queries \* num_heads = 2147483648 .*: must be at most"):
        plan_merge(MergeProblem.dense((2**16, 2**11, 16, 8), "float16"), "sm_90")
    short = r"strides = \(.*\): must have a stride for each axis of .*; add the missing strides"
    append, merge = appended(), MergeProblem.dense((1, 8, 2, 8), "float16")
    with pytest.raises(NotSupported, match=rf"key_cache.{short}"):
        plan_append(replace(append, key_cache=replace(append.key_cache, strides=(8, 1))), "sm_90")
    with pytest.raises(NotSupported, match=rf"output_b.{short}"):
        plan_merge(replace(merge, output_b=replace(merge.output_b, strides=(8, 1))), "sm_90")


@pytest.mark.usefixtures("few_kernels")
def test_the_catalogue_has_row_kernels_on_portable_targets() -> None:
    entries = {entry.symbol: entry.serves for entry in catalogue.entries("sm_90")}
    kinds = [symbol.partition("_")[0] for symbol in entries]
    assert (kinds.count("append"), kinds.count("merge")) == (30, 45)
    assert not any(entry.symbol.startswith("append") for entry in catalogue.entries("sm_90a"))
    serves = entries["append_sm80_bf16_d128_e4m3_row_8x16"]
    assert serves == "rows for a paged e4m3 cache, by a scale of each row, bfloat16, head dim 128"
    latent = entries["append_sm80_f16_d512v64_e4m3_tile_4x32"]
    assert latent.startswith("rows for a paged latent cache of e4m3 codes, by a scale of each 128 columns, float16")
