"""Binds an Artifact to a GPU: a Bound launches the plan's kernels; only addresses change from call to call."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from cutlass_py_attn.artifact import Artifact, first_available
from cutlass_py_attn.errors import DriverError, NotSupported, Stale
from cutlass_py_attn.kernels.backward_parts.kernel import grad_bias_mode
from cutlass_py_attn.kernels.backward_parts.layout import starts_from_logsumexp
from cutlass_py_attn.kernels.families import FAMILIES
from cutlass_py_attn.kernels.tile_lists import kernel as tile_lists
from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.arch import runs_on as _runs_on
from cutlass_py_attn.launch.build import ROW_KINDS, Build
from cutlass_py_attn.plan import builder, launch_rules, planner
from cutlass_py_attn.plan.abi_digest import abi_digest
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.plan.merge import plan_merge
from cutlass_py_attn.plan.plan import Launch, Plan
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.block_sparse import undivided
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.tensors import ROW_ALIGNMENT_BYTES
from cutlass_py_attn.refusals import Refusal, refuse, shown
from cutlass_py_attn.runtime import driver, kernel_launch
from cutlass_py_attn.runtime.params import KernelParams
from cutlass_py_attn.runtime.plan_launchers import (
    MIN_GRAPH_LAUNCHES,
    GraphLauncher,
    Launcher,
    StreamLauncher,
    override_writers,
)

_ADDRESS_END: Final = 1 << 64
_MAX_STREAMS: Final = 16  # streams whose launchers one Bound keeps

_libraries: dict[tuple[int, bytes], int] = {}
_libraries_lock = threading.Lock()


def portable_arch(compute_capability: tuple[int, int]) -> str:
    """Returns the newest portable target for this compute capability; raises NotSupported when there is none."""
    return planner.targets_of(compute_capability)[-1]


class Bound:
    """A plan's kernels on one device, ready to launch; created by `bind`.

    Calls from several threads are safe. The first call on a stream launches kernel by kernel. The second call creates
    the stream's launcher, and later calls use it.

    launcher_type: GraphLauncher for a plan of several kernels, else StreamLauncher.
    """

    def __init__(self, plan: Plan, problem: Problem | None, gpu: driver.Device, kernels: tuple[int, ...]) -> None:
        self.plan = plan
        self.device = gpu
        self.workspace_bytes = plan.workspace.bytes  # device scratch memory that one call uses; 0 for none
        self._workspace_purpose = f"the workspace of {plan.symbol}"
        use_graph = len(plan.launches) >= MIN_GRAPH_LAUNCHES
        self.launcher_type: type[Launcher] = GraphLauncher if use_graph else StreamLauncher
        self._problem = problem
        self.kernels = kernels
        self._params, self._kernel_launches = self._create_launches()
        self._override_writers = tuple(override_writers(plan, self._params, launch) for launch in plan.launches)
        self.tensor_names = tuple(self._params.alignments)
        self._num_names = len(self.tensor_names)
        self._select_addresses = operator.itemgetter(*self._params.pointer_names)
        self._launchers: dict[int, Launcher] = {}  # by stream; a launcher in use is not in it
        self._streams: dict[int, Callable[[], Launcher | None]] = {}  # streams seen, and their launcher
        self._lock = threading.Lock()

    def _create_launches(self) -> tuple[KernelParams, tuple[kernel_launch.KernelLaunch, ...]]:
        """Creates kernel parameters, and the launches that read them."""
        params = KernelParams(self.plan, self._problem)
        launches = zip(self.kernels, self.plan.launches, params.parameters, strict=True)
        return params, tuple(kernel_launch.KernelLaunch(*each) for each in launches)

    def __call__(self, pointers: Mapping[str, int], stream: object = None, *, workspace: int | None = None) -> None:
        """Launches the kernels on `stream` and returns without waiting.

        pointers: device address of each of `tensor_names`, with layout and alignment of the problem. philox_seed
            and philox_offset are the values themselves, unless the problem has them in device memory.
        stream: None for the legacy default stream; `driver.stream_handle` lists the other types.
        workspace: address of `workspace_bytes` of device memory, 16-byte aligned. None allocates it from the
            device's memory pool in stream order and frees it after the kernels.

        CUDA graph capture is allowed. Without `workspace` the captured graph allocates and frees the memory itself.
        With `workspace` every replay uses that memory, so replays must not overlap.

        NotSupported lists every wrong name and address. DriverError: a driver call failed, for example because
        device memory ran out. NoDevice: the process was forked after the kernels were bound.
        """
        if driver.is_forked_child:  # launchers call the driver's functions themselves
            raise driver.ForkedChild
        handle = stream if type(stream) is int and 0 <= stream < _ADDRESS_END else driver.stream_handle(stream)
        if workspace is None and self.workspace_bytes:
            self._launch_with_pool(pointers, handle)
            return
        try:
            addresses = self._select_addresses(pointers)
        except (KeyError, TypeError):
            self._check(pointers, workspace)
            raise
        scratch = 0 if workspace is None else workspace
        if len(pointers) != self._num_names or type(scratch) is not int or workspace == 0:
            self._check(pointers, workspace)
            scratch = integer_of(scratch) or 0
        # Removed while in use, so that no two threads share a launcher. A launcher that fails is not put back.
        launcher = self._launchers.pop(handle, None)
        if launcher is None or not launcher(addresses, scratch):
            launcher = self._launch(addresses, pointers, handle, scratch, launcher) or launcher
        if launcher is not None:
            self._launchers[handle] = launcher

    def _launch(
        self,
        addresses: tuple[int, ...],
        pointers: Mapping[str, int],
        stream: int,
        workspace: int,
        launcher: Launcher | None,
    ) -> Launcher | None:
        """Launches by a launcher and returns it, or launches kernel by kernel and returns None.

        launcher: the stream's launcher, which refused in the thread's own context; None for none.
        """
        if not self.kernels:
            return None
        with self._lock, self.device.current():
            if launcher is not None and launcher(addresses, workspace):
                return launcher
            if not self._params.write(addresses, workspace):
                self._check(pointers, workspace or None)
            launcher = self._create_launcher(stream, workspace)
            if launcher is not None and launcher(addresses, workspace):
                return launcher
            if self.plan.workspace.zero_bytes:
                driver.memset_zero(workspace, self.plan.workspace.zero_bytes, stream)
            for override_writers, launch in zip(self._override_writers, self._kernel_launches, strict=True):
                for write in override_writers:
                    write()
                launch(stream)
        return launcher

    def _create_launcher(self, stream: int, workspace: int) -> Launcher | None:
        """Creates the stream's launcher at the second call; many streams never get a second call.

        Returns None at the first call, while another thread uses the stream's launcher, and if a graph cannot be
        used because the stream is captured.
        """
        if stream not in self._streams:
            if len(self._streams) >= _MAX_STREAMS:
                oldest = next(iter(self._streams))
                del self._streams[oldest]
                self._launchers.pop(oldest, None)
            self._streams[stream] = _no_launcher
            return None
        existing = self._streams[stream]()
        if existing is not None and not existing.has_failed:
            return None
        launcher: Launcher
        if self.launcher_type is StreamLauncher:
            launcher = StreamLauncher(self.plan, *self._create_launches(), self.device, stream)
        elif driver.is_capturing(stream):
            return None
        else:
            with driver.relaxed_capture_mode():
                launcher = GraphLauncher(self.plan, *self._create_launches(), self.device, stream, workspace)
        self._streams[stream] = weakref.ref(launcher)
        return launcher

    def _launch_with_pool(self, pointers: Mapping[str, int], stream: int) -> None:
        """Launches with a workspace from the memory pool."""
        with self.device.current():
            workspace = driver.allocate(self.workspace_bytes, stream, self._workspace_purpose)
            try:
                self(pointers, stream, workspace=workspace)
            except BaseException:
                _free_after_failure(workspace, stream)
                raise
            driver.free(workspace, stream)

    def _check(self, pointers: Mapping[str, int], workspace: int | None) -> None:
        """Raises NotSupported with every wrong name and address."""
        names = ", ".join(self.tensor_names)
        if not isinstance(pointers, Mapping):
            raise NotSupported(refuse("pointers", pointers, f"must be a dict of addresses of {names}", "pass one"))
        alignments = self._params.alignments
        addresses = {name: (address, alignments[name]) for name, address in pointers.items() if alignments.get(name)}
        if workspace is not None:
            addresses["workspace"] = workspace, ROW_ALIGNMENT_BYTES
        refusals = [
            *(
                refuse(name, None, f"pointers must name {names}", "add its address")
                for name in self.tensor_names
                if name not in pointers
            ),
            *(
                refuse(name, pointers[name], f"pointers must name {names} alone", "leave it out")
                for name in pointers
                if name not in self.tensor_names
            ),
            *(
                Refusal(name, _shown_address(address), f"must be a device address, {alignment}-byte aligned", "copy it")
                for name, (address, alignment) in addresses.items()
                if self.kernels and not (0 < (number := _number(address)) < _ADDRESS_END and number % alignment == 0)
            ),
            *(
                refuse(name, number, "must be an int from 0 to 2**64 - 1", "correct it")
                for name, number in pointers.items()
                if alignments.get(name) == 0 and not 0 <= _number(number) < _ADDRESS_END
            ),
        ]
        if refusals:
            raise NotSupported(refusals)


def bind(artifact: Artifact, plan: Plan, problem: Problem | None = None, device: int = 0) -> Bound:
    """Loads the artifact's kernels on GPU `device` and writes the kernel parameters that all launches share.

    problem: strides and scale of the operands; None for a standalone component GEMM, whose tensors are contiguous, and
        for an append or a merge, whose plan has the strides.

    NotSupported lists every argument of the wrong type, and every reason to refuse the problem.
    Stale: the artifact, the problem or the GPU does not belong to the plan. DoesNotFit: the GPU has too little
    shared memory. NoDevice: there is no GPU. DriverError: the driver rejected the cubin.
    """
    _check_types(artifact, plan, problem)
    device = driver.checked_ordinal(device)
    mismatches = [*_artifact_mismatches(artifact, plan), *_problem_mismatches(plan, problem)]
    if mismatches:
        raise Stale("\n".join(mismatches))
    gpu = driver.device(device)
    if not _runs_on(plan.architecture, gpu.compute_capability):
        major, minor = gpu.compute_capability
        raise Stale(
            f"{plan.symbol} is built for {plan.build.arch}: {gpu.name} has compute capability "
            f"{major}.{minor}; plan and compile for that"
        )
    with gpu.current(), driver.relaxed_capture_mode():
        kernels = tuple(_load_kernel(artifact, launch, gpu) for launch in plan.launches)
    return Bound(plan, problem, gpu, kernels)


def _check_types(artifact: object, plan: object, problem: object) -> None:
    """Raises NotSupported with every argument of `bind` that has the wrong type, and every reason against `problem`."""
    reasons = [
        refuse(name, given, f"must be {'an' if kind is Artifact else 'a'} {kind.__name__}", f"{remedy}")
        for name, given, kind, remedy in (
            ("artifact", artifact, Artifact, "pass what `compile` or a Folder returns for the plan's build"),
            ("plan", plan, Plan, "pass what `plan_forward` or `plan_backward` returns"),
        )
        if not isinstance(given, kind)
    ]
    reasons += [] if problem is None else planner.problem_refusals(problem)
    if reasons:
        raise NotSupported(reasons)


def bind_problem(
    problem: Problem | AppendProblem | MergeProblem, kernels: Callable[[Build], Artifact], device: int = 0
) -> Bound:
    """Plans the problem for GPU `device` and binds the best plan whose Artifact `kernels` returns.

    NotSupported: there is no plan. The other errors are those of `first_available` and `bind`.
    """
    gpu = driver.device(device)
    if isinstance(problem, Problem):
        plans = planner.plans_on(problem, gpu.compute_capability, gpu.num_sms)
        plan, artifact = first_available(plans, kernels)
        return bind(artifact, plan, problem, device)
    arch = portable_arch(gpu.compute_capability)
    plan = plan_append(problem, arch) if isinstance(problem, AppendProblem) else plan_merge(problem, arch)
    _, artifact = first_available([plan], kernels)
    return bind(artifact, plan, device=device)


def _load_kernel(artifact: Artifact, launch: Launch, gpu: driver.Device) -> int:
    """Loads the kernel of this launch, checks its parameters and returns its CUfunction handle."""
    try:
        return _load_from(_library(artifact, gpu), artifact, launch, gpu)
    except DriverError:
        # Launches of a kernel whose code found no memory fail later too. The next call loads the cubin anew.
        with _libraries_lock:
            _libraries.pop((gpu.ordinal, artifact.cubin), None)
        raise


def _load_from(library: int, artifact: Artifact, launch: Launch, gpu: driver.Device) -> int:
    """Does `_load_kernel` with the library of the artifact's cubin."""
    purpose = _purpose(artifact)
    handle = driver.get_kernel(library, launch.symbol, purpose)
    expected = _parameter_sizes(artifact, launch)  # equal to the plan's sizes: `bind` has checked that
    found = driver.parameter_sizes(handle, len(expected), purpose)
    if found != expected:
        raise Stale(
            f"{launch.symbol}: the driver reads parameters of {found} bytes, the plan has {expected}; "
            "compile the plan again"
        )
    # The driver's reserved shared memory does not count towards the limit.
    reserved = architecture(artifact.build.arch).reserved_shared_memory
    static_bytes = max(artifact.kernel(launch.symbol).static_shared_memory_bytes - reserved, 0)
    driver.allow_shared_memory(handle, gpu, launch.shared_memory_bytes, static_bytes, purpose)
    return driver.load_function(handle, purpose)


