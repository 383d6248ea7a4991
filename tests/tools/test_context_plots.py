"""Tests of the model of split rows, and of the picture that shows it beside measured times: with a made-up record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.bench import bench_context
from tools.lab import context_plots
from tools.lab.context_model import ALL_GATHER, BOTH, FORWARD, JAX, NCCL, RING, STRATEGIES, ULYSSES, Model
from tools.release import record

ABOUT = {"gpu": "H200", "driver": "CUDA 13.0", "date": "2026-11-23T00:00:00+00:00", "commit": "0" * 40}
SIZES = bench_context.HEADS, bench_context.HEADS_KEY, bench_context.HEAD_DIM


def row(entry: str, name: str, tokens: int, gpus: int, *times: float | None) -> record.Json:
    count = {"devices" if entry == JAX else "ranks": gpus}
    return {"tokens": tokens, **count, "name": name, **dict(zip((FORWARD, BOTH), times, strict=True))}


def made_up() -> record.Json:
    """Two GPUs: all-gather, without a backward, and the ring over JAX, and Ulysses over NCCL."""
    jax = [
        row(JAX, "one GPU", 64, 1, 1.0, 4.0),
        row(JAX, "one GPU, cuDNN", 64, 1, 2.0, 8.0),
        row(JAX, "all_gather, zigzag", 64, 2, 0.8, None),
        row(JAX, "ring, zigzag", 64, 2, 0.625, 2.5),
        row(JAX, "cuDNN, all-gather", 64, 2, 2.0, 8.0),
        row(JAX, "one GPU", 128, 1, 4.0, 16.0),
        row(JAX, "ring, zigzag", 128, 2, 2.1, 8.4),
    ]
    nccl = [row(NCCL, "one GPU", 128, 1, 4.2, 16.8), row(NCCL, "ulysses", 128, 2, 2.4, 9.6)]
    return {JAX: {**ABOUT, "rows": jax}, NCCL: {**ABOUT, "exchange_gb_s": 250.0, "rows": nccl}}


def of_rate(tokens: int, host: float = 264e9) -> Model:
    """The model of docs/several_gpus.md: a forward of 650 TFLOP/s."""
    time = 2 * tokens**2 * SIZES[0] * SIZES[2] / 650e12 * 1e3
    return Model(*SIZES, {(FORWARD, tokens): time, (BOTH, tokens): 3.5 * time}, host, 45e9, 8, 4e12)


@pytest.mark.parametrize(
    ("tokens", "gpus", "compute", "ring", "ulysses", "merges"),
    [
        (8192, 2, 0.42, 0.06, 0.16, 0.05),
        (32768, 2, 6.77, 0.25, 0.64, 0.20),
        (131072, 2, 108.3, 1.0, 2.5, 0.8),
        (1048576, 8, 1732, 14, 9, 11),
        (1048576, 64, 217, 94, None, 13),
    ],
)
def test_the_table_of_the_page_is_the_model(
    tokens: int, gpus: int, compute: float, ring: float, ulysses: float | None, merges: float
) -> None:
    found = of_rate(tokens)
    bandwidth = found.host if gpus <= 8 else found.network
    assert found.alone(FORWARD, tokens) / gpus == pytest.approx(compute, rel=0.01)
    assert found.received(RING, FORWARD, tokens, gpus, JAX) / bandwidth * 1e3 == pytest.approx(ring, rel=0.06)
    assert found.is_possible(ULYSSES, gpus) == (ulysses is not None)
    if ulysses is not None:
        moved = found.received(ULYSSES, FORWARD, tokens, gpus, JAX)
        assert moved / bandwidth * 1e3 == pytest.approx(ulysses, rel=0.06)
    exchange = found.received(RING, FORWARD, tokens, gpus, JAX) / bandwidth * 1e3
    rest = found.milliseconds(RING, FORWARD, tokens, gpus, JAX) - found.alone(FORWARD, tokens) / gpus - exchange
    assert rest == pytest.approx(merges, rel=0.07)


def test_bytes_of_a_backward() -> None:
    """Those of the tables of the page, with kv and qo bytes in a row; key heads are repeated for 32 GPUs."""
    found, rows, kv, qo = of_rate(1024), 512, 2 * 2 * 8 * 128, 2 * 2 * 32 * 128
    for strategy in (ALL_GATHER, RING):
        assert found.received(strategy, BOTH, 1024, 2, JAX) == rows * kv * (1 + 3)
    assert found.received(ULYSSES, BOTH, 1024, 2, NCCL) == rows / 2 * (qo + kv) * 3
    assert found.received(ULYSSES, BOTH, 1024, 2, JAX) == rows / 2 * (qo + kv) * 2
    assert found.received(ULYSSES, FORWARD, 1024, 32, JAX) == pytest.approx(31 / 32 * 32 * (qo + 4 * kv))
    assert found.received(RING, FORWARD, 1024, 1, JAX) == 0


def test_one_gpu_is_its_own_share_and_other_lengths_grow_by_the_square() -> None:
    found = of_rate(1024)
    assert [found.share(strategy, BOTH, 1024, 1, JAX) for strategy in STRATEGIES] == [1, 1, 1]
    assert found.alone(BOTH, 4096) == pytest.approx(16 * found.alone(BOTH, 1024))


def test_without_a_record_there_is_no_picture(tmp_path: Path) -> None:
    assert context_plots.read(tmp_path) == {}
    for found in ({}, {JAX: {**ABOUT, "rows": [row(JAX, "one GPU", 64, 1, 1.0, 2.0)]}}):
        assert context_plots.pictures(found) == {}
        assert context_plots.block(found) == context_plots.NOT_MEASURED


def test_points_are_what_was_measured() -> None:
    found = context_plots.points(made_up())
    assert [(it.entry, it.strategy, it.tokens, it.gpus) for it in found] == [
        (JAX, ALL_GATHER, 64, 2),
        (JAX, RING, 64, 2),
        (JAX, RING, 128, 2),
        (NCCL, ULYSSES, 128, 2),
    ]
    assert found[0].milliseconds == {FORWARD: 0.8}
    assert [it.share(FORWARD) for it in found] == pytest.approx([0.625, 0.8, 4 / 2 / 2.1, 4.2 / 2 / 2.4])


def test_markers_are_measured_points_and_nothing_else() -> None:
    """For the longest sequence that was measured; the other column has no marker at all, and says so."""
    picture = context_plots.pictures(made_up())["context_parallel"]
    root = ElementTree.fromstring(picture)
    ids = [element.get("id", "") for element in root.iter() if element.get("id", "").startswith("measured")]
    assert sorted(ids) == ["measured_jax_ring"] * 2 + ["measured_nccl_ulysses"] * 2  # forward, and both
    texts = " ".join(root.itertext())
    assert texts.count("model alone: nothing here is measured") == 2
    assert texts.count("model, not measured") == 2
    for words in ("forward, 128 tokens", "forward + backward, 1048576 tokens", "ring: model", "measured, JAX, H200"):
        assert words in texts
    without = made_up()
    for part in without.values():
        part["rows"] = [it for it in part["rows"] if it["name"] == "one GPU" or it["tokens"] == 64]
    ids = re.findall(r'id="(measured\w+)"', context_plots.pictures(without)["context_parallel"])
    assert sorted(ids) == ["measured_jax_all_gather", "measured_jax_ring", "measured_jax_ring"]


def test_the_table_has_measured_and_modelled_times() -> None:
    found = made_up()
    lines = context_plots.block(found).splitlines()
    assert lines[0] == (
        "JAX: H200 (CUDA 13.0), 2026-11-23, commit 000000000000. NCCL, a process each: H200 (CUDA 13.0), 2026-11-23, "
        "commit 000000000000. Model: 250 GB/s within a host (measured in this run), 45 GB/s between hosts and 4 TB/s "
        "of memory (assumed)."
    )
    assert lines[4] == "| 64 | 2 | all_gather, JAX | 0.8 | 0.501 |  |  |"
    of_model = lines[: next(i for i, line in enumerate(lines) if line.startswith("!["))]
    assert len([line for line in of_model if line.startswith("| ")]) == 2 + len(context_plots.points(found))
    del found[NCCL]
    assert "264 GB/s within a host (measured before)" in context_plots.block(found)


def test_the_peers_of_the_run_are_beside_ours() -> None:
    found = made_up()
    found[JAX]["rows"][0]["memory_mib"] = 12.4
    peer = row(NCCL, "torch ring, zigzag", 128, 2, 4.2, 16.8) | {"error": 0.003}
    found[NCCL]["rows"].append(peer)
    text = context_plots.block(found)
    for line in (
        "| 64 | 1 | one GPU, JAX | 1 | 4 | 12 |  |",
        "| 64 | 2 | all_gather, zigzag, JAX | 0.8 (0.62) | refused |  |  |",
        "| 64 | 2 | cuDNN, all-gather, JAX | 2 (0.25) | 8 (0.25) |  |  |",
        "| 128 | 2 | torch ring, zigzag, NCCL, a process each | 4.2 (0.50) | 16.8 (0.50) |  | 3.0e-03 |",
    ):
        assert line in text.splitlines()
    assert "Batch and heads" not in text
    assert "handler" not in text


def test_batch_and_heads_and_both_handlers_are_shown() -> None:
    found = made_up()
    names = {
        "one GPU": (1.0, 4.0),
        "one GPU, cuDNN": (2.0, 8.0),
        "batch, Auto": (0.5, 2.5),
        "heads, cuDNN": (1.0, None),
    }
    rows = [row(JAX, name, 64, 1 if "one" in name else 2, *times) | {"batch": 4} for name, times in names.items()]
    found["sharding"] = {**ABOUT, "rows": rows}
    host = {"program": "forward", "gpus": 2, "busy_threads": 1, "cudnn_ms": None}
    found["python handler"] = {**ABOUT, "host": [{**host, "ours_ms": 21.0}]}
    assert "small program" not in context_plots.block(found)
    found["native handler"] = {**ABOUT, "host": [{**host, "ours_ms": 0.25}]}
    lines = context_plots.block(found).splitlines()
    for line in (
        "| 64 | 4 | 2 | batch, Auto | 0.5 (2.00) | 2.5 (1.60) |",
        "| 64 | 4 | 2 | heads, cuDNN | 1 (2.00) | refused |",
        "| forward, 2 GPUs, beside a busy thread | 21.000 | 0.250 | refused |",
    ):
        assert line in lines


def test_the_record_and_the_memory_are_those_of_the_gpu(tmp_path: Path) -> None:
    """The first name that is there; the assumed memory is that of the GPU which the record names."""
    for name, speed in zip(reversed(context_plots.RESULTS), ("2.8", "4"), strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        gpu = "NVIDIA H100 80GB HBM3" if "h100" in name else "NVIDIA H200"
        path.write_text(json.dumps({entry: {**part, "gpu": gpu} for entry, part in made_up().items()}))
        text = context_plots.block(context_plots.read(tmp_path))
        assert text.startswith(f"JAX: {gpu} (")
        assert f"{speed} TB/s of memory (assumed)" in text


def test_a_record_has_a_part_of_each_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    found: dict[str, Any] = made_up()
    for name, part in found.items():
        record.put_part(path, name, {"rows": []})
        record.put_part(path, name, part)
    assert json.loads(path.read_text()) == found
