"""Starter: one kernel launch made ready, to be put on a stream by itself or as a node of a CUDA graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn import driver
from cutlass_py_attn.plan import Launch
from cutlass_py_attn.prepared import prepared

_CLUSTER: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("gridDimX", "gridDimY", "gridDimZ")),
        *((name, ctypes.c_uint32) for name in ("blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(_Attribute)),
        ("numAttrs", ctypes.c_uint32),
    )


class Starter:
    """A kernel launch made ready; calling it with a stream starts the kernel.

    parameters: address of the array of pointers to the kernel's parameters, which are read at each call.
    """

    def __init__(self, kernel: int, launch: Launch, parameters: int) -> None:
        self.symbol = launch.symbol
        self._launch = launch
        self._kernel = kernel
        self._parameters = parameters
        self._config = _Config(*launch.grid, *launch.block, launch.shared_memory_bytes)
        self._attribute = _Attribute(_CLUSTER, 0, (ctypes.c_uint32 * 16)(launch.cluster, 1, 1))
        if launch.cluster > 1:
            self._config.attrs, self._config.numAttrs = ctypes.pointer(self._attribute), 1
        self._start = prepared("cuLaunchKernelEx", ctypes.addressof(self._config), kernel, parameters, 0)

    def __call__(self, stream: int) -> None:
        """Start the kernel on the stream."""
        self._config.hStream = stream
        code = self._start()
        if code:
            raise driver.failure("cuLaunchKernelEx", (self._config, self._kernel), code, self.symbol)

    def on(self, stream: int) -> Callable[[], int]:
        """Starts the kernel on this stream, for as long as nobody asks for another; gives a CUresult."""
        self._config.hStream = stream
        return self._start

    def add_to(self, graph: Any, before: list[Any]) -> Node:
        """The same launch as a node of the graph, behind the nodes `before`."""
        cuda = driver.bindings()
        given = cuda.CUDA_KERNEL_NODE_PARAMS()
        given.func = cuda.CUfunction(self._kernel)
        given.gridDimX, given.gridDimY, given.gridDimZ = self._launch.grid
        given.blockDimX, given.blockDimY, given.blockDimZ = self._launch.block
        given.sharedMemBytes = self._launch.shared_memory_bytes
        given.kernelParams = self._parameters
        node = driver.call("cuGraphAddKernelNode", graph, before, len(before), given)
        if self._config.numAttrs:
            value = ctypes.addressof(self._attribute) + _Attribute.value.offset
            if code := prepared("cuGraphKernelNodeSetAttribute", int(node), _CLUSTER, value)():
                raise driver.failure("cuGraphKernelNodeSetAttribute", (int(node), _CLUSTER), code, self.symbol)
        return Node(self.symbol, node, given)


class Node:
    """A kernel in a CUDA graph."""

    def __init__(self, symbol: str, handle: Any, given: Any) -> None:
        self.symbol = symbol
        self.handle = handle
        self._given = given

    def updater(self, graph: Any) -> Callable[[], int]:
        """Lets the executable form of the graph read this kernel's parameters anew; gives a CUresult."""
        values = (int(graph), int(self.handle), int(self._given.getPtr()))
        return prepared("cuGraphExecKernelNodeSetParams", *values)
