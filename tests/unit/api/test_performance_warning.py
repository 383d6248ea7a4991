"""Tests of the warning of a slow call: when its plan is made, for the user's line, and never in a cached call."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn import PerformanceWarning, attention_forward, mla_attention_forward
from cutlass_py_attn.api import calls
from cutlass_py_attn.plan import performance
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact

KEYS, HEADS, DIM, DIM_VALUE = 4096, 16, 576, 512


@pytest.fixture(autouse=True)
def _fresh(driver_log: FakeDriver) -> None:
    calls._prepared.clear()


def operands() -> tuple[np.ndarray[Any, Any], ...]:
    """Returns a query and a latent cache."""
    return tuple(np.zeros((1, *shape, DIM), ml_dtypes.bfloat16) for shape in ((1, HEADS), (KEYS, 1)))


def given(call: Any, count: int = 3) -> list[warnings.WarningMessage]:
    """Returns the warnings of so many calls."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(count):
            call()
    return found


def test_a_slow_call_warns_when_its_plan_is_made() -> None:
    query, cache = operands()
    value = np.ascontiguousarray(cache[..., :DIM_VALUE])
    (warning,) = given(lambda: attention_forward(query, cache, value, kernels=artifact))
    assert (warning.category, warning.filename) == (PerformanceWarning, __file__)
    assert "mla_attention_forward" in str(warning.message)
    assert given(lambda: mla_attention_forward(query, cache, kernels=artifact)) == []


def test_a_cached_call_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, cache = operands()
    value = np.ascontiguousarray(cache[..., :DIM_VALUE])
    asked: list[str] = []
    decide = performance.slow_road
    monkeypatch.setattr(performance, "slow_road", lambda plan: asked.append(plan.symbol) or decide(plan))
    assert len(given(lambda: attention_forward(query, cache, value, kernels=artifact), 5)) == 1
    assert len(asked) == 1


def test_the_warning_may_be_an_error_and_hidden() -> None:
    query, cache = operands()
    value = np.ascontiguousarray(cache[..., :DIM_VALUE])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        with pytest.raises(PerformanceWarning, match="times as fast with a latent cache"):
            attention_forward(query, cache, value, kernels=artifact)
        warnings.simplefilter("ignore", PerformanceWarning)
        output, _ = attention_forward(query, cache, value, kernels=artifact)
    assert output.shape == (1, 1, HEADS, DIM_VALUE)
