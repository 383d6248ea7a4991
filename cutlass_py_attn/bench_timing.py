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
WARM_UP_MS: Final = 10.0
PAUSE_S: Final = 0.15
BURST_MS: Final = 60.0


def median(replay: Callable[[], None], stream: int, samples: int) -> float:
    """Milliseconds of one replay, which puts its work on `stream`. Behind a pause come replays for WARM_UP_MS, then
    `samples` or as many as take BURST_MS, at least LEAST_SAMPLES: a GPU that was idle raises its clock, and one that is
    busy for longer draws more power and lowers it."""
    time.sleep(PAUSE_S)
    warm = last = milliseconds(replay, stream)
    while warm < WARM_UP_MS:
        last = milliseconds(replay, stream)
        warm += last
    count = min(samples, max(LEAST_SAMPLES, int(BURST_MS / last)))
    return statistics.median(milliseconds(replay, stream) for _ in range(count))


def milliseconds(replay: Callable[[], None], stream: int) -> float:
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
