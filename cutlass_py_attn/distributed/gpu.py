"""One GPU as a machine: kernels and copies on the caller's stream, exchanges on the group's.

Sums of partial gradients, and totals of merges, are float32, by the kernels of `merge_states`. All memory between the
steps comes from the stream's pool and goes back in stream order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cutlass_py_attn.api.attention import AttentionRequest
from cutlass_py_attn.api.calls import Kernels, default_kernels, prepare
from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import Options
from cutlass_py_attn.distributed.communicator import Message
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.distributed.machine import Arrays, Machine, along, as_options
from cutlass_py_attn.distributed.views import View, dense_strides
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.merge import MAX_HEAD_DIM, OUTPUTS, MergeProblem
from cutlass_py_attn.runtime import arrays, driver, lifetimes
from cutlass_py_attn.runtime.binding import Bound, bind_problem

_INFINITY: Final = 0x7F800000  # float32 bits
_LARGEST_PITCH: Final = 2**31 - 1  # bytes between two rows of a copy; CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU
MAX_MERGES: Final = 256  # layouts of totals and parts, each with one source of kernels on one GPU
_merges: LruCache[tuple[Bound, Kernels | None]] = LruCache(MAX_MERGES)  # with `kernels`, whose id is part of the key


class CapturedStream(NotSupported):
    """The stream of a call is being captured in a CUDA graph."""


class Gpu(Machine):
    """Computes on the group's GPU.

    results: makes arrays in the caller's library. stream: handle of the caller's stream. kernels: as in
    the options of a call.
    """

    def __init__(
        self,
        group: Group,
        results: arrays.OutputArrays,
        gpu: driver.Device,
        stream: int,
        kernels: Kernels | None,
    ) -> None:
        super().__init__(group)
        self._results, self._gpu, self.stream = results, gpu, stream
        self._kernels = kernels
        self._constants: list[np.ndarray[Any, Any]] = []  # kept alive until the stream has read them

    def empty(self, shape: tuple[int, ...], dtype: str) -> View:
        return View.allocate(shape, dtype, self._gpu.ordinal, self.stream)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> View:
        found = self.empty(shape, dtype)
        if found.nbytes:
            driver.memset_zero(found.pointer, found.nbytes, self.stream)
        return found

    def constant(self, values: np.ndarray[Any, Any]) -> View:
        found, dense = self.empty(values.shape, values.dtype.name), np.ascontiguousarray(values)
        if dense.nbytes:
            self._constants.append(dense)
            driver.copy_to_device(found.pointer, dense.ctypes.data, dense.nbytes, self.stream)
        return found

    def result(self, name: str, shape: tuple[int, ...], dtype: str) -> View:
        pointer = self._results.allocate(name, shape, dtype)
        return View(pointer, shape, dense_strides(shape), dtype, self._gpu.ordinal, self._results)

    def copy(self, target: View, source: View) -> None:
        copy(target, source, self.stream)

    def fill_infinite(self, logsumexp: View) -> None:
        words = logsumexp.nbytes // 4
        if words:
            driver.memset_words(logsumexp.pointer, logsumexp.nbytes, _INFINITY, words, 1, self.stream)

    def forward(self, options: Options, operands: Arrays, output: Any = None) -> Arrays:
        given = {} if output is None else {"output": output}
        return self._launch("forward", as_options(options, operands), operands, given)

    def backward(self, options: Options, operands: Arrays, gradients: tuple[str, ...]) -> Arrays:
        given = as_options(options, operands, gradients=gradients)
        found = self._launch("backward", given, operands, {})
        return {name: found[f"grad_{name}"] for name in gradients}

    def _launch(self, direction: str, options: Options, operands: Arrays, outputs: dict[str, View]) -> Arrays:
        """Launches the kernels of one call and returns its results by name. outputs: arrays for some of them."""
        inputs = {name: view.array for name, view in {**operands, **outputs}.items()}
        request = AttentionRequest(direction, {}, options)
        call = prepare(request, inputs, self._gpu)
        results = {name: self.empty(tensor.shape, tensor.dtype) for name, tensor in call.results.items()}
        pointers = {name: view.pointer for name, view in {**operands, **outputs, **results}.items()}
        call({**pointers, **request.numbers}, self.stream)
        return {**outputs, **results}

    def merge(self, total: View, logsumexp: View, part: View, logsumexp_part: View) -> View:
        problem = MergeProblem(total.tensor, part.tensor, total.tensor, logsumexp.tensor, logsumexp_part.tensor)
        merged = self.empty(logsumexp.shape, "float32")
        if not problem.is_empty:
            pointers = {"output_a": total, "output_b": part, "output": total}
            pointers |= {"logsumexp_a": logsumexp, "logsumexp_b": logsumexp_part, "logsumexp": merged}
            self._merge(problem)({name: view.pointer for name, view in pointers.items()}, self.stream)
        return merged

    def _merge(self, problem: MergeProblem) -> Bound:
        """Returns the bound kernel of a merge. Each of its threads reads a vector before it writes one there."""
        key = problem, self._gpu.ordinal, id(self._kernels)
        found = _merges.get(key)
        if found is None:
            found = bind_problem(problem, self._kernels or default_kernels(), self._gpu.ordinal), self._kernels
            _merges.put(key, found)
        return found[0]

    def add(self, total: View, part: View, target: View | None = None) -> None:
        columns = total.shape[-1]
        for first in range(0, columns, MAX_HEAD_DIM):
            index = along(len(total.shape) - 1, first, min(first + MAX_HEAD_DIM, columns))
            self._add([view[index].as_rows() for view in (total, part, total if target is None else target)])

    def _add(self, views: list[View]) -> None:
        """Stores the sum of the first two in the third; all are 4-D, with at most MAX_HEAD_DIM columns."""
        one, other, target = (view.tensor for view in views)
        problem = MergeProblem(one, other, target)
        if not problem.is_empty:
            pointers = {name: view.pointer for name, view in zip(OUTPUTS, views, strict=True)}
            self._merge(problem)(pointers, self.stream)

    def start(self, sends: list[Message], receives: list[Message]) -> Callable[[], None]:
        stream = self.group.stream
        driver.order_streams(self.stream, stream)
        self.group.exchange(sends, receives)

        def wait() -> None:
            driver.order_streams(stream, self.stream)

        return wait


def on_gpu(
    group: Group, operands: Mapping[str, Any], options: Options, given_stream: object, compute: Callable[..., Any]
) -> Arrays:
    """Returns the results of `compute(machine, arrays)` by name, in the library of query."""
    if group.device is None:
        raise NotSupported(
            f"backend = {options.backend!r} in a group of host memory: must be 'reference' there; pass it, or create "
            "the group with a device"
        )
    lifetimes.release()
    stream = _launch_stream(operands["query"], given_stream)
    inputs = arrays.read_operands(operands, stream)
    query = inputs["query"]
    if query.device not in (None, group.device):
        raise NotSupported(
            f"query is on GPU {query.device}, and the group's communicator on GPU {group.device}: must be the same; "
            "move the arrays, or create the group with that device"
        )
    gpu = driver.device(group.device)
    with gpu.current(), arrays.OutputArrays(query.library, gpu, stream, given_stream) as results:
        machine = Gpu(group, results, gpu, stream, options.kernels)
        views = {
            name: View(
                results.operand(name, array),
                tuple(array.shape),
                array.tensor.strides,
                array.dtype,
                gpu.ordinal,
                array,
            )
            for name, array in inputs.items()
        }
        compute(machine, views)
        return results.results()


def _launch_stream(query: Any, given_stream: object) -> int:
    """Returns the handle of the caller's stream; CapturedStream if it is captured."""
    try:
        stream = arrays.launch_stream(query, given_stream)
    except NotSupported:
        stream = 0 if given_stream is None else driver.stream_handle(given_stream)
        if not driver.is_capturing(stream):
            raise
    if driver.is_capturing(stream):
        raise CapturedStream(
            f"stream = {stream:#x} is being captured, or a capture forbids it: must not be, for the call waits for its "
            "exchanges; call it outside of the capture"
        )
    return stream


