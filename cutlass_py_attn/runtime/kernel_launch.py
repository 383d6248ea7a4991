"""One kernel launch with fixed kernel, grid and parameter memory: on a stream, or as a node of a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn.plan.plan import Launch
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.driver_calls import bound_driver_call

_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_PROGRAMMATIC_PORT: Final = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("gridDimX", "gridDimY", "gridDimZ")),
        *((name, ctypes.c_uint32) for name in ("blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(_LaunchAttribute)),
        ("numAttrs", ctypes.c_uint32),
    )


class KernelLaunch:
    """A kernel launch whose C arguments are converted once. A call with a stream launches the kernel.

    kernel: CUfunction handle.
    parameters: address of the array of pointers to the kernel's parameters; each launch reads the parameters.
    """

    def __init__(self, kernel: int, launch: Launch, parameters: int) -> None:
        self.symbol = launch.symbol
        self._launch = launch
        self._kernel = kernel
        self._parameters = parameters
        self._config = _LaunchConfig(*launch.grid, *launch.block, launch.shared_memory_bytes)
        attributes: dict[int, tuple[int, ...]] = {}
        if launch.cluster > 1:
            attributes[_CLUSTER_DIMENSION] = (launch.cluster, 1, 1)
        if launch.is_dependent:
            attributes[_PROGRAMMATIC_STREAM_SERIALIZATION] = (1,)
        self._attributes = (_LaunchAttribute * len(attributes))(
            *(_LaunchAttribute(name, 0, (ctypes.c_uint32 * 16)(*value)) for name, value in attributes.items())
        )
        if attributes:
            self._config.attrs, self._config.numAttrs = self._attributes, len(attributes)
        self._call = bound_driver_call("cuLaunchKernelEx", ctypes.addressof(self._config), kernel, parameters, 0)

    def __call__(self, stream: int) -> None:
        """Launches the kernel on the stream."""
        self._config.hStream = stream
        code = self._call()
        if code:
            raise driver.failure("cuLaunchKernelEx", (self._config, self._kernel), code, self.symbol)

    def bind_stream(self, stream: int) -> Callable[[], int]:
        """Returns a call that launches on this stream and returns a CUresult; valid until the stream is changed."""
        self._config.hStream = stream
        return self._call

    def add_to_graph(self, graph: Any, dependencies: list[Any]) -> KernelNode:
        """Adds the launch to a CUDA graph as a node that runs after the nodes `dependencies`.

        A dependent launch has one of them, a kernel, and may start before that one ends.
        """
        cuda = driver.bindings()
        node_params = cuda.CUDA_KERNEL_NODE_PARAMS()
        node_params.func = cuda.CUfunction(self._kernel)
        node_params.gridDimX, node_params.gridDimY, node_params.gridDimZ = self._launch.grid
        node_params.blockDimX, node_params.blockDimY, node_params.blockDimZ = self._launch.block
        node_params.sharedMemBytes = self._launch.shared_memory_bytes
        node_params.kernelParams = self._parameters
        before = [] if self._launch.is_dependent else dependencies
        node = driver.call("cuGraphAddKernelNode", graph, before, len(before), node_params)
        if self._launch.is_dependent:
            edge = cuda.CUgraphEdgeData()
            edge.from_port = _PROGRAMMATIC_PORT
            edge.type = cuda.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
            driver.call("cuGraphAddDependencies", graph, dependencies, [node], [edge], 1)
        for attribute in self._attributes:
            if attribute.id != _CLUSTER_DIMENSION:  # the edge says it
                continue
            value = ctypes.addressof(attribute) + _LaunchAttribute.value.offset
            if code := bound_driver_call("cuGraphKernelNodeSetAttribute", int(node), _CLUSTER_DIMENSION, value)():
                arguments = int(node), _CLUSTER_DIMENSION
                raise driver.failure("cuGraphKernelNodeSetAttribute", arguments, code, self.symbol)
        return KernelNode(node, node_params)


class KernelNode:
    """A kernel node of a CUDA graph. handle: CUgraphNode."""

    def __init__(self, handle: Any, node_params: Any) -> None:
        self.handle = handle
        self._node_params = node_params

    def bind_update(self, graph_exec: Any) -> Callable[[], int]:
        """Returns a call that copies the kernel's current parameters to `graph_exec` and returns a CUresult."""
        values = (int(graph_exec), int(self.handle), int(self._node_params.getPtr()))
        return bound_driver_call("cuGraphExecKernelNodeSetParams", *values)
