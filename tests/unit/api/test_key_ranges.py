"""Tests of calls with ranges of keys: what their launches read, and how often a call is validated and planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact, decode
from tests.support.refusals import expect_raised

B, S, H, D = 2, 200, 4, 64
ROLES = ("ranges", "lists", "order")


def operands(*more: str) -> list[InterfaceArray]:
    """Returns query, key and value, and others of their shape, in device memory."""
    return [InterfaceArray(aligned((B, S, H, D), np.float16, seed)) for seed in range(3 + len(more))]


def ranges(batch: int, heads: int, band: Any) -> tuple[KeyRanges, Any, Any]:
    """Returns ranges in device memory, of which the starts are every second element, with the arrays."""
    start = np.zeros((batch, heads, 2 * S), np.int32)[..., ::2]
    end = np.full((batch, heads, S), S, np.int32)
    return KeyRanges(InterfaceArray(start), InterfaceArray(end), band), start, end


@pytest.mark.parametrize("axes", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_the_launches_of_a_forward_read_the_arrays_in_place(
    axes: tuple[int, int], driver_log: FakeDriver, built: list[Build]
) -> None:
    mask, start, end = ranges(*axes, Causal())

    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    attention_forward(*operands(), mask=mask, kernels=kernels)
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 4
    assert built[0].mask == "ranges"
    for launch in launches:
        struct = decode(built[0], launch.parameters)
        assert (struct["key_start"], struct["key_end"]) == (start.ctypes.data, end.ctypes.data)
        steps = [0 if size == 1 else size_of_step for size, size_of_step in zip(axes, (axes[1] * S, S), strict=True)]
        assert [struct[f"key_end_{axis}"] for axis in ("batch", "head", "row")] == [*steps, 1]
        assert [struct[f"key_start_{axis}"] for axis in ("batch", "head", "row")] == [2 * steps[0], 2 * steps[1], 2]
        assert (struct["ranges_batch"], struct["ranges_heads"]) == axes
        assert (struct["window_right"], struct["bottom_right"]) == (0, 0)


def test_other_values_and_arrays_need_no_other_kernel(driver_log: FakeDriver, built: list[Build]) -> None:
    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    arrays = operands()
    for _ in range(3):
        mask, start, _ = ranges(1, 1, Causal())
        attention_forward(*arrays, mask=mask, kernels=kernels)
        assert decode(built[0], driver_log.of("cuLaunchKernelEx")[-1].parameters)["key_start"] == start.ctypes.data
    assert len({*built}) == 1


def test_a_backward(driver_log: FakeDriver, built: list[Build]) -> None:
    mask, start, _ = ranges(1, 4, Causal())

    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    grad_output, query, key, value, output = operands("output", "grad_output")
    logsumexp = InterfaceArray(aligned((B, H, 224), "f4"))
    attention_backward(grad_output, query, key, value, output, logsumexp, mask=mask, kernels=kernels)
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 6  # ranges, lists, order, delta, main, finish
    assert {decode(built[0], launch.parameters)["key_start"] for launch in launches} == {start.ctypes.data}


def test_arrays_on_the_host_are_refused_beside_those_of_a_device(built: list[Build]) -> None:
    mask = KeyRanges.chunks(16, S)
    with pytest.raises(NotSupported, match="key_start"):
        attention_forward(*operands(), mask=mask, kernels=artifact)


def test_bad_ranges_are_refused_before_anything_is_launched(driver_log: FakeDriver, built: list[Build]) -> None:
    longer = InterfaceArray(np.zeros((1, 1, S + 1), np.int32))
    floats = InterfaceArray(np.zeros((1, 1, S), np.float32))
    expect_raised(
        lambda: attention_forward(*operands(), mask=KeyRanges(longer, floats), kernels=artifact),
        ["key_start.shape: (2, 4, 200)", "key_end.dtype: int32", "key_end.shape: that of key_start"],
    )
    expect_raised(
        lambda: attention_forward(*operands(), mask=KeyRanges(None, 3), kernels=artifact),
        ["key_start: an int32 array", "key_end: an int32 array"],
    )
    assert driver_log.of("cuLaunchKernelEx") == []
