"""Tests of the two functions: validation, launches on the fake driver, empty problems, CPU backend."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.errors import NoDevice, NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import InterfaceArray, aligned, artifact, decode
from tests.support.refusals import expect

BF16 = ml_dtypes.bfloat16
B, MQ, MK, H, D, DV = 2, 40, 50, 3, 16, 24


def operands(dtype: Any = BF16, num_queries: int = MQ, num_keys: int = MK) -> list[np.ndarray[Any, Any]]:
    """Returns query, key and value."""
    shapes = ((B, num_queries, H, D), (B, num_keys, H, D), (B, num_keys, H, DV))
    return [aligned(shape, dtype, seed) for seed, shape in enumerate(shapes)]


def backward_operands(dtype: Any = BF16, num_queries: int = MQ, num_keys: int = MK) -> list[np.ndarray[Any, Any]]:
    """Returns grad_output, query, key, value, output and logsumexp."""
    rows = (B, num_queries, H, DV)
    padded = -(-num_queries // 32) * 32
    return [
        aligned(rows, dtype, 3),
        *operands(dtype, num_queries, num_keys),
        aligned(rows, dtype, 4),
        aligned((B, H, padded), "f4", 5),
    ]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls._prepared.clear()


def kernels(build: Build) -> Any:
    """Returns an artifact for the fake driver."""
    return artifact(build)


@pytest.mark.parametrize("dtype", ["float16", "float32", BF16])
def test_numpy_forward(driver_log: FakeDriver, dtype: Any) -> None:
    output, logsumexp = attention_forward(*operands(dtype), kernels=kernels, mask=Causal())
    assert (output.shape, output.dtype) == ((B, MQ, H, DV), np.dtype(dtype))
    assert (logsumexp.shape, logsumexp.dtype) == ((B, H, 64), np.float32)
    names = driver_log.names
    start = names.index("cuLibraryLoadData")
    assert names[start:] == [
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelSetAttribute",
        "cuKernelGetFunction",
        *["cuMemAllocAsync", "cuMemcpyHtoDAsync"] * 3,
        *["cuMemAllocAsync"] * 2,
        *["cuTensorMapEncodeTiled"] * (0 if dtype == "float32" else 6),  # three maps, each encoded twice
        "cuLaunchKernelEx",
        *["cuMemcpyDtoHAsync"] * 2,
        "cuStreamSynchronize",
        *["cuMemFreeAsync"] * 5,
    ]


def test_numpy_backward(driver_log: FakeDriver) -> None:
    gradients = attention_backward(*backward_operands(), kernels=kernels, deterministic=True, scale=0.5)
    shapes = [g.shape for g in (gradients.query, gradients.key, gradients.value)]
    assert shapes == [(B, MQ, H, D), (B, MK, H, D), (B, MK, H, DV)]
    assert gradients.bias is gradients.sinks is None
    launches = driver_log.of("cuLaunchKernelEx")
    stems = [launch.text.split("_full_det_64x64")[1].rstrip("0123456789") for launch in launches]
    assert stems == ["_delta_", "_", "_finish_"]
    assert [launch.is_dependent for launch in launches] == [False, True, True]
    assert len(driver_log.of("cuMemAllocAsync")) == len(driver_log.of("cuMemFreeAsync")) == 10


@pytest.mark.parametrize("shape", [(B, H, MQ), (B, MQ, H, 64)])
def test_a_gradient_of_logsumexp_of_another_shape_is_refused(driver_log: FakeDriver, shape: tuple[int, ...]) -> None:
    with pytest.raises(NotSupported, match=r"grad_logsumexp = .*: must be \(2, 3, 64\) float32"):
        attention_backward(*backward_operands(), kernels=kernels, grad_logsumexp=np.ones(shape, "f4"))
    assert not driver_log.of("cuLaunchKernelEx")


def test_device_arrays_are_read_in_place(driver_log: FakeDriver) -> None:
    seen: list[Build] = []

    def recording(build: Build) -> Any:
        seen.append(build)
        return artifact(build)

    query, key, value = operands()
    given = [InterfaceArray(array) for array in (query, key, value)]
    output, logsumexp = attention_forward(*given, kernels=recording, stream=0x77)
    assert isinstance(output, DeviceArray)
    assert isinstance(logsumexp, DeviceArray)
    (launch,) = driver_log.of("cuLaunchKernelEx")
    assert launch.stream == 0x77
    struct = decode(seen[0], launch.parameters)
    arrays = {"query": query, "key": key, "value": value}
    assert {name: struct[name] for name in arrays} == {n: a.ctypes.data for n, a in arrays.items()}
    assert (struct["output"], struct["logsumexp"]) == (output.pointer, logsumexp.pointer)
    assert struct["value_row"] == H * DV
    assert (seen[0].family, seen[0].arch) == ("sm90", "sm_90a")
    assert not {"cuMemcpyHtoDAsync", "cuStreamSynchronize"} & set(driver_log.names)

    attention_forward(*given, kernels=recording)
    assert len(seen) == 1, "an equal problem is bound once"
    attention_forward(*given, kernels=recording, scale=2.0)
    assert len(seen) == 2


def test_every_reason_before_any_driver_call(driver_log: FakeDriver) -> None:
    grad_output, query, key, value, output, _ = backward_operands()
    with pytest.raises(NotSupported) as caught:
        attention_backward(
            grad_output,
            query,
            key[..., :8],
            value.astype("f4"),
            output,
            aligned((B, H, 32), "f4"),
            num_splits_key=0,
        )
    expect(
        caught.value.refusals,
        ["key.shape: (2, 50, 3, 16)", "value.dtype: as query", "num_splits_key: at least 1", "logsumexp: (2, 3, 64)"],
    )
    assert driver_log.calls == []


def test_logsumexp_in_device_memory(driver_log: FakeDriver) -> None:
    rest: list[Any]
    *rest, logsumexp = [InterfaceArray(array) for array in backward_operands()]
    wide = InterfaceArray(aligned((B, H, 128), "f4")[..., ::2])
    with pytest.raises(NotSupported, match=r"logsumexp.strides = .* must be contiguous"):
        attention_backward(*(*rest, wide), kernels=kernels)
    attention_backward(*(*rest, logsumexp), kernels=kernels)
    offset = aligned((B * H * 64 + 1,), "f4")[1:].reshape(B, H, 64)
    attention_backward(*(*rest, InterfaceArray(offset)), kernels=kernels)
    assert decode(_built(), driver_log.of("cuLaunchKernelEx")[-1].parameters)["logsumexp"] == offset.ctypes.data


def _built() -> Build:
    from cutlass_py_attn.plan.planner import plan_backward
    from cutlass_py_attn.problem.problem import Problem
    from cutlass_py_attn.problem.tensors import Shape

    return plan_backward(Problem.dense("backward", Shape(B, MQ, MK, H, D, DV), "bfloat16"), "sm_90").build


@pytest.mark.parametrize(("num_queries", "num_keys"), [(MQ, 0), (0, MK)])
def test_empty_problems(driver_log: FakeDriver, num_queries: int, num_keys: int) -> None:
    output, logsumexp = attention_forward(*operands(BF16, num_queries, num_keys))
    assert output.shape == (B, num_queries, H, DV)
    assert not output.any()
    assert np.isneginf(logsumexp[..., :num_queries]).all()
    assert np.isposinf(logsumexp[..., num_queries:]).all()
    gradients = attention_backward(*backward_operands(BF16, num_queries, num_keys))
    for gradient in (gradients.query, gradients.key, gradients.value):
        assert not gradient.any()
    assert gradients.value.shape == (B, num_keys, H, DV)
    assert not driver_log.of("cuLaunchKernelEx")


def test_pools_without_pages(driver_log: FakeDriver) -> None:
    """A kernel writes the rows of sequences without keys; nothing of the pools is copied."""
    pool = np.zeros((0, 16, 2, 32), np.float16)
    sequences = Paged(np.zeros((3, 5), np.int32), np.zeros(3, np.int32))
    output, logsumexp = attention_forward(
        np.zeros((3, 2, 4, 32), np.float16), pool, pool, sequences=sequences, kernels=artifact
    )
    assert (output.shape, logsumexp.shape) == ((3, 2, 4, 32), (3, 4, 32))
    assert [call.text.split("_")[1] for call in driver_log.of("cuLaunchKernelEx")][:1] == ["decode"]


@pytest.mark.parametrize("backend", ["auto", "gpu"])
def test_without_a_gpu_the_reference_is_named(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    def absent(*_: object) -> Any:
        raise NoDevice("no GPU")

    for name in ("current_ordinal", "is_capturing"):
        monkeypatch.setattr(driver, name, absent)
    text = 'no GPU; backend="reference" computes on the CPU in NumPy float64'
    with pytest.raises(NoDevice, match=text):
        attention_forward(*operands(), backend=backend)


@pytest.mark.parametrize("dtype", ["float16", "float32", BF16])
def test_reference(dtype: Any) -> None:
    query, key, value = operands(dtype)
    options: Any = {"mask": CausalBottomRight(), "scale": 0.3, "backend": "reference"}
    output, logsumexp = attention_forward(query, key, value, **options)
    assert (output.dtype, logsumexp.dtype, logsumexp.shape) == (np.dtype(dtype), np.float32, (B, H, 64))
    assert np.isposinf(logsumexp[..., MQ:]).all()
    scores = 0.3 * np.einsum("bmhk,bnhk->bhmn", query.astype("f8"), key.astype("f8"))
    scores = np.where(CausalBottomRight().materialise(MQ, MK), scores, -np.inf)
    lse = np.log(np.exp(scores).sum(-1))
    np.testing.assert_allclose(logsumexp[..., :MQ], lse, rtol=1e-6)
    expected = np.einsum("bhmn,bnhk->bmhk", np.exp(scores - lse[..., None]), value.astype("f8"))
    np.testing.assert_allclose(output.astype("f8"), expected, rtol=1e-2, atol=1e-2)

    grad_output = aligned(output.shape, dtype, 9)
    gradients = attention_backward(grad_output, query, key, value, output, logsumexp, **options)
    weights = np.exp(scores - lse[..., None])
    grad_value = np.einsum("bhmn,bmhk->bnhk", weights, grad_output.astype("f8"))
    np.testing.assert_allclose(gradients.value.astype("f8"), grad_value, rtol=1e-2, atol=2e-2)
    assert (gradients.query.shape, gradients.query.dtype) == (query.shape, np.dtype(dtype))


def test_reference_needs_numpy_arrays() -> None:
    query, key, value = operands()
    with pytest.raises(NotSupported, match=r"(?s)query = .*value = .*: must be a NumPy array for backend='reference'"):
        attention_forward([query], key, [value], backend="reference")
