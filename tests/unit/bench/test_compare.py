"""Tests of comparing two records of the benchmark, as functions and as the command `bench --compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cutlass_py_attn.bench import compare, harness
from cutlass_py_attn.bench.compare import Comparison
from cutlass_py_attn.cli.bench import bench
from cutlass_py_attn.errors import AttentionError

CASE, OTHER = "bf16_d64_s64_b2_h2_full", "bf16_d64_s64_b2_h2_causal"


def row(case: str, rate: float, direction: str = "forward", **changes: Any) -> harness.Row:
    found = harness.Row(case, direction, "cudnn", rate / 2, rate, 2.0, 1980, "H200", "c", 1.0, 2.0)
    return replace(found, **changes)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that writes rows into a file and returns its path."""

    def write(name: str, *rows: harness.Row) -> str:
        path = tmp_path / name
        path.write_text(json.dumps([asdict(each) for each in rows]))
        return str(path)

    return write


def test_only_drops_beyond_the_tolerance_and_missing_rows_are_worse() -> None:
    before = [row(CASE, 100.0), row(CASE, 100.0, "backward"), row(OTHER, 100.0)]
    now = [row(CASE, 97.1), row(CASE, 96.9, "backward"), row(OTHER, 50.0, "backward")]
    found = compare.compare(before, now)
    assert [(each.case, each.direction, each.finding) for each in found] == [
        (CASE, "forward", ""),
        (CASE, "backward", "dropped"),
        (OTHER, "forward", "missing"),
        (OTHER, "backward", "new"),
    ]
    assert [each.is_worse for each in found] == [False, True, True, False]


def test_rows_of_several_peers_are_one_comparison() -> None:
    rows = [row(CASE, 100.0), row(CASE, 100.0, peer="flash")]
    assert compare.compare(rows, rows) == [Comparison(CASE, "forward", 100.0, 100.0)]


def test_cases_that_were_not_to_be_measured_are_not_missing() -> None:
    before = [row(CASE, 100.0), row(OTHER, 100.0)]
    assert compare.compare(before, [row(CASE, 100.0)], [CASE]) == [Comparison(CASE, "forward", 100.0, 100.0)]


@pytest.mark.parametrize("change", [{"gpu": "H100"}, {"sustained": True}])
def test_records_of_two_kinds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(AttentionError, match="must be the same; compare records of one kind"):
        compare.compare([row(CASE, 100.0)], [row(CASE, 100.0, **change)])


def test_the_table_counts_what_is_worse() -> None:
    found = compare.compare([row(CASE, 100.0), row(OTHER, 80.0)], [row(CASE, 90.0)])
    lines = compare.table(found).splitlines()
    assert lines[1].split() == [CASE, "forward", "100.0", "90.0", "0.900", "dropped"]
    assert lines[2].split() == [OTHER, "forward", "80.0", "-", "missing"]
    assert lines[3] == "2 rows in TFLOP/s: 1 dropped by more than 3%, 1 missing"


@pytest.mark.parametrize(("text", "reason"), [
    ("no JSON", "cannot be read"),
    ("{}", "must be a list of at least one row"),
    ("[]", "must be a list of at least one row"),
    ("[1]", "row 0 is a int: must be an object"),
    ('[{"case": "a"}]', "fields direction, peer, .* are missing or unknown"),
])  # fmt: skip
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(AttentionError, match=f"{reason}.*name a file that `bench -o` wrote"):
        compare.read_rows(path)


@pytest.mark.parametrize(("change", "reason"), [
    ({"ours_tflops": None}, "ours_tflops = None: must be a number"),
    ({"unknown": 1}, "fields unknown are missing or unknown"),
    ({"case": []}, r"case = \[\]: must be a string"),
])  # fmt: skip
def test_a_row_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**asdict(row(CASE, 1.0)), **change}]))
    with pytest.raises(AttentionError, match=reason):
        compare.read_rows(path)


def test_committed_records_can_be_compared() -> None:
    for name in ("h200.json", "sustained.json"):
        rows = compare.read_rows(Path(__file__).parents[3] / "tools/bench/results" / name)
        assert all(each.ratio == 1.0 for each in compare.compare(rows, rows))


# The command


def test_two_files_are_compared_without_a_gpu(written: Callable[..., str]) -> None:
    before, now = written("old", row(CASE, 100.0), row(OTHER, 90.0)), written("new", row(CASE, 96.0), row(OTHER, 90.0))
    result = CliRunner().invoke(bench, ["--rows", now, "--compare", before])
    assert result.exit_code == 1
    assert "1 dropped by more than 3%, 0 missing" in result.output
    assert f"Error: {CASE} forward: dropped" in result.output
    assert CliRunner().invoke(bench, ["--rows", now, "--compare", now]).exit_code == 0
    assert CliRunner().invoke(bench, ["--rows", now, "--compare", before, "--only", "causal"]).exit_code == 0


def test_a_comparison_is_json_too(written: Callable[..., str]) -> None:
    path = written("rows", row(CASE, 100.0))
    result = CliRunner().invoke(bench, ["--rows", path, "--compare", path, "--json"])
    found = {"case": CASE, "direction": "forward", "before": 100.0, "now": 100.0, "finding": ""}
    assert json.loads(result.output) == [found]


def test_rows_of_a_file_are_shown(written: Callable[..., str]) -> None:
    path = written("rows", row(CASE, 100.0), row(OTHER, 90.0))
    assert CliRunner().invoke(bench, ["--rows", path]).output == harness.table(compare.read_rows(Path(path))) + "\n"


def test_options_of_a_measurement_are_refused_beside_rows(written: Callable[..., str], tmp_path: Path) -> None:
    path = written("rows", row(CASE, 100.0))
    result = CliRunner().invoke(bench, ["--rows", path, "--samples", "7", "--kernels", str(tmp_path), "--sustained"])
    assert result.exit_code == 2
    assert "--kernels, --samples, --sustained must be absent; leave them out" in " ".join(result.output.split())


def test_a_measurement_is_compared_with_a_file(written: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(*arguments: Any, sustained: bool) -> tuple[list[harness.Row], list[str]]:
        asked.append((arguments, sustained))
        return [row(CASE, 50.0)], []

    monkeypatch.setattr(harness, "run", run)
    before = written("old", row(CASE, 100.0), row(OTHER, 90.0))
    result = CliRunner().invoke(bench, ["--case", CASE, "--compare", before])
    assert asked == [(((CASE,), "", None, None, 7), False)]
    assert result.exit_code == 1
    assert result.output.startswith(harness.table([row(CASE, 50.0)]))
    assert "1 rows in TFLOP/s: 1 dropped by more than 3%, 0 missing" in result.output


def test_a_file_that_is_no_record_is_refused_before_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "run", lambda *arguments, **options: pytest.fail("measured"))
    path = tmp_path / "rows.json"
    path.write_text("[]")
    result = CliRunner().invoke(bench, ["--compare", str(path)])
    assert isinstance(result.exception, AttentionError)
