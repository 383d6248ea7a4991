"""Tests of the benchmark of several processes: its table, its kernels, and how it starts and ends processes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest

from tools.bench import bench_distributed


def test_the_share_is_that_of_a_perfect_split() -> None:
    one = {"tokens": 64, "ranks": 1, "name": "one GPU", "forward": 2.0, "both": 8.0}
    other = {**one, "ranks": 2, "name": "ring", "forward": 1.25, "both": 5.0, "error": 0.003}
    assert bench_distributed.text(one, one).split() == ["64", "one", "GPU", "forward", "2.000", "both", "8.000"]
    words = ["64", "ring", "forward", "1.250", "0.80", "both", "5.000", "0.80", "error", "3.0e-03"]
    assert bench_distributed.text(other, one).split() == words


def test_the_speed_of_an_exchange_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[Any] = []

    class Group:
        rank, size = 1, 3

        def exchange(self, sends: Any, receives: Any) -> None:
            exchanged.append((sends[0][0], receives[0][0], sends[0][1].nbytes, receives[0][1].pointer))

        def finish(self) -> None:
            clock[0] += 0.5

        def share(self, text: bytes) -> list[bytes]:
            return [text, b"  1000.0", b"2000.0 "]

    class Torch:
        uint8, cuda = 1, argparse.Namespace(synchronize=lambda: None)

        @staticmethod
        def empty(count: int, **_: Any) -> Any:
            return argparse.Namespace(data_ptr=lambda: count)

    clock = [0.0]
    monkeypatch.setattr(bench_distributed.time, "perf_counter", lambda: clock[0])
    size, count = bench_distributed.EXCHANGED, bench_distributed.EXCHANGES
    assert bench_distributed.exchange_speed(Torch, Group()) == pytest.approx(size * count / 2e9)
    assert exchanged == [(2, 0, size, size)] * (count + 2)
    alone = Group()
    alone.size = 1
    assert bench_distributed.exchange_speed(Torch, alone) == 0


def test_the_peer_is_last_and_runs_in_the_same_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all of ours, so that nothing of ours waits for it; one rank has none."""
    monkeypatch.setattr(bench_distributed, "measured", lambda torch, group, tokens, kernels: [(tokens, "ours")])
    monkeypatch.setattr(bench_distributed, "of_peer", lambda torch, group, ring, tokens, kernels: (tokens, ring))
    monkeypatch.setattr(bench_distributed.torch_ring, "connected", lambda torch, *_: "ring")
    torch = argparse.Namespace(distributed=argparse.Namespace(destroy_process_group=lambda: None))
    given = argparse.Namespace(tokens=(8, 16), address="/id", device=0)
    for size, expected in ((1, []), (2, [(8, "ring"), (16, "ring")])):
        group = argparse.Namespace(rank=0, size=size)
        found = list(bench_distributed.all_rows(torch, group, given, None))
        assert found == [(8, "ours"), (16, "ours"), *expected]


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


def test_a_machine_without_torch_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="run pip install torch"):
        bench_distributed.expect_torch()
    monkeypatch.setattr(bench_distributed.importlib.util, "find_spec", lambda name: name)
    bench_distributed.expect_torch()


def test_rows_of_a_rank() -> None:
    """Two chunks in zigzag order, by the library that has the arrays."""
    import numpy as np

    class Torch:
        @staticmethod
        def cat(parts: Any, axis: int) -> Any:
            return np.concatenate(parts, axis)

    group = argparse.Namespace(rank=0, size=2)
    array = np.arange(8).reshape(1, 8)
    assert bench_distributed.rows(Torch, array, group, "zigzag").tolist() == [[0, 1, 6, 7]]
    assert bench_distributed.rows(Torch, array, group, None).tolist() == [[0, 1, 2, 3]]
