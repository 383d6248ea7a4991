"""One kernel launch with fixed kernel, grid and parameter memory: on a stream, or as a node of a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn.plan.plan import Launch
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.driver_calls import bound_driver_call

_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


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
        self._cluster = _LaunchAttribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint32 * 16)(launch.cluster, 1, 1))
        if launch.cluster > 1:
            self._config.attrs, self._config.numAttrs = ctypes.pointer(self._cluster), 1
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
        """Adds the launch to a CUDA graph as a node that runs after the nodes `dependencies`."""
        cuda = driver.bindings()
        node_params = cuda.CUDA_KERNEL_NODE_PARAMS()
        node_params.func = cuda.CUfunction(self._kernel)
        node_params.gridDimX, node_params.gridDimY, node_params.gridDimZ = self._launch.grid
        node_params.blockDimX, node_params.blockDimY, node_params.blockDimZ = self._launch.block
        node_params.sharedMemBytes = self._launch.shared_memory_bytes
        node_params.kernelParams = self._parameters
        node = driver.call("cuGraphAddKernelNode", graph, dependencies, len(dependencies), node_params)
        if self._config.numAttrs:
            value = ctypes.addressof(self._cluster) + _LaunchAttribute.value.offset
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
