"""Tests of the model of split rows, and of the picture that shows it beside measured times: with a made-up record."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.bench import bench_context
from tools.lab import context_plots
from tools.lab.context_model import BOTH, FORWARD, JAX, NCCL, RING, ULYSSES, Model
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
