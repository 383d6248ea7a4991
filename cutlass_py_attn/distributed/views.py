"""Views: arrays in device memory that are cut without a copy, as NumPy's are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any

from cutlass_py_attn.errors import DriverError, NoDevice
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.runtime import dlpack, driver
from cutlass_py_attn.runtime.arrays import Array, numpy_dtype


class Memory:
    """Memory of a stream's pool, freed in stream order when the last view of it is gone."""

    def __init__(self, size: int, device: int, stream: int, purpose: str) -> None:
        self.pointer = driver.allocate(size, stream, purpose)
        weakref.finalize(self, _free, self.pointer, device, stream).atexit = False


def _free(pointer: int, device: int, stream: int) -> None:
    """Frees memory of a stream's pool; the pool keeps it if the stream was destroyed with an aborted group.

    An error may keep arrays alive until another context is current.
    """
    with contextlib.suppress(DriverError, NoDevice), driver.device(device).current():
        driver.free(pointer, stream)


@dataclass(frozen=True, slots=True)
class View:
    """An array in device memory.

    pointer: address in bytes. strides: in elements. owner: what keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    owner: Any

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: str, device: int, stream: int) -> View:
        """Returns an uninitialised dense array. The device's context is current."""
        size = math.prod(shape) * numpy_dtype(dtype).itemsize
        memory = Memory(size, device, stream, f"an array {shape} {dtype}") if size else None
        pointer = 0 if memory is None else memory.pointer
        return View(pointer, shape, dense_strides(shape), dtype, device, memory)

    @property
    def item_bytes(self) -> int:
        """Size of an element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Size of all elements."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def tensor(self) -> Tensor:
        """The layout, for a plan."""
        bits = self.pointer | ROW_ALIGNMENT_BYTES
        return Tensor(self.shape, self.strides, self.dtype, bits & -bits)

    @property
    def array(self) -> Array:
        """The view as an operand of a call."""
        return Array(self.pointer, self.shape, self.strides, self.dtype, self.device, "other", self)

    @property
    def reach(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        return (
            sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)) + 1
        ) * self.item_bytes

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(self, **_: object) -> Any:
        """Returns an unversioned capsule. The consumer works on the stream on which the array is used here."""
        return dlpack.export_capsule(self, self.pointer, self.shape, self.strides, self.dtype, self.device)

    def __getitem__(self, index: tuple[slice, ...]) -> View:
        """Returns the view of ranges along the leading axes. The slices have a step of 1."""
        elements, shape = 0, list(self.shape)
        for axis, part in enumerate(index):
            if part.start is not None or part.stop is not None:
                first, last, _ = part.indices(shape[axis])
                shape[axis] = max(last - first, 0)
                elements += first * self.strides[axis]
        pointer = self.pointer + elements * self.item_bytes
        return View(pointer, tuple(shape), self.strides, self.dtype, self.device, self.owner)

    def as_rows(self) -> View:
        """Returns the view with axes of size 1 in front, so that it has four."""
        missing = 4 - len(self.shape)
        if not missing:
            return self
        strides = (self.strides[0] * self.shape[0] if self.shape else 1,) * missing
        return dataclasses.replace(self, shape=(*(1,) * missing, *self.shape), strides=(*strides, *self.strides))

    def reshape(self, shape: tuple[int, ...]) -> View:
        """Returns a dense view with another shape."""
        return View(self.pointer, shape, dense_strides(shape), self.dtype, self.device, self.owner)


@functools.lru_cache(maxsize=1024)
def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides (elements) of an array whose elements follow each other in row-major order."""
    return Tensor.contiguous(shape, "uint8").strides


def is_dense(array: Any) -> bool:
    """Returns whether the elements of a View or a NumPy array follow each other in row-major order."""
    if not isinstance(array, View):
        return bool(array.flags.c_contiguous)
    return array.strides == dense_strides(array.shape) or array.tensor.is_contiguous
