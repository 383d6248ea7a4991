"""Fixtures: the stand-in driver, loaded once for the process and cleared for each test, and its graphs."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator

import pytest
import stand_in


@functools.cache
def _loaded() -> stand_in.StandIn:
    return stand_in.StandIn()


@pytest.fixture
def driver_log() -> Iterator[stand_in.StandIn]:
    """The stand-in driver with an empty log; skips where there is no C compiler."""
    if stand_in.compiler() is None:
        pytest.skip("no C compiler to build the stand-in driver")
    found = _loaded()
    gc.collect()  # an array of an earlier test would free itself into this test's log
    found.leave()
    found.clear()
    yield found
    found.clear()


@pytest.fixture
def graphs(driver_log: stand_in.StandIn, monkeypatch: pytest.MonkeyPatch) -> stand_in.StandIn:
    """The stand-in driver, whose captured graphs are empty; no torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    return driver_log
