"""Guests: how torch and CuPy show their arrays, streams and memory, read directly, without a capsule for each array.

Whatever is not plain about an array is left to DLPack, which has a sentence for it.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final

import numpy as np

from cutlass_py_attn import driver
from cutlass_py_attn.problem import ITEM_BYTES

View = tuple[int, tuple[int, ...], tuple[int, ...], str, int]  # pointer, shape, strides in elements, dtype, device
_DTYPES: Final = (*ITEM_BYTES, "int32", "int64")


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


class _Handle:
    """A stream handle as an object of CUDA's stream protocol, version 0."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Guest(ABC):
    """One array library."""

    library: ClassVar[str]

    @abstractmethod
    def view(self, array: Any) -> View | None:
        """Where the array lies; None where it is not plain CUDA memory of a dtype that we know."""

    @abstractmethod
    def lie(self, array: Any) -> Hashable:
        """What `view` looks at but the address, as the library has it; RuntimeError where there is no such thing."""

    @abstractmethod
    def addresses(self, arrays: Iterable[Any]) -> list[int]:
        """Of each array."""

    @abstractmethod
    def is_on(self, ordinal: int) -> bool:
        """Whether `empty` makes arrays on this device as things are."""

    @abstractmethod
    def current_stream(self, ordinal: int) -> int:
        """The stream on which the library computes now."""

    @abstractmethod
    def stream(self, handle: int, ordinal: int) -> Any:
        """A CUstream as a stream object of the library's."""

    @abstractmethod
    def on(self, handle: int, ordinal: int) -> AbstractContextManager[Any]:
        """The library computes, and takes memory, on this stream."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
        """A new array and its address, from the pool of the current stream, so that reuse keeps stream order."""


class _Torch(Guest):
    library = "torch"

    def view(self, array: Any) -> View | None:
        dtype = _torch_name(array.dtype)
        if dtype not in _DTYPES or not array.is_cuda or array.requires_grad or array.is_neg():
            return None
        try:
            return array.data_ptr(), tuple(array.shape), array.stride(), dtype, array.get_device()
        except RuntimeError:  # sparse, for one
            return None

    def lie(self, array: Any) -> Hashable:
        return array.shape, array.stride(), array.dtype, array.device, array.requires_grad, array.is_neg()

    def addresses(self, arrays: Iterable[Any]) -> list[int]:
        return [array.data_ptr() for array in arrays]

    def is_on(self, ordinal: int) -> bool:
        return True

    def current_stream(self, ordinal: int) -> int:
        torch = sys.modules["torch"]
        raw = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
        # The public way makes an object of the stream, each time.
        found: int = torch.cuda.current_stream(ordinal).cuda_stream if raw is None else raw(ordinal)
        return found

    def stream(self, handle: int, ordinal: int) -> Any:
        torch = sys.modules["torch"]
        place = torch.device("cuda", ordinal)
        return torch.cuda.ExternalStream(handle, device=place) if handle else torch.cuda.default_stream(place)

    def on(self, handle: int, ordinal: int) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = sys.modules["torch"].cuda.stream(self.stream(handle, ordinal))
        return found

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
        torch = sys.modules["torch"]
        made = torch.empty(shape, dtype=_torch_dtype(dtype), device=_torch_device(ordinal))
        return made, int(made.data_ptr())


class _CuPy(Guest):
    library = "cupy"

    def view(self, array: Any) -> View | None:
        name, item = _numpy_name(array.dtype)
        if name not in _DTYPES:
            return None
        memory = array.data
        return memory.ptr, array.shape, tuple([step // item for step in array.strides]), name, memory.device_id

    def lie(self, array: Any) -> Hashable:
        return array.shape, array.strides, array.dtype, array.data.device_id

    def addresses(self, arrays: Iterable[Any]) -> list[int]:
        return [array.data.ptr for array in arrays]

    def is_on(self, ordinal: int) -> bool:
        return int(driver.function("cuCtxGetCurrent")()[1]) == driver.device(ordinal).context

    def current_stream(self, ordinal: int) -> int:
        found: int = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        return found

    def stream(self, handle: int, ordinal: int) -> Any:
        cuda = sys.modules["cupy"].cuda
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(_Handle(handle))
        return cuda.ExternalStream(handle, ordinal)  # CuPy before 14

    @contextmanager
    def on(self, handle: int, ordinal: int) -> Iterator[None]:
        with sys.modules["cupy"].cuda.Device(ordinal), self.stream(handle, ordinal):
            yield

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int) -> tuple[Any, int]:
        made = sys.modules["cupy"].empty(shape, dtype=numpy_dtype(dtype))
        return made, int(made.data.ptr)


TORCH: Final = _Torch()
CUPY: Final = _CuPy()
BY_LIBRARY: Final[dict[str, Guest]] = {guest.library: guest for guest in (TORCH, CUPY)}


def guest_of(array: object) -> Guest | None:
    """The library whose plain array this is."""
    kind = type(array)
    if kind.__name__ == "Tensor" and kind is getattr(sys.modules.get("torch"), "Tensor", None):
        return TORCH
    if kind.__name__ == "ndarray" and kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        return CUPY
    return None


@functools.cache
def _numpy_name(dtype: np.dtype[Any]) -> tuple[str, int]:
    """Name of a dtype, none where its bytes are not this machine's, and its size; NumPy puts the name together."""
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
