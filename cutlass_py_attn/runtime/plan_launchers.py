"""Launchers: launch the kernels of one plan on one stream, again and again with other addresses, at low host cost.

StreamLauncher launches kernel by kernel. GraphLauncher launches one CUDA graph of all kernels and updates the
parameters of its nodes. With two kernels or more, the graph costs less host time.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cutlass_py_attn.errors import DriverError
from cutlass_py_attn.plan.plan import Launch, Plan
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.driver_calls import bound_driver_call
from cutlass_py_attn.runtime.kernel_launch import KernelLaunch
from cutlass_py_attn.runtime.params import KernelParams

MIN_GRAPH_LAUNCHES: Final = 2  # kernels of a plan that is launched as a graph; the memset does not count

_NO_OVERRIDES: Final = (("first_head", 0), ("first_batch", 0))
_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_LAST_DEFAULT_STREAM: Final = 2  # handles 0 to 2 are default streams, which belong to the current context

Step = Callable[[], int | None]  # a driver call that returns a CUresult, or a write to host memory


class Launcher(ABC):
    """Launches a plan's kernels on `stream`: an optional workspace memset, then each kernel in order.

    A launch keeps the parameters that it was issued with when the next call writes new ones. Create a launcher with
    the context of `gpu` current; use it in one thread at a time.

    params: the kernels' parameters; no other launcher may write them.
    """

    _updates: tuple[Step, ...] = ()  # run when the parameters have changed
    _steps: tuple[Step, ...] = ()  # run by every launch
    _query_capture: Step | None = None  # writes the capture status of the stream to _capture_status

    def __init__(self, plan: Plan, params: KernelParams, gpu: driver.Device, stream: int) -> None:
        self.has_failed = False
        self._symbol = plan.symbol
        self._params = params
        self._addresses: tuple[int, ...] = ()  # addresses in the parameters; empty while they are being changed
        self._workspace: int | None = None
        self._context = gpu.context
        self._current_context, self._capture_status = ctypes.c_void_p(), ctypes.c_int()
        self._query_context = bound_driver_call("cuCtxGetCurrent", ctypes.addressof(self._current_context))
        self._needs_context = stream <= _LAST_DEFAULT_STREAM

    def __call__(self, addresses: tuple[int, ...], workspace: int) -> bool:
        """Launches the kernels. Returns False, without a launch, if the caller must use another way.

        The reasons are: another context is current, the stream is captured, or an address is invalid.
        """
        if self._needs_context and (self._query_context() or self._current_context.value != self._context):
            return False
        if self._query_capture is not None and (self._query_capture() or self._capture_status.value):
            return False
        if addresses != self._addresses or workspace != self._workspace:
            self._addresses = ()
            if workspace != self._workspace:
                if not self._params.write(addresses, workspace):
                    return False
                self._set_workspace(workspace)
                self._workspace = workspace
            elif not self._params.write_addresses(addresses) and not self._params.write(addresses, workspace):
                return False
            for update in self._updates:
                if code := update():
                    return self._fail(update, code)
            self._addresses = addresses
        for step in self._steps:
            if code := step():
                return self._fail(step, code)
        return True

    @abstractmethod
    def _set_workspace(self, workspace: int) -> None:
        """Makes the following launches clear the workspace at this address."""

    def _fail(self, step: Any, code: int) -> bool:
        """Raises DriverError, or returns False if only a current context is missing."""
        if code == _INVALID_CONTEXT:
            return False
        self.has_failed = True
        raise driver.failure(step.func.__name__, (), code, self._symbol)


class StreamLauncher(Launcher):
    """Launches kernel by kernel. If the stream is captured, the capture records the kernels."""

    def __init__(
        self, plan: Plan, params: KernelParams, launches: Sequence[KernelLaunch], gpu: driver.Device, stream: int
    ) -> None:
        super().__init__(plan, params, gpu, stream)
        self._stream = stream
        self._zero_bytes = plan.workspace.zero_bytes
        self._kernel_launches = launches  # keeps the memory that the driver reads
        self._launch_steps = tuple(
            step
            for launch, kernel_launch in zip(plan.launches, launches, strict=True)
            for step in (*override_writers(plan, params, launch), kernel_launch.bind_stream(stream))
        )

    def _set_workspace(self, workspace: int) -> None:
        self._steps = self._launch_steps
        if self._zero_bytes:
            memset = bound_driver_call("cuMemsetD8Async", workspace, 0, self._zero_bytes, self._stream)
            self._steps = (memset, *self._launch_steps)


class GraphLauncher(Launcher):
    """Launches the kernels as one CUDA graph. It refuses a captured stream, which cannot launch a graph.

    The driver crashes when a thread without a context updates a graph, so every call needs the graph's context.
    """

    def __init__(
        self,
        plan: Plan,
        params: KernelParams,
        launches: Sequence[KernelLaunch],
        gpu: driver.Device,
        stream: int,
        workspace: int,
    ) -> None:
        super().__init__(plan, params, gpu, stream)
        self._needs_context = True
        graph = driver.call("cuGraphCreate", 0)
        weakref.finalize(self, _destroy, gpu, "cuGraphDestroy", graph).atexit = False
        zero_bytes = plan.workspace.zero_bytes
        self._memset = _MemsetNode(graph, self._context, workspace, zero_bytes) if zero_bytes else None
        dependencies = [] if self._memset is None else [self._memset.handle]
        self._nodes = []  # keeps the memory that the driver reads
        for kernel_launch in launches:
            self._nodes.append(kernel_launch.add_to_graph(graph, dependencies))
            dependencies = [self._nodes[-1].handle]
        self._graph_exec = driver.call("cuGraphInstantiate", graph, 0)
        weakref.finalize(self, _destroy, gpu, "cuGraphExecDestroy", self._graph_exec).atexit = False
        self._updates = tuple(
            step
            for launch, node in zip(plan.launches, self._nodes, strict=True)
            for step in (*override_writers(plan, params, launch), node.bind_update(self._graph_exec))
        )
        self._steps = (bound_driver_call("cuGraphLaunch", int(self._graph_exec), stream),)
        self._query_capture = bound_driver_call("cuStreamIsCapturing", stream, ctypes.addressof(self._capture_status))

    def _set_workspace(self, workspace: int) -> None:
        if self._memset is not None:
            self._memset.set_address(self._graph_exec, workspace)


class _MemsetNode:
    """A graph node that sets the first `size` bytes of the workspace to zero. handle: CUgraphNode."""

    def __init__(self, graph: Any, context: int, workspace: int, size: int) -> None:
        cuda = driver.bindings()
        self._node_params = cuda.CUDA_MEMSET_NODE_PARAMS()
        self._node_params.elementSize, self._node_params.width, self._node_params.height = 1, size, 1
        self._node_params.dst = workspace
        self._context = cuda.CUcontext(context)
        self.handle = driver.call("cuGraphAddMemsetNode", graph, [], 0, self._node_params, self._context)

    def set_address(self, graph_exec: Any, workspace: int) -> None:
        """Makes `graph_exec` clear this workspace."""
        self._node_params.dst = workspace
        driver.call("cuGraphExecMemsetNodeSetParams", graph_exec, self.handle, self._node_params, self._context)


def override_writers(plan: Plan, params: KernelParams, launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that write the launch's own parameter values; none if all launches share every value."""
    if not any(each.param_overrides for each in plan.launches):
        return ()
    return (partial(params.write_overrides, launch.param_overrides or _NO_OVERRIDES),)


def _destroy(gpu: driver.Device, name: str, handle: Any) -> None:
    """Destroys a graph or its executable form; pending launches still complete. A forked child owns neither."""
    with contextlib.suppress(DriverError, driver.ForkedChild), gpu.current(), driver.relaxed_capture_mode():
        driver.call(name, handle)
