"""Tests of the benchmark of several processes: its table, its kernels, and how it starts and ends processes."""

from __future__ import annotations

import argparse
import sys

import pytest

from tools.bench import bench_distributed


def test_every_part_has_its_kernel() -> None:
    """One GPU, Ulysses with half of the heads, both diagonals, no mask, and the merges and sums."""
    found = [build.symbol for build in bench_distributed.builds(2, (4096,))]
    assert {symbol.split("_")[0] for symbol in found} == {"fwd", "bwd", "merge"}
    assert {"full", "causal"} <= {word for symbol in found for word in symbol.split("_")}
    merges = {symbol.rpartition("_")[0] for symbol in found if symbol.startswith("merge")}
    sums = {f"merge_sm80_bf16_d128_a8_{variant}" for variant in ("total", "sum", "sum_last")}
    assert merges == {"merge_sm80_bf16_d128", "merge_sm80_f32_d128_sum", *sums}
    assert len(found) == len(set(found)) <= 19


class Process:
    """A process that ends with a code, or does not."""

    killed = 0

    def __init__(self, command: list[str], codes: list[int | None]) -> None:
        self.command, self.code = command, codes[int(command[command.index("--rank") + 1])]

    def wait(self, timeout: float) -> int:
        if self.code is None:
            raise bench_distributed.subprocess.TimeoutExpired(self.command, timeout)
        return self.code

    def kill(self) -> None:
        Process.killed += 1


@pytest.mark.parametrize(("codes", "expected"), [([0, 0], 0), ([0, 3], 3), ([0, None], 1)])
def test_all_processes_are_started_and_end(
    codes: list[int | None], expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Process] = []

    def start(command: list[str]) -> Process:
        started.append(Process(command, codes))
        return started[-1]

    monkeypatch.setattr(bench_distributed.subprocess, "Popen", start)
    monkeypatch.setattr(Process, "killed", 0)
    given = argparse.Namespace(ranks=2, gpus=1)
    assert bench_distributed.start_all(given, ["--tokens", "64"]) == expected
    assert [it.command[-4:] for it in started] == [["--rank", "0", "--device", "0"], ["--rank", "1", "--device", "0"]]
    assert all(it.command[:3] == [sys.executable, "-m", "tools.bench.bench_distributed"] for it in started)
    assert Process.killed == 2
    assert ("took more than" in capsys.readouterr().out) == (None in codes)
