"""Launch: a Bound puts one plan's kernels on a stream; everything but the addresses is packed beforehand."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cutlass_py_attn import abi, driver
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.device import ARCHITECTURES, Architecture
from cutlass_py_attn.errors import DriverError, NotSupported, Stale
from cutlass_py_attn.plan import Launch, Plan, TensorMap
from cutlass_py_attn.problem import ROW_ALIGNMENT_BYTES, Problem

LOG2_E: Final = math.log2(math.e)
_SLOT_ALIGNMENT: Final = abi.TENSOR_MAP_BYTES  # of every parameter; a multiple of what cuda.h asks for tensor maps
_WORD_BYTES: Final = 8

_libraries: dict[tuple[int, bytes], int] = {}
_libraries_lock = threading.Lock()


def generic_arch(compute_capability: tuple[int, int]) -> str:
    """The newest portable target that runs on this compute capability; NotSupported when none does."""
    major, minor = compute_capability
    portable = [arch for arch in ARCHITECTURES.values() if arch.name[-1].isdigit()]
    fitting = [arch for arch in portable if _runs_on(arch, compute_capability)]
    if not fitting:
        raise NotSupported(
            f"compute capability = {major}.{minor}: no target runs on it; allowed are "
            f"{', '.join(arch.name for arch in portable)} and later minor versions of them; use another GPU"
        )
    return max(fitting, key=lambda arch: arch.compute_capability).name


def _runs_on(arch: Architecture, compute_capability: tuple[int, int]) -> bool:
    """Cubins run on later minors of their major version; with a suffix ("sm_90a") on their own alone."""
    if not arch.name[-1].isdigit():
        return arch.compute_capability == compute_capability
    major, minor = arch.compute_capability
    return major == compute_capability[0] and minor <= compute_capability[1]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One launch made ready: the driver's handle and config, and the address of the parameter pointers."""

    handle: int
    config: Any
    parameters: int
    maps: tuple[tuple[int, TensorMap], ...]  # (address of the 128-byte slot, recipe)
    launch: Launch


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
        self._mapped: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def workspace_bytes(self) -> int:
        """Device scratch that one call uses; 0 for none."""
        return self.plan.workspace.bytes

    def __call__(self, pointers: Mapping[str, int], stream: object = None, *, workspace: int | None = None) -> None:
        """Put the kernels on `stream` and return; nothing is waited for.

        pointers: device address of each of `tensor_names`, 16-byte aligned, laid out as in the problem.
        stream: None is the legacy default stream; see driver.stream_handle for what else is taken.
        workspace: address of `workspace_bytes` of device memory, 16-byte aligned. None takes it from the
        device's pool in stream order and gives it back behind the kernels.

        May run under CUDA graph capture. Without `workspace` the graph allocates and frees by itself; with
        one, every replay uses that memory, so replays must not overlap.

        NotSupported lists wrong names and addresses; DriverError: a driver call failed, perhaps
        for want of memory.
        """
        self._check(pointers, workspace)
        handle = driver.stream_handle(stream)
        if not self._kernels:
            return
        with self._lock, self.device.current():
            if workspace is not None or not self.workspace_bytes:
                self._launch(pointers, handle, workspace or 0)
                return
            scratch = driver.allocate(self.workspace_bytes, handle, f"the workspace of {self.plan.symbol}")
            try:
                self._launch(pointers, handle, scratch)
            except BaseException:
                _free_after_failure(scratch, handle)
                raise
            driver.free(scratch, handle)

    def _launch(self, pointers: Mapping[str, int], stream: int, workspace: int) -> None:
        space = self.plan.workspace
        self._block.write_addresses(pointers)
        self._block.write_addresses({part.name: workspace + part.offset for part in space.parts})
        if space.zero_bytes:
            driver.clear(workspace, space.zero_bytes, stream)
        for kernel in self._kernels:
            for slot, recipe in kernel.maps:
                self._encode(slot, recipe, pointers[recipe.field])
            driver.launch(kernel.config, kernel.handle, kernel.parameters, stream, kernel.launch.symbol)

    def _encode(self, slot: int, recipe: TensorMap, address: int) -> None:
        if self._mapped.get(slot) == address:
            return
        driver.encode_tensor_map(slot, address, recipe, self.plan.build.dtype)
        self._mapped[slot] = address

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
        addresses = dict(pointers) if workspace is None else {**pointers, "workspace": workspace}
        reasons += [
            f"{name} = {address:#x}: must be a device address, {ROW_ALIGNMENT_BYTES}-byte aligned; copy it"
            for name, address in addresses.items()
            if self._kernels and (address <= 0 or address % ROW_ALIGNMENT_BYTES)
        ]
        if reasons:
            raise NotSupported(reasons)


