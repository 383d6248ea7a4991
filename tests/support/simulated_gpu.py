"""Simulated GPU: streams that run late and in any order that they allow, over the fake driver.

The fake driver hands every operation of a stream to a `SimulatedGpu`, which queues it. Nothing runs before somebody
waits for it; then operations of other streams may run before or after it, as a seed decides. Kernels compute with the
NumPy reference from the memory and the struct that they were launched with (simulated_kernels.py). So a wrong stream, a
missing wait, an operand that died too early or a workspace in use elsewhere gives wrong results, as on a GPU.

Freed memory is filled with ones, which are NaN in every float type, and stays mapped until `close`. `faults` lists what
no GPU would report: accesses outside of live memory, workspaces that two launches share, maps of another address.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import entry_parameters
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.runtime import binding
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.runtime.params import KernelParams
from tests.support import simulated_kernels
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact

Array = npt.NDArray[Any]

NOT_READY: Final = 600
LEGACY: Final = (0, 1)  # handles of the legacy default stream
FREED: Final = 0xFF
USED: Final = 0xAB  # what a launch leaves in its workspace
TOKEN_BYTES: Final = 8

_free: Final = ctypes.CDLL(None).free
_free.argtypes = [ctypes.c_void_p]


@dataclass(eq=False, slots=True)
class Operation:
    """Work of a stream. after: operations that must be done before."""

    stream: int
    run: Callable[[], None]
    after: list[Operation]
    is_done: bool = False


@dataclass(eq=False, slots=True)
class Allocation:
    """Device memory. keep: the object that has the memory; None for memory of the driver."""

    address: int
    size: int
    purpose: str
    keep: Any = None
    is_live: bool = True
    is_released: bool = False  # whether its free has been submitted

    def fill(self, byte: int) -> None:
        """Sets all bytes."""
        ctypes.memset(self.address, byte, self.size)


class Memory:
    """The allocations, live and freed ones."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}

    def add(self, address: int, size: int, purpose: str, keep: Any = None) -> Allocation:
        """Adds memory."""
        found = self._allocations[address] = Allocation(address, size, purpose, keep)
        return found

    def at(self, address: int) -> Allocation | None:
        """Returns the memory that starts at an address."""
        return self._allocations.get(address)

    @property
    def live(self) -> list[Allocation]:
        """The allocations whose free has not been submitted."""
        return [each for each in self._allocations.values() if not each.is_released]

    def check(self, name: str, first: int, size: int) -> None:
        """Raises ValueError unless all these bytes are in one live allocation."""
        for each in self._allocations.values():
            if each.address <= first and first + size <= each.address + each.size:
                if not each.is_live:
                    raise ValueError(f"{name}: {size} bytes at {first:#x} are in freed memory ({each.purpose})")
                return
        raise ValueError(f"{name}: {size} bytes at {first:#x} are in no memory")

    def view(self, name: str, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Array:
        """Returns a strided array in device memory; strides are in elements. ValueError outside of live memory."""
        kind = numpy_dtype(dtype)
        if 0 in shape:
            return np.zeros(shape, kind)
        steps = [(size - 1) * stride * kind.itemsize for size, stride in zip(shape, strides, strict=True)]
        low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + kind.itemsize
        self.check(name, address + low, high - low)
        whole = np.frombuffer((ctypes.c_ubyte * (high - low)).from_address(address + low), np.uint8)
        start = whole[-low : -low + kind.itemsize].view(kind)
        return np.lib.stride_tricks.as_strided(start, shape, [stride * kind.itemsize for stride in strides])

    def close(self) -> None:
        """Frees what the driver allocated."""
        for each in self._allocations.values():
            if each.keep is None:
                _free(each.address)
        self._allocations.clear()


class Catalogue:
    """The kernels and plans of a process. `kernels` is what a call takes as its option kernels."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Build, str]] = {}
        self._artifacts: dict[Build, Artifact] = {}
        self._plans: dict[str, list[Plan]] = {}
        self.builds: list[Build] = []

    def kernels(self, build: Build) -> Artifact:
        """Returns an artifact for the fake driver."""
        if build not in self._artifacts:
            self._artifacts[build] = artifact(build)
            self.builds.append(build)
            for role, symbol in entry_points.entries(build).items():
                self._entries[symbol] = build, role
        return self._artifacts[build]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager in which every plan that is bound is remembered."""

        def create(plan: Plan, problem: Problem | None) -> KernelParams:
            plans = self._plans.setdefault(plan.symbol, [])
            if plan not in plans:
                plans.append(plan)
            return KernelParams(plan, problem)

        with mock.patch.object(binding, "KernelParams", create):
            yield

    def launch(self, symbol: str, parameters: bytes) -> Launched:
        """Returns a launch with its build and plan; ValueError if no bound plan has such a launch."""
        build, role = self._entries[symbol]
        dtype = abi.numpy_struct(abi.fields_of(build))
        record = np.frombuffer(parameters[-dtype.itemsize :], dtype)[0]
        struct = {name: record[name].item() for name in dtype.names or ()}
        plans = [
            plan
            for plan in self._plans.get(build.symbol, ())
            if plan.build == build
            and symbol in [each.symbol for each in plan.launches]
            and all(struct.get(name, value) == value for name, value in plan.params)
        ]
        if not plans:
            raise ValueError(f"{symbol}: the parameters are those of no plan")
        maps = kernel_of(build).tensor_maps(build) if entry_parameters.has_tensor_maps(build, role) else ()
        addresses = np.frombuffer(parameters[: len(maps) * abi.TENSOR_MAP_BYTES], np.uint64)
        starts = addresses[:: abi.TENSOR_MAP_BYTES // 8].tolist()
        fields = [entry_points.mapped_field(name) for name in maps]
        return Launched(symbol, build, plans[-1], struct, dict(zip(fields, starts, strict=True)))


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel with the struct that it was launched with. maps: address in each tensor map by its struct field."""

    symbol: str
    build: Build
    plan: Plan
    struct: dict[str, Any]
    maps: dict[str, int]

    @property
    def number(self) -> int:
        """Which of the plan's launches it is; the last one with its symbol."""
        return max(number for number, each in enumerate(self.plan.launches) if each.symbol == self.symbol)

    @property
    def is_last(self) -> bool:
        """Whether it is the plan's last launch."""
        return self.number == len(self.plan.launches) - 1

    @property
    def workspace(self) -> int:
        """The address of its workspace; 0 for none."""
        buffers = self.plan.workspace.buffers
        return self.struct[buffers[0].name] - buffers[0].offset if buffers else 0


@dataclass
class SimulatedGpu:
    """The streams and memory of one program; a context manager while which it has the work of the fake driver.

    launches: kernels that were launched, also those that have not run.
    """

    fake: FakeDriver
    catalogue: Catalogue
    random: Random
    memory: Memory = field(default_factory=Memory)
    faults: list[str] = field(default_factory=list)
    launches: int = 0
    _pending: list[Operation] = field(default_factory=list)
    _last: dict[int, Operation] = field(default_factory=dict)
    _events: dict[int, Operation | None] = field(default_factory=dict)
    _captured: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    _graphs: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    _tokens: dict[int, tuple[str, int]] = field(
        default_factory=dict
    )  # symbol and launches so far of a workspace's plan
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __enter__(self) -> SimulatedGpu:
        self._handlers: dict[bytes, tuple[int, Callable[..., int | None]]] = {
            b"cuMemAlloc": (2, self._allocate_now),
            b"cuMemAllocAsync": (3, self._allocate),
            b"cuMemFree": (1, self._free_now),
            b"cuMemFreeAsync": (2, self._release),
            b"cuMemcpyHtoDAsync": (4, self._copy_to_device),
            b"cuMemcpyDtoHAsync": (4, self._copy_to_host),
            b"cuMemsetD8Async": (4, self._set_bytes),
            b"cuMemsetD2D8Async": (6, self._set_rows),
            b"cuMemsetD2D32Async": (6, self._set_words),
            b"cuEventRecord": (2, self._record),
            b"cuEventQuery": (1, self._query),
            b"cuEventDestroy": (1, self._destroy),
            b"cuStreamWaitEvent": (2, self._wait),
            b"cuStreamSynchronize": (1, self._synchronise),
            b"cuCtxSynchronize": (1, lambda _: self.finish()),
            b"cuStreamBeginCapture": (1, self._begin_capture),
            b"cuStreamEndCapture": (2, self._end_capture),
            b"cuGraphLaunch": (2, self._launch_graph),
        }
        self.fake.take(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self.fake.take(None)
        self.memory.close()

    def submit(self, stream: int, run: Callable[[], None], after: Sequence[Operation | None] = ()) -> Operation | None:
        """Queues work of a stream, or adds it to the graph that the stream captures."""
        with self._lock:
            stream = 0 if stream in LEGACY else stream
            if stream in self._captured:
                self._captured[stream].append(run)
                return None
            before = [each for each in (self._last.get(stream), *after) if each is not None and not each.is_done]
            operation = self._last[stream] = Operation(stream, run, before)
            self._pending.append(operation)
            return operation

    def is_captured(self, stream: int) -> bool:
        """Returns whether a graph captures the stream."""
        return stream in self._captured

    def tail(self, stream: int) -> Operation | None:
        """Returns the last operation of a stream."""
        return self._last.get(0 if stream in LEGACY else stream)

    def release_storage(self, allocation: Allocation, stream: int, others: Sequence[int]) -> None:
        """Frees an array library's memory as its caching allocator does: another array of `stream` may get it at once,
        as soon as the work that is on streams `others` now is done."""
        with self._lock:
            allocation.is_released = True
            others = [other for other in others if other not in self._captured]
            after = [self.tail(stream), *(self.tail(other) for other in others)]
            self._free_behind(allocation, -allocation.address, after)

    def finish(self) -> None:
        """Runs everything."""
        self._drain(None)

    # The rest runs operations.

    def _drain(self, targets: Sequence[Operation] | None) -> None:
        """Runs the targets, None for all operations, and what must run before them; others by chance."""
        with self._lock:
            rank: dict[int, float] = {}
            wanted = set(self._pending) if targets is None else _with_earlier(targets)
            is_eager, is_mixed = targets is None or self.random.random() < 0.5, self.random.random() < 0.5
            while any(not each.is_done for each in wanted):
                ready = [
                    each
                    for each in self._pending
                    if (is_eager or each in wanted) and all(before.is_done for before in each.after)
                ]
                if is_mixed:  # kernels of several streams alternate; otherwise one stream is ahead of another
                    rank.clear()
                chosen = max(ready, key=lambda each: rank.setdefault(each.stream, self.random.random()))
                self._pending.remove(chosen)
                try:
                    chosen.run()
                except Exception as error:  # of any kind: a GPU would compute something wrong
                    self.faults.append(f"{type(error).__name__}: {error}")
                chosen.is_done = True
                chosen.after.clear()

    def _take(self, name: bytes, text: bytes, numbers: int, data: int, count: int) -> int:
        try:
            if name == b"cuLaunchKernelEx":
                stream = (ctypes.c_uint64 * 8).from_address(numbers)[7]
                parameters, symbol = ctypes.string_at(data, count), text.decode()
                self.launches += 1
                self.submit(stream, lambda: self._run(symbol, parameters))
                return 0
            if name not in self._handlers:
                return -1
            arity, handler = self._handlers[name]
            with self._lock:
                code = handler(*(ctypes.c_uint64 * arity).from_address(numbers))
            return 0 if code is None else code
        except Exception as error:  # nothing may leave a callback
            self.faults.append(f"{name.decode()}: {type(error).__name__}: {error}")
            return 0

    def _run(self, symbol: str, parameters: bytes) -> None:
        """Runs a kernel: the last launch of a plan computes, and each checks the workspace."""
        launched = self.catalogue.launch(symbol, parameters)
        for name, address in launched.maps.items():
            if address != launched.struct[name]:
                raise ValueError(f"{symbol}: the map of {name} is of {address:#x}, not {launched.struct[name]:#x}")
        workspace, plan = launched.workspace, launched.plan
        if workspace:
            self._check_workspace(launched)
        if launched.is_last:
            simulated_kernels.run(launched.build, launched.struct, self.memory.view)
            if workspace:
                ctypes.memset(workspace, USED, plan.workspace.bytes)

    def _check_workspace(self, launched: Launched) -> None:
        """Checks that the workspace is live, cleared at the plan's first launch, and no other call's until its last."""
        plan, address = launched.plan, launched.workspace
        self.memory.check(f"workspace of {launched.symbol}", address, plan.workspace.bytes)
        place = ctypes.c_uint64.from_address(address + plan.workspace.bytes - TOKEN_BYTES)
        is_first = launched.symbol == plan.launches[0].symbol
        if is_first and any(ctypes.string_at(address, plan.workspace.zero_bytes)):
            raise ValueError(f"{launched.symbol}: the workspace is not cleared")
        if is_first:
            place.value = token = len(self._tokens) + 1
            self._tokens[token] = plan.symbol, launched.number
        elif self._tokens.get(place.value) not in ((plan.symbol, n) for n in range(launched.number + 1)):
            raise ValueError(f"{launched.symbol}: another call uses the workspace")
        else:
            self._tokens[place.value] = plan.symbol, launched.number

    def _allocate_now(self, address: int, size: int) -> None:
        self.memory.add(address, size, "cuMemAlloc")

    def _allocate(self, address: int, size: int, stream: int) -> None:
        allocation = self.memory.add(address, size, "cuMemAllocAsync")

        def revive() -> None:
            allocation.is_live = True

        if self.is_captured(stream):
            self.submit(stream, revive)

    def _free_now(self, address: int) -> None:
        allocation = self._released(address)
        self._free_behind(allocation, -allocation.address, self._pending)

    def _release(self, address: int, stream: int) -> None:
        self._free_behind(self._released(address), stream, ())

    def _released(self, address: int) -> Allocation:
        allocation = self.memory.at(address)
        if allocation is None or allocation.is_released:
            raise ValueError(f"{address:#x} is freed twice, or was never allocated")
        allocation.is_released = True
        return allocation

    def _free_behind(self, allocation: Allocation, stream: int, after: Sequence[Operation | None]) -> None:
        def free() -> None:
            allocation.is_live = False
            allocation.fill(FREED)

        self.submit(stream, free, after)

    def _copy_to_device(self, device: int, host: int, size: int, stream: int) -> None:
        self.submit(stream, lambda: self._move(device, host, size, device))

    def _copy_to_host(self, host: int, device: int, size: int, stream: int) -> None:
        self.submit(stream, lambda: self._move(host, device, size, device))

    def _move(self, target: int, source: int, size: int, device: int) -> None:
        self.memory.check("a copy", device, size)
        ctypes.memmove(target, source, size)

    def _set_bytes(self, address: int, byte: int, size: int, stream: int) -> None:
        self._set_rows(address, size, byte, size, 1, stream)

    def _set_rows(self, address: int, pitch: int, byte: int, width: int, height: int, stream: int) -> None:
        def clear() -> None:
            for row in range(height):
                self.memory.check("a memset", address + row * pitch, width)
                ctypes.memset(address + row * pitch, byte, width)

        self.submit(stream, clear)

    def _set_words(self, address: int, pitch: int, word: int, width: int, height: int, stream: int) -> None:
        def fill() -> None:
            shape, strides = (height, width), (pitch // 4, 1)
            self.memory.view("a memset", address, shape, strides, "int32").view(np.uint32)[...] = word

        self.submit(stream, fill)

    def _record(self, event: int, stream: int) -> None:
        self._events[event] = self.tail(stream)

    def _query(self, event: int) -> int:
        operation = self._events.get(event)
        if operation is not None and not operation.is_done and self.random.random() < 0.5:
            self._drain([operation])
        return 0 if operation is None or operation.is_done else NOT_READY

    def _destroy(self, event: int) -> int:
        self._events.pop(event, None)
        return -1

    def _wait(self, stream: int, event: int) -> None:
        self.submit(stream, lambda: None, [self._events.get(event)])

    def _synchronise(self, stream: int) -> None:
        operation = self.tail(stream)
        self._drain([] if operation is None else [operation])

    def _begin_capture(self, stream: int) -> int:
        self._captured[stream] = []
        return -1

    def _end_capture(self, stream: int, graph: int) -> None:
        self._graphs[graph] = self._captured.pop(stream)

    def _launch_graph(self, graph: int, stream: int) -> int | None:
        if graph not in self._graphs:
            return -1
        for run in self._graphs[graph]:
            self.submit(stream, run)
        return None


def _with_earlier(targets: Sequence[Operation]) -> set[Operation]:
    """Returns operations with all that must run before them."""
    found: set[Operation] = set()
    left = list(targets)
    while left:
        each = left.pop()
        if each not in found and not each.is_done:
            found.add(each)
            left += each.after
    return found


def storage(gpu: SimulatedGpu, size: int, purpose: str) -> Allocation:
    """Returns memory of an array library, 256-byte aligned and filled with ones."""
    raw = np.full(max(size, 1) + 256, FREED, np.uint8)
    start = -raw.ctypes.data % 256
    return gpu.memory.add(raw.ctypes.data + start, max(size, 1), purpose, raw)
