"""Replay: the kernels of a plan as one CUDA graph for one stream, whose nodes get new parameters when these change.

To launch one graph, new parameters and all, costs the host less than to launch its kernels one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cutlass_py_attn import driver
from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.packing import Packing
from cutlass_py_attn.plan import Launch, Plan
from cutlass_py_attn.prepared import prepared
from cutlass_py_attn.starter import Starter

_FROM_THE_START: Final = (("first_head", 0), ("first_batch", 0))
_NO_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_PER_CONTEXT: Final = 2  # handles up to this one are default streams: those of the current context


class Replay:
    """A memset of the workspace, where the plan has one, and the kernels, one after the other, on `stream`.

    What was launched keeps the parameters that it was launched with. To be made with the device's context current,
    and used by one thread at a time.

    packing, starters: the kernels, and their parameters, which nobody else packs.
    """

    def __init__(self, plan: Plan, packing: Packing, starters: Sequence[Starter], stream: int, workspace: int) -> None:
        self.has_failed = False
        self._symbol = plan.symbol
        self._packing = packing
        self._context = driver.call("cuCtxGetCurrent")
        graph = driver.call("cuGraphCreate", 0)
        weakref.finalize(self, _destroy, "cuGraphDestroy", graph).atexit = False
        zero_bytes = plan.workspace.zero_bytes
        self._clear = _Clear(graph, self._context, workspace, zero_bytes) if zero_bytes else None
        last = [] if self._clear is None else [self._clear.node]
        self._nodes = []  # with the memory that the updates read
        for starter in starters:
            self._nodes.append(starter.add_to(graph, last))
            last = [self._nodes[-1].handle]
        self._graph = driver.call("cuGraphInstantiate", graph, 0)
        weakref.finalize(self, _destroy, "cuGraphExecDestroy", self._graph).atexit = False

        self._addresses: tuple[int, ...] = ()  # that the nodes have
        self._workspace: int | None = None
        self._updates = tuple(
            update
            for launch, node in zip(plan.launches, self._nodes, strict=True)
            for update in (*writers(plan, packing, launch), node.updater(self._graph))
        )
        self._launch = prepared("cuGraphLaunch", int(self._graph), stream)
        self._status, self._current = ctypes.c_int(), ctypes.c_void_p()
        self._ask_status = prepared("cuStreamIsCapturing", stream, ctypes.addressof(self._status))
        self._ask_current = prepared("cuCtxGetCurrent", ctypes.addressof(self._current))
        self._is_default = stream <= _PER_CONTEXT

    def __call__(self, addresses: tuple[int, ...], workspace: int) -> bool:
        """Put the kernels on the stream; False where this takes another way, or an address is unfit.

        A graph cannot be launched into another that captures the stream.
        """
        if self._ask_status() or self._status.value or (self._is_default and self._is_elsewhere()):
            return False
        if addresses != self._addresses or workspace != self._workspace:
            self._addresses = ()
            if workspace != self._workspace:
                if not self._move(addresses, workspace):
                    return False
            elif not self._packing.write(addresses) and not self._packing.pack(addresses, workspace):
                return False
            for update in self._updates:
                if code := update():
                    return self._failed("cuGraphExecKernelNodeSetParams", code)
            self._addresses = addresses
        code = self._launch()
        return not code or self._failed("cuGraphLaunch", code)

    def _is_elsewhere(self) -> bool:
        return bool(self._ask_current()) or self._current.value != int(self._context)

    def _move(self, addresses: tuple[int, ...], workspace: int) -> bool:
        if not self._packing.pack(addresses, workspace):
            return False
        if self._clear is not None:
            self._clear.move(self._graph, workspace)
        self._workspace = workspace
        return True

    def _failed(self, name: str, code: int) -> bool:
        """False where only a context is wanting."""
        if code == _NO_CONTEXT:
            return False
        self.has_failed = True
        raise driver.failure(name, (self._graph,), code, self._symbol)


def writers(plan: Plan, packing: Packing, launch: Launch) -> tuple[Callable[[], None], ...]:
    """What is to be done before the parameters of this launch are read, where launches have numbers of their own."""
    if not any(each.sizes for each in plan.launches):
        return ()
    return (partial(packing.write_sizes, launch.sizes or _FROM_THE_START),)


class _Clear:
    """A node that sets the start of the workspace to zero."""

    def __init__(self, graph: Any, context: Any, workspace: int, size: int) -> None:
        self._given = driver.bindings().CUDA_MEMSET_NODE_PARAMS()
        self._given.elementSize, self._given.width, self._given.height = 1, size, 1
        self._given.dst = workspace
        self._context = context
        self.node = driver.call("cuGraphAddMemsetNode", graph, [], 0, self._given, self._context)

    def move(self, graph: Any, workspace: int) -> None:
        """Let the executable form of the graph clear this workspace."""
        self._given.dst = workspace
        driver.call("cuGraphExecMemsetNodeSetParams", graph, self.node, self._given, self._context)


def _destroy(name: str, handle: Any) -> None:
    """Whatever of it is on a stream still runs to its end."""
    with contextlib.suppress(DriverError):
        driver.call(name, handle)
