"""Machine code of append_to_cache and merge_states: vectors, conversions, and what the compiler must not emit."""

from __future__ import annotations

import re

import pytest

from cutlass_py_attn.compilation.compiler import artifact_for
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.problem.append import GIVEN_SCALES, NO_SCALES, ROW_SCALES, TILE_SCALES, AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem


def ptx_of(dims: int, scales: str, arch: str, dtype: str = "bfloat16") -> str:
    """Returns the PTX of an append."""
    problem = AppendProblem.dense((100, 8, dims), (40, 16), dtype, scales=scales)
    return artifact_for(plan_append(problem, arch).build).ptx


def count(text: str, ptx: str) -> int:
    return len(re.findall(text, ptx))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("scales", [NO_SCALES, GIVEN_SCALES, ROW_SCALES])
def test_rows_are_copied_by_16_bytes(scales: str, arch: str) -> None:
    """One load for the key row and one for the value row; nothing in 64-bit floats or local memory."""
    ptx = ptx_of(128, scales, arch)
    assert count(r"ld\.global\.v4\.b32", ptx) == 2
    stores = r"st\.global\.v4\.b32" if scales == NO_SCALES else r"st\.global\.v(?:2\.b32|4\.b16)"
    assert count(stores, ptx) == 2
    assert not re.search(r"\.f64|\.local", ptx)
    assert count(r"shfl\.sync", ptx) == (8 if scales == ROW_SCALES else 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_latent_row(arch: str) -> None:
    """A warp has a row: 16 bytes of key twice and of value once, four scales of 16 threads each; no spills."""
    problem = AppendProblem.dense((100, 1, 512), (40, 16), "bfloat16", head_dim_value=64, scales=TILE_SCALES)
    made = artifact_for(plan_append(problem, arch).build)
    assert count(r"ld\.global\.v4\.b32", made.ptx) == 3
    assert count(r"st\.global\.v(?:2\.b32|4\.b16)", made.ptx) == 2
    assert count(r"st\.global\.v4\.b32", made.ptx) == 1
    assert count(r"shfl\.sync", made.ptx) == 2 * 4
    assert not re.search(r"\.f64|\.local", made.ptx)
    assert (made.registers <= 64, made.main.spill_bytes) == (True, 0)


@pytest.mark.parametrize("scales", [GIVEN_SCALES, ROW_SCALES])
def test_targets_without_the_instruction_convert_by_bits(scales: str) -> None:
    instruction = r"cvt\.rn\.satfinite\.e4m3x2\.f32"
    assert count(instruction, ptx_of(128, scales, "sm_90")) == 8
    assert count(instruction, ptx_of(128, scales, "sm_80")) == 0


def test_scales_are_divided_exactly() -> None:
    """The reference divides in float32 too, so neither division may be approximate or flush to zero."""
    ptx = ptx_of(128, ROW_SCALES, "sm_90")
    assert count(r"div\.rn\.f32", ptx) == 4
    assert count(r"rcp\.rn\.f32", ptx_of(128, GIVEN_SCALES, "sm_90")) == 2
    assert not re.search(r"(?:div|rcp)\.(?:approx|full)|\.ftz", ptx + ptx_of(128, GIVEN_SCALES, "sm_90"))


def test_single_elements() -> None:
    ptx = ptx_of(7, NO_SCALES, "sm_80", "float16")
    assert count(r"ld\.global\.b16", ptx) == count(r"st\.global\.b16", ptx) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_merges(packed: bool) -> None:
    """Two loads and a store of 16 bytes; two float32 logsumexps in, one out and one of the padding."""
    shape = (50, 4, 128)
    problem = MergeProblem.packed(3, 20, shape, "bfloat16") if packed else MergeProblem.dense((1, *shape), "bfloat16")
    ptx = artifact_for(plan_merge(problem, "sm_90").build).ptx
    assert (count(r"ld\.global\.v4\.b32", ptx), count(r"st\.global\.v4\.b32", ptx)) == (2, 1)
    assert count(r"ld\.global\.b32", ptx) == (4 if packed else 2)
    assert count(r"cvt\.rn\.bf16x2\.f32", ptx) == 4
    assert not re.search(r"\.f64|\.local", ptx)


@pytest.mark.parametrize(("is_sum", "is_last"), [(False, True), (True, False)])
def test_float32_totals(is_sum: bool, is_last: bool) -> None:
    """16 bytes of the total and 8 of the part; a sum reads no logsumexp."""
    problem = MergeProblem.into_total((1, 50, 4, 128), "bfloat16", is_sum, is_last)
    ptx = artifact_for(plan_merge(problem, "sm_90").build).ptx
    assert (count(r"ld\.global\.v4\.b32", ptx), count(r"ld\.global\.v4\.b16", ptx)) == (1, 1)
    assert count(r"st\.global\.v2\.b32" if is_last else r"st\.global\.v4\.b32", ptx) == 1
    assert count(r"ld\.global\.b32", ptx) == (0 if is_sum else 2)
    assert not re.search(r"\.f64|\.local", ptx)
