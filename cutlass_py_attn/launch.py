"""Launch: a Bound puts one plan's kernels on a stream; everything but the addresses is packed beforehand."""

from __future__ import annotations

import ctypes
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn import abi, driver, hopper, planner, tensor_maps
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.device import architecture
from cutlass_py_attn.device import runs_on as _runs_on
from cutlass_py_attn.errors import CompileError, DriverError, NotSupported, Stale
from cutlass_py_attn.philox import keep_scale
from cutlass_py_attn.plan import Build, Launch, Plan, TensorMap
from cutlass_py_attn.problem import BIASES, F32_BYTES, ROW_ALIGNMENT_BYTES, Problem

LOG2_E: Final = math.log2(math.e)
_SLOT_ALIGNMENT: Final = abi.TENSOR_MAP_BYTES  # of every parameter; a multiple of what cuda.h asks for tensor maps
_WORD_BYTES: Final = 8
_HALF_BYTES: Final = 4
_ADDRESSES: Final = 1 << 64
_LOW_BITS: Final = ROW_ALIGNMENT_BYTES - 1
_FROM_THE_START: Final = (("first_head", 0), ("first_batch", 0))

_libraries: dict[tuple[int, bytes], int] = {}
_libraries_lock = threading.Lock()


def generic_arch(compute_capability: tuple[int, int]) -> str:
    """The newest portable target that runs on this compute capability; NotSupported when none does."""
    return planner.targets_of(compute_capability)[-1]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One launch made ready, and the tensor maps among its parameters."""

    start: driver.Starter
    maps: tuple[_Map, ...]
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Map:
    """A tensor map of one launch: its 128-byte slot, as an address and as the bindings' object."""

    slot: int
    mapped: Any
    recipe: TensorMap
    position: int  # of the array among the plan's addresses


class Bound:
    """A plan's kernels on one device, ready to launch; made by `bind`.

    Calls from several threads are safe and wait for each other: they share the packed parameters.
    """

    def __init__(self, plan: Plan, gpu: driver.Device, block: _Block, kernels: tuple[_Kernel, ...]) -> None:
        self.plan = plan
        self.device = gpu
        self.tensor_names = block.names
        self._block = block
        self._kernels = kernels
        self._in_pieces = any(kernel.sizes for kernel in kernels)
        self._maps = tuple(each for kernel in kernels for each in kernel.maps)
        self._addresses_of = _picker(block.names)
        self._packed: tuple[int, ...] = ()  # the addresses in the struct and the maps; none before the first call
        self._packed_workspace = 0
        self._packed_stream = 0
        self._zero_bytes = plan.workspace.zero_bytes
        self._lock = threading.Lock()

    @property
    def workspace_bytes(self) -> int:
        """Device scratch that one call uses; 0 for none."""
        return self.plan.workspace.bytes

    def __call__(self, pointers: Mapping[str, int], stream: object = None, *, workspace: int | None = None) -> None:
        """Put the kernels on `stream` and return; nothing is waited for.

        pointers: device address of each of `tensor_names`, laid out and aligned as in the problem; philox_seed
        and philox_offset are the numbers themselves, unless the problem says that they are on the device.
        stream: None is the legacy default stream; see driver.stream_handle for what else is taken.
        workspace: address of `workspace_bytes` of device memory, 16-byte aligned. None takes it from the
        device's pool in stream order and gives it back behind the kernels.

        May run under CUDA graph capture. Without `workspace` the graph allocates and frees by itself; with
        one, every replay uses that memory, so replays must not overlap.

        NotSupported lists wrong names and addresses; DriverError: a driver call failed, perhaps
        for want of memory.
        """
        try:
            addresses = self._addresses_of(pointers)
        except KeyError:
            addresses = ()
        if len(pointers) != len(addresses) or (workspace is not None and (workspace <= 0 or workspace & _LOW_BITS)):
            self._check(pointers, workspace)
        handle = driver.stream_handle(stream)
        if not self._kernels:
            return
        with self._lock:
            if addresses != self._packed:
                self._pack(addresses, pointers)
            if self.device.is_current:
                self._put(handle, workspace)
            else:
                with self.device.current():
                    self._put(handle, workspace)

    def _put(self, stream: int, workspace: int | None) -> None:
        if workspace is not None or not self.workspace_bytes:
            self._launch(stream, workspace or 0)
            return
        scratch = driver.allocate(self.workspace_bytes, stream, f"the workspace of {self.plan.symbol}")
        try:
            self._launch(stream, scratch)
        except BaseException:
            _free_after_failure(scratch, stream)
            raise
        driver.free(scratch, stream)

    def _launch(self, stream: int, workspace: int) -> None:
        if workspace != self._packed_workspace:
            self._block.write_workspace(workspace)
            self._packed_workspace = workspace
        if stream != self._packed_stream:
            for kernel in self._kernels:
                kernel.start.set_stream(stream)
            self._packed_stream = stream
        if self._zero_bytes:
            driver.clear(workspace, self._zero_bytes, stream)
        for kernel in self._kernels:
            if self._in_pieces:
                self._block.write_sizes(kernel.sizes or _FROM_THE_START)
            kernel.start()

    def _pack(self, addresses: tuple[int, ...], pointers: Mapping[str, int]) -> None:
        """Addresses into the struct and the tensor maps; a map is encoded once and only moved thereafter."""
        before, self._packed = self._packed, ()
        if not self._block.write_addresses(addresses):
            self._check(pointers, None)
        for each in self._maps:
            address = addresses[each.position]
            if not before:
                tensor_maps.encode(each.slot, address, each.recipe, self.plan.build.dtype)
            elif address != before[each.position]:
                tensor_maps.move(each.mapped, address)
        self._packed = addresses

    def _check(self, pointers: Mapping[str, int], workspace: int | None) -> None:
        """Every wrong name and address in one NotSupported."""
        reasons = [
            f"{name} is missing: pointers must name {', '.join(self.tensor_names)}; add its address"
            for name in self.tensor_names
            if name not in pointers
        ]
        reasons += [
            f"{name} is unknown: pointers must name {', '.join(self.tensor_names)}; leave it out"
            for name in pointers
            if name not in self.tensor_names
        ]
        needed = self._block.alignments
        addresses = {name: (address, needed[name]) for name, address in pointers.items() if needed.get(name)}
        if workspace is not None:
            addresses["workspace"] = workspace, ROW_ALIGNMENT_BYTES
        reasons += [
            f"{name} = {address:#x}: must be a device address, {alignment}-byte aligned; copy it"
            for name, (address, alignment) in addresses.items()
            if self._kernels and (not 0 < address < _ADDRESSES or address % alignment)
        ]
        if reasons:
            raise NotSupported(reasons)


