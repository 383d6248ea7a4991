"""Bench timing: median milliseconds of a replay between two events, and the clock that the GPU ran at."""

from __future__ import annotations

import importlib
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Final

from cutlass_py_attn.runtime import driver

SAMPLES: Final = 7
LEAST_SAMPLES: Final = 3
WARM_UPS: Final = 2
WARM_UP_MS: Final = 8.0
PAUSE_S: Final = 0.15
BURST_MS: Final = 25.0
SUSTAINED_MS: Final = 500.0

Replay = Callable[[], None]
Timed = Callable[[Replay, int], float]  # milliseconds of a replay that launches its work on a stream


def median(replay: Replay, stream: int, samples: int) -> float:
    """Returns the median milliseconds of a replay on `stream`.

    Samples are taken in bursts of `samples`, or of as many as take BURST_MS, until there are LEAST_SAMPLES. Each burst
    follows a pause and WARM_UP_MS of replays: an idle GPU raises its clock, and a GPU that is busy for longer than a
    burst exceeds its power limit and lowers the clock.
    """
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
    """Returns the median after SUSTAINED_MS of replays, at the clock to which their power lowers the GPU."""
    count = int(SUSTAINED_MS / milliseconds(replay, stream)) + 1
    for _ in range(count):
        replay()
    return statistics.median(milliseconds(replay, stream) for _ in range(samples))


def unpaused(replay: Replay, stream: int, samples: int) -> float:
    """Returns the median behind one replay to warm up, for work that is too short to reach the power limit."""
    milliseconds(replay, stream)
    return statistics.median(milliseconds(replay, stream) for _ in range(samples))


def milliseconds(replay: Replay, stream: int) -> float:
    """Returns the milliseconds between events before and after one replay on `stream`."""
    timer = driver.StreamTimer(stream)
    timer.start()
    replay()
    timer.stop()
    return timer.milliseconds()


def sm_clock_mhz() -> int | None:
    """Returns the first GPU's current SM clock from NVML or nvidia-smi; None if neither is installed."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    except Exception:  # pynvml is not installed, or raised an error class of its own
        pass
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
