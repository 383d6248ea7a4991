"""Tests of the generated documentation: it is current, complete and well formed."""

from __future__ import annotations

import inspect
import json
import re
from xml.etree import ElementTree

import pytest

import cutlass_py_attn
from cutlass_py_attn import distributed, torch_ops
from cutlass_py_attn.kernels.catalogue import KERNELS
from tools.docs import benchmark_plots, front_tables, generate, jax_table, kernel_map, reference

ROOT = generate.ROOT
PICTURES = ROOT / "docs/pictures"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generate.generated(ROOT)


def test_generated_files_are_current(generated: dict[str, str]) -> None:
    """After a change of docstrings, pages or the benchmark: python -m tools.docs.generate."""
    assert [name for name, text in generated.items() if (ROOT / name).read_text() != text] == []


def test_every_picture_is_generated(generated: dict[str, str]) -> None:
    kept = {path.relative_to(ROOT).as_posix() for path in PICTURES.iterdir()}
    assert kept == {name for name in generated if name.endswith(".svg")}


def test_pictures_are_well_formed() -> None:
    for path in PICTURES.iterdir():
        root = ElementTree.fromstring(path.read_text())
        assert root.tag.endswith("svg")
        assert len(" ".join(root.itertext())) > 100


def test_every_rate_of_the_benchmark_is_in_a_chart() -> None:
    rows = json.loads((ROOT / benchmark_plots.BENCHMARK).read_text())
    shown = {
        (name.partition("_")[0].replace("decode", "forward"), case, implementation)
        for name, bars in benchmark_plots.charts(rows)
        for case, rates in bars.groups
        for implementation in rates
    }
    measured = [(row, name) for row in rows for name in ("ours", "" if row.get("refusal") else row["peer"]) if name]
    assert shown == {(row["direction"], row["case"], name) for row, name in measured}


def test_charts_label_every_case_and_name_flash_attention_2() -> None:
    rows = json.loads((ROOT / benchmark_plots.BENCHMARK).read_text())
    for name, bars in benchmark_plots.charts(rows):
        texts = re.findall(r">([^<>]+)</text>", (PICTURES / f"{name}.svg").read_text())
        assert set(texts) >= {benchmark_plots.tick_label(case) for case, _ in bars.groups}
        assert ("FlashAttention-2 (torch)" in texts) == ("flash" in bars.implementations)


def test_tick_labels_count_equal_sequences() -> None:
    label = benchmark_plots.tick_label
    assert label("f16_d64_n1x64u8,1x64u8,2x64_h8_full_paged16") == "f16_d64_n2 x (1x64u8),2x64_h8_full_paged16"
    assert label("bf16_d128_s8192_b4_h16_causal") == "bf16_d128_s8192_b4_h16_causal"


def test_chunks_of_prompts_are_not_among_the_decode_steps() -> None:
    groups = dict(benchmark_plots.charts(json.loads((ROOT / benchmark_plots.BENCHMARK).read_text())))
    queries = [int(found) for case, _ in groups["decode"].groups for found in re.findall(r"_q(\d+)_", case)]
    assert max(queries) <= benchmark_plots.FEW_QUERIES
    assert any("_q2048_" in case for case, _ in groups["forward_features"].groups)


def test_charts_show_flash_attention_4_and_versions_where_a_record_has_them() -> None:
    rows = json.loads((ROOT / benchmark_plots.BENCHMARK).read_text())
    name, versions = rows[0]["case"], {"cudnn": "cuDNN 9.19.0 of torch 2.11.0", "fa4": "FlashAttention-4 4.0.0"}
    added = [{**row, "peer": "fa4"} for row in rows if row["peer"] == "cudnn"]
    shown = [{**row, "peer_version": versions.get(row["peer"], "")} for row in [*rows, *added]]
    refused = {"peer_tflops": None, "ratio": None, "refusal": "no"}
    shown = [{**row, **refused} if (row["case"], row["peer"]) == (name, "fa4") else row for row in shown]
    charts = dict(benchmark_plots.charts(shown))
    assert "fa4" not in dict(charts["forward_bf16"].groups)[name]
    sweep = set(ElementTree.fromstring(benchmark_plots.overview(shown)).itertext())
    assert sweep >= {"FlashAttention-4 4.0.0", "cuDNN 9.19.0 (torch)", "FlashAttention-2 (torch)"}


def test_a_peer_without_a_rate_in_one_direction_is_left_out_there() -> None:
    rows = json.loads((ROOT / benchmark_plots.BENCHMARK).read_text())
    kept = [row for row in rows if (row["direction"], row["peer"]) != ("backward", "cudnn")]
    assert re.search(r"cuDNN ([\d.]+ )?\(torch\)", benchmark_plots.overview(kept))


def test_reference_has_every_public_name(generated: dict[str, str]) -> None:
    headings = re.findall(r"^### `(\w+)`$", generated[generate.REFERENCE], re.MULTILINE)
    jax_names = reference.exports(reference.load()["jax"])
    others = *torch_ops.__all__, *jax_names, *distributed.__all__
    assert sorted(headings) == sorted([*cutlass_py_attn.__all__, *others])


