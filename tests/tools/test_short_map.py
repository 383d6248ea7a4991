"""Tests of the map of short sequences with the fake driver, and of its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.bench import cases, harness
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.spec import parse
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tools.bench import peers
from tools.lab import short_map, short_map_plots
from tools.release import build_ptx, record

NAMES = ("bf16_d64_s64_b1_h4_full", "bf16_d64_s197_b8_h4_causal")
VERSIONS = {"cudnn": "cuDNN 9.19.0 of torch 2.11.0", "fa4": "FlashAttention-4 4.0.0"}


def measured(*arguments: Any) -> Iterator[harness.Measurement]:
    """cuDNN takes 0.25 ms; FlashAttention-4 refuses."""
    yield harness.Measurement("cudnn", VERSIONS["cudnn"], 0.25)
    yield harness.Measurement("fa4", VERSIONS["fa4"], None, "no")


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of two cases, beside fake peers and with kernels that do nothing."""
    monkeypatch.setattr(short_map, "names", lambda: NAMES)
    monkeypatch.setattr(peers, "compile_ahead", lambda *arguments: None)
    monkeypatch.setattr(peers, "measure", measured)
    monkeypatch.setattr(short_map, "default_kernels", lambda: artifact)


def test_the_map_has_every_length_batch_and_head_count() -> None:
    specs = [parse(name) for name in short_map.names()]
    assert [spec.name for spec in specs] == list(short_map.names())
    assert {spec.num_keys for spec in specs} == {64, 128, 197, 256, 384, 512, 768, 1024}
    for axis in ("head_dim", "batch", "num_heads", "mask"):
        assert len({getattr(spec, axis) for spec in specs}) > 1
    assert all(cases.directions(spec) == ("forward", "backward") for spec in specs)


@pytest.mark.usefixtures("two_cases")
def test_a_run_writes_points_with_the_time_of_one_call(
    graphs: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "map.json"
    assert short_map.main(["--record", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["peers"] == VERSIONS
    sizes = {"head_dim": 64, "mask": "full", "seqlen": 64, "batch": 1, "heads": 4}
    # The fake driver's events are 1.25 ms apart, and a replay has ten calls.
    assert found["points"][0] == {**sizes, "direction": "forward", "ours_us": 125.0, "peers_us": {"cudnn": 250.0}}
    assert [(point["seqlen"], point["direction"]) for point in found["points"]] == [
        (length, direction) for length in (64, 197) for direction in ("forward", "backward")
    ]
    assert " 2.00  d64 s64 b1 h4 full" in capsys.readouterr().out


@pytest.mark.usefixtures("two_cases")
def test_a_case_that_fails_is_left_out(
    graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kernels(build: Build) -> Artifact:
        if "causal" in build.symbol:
            raise DriverError("broken")
        return artifact(build)

    monkeypatch.setattr(short_map, "default_kernels", lambda: kernels)
    assert short_map.main([]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"{NAMES[1]}: broken\n"
    assert "causal" not in printed.out


@pytest.mark.usefixtures("two_cases")
def test_what_it_builds_is_enough(graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_ptx, "compile_all", lambda needed, fresh: [artifact(first) for first, *_ in needed])
    assert short_map.main(["--build", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("sm_90*/*.json"))) == 4
    assert short_map.main(["--kernels", str(tmp_path)]) == 0


# Pictures


def test_without_a_record_there_are_no_pictures(tmp_path: Path) -> None:
    assert short_map_plots.read(tmp_path) == {}
    assert short_map_plots.pictures({}) == {}
    assert short_map_plots.block({}) == short_map_plots.NOT_MEASURED


def test_a_picture_shows_every_point() -> None:
    shared = {"direction": "forward", "head_dim": 64, "mask": "full", "batch": 1, "ours_us": 10.0}
    points: list[record.Json] = [
        {**shared, "seqlen": 64, "heads": 4, "peers_us": {"cudnn": 12.3, "flash": 20.0}},
        {**shared, "seqlen": 64, "heads": 16, "peers_us": {"cudnn": 7.7}},
        {**shared, "seqlen": 197, "heads": 4, "peers_us": {}},
        {**shared, "seqlen": 197, "heads": 4, "peers_us": {"cudnn": 45.6}, "direction": "backward"},
    ]
    about = {"gpu": "H200", "driver": "CUDA 13.0", "date": "2026-11-23T00:00:00+00:00", "commit": "0" * 40}
    found = {**about, "peers": VERSIONS, "points": points}
    pictures = short_map_plots.pictures(found)
    assert list(pictures) == ["short_map_forward", "short_map_backward"]
    texts = set(ElementTree.fromstring(pictures["short_map_forward"]).itertext())
    assert texts >= {"1.23", "0.77", "-", "64", "197", "1 x 4", "1 x 16", "head dim 64, full"}
    assert "4.56" in set(ElementTree.fromstring(pictures["short_map_backward"]).itertext())
    lines = short_map_plots.block(found).splitlines()
    assert lines[0] == (
        "On H200 (CUDA 13.0), 2026-11-23, commit 000000000000. Peers: cuDNN 9.19.0 of torch 2.11.0, "
        "FlashAttention-4 4.0.0."
    )
    assert lines[2] == "![short sequences, forward](../pictures/short_map_forward.svg)"
