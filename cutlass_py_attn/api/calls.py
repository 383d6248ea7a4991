"""Calls: validated once for the layouts of their arrays, and launched often.

`launch` reads the arrays of a Request. `prepare` validates its problem and binds its kernels; a call with the layouts
and options of an earlier one finds the earlier one's PreparedCall. `repeat` finds it without reading the arrays, if
they are aligned arrays of torch or CuPy, the stream is the current one of their library, and the options are plain.

Arrays that a kernel writes must not overlap others, which their addresses decide: `repeat` compares their extents.
Extents that do overlap, as those of two parts of one pool, are sound at the distances that were validated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from cutlass_py_attn.api.lru_cache import LruCache
from cutlass_py_attn.api.options import PLAIN_OPTIONS, exact_key
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NoDevice, NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import performance
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.runtime import arrays, driver, fill, lifetimes, output_checks
from cutlass_py_attn.runtime.arrays import Array
from cutlass_py_attn.runtime.binding import Bound, bind_problem
from cutlass_py_attn.runtime.frameworks import Framework, framework_of, numpy_dtype

Kernels = Callable[[Build], Artifact]
AnyProblem = Problem | AppendProblem | MergeProblem

MAX_PREPARED: Final = 128  # another shape, stride or scale is another prepared call
MAX_REPEATED: Final = 128
MAX_DISTANCES: Final = 256  # of two arrays of one call
_ALIGNMENT_MASK: Final = ROW_ALIGNMENT_BYTES - 1


class Request(ABC):
    """One call, before its arrays are read.

    first: name of the array whose library gets the results
    arrays: the caller's by name, in the order of the call; those that take results too
    key: what decides the problem and its kernels beside the arrays
    kernels: as in the options of a call
    numbers: that the kernels take beside the arrays, by name
    """

    first: ClassVar[str]
    arrays: Mapping[str, Any]
    key: Hashable
    kernels: Kernels | None
    numbers: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def validate(
        self, inputs: Mapping[str, Array], of_outputs: Sequence[Refusal]
    ) -> tuple[AnyProblem, dict[str, Tensor]]:
        """Returns the problem of the arrays, and the results to allocate by name; NotSupported lists every reason.

        of_outputs: why arrays that are written are refused
        """

    @abstractmethod
    def written(self, inputs: Mapping[str, Array]) -> Collection[str]:
        """Returns the names of the caller's arrays that are written."""

    @abstractmethod
    def must_validate(self, inputs: Mapping[str, Array]) -> bool:
        """Returns whether more than the layouts of the arrays counts, so that every call is validated."""

    def read(self, stream: int) -> dict[str, Array]:
        """Reads the arrays; NotSupported lists those that are unreadable."""
        return arrays.read_operands(self.arrays, stream)

    def remedy(self, inputs: Mapping[str, Array]) -> str:
        """Returns what to do about an array that cannot be written; "" to leave it out."""
        return ""

    def packed(self, problem: Any) -> tuple[tuple[str, ...], tuple[int, ...], str] | None:
        """Returns names, shape and dtype of results that are slices of one array; None if there are none."""
        return None


