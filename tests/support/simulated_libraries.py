"""Simulated torch and CuPy: arrays with views in the memory of a simulated GPU, whose allocators reuse it at once.

The memory of an array that dies may hold another array of its stream from then on: it is overwritten in the order of
that stream. torch waits for the streams of record_stream before; CuPy does not.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cutlass_py_attn.runtime import frameworks
from cutlass_py_attn.runtime.arrays import numpy_dtype
from tests.support.fake_libraries import ExternalStream, Stream
from tests.support.simulated_gpu import Allocation, SimulatedGpu, storage


class Storage:
    """Memory of an array library, allocated on a stream. recorded: streams of record_stream."""

    def __init__(self, gpu: SimulatedGpu, size: int, stream: int, purpose: str) -> None:
        self.allocation: Allocation = storage(gpu, size, purpose)
        self.recorded: list[int] = []
        if gpu.is_captured(stream):  # the pool of the graph keeps it
            self.allocation.is_released = True
        else:
            weakref.finalize(self, gpu.release_storage, self.allocation, stream, self.recorded).atexit = False


class Viewed:
    """An array of some library: strided elements of a storage. strides, offset: in elements."""

    def __init__(self, held: Storage, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: str) -> None:
        self.held, self.kind, self.offset = held, numpy_dtype(dtype), offset
        self.shape, self.steps, self.ndim = tuple(shape), tuple(strides), len(shape)
        self.address = held.allocation.address + offset * self.kind.itemsize

    def __getitem__(self, index: Any) -> Any:
        """Returns a view; an index that NumPy knows for the same strides."""
        part = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), self.shape, self.steps)
        found = part[index]
        offset = found.ctypes.data - part.ctypes.data
        return type(self)(self.held, found.shape, found.strides, self.offset + offset, self.kind.name)


class Tensor(Viewed):
    """A torch tensor."""

    __module__ = "torch"
    is_cuda, requires_grad, device = True, False, "cuda:0"

    @property
    def dtype(self) -> str:
        return f"torch.{self.kind.name}"

    def is_neg(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.steps

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)
        self.held.recorded.append(stream.cuda_stream)


class ndarray(Viewed):  # noqa: N801
    """A CuPy array."""

    __module__ = "cupy"

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.kind

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(step * self.kind.itemsize for step in self.steps)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.address, device_id=0)


class Libraries:
    """Both libraries; each thread has a current stream of its own, at first the legacy default stream."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self._current = threading.local()

    def stream_of(self, library: str) -> int:
        """Returns the handle of a library's current stream."""
        found: int = getattr(self._current, library, 0)
        return found

    @contextlib.contextmanager
    def on(self, library: str, handle: int) -> Iterator[None]:
        """Context manager in which this stream is current."""
        before = self.stream_of(library)
        setattr(self._current, library, handle)
        try:
            yield
        finally:
            setattr(self._current, library, before)

    def empty(self, library: str, shape: Sequence[int], dtype: str) -> Any:
        """Returns a new dense array."""
        kind = {"torch": Tensor, "cupy": ndarray}[library]
        size = math.prod(shape) * numpy_dtype(dtype).itemsize
        held = Storage(self.gpu, size, self.stream_of(library), library)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return kind(held, shape, strides, 0, dtype)

    def torch(self) -> Any:
        """Returns the module torch."""
        cuda = SimpleNamespace(
            Stream=Stream,
            ExternalStream=ExternalStream,
            stream=lambda stream: self.on("torch", stream.cuda_stream),
            current_stream=lambda ordinal: Stream(self.stream_of("torch")),
            default_stream=lambda device: Stream(0),
        )
        names = {name: name for name in ("float16", "bfloat16", "float32", "int32", "int64")}
        return SimpleNamespace(
            Tensor=Tensor,
            cuda=cuda,
            device=lambda kind, ordinal: f"{kind}:{ordinal}",
            empty=lambda shape, dtype, device: self.empty("torch", shape, dtype),
            **names,
        )

    def cupy(self) -> Any:
        """Returns the module cupy."""

        @contextlib.contextmanager
        def current(handle: int) -> Iterator[None]:
            with self.on("cupy", handle):
                yield

        cuda = SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            ExternalStream=lambda handle, ordinal: current(handle),
            Stream=SimpleNamespace(),
            get_current_stream=lambda ordinal=0: SimpleNamespace(ptr=self.stream_of("cupy")),
        )
        return SimpleNamespace(
            ndarray=ndarray, cuda=cuda, empty=lambda shape, dtype: self.empty("cupy", shape, np.dtype(dtype).name)
        )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which the modules are these."""
        cached = [getattr(frameworks, name) for name in ("_torch_dtype", "_torch_device", "_torch_name")]
        for function in cached:
            function.cache_clear()
        with mock.patch.dict(sys.modules, torch=self.torch(), cupy=self.cupy()):
            yield
        for function in cached:
            function.cache_clear()
