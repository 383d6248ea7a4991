"""Memory: tensors in device buffers full of NaN, in any layout, and a plan's kernels bound to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import driver
from cutlass_py_attn.arrays import numpy_dtype
from cutlass_py_attn.launch import Bound, bind, bind_problem
from cutlass_py_attn.plan import Plan
from cutlass_py_attn.problem import ITEM_BYTES, ROW_ALIGNMENT_BYTES, Problem, Tensor
from tests.gpu.check import Kernels

Array = npt.NDArray[Any]

GUARD: Final = 512  # elements of NaN before and behind every tensor
ALL_ONES: Final = 0xFFFFFFFF  # NaN in every float type, and no zero in any counter


class Buffer:
    """One tensor on the device with NaN before, behind and in all gaps; `values` None makes it an output."""

    def __init__(self, tensor: Tensor, values: Array | None) -> None:
        self.is_output = values is None
        self._tensor = tensor
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True) if size)
        # A tensor that is said to be aligned to less than 16 bytes is.
        item = numpy_dtype(tensor.dtype).itemsize
        self._guard = GUARD + (tensor.alignment // item if tensor.alignment < ROW_ALIGNMENT_BYTES else 0)
        nothing = np.nan if tensor.dtype in ITEM_BYTES else -1
        self._host = np.full(max(extent, 1) + 2 * self._guard, nothing, numpy_dtype(tensor.dtype))
        if values is not None:
            self._view(self._host)[...] = values
        self._base = driver.allocate_now(self._host.nbytes, "a test tensor")
        self.fill()

    @property
    def address(self) -> int:
        """Of the tensor's first element."""
        return self._base + self._guard * self._host.itemsize

    def fill(self) -> None:
        """The buffer as it was at first: inputs in their places, NaN everywhere else."""
        driver.copy_to_device(self._base, self._host.ctypes.data, self._host.nbytes, 0)
        driver.synchronise(0)

    def read(self) -> Array:
        """The tensor as it is on the device now; AssertionError when a bit outside of it has changed."""
        found = np.empty_like(self._host)
        driver.copy_to_host(found.ctypes.data, self._base, found.nbytes, 0)
        driver.synchronise(0)
        whole = f"u{found.itemsize}"
        changed = found.view(whole) != self._host.view(whole)
        if self.is_output:
            self._view(changed)[...] = False
        places = np.flatnonzero(changed) - self._guard
        assert not places.size, f"{places.size} elements changed that are not ours, from {places[0]} on"
        return self._view(found).copy()

    def close(self) -> None:
        """Give the memory back."""
        driver.free_now(self._base)

    def _view(self, whole: Array) -> Array:
        strides = [step * whole.itemsize for step in self._tensor.strides]
        return np.lib.stride_tricks.as_strided(whole[self._guard :], self._tensor.shape, strides)


class Placed:
    """A plan bound to buffers of its own; a context manager that frees them.

    operands: values of every tensor that the plan reads. The workspace is ours too, filled with ones
    before each launch, so that nothing may rely on what it holds.
    """

    def __init__(
        self,
        bound: Bound,
        tensors: Mapping[str, Tensor],
        operands: Mapping[str, Array],
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self.bound = bound
        self.numbers = dict(numbers or {})
        self.buffers = {name: Buffer(tensor, operands.get(name)) for name, tensor in tensors.items()}
        size = bound.workspace_bytes
        self.workspace = driver.allocate_now(size, "a workspace") if size else None

    @property
    def pointers(self) -> dict[str, int]:
        """Addresses by name, as Bound takes them."""
        return {name: buffer.address for name, buffer in self.buffers.items()} | self.numbers

    def reset(self) -> None:
        """NaN in the outputs, ones in the workspace."""
        for buffer in self.buffers.values():
            if buffer.is_output:
                buffer.fill()
        if self.workspace is not None:
            words = self.bound.workspace_bytes // 4
            driver.fill_words(self.workspace, words * 4, ALL_ONES, words, 1, 0)
            driver.synchronise(0)

    def launch(self, stream: object = 0) -> None:
        """One launch with our workspace; nothing is waited for."""
        self.bound(self.pointers, stream, workspace=self.workspace)

    def read(self) -> dict[str, Array]:
        """The outputs, once every buffer's guards are found as they were."""
        found = {name: buffer.read() for name, buffer in self.buffers.items()}
        return {name: array for name, array in found.items() if self.buffers[name].is_output}

    def run(self) -> dict[str, Array]:
        """Reset, launch, wait, read."""
        self.reset()
        self.launch()
        driver.synchronise(0)
        return self.read()

    def __enter__(self) -> Placed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver.call("cuCtxSynchronize")
        for buffer in self.buffers.values():
            buffer.close()
        if self.workspace is not None:
            driver.free_now(self.workspace)


def placed(
    problem: Problem, operands: Mapping[str, Array], kernels: Kernels, numbers: Mapping[str, int] | None = None
) -> Placed:
    """A fused kernel in guarded buffers; operands by the names of the tensors it reads.

    numbers: philox_seed and philox_offset where they are not in device memory.
    """
    logsumexp = Tensor.contiguous(problem.shape.logsumexp, "float32")
    tensors = {**problem.tensors(), **problem.vectors(), "logsumexp": logsumexp}
    written = {"output", "logsumexp"} if problem.direction == "forward" else set()
    given = {name: array for name, array in operands.items() if name in tensors and name not in written}
    return Placed(bind_problem(problem, kernels), tensors, given, numbers)


def placed_room(plan: Plan, operands: Mapping[str, Array], kernels: Kernels) -> Placed:
    """A room alone in guarded buffers; operands a and b are [tiles, rows, columns]."""
    tiles = dict(plan.sizes)["tiles"]
    dtype = plan.build.dtype
    tensors = {name: Tensor.contiguous(operands[name].shape, dtype) for name in ("a", "b")}
    tensors["c"] = Tensor.contiguous((tiles, *product_shape(plan)), "float32")
    return Placed(bind(kernels(plan.build), plan), tensors, operands)


def product_shape(plan: Plan) -> tuple[int, int]:
    """Rows and columns of a room's C."""
    build = plan.build
    rows = build.tile_n if build.room in ("grad_v", "grad_k") else build.tile_m
    columns = {"grad_v": build.columns_value, "grad_k": build.columns, "grad_q": build.columns}
    return rows, columns.get(build.room, build.tile_n)


@contextmanager
def stream() -> Iterator[int]:
    """A stream of our own, empty when it goes."""
    handle = driver.new_stream()
    try:
        yield handle
        driver.synchronise(handle)
    finally:
        driver.destroy_stream(handle)
