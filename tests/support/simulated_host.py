"""Simulated host: the machine of tools/lab/race/sequence_machine.py on a simulated GPU, torch and CuPy."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from cutlass_py_attn.api import calls
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray
from tests.support.fake_driver import FakeDriver
from tests.support.fake_libraries import Stream
from tests.support.simulated_gpu import Catalogue, SimulatedGpu
from tests.support.simulated_libraries import Libraries, Storage, Tensor, ndarray
from tools.lab.race.sequence_hosts import CUPY, DEVICE, FOREIGN, NUMPY, STREAMS, TORCH, Host, Work

CONTEXT = 0xC0  # of the fake driver's first GPU


def clear_caches() -> None:
    """Forgets every call and every bound kernel."""
    for cache in (calls._repeated, calls._prepared):
        cache.clear()


class SimulatedHost(Host):
    """A simulated GPU; each sequence has a new one."""

    def __init__(self, fake: FakeDriver) -> None:
        super().__init__()
        self._fake = fake
        self._catalogue = Catalogue()
        self.kernels = self._catalogue.kernels
        self.places = (NUMPY, TORCH, CUPY, FOREIGN, DEVICE)
        self.captured = (TORCH, CUPY)
        self.streams = []
        self._stack = contextlib.ExitStack()
        clear_caches()

    @property
    def builds(self) -> list[Any]:
        """Every kernel that was asked for."""
        return self._catalogue.builds

    @property
    def launches(self) -> int:
        return self._gpu.launches

    def address(self, storage: Any) -> int:
        if isinstance(storage, DeviceArray):
            return storage.pointer
        found: int = storage.allocation.address if isinstance(storage, Storage) else storage.address
        return found

    def create(self, place: str, size: int, dtype: str) -> Storage:
        found: Storage = self._libraries.empty(place, (size,), dtype).held
        return found

    def view(
        self, place: str, storage: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> Any:
        return {TORCH: Tensor, CUPY: ndarray}[place](storage, shape, strides, offset, dtype)

    @contextlib.contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        handle = 0 if stream is None else stream.cuda_stream
        with self._libraries.on(TORCH, handle), self._libraries.on(CUPY, handle):
            yield

    def capture(self, stream: Any, work: Work) -> tuple[Any, Any]:
        mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        with self.current(stream):
            driver.call("cuStreamBeginCapture", stream.cuda_stream, mode)
            found = work()
        graph = driver.call("cuStreamEndCapture", stream.cuda_stream)
        return driver.call("cuGraphInstantiate", graph, 0), found

    def launch(self, graph: Any, stream: Any) -> None:
        driver.call("cuGraphLaunch", graph, stream.cuda_stream)

    def delay(self, stream: int) -> None:
        """Nothing: every stream is late."""

    def reuse(self, sizes: Sequence[int]) -> None:
        """Nothing: a dead array's memory is overwritten."""

    def faults(self) -> list[str]:
        return self._gpu.faults

    def begin(self, seed: int) -> None:
        self._fake.clear_context()
        self._fake.clear()
        self._stack = contextlib.ExitStack()
        self._gpu = self._stack.enter_context(SimulatedGpu(self._fake, self._catalogue, Random(seed)))
        self._libraries = Libraries(self._gpu)
        self._stack.enter_context(self._libraries.installed())
        self._stack.enter_context(self._catalogue.recorded())
        driver.call("cuCtxSetCurrent", CONTEXT)
        self.streams = [Stream(driver.create_stream()) for _ in range(STREAMS)]

    def end(self) -> list[str]:
        self.synchronise()
        found = self.expect_clean()
        gc.collect()
        self.synchronise()
        found = [*self._gpu.faults, *found]
        found += [f"{each.purpose}: {each.size} bytes are left" for each in self._gpu.memory.live]
        created, destroyed = (len(self._fake.of(f"cuEvent{verb}")) for verb in ("Create", "Destroy"))
        if created != destroyed:
            found.append(f"{created} events created, {destroyed} destroyed")
        if int(driver.call("cuCtxGetCurrent")) != CONTEXT:
            found.append("another context is current")
        for stream in self.streams:
            driver.destroy_stream(stream.cuda_stream)
        self._stack.close()
        gc.freeze()  # what is alive now stays: the next collection reads new objects alone
        return found
