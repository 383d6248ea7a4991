"""Repeated calls: no validation for known layouts, no overlap unseen, and the arrays of each call."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.serving import append_to_cache, merge_states
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.runtime import arrays, driver
from tests.support import fake_libraries
from tests.support.fake_driver import FakeDriver
from tests.support.fake_libraries import TORCH_STREAM, Tensor, ndarray
from tests.support.fakes import artifact, decode
from tests.support.listed_plans import with_ranges

PAGES, PAGE, HEADS, D, TOKENS = 3, 4, 2, 16, 5


@pytest.fixture(autouse=True)
def _fresh(driver_log: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty caches, both libraries, and the context of the GPU, in which CuPy allocates."""
    fake_libraries.install(monkeypatch)
    calls._prepared.clear()
    calls._repeated.clear()
    with driver.device(0).current():
        driver_log.clear()
        yield


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operands of every call that was validated."""
    seen: list[Any] = []
    read = arrays.read_operands

    def record(operands: Any, stream: int) -> Any:
        seen.append(operands)
        return read(operands, stream)

    monkeypatch.setattr(arrays, "read_operands", record)
    return seen


def operands() -> dict[str, Any]:
    """Returns the CuPy arrays of an append."""
    shapes = {"key": (TOKENS, HEADS, D), "value": (TOKENS, HEADS, D)}
    shapes |= dict.fromkeys(("key_cache", "value_cache"), (PAGES, PAGE, HEADS, D))
    found = {name: ndarray(shape, "f2") for name, shape in shapes.items()}
    return {**found, "slots": ndarray((TOKENS,), "i8")}


def moved(array: Any, address: int) -> Any:
    """Returns an array of the same layout at another address."""
    found = ndarray(array.shape, array.dtype)
    found.strides, found.data = array.strides, SimpleNamespace(ptr=address, device_id=0)
    return found


def test_a_known_layout_is_launched_at_once(driver_log: FakeDriver, reads: list[Any]) -> None:
    given = operands()
    for _ in range(3):
        append_to_cache(**given, kernels=artifact)
        given["key"] = ndarray((TOKENS, HEADS, D), "f2")
    assert len(reads) == 1
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 3
    build = plan_append(AppendProblem.dense((TOKENS, HEADS, D), (PAGES, PAGE), "float16"), "sm_90").build
    structs = [decode(build, launch.parameters) for launch in launches]
    assert len({struct["key"] for struct in structs}) == 3
    assert {struct["value_cache"] for struct in structs} == {given["value_cache"].data.ptr}


def test_an_overlap_of_a_known_layout_is_refused(driver_log: FakeDriver, reads: list[Any]) -> None:
    given = operands()
    append_to_cache(**given, kernels=artifact)
    inside = moved(given["key"], given["key_cache"].data.ptr + 64)
    for _ in range(2):
        with pytest.raises(NotSupported, match=r"key_cache = .* shares it with key"):
            append_to_cache(**{**given, "key": inside}, kernels=artifact)
    with pytest.raises(NotSupported, match=r"key_cache = .* shares it with value_cache"):
        append_to_cache(**{**given, "value_cache": moved(given["value_cache"], inside.data.ptr)}, kernels=artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 1
    assert len(reads) == 4


def test_two_parts_of_one_pool_are_checked_once(driver_log: FakeDriver, reads: list[Any]) -> None:
    """Heads of key and value take turns: the extents overlap, but no element does."""
    given = operands()
    pools = [ndarray((PAGES, PAGE, HEADS, 2, D), "f2") for _ in range(2)]
    for pool in (*pools, *pools):
        for number, name in enumerate(("key_cache", "value_cache")):
            part = moved(ndarray((PAGES, PAGE, HEADS, D), "f2"), pool.data.ptr + number * D * 2)
            part.strides = tuple(pool.strides[axis] for axis in (0, 1, 2, 4))
            given[name] = part
        append_to_cache(**given, kernels=artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 4
    assert len(reads) == 1
    given["value_cache"] = moved(given["value_cache"], given["value_cache"].data.ptr - 16)
    with pytest.raises(NotSupported, match=r"key_cache = .* shares it with value_cache"):
        append_to_cache(**given, kernels=artifact)


def test_packed_rows_of_a_latent_cache_are_checked_once(driver_log: FakeDriver, reads: list[Any]) -> None:
    """Codes, scales and other columns of each row follow each other: three extents overlap, and no element does."""
    parts = {"key_cache": (512, "u1", 0), "key_scale": (4, "f4", 512), "value_cache": (64, "f2", 528)}
    given = {"key": ndarray((TOKENS, 1, 512), "f2"), "value": ndarray((TOKENS, 1, 64), "f2")}
    given |= {"slots": ndarray((TOKENS,), "i8")}
    for pool in [ndarray((PAGES, PAGE, 1, 656), "u1") for _ in range(3)]:
        for name, (columns, dtype, first) in parts.items():
            part = moved(ndarray((PAGES, PAGE, 1, columns), dtype), pool.data.ptr + first)
            part.strides = (*pool.strides[:3], part.strides[3])
            given[name] = part
        append_to_cache(**given, kernels=artifact)
    assert len(driver_log.of("cuLaunchKernelEx")) == 3
    assert len(reads) == 1
    scale = given["key_scale"]
    given["key_scale"] = moved(scale, scale.data.ptr - 16)
    with pytest.raises(NotSupported, match=r"key_cache = .* shares it with key_scale"):
        append_to_cache(**given, kernels=artifact)


def test_another_stream_or_alignment_is_validated(driver_log: FakeDriver, reads: list[Any]) -> None:
    given = operands()
    for options in ({}, {"stream": 0x77}, {"stream": 0x77}):
        append_to_cache(**given, kernels=artifact, **options)
    assert len(reads) == 3
    slots = ndarray((TOKENS + 1,), "i8")
    for _ in range(2):
        append_to_cache(**{**given, "slots": moved(given["slots"], slots.data.ptr + 8)}, kernels=artifact)
    assert len(reads) == 5
    assert len(driver_log.of("cuLaunchKernelEx")) == 5


def test_torch_results_are_new(driver_log: FakeDriver, reads: list[Any]) -> None:
    output, logsumexp = Tensor((2, 40, 3, 16)), Tensor((2, 3, 64))
    given = (output, logsumexp, Tensor((2, 40, 3, 16)), Tensor((2, 3, 64)))
    found = [merge_states(*given, kernels=artifact) for _ in range(3)]
    assert len({array.data_ptr() for pair in found for array in pair}) == 6
    out = Tensor((2, 40, 3, 16))
    for _ in range(2):
        result = merge_states(*given, out=out, kernels=artifact)
        assert result[0] is out
        assert result[1].shape == (2, 3, 64)
    assert len(reads) == 2
    launches = driver_log.of("cuLaunchKernelEx")
    assert [launch.stream for launch in launches] == [TORCH_STREAM] * 5
    with pytest.raises(NotSupported, match=r"output = .* shares it with output_b"):
        merge_states(*given, out=given[2], kernels=artifact)


def test_packed_results_are_cleared_in_every_call(driver_log: FakeDriver, reads: list[Any]) -> None:
    parts = [Tensor((1, 50, 3, 16)), Tensor((4, 3, 32))]
    bounds = Tensor((5,), "int32")
    for longest in (20, 20, 20, 21):
        merge_states(*parts, *parts, cu_seqlens_q=bounds, max_seqlen_q=longest, kernels=artifact)
    memsets = [name for name in driver_log.names if "Memset" in name]
    assert len(memsets) == 4
    assert len(reads) == 2


def test_unhashable_kernels_are_not_stored(driver_log: FakeDriver, reads: list[Any]) -> None:
    class Kernels:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, build: Any) -> Any:
            return artifact(build)

    given = operands()
    for _ in range(2):
        append_to_cache(**given, kernels=Kernels())
    assert len(reads) == 2
    assert len(driver_log.of("cuLaunchKernelEx")) == 2


def test_every_call_reads_its_own_ranges_of_keys(driver_log: FakeDriver, reads: list[Any]) -> None:
    """Equal layouts are one prepared call, whose kernels get the addresses of each call's arrays."""
    query = ndarray((1, 128, 2, 64), "f2")
    edges = [ndarray((1, 1, 128), "i4") for _ in range(4)]
    for pair in (edges[:2], edges[2:]):
        attention_forward(query, query, query, mask=KeyRanges(*pair, Causal()), kernels=artifact)
    attention_forward(query, query, query, mask=Causal(), kernels=artifact)
    assert len(reads) == 3
    assert len(calls._prepared) == 2
    problem = Problem.dense("forward", Shape(1, 128, 128, 2, 64, 64), "float16", Causal())
    plan = planner.plans_on(with_ranges(problem, (1, 1)), (9, 0), 132)[0]
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 2 * len(plan.launches) + 1
    structs = [decode(plan.build, launch.parameters) for launch in launches[:-1]]
    assert [(struct["key_start"], struct["key_end"]) for struct in structs[:: len(plan.launches)]] == [
        (start.data.ptr, end.data.ptr) for start, end in (edges[:2], edges[2:])
    ]