class _Block:
    """The packed parameters of one plan: the struct, shared by its kernels, and a slot per tensor map."""

    def __init__(self, plan: Plan, problem: Problem | None) -> None:
        self.fields = abi.FIELDS[plan.build.kind]
        self.layout = {name: (offset, size) for name, offset, size in abi.layout(self.fields)}
        self.struct_bytes = abi.numpy_struct(self.fields).itemsize
        struct = np.zeros((), abi.numpy_struct(self.fields))
        if problem is None:
            self.names = tuple(name for name, kind in self.fields if kind == "i64")
        else:
            self.names = (*problem.tensors(), "logsumexp")
            for name, tensor in problem.tensors().items():
                for axis, label in enumerate(("batch", "row", "head")):
                    struct[f"{name}_{label}"] = tensor.strides[axis]
            struct["scale"] = problem.scale_value
            struct["scale_log2"] = problem.scale_value * LOG2_E
        for name, value in plan.sizes:
            struct[name] = value
        self._storage: list[np.ndarray[Any, Any]] = []
        self.struct_address = self._slot(self.struct_bytes)
        ctypes.memmove(self.struct_address, struct.tobytes(), self.struct_bytes)
        self._words = (ctypes.c_int64 * (self.struct_bytes // _WORD_BYTES)).from_address(self.struct_address)

    def write_addresses(self, addresses: Mapping[str, int]) -> None:
        """Put addresses into their struct fields; 64-bit fields are aligned, so they are whole words."""
        for name, address in addresses.items():
            self._words[self.layout[name][0] // _WORD_BYTES] = address

    def kernel(self, launch: Launch, handle: int) -> _Kernel:
        """The launch with slots for its tensor maps and its array of parameter pointers."""
        maps = tuple((self._slot(abi.TENSOR_MAP_BYTES), recipe) for recipe in launch.tensor_maps)
        pointers = np.array([*(slot for slot, _ in maps), self.struct_address], np.uint64)
        self._storage.append(pointers)
        config = driver.launch_config(launch.grid, launch.block, launch.shared_memory_bytes)
        return _Kernel(handle, config, pointers.ctypes.data, maps, launch)

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


def _ready(artifact: Artifact, launch: Launch, gpu: driver.Device, block: _Block) -> _Kernel:
    handle = driver.get_kernel(_library(artifact.cubin, gpu), launch.symbol)
    expected = _parameter_sizes(launch, block.struct_bytes)
    found = driver.parameter_sizes(handle, len(expected))
    if found != expected:
        raise Stale(
            f"{launch.symbol}: the driver reads parameters of {found} bytes, the plan packs {expected}; "
            "compile the plan again"
        )
    static_bytes = artifact.kernel(launch.symbol).static_shared_memory_bytes
    driver.allow_shared_memory(handle, gpu, launch.shared_memory_bytes, static_bytes)
    return block.kernel(launch, handle)


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
    struct_bytes = abi.numpy_struct(abi.FIELDS[plan.build.kind]).itemsize
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
        ("mask", problem.mask.name, build.mask),
        ("head_dim", shape.head_dim, build.head_dim),
        ("head_dim_value", shape.head_dim_value, build.head_dim_value),
    ]
    sizes = dict(plan.sizes)
    pairs += [
        (name, getattr(shape, name), sizes.get(name)) for name in ("batch", "num_heads", "num_queries", "num_keys")
    ]
    for name, given, planned in pairs:
        if given != planned:
            yield f"problem.{name} = {given}: the plan has {planned}; plan this problem"


def _free_after_failure(address: int, stream: int) -> None:
    """Give memory back where a launch failed; the first error is the one to report."""
    try:
        driver.free(address, stream)
    except DriverError:
        return
