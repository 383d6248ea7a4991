"""Bench timing: median milliseconds of a replay between two events, and the clock that the GPU ran at."""

from __future__ import annotations

import importlib
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Final

from cutlass_py_attn import driver

SAMPLES: Final = 7
LEAST_SAMPLES: Final = 3
WARM_UPS: Final = 2
WARM_UP_MS: Final = 8.0
PAUSE_S: Final = 0.15
BURST_MS: Final = 25.0
SUSTAINED_MS: Final = 500.0

Replay = Callable[[], None]
Timed = Callable[[Replay, int], float]  # milliseconds of a replay that puts its work on a stream


def median(replay: Replay, stream: int, samples: int) -> float:
    """Milliseconds of one replay, which puts its work on `stream`. Samples come in bursts, each behind a pause and
    replays for WARM_UP_MS: `samples` or as many as take BURST_MS, and bursts until there are LEAST_SAMPLES. A GPU that
    was idle raises its clock; one that is busy for longer than a burst draws more power than it may, and lowers it."""
    found: list[float] = []
    while len(found) < min(samples, LEAST_SAMPLES):
        time.sleep(PAUSE_S)
        warm = last = milliseconds(replay, stream)
        while warm < WARM_UP_MS:
            last = milliseconds(replay, stream)
            warm += last
        count = min(samples, max(1, int(BURST_MS / last)))
        found += [milliseconds(replay, stream) for _ in range(count)]
    return statistics.median(found)


def sustained(replay: Replay, stream: int, samples: int) -> float:
    """The same behind replays for SUSTAINED_MS, at the clock that their power leaves."""
    count = int(SUSTAINED_MS / milliseconds(replay, stream)) + 1
    for _ in range(count):
        replay()
    return statistics.median(milliseconds(replay, stream) for _ in range(samples))


def milliseconds(replay: Replay, stream: int) -> float:
    """Milliseconds between an event before one replay and one behind it, both on `stream`."""
    start, end = driver.Event(), driver.Event()
    start.record(stream)
    replay()
    end.record(stream)
    return end.milliseconds_since(start)


def sm_clock_mhz() -> int | None:
    """The first GPU's SM clock now, by NVML or nvidia-smi; None where neither is installed."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    except Exception:  # not installed, or NVML's own errors, which only an installed pynvml could name
        pass
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
