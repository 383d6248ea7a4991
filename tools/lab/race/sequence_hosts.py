"""Sequence hosts: what the machine of sequence_machine.py needs of a GPU, a simulated or a real one.

A host creates arrays of several libraries over guarded storages, reads them back, orders streams and captures graphs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.runtime import arrays, cuda_interface, driver, frameworks, lifetimes
from cutlass_py_attn.runtime.arrays import DeviceArray, numpy_dtype
from cutlass_py_attn.testing.check import Kernels

Array = npt.NDArray[Any]
Work = Callable[[], Any]

NUMPY, TORCH, CUPY, FOREIGN, DEVICE = "numpy", "torch", "cupy", "foreign", "device"
LIBRARIES: Final = (TORCH, CUPY)  # with a current stream, and calls that a graph may hold
LAYOUTS: Final = ("dense", "heads_first", "packed", "padded", "reversed")
GUARD: Final = 64  # elements before and behind every array
STREAMS: Final = 2  # beside the legacy default stream


@dataclass(eq=False)
class Held:
    """An array and what must be in its storage.

    image: every element of the storage. view: the part of `image` that the array is. storage: what the host reads.
    stream: handle of the stream on which the contents were last written.
    """

    place: str
    array: Any
    image: Array
    view: Array
    storage: Any
    stream: int

    @property
    def gaps(self) -> Array:
        """Which elements of the storage do not belong to the array."""
        found = np.ones(self.image.size, np.bool_)
        item = self.image.itemsize
        offset = (self.view.ctypes.data - self.image.ctypes.data) // item
        strides = [stride // item for stride in self.view.strides]
        np.lib.stride_tricks.as_strided(found[offset:], self.view.shape, strides)[...] = False
        return found


def placed(values: Array, layout: str, guard: int = GUARD) -> tuple[Array, Array]:
    """Returns a storage, in which every gap is NaN or -1, and its part in this layout, which has the values."""
    shape = values.shape
    batch, rows, heads, columns = shape if len(shape) == 4 else (0, 0, 0, 0)
    layouts: dict[str, tuple[tuple[int, ...], Callable[[Array], Array]]] = {
        "dense": (shape, lambda whole: whole),
        "heads_first": ((batch, heads, rows, columns), lambda whole: whole.swapaxes(1, 2)),
        "packed": ((batch, rows, 3, heads, columns), lambda whole: whole[:, :, 1]),
        "padded": ((batch, rows, heads, columns + 8), lambda whole: whole[..., :columns]),
        "reversed": (shape, lambda whole: whole[::-1]),
    }
    base, take = layouts[layout if len(shape) == 4 else "dense"]
    size = math.prod(base)
    image = np.full(size + 2 * guard, np.nan if values.dtype.kind not in "iu" else -1, values.dtype)
    view = take(image[guard : guard + size].reshape(base))
    view[...] = values
    return image, view


class Storage:
    """Device memory of `size` bytes that belongs to no library."""

    def __init__(self, size: int) -> None:
        self.address = driver.allocate_now(size, "a test array")
        weakref.finalize(self, driver.free_now, self.address).atexit = False


class Foreign:
    """An array of an unknown library: strided elements of a storage, written on a stream."""

    def __init__(self, storage: Storage, view: Array, offset: int, stream: int) -> None:
        self.storage, self.dtype, self.stream = storage, view.dtype, stream
        self._view, self._address = (view.shape, view.strides), storage.address + offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape, strides = self._view
        return {
            "shape": shape,
            "typestr": cuda_interface.TYPESTRS[self.dtype.name],
            "data": (self._address, False),
            "strides": strides,
            "stream": self.stream or 1,
            "version": 3,
        }


class Host(ABC):
    """A GPU with array libraries.

    places: where arrays may be. captured: places whose calls graphs hold. streams: torch streams, as a caller passes
    them.
    """

    kernels: Kernels
    captured: tuple[str, ...]
    places: tuple[str, ...]
    streams: list[Any]

    def __init__(self) -> None:
        self._sources: list[Array] = []  # host memory of pending copies

    @property
    def launches(self) -> int | None:
        """Kernels launched so far; None if nobody counts them."""
        return None

    def hold(self, place: str, values: Array, layout: str, stream: int = 0) -> Held:
        """Returns an array with these values, written in the order of `stream`, the current one of the libraries."""
        image, view = placed(values, layout, 0 if place == DEVICE else GUARD)
        array: Any
        storage: Any
        offset = view.ctypes.data - image.ctypes.data
        if place == NUMPY:
            own = image.copy()
            strides = view.strides
            array = np.ndarray(view.shape, view.dtype, own.view(np.uint8).data, offset, strides)
            return Held(place, array, image, view, own, 0)
        if place == DEVICE:
            array = storage = DeviceArray(view.shape, view.dtype.name, 0, stream)
        elif place == FOREIGN:
            owner = storage = Storage(max(image.nbytes, 1))
            array = Foreign(owner, view, offset, stream)
        else:
            steps = [step // view.itemsize for step in view.strides]
            storage = self.create(place, image.size, view.dtype.name)
            array = self.view(place, storage, view.dtype.name, view.shape, steps, offset // view.itemsize)
        held = Held(place, array, image, view, storage, stream)
        self.write(held, stream)
        return held

    def part(self, held: Held, shape: Sequence[int], start: int) -> Any:
        """Returns a dense array of this shape in a held vector, from element `start` on."""
        image = held.image
        first = (held.view.ctypes.data - image.ctypes.data) // image.itemsize + start
        view = image[first : first + math.prod(shape)].reshape(shape)
        if held.place == NUMPY:
            found: Array = held.storage[first : first + view.size].reshape(shape)
            return found
        if held.place == FOREIGN:
            return Foreign(held.storage, view, first * image.itemsize, held.stream)
        steps = [step // image.itemsize for step in view.strides]
        return self.view(held.place, held.storage, image.dtype.name, shape, steps, first)

    def write(self, held: Held, stream: int) -> None:
        """Writes the image to the storage in the order of a stream."""
        held.stream = stream
        if held.place == NUMPY:
            held.storage[...] = held.image
            return
        if held.place in (DEVICE, FOREIGN):
            held.array.stream = stream
        source = held.image.copy()
        self._sources.append(source)
        if source.nbytes:
            driver.copy_to_device(self.address(held.storage), source.ctypes.data, source.nbytes, stream)

    def read(self, held: Held) -> Array:
        """Returns what is in the storage; nothing may be running."""
        if held.place == NUMPY:
            found: Array = held.storage
            return found
        return self.copied(self.address(held.storage), held.image.size, held.image.dtype)

    def copied(self, address: int, size: int, dtype: np.dtype[Any]) -> Array:
        """Returns elements in device memory."""
        found = np.empty(size, dtype)
        if found.nbytes:
            driver.copy_to_host(found.ctypes.data, address, found.nbytes, 0)
            driver.synchronise(0)
        return found

    def result(self, array: Any) -> Array:
        """Returns a result of a call as a NumPy array; nothing may be running."""
        if isinstance(array, np.ndarray):
            return array
        if isinstance(array, DeviceArray):
            size = math.prod(array.shape)
            return self.copied(array.pointer, size, numpy_dtype(array.dtype)).reshape(array.shape)
        read = arrays.read_operands({"result": array}, 0)["result"]
        steps = [(size - 1) * stride for size, stride in zip(read.shape, read.strides, strict=True)]
        kind = numpy_dtype(read.dtype)
        low = sum(min(step, 0) for step in steps)
        flat = self.copied(read.pointer + low * kind.itemsize, sum(map(abs, steps)) + 1, kind)
        strides = [stride * kind.itemsize for stride in read.strides]
        return np.lib.stride_tricks.as_strided(flat[-low:], read.shape, strides).copy()

    def synchronise(self, stream: int | None = None) -> None:
        """Waits for a stream, or for everything."""
        if stream is None:
            driver.call("cuCtxSynchronize")
            self._sources.clear()
        else:
            driver.synchronise(stream)

    def wait(self, stream: int, producer: int) -> None:
        """Makes later work of a stream wait for what is on another one now."""
        driver.order_streams(producer or 1, stream or 1)

    @abstractmethod
    def address(self, storage: Any) -> int:
        """Returns the address of a storage."""

    @abstractmethod
    def create(self, place: str, size: int, dtype: str) -> Any:
        """Returns a storage of `size` elements in memory of a library."""

    @abstractmethod
    def view(
        self, place: str, storage: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> Any:
        """Returns an array in a storage of a library; strides and offset are in elements."""

    @abstractmethod
    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """Context manager in which a stream of `streams` is the current one of all libraries; None for the default."""

    @abstractmethod
    def capture(self, stream: Any, work: Work) -> tuple[Any, Any]:
        """Captures what `work` launches on its stream, which is current; returns the graph and the result."""

    @abstractmethod
    def launch(self, graph: Any, stream: Any) -> None:
        """Launches a graph on a stream."""

    @abstractmethod
    def delay(self, stream: int) -> None:
        """Keeps a stream busy for some time."""

    @abstractmethod
    def reuse(self, sizes: Sequence[int]) -> None:
        """Writes NaN to new arrays of these sizes (bytes) on the libraries' default streams."""

    def faults(self) -> list[str]:
        """Returns what is wrong so far beside results."""
        return []

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Starts a sequence."""

    @abstractmethod
    def end(self) -> list[str]:
        """Ends a sequence, whose arrays are gone; returns what is wrong beside results."""

    def expect_clean(self) -> list[str]:
        """Returns operands that are kept although nothing is running."""
        lifetimes.release()
        return [f"{len(lifetimes.kept)} calls' operands are kept"] if lifetimes.kept else []


def _cupy() -> Any:
    """Returns the module cupy; None without it, or if it has no bfloat16."""
    if importlib.util.find_spec("cupy") is None:
        return None
    cupy = importlib.import_module("cupy")
    try:
        cupy.empty(1, dtype=numpy_dtype("bfloat16"))
    except (TypeError, ValueError):
        return None
    return cupy


class GpuHost(Host):
    """A GPU with torch, and with CuPy where it is installed."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        import torch

        self._torch: Any = torch
        self._cupy = _cupy()
        self.kernels = kernels
        self.places = (NUMPY, TORCH, *((CUPY,) if self._cupy else ()), FOREIGN, DEVICE)
        self.captured = (TORCH,)  # its graphs have a pool of their own for the results
        torch.zeros(1, device="cuda")
        self._pool = [torch.cuda.Stream() for _ in range(STREAMS)]
        self.streams = []
        self._allocated: dict[int, int] = {}
        self._watch()

    def _watch(self) -> None:
        """Counts the arrays that cuMemAlloc gave and cuMemFree has not taken back."""
        allocate, free = driver.allocate_now, driver.free_now

        def allocated(size: int, purpose: str) -> int:
            address = allocate(size, purpose)
            self._allocated[address] = size
            return address

        def freed(address: int) -> None:
            self._allocated.pop(address, None)
            free(address)

        driver.allocate_now, driver.free_now = allocated, freed

    def address(self, storage: Any) -> int:
        if isinstance(storage, Storage):
            return storage.address
        if isinstance(storage, DeviceArray):
            return storage.pointer
        return int(storage.data.ptr if hasattr(storage.data, "ptr") else storage.data_ptr())

    def create(self, place: str, size: int, dtype: str) -> Any:
        if place == TORCH:
            return self._torch.empty(size, dtype=getattr(self._torch, dtype), device="cuda")
        return self._cupy.empty(size, dtype=numpy_dtype(dtype))

    def view(
        self, place: str, storage: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> Any:
        if place == TORCH:
            return self._torch.as_strided(storage, shape, strides, offset)
        kind = numpy_dtype(dtype)
        steps = [stride * kind.itemsize for stride in strides]
        return self._cupy.ndarray(shape, kind, storage.data + offset * kind.itemsize, steps)

    @contextlib.contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._torch.cuda.stream(stream))
            if self._cupy is not None:
                stack.enter_context(frameworks.CUPY.use_stream(stream.cuda_stream, 0))
            yield

    def capture(self, stream: Any, work: Work) -> tuple[Any, Any]:
        graph = self._torch.cuda.CUDAGraph()
        with self.current(stream), self._torch.cuda.graph(graph, stream=stream):
            found = work()
        return graph, found

    def launch(self, graph: Any, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            graph.replay()

    def delay(self, stream: int) -> None:
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream)):
            self._torch.cuda._sleep(1_000_000)

    def reuse(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            for _ in range(2):
                self._torch.full((size,), FILLER, dtype=self._torch.uint8, device="cuda")
                if self._cupy is not None:
                    self._cupy.full((size,), FILLER, dtype=np.uint8)

    def begin(self, seed: int) -> None:
        self.streams = list(self._pool)

    def end(self) -> list[str]:
        self.synchronise()
        found = self.expect_clean()
        gc.collect()
        gc.freeze()  # what is alive now stays: the next collection reads new objects alone
        DeviceArray((0,), "float32", 0, 0)  # repeats the frees that a capture forbade
        if self._allocated:
            found.append(f"{sum(self._allocated.values())} bytes of arrays are left on the GPU")
            self._allocated.clear()
        return found


FILLER: Final = 0xFF  # NaN in every float type