class _Block:
    """The packed parameters of one plan: the struct, shared by its kernels, and a slot per tensor map."""

    def __init__(self, plan: Plan, problem: Problem | None) -> None:
        self.fields = abi.fields_of(plan.build.kind, plan.build.family)
        self.layout = {name: (offset, size) for name, offset, size in abi.layout(self.fields)}
        self.struct_bytes = abi.numpy_struct(self.fields).itemsize
        struct = np.zeros((), abi.numpy_struct(self.fields))
        if problem is None:
            self.alignments = {name: ROW_ALIGNMENT_BYTES for name, kind in self.fields if kind == "i64"}
        else:
            self.alignments = _alignments(problem)
            for name, value in _numbers(problem).items():
                struct[name] = value
        # Those that are checked come first; the others are numbers, or nobody reads them.
        self.names = tuple(sorted(self.alignments, key=lambda name: not self.alignments[name]))
        for name, size in plan.sizes:
            struct[name] = size
        self._storage: list[np.ndarray[Any, Any]] = []
        self.struct_address = self._slot(self.struct_bytes)
        ctypes.memmove(self.struct_address, struct.tobytes(), self.struct_bytes)
        words = (ctypes.c_char * self.struct_bytes).from_address(self.struct_address)
        self._words = memoryview(words).cast("B").cast("Q")
        self._halves = (ctypes.c_int32 * (self.struct_bytes // _HALF_BYTES)).from_address(self.struct_address)
        on_device = problem is not None and problem.philox_on_device
        fields = {name: f"{name}_address" for name in abi.SEED} if on_device else {}
        indices = [self._word(fields.get(name, name)) for name in self.names]
        needed = [self.alignments[name] for name in self.names if self.alignments[name]]
        self._checked = tuple((index, alignment - 1) for index, alignment in zip(indices, needed, strict=False))
        self._unchecked = tuple(indices[len(needed) :])
        self._parts = tuple((self._word(part.name), part.offset) for part in plan.workspace.parts)

    def _word(self, field: str) -> int:
        """Index of a 64-bit field among the struct's words: such fields are aligned."""
        return self.layout[field][0] // _WORD_BYTES

    def write_addresses(self, addresses: tuple[int, ...]) -> bool:
        """Put the address of each of `names` into its struct field; False where one is not to be used."""
        words, found = self._words, iter(addresses)
        try:
            for (index, low_bits), address in zip(self._checked, found, strict=False):
                if not address or address & low_bits:
                    return False
                words[index] = address
            for index in self._unchecked:
                words[index] = next(found)
        except ValueError:  # no number of 64 bits
            return False
        return True

    def write_workspace(self, workspace: int) -> None:
        """Put the addresses of the workspace's parts into their struct fields."""
        for index, offset in self._parts:
            self._words[index] = workspace + offset

    def write_sizes(self, sizes: Iterable[tuple[str, int]]) -> None:
        """Put numbers that differ between the launches into their 32-bit fields."""
        for name, size in sizes:
            self._halves[self.layout[name][0] // _HALF_BYTES] = size

    def kernel(self, launch: Launch, handle: int) -> _Kernel:
        """The launch with slots for its tensor maps and its array of parameter pointers."""
        maps = tuple(self._map(recipe) for recipe in launch.tensor_maps)
        pointers = np.array([*(each.slot for each in maps), self.struct_address], np.uint64)
        self._storage.append(pointers)
        return _Kernel(driver.Starter(handle, launch, pointers.ctypes.data), maps, launch.sizes)

    def _map(self, recipe: TensorMap) -> _Map:
        slot = self._slot(abi.TENSOR_MAP_BYTES)
        return _Map(slot, tensor_maps.as_object(slot), recipe, self.names.index(recipe.field))

    def _slot(self, size: int) -> int:
        memory = np.zeros(size + _SLOT_ALIGNMENT, np.uint8)
        self._storage.append(memory)
        return -(-memory.ctypes.data // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


def bind(artifact: Artifact, plan: Plan, problem: Problem | None = None, device: int = 0) -> Bound:
    """Load the artifact's kernels on GPU `device` and pack what every launch of `plan` shares.

    problem: gives strides and scale; None for a room alone, whose tensors are contiguous.
    Stale: the artifact, the problem or the GPU is not the plan's. DoesNotFit: the GPU has too little shared
    memory. NoDevice: there is no GPU. DriverError: the driver refused the cubin.
    """
    objections = [*_artifact_objections(artifact, plan), *_problem_objections(plan, problem)]
    if objections:
        raise Stale("\n".join(objections))
    gpu = driver.device(device)
    if not _runs_on(plan.architecture, gpu.compute_capability):
        major, minor = gpu.compute_capability
        raise Stale(
            f"{plan.symbol} is built for {plan.build.arch}: {gpu.name} has compute capability "
            f"{major}.{minor}; plan and compile for that"
        )
    block = _Block(plan, problem)
    with gpu.current():
        kernels = tuple(_ready(artifact, launch, gpu, block) for launch in plan.launches)
    return Bound(plan, gpu, block, kernels)


def bind_first(plans: Sequence[Plan], problem: Problem, kernels: Callable[[Build], Artifact], device: int = 0) -> Bound:
    """`bind` the first of the plans whose kernels `kernels` gives.

    A build that ptxas cannot make without spills, and one that a folder lacks, leave the turn to the next plan.
    Raises what the first plan's kernels raised where no plan has any, and what `bind` raises.
    """
    plan, artifact = first_made(plans, kernels)
    return bind(artifact, plan, problem, device)


def first_made(plans: Sequence[Plan], kernels: Callable[[Build], Artifact]) -> tuple[Plan, Artifact]:
    """The first of the plans whose kernels `kernels` gives, and these; errors as for `bind_first`."""
    first: CompileError | Stale | None = None
    for plan in plans:
        try:
            return plan, kernels(plan.build)
        except (CompileError, Stale) as error:
            first = first or error
    if first is None:
        raise ValueError("plans is empty: at least one is needed")
    raise first


def bind_problem(problem: Problem, kernels: Callable[[Build], Artifact], device: int = 0) -> Bound:
    """Plan the problem for GPU `device` and bind the best plan that `kernels` has kernels for.

    NotSupported: no plan; else as `bind_first`.
    """
    gpu = driver.device(device)
    return bind_first(planner.plans_on(problem, gpu.compute_capability, gpu.num_sms), problem, kernels, device)


def _ready(artifact: Artifact, launch: Launch, gpu: driver.Device, block: _Block) -> _Kernel:
    handle = driver.get_kernel(_library(artifact.cubin, gpu), launch.symbol)
    expected = _parameter_sizes(launch, block.struct_bytes)
    found = driver.parameter_sizes(handle, len(expected))
    if found != expected:
        raise Stale(
            f"{launch.symbol}: the driver reads parameters of {found} bytes, the plan packs {expected}; "
            "compile the plan again"
        )
    # What the driver keeps for itself is not part of its limit.
    reserved = architecture(artifact.build.arch).reserved_shared_memory
    static_bytes = max(artifact.kernel(launch.symbol).static_shared_memory_bytes - reserved, 0)
    driver.allow_shared_memory(handle, gpu, launch.shared_memory_bytes, static_bytes)
    return block.kernel(launch, driver.loaded(handle))


def _library(cubin: bytes, gpu: driver.Device) -> int:
    """The cubin's library, loaded once per device."""
    key = (gpu.ordinal, cubin)
    with _libraries_lock:
        if key not in _libraries:
            _libraries[key] = driver.load_library(cubin)
        return _libraries[key]


def _parameter_sizes(launch: Launch, struct_bytes: int) -> tuple[int, ...]:
    return (*(abi.TENSOR_MAP_BYTES for _ in launch.tensor_maps), struct_bytes)


def _artifact_objections(artifact: Artifact, plan: Plan) -> Iterator[str]:
    if artifact.build != plan.build:
        yield (
            f"artifact {artifact.build.symbol} for {artifact.build.arch}: built from another plan than "
            f"{plan.symbol} for {plan.build.arch}; compile this plan"
        )
        return
    struct_bytes = abi.numpy_struct(abi.fields_of(plan.build.kind, plan.build.family)).itemsize
    for launch in plan.launches:
        expected = _parameter_sizes(launch, struct_bytes)
        found = tuple(parameter.size for parameter in artifact.kernel(launch.symbol).parameters)
        if found != expected:
            yield (
                f"{launch.symbol}: the artifact's parameters have {found} bytes, the plan packs {expected}; "
                "compile the plan again"
            )


def _problem_objections(plan: Plan, problem: Problem | None) -> Iterator[str]:
    build = plan.build
    if problem is None:
        if build.kind != "room":
            yield f"problem = None: a {build.kind} plan takes strides and scale from its problem; pass it"
        return
    if problem.direction != build.kind:
        yield f"problem.direction = {problem.direction!r}: the plan is a {build.kind} plan; plan this problem"
        return
    shape = problem.shape
    pairs: list[tuple[str, object, object]] = [
        ("dtype", problem.dtype, build.dtype),
        ("mask.form", problem.mask.form, build.mask),
        ("features", problem.features, build.features),
        ("gradients", problem.gradients, build.gradients),
        ("head_dim", shape.head_dim, build.head_dim),
        ("head_dim_value", shape.head_dim_value, build.head_dim_value),
        ("bias_gradient", planner.bias_gradient(problem), build.bias_gradient),
    ]
    if build.family == "hopper":
        yield from (
            f"problem has {name}: the plan's kernel takes none; plan this problem" for name in hopper.lacking(problem)
        )
    planned = dict(plan.sizes)
    pairs += [(name, size, planned.get(name)) for name, size in planner.sizes(problem, build)]
    for name, given, expected in pairs:
        if given != expected:
            yield f"problem.{name} = {given}: the plan has {expected}; plan this problem"
    access = {
        "rows": (planner.row_access(problem), build.access_bytes),
        "bias": (planner.bias_access(problem.bias), build.bias_access_bytes),
        "grad_bias": (planner.bias_access(problem.grad_bias), build.grad_bias_access_bytes),
    }
    for name, (found, needed) in access.items():
        if found < needed:
            yield f"problem's {name} can be read by {found} bytes at a time: the plan reads {needed}; plan this problem"


def _alignments(problem: Problem) -> dict[str, int]:
    """Bytes to which the address of each operand must be aligned; 0 where it is not an address or never read."""
    found = {name: tensor.alignment for name, tensor in problem.tensors().items()}
    found["logsumexp"] = F32_BYTES
    found |= {name: tensor.alignment for name, tensor in problem.vectors().items()}
    found |= {name: 0 for name, tensor in problem.tensors().items() if 0 in tensor.shape}
    if problem.dropout_p != 0 and not problem.philox_on_device:
        found |= dict.fromkeys(abi.SEED, 0)
    return found


def _numbers(problem: Problem) -> dict[str, float]:
    """Strides and factors by struct field."""
    numbers: dict[str, float] = {}
    for name, tensor in problem.tensors().items():
        axes = ("batch", "head", "row", "column") if name in BIASES else ("batch", "row", "head")
        steps = tensor.steps if name in BIASES else tensor.strides
        numbers |= {f"{name}_{axis}": step for axis, step in zip(axes, steps, strict=False)}
    if problem.grad_output is not None:
        numbers["grad_output_column"] = problem.grad_output.steps[3]
    if problem.alibi_slopes is not None and len(problem.alibi_slopes.shape) == 2:
        numbers["alibi_batch"] = problem.shape.num_heads
    scale = problem.scale_value
    factors = {"scale": scale, "scale_log2": scale * LOG2_E, "softcap": problem.softcap}
    return numbers | factors | {"keep_scale": keep_scale(problem.dropout_p)}


def _picker(names: tuple[str, ...]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """The values of these names, as a tuple."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda pointers: tuple(pointers[name] for name in names)


def _free_after_failure(address: int, stream: int) -> None:
    """Give memory back where a launch failed; the first error is the one to report."""
    try:
        driver.free(address, stream)
    except DriverError:
        return
