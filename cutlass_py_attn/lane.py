"""Lanes: the kernels of a plan on one stream, launched again and again with other addresses at little cost.

Direct launches one kernel after the other, Graph one CUDA graph of them, whose nodes get the new parameters: with
several kernels that costs the host less.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cutlass_py_attn import driver
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.packing import Packing
from cutlass_py_attn.plan import Launch, Plan
from cutlass_py_attn.prepared import prepared
from cutlass_py_attn.starter import Starter

GRAPH_FROM: Final = 2  # launches of a plan, its memset not counted

_FROM_THE_START: Final = (("first_head", 0), ("first_batch", 0))
_NO_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_PER_CONTEXT: Final = 2  # handles up to this one are default streams: those of the current context

Step = Callable[[], int | None]  # one driver call, which gives a CUresult, or a write to memory


class Lane(ABC):
    """A memset of the workspace, where the plan has one, and the kernels, one after the other, on `stream`.

    What was launched keeps the parameters that it was launched with. To be made with the context of `gpu` current,
    and used by one thread at a time. packing: the kernels' parameters, which nobody else packs.
    """

    _updates: tuple[Step, ...] = ()  # what new parameters need, once they are packed
    _steps: tuple[Step, ...] = ()  # every launch
    _ask_status: Step | None = None  # whether the stream is captured, into _status

    def __init__(self, plan: Plan, packing: Packing, gpu: driver.Device, stream: int) -> None:
        self.has_failed = False
        self._symbol = plan.symbol
        self._packing = packing
        self._addresses: tuple[int, ...] = ()  # that are packed
        self._workspace: int | None = None
        self._context = gpu.context
        self._current, self._status = ctypes.c_void_p(), ctypes.c_int()
        self._ask_current = prepared("cuCtxGetCurrent", ctypes.addressof(self._current))
        self._needs_context = stream <= _PER_CONTEXT

    def __call__(self, addresses: tuple[int, ...], workspace: int) -> bool:
        """Put the kernels on the stream; False where that takes another way, or an address is unfit."""
        if self._needs_context and (self._ask_current() or self._current.value != self._context):
            return False
        if self._ask_status is not None and (self._ask_status() or self._status.value):
            return False
        if addresses != self._addresses or workspace != self._workspace:
            self._addresses = ()
            if workspace != self._workspace:
                if not self._packing.pack(addresses, workspace):
                    return False
                self._move(workspace)
                self._workspace = workspace
            elif not self._packing.write(addresses) and not self._packing.pack(addresses, workspace):
                return False
            for update in self._updates:
                if code := update():
                    return self._failed(update, code)
            self._addresses = addresses
        for step in self._steps:
            if code := step():
                return self._failed(step, code)
        return True

    @abstractmethod
    def _move(self, workspace: int) -> None:
        """Clear this workspace from now on."""

    def _failed(self, step: Any, code: int) -> bool:
        """False where only a context is wanting."""
        if code == _NO_CONTEXT:
            return False
        self.has_failed = True
        raise driver.failure(step.func.__name__, (), code, self._symbol)


class Direct(Lane):
    """The kernels one by one; a stream that is captured records them."""

    def __init__(
        self, plan: Plan, packing: Packing, starters: Sequence[Starter], gpu: driver.Device, stream: int
    ) -> None:
        super().__init__(plan, packing, gpu, stream)
        self._stream = stream
        self._zero_bytes = plan.workspace.zero_bytes
        self._starters = starters  # with the memory that the launches read
        self._launches = tuple(
            step
            for launch, starter in zip(plan.launches, starters, strict=True)
            for step in (*writers(plan, packing, launch), starter.on(stream))
        )

    def _move(self, workspace: int) -> None:
        zero = (prepared("cuMemsetD8Async", workspace, 0, self._zero_bytes, self._stream),) if self._zero_bytes else ()
        self._steps = (*zero, *self._launches)


class Graph(Lane):
    """The kernels as one graph, which cannot be launched while the stream is captured.

    The driver crashes where a graph is changed in a thread without a context: it is only touched under its own.
    """

    def __init__(
        self,
        plan: Plan,
        packing: Packing,
        starters: Sequence[Starter],
        gpu: driver.Device,
        stream: int,
        workspace: int,
    ) -> None:
        super().__init__(plan, packing, gpu, stream)
        self._needs_context = True
        graph = driver.call("cuGraphCreate", 0)
        weakref.finalize(self, _destroy, gpu, "cuGraphDestroy", graph).atexit = False
        zero_bytes = plan.workspace.zero_bytes
        self._clear = _Clear(graph, self._context, workspace, zero_bytes) if zero_bytes else None
        last = [] if self._clear is None else [self._clear.node]
        self._nodes = []  # with the memory that the updates read
        for starter in starters:
            self._nodes.append(starter.add_to(graph, last))
            last = [self._nodes[-1].handle]
        self._graph = driver.call("cuGraphInstantiate", graph, 0)
        weakref.finalize(self, _destroy, gpu, "cuGraphExecDestroy", self._graph).atexit = False
        self._updates = tuple(
            step
            for launch, node in zip(plan.launches, self._nodes, strict=True)
            for step in (*writers(plan, packing, launch), node.updater(self._graph))
        )
        self._steps = (prepared("cuGraphLaunch", int(self._graph), stream),)
        self._ask_status = prepared("cuStreamIsCapturing", stream, ctypes.addressof(self._status))

    def _move(self, workspace: int) -> None:
        if self._clear is not None:
            self._clear.move(self._graph, workspace)


class _Clear:
    """A node that sets the start of the workspace to zero."""

    def __init__(self, graph: Any, context: int, workspace: int, size: int) -> None:
        cuda = driver.bindings()
        self._given = cuda.CUDA_MEMSET_NODE_PARAMS()
        self._given.elementSize, self._given.width, self._given.height = 1, size, 1
        self._given.dst = workspace
        self._context = cuda.CUcontext(context)
        self.node = driver.call("cuGraphAddMemsetNode", graph, [], 0, self._given, self._context)

    def move(self, graph: Any, workspace: int) -> None:
        """Let the executable form of the graph clear this workspace."""
        self._given.dst = workspace
        driver.call("cuGraphExecMemsetNodeSetParams", graph, self.node, self._given, self._context)


def writers(plan: Plan, packing: Packing, launch: Launch) -> tuple[Step, ...]:
    """What is to be done before the parameters of this launch are read, where launches have numbers of their own."""
    if not any(each.sizes for each in plan.launches):
        return ()
    return (partial(packing.write_sizes, launch.sizes or _FROM_THE_START),)


def _destroy(gpu: driver.Device, name: str, handle: Any) -> None:
    """Whatever of it is on a stream still runs to its end."""
    with contextlib.suppress(DriverError), gpu.current():
        driver.call(name, handle)
