"""Arrays on the GPU: operands of CuPy, JAX, torch and NumPy are read in place, in stream order."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.reference.numpy_reference import DTYPES
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits

CASES = [Case.parse(f"backward {dtype}_d128_q203_s129_b2_h3_causal_splits1 seed=7") for dtype in ("bf16", "f16", "f32")]
DELAY_ELEMENTS = 1 << 27
DELAY_PASSES = 60  # of a gibibyte each: some ten milliseconds
LONGER = (1, 7, 33)  # factors of DELAY_PASSES, for a process that has to wait for the CPU


@dataclass(frozen=True, slots=True)
class Library:
    """One array library: to the device and back, and its streams."""

    module: ModuleType
    array_type: Any
    to_device: Callable[[Array], Any]
    to_host: Callable[[Any], Array]
    dtypes: tuple[str, ...]


def _torch(torch: Any) -> Library:
    def to_device(array: Array) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}"))
        return bits.cuda().view(getattr(torch, array.dtype.name))

    def to_host(tensor: Any) -> Array:
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        bits = tensor.contiguous().view(getattr(torch, f"int{8 * dtype.itemsize}"))
        return bits.cpu().numpy().view(dtype)

    return Library(torch, torch.Tensor, to_device, to_host, ("bfloat16", "float16", "float32"))


def _cupy(cupy: Any) -> Library:
    return Library(cupy, cupy.ndarray, cupy.asarray, cupy.asnumpy, ("float16", "bfloat16", "float32"))


def _jax(jax: Any) -> Library:
    return Library(jax, jax.Array, lambda array: jax.device_put(array), np.asarray, ("bfloat16", "float16", "float32"))


def _library(module: str) -> Library:
    """The library with a GPU behind it, or a skip that says what is missing."""
    try:
        found = importlib.import_module(module)
        library = {"torch": _torch, "cupy": _cupy, "jax": _jax}[module](found)
        library.to_host(library.to_device(np.ones((2, 2), np.float32)))
        if module == "jax" and found.default_backend() != "gpu":
            pytest.skip("jax has no GPU backend here")
    except Exception as error:  # not installed, or installed without a GPU: each says it in its own way
        pytest.skip(f"{module} cannot be used here: {str(error).splitlines()[0]}")
    return library


@pytest.fixture(params=["torch", "cupy", "jax"])
def library(request: pytest.FixtureRequest) -> Library:
    """Each library that is installed."""
    return _library(request.param)


@pytest.fixture(params=CASES, ids=lambda case: case.spec.dtype)
def case(request: pytest.FixtureRequest) -> Case:
    """One case for each dtype."""
    found: Case = request.param
    return found


def test_same_bits_as_from_numpy_and_nothing_is_copied(
    library: Library, case: Case, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.spec.dtype not in library.dtypes:
        pytest.skip(f"{library.module.__name__} has no {case.spec.dtype}")
    arrays = case.arrays()
    expected = check.attend(case, arrays, kernels)
    on_device = {key: library.to_device(array) for key, array in arrays.items()}
    with monkeypatch.context() as patch:
        for name in ("copy_to_device", "copy_to_host"):
            patch.setattr(driver, name, _refuse)
        found = check.attend(case, on_device, kernels)
    for key, array in found.items():
        assert isinstance(array, library.array_type), key
        assert same_bits(library.to_host(array), expected[key]), key
    for key, array in arrays.items():
        assert same_bits(library.to_host(on_device[key]), array), f"{key} was changed"


def _refuse(*_: object) -> None:
    raise AssertionError("a device array was copied")


def test_numpy_is_accurate(case: Case, kernels: Kernels) -> None:
    """Strided NumPy operands give dense NumPy results of their dtype."""
    arrays = case.arrays()
    strided = {key: np.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for key, a in arrays.items()}
    found = check.attend(case, strided, kernels)
    assert all(isinstance(array, np.ndarray) for array in found.values())
    assert all(found[key].dtype == arrays["query"].dtype for key in ("output", *check.GRADIENTS))
    check.assert_accurate(case, check.results(case, arrays, found))


@pytest.mark.parametrize("module", ["torch", "cupy"])
def test_slices_of_one_packed_tensor(module: str, kernels: Kernels) -> None:
    """query, key and value as views of one [batch, rows, 3, heads, head_dim]."""
    library = _library(module)
    case = CASES[1].replace(num_keys=CASES[1].spec.num_queries)
    arrays = case.arrays()
    packed = library.to_device(np.stack([arrays[key] for key in check.OPERANDS], axis=2))
    views = {key: packed[:, :, index] for index, key in enumerate(check.OPERANDS)}
    found = check.attend(case, {**views, "grad_output": library.to_device(arrays["grad_output"])}, kernels)
    expected = check.attend(case, arrays, kernels)
    assert all(same_bits(library.to_host(array), expected[key]) for key, array in found.items())


@pytest.mark.parametrize("same", [True, False], ids=["same_stream", "other_stream"])
def test_torch_producer_comes_first(same: bool, kernels: Kernels) -> None:
    """The query is written late on a stream; a launch on that stream or another one waits for it."""
    torch = _library("torch").module
    producer = torch.cuda.Stream()
    consumer = producer if same else torch.cuda.Stream()
    _after_a_slow_producer(_library("torch"), producer, consumer, torch.cuda.stream, torch.empty_like, kernels)


@pytest.mark.parametrize("same", [True, False], ids=["same_stream", "other_stream"])
def test_cupy_producer_comes_first(same: bool, kernels: Kernels) -> None:
    """As with torch."""
    cupy = _library("cupy").module
    producer = cupy.cuda.Stream(non_blocking=True)
    consumer = producer if same else cupy.cuda.Stream(non_blocking=True)

    def entered(stream: Any) -> Any:
        return stream

    _after_a_slow_producer(_library("cupy"), producer, consumer, entered, cupy.empty_like, kernels)


def _after_a_slow_producer(
    library: Library,
    producer: Any,
    consumer: Any,
    entered: Callable[[Any], Any],
    empty_like: Callable[[Any], Any],
    kernels: Kernels,
) -> None:
    case = CASES[1].replace(direction="forward", num_splits_key=None)
    arrays = case.arrays()
    expected = check.attend(case, arrays, kernels)["output"]
    on_device = {key: library.to_device(array) for key, array in arrays.items()}
    query = empty_like(on_device["query"])
    busy = library.to_device(np.ones(DELAY_ELEMENTS, np.float32))
    # Once before, so that no library compiles anything later on.
    query[...] = on_device["query"]
    busy *= 1.0001
    for factor in LONGER:
        query[...] = 0
        driver.call("cuCtxSynchronize")
        with entered(producer):
            for _ in range(DELAY_PASSES * factor):
                busy *= 1.0001
            query[...] = on_device["query"]
            output, _ = attention_forward(
                query, on_device["key"], on_device["value"], mask=case.spec.mask, stream=consumer, kernels=kernels
            )
        is_late = _is_busy(driver.stream_handle(consumer))
        driver.synchronise(driver.stream_handle(consumer))
        assert same_bits(library.to_host(output), expected)
        if is_late:
            return
    pytest.fail(f"the producer was never late, not after {DELAY_PASSES * LONGER[-1]} passes either")


def _is_busy(stream: int) -> bool:
    """Whether work of the stream is pending."""
    try:
        driver.call("cuStreamQuery", stream)
    except DriverError as error:
        if "NOT_READY" not in str(error):
            raise
        return True
    return False
