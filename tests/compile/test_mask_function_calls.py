"""Calls with mask functions: the functions and JAX launch what the planner plans, with every byte of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Tensor
from tests.support import front_ends
from tests.support.fake_driver import FakeDriver
from tests.support.listed_plans import with_ranges


@pytest.fixture
def log(driver_log: FakeDriver) -> Iterator[FakeDriver]:
    """The fake driver for addresses without memory."""
    driver_log.without_memory(True)
    yield driver_log
    driver_log.without_memory(False)


def plain(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query + key) % 2 == 0


def of_arrays(batch: Any, head: Any, query: Any, key: Any, ids: Any, marked: Any, least: Any, most: Any) -> Any:
    return ((ids[batch, query] == ids[batch, key]) & marked[key]) | (query - key < most) | (head < least)


IDS, MARKED = np.zeros((2, 300), np.int32), np.zeros(300, bool)
MASKS = {
    "plain": MaskFunction(plain),
    "arrays and integers": MaskFunction(of_arrays, {"ids": IDS, "marked": MARKED, "least": 1, "most": 20}),
}


def with_function(problem: Problem, mask: MaskFunction) -> Problem:
    layouts = {name: Tensor.contiguous(array.shape, array.dtype.name) for name, array in mask.arrays().items()}
    return problem.replace(**layouts, **mask.numbers())


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("axes", [None, (2, 1)], ids=["band", "ranges"])
@pytest.mark.parametrize("name", MASKS)
def test_calls(log: FakeDriver, name: str, axes: tuple[int, int] | None, direction: str) -> None:
    named = with_function(spec.parse("bf16_d64_s300_b2_h4_causal").problem(direction), MASKS[name])
    problem = with_ranges(named, axes) if axes else named
    found, wanted = front_ends.by_python(log, problem)
    assert found
    assert found == wanted
    pytest.importorskip("jax", reason="jax is not installed")
    from tests.support import jax_calls, native_frames

    native_frames.native_handler()
    payload = jax_calls.payload_of(problem)
    assert (payload.problem, payload.plan) == (problem, front_ends.planned(problem))
    call = native_frames.Call(payload)
    found, wanted = jax_calls.by_handler(log, call, problem)
    assert found == wanted
    assert native_frames.launches_of_both(log, call)