class PreparedCall:
    """A validated call on one GPU.

    results: layouts of the arrays to allocate, by name
    bound: its kernels; None until `prepare` has bound them, and for an empty problem
    """

    def __init__(
        self,
        problem: AnyProblem,
        results: Mapping[str, Tensor],
        inputs: Mapping[str, Array],
        written: Collection[str],
        gpu: driver.Device,
    ) -> None:
        self.problem, self.results, self.gpu = problem, results, gpu
        self.bound: Bound | None = None
        self._names = (*inputs, *results)
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in results.values()]
        self._needs_fill = fill.is_needed(problem)
        self._has_value_in_key = isinstance(problem, Problem) and problem.value_in_key
        self._pairs = [*_pairs(inputs, written)]
        self._sound: set[tuple[int, int, int]] = set()  # distances at which pairs do not overlap

    def __call__(self, pointers: dict[str, int], stream: int) -> None:
        """Sets what no kernel writes, and launches the kernels. pointers: addresses and numbers by name."""
        if self._needs_fill:
            fill.fill(self.problem, pointers, stream)
        if self._has_value_in_key:
            pointers["value"] = pointers["key"]
        if self.bound is not None:
            self.bound(pointers, stream)

    def repeat(self, framework: Framework, operands: Sequence[Any], stream: object) -> list[Any] | None:
        """Launches and returns the new results; returns None, without a launch, if the call must be validated."""
        if lifetimes.kept:
            lifetimes.release()
        ordinal = self.gpu.ordinal
        current = framework.current_stream(ordinal)
        addresses = framework.addresses(operands)
        bits = 0
        for address in addresses:
            bits |= address
        if (
            bits & _ALIGNMENT_MASK
            or (stream is not None and driver.stream_handle(stream) != current)
            or not framework.allocates_on(ordinal)
            or (self._pairs and self._may_overlap(addresses))
        ):
            return None
        results = []
        for shape, dtype in self._shapes:
            array, address = framework.empty(shape, dtype, ordinal)
            results.append(array)
            addresses.append(address)
        pointers = dict(zip(self._names, addresses, strict=True))
        if self._needs_fill:
            with self.gpu.current():
                self(pointers, current)
        else:
            self(pointers, current)
        return results

    def add_distances(self, addresses: Sequence[int]) -> None:
        """Records that arrays at these addresses do not overlap."""
        for first, second, least, most in self._pairs:
            distance = addresses[second] - addresses[first]
            if least < distance < most and len(self._sound) < MAX_DISTANCES:
                self._sound.add((first, second, distance))

    def _may_overlap(self, addresses: Sequence[int]) -> bool:
        for first, second, least, most in self._pairs:
            distance = addresses[second] - addresses[first]
            if least < distance < most and (first, second, distance) not in self._sound:
                return True
        return False


_prepared: LruCache[PreparedCall] = LruCache(MAX_PREPARED)
_repeated: LruCache[PreparedCall] = LruCache(MAX_REPEATED)


def repeat(
    name: Hashable, operands: Sequence[Any], options: Mapping[str, Any], stream: object
) -> tuple[Hashable | None, list[Any] | None]:
    """Launches a call that was launched before with arrays of these layouts.

    name: of the function, and what decides the call beside operands and options

    Returns (key, new results): the key is for `launch`, None if the call is not repeatable; no results are None.
    """
    kind, framework = type(operands[0]), framework_of(operands[0])
    if framework is None or (options and not options.keys() <= PLAIN_OPTIONS):
        return None, None
    layout_key = framework.layout_key
    try:
        layouts = tuple([layout_key(array) for array in operands if type(array) is kind])
        key = name, layouts, exact_key(options) if options else ()
        call = _repeated.get(key)
    except (RuntimeError, TypeError):  # an array without strides, or an unhashable option such as a list
        return None, None
    if len(layouts) < len(operands):
        return None, None
    return key, None if call is None else call.repeat(framework, operands, stream)


def launch(request: Request, given_stream: object, key: Hashable | None) -> dict[str, Any]:
    """Launches the kernels of a call and returns its results by name.

    key: under which `repeat` looks for the call; None if it is not repeatable
    """
    lifetimes.release()
    stream = arrays.launch_stream(request.arrays.get(request.first), given_stream)
    inputs = request.read(stream)
    library, ordinal = inputs[request.first].library, inputs[request.first].device
    gpu = device_of(ordinal)
    call = prepare(request, inputs, gpu)  # before anything is copied: there may be no kernel
    written, packed = request.written(inputs), request.packed(call.problem)
    with gpu.current(), arrays.OutputArrays(library, gpu, stream, given_stream) as output_arrays:
        pointers = {
            name: output_arrays.use(name, array) if name in written else output_arrays.operand(name, array)
            for name, array in inputs.items()
        }
        if packed is not None:
            pointers |= output_arrays.allocate_packed(*packed)
        for name, tensor in call.results.items():
            pointers[name] = output_arrays.allocate(name, tensor.shape, tensor.dtype)
        call({**pointers, **request.numbers}, stream)
        if key is not None and packed is None and call.bound is not None and _are_plain(inputs):
            call.add_distances([array.pointer for array in inputs.values()])
            _repeated.put(key, call)
        return output_arrays.results()


