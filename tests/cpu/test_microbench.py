"""Tests of the microbenchmarks where there is no GPU: their machine code, their launches and their table."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in import StandIn

from cutlass_py_attn import abi, driver
from cutlass_py_attn.errors import Stale

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import record  # noqa: E402
from tools.microbench import __main__ as microbench  # noqa: E402
from tools.microbench import cases  # noqa: E402

KERNELS = {micro.symbol: micro for micro in cases.all_cases()}
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16"
# What the PTX must have, as (pattern, how often; None for any number).
EXPECTED: dict[str, tuple[tuple[str, int | None], ...]] = {
    "micro_wgmma_n64": ((WGMMA.format(n=64), 4), ("ld\\.shared\\.v4", 0), ("setmaxnreg", 0)),
    "micro_wgmma_n128_beside": ((WGMMA.format(n=128), 4), ("ld\\.shared\\.v4", cases.LOADS), ("setmaxnreg", 2)),
    "micro_wgmma_n256_rs_beside": ((WGMMA.format(n=256), 4), ("ld\\.shared\\.v4", cases.LOADS)),
    "micro_red_v4": ((r"red\.relaxed\.gpu\.global\.add\.v4\.f32", None),),
    "micro_red_bulk": ((r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32", 1),),
    "micro_copy_4x16384": (
        (r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes", 4),
        (r"mbarrier\.init", 2),
        (r"barrier\.cluster\.wait", 2),
    ),
    "micro_function_ex2": ((r"ex2\.approx\.ftz\.f32", cases.CHAINS),),
    "micro_function_ex2_f16x2": ((r"ex2\.approx\.f16x2", cases.CHAINS),),
    "micro_function_ex2_bf16x2": ((r"ex2\.approx\.ftz\.bf16x2", cases.CHAINS),),
    "micro_function_tanh": ((r"tanh\.approx\.f32", cases.CHAINS),),
    "micro_function_mixed2": ((r"ex2\.approx\.ftz\.f32", cases.CHAINS - 2),),
    "micro_function_polynomial": (("ex2", 0), (r"\bshl\.b32", None)),
}


@pytest.mark.parametrize("symbol", EXPECTED)
def test_a_kernel_does_its_one_thing(symbol: str) -> None:
    pytest.importorskip("cutlass")
    from cutlass_py_attn.cubin import read
    from tools.microbench.compiling import compiled

    output = compiled(KERNELS[symbol])
    (kernel,) = read(output.cubin).kernels.values()
    assert kernel.symbol == f"{symbol}_0"
    assert [parameter.size for parameter in kernel.parameters] == [abi.numpy_struct(cases.FIELDS).itemsize]
    assert kernel.reqntid == (KERNELS[symbol].threads, 1, 1)
    for pattern, count in EXPECTED[symbol]:
        found = len(re.findall(pattern, output.ptx))
        assert found == count if count is not None else found > 0, pattern
    assert output.ptx.count("%clock64") == 2
    assert output.ptx.count("%globaltimer") == 2


def test_every_question_has_its_cases() -> None:
    names = [micro.name for micro in cases.all_cases()]
    assert len(names) == len(set(names))
    wgmma = {(m.columns, m.in_registers, m.beside) for m in cases.all_cases() if m.kind == "wgmma"}
    assert len(wgmma) == 4 * 2 * 2
    assert {(m.variant, m.blocks) for m in cases.all_cases() if m.kind == "red"} == {
        ("v4", 1), ("v4", 0), ("bulk", 1), ("bulk", 0),
    }  # fmt: skip
    assert sum(micro.zeros for micro in cases.all_cases()) == 1, "the same kernel on zeros shows what power costs"


@pytest.mark.parametrize("micro", cases.all_cases(), ids=lambda micro: micro.name)
def test_numbers_of_a_case(micro: cases.Micro) -> None:
    assert micro.shared_memory_bytes <= 227 * 1024
    if micro.kind == "wgmma":
        assert micro.product.objections() == []
        assert micro.work == 4 * cases.MULTIPLIERS * 2 * 64 * micro.columns * 16, "four instructions of each warpgroup"
        assert micro.shared_memory_bytes < microbench.MULTIPLIED_BYTES
    if micro.kind == "red":
        assert micro.work * micro.rounds > cases.FOOTPRINT, "even one SM goes around what it adds to"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Made-up cubins, as the stand-in reads them."""
    for symbol in KERNELS:
        (tmp_path / f"{symbol}.cubin").write_text(f"{symbol}_0 {abi.numpy_struct(cases.FIELDS).itemsize}\n")
    (tmp_path / microbench.MANIFEST).write_text(json.dumps({"commit": "c", "sources": microbench.sources()}))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["microbench", *options])
    return microbench.main()


def test_measure_launches_every_case_and_prints_a_table(
    driver_log: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    driver_log: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(microbench, "words_at", lambda out, stream: [1000, 1000, 0])
    assert run(monkeypatch, "--kernels", str(folder), "--only", "tanh") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_case_that_counted_nothing_is_no_measurement(
    driver_log: StandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in's kernels write nothing."""
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


def test_options_that_would_do_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--build", "x", "--only", "tanh")
    assert "--only and --record are for --kernels" in capsys.readouterr().err
