"""Fast paths for torch and CuPy: reads arrays, streams and memory directly, without a DLPack capsule per array.

An array that is not plain CUDA memory takes the DLPack path, whose errors say what is wrong with it.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final

import numpy as np

from cutlass_py_attn.problem.tensors import E4M3, ITEM_BYTES
from cutlass_py_attn.runtime import driver

View = tuple[int, tuple[int, ...], tuple[int, ...], str, int]  # pointer, shape, strides in elements, dtype, device
_DTYPES: Final = (*ITEM_BYTES, *E4M3, "int32", "int64")
_ML_DTYPES: Final = ("bfloat16", E4M3[0])


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the NumPy dtype of that name; bfloat16 and float8_e4m3fn come from ml_dtypes."""
    if dtype not in _ML_DTYPES:
        return np.dtype(dtype)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return found


class _StreamHandle:
    """A stream handle with CUDA's stream protocol, version 0."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Framework(ABC):
    """An array library with a fast path."""

    library: ClassVar[str]

    @abstractmethod
    def view(self, array: Any) -> View | None:
        """Returns address, shape, strides, dtype and device.

        None if the array is not plain CUDA memory, or has strides that are no multiple of its elements.
        """

    @abstractmethod
    def layout_key(self, array: Any) -> Hashable:
        """Returns a hashable key of the array's shape, strides, dtype and device, without its address.

        RuntimeError: the array has no strides.
        """

    @abstractmethod
    def addresses(self, arrays: Iterable[Any]) -> list[int]:
        """Returns the address of each array."""

    @abstractmethod
    def ordinal(self, array: Any) -> int | None:
        """Returns the array's device; None if the array is not in CUDA memory."""

    @abstractmethod
    def allocates_on(self, ordinal: int) -> bool:
        """Returns whether `empty` can allocate on this device now."""

    @abstractmethod
    def current_stream(self, ordinal: int) -> int:
        """Returns the handle of the stream on which the library computes now."""

    @abstractmethod
    def stream(self, handle: int, ordinal: int) -> Any:
        """Returns a CUstream as a stream object of the library."""

    @abstractmethod
    def use_stream(self, handle: int, ordinal: int) -> AbstractContextManager[Any]:
        """Context manager in which the library computes and allocates on this stream."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
        """Returns a new array and its address. The memory pool of the current stream keeps reuse in stream order."""


class _Torch(Framework):
    library = "torch"

    def view(self, array: Any) -> View | None:
        dtype = _torch_name(array.dtype)
        if dtype not in _DTYPES or not array.is_cuda or array.requires_grad or array.is_neg():
            return None
        try:
            return array.data_ptr(), tuple(array.shape), array.stride(), dtype, array.get_device()
        except RuntimeError:  # a sparse tensor, for example
            return None

    def layout_key(self, array: Any) -> Hashable:
        return array.shape, array.stride(), array.dtype, array.device, array.requires_grad, array.is_neg()

    def addresses(self, arrays: Iterable[Any]) -> list[int]:
        return [array.data_ptr() for array in arrays]

    def ordinal(self, array: Any) -> int | None:
        ordinal: int = array.get_device()
        return ordinal if ordinal >= 0 else None

    def allocates_on(self, ordinal: int) -> bool:
        return True

    def current_stream(self, ordinal: int) -> int:
        torch = sys.modules["torch"]
        raw = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
        # The public function creates a stream object in every call.
        handle: int = torch.cuda.current_stream(ordinal).cuda_stream if raw is None else raw(ordinal)
        return handle

    def stream(self, handle: int, ordinal: int) -> Any:
        torch = sys.modules["torch"]
        device = torch.device("cuda", ordinal)
        return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)

    def use_stream(self, handle: int, ordinal: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = sys.modules["torch"].cuda.stream(self.stream(handle, ordinal))
        return context

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
        torch = sys.modules["torch"]
        array = torch.empty(shape, dtype=_torch_dtype(dtype), device=_torch_device(ordinal))
        return array, int(array.data_ptr())


class _CuPy(Framework):
    library = "cupy"

    def view(self, array: Any) -> View | None:
        name, item_bytes = _numpy_name(array.dtype)
        if name not in _DTYPES:
            return None
        memory = array.data
        if any([stride % item_bytes for stride in array.strides]):
            return None
        strides = tuple([stride // item_bytes for stride in array.strides])
        return memory.ptr, array.shape, strides, name, memory.device_id

    def layout_key(self, array: Any) -> Hashable:
        return array.shape, array.strides, array.dtype, array.data.device_id

    def addresses(self, arrays: Iterable[Any]) -> list[int]:
        return [array.data.ptr for array in arrays]

    def ordinal(self, array: Any) -> int | None:
        ordinal: int = array.data.device_id
        return ordinal

    def allocates_on(self, ordinal: int) -> bool:
        return int(driver.function("cuCtxGetCurrent")()[1]) == driver.device(ordinal).context

    def current_stream(self, ordinal: int) -> int:
        handle: int = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        return handle

    def stream(self, handle: int, ordinal: int) -> Any:
        cuda = sys.modules["cupy"].cuda
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(_StreamHandle(handle))
        return cuda.ExternalStream(handle, ordinal)  # CuPy before version 14

    @contextmanager
    def use_stream(self, handle: int, ordinal: int) -> Iterator[None]:
        with sys.modules["cupy"].cuda.Device(ordinal), self.stream(handle, ordinal):
            yield

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
        array = sys.modules["cupy"].empty(shape, dtype=numpy_dtype(dtype))
        return array, int(array.data.ptr)


TORCH: Final = _Torch()
CUPY: Final = _CuPy()
FRAMEWORKS: Final[dict[str, Framework]] = {framework.library: framework for framework in (TORCH, CUPY)}


def framework_of(array: object) -> Framework | None:
    """Returns the framework whose plain array type this is; None for any other type."""
    kind = type(array)
    if kind.__name__ == "Tensor" and kind is getattr(sys.modules.get("torch"), "Tensor", None):
        return TORCH
    if kind.__name__ == "ndarray" and kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        return CUPY
    return None


@functools.cache
def _numpy_name(dtype: np.dtype[Any]) -> tuple[str, int]:
    """Returns a dtype's name, "" if its byte order is not native, and its size (bytes). Cached: NumPy builds names."""
    return dtype.name if dtype.isnative else "", dtype.itemsize


@functools.cache
def _torch_dtype(name: str) -> Any:
    return getattr(sys.modules["torch"], name)


@functools.cache
def _torch_device(ordinal: int) -> Any:
    return sys.modules["torch"].device("cuda", ordinal)


@functools.cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
