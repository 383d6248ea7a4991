"""Tests of calls with mask functions: the reference against a bias of -inf, and what launches of kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import BlockSparse, Causal, Full, KeyRanges, MaskFunction, NotSupported
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.launch.build import Build
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact, decode
from tests.support.refusals import expect_raised

BATCH, QUERIES, KEYS, HEADS, HEADS_KEY, HEAD_DIM = 2, 70, 100, 4, 2, 8
RANDOM = np.random.default_rng(3)
QUERY, GRAD_OUTPUT = RANDOM.normal(size=(2, BATCH, QUERIES, HEADS, HEAD_DIM)).astype(np.float32)
KEY, VALUE = RANDOM.normal(size=(2, BATCH, KEYS, HEADS_KEY, HEAD_DIM)).astype(np.float32)
IDS = RANDOM.integers(0, 3, (BATCH, KEYS))
MARKED = RANDOM.random(KEYS) < 0.3
WEIGHT = RANDOM.standard_normal((HEADS, KEYS))
BLOCKS = RANDOM.random((1, HEADS_KEY, 2, 4)) < 0.6
WITHIN: dict[str, Any] = {
    "full": Full(),
    "causal": Causal(),
    "ranges": KeyRanges.documents([0, 20, QUERIES], QUERIES, Causal()),
    "blocks": BlockSparse(BLOCKS, (64, 32), Causal()),
}


def sees(batch: Any, head: Any, query: Any, key: Any, ids: Any, marked: Any, weight: Any, width: Any) -> Any:
    return (ids[batch, query] == ids[batch, key]) & (abs(query - key) < width) | marked[key] | (weight[head, key] > 1)


ARGUMENTS: dict[str, Any] = {"ids": IDS, "marked": MARKED, "weight": WEIGHT, "width": 30}


def seen(name: str, width: int = 30) -> npt.NDArray[Any]:
    """Returns which pairs are seen (batch, heads, queries, keys), by NumPy alone."""
    batch, head, query, key = np.ogrid[:BATCH, :HEADS, :QUERIES, :KEYS]
    found = (IDS[batch, query] == IDS[batch, key]) & (np.abs(query - key) < width)
    found = found | MARKED[key] | (WEIGHT.astype(np.float32)[head, key] > 1)
    if name != "full":
        found &= key <= query
    if name == "ranges":
        found &= (query < 20) == (key < 20)
    if name == "blocks":
        found &= BLOCKS[0, head // 2, query // 64, key // 32]
    return found


@pytest.mark.parametrize("name", WITHIN)
def test_the_reference(name: str) -> None:
    mask = MaskFunction(sees, ARGUMENTS, WITHIN[name])
    bias = np.where(seen(name), 0, -np.inf).astype(np.float32)
    output, logsumexp = attention_forward(QUERY, KEY, VALUE, mask=mask, backend="reference")
    expected, expected_logsumexp = attention_forward(QUERY, KEY, VALUE, bias=bias, backend="reference")
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(logsumexp, expected_logsumexp, atol=1e-5)
    arguments = GRAD_OUTPUT, QUERY, KEY, VALUE, output, logsumexp
    gradients = attention_backward(*arguments, mask=mask, backend="reference")
    truths = attention_backward(*arguments, bias=bias, backend="reference")
    for operand in ("query", "key", "value"):
        np.testing.assert_allclose(getattr(gradients, operand), getattr(truths, operand), atol=1e-5)


def test_the_reference_takes_what_no_kernel_takes() -> None:
    mask = MaskFunction(sees, ARGUMENTS, Causal())
    bias = np.where(seen("causal"), RANDOM.normal(size=seen("causal").shape), -np.inf).astype(np.float32)
    options: dict[str, Any] = {"softcap": 3.0, "backend": "reference"}
    output, _ = attention_forward(QUERY, KEY, VALUE, mask=mask, bias=np.where(np.isinf(bias), 0, bias), **options)
    expected, _ = attention_forward(QUERY, KEY, VALUE, bias=bias, **options)
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_other_values_of_arguments() -> None:
    """A call with other numbers is another call, though the function is the same."""
    mask = MaskFunction(sees, ARGUMENTS)
    for width in (30, 3, 30, 60):
        output, _ = attention_forward(QUERY, KEY, VALUE, mask=mask.with_arguments(width=width), backend="reference")
        bias = np.where(seen("full", width), 0, -np.inf).astype(np.float32)
        expected, _ = attention_forward(QUERY, KEY, VALUE, bias=bias, backend="reference")
        np.testing.assert_allclose(output, expected, atol=1e-5)


def test_rows_that_see_nothing() -> None:
    mask = MaskFunction(lambda batch, head, query, key: (query != 5) & (key != 3))
    output, logsumexp = attention_forward(QUERY, KEY, VALUE, mask=mask, backend="reference")
    assert not output[:, 5].any()
    assert np.isneginf(logsumexp[:, :, 5]).all()
    gradients = attention_backward(GRAD_OUTPUT, QUERY, KEY, VALUE, output, logsumexp, mask=mask, backend="reference")
    assert not gradients.query[:, 5].any()
    assert not gradients.key[:, 3].any()
    assert not gradients.value[:, 3].any()
    assert gradients.key[:, 4].any()


# Kernels, whose launches a fake driver records

S, H, D = 200, 4, 64


def operands(*more: str) -> list[InterfaceArray]:
    """Returns query, key and value, and others of their shape, in device memory."""
    return [InterfaceArray(aligned((BATCH, S, H, D), np.float16, seed)) for seed in range(3 + len(more))]


def on_device(width: int = 5) -> tuple[MaskFunction, dict[str, npt.NDArray[Any]]]:
    """Returns a mask of arrays in device memory, of which one is every second element, with the arrays."""
    ids, marked = np.zeros((BATCH, 2 * S), np.int32)[:, ::2], np.ones(S, bool)
    mask = MaskFunction(
        lambda batch, head, query, key, ids, width, marked: (ids[batch, query] == key) & (query < width) | marked[key],
        {"ids": InterfaceArray(ids), "width": width, "marked": InterfaceArray(marked)},
        Causal(),
    )
    return mask, {"mask_array_0": ids, "mask_array_1": marked}


def test_the_launches_of_a_forward_read_the_arrays_in_place(driver_log: FakeDriver, built: list[Build]) -> None:
    mask, arrays = on_device()

    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    attention_forward(*operands(), mask=mask, kernels=kernels)
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 5  # ranges, pairs, lists, order, main
    assert built[0].form.program == str(mask.program)
    for launch in launches:
        struct = decode(built[0], launch.parameters)
        assert [struct[name] for name in arrays] == [array.ctypes.data for array in arrays.values()]
        assert [struct[f"mask_array_0_axis_{axis}"] for axis in (0, 1)] == [2 * S, 2]
        assert [struct[f"mask_array_0_size_{axis}"] for axis in (0, 1)] == [BATCH, S]
        assert (struct["mask_array_1_axis_0"], struct["mask_array_1_size_0"]) == (1, S)
        assert struct["mask_scalar_0"] == 5
        assert (struct["key_start"], struct["key_end"], struct["visible_blocks"]) == (0, 0, 0)
        assert (struct["ranges_batch"], struct["ranges_heads"]) == (BATCH, 1)
        assert (struct["window_right"], struct["bottom_right"]) == (0, 0)


def test_other_values_and_arrays_need_no_other_kernel(driver_log: FakeDriver, built: list[Build]) -> None:
    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    query = operands()
    for width in (5, 6, 5, -1):
        mask, arrays = on_device(width)
        attention_forward(*query, mask=mask, kernels=kernels)
        struct = decode(built[0], driver_log.of("cuLaunchKernelEx")[-1].parameters)
        assert (struct["mask_scalar_0"], struct["mask_array_0"]) == (width, arrays["mask_array_0"].ctypes.data)
    assert len({*built}) == 1


def test_another_function_needs_another_kernel(driver_log: FakeDriver, built: list[Build]) -> None:
    """Two functions of the same name and the same arguments."""

    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    for bound in (3, 4, 3):

        def sees_few(batch: Any, head: Any, query: Any, key: Any, bound: int = bound) -> Any:
            return query - key < bound

        attention_forward(*operands(), mask=MaskFunction(sees_few), kernels=kernels)
    assert len({*built}) == 2


def test_a_backward(driver_log: FakeDriver, built: list[Build]) -> None:
    mask, arrays = on_device()

    def kernels(build: Build) -> Any:
        built.append(build)
        return artifact(build)

    grad_output, query, key, value, output = operands("output", "grad_output")
    logsumexp = InterfaceArray(aligned((BATCH, H, 224), "f4"))
    attention_backward(grad_output, query, key, value, output, logsumexp, mask=mask, kernels=kernels)
    launches = driver_log.of("cuLaunchKernelEx")
    assert len(launches) == 7  # ranges, pairs, lists, order, delta, main, finish
    addresses = {decode(built[0], launch.parameters)["mask_array_0"] for launch in launches}
    assert addresses == {arrays["mask_array_0"].ctypes.data}


def test_bad_arrays_are_refused_before_anything_is_launched(driver_log: FakeDriver, built: list[Build]) -> None:
    """NumPy arrays beside those of a device, and arrays that another mask was traced for."""
    on_host = MaskFunction(lambda batch, head, query, key, ids: ids[key] > 0, {"ids": np.ones(S, np.int32)})
    with pytest.raises(NotSupported, match="mask_array_0"):
        attention_forward(*operands(), mask=on_host, kernels=artifact)
    of_rank_1 = MaskFunction(on_host.program, {"ids": InterfaceArray(np.ones((2, S), np.int32))})
    floats = MaskFunction(on_host.program, {"ids": InterfaceArray(np.ones(S, np.float32))})
    none, words = MaskFunction(on_host.program), "of 1 axes, none of them 0"
    for mask, expected in (
        (of_rank_1, f"mask_array_0.shape: {words}"),
        (floats, "mask_array_0.dtype: must be int32"),
        (none, "mask arrays: 1, the first ones"),
    ):
        expect_raised(lambda mask=mask: attention_forward(*operands(), mask=mask, kernels=artifact), [expected])  # type: ignore[misc]
    assert driver_log.of("cuLaunchKernelEx") == []
