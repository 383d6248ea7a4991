"""Tests of the benchmark cases of few queries: what they measure, and their bandwidth in rows and tables."""

from __future__ import annotations

import dataclasses

from cutlass_py_attn.bench import cases, harness
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Shape
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.release import check_verified

DECODE = "bf16_d128_q3_s512_b2_h8k2_full"


def test_few_queries_are_a_forward_by_its_bytes() -> None:
    case = parse(DECODE)
    assert case.shape == Shape(2, 3, 512, 8, 128, 128, 2)
    assert cases.directions(case) == ("forward",)
    assert cases.bytes_read_once(case) == 2 * 2 * 128 * (2 * 3 * 8 + 2 * 512 * 2)
    assert cases.bytes_read_once(parse("bf16_d64_s64_b2_h2_full")) == 0
    (choices,) = cases.builds([case], (9, 0))
    assert choices[0].family == "decode"


def test_space_behind_the_keys_is_no_work() -> None:
    roomy, tight = parse("bf16_d128_n1x4096u512,1x4096u512_h8k2_full_paged16"), parse("bf16_d128_q1_s512_b2_h8k2_full")
    assert cases.flops(roomy, "forward") == cases.flops(tight, "forward") == tight.flops("forward")
    ragged = parse("bf16_d128_n70x200,130_h8k2_causal_br")
    assert cases.flops(ragged, "backward") == ragged.flops("backward")


def test_serving_rows_name_the_case_that_they_are_divided_by() -> None:
    """Pages by the dense cache, pages of one row by pages of 16, and codes by 16 bits."""
    found = {name: base for name, base in cases.FEATURE_CASES.items() if base and parse(name).page_size}
    for name, base in found.items():
        case, other = parse(name), parse(base)
        assert case.has_codes or cases.flops(case, "forward") == cases.flops(other, "forward")
        assert case.has_codes == (case.page_size == other.page_size and not case.sequences), name


def test_a_case_of_few_queries_has_one_row_with_its_bandwidth(graphs: FakeDriver) -> None:
    (row,) = harness.measure(parse(DECODE), fakes.artifact, 5)
    assert (row.direction, row.ours_ms, row.ours_gb_s) == (
        "forward", 1.25, round(cases.bytes_read_once(parse(DECODE)) / 1.25e6, 1)
    )  # fmt: skip
    assert harness.table([row]).splitlines()[1].endswith(f"{row.ours_gb_s:.0f} GB/s")
    beside = dataclasses.replace(row, baseline="dense", baseline_ratio=0.98)
    assert harness.table([beside]).splitlines()[1].endswith(f"{row.ours_gb_s:.0f} GB/s  0.98 dense")


def test_benchmark_table_shows_the_bandwidth_of_few_queries() -> None:
    row = {"case": "a", "direction": "forward", "peer": "", "ours_tflops": 9.0, "gpu": "H200", "ours_gb_s": 4321.5}
    heading, *_, line = check_verified.benchmark_table([row]).splitlines()
    assert heading.endswith(check_verified.FEW_QUERIES)
    assert line == "| `a` | forward | 9, 4322 GB/s |"
