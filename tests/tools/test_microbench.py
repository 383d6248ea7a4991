"""Tests of the microbenchmarks without a GPU: cases, launches on the fake driver, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import Stale
from cutlass_py_attn.launch import abi
from cutlass_py_attn.runtime import driver
from tests.support.fake_driver import FakeDriver
from tools.lab.microbench import __main__ as microbench
from tools.lab.microbench import cases
from tools.release import record

KERNELS = {micro.symbol: micro for micro in cases.all_cases()}


def test_cases_cover_all_combinations() -> None:
    names = [micro.name for micro in cases.all_cases()]
    assert len(names) == len(set(names))
    wgmma = {(m.columns, m.in_registers, m.beside) for m in cases.all_cases() if m.kind == "wgmma"}
    assert len(wgmma) == 4 * 2 * 2
    assert {(m.variant, m.blocks) for m in cases.all_cases() if m.kind == "red"} == {
        ("v4", 1), ("v4", 0), ("bulk", 1), ("bulk", 0),
    }  # fmt: skip
    assert sum(micro.zeros for micro in cases.all_cases()) == 1, "the same kernel on zeros shows the cost of power"


@pytest.mark.parametrize("micro", cases.all_cases(), ids=lambda micro: micro.name)
def test_numbers_of_a_case(micro: cases.Micro) -> None:
    assert micro.shared_memory_bytes <= 227 * 1024
    if micro.kind == "wgmma":
        assert micro.product.objections() == []
        assert micro.work == 4 * cases.MMA_WARPGROUPS * 2 * 64 * micro.columns * 16, (
            "four instructions of each warpgroup"
        )
        assert micro.shared_memory_bytes < microbench.RANDOM_BYTES
    if micro.kind == "red":
        assert micro.work * micro.rounds > cases.FOOTPRINT, "even one SM wraps around the footprint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fake cubins in the form that the fake driver reads."""
    for symbol in KERNELS:
        (tmp_path / f"{symbol}.cubin").write_text(f"{symbol}_0 {abi.numpy_struct(cases.FIELDS).itemsize}\n")
    (tmp_path / microbench.MANIFEST).write_text(json.dumps({"commit": "c", "sources": microbench.sources()}))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["microbench", *options])
    return microbench.main()


def test_measure_launches_every_case_and_prints_a_table(
    driver_log: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(microbench, "words_at", lambda out, stream: [2_000_000, 1_000_000, 1000])
    log = folder / "microbench.jsonl"
    assert run(monkeypatch, "--kernels", str(folder), "--record", str(log)) == 0
    lines = record.read_log(log)
    assert [line["name"] for line in lines] == [micro.name for micro in cases.all_cases()]
    assert {line["mhz"] for line in lines} == {2000}
    assert {"gpu", "driver", "date", "commit", "command", "sources"} <= lines[0].keys()
    for micro, line in zip(cases.all_cases(), lines, strict=True):
        assert line["per_clock"] == pytest.approx(micro.work * micro.rounds / 2_000_000, abs=0.01)
        assert (line["beside_per_clock"] is not None) == micro.beside
        assert line["blocks"] == (micro.blocks or driver.device(0).num_sms)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 + len(lines)
    assert "B of shared memory a clock" in shown[3]
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 9 * len(lines)
    last = np.frombuffer(launches[-1].parameters[-24:], abi.numpy_struct(cases.FIELDS))[0]
    assert (last["rounds"], last["blocks"]) == (cases.all_cases()[-1].rounds, lines[-1]["blocks"])
    assert launches[-1].shared_memory == cases.all_cases()[-1].shared_memory_bytes


def test_only_chooses_cases(
    driver_log: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(microbench, "words_at", lambda out, stream: [1000, 1000, 0])
    assert run(monkeypatch, "--kernels", str(folder), "--only", "tanh") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_case_without_clocks_is_an_error(
    driver_log: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake driver's kernels write nothing."""
    assert run(monkeypatch, "--kernels", str(folder)) == 1
    assert "counted 0 clocks in 0 ns" in capsys.readouterr().err


def test_kernels_of_other_sources_are_refused(folder: Path) -> None:
    (folder / microbench.MANIFEST).write_text('{"sources": "other"}')
    with pytest.raises(Stale, match="holds no kernels of these sources"):
        next(microbench.measure(folder, "", 1))


def test_another_gpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = type("Gpu", (), {"name": "B200", "compute_capability": (10, 0)})
    monkeypatch.setattr(driver, "device", lambda ordinal: gpu)
    with pytest.raises(Stale, match=r"compute capability 9\.0"):
        next(microbench.measure(folder, "", 1))


def test_options_without_effect_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--build", "x", "--only", "tanh")
    assert "--only and --record are for --kernels" in capsys.readouterr().err
