"""Launch: a Bound puts one plan's kernels on a stream; everything but the addresses is packed beforehand."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from cutlass_py_attn import abi, driver, hopper, planner, starter
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.device import architecture
from cutlass_py_attn.device import runs_on as _runs_on
from cutlass_py_attn.errors import CompileError, DriverError, NotSupported, Stale
from cutlass_py_attn.lane import GRAPH_FROM, Direct, Graph, Lane, writers
from cutlass_py_attn.packing import Packing
from cutlass_py_attn.plan import Build, Launch, Plan
from cutlass_py_attn.problem import ROW_ALIGNMENT_BYTES, Problem

_ADDRESSES: Final = 1 << 64
_KEPT_STREAMS: Final = 16  # that one Bound remembers

_libraries: dict[tuple[int, bytes], int] = {}
_libraries_lock = threading.Lock()


def generic_arch(compute_capability: tuple[int, int]) -> str:
    """The newest portable target that runs on this compute capability; NotSupported when none does."""
    return planner.targets_of(compute_capability)[-1]


class Bound:
    """A plan's kernels on one device, ready to launch; made by `bind`.

    Calls from several threads are safe. The first call on a stream is made ready anew; those that follow take the
    stream's lane: the kernels one by one, or where there are several a CUDA graph of them.

    lanes: which of the two.
    """

    def __init__(self, plan: Plan, problem: Problem | None, gpu: driver.Device, kernels: tuple[int, ...]) -> None:
        self.plan = plan
        self.device = gpu
        self.workspace_bytes = plan.workspace.bytes  # device scratch that one call uses; 0 for none
        self._purpose = f"the workspace of {plan.symbol}"
        self.lanes: type[Lane] = Graph if len(plan.launches) >= GRAPH_FROM else Direct
        self._problem = problem
        self._kernels = kernels
        self._packing, self._starters = self._packed()
        self._sizes = tuple(writers(plan, self._packing, launch) for launch in plan.launches)
        self.tensor_names = tuple(self._packing.alignments)
        self._count = len(self.tensor_names)
        self._addresses_of = operator.itemgetter(*self._packing.takes)
        self._lanes: dict[int, Lane] = {}  # by stream, those that nobody is using
        self._streams: dict[int, Callable[[], Lane | None]] = {}  # that came, and what gives their Lane
        self._lock = threading.Lock()

    def _packed(self) -> tuple[Packing, tuple[starter.Starter, ...]]:
        """Parameters, and the launches that read them."""
        packing = Packing(self.plan, self._problem)
        launches = zip(self._kernels, self.plan.launches, packing.parameters, strict=True)
        return packing, tuple(starter.Starter(*each) for each in launches)

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
        handle = stream if type(stream) is int and stream >= 0 else driver.stream_handle(stream)
        if workspace is None and self.workspace_bytes:
            self._put_with_pool(pointers, handle)
            return
        try:
            addresses = self._addresses_of(pointers)
        except KeyError:
            self._check(pointers, workspace)
            raise
        if len(pointers) != self._count or workspace == 0:
            self._check(pointers, workspace)
        space = workspace or 0
        # Taken out while in use, so that no two threads have the same one; one that fails does not come back.
        lane = self._lanes.pop(handle, None)
        if lane is None or not lane(addresses, space):
            lane = self._put(addresses, pointers, handle, space) or lane
        if lane is not None:
            self._lanes[handle] = lane

    def _put(self, addresses: tuple[int, ...], pointers: Mapping[str, int], stream: int, workspace: int) -> Lane | None:
        """Kernel by kernel, or by the Lane that is given back: a new one."""
        if not self._kernels:
            return None
        with self._lock, self.device.current():
            if not self._packing.pack(addresses, workspace):
                self._check(pointers, workspace or None)
            lane = self._new_lane(stream, workspace)
            if lane is not None and lane(addresses, workspace):
                return lane
            if self.plan.workspace.zero_bytes:
                driver.clear(workspace, self.plan.workspace.zero_bytes, stream)
            for sizes, start in zip(self._sizes, self._starters, strict=True):
                for write in sizes:
                    write()
                start(stream)
        return lane

    def _new_lane(self, stream: int, workspace: int) -> Lane | None:
        """For a stream that comes back, which many never do; None while another thread uses what the stream has."""
        if stream not in self._streams:
            if len(self._streams) >= _KEPT_STREAMS:
                oldest = next(iter(self._streams))
                del self._streams[oldest]
                self._lanes.pop(oldest, None)
            self._streams[stream] = _nothing
            return None
        there = self._streams[stream]()
        if there is not None and not there.has_failed:
            return None
        made: Lane
        if self.lanes is Direct:
            made = Direct(self.plan, *self._packed(), self.device, stream)
        elif any(map(int, driver.function("cuStreamIsCapturing")(stream))):
            return None
        else:
            with driver.outside_capture():
                made = Graph(self.plan, *self._packed(), self.device, stream, workspace)
        self._streams[stream] = weakref.ref(made)
        return made

    def _put_with_pool(self, pointers: Mapping[str, int], stream: int) -> None:
        with self.device.current():
            scratch = driver.allocate(self.workspace_bytes, stream, self._purpose)
            try:
                self(pointers, stream, workspace=scratch)
            except BaseException:
                _free_after_failure(scratch, stream)
                raise
            driver.free(scratch, stream)

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
        needed = self._packing.alignments
        addresses = {name: (address, needed[name]) for name, address in pointers.items() if needed.get(name)}
        if workspace is not None:
            addresses["workspace"] = workspace, ROW_ALIGNMENT_BYTES
        reasons += [
            f"{name} = {address:#x}: must be a device address, {alignment}-byte aligned; copy it"
            for name, (address, alignment) in addresses.items()
            if self._kernels and (not 0 < address < _ADDRESSES or address % alignment)
        ]
        reasons += [
            f"{name} = {number}: must be from 0 to 2**64 - 1; correct it"
            for name, number in pointers.items()
            if needed.get(name) == 0 and not 0 <= number < _ADDRESSES
        ]
        if reasons:
            raise NotSupported(reasons)


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
    with gpu.current():
        kernels = tuple(_ready(artifact, launch, gpu) for launch in plan.launches)
    return Bound(plan, problem, gpu, kernels)


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


def _ready(artifact: Artifact, launch: Launch, gpu: driver.Device) -> int:
    """The kernel of this launch, loaded and checked."""
    handle = driver.get_kernel(_library(artifact.cubin, gpu), launch.symbol)
    expected = _parameter_sizes(artifact, launch)  # those that the plan packs, or there were objections
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
    return driver.loaded(handle)


def _library(cubin: bytes, gpu: driver.Device) -> int:
    """The cubin's library, loaded once per device."""
    key = (gpu.ordinal, cubin)
    with _libraries_lock:
        if key not in _libraries:
            _libraries[key] = driver.load_library(cubin)
        return _libraries[key]


def _parameter_sizes(artifact: Artifact, launch: Launch) -> tuple[int, ...]:
    return tuple(parameter.size for parameter in artifact.kernel(launch.symbol).parameters)


def _artifact_objections(artifact: Artifact, plan: Plan) -> Iterator[str]:
    if artifact.build != plan.build:
        yield (
            f"artifact {artifact.build.symbol} for {artifact.build.arch}: built from another plan than "
            f"{plan.symbol} for {plan.build.arch}; compile this plan"
        )
        return
    struct_bytes = abi.numpy_struct(abi.fields_of(plan.build.kind, plan.build.family)).itemsize
    for launch in plan.launches:
        expected = *(abi.TENSOR_MAP_BYTES for _ in launch.tensor_maps), struct_bytes
        found = _parameter_sizes(artifact, launch)
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


def _nothing() -> None:
    """Of a stream that came once."""


def _free_after_failure(address: int, stream: int) -> None:
    """Give memory back where a launch failed; the first error is the one to report."""
    try:
        driver.free(address, stream)
    except DriverError:
        return
