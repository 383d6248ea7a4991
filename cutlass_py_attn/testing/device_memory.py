"""Device memory: tensors in device buffers surrounded by NaN, in any layout, and kernels bound to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import E4M3, FLOAT8, ITEM_BYTES, ROW_ALIGNMENT_BYTES, WORD_BYTES, Tensor
from cutlass_py_attn.reference.serving import NAN_CODE
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import numpy_dtype
from cutlass_py_attn.runtime.binding import Bound, bind, bind_problem
from cutlass_py_attn.testing.check import Kernels
from cutlass_py_attn.testing.component_gemms import product_shape

Array = npt.NDArray[Any]

GUARD: Final = 512  # elements of NaN before and after every tensor
WORKSPACE_GUARD: Final = 1 << 16  # bytes of ones before and after the workspace
ALL_ONES: Final = 0xFFFFFFFF  # NaN in every float type, and not zero in any counter


class GuardedBuffer:
    """One tensor in device memory with NaN before it, after it and in all gaps.

    values: None for an output. guard: elements of NaN before and after the tensor
    """

    def __init__(self, tensor: Tensor, values: Array | None, guard: int = GUARD) -> None:
        self.is_output = values is None
        self._tensor = tensor
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True) if size)
        # A tensor of less than 16-byte alignment gets an address of exactly that alignment.
        item = numpy_dtype(tensor.dtype).itemsize
        self._guard = guard + (tensor.alignment // item if tensor.alignment < ROW_ALIGNMENT_BYTES else 0)
        has_nan = tensor.dtype in (*ITEM_BYTES, FLOAT8)
        filler = np.nan if has_nan else NAN_CODE if tensor.dtype in E4M3 else -1
        self._host = np.full(max(extent, 1) + 2 * self._guard, filler, numpy_dtype(tensor.dtype))
        if values is not None:
            self._view(self._host)[...] = values
        self._base = driver.allocate_now(self._host.nbytes, "a test tensor")
        self.fill()

    @property
    def address(self) -> int:
        """Address of the tensor's first element."""
        return self._base + self._guard * self._host.itemsize

    def fill(self) -> None:
        """Restores the buffer: the values of an input, NaN everywhere else."""
        driver.copy_to_device(self._base, self._host.ctypes.data, self._host.nbytes, 0)
        driver.synchronise(0)

    def change(self, values: Array) -> None:
        """Writes other values to the tensor, on the device too."""
        self._view(self._host)[...] = values
        self.fill()

    def read(self) -> Array:
        """Returns the tensor's values on the device; AssertionError if a bit outside the tensor changed."""
        found = np.empty_like(self._host)
        driver.copy_to_host(found.ctypes.data, self._base, found.nbytes, 0)
        driver.synchronise(0)
        whole = f"u{found.itemsize}"
        changed = found.view(whole) != self._host.view(whole)
        if self.is_output:
            self._view(changed)[...] = False
        places = np.flatnonzero(changed) - self._guard
        assert not places.size, f"{places.size} elements outside the tensor changed, the first at element {places[0]}"
        return self._view(found).copy()

    def close(self) -> None:
        """Frees the memory."""
        driver.free_now(self._base)

    def _view(self, whole: Array) -> Array:
        strides = [step * whole.itemsize for step in self._tensor.strides]
        return np.lib.stride_tricks.as_strided(whole[self._guard :], self._tensor.shape, strides)


class GuardedWorkspace:
    """A workspace of `size` bytes, with bits of ones before it, after it and, before a launch, in it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._base = driver.allocate_now(size + 2 * WORKSPACE_GUARD, "a test workspace")
        self._guards = self.address - WORKSPACE_GUARD, self.address + size
        ones = np.full(WORKSPACE_GUARD, 0xFF, np.uint8)
        for start in self._guards:
            driver.copy_to_device(start, ones.ctypes.data, ones.nbytes, 0)
        driver.synchronise(0)

    @property
    def address(self) -> int:
        """Address of the workspace's first byte."""
        return self._base + WORKSPACE_GUARD

    def fill(self) -> None:
        """Sets all bits of the workspace."""
        words = self._size // WORD_BYTES
        driver.memset_words(self.address, words * WORD_BYTES, ALL_ONES, words, 1, 0)
        driver.synchronise(0)

    def expect_guards(self) -> None:
        """Raises AssertionError if a byte outside the workspace changed."""
        found = np.empty(WORKSPACE_GUARD, np.uint8)
        for start in self._guards:
            driver.copy_to_host(found.ctypes.data, start, found.nbytes, 0)
            driver.synchronise(0)
            places = np.flatnonzero(found != 0xFF)
            first = start - self.address + int(places[0]) if places.size else 0
            assert not places.size, f"{places.size} bytes outside the workspace changed, the first at byte {first}"

    def close(self) -> None:
        """Frees the memory."""
        driver.free_now(self._base)


