"""Tests of how the benchmark takes its samples."""

from __future__ import annotations

import math

import pytest

from cutlass_py_attn.bench import timing


@pytest.mark.parametrize(
    ("milliseconds", "samples", "count"),
    # StandaloneGemmSm80 in one burst; as many as fit; one a burst, of which three are needed; no more than asked for.
    [(0.5, 7, 7), (5.0, 7, 5), (10.0, 7, 4), (60.0, 7, 3), (60.0, 1, 1)],
)
def test_samples_come_in_bursts_behind_pauses(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, samples: int, count: int
) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "milliseconds", lambda replay, stream: events.append("run") or milliseconds)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: events.append("pause"))
    assert timing.median(lambda: None, 0, samples) == milliseconds
    bursts = "".join("|" if event == "pause" else "." for event in events).split("|")[1:]
    warm_ups = max(1, math.ceil(timing.WARM_UP_MS / milliseconds))
    assert sum(len(burst) - warm_ups for burst in bursts) == count
    longest = max(len(burst) for burst in bursts) * milliseconds
    assert longest <= timing.WARM_UP_MS + timing.BURST_MS + milliseconds or milliseconds > 25


def test_sustained_samples_come_behind_others_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "milliseconds", lambda replay, stream: events.append("timed") or 50.0)
    assert timing.sustained(lambda: events.append("run"), 0, 3) == 50.0
    assert events == ["timed", *["run"] * 11, *["timed"] * 3]
