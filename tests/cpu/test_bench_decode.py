"""Tests of the benchmark's cases of few queries: what they measure, and their bandwidth in rows and tables."""

from __future__ import annotations

import sys
from pathlib import Path

import fakes
import pytest
from stand_in import StandIn

from cutlass_py_attn import bench, bench_cases
from cutlass_py_attn.bench_cases import parse
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import Shape

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import check_verified  # noqa: E402

DECODE = "bf16_d128_q3_s512_b2_h8k2_full"


def test_few_queries_are_a_forward_by_its_bytes() -> None:
    case = parse(DECODE)
    assert case.shape == Shape(2, 3, 512, 8, 128, 128, 2)
    assert case.directions == ("forward",)
    assert case.bytes_read_once == 2 * 2 * 128 * (2 * 3 * 8 + 2 * 512 * 2)
    assert parse("bf16_d64_s64_b2_h2_full").bytes_read_once == 0
    (choices,) = bench_cases.builds([case], (9, 0))
    assert choices[0].family == "decode"


@pytest.mark.parametrize("name", ["bf16_d64_q1_s64_b2_h2_causal", "bf16_d64_q1_s64_t200_h2_full"])
def test_few_queries_have_no_mask_and_one_length(name: str) -> None:
    with pytest.raises(NotSupported, match=r"must have b\{batch\} and full"):
        parse(name)


def test_a_case_of_few_queries_has_one_row_with_its_bandwidth(graphs: StandIn) -> None:
    (row,) = bench.measure(parse(DECODE), fakes.artifact, 5)
    assert (row.direction, row.ours_ms, row.ours_gb_s) == (
        "forward", 1.25, round(parse(DECODE).bytes_read_once / 1.25e6, 1)
    )  # fmt: skip
    assert bench.table([row]).splitlines()[1].endswith(f"{row.ours_gb_s:.0f} GB/s")


def test_readme_table_shows_the_bandwidth_of_few_queries() -> None:
    row = {"case": "a", "direction": "forward", "peer": "", "ours_tflops": 9.0, "gpu": "H200", "ours_gb_s": 4321.5}
    heading, *_, line = check_verified.benchmark_table([row]).splitlines()
    assert heading.endswith(check_verified.FEW_QUERIES)
    assert line == "| `a` | forward | 9, 4322 GB/s |"
