"""Tests of the host benchmark with the fake driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.launch.build import Build
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tools.bench import bench_host
from tools.release import build_ptx


def test_a_sample_is_a_mean_and_the_median_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 40e-6, 0.0, 60e-6, 0.0, 20e-6])
    monkeypatch.setattr(bench_host, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(bench_host.driver, "call", lambda name: None)
    calls: list[int] = []
    row = bench_host.measure("what", "bfloat16", lambda: calls.append(1), samples=3, calls=10)
    assert (row.median_us, row.least_us) == (pytest.approx(4), pytest.approx(2))
    assert len(calls) == 32, "two calls to warm up"


def test_every_bound_call_has_other_addresses(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(what: str, dtype: str, call: object, **_: int) -> bench_host.Row:
        measured.append(what)
        assert callable(call)
        driver_log.clear()
        for _number in range(3):  # the first call launches kernel by kernel and captures the graph
            call()
        structs = [launch.parameters for launch in driver_log.of("cuLaunchKernelEx")]
        kernels = len(structs) // 3
        assert (structs[:kernels] != structs[kernels : 2 * kernels]) == ("same" not in what)
        if "pool" not in what:  # the pool may return any address
            repeats = not what.endswith(("new addresses", *bench_host.LAUNCHERS))
            assert (structs[:kernels] == structs[2 * kernels :]) == repeats
        is_graph = what.endswith("as a graph") or ("backward" in what and "kernel by kernel" not in what)
        assert bool(driver_log.of("cuGraphLaunch")) == is_graph
        return bench_host.Row(what, dtype, 1.0, 1.0)

    monkeypatch.setattr(bench_host, "measure", measure)
    rows = [
        row for direction in bench_host.DIRECTIONS for row in bench_host.bound_rows(direction, "float16", 128, artifact)
    ]
    assert measured == [
        *("bound forward d128", "bound forward d128, new addresses", "bound forward d128, the same addresses"),
        *("bound forward d128, kernel by kernel", "bound forward d128, as a graph"),
        *("bound backward d128", "bound backward d128, new addresses", "bound backward d128, the same addresses"),
        "bound backward d128, workspace of the pool",
        *("bound backward d128, kernel by kernel", "bound backward d128, as a graph"),
    ]
    assert [bench_host.allowed(row) for row in rows] == [4.0] * 3 + [None] * 2 + [8.0] * 3 + [None] * 3


def test_a_decode_step_is_measured_bound_and_captured(graphs: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: dict[str, list[str]] = {}

    def measure(what: str, dtype: str, call: Any, **_: int) -> bench_host.Row:
        call()
        graphs.clear()
        call()
        launches[what] = [name for name in graphs.names if "Launch" in name]
        return bench_host.Row(what, dtype, 5.0, 5.0)

    monkeypatch.setattr(bench_host, "measure", measure)
    with bench_host.driver.device(0).current():
        rows = list(bench_host.step_rows(artifact))
    decode = ["cuGraphLaunch", "cuLaunchKernelEx", "cuLaunchKernelEx"]  # a graph of two kernels
    assert launches == {
        "bound decode, paged": decode,
        "bound append and decode": ["cuLaunchKernelEx", *decode],
        "captured append and decode": ["cuGraphLaunch"],  # a captured graph of the fake driver is empty
    }
    assert [bench_host.allowed(row) for row in rows] == [6.0, None, None]


def test_targets() -> None:
    row = bench_host.Row("attention_backward, torch", "float32", 30.0, 29.0)
    assert bench_host.allowed(row) == 25.0


def test_what_it_builds_is_what_it_launches(
    driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_ptx, "compile_all", lambda needed, fresh: [artifact(first) for first, *_ in needed])
    assert bench_host.main(["--build", str(tmp_path)]) == 0
    built = {path.stem for path in tmp_path.glob("sm_90*/*.json")}
    launched: set[str] = set()

    def kernels(build: Build) -> Artifact:
        launched.add(build.symbol)
        return Folder(tmp_path)(build)

    def measure(what: str, dtype: str, call: Any, **_: int) -> bench_host.Row:
        call()
        return bench_host.Row(what, dtype, 1.0, 1.0)

    monkeypatch.setattr(bench_host, "measure", measure)
    monkeypatch.setattr(bench_host, "LIBRARIES", ())
    list(bench_host.rows(kernels, bench_host.DTYPES))
    assert built == launched
    assert len(built) == 10