def copy(target: View, source: View, stream: int) -> None:
    """Copies an array to another of the same shape and dtype, in stream order, by as few copies as the strides allow.

    Axes that follow each other in both are one. The innermost is a row of a copy, and the longest other one its rows.
    """
    if 0 in target.shape:
        return
    item = target.item_bytes
    axes: list[tuple[int, int, int]] = [(1, item, item)]  # size, strides in bytes; innermost first
    for size, one, other in reversed([*zip(target.shape, target.strides, source.strides, strict=True)]):
        inner = axes[-1]
        if size == 1:
            continue
        if (one * item, other * item) == (inner[0] * inner[1], inner[0] * inner[2]):
            axes[-1] = inner[0] * size, inner[1], inner[2]
        else:
            axes.append((size, one * item, other * item))
    width = axes[0][0] * item
    rows = [axis for axis in axes[1:] if width <= min(axis[1:]) and max(axis[1:]) <= _LARGEST_PITCH]
    longest = max(rows, default=(1, width, width))
    if rows:
        axes.remove(longest)
    for index in itertools.product(*(range(size) for size, _, _ in axes[1:])):
        pairs = [*zip(index, axes[1:], strict=True)]
        address = target.pointer + sum(number * axis[1] for number, axis in pairs)
        origin = source.pointer + sum(number * axis[2] for number, axis in pairs)
        if longest[0] == 1:
            driver.call_without_result("", "cuMemcpyDtoDAsync", address, origin, width, stream)
        else:
            _copy_rows((address, longest[1]), (origin, longest[2]), width, longest[0], stream)


def _copy_rows(target: tuple[int, int], source: tuple[int, int], width: int, height: int, stream: int) -> None:
    """Copies rows of `width` bytes. target, source: address of the first row, and the distance of the rows (bytes)."""
    cuda = driver.bindings()
    rows = cuda.CUDA_MEMCPY2D()
    rows.srcMemoryType = rows.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
    rows.dstDevice, rows.dstPitch = target
    rows.srcDevice, rows.srcPitch = source
    rows.WidthInBytes, rows.Height = width, height
    (code,) = driver.function("cuMemcpy2DAsync")(rows, stream)
    if code:
        raise driver.failure("cuMemcpy2DAsync", (stream,), int(code), f"{height} rows of {width} bytes")
