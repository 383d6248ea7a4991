"""Guests: how torch and CuPy show their arrays, streams and memory, read directly: DLPack costs several times more.

Whatever is not plain about an array is left to DLPack, which has a sentence for it.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import numpy as np

from cutlass_py_attn.problem import ITEM_BYTES

View = tuple[int, tuple[int, ...], tuple[int, ...], str, int]  # pointer, shape, strides in elements, dtype, device
_DTYPES: Final = (*ITEM_BYTES, "int32", "int64")


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
    def current_stream(self, ordinal: int) -> int:
        """The stream on which the library computes now."""

    @abstractmethod
    def stream(self, handle: int, ordinal: int) -> Any:
        """A CUstream as a stream object of the library's."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int) -> tuple[Any, int]:
        """A new array and its address, from the library's pool of `stream`, so that reuse keeps stream order.

        The device's context is current.
        """


class _Torch(Guest):
    library = "torch"

    def view(self, array: Any) -> View | None:
        if not array.is_cuda or array.requires_grad or array.is_neg() or array.layout is not _torch().strided:
            return None
        dtype = _torch_name(array.dtype)
        if dtype not in _DTYPES:
            return None
        return array.data_ptr(), tuple(array.shape), array.stride(), dtype, array.get_device()

    def current_stream(self, ordinal: int) -> int:
        found: int = _torch().cuda.current_stream(ordinal).cuda_stream
        return found

    def stream(self, handle: int, ordinal: int) -> Any:
        torch = _torch()
        place = torch.device("cuda", ordinal)
        return torch.cuda.ExternalStream(handle, device=place) if handle else torch.cuda.default_stream(place)

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int) -> tuple[Any, int]:
        torch = _torch()
        place = torch.device("cuda", ordinal)
        if self.current_stream(ordinal) == stream:
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=place)
        else:
            with torch.cuda.stream(self.stream(stream, ordinal)):
                made = torch.empty(shape, dtype=getattr(torch, dtype), device=place)
        return made, int(made.data_ptr())


class _CuPy(Guest):
    library = "cupy"

    def view(self, array: Any) -> View | None:
        dtype = array.dtype
        if dtype.name not in _DTYPES or not dtype.isnative:
            return None
        strides = tuple(stride // dtype.itemsize for stride in array.strides)
        memory = array.data
        return memory.ptr, array.shape, strides, dtype.name, memory.device_id

    def current_stream(self, ordinal: int) -> int:
        found: int = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        return found

    def stream(self, handle: int, ordinal: int) -> Any:
        cuda = sys.modules["cupy"].cuda
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(_Handle(handle))
        return cuda.ExternalStream(handle, ordinal)  # CuPy before 14

    def empty(self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int) -> tuple[Any, int]:
        cupy = sys.modules["cupy"]
        if self.current_stream(ordinal) == stream:
            made = cupy.empty(shape, dtype=numpy_dtype(dtype))
        else:
            with cupy.cuda.Device(ordinal), self.stream(stream, ordinal):
                made = cupy.empty(shape, dtype=numpy_dtype(dtype))
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


def _torch() -> Any:
    return sys.modules["torch"]


@functools.cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