def _purpose(artifact: Artifact) -> str:
    """Returns what error messages call the code of an artifact."""
    return f"the kernels of {artifact.build.symbol}"


def _library(artifact: Artifact, gpu: driver.Device) -> int:
    """Returns the library of the artifact's cubin, which is loaded once per device."""
    key = (gpu.ordinal, artifact.cubin)
    with _libraries_lock:
        if key not in _libraries:
            _libraries[key] = driver.load_library(artifact.cubin, _purpose(artifact))
        return _libraries[key]


def _parameter_sizes(artifact: Artifact, launch: Launch) -> tuple[int, ...]:
    """Returns the parameter sizes (bytes) that the artifact states for this launch's kernel."""
    return tuple(parameter.size for parameter in artifact.kernel(launch.symbol).parameters)


def _artifact_mismatches(artifact: Artifact, plan: Plan) -> Iterator[str]:
    """Yields each reason why the artifact does not belong to the plan."""
    if artifact.build != plan.build:
        yield (
            f"artifact {artifact.build.symbol} for {artifact.build.arch}: built from another plan than "
            f"{plan.symbol} for {plan.build.arch}; compile this plan"
        )
        return
    if artifact.abi != abi_digest(plan.build):
        yield (
            f"{plan.symbol} for {plan.build.arch}: the artifact's kernels were compiled by a version with other kernel "
            "parameters; compile the plan again"
        )
    struct_bytes = abi.numpy_struct(abi.fields_of(plan.build)).itemsize
    for launch in plan.launches:
        expected = *(abi.TENSOR_MAP_BYTES for _ in launch.tensor_maps), struct_bytes
        found = _parameter_sizes(artifact, launch)
        if found != expected:
            yield (
                f"{launch.symbol}: the artifact's parameters have {found} bytes, the plan has {expected}; "
                "compile the plan again"
            )


