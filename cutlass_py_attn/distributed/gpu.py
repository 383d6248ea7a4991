"""One GPU as a machine: kernels and copies on the caller's stream, exchanges on the group's.

Sums of partial gradients, and the totals of merges, are float32 arrays of torch or CuPy: a call that needs some uses
the caller's library, else the one that is installed. All memory between the steps comes from the stream's pool and
goes back in stream order.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cutlass_py_attn.api import attention
from cutlass_py_attn.api.options import Options
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.distributed.communicator import Message
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.distributed.machine import Arrays, Machine, as_options
from cutlass_py_attn.distributed.views import View
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import arrays, driver, fill, lifetimes
from cutlass_py_attn.runtime.frameworks import FRAMEWORKS, Framework, numpy_dtype
from cutlass_py_attn.runtime.launch import Bound, bind, portable_arch

_INFINITY: Final = 0x7F800000  # float32 bits
_LARGEST_PITCH: Final = 2**31 - 1  # bytes between two rows of a copy; CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU
_merges: dict[tuple[Any, ...], tuple[Bound, Any]] = {}  # with `kernels`, whose id is part of the key


class CapturedStream(NotSupported):
    """The stream of a call is being captured in a CUDA graph."""


class Gpu(Machine):
    """Computes on the group's GPU.

    results: makes arrays in the caller's library, of that name. stream: handle of the caller's stream. kernels: as in
    the options of a call.
    """

    def __init__(
        self,
        group: Group,
        results: arrays.OutputArrays,
        library: str,
        gpu: driver.Device,
        stream: int,
        kernels: Callable[[Build], Artifact] | None,
    ) -> None:
        super().__init__(group)
        self._results, self._library, self._gpu, self.stream = results, library, gpu, stream
        self._kernels = kernels
        self._framework: Framework | None = None
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
        return View(pointer, shape, Tensor.contiguous(shape, dtype).strides, dtype, self._gpu.ordinal, self._results)

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
        call = attention.prepare(direction, inputs, options, self._gpu.ordinal, ())
        problem, found = call.problem, dict(outputs)
        if call.bound is None and not call.is_empty:
            call.bound = attention.bind_kernels(problem, self._gpu.ordinal, options.kernels)
        for name, tensor in call.new_outputs.items():
            found[name] = self.empty(tensor.shape, tensor.dtype)
        pointers = {name: view.pointer for name, view in {**operands, **found}.items()}
        if call.is_empty or problem.has_ragged_rows:
            fill.fill(problem, pointers, self.stream)
        if call.bound is not None:
            if problem.dropout_p and options.dropout is not None:
                dropout = options.dropout
                pointers |= {"philox_seed": dropout.philox_seed, "philox_offset": dropout.philox_offset}
            call.bound(pointers, self.stream)
        return found

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
        if key not in _merges:
            problem.check()
            plan = plan_merge(problem, portable_arch(self._gpu.compute_capability))
            artifact = (self._kernels or attention.default_kernels())(plan.build)
            _merges[key] = bind(artifact, plan, device=self._gpu.ordinal), self._kernels
        return _merges[key][0]

    def add(self, total: View, part: View, target: View | None = None) -> None:
        framework = self._arithmetic()
        with framework.use_stream(self.stream, self._gpu.ordinal):
            add(framework, total, part, total if target is None else target)

    def expect_sums(self) -> None:
        self._arithmetic()

    def _arithmetic(self) -> Framework:
        """Returns the library that adds; NotSupported if there is none."""
        if self._framework is None:
            self._framework = arithmetic(self._library)
        return self._framework

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
        machine = Gpu(group, results, query.library, gpu, stream, options.kernels)
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


def arithmetic(library: str) -> Framework:
    """Returns the library that adds arrays: that of the caller, else one that is installed."""
    for name in (library, "cupy", "torch"):
        if name in FRAMEWORKS:
            try:
                importlib.import_module(name)
            except ImportError:
                continue
            return FRAMEWORKS[name]
    raise NotSupported(
        "sums of partial results on the GPU: must be those of torch or CuPy, and neither is installed; run pip install "
        "cupy-cuda13x, or pass context_strategy='ulysses'"
    )


def add(framework: Framework, total: View, part: View, target: View) -> None:
    """Stores total + part, added in float32, on the library's current stream."""
    if framework.library == "torch":
        torch: Any = importlib.import_module("torch")
        one, other, result = (torch.from_dlpack(view) for view in (total, part, target))
        if target.dtype == "float32":
            torch.add(one, other, out=result)
        else:
            result.copy_(one + other)
        return
    cupy: Any = importlib.import_module("cupy")

    def array(view: View) -> Any:
        memory = cupy.cuda.UnownedMemory(view.pointer, max(view.reach, 1), view.owner, view.device)
        strides = tuple(stride * view.item_bytes for stride in view.strides)
        return cupy.ndarray(view.shape, numpy_dtype(view.dtype), cupy.cuda.MemoryPointer(memory, 0), strides)

    one, other, result = (array(view) for view in (total, part, target))
    result[...] = (one + other.astype(cupy.float32)).astype(result.dtype)


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
