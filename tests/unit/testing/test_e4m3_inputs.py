"""Tests of the inputs of e4m3 codes: NaN in unused rows of caches, scales of sequences, and random cases."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.bench import cases as bench_cases
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import random_cases


@pytest.mark.parametrize(
    "name",
    [
        "bf16_d32_n1x9u5,1x40u33_h4k2_full_paged8_kv8_descalerow",
        "bf16_d32_n1x9u5,2x40u33_h4k2_full_kv8_descalerow",
        "f16_d32_n1x9u5,2x40u33_h4k2_full_kv8_descalebatch",
    ],
)
def test_unused_rows_are_nan(name: str) -> None:
    case = Case.parse(f"forward {name} seed=1")
    expected = guarded_check.expect(case)
    used = np.isfinite(expected.arrays["key"].astype(np.float32)).all(axis=(2, 3)).sum()
    assert used == 5 + 33
    if name.endswith("row"):
        assert np.isfinite(expected.arrays["key_scale"]).all(axis=2).sum() == used
    assert np.isfinite(expected.truth["output"]).all()


def test_random_cases_are_problems_of_a_decode_kernel() -> None:
    numbers = range(random_cases.E4M3_FROM + 1, random_cases.E4M3_FROM + 61, 2)
    drawn = [random_cases.draw(number, run) for number in numbers for run in range(2)]
    assert all(not case.problem().reasons() for case in drawn)
    assert all(case.spec.e4m3_cache for case in drawn)
    assert {case.spec.descale for case in drawn} == {"", "tensor", "head", "batch", "row"}
    assert {bool(case.spec.page_size) for case in drawn} == {True, False}
    assert all(Case.parse(case.line) == case for case in drawn)
    assert drawn[:2] == [random_cases.draw(random_cases.E4M3_FROM + 1, run) for run in range(2)]


def test_the_benchmark_counts_a_byte_for_each_code() -> None:
    spec = parse("bf16_d128_q1_s8192_b64_h32k8_full_paged16_kv8")
    of_query = 64 * 32 * 128 * 2
    assert bench_cases.bytes_read_once(spec) == 2 * of_query + 2 * 64 * 8192 * 8 * 128
    assert bench_cases.directions(spec) == ("forward",)