def test_the_front_of_the_reference_has_the_names_that_users_call(generated: dict[str, str]) -> None:
    front = generated[generate.REFERENCE].partition("\n## ")[0]
    assert re.findall(r"^\| \[`(\w+)`\]", front, re.MULTILINE) == [*reference.FRONT]
    assert len(reference.FRONT) == 20
    assert {*reference.FRONT} <= {*cutlass_py_attn.__all__}


def test_reference_has_the_names_of_jax(generated: dict[str, str]) -> None:
    module = pytest.importorskip("cutlass_py_attn.jax", exc_type=ImportError)
    jax_names = reference.exports(reference.load()["jax"])
    assert sorted(jax_names) == sorted(module.__all__)
    for name in jax_names:
        assert inspect.getdoc(getattr(module, name)).splitlines()[0] in generated[generate.REFERENCE]


def test_reference_lists_parameters(generated: dict[str, str]) -> None:
    _, _, options = generated[generate.REFERENCE].partition("### `AttentionOptions`\n")
    lines = options.partition("\n### ")[0].splitlines()
    assert len([line for line in lines if line.startswith("- `")]) > 8


def test_microbenchmarks_are_a_table_of_the_newest_run() -> None:
    assert generate.microbenchmarks([]) == generate.NOT_MEASURED
    run = {"gpu": "H200", "driver": "CUDA 13.0", "date": "2026-11-22T01:00:00+00:00", "commit": "0123456789abcdef"}
    numbers = {
        "blocks": 132,
        "median_ms": 1.5,
        "rate": 640.25,
        "rate_unit": "TFLOP/s",
        "per_clock": 8000.5,
        "mhz": 1755,
    }
    lines = [
        {**run, **numbers, "name": "wgmma SS, n 256", "beside_per_clock": 60.25, "date": "2026-11-21T09:00:00+00:00"},
        {**run, **numbers, "name": "wgmma SS, n 256", "beside_per_clock": 61.5},
        {**run, **numbers, "name": "ex2", "rate_unit": "Gop/s", "beside_per_clock": None},
    ]
    about, _, *table = generate.microbenchmarks(lines).splitlines()
    assert about == "On H200 (CUDA 13.0), 2026-11-22, commit 0123456789ab."
    assert table[2:] == [
        "| wgmma SS, n 256 | 132 | 1.5 | 640.2 TFLOP/s | 8000.5 | 1755 | 61.5 |",
        "| ex2 | 132 | 1.5 | 640.2 Gop/s | 8000.5 | 1755 |  |",
    ]


def test_a_run_of_jax_is_a_table() -> None:
    case = {"dtype": "float32", "batch": 4, "tokens": 2048, "heads": 16, "head_dim": 64, "is_causal": False}
    times = {"ours_ms": 0.6881, "cudnn_ms": None, "ours_both_ms": 2.4, "cudnn_both_ms": None}
    run = {
        "gpu": "H200",
        "driver": "CUDA 13.0",
        "jax": "0.11.2",
        "date": "2026-11-22T01:00:00+00:00",
        "commit": "0" * 40,
    }
    lines = jax_table.table({**run, "rows": [{**case, **times}]}).splitlines()
    assert lines[0] == "H200 (CUDA 13.0), JAX 0.11.2, 2026-11-22, commit 000000000000:"
    assert lines[-1] == "| float32, full, batch 4, 2048 tokens, 16 heads of 64 | 0.688 | refused | 2.400 | refused |"


def test_the_first_tables_are_rows_of_the_benchmark() -> None:
    rows = json.loads((ROOT / benchmark_plots.BENCHMARK).read_text())
    tables = {
        front_tables.FORWARD: front_tables.rates(rows, "forward", front_tables.FORWARD),
        front_tables.BACKWARD: front_tables.rates(rows, "backward", front_tables.BACKWARD),
        front_tables.DECODE: front_tables.steps(rows, front_tables.DECODE),
    }
    for cases, table in tables.items():
        assert re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) == [*cases]


def test_a_first_table_has_the_fastest_of_a_column() -> None:
    row = {"case": "a", "direction": "forward", "ours_tflops": 20.0, "ours_ms": 0.5, "ours_gb_s": 3000.4}
    torch = {**row, "peer": "cudnn", "peer_tflops": 10.0, "peer_ms": 1.0, "ratio": 2.0}
    own = {**row, "peer": "cudnn_frontend", "peer_tflops": 16.0, "peer_ms": 0.625, "ratio": 1.25}
    refused = {**row, "peer": "fa4", "peer_tflops": None, "peer_ms": None, "ratio": None}
    rows = [torch, own, refused]
    assert front_tables.rates(rows, "forward", ["a", "b"]).splitlines()[2:] == ["| `a` | 20 |  | 16 (1.25) |  |  |"]
    assert front_tables.rates(rows, "backward", ["a"]).splitlines()[2:] == []
    assert front_tables.steps(rows, ["a"]).splitlines()[2:] == ["| `a` | 500.0 | 3000 |  | 625.0 (1.25) |  |  |"]


def test_the_kernel_map_has_every_file_that_traces_kernels() -> None:
    files = re.findall(r"^\| \[`([^`]+)`\]", kernel_map.table(ROOT), re.MULTILINE)
    assert files == [*dict.fromkeys(f"{kernel.module.replace('.', '/')}.py" for kernel in KERNELS.values())]