def prepare(request: Request, inputs: Mapping[str, Array], gpu: driver.Device) -> PreparedCall:
    """Returns a call, validated, and bound to its kernels if its problem is not empty.

    Gives a PerformanceWarning if another layout of the call is estimated to be several times as fast.
    """
    written = request.written(inputs)
    of_outputs = output_checks.refusals(inputs, written, request.remedy(inputs))
    layouts = tuple([(name, array[1:5], array.pointer % ROW_ALIGNMENT_BYTES) for name, array in inputs.items()])
    key = request.key, gpu.ordinal, layouts
    try:
        call = _prepared.get(key)
        is_hashable = True
    except TypeError:  # an option without a hash
        call, is_hashable = None, False
    if call is None or of_outputs or request.must_validate(inputs):
        problem, results = request.validate(inputs, of_outputs)
        if call is None:
            call = PreparedCall(problem, results, inputs, written, gpu)
            if is_hashable:
                _prepared.put(key, call)
    if call.bound is None and not call.problem.is_empty:
        call.bound = bind_problem(call.problem, request.kernels or default_kernels(), gpu.ordinal)
        performance.warn(call.bound.plan)
    return call


def problem_on_host(request: Request, stream: object = None) -> Any:
    """Returns the problem of a call of the CPU backend, validated as for the GPU, which would refuse it too."""
    driver.stream_handle(stream)
    check_is_numpy(request.arrays)
    inputs = request.read(0)
    return request.validate(inputs, output_checks.refusals(inputs, request.written(inputs), request.remedy(inputs)))[0]


def check_is_numpy(given: Mapping[str, Any]) -> None:
    """Raises NotSupported with every array that is none of NumPy."""
    if refusals := [
        refuse(name, value, "must be a NumPy array for backend='reference'", "copy it to the host")
        for name, value in given.items()
        if not isinstance(value, np.ndarray)
    ]:
        raise NotSupported(refusals)


def device_of(ordinal: int | None) -> driver.Device:
    """Returns the operands' GPU, or the current GPU for host operands. NoDevice names the CPU backend."""
    try:
        return driver.device(driver.current_ordinal() if ordinal is None else ordinal)
    except NoDevice as error:
        error.args = (f'{error}; backend="reference" computes on the CPU in NumPy float64',)  # its kind stays
        raise


def default_kernels() -> Kernels:
    """Returns the compiler with its disk cache. Imports the compiler module, but not the DSL."""
    from cutlass_py_attn.compilation.turns import artifact_for

    return artifact_for


def _are_plain(inputs: Mapping[str, Array]) -> bool:
    """Returns whether all arrays are aligned, and read without DLPack."""
    return not any(isinstance(array.owner, tuple) or array.pointer & _ALIGNMENT_MASK for array in inputs.values())


def _pairs(inputs: Mapping[str, Array], written: Collection[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yields the indices of each two arrays of which one is written, and the distances between which they overlap."""
    if not written:
        return
    extents = [_extent(array) for array in inputs.values()]
    is_written = [name in written for name in inputs]
    for second, (begin, end) in enumerate(extents):
        for first, (first_begin, first_end) in enumerate(extents[:second]):
            if is_written[first] or is_written[second]:
                yield first, second, first_begin - end, first_end - begin


def _extent(array: Array) -> tuple[int, int]:
    """Returns the first byte of an array and the byte behind its last, counted from its address."""
    item = numpy_dtype(array.dtype).itemsize
    steps = [(size - 1) * stride * item for size, stride in zip(array.shape, array.strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + item