class GuardedLaunch:
    """Bound kernels with guarded buffers of their own; a context manager that frees the buffers.

    operands: values of every tensor that the kernels read. philox: philox_seed and philox_offset by value.
    guard: elements of NaN before and after every tensor.
    The workspace is filled with ones before each launch, so that no kernel may rely on its contents.
    """

    def __init__(
        self,
        bound: Bound,
        tensors: Mapping[str, Tensor],
        operands: Mapping[str, Array],
        philox: Mapping[str, int] | None = None,
        guard: int = GUARD,
    ) -> None:
        self.bound = bound
        self._philox = dict(philox or {})
        self.buffers = {name: GuardedBuffer(tensor, operands.get(name), guard) for name, tensor in tensors.items()}
        self._workspace = GuardedWorkspace(bound.workspace_bytes) if bound.workspace_bytes else None

    @property
    def workspace(self) -> int | None:
        """Address of the workspace; None if the kernels need none."""
        return None if self._workspace is None else self._workspace.address

    @property
    def pointers(self) -> dict[str, int]:
        """Addresses by name, as `Bound` expects them, and the Philox numbers."""
        return {name: buffer.address for name, buffer in self.buffers.items()} | self._philox

    def reset(self) -> None:
        """Fills the outputs with NaN and the workspace with ones."""
        for buffer in self.buffers.values():
            if buffer.is_output:
                buffer.fill()
        if self._workspace is not None:
            self._workspace.fill()

    def launch(self, stream: object = 0) -> None:
        """Launches the kernels once on `stream`, and does not wait."""
        self.bound(self.pointers, stream, workspace=self.workspace)

    def read(self) -> dict[str, Array]:
        """Returns the outputs; AssertionError if a guard of any buffer or of the workspace changed."""
        if self._workspace is not None:
            self._workspace.expect_guards()
        found = {name: buffer.read() for name, buffer in self.buffers.items()}
        return {name: array for name, array in found.items() if self.buffers[name].is_output}

    def run(self) -> dict[str, Array]:
        """Resets, launches, waits and returns the outputs."""
        self.reset()
        self.launch()
        driver.synchronise(0)
        return self.read()

    def __enter__(self) -> GuardedLaunch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver.call("cuCtxSynchronize")
        for buffer in self.buffers.values():
            buffer.close()
        if self._workspace is not None:
            self._workspace.close()


def guarded_launch(
    problem: Problem,
    operands: Mapping[str, Array],
    kernels: Kernels,
    philox: Mapping[str, int] | None = None,
    guard: int = GUARD,
) -> GuardedLaunch:
    """Binds the fused kernels of a problem to guarded buffers.

    operands: values by the names of the tensors that the kernels read.
    philox: philox_seed and philox_offset; None if they are in device memory or there is no dropout.
    guard: elements of NaN before and after every tensor.
    """
    logsumexp = Tensor.contiguous(problem.shape.logsumexp, "float32")
    tensors = {**problem.tensors(), **problem.vectors(), "logsumexp": logsumexp}
    written = {"output", "logsumexp"} if problem.direction == "forward" else set()
    given = {name: array for name, array in operands.items() if name in tensors and name not in written}
    return GuardedLaunch(bind_problem(problem, kernels), tensors, given, philox, guard)


def guarded_component_gemm(plan: Plan, operands: Mapping[str, Array], kernels: Kernels) -> GuardedLaunch:
    """Binds a standalone component GEMM to guarded buffers; operands a and b are (tiles, rows, columns)."""
    tiles = dict(plan.params)["tiles"]
    dtype = plan.build.dtype
    tensors = {name: Tensor.contiguous(operands[name].shape, dtype) for name in ("a", "b")}
    tensors["c"] = Tensor.contiguous((tiles, *product_shape(plan)), "float32")
    return GuardedLaunch(bind(kernels(plan.build), plan), tensors, operands)


@contextmanager
def stream() -> Iterator[int]:
    """Creates a stream; waits for it and destroys it at the end."""
    handle = driver.create_stream()
    try:
        yield handle
        driver.synchronise(handle)
    finally:
        driver.destroy_stream(handle)
