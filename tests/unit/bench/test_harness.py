"""Tests of the benchmark where there is no GPU: cases, useful work, kernels and rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.bench import cases, harness
from cutlass_py_attn.bench.cases import FEATURE_CASES, default_cases, directions
from cutlass_py_attn.errors import AttentionError, DriverError, NotSupported
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.spec import ProblemSpec, mixed_lengths, parse
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.runtime import driver
from tests.support import fakes
from tests.support.fake_driver import FakeDriver
from tools.release import build_ptx, check_verified, record

VARLEN = "bf16_d128_s8192_t65536_h16_causal"
WINDOW = "bf16_d128_s16384_b2_h16_causal_window1024"
SMALL = "bf16_d64_s64_b2_h2_full"

# Cases


def test_every_published_case_is_supported_and_named_once() -> None:
    names = default_cases()
    assert len(set(names)) == len(names)
    for name in names:
        case = parse(name)
        assert case.name == name
        for direction in directions(case):
            assert case.problem(direction).reasons() == [], name


def test_baselines_are_measured_in_the_same_run() -> None:
    assert {baseline for baseline in FEATURE_CASES.values() if baseline} <= set(default_cases())


def test_a_name_says_everything() -> None:
    case = parse("f16_d64v32_s256_b3_h8k2_causal_window17_biasgrad_dropout0.25_softcap30_alibi_sinks_deterministic")
    assert (case.dtype, case.shape, case.mask) == ("float16", Shape(3, 256, 256, 8, 64, 32, 2), Causal(17))
    backward = case.problem("backward")
    assert backward.features == ("alibi", "bias", "dropout", "grouped", "sinks", "softcap")
    assert backward.gradients == ("query", "key", "value", "bias", "sinks")
    assert (backward.dropout_p, backward.softcap, backward.deterministic) == (0.25, 30.0, True)
    assert backward.bias is not None
    assert backward.grad_bias is not None
    assert backward.bias.shape == backward.grad_bias.shape == (3, 8, 256, 256)
    assert (backward.bias.strides[0], backward.grad_bias.strides[0]) == (0, 8 * 256 * 256)
    forward = case.problem("forward")
    assert forward.gradients == ()
    assert not forward.deterministic


def test_a_bias_has_a_gradient_only_where_it_is_asked_for() -> None:
    assert parse(f"{SMALL}_bias").problem("backward").gradients == ("query", "key", "value")
    assert parse(SMALL).problem("backward").bias is None


@pytest.mark.parametrize(
    "name",
    ["", "bf16_d128", "b16_d64_s64_b2_h2_full", f"{SMALL}_window8"],
)
def test_a_wrong_name_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(NotSupported, match=r"write|add|leave|correct|did you mean"):
        parse(name)


def test_only_takes_the_cases_in_which_it_is_found() -> None:
    assert cases.select((), "dropout|h16_causal_window") == ("bf16_d128_s2048_b16_h16_full_dropout0.1", WINDOW)
    assert cases.select((SMALL,), "") == (SMALL,)
    with pytest.raises(NotSupported, match="matches none of"):
        cases.select((SMALL,), "causal")
    with pytest.raises(NotSupported, match="must be a regular expression"):
        cases.select((), "(")


# Useful work


def test_work_of_a_plain_case_is_the_problem_s() -> None:
    case = parse("bf16_d64v32_s512_b3_h4_causal")
    assert case.flops("forward") == 2 * 3 * 4 * 512 * 512 * (64 + 32) // 2
    assert case.flops("backward") * 2 == case.flops("forward") * 5


def test_work_of_a_window_counts_visible_pairs() -> None:
    pairs = sum(min(query + 1, 1024) for query in range(16384))
    assert parse(WINDOW).flops("forward") == 4 * 2 * 16 * pairs * 128


def test_work_of_mixed_lengths_is_the_sum_over_the_sequences() -> None:
    case = parse(VARLEN)
    lengths = [each.num_keys for each in case.sequences]
    assert sum(lengths) == 65536
    assert max(lengths) == case.shape.num_queries == 8192
    assert case.shape.tokens == (65536, 65536)
    assert case.shape.batch == len(lengths) > 8
    assert case.flops("forward") == sum(2 * 16 * length * length * 128 for length in lengths)
    assert case.flops("forward") < case.problem("forward").flops / 2, "which takes every sequence as the longest"


def test_ranges_of_a_mask_are_its_work() -> None:
    """Each row of ranges names one of nearly as many visible pairs, and most are of the same."""
    rows = {name: base for name, base in FEATURE_CASES.items() if parse(name).ranges}
    assert len(rows) == 8
    ratios = [
        cases.flops(parse(name), "backward") / cases.flops(parse(base), "backward") for name, base in rows.items()
    ]
    assert max(ratios) < 1.02
    assert min(ratios) >= 1
    assert sum(ratio < 1.001 for ratio in ratios) == 6


def test_mixed_lengths_are_the_same_every_time() -> None:
    assert mixed_lengths(64, 640) == mixed_lengths(64, 640)
    assert all(1 <= each.num_keys == each.num_queries <= 64 for each in mixed_lengths(64, 640))
    assert [each.num_keys for each in mixed_lengths(64, 10)] == [10]
    assert parse("bf16_d64_s64_t10_h1_full").shape.num_keys == 10


# Kernels


def test_builds_are_listed_once_and_have_names_of_their_own() -> None:
    names = [SMALL, "bf16_d64_s64_b1_h4_full", f"{SMALL}_bias", f"{SMALL}_biasgrad", f"{SMALL}_deterministic"]
    found = cases.builds(map(parse, names), (9, 0))
    assert [first.stem for first, *_ in found] == [
        "fwd_sm90_bf16_d64_full",
        "bwd_sm90_bf16_d64_full",
        "fwd_sm90_bf16_d64_full_bias",
        "bwd_sm90_bf16_d64_full_bias_per_head",
        "bwd_sm90_bf16_d64_full_bias_to_qkvb_per_head",
        "bwd_sm90_bf16_d64_full_det",
    ]


def test_published_builds_can_all_be_planned_and_share_a_folder() -> None:
    found = cases.builds(map(parse, default_cases()), (9, 0))
    names = [record.name_of(first) for first in dict.fromkeys(first for first, *_ in found)]
    assert len(set(names)) == len(names), "a folder holds one kernel of a name"


def test_build_ptx_compiles_what_the_benchmark_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def compile_all(needed: list[Any], *, fresh: bool) -> list[Any]:
        assert not fresh
        made.extend(first.symbol for first, *_ in needed)
        return [fakes.artifact(first) for first, *_ in needed]

    monkeypatch.setattr(build_ptx, "compile_all", compile_all)
    monkeypatch.setattr(cases, "default_cases", lambda: (SMALL, f"{SMALL}_bias"))
    monkeypatch.setattr(sys, "argv", ["build_ptx", "--bench", str(tmp_path), "--only", "full_bias"])
    assert build_ptx.main() == 0
    assert [name.rpartition("_")[0] for name in made] == [
        "fwd_sm90_bf16_d64_full_bias",
        "bwd_sm90_bf16_d64_full_bias_per_head",
    ]
    assert sorted(path.stem for path in tmp_path.glob("sm_90*/*.json")) == sorted(made)


# Rows


@pytest.mark.parametrize(
    "name",
    [
        f"{SMALL}_biasgrad_dropout0.1",
        f"{SMALL}_alibi_sinks",
        "bf16_d64_s64_t200_h4k2_causal",
        "f16_d64_s64_b1_h2_causal_window8_deterministic",
    ],
)
def test_a_case_is_launched_with_all_its_operands(graphs: FakeDriver, name: str) -> None:
    case = parse(name)
    rows = list(harness.measure(case, fakes.artifact, 5))
    assert [(row.case, row.direction, row.peer, row.ratio) for row in rows] == [
        (name, "forward", "", None),
        (name, "backward", "", None),
    ]
    # The fake driver's events are 1.25 ms apart.
    assert [row.ours_ms for row in rows] == [1.25, 1.25]
    assert rows[0].ours_tflops == round(case.flops("forward") / 1.25e9, 2)
    launches = graphs.of("cuLaunchKernelEx")
    build = planner.builds_on(case.problem("backward"), (9, 0))[0]
    struct = fakes.decode(build, launches[-1].parameters)
    assert bool(struct["bias"]) == bool(struct["grad_bias"]) == bool(case.bias)
    assert (struct["bias_batch"], struct["philox_seed"]) == (0, 1 if case.dropout_p else 0)
    assert bool(struct["cu_seqlens_q"]) == bool(case.sequences)
    assert bool(struct["alibi_slopes"]) == bool(struct["grad_sinks"]) == bool(case.alibi)


def test_operands_hold_what_the_kernels_read(graphs: FakeDriver) -> None:
    case = parse("bf16_d64_s64_t200_h4k2_causal_alibi")
    operands = harness.Operands(case, 0)

    def read(name: str, dtype: Any) -> Any:
        array = operands.arrays[name]
        found = np.empty(array.shape, dtype)
        driver.copy_to_host(found.ctypes.data, array.pointer, found.nbytes, 0)
        return found

    assert (
        read("cu_seqlens_k", np.int32).tolist() == np.cumsum([0, *(each.num_keys for each in case.sequences)]).tolist()
    )
    assert read("alibi_slopes", np.float32).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    case = parse("bf16_d64_q30_s90_b2_h4_full_rangesb1runs")
    operands = harness.Operands(case, 0)
    for name, edge in case.key_ranges().arrays().items():
        assert (read(name, np.int32) == edge).all()
    shared = harness.Operands(parse(f"{SMALL}_bias"), 0)
    assert shared.arrays["bias"].shape == (1, 2, 64, 64)
    assert shared.pointers(["bias", "philox_seed"]) == {"bias": shared.arrays["bias"].pointer, "philox_seed": 1}


def row_of(case: str, rate: float, direction: str = "forward") -> harness.Row:
    return harness.Row(case, direction, "", None, rate, None, None, "H200", "c", 1.0, None)


def test_rows_are_held_against_their_baseline() -> None:
    baseline = FEATURE_CASES[WINDOW]
    rows = [row_of(WINDOW, 90.0), row_of(baseline, 120.0), row_of(WINDOW, 50.0, "backward")]
    found = harness.compared(rows)
    assert [(row.baseline, row.baseline_ratio) for row in found] == [(baseline, 0.75), ("", None), (baseline, None)]
    lines = harness.table(found).splitlines()
    assert lines[1].endswith(f"-              0.75 {baseline}")
    assert lines[2].split() == [baseline, "forward", "120.0", "-"]


def test_readme_table_shows_the_baseline() -> None:
    shared = {"direction": "forward", "peer": "", "peer_tflops": None, "ratio": None, "gpu": "H200"}
    rows = [
        {**shared, "case": "a", "ours_tflops": 100.0, "baseline": "", "baseline_ratio": None},
        {**shared, "case": "b", "ours_tflops": 75.0, "baseline": "a", "baseline_ratio": 0.75},
    ]
    assert check_verified.benchmark_table(rows).splitlines()[2:] == [
        "| case | direction | ours | of baseline |",
        "| --- | --- | --- | --- |",
        "| `a` | forward | 100 |  |",
        "| `b` | forward | 75 | 0.75 of `a` |",
    ]


def test_tables_have_an_empty_cell_for_a_refusal_and_name_the_versions() -> None:
    shared = {"case": "a", "direction": "forward", "gpu": "H200", "ours_tflops": 100.0}
    rows = [
        {**shared, "peer": "cudnn", "peer_tflops": 50.0, "ratio": 2.0, "peer_version": "cuDNN 9.19.0 of torch 2.11.0"},
        {**shared, "peer": "fa4", "peer_tflops": None, "ratio": None, "peer_version": "FlashAttention-4 4.0.0"},
    ]
    first, _, *lines = check_verified.benchmark_table(rows).splitlines()
    assert first.endswith(" Peers: cudnn is cuDNN 9.19.0 of torch 2.11.0, fa4 is FlashAttention-4 4.0.0.")
    assert lines[2] == "| `a` | forward | 100 | 50 (2.00) |  |"


def test_the_table_says_what_was_sustained() -> None:
    shared = {"direction": "forward", "peer": "", "peer_tflops": None, "ratio": None, "gpu": "H200", "ours_tflops": 1.0}
    first = check_verified.benchmark_table([{**shared, "case": "a", "sustained": True}]).splitlines()[0]
    assert first == ("TFLOP/s on H200, medians of CUDA graph replays after 500 ms of load; in brackets ours / peer.")


def test_a_refusal_is_an_empty_cell_of_the_row(graphs: FakeDriver) -> None:
    found = [
        harness.Measurement("cudnn", "cuDNN 9.19.1", 2.5),
        harness.Measurement("fa4", "FlashAttention-4 4.0", None, "AssertionError: no"),
    ]
    cudnn, fa4 = list(harness.measure(parse(SMALL), fakes.artifact, 5, peers=lambda *arguments: found))[:2]
    assert (cudnn.peer_ms, cudnn.ratio, cudnn.refusal) == (2.5, 2.0, "")
    assert (fa4.peer, fa4.peer_tflops, fa4.ratio, fa4.peer_ms) == ("fa4", None, None, None)
    assert (fa4.refusal, fa4.ours_tflops) == ("AssertionError: no", cudnn.ours_tflops)
    lines = harness.table([cudnn, fa4]).splitlines()
    assert lines[2].split() == [SMALL, "forward", f"{fa4.ours_tflops:.1f}", "fa4"]
    assert lines[-2:] == ["cudnn: cuDNN 9.19.1", "fa4: FlashAttention-4 4.0"]


def test_a_case_that_fails_does_not_end_the_run(
    graphs: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: ProblemSpec, kernels: Any, samples: int, **options: Any) -> Iterator[harness.Row]:
        yield row_of(case.name, 10.0)
        if case.name == SMALL:
            raise DriverError("broken")

    monkeypatch.setattr(harness, "measure", measure)
    output = tmp_path / "results" / "rows.json"
    rows, failures = harness.run([SMALL, f"{SMALL}_bias"], "", tmp_path, output, 5)
    assert failures == [f"{SMALL}: broken"]
    names = [SMALL, f"{SMALL}_bias"]
    assert [row.case for row in rows] == names
    assert [row["case"] for row in json.loads(output.read_text())] == names


def test_without_a_gpu_one_sentence_stands_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_device(ordinal: int) -> Any:
        raise AttentionError("no GPU")

    monkeypatch.setattr(driver, "device", no_device)
    with pytest.raises(AttentionError, match="no GPU"):
        harness.run((), "", tmp_path, None, 5)