def _problem_mismatches(plan: Plan, problem: Problem | None) -> Iterator[str]:
    """Yields each reason why the problem does not belong to the plan."""
    build = plan.build
    if problem is None:
        if build.kind not in ("component_gemm", *ROW_KINDS):
            yield f"problem = None: a {build.kind} plan needs the strides and scale of its problem; pass it"
        return
    if problem.direction != build.kind:
        yield f"problem.direction = {problem.direction!r}: the plan is a {build.kind} plan; plan this problem"
        return
    shape = problem.shape
    pairs: list[tuple[str, object, object]] = [
        ("dtype", problem.dtype, build.dtype),
        ("mask", problem.form, build.mask),
        ("features", problem.features, build.features),
        ("gradients", problem.gradients, build.gradients),
        ("head_dim", shape.head_dim, build.head_dim),
        ("head_dim_value", shape.head_dim_value, build.head_dim_value),
        ("grad_bias_mode", grad_bias_mode(problem), build.grad_bias_mode),
    ]
    yield from (
        f"problem has {name}: the plan's kernel does not support it; plan this problem"
        for name in FAMILIES[build.family].unsupported_features(problem)
    )
    if starts_from_logsumexp(build) and problem.scale_value == 0:
        yield "problem.scale = 0: the plan's kernel divides by the scale; plan this problem"
    planned = dict(plan.params)
    if build.form.has_ranges:
        axes, sizes = tile_lists.definitions(problem, build), launch_rules.sizes(problem)
        pairs += [(n, axes[n].evaluate(sizes), planned.get(n)) for n in ("ranges_batch", "ranges_heads")]
        if problem.visible_blocks is not None:
            yield from map(str, undivided(problem.block_size, build.tile_m, build.tile_n))
    pairs += [(name, size, planned.get(name)) for name, size in launch_rules.params(problem, build)]
    for name, given, expected in pairs:
        if given != expected:
            yield f"problem.{name} = {given}: the plan has {expected}; plan this problem"
    access = {
        "rows": (builder.row_vector_bytes(problem), build.vector_bytes),
        "bias": (builder.bias_vector_bytes(problem.bias), build.bias_vector_bytes),
        "grad_bias": (builder.bias_vector_bytes(problem.grad_bias), build.grad_bias_vector_bytes),
    }
    for name, (found, needed) in access.items():
        if found < needed:
            yield f"problem's {name} allows vectors of {found} bytes: the plan needs {needed}; plan this problem"


def _number(value: object) -> int:
    """Returns an address or a number of a launch as an int; -1, which is neither, for anything else."""
    number = integer_of(value)
    return -1 if number is None else number


def _shown_address(value: object) -> str:
    number = integer_of(value)
    return shown(value) if number is None else f"{number:#x}"


def _no_launcher() -> None:
    """Takes the place of a launcher's weak reference after the first call on a stream."""


def _free_after_failure(address: int, stream: int) -> None:
    """Frees memory after a failed launch, and ignores errors: the launch's own error is the one to report."""
    try:
        driver.free(address, stream)
    except DriverError:
        return
