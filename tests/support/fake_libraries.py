"""Fake torch and CuPy: arrays over host memory, current streams, and a record of what their allocators are told."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api import calls
from cutlass_py_attn.runtime import frameworks
from tests.support.fakes import aligned

TORCH_STREAM, CUPY_STREAM = 0x66, 0x55  # current streams of the two libraries


class Stream:
    """A stream of torch; `waited` lists the streams that it waited for."""

    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream = cuda_stream
        self.waited: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)


class ExternalStream(Stream):
    """A stream that torch did not create."""

    def __init__(self, cuda_stream: int, device: Any = None) -> None:
        super().__init__(cuda_stream)


class Tensor:
    """A torch tensor over host memory. `recorded` lists the streams of record_stream."""

    __module__ = "torch"

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32", is_cuda: bool = True) -> None:
        self.array = aligned(shape, "f4" if dtype == "float32" else dtype)
        self.shape, self.ndim, self.dtype = shape, len(shape), f"torch.{dtype}"
        self.device = "cuda:0" if is_cuda else "cpu"
        self.is_cuda, self.requires_grad = is_cuda, False
        self.recorded: list[int] = []

    def is_neg(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)
        self.recorded.append(stream.cuda_stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0) if self.is_cuda else (1, 0)

    def __dlpack__(self, *, stream: int) -> Any:
        raise BufferError("this fake has the fast path alone")


class ndarray:  # noqa: N801
    """A CuPy array over host memory."""

    __module__ = "cupy"

    def __init__(self, shape: tuple[int, ...], dtype: Any = "f4") -> None:
        self.array = aligned(shape, np.dtype(dtype))
        self.shape, self.ndim, self.strides, self.dtype = shape, len(shape), self.array.strides, self.array.dtype
        self.data = SimpleNamespace(ptr=self.array.ctypes.data, device_id=0)
        self.device = "gpu 0"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        raise BufferError("this fake has the fast path alone")


class _Libraries:
    """The current streams of both libraries."""

    def __init__(self) -> None:
        self.torch_stream, self.cupy_stream = Stream(TORCH_STREAM), CUPY_STREAM

    @contextlib.contextmanager
    def use_torch_stream(self, stream: Stream) -> Iterator[None]:
        before, self.torch_stream = self.torch_stream, stream
        yield
        self.torch_stream = before

    @contextlib.contextmanager
    def use_cupy_stream(self, handle: int) -> Iterator[None]:
        before, self.cupy_stream = self.cupy_stream, handle
        yield
        self.cupy_stream = before

    def torch(self) -> Any:
        """Returns the module torch."""
        cuda = SimpleNamespace(
            Stream=Stream,
            ExternalStream=ExternalStream,
            stream=self.use_torch_stream,
            current_stream=lambda ordinal: self.torch_stream,
            default_stream=lambda device: Stream(0),
        )
        return SimpleNamespace(
            Tensor=Tensor,
            cuda=cuda,
            device=lambda kind, ordinal: f"{kind}:{ordinal}",
            empty=lambda shape, dtype, device: Tensor(shape, dtype),
            float32="float32",
        )

    def cupy(self) -> Any:
        """Returns the module cupy."""

        class CuPyStream:
            """A context manager in which this stream is current."""

            def __init__(this, handle: int) -> None:  # noqa: N805
                this.ptr = handle

            def __enter__(this) -> None:  # noqa: N805
                this.context = self.use_cupy_stream(this.ptr)
                this.context.__enter__()

            def __exit__(this, *_: object) -> None:  # noqa: N805
                this.context.__exit__(None, None, None)

            def wait_event(this, event: object) -> None:  # noqa: N805
                pass

            def record(this) -> None:  # noqa: N805
                pass

        cuda = SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            ExternalStream=lambda handle, ordinal: CuPyStream(handle),
            Stream=SimpleNamespace(),
            get_current_stream=lambda ordinal=0: CuPyStream(self.cupy_stream),
        )
        return SimpleNamespace(ndarray=ndarray, cuda=cuda, empty=lambda shape, dtype: ndarray(shape, dtype))


def install(monkeypatch: pytest.MonkeyPatch) -> _Libraries:
    """Puts both libraries into sys.modules for one test, with empty caches."""
    libraries = _Libraries()
    monkeypatch.setitem(sys.modules, "torch", libraries.torch())
    monkeypatch.setitem(sys.modules, "cupy", libraries.cupy())
    for name in ("_torch_dtype", "_torch_device", "_torch_name"):
        monkeypatch.setattr(frameworks, name, functools.cache(getattr(frameworks, name).__wrapped__))
    calls._repeated.clear()
    calls._prepared.clear()
    return libraries
