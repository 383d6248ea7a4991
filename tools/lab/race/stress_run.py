"""Stress run: one kernel launched again and again beside its stress builds, every launch compared on the device.

A case fills every SM at least twice. Repeatable results must agree in every bit with the first launch of the plain
kernel: alone, beside a noise kernel, and after a producer that writes the operands late. Sums whose order the scheduler
decides are compared with float64 whenever a launch differs from the first by more than any launch before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.inspection.occupancy import occupancy
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.kernels.sm90_family.tile_time import MULTICAST_LENGTH
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import PER_HEAD, SPLIT_KV
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Launch, Plan
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.quantization import SCALES, TENSOR, granularity
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import E4M3, OPERANDS
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check, component_gemms, device_memory, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.cases import decode_cases
from tools.lab.race import stress_builds
from tools.lab.race.stress_kernels import Kernels
from tools.release import record
from tools.release.verify_gpu import unordered

Array = npt.NDArray[Any]

WAVES: Final = 2  # how often a case fills every SM
QUERIES, KEYS = 500, 520
HEADS_QUERIES, HEADS_KEYS = 200, 300  # of kernels that run one block per head: the operands fit in the L2 cache
ALONE, NOISE, PRODUCER = "alone", "noise", "producer"
NOISE_NANOSECONDS: Final = 200_000
LATE_NANOSECONDS: Final = 50_000
FURTHER: Final = 1.5  # factor of the last checked distance from which a launch is checked again

# The axis of the heads in each tensor that has one.
HEAD_AXES: Final = {
    **dict.fromkeys(("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"), 2),
    "key_rope": 2,
    **{"logsumexp": 1, "bias": 1, "grad_bias": 1, "alibi_slopes": 0, "sinks": 0, "grad_sinks": 0},
}

_LENGTHS: Final = "n260x520,0x70,129,300x10"
# sm90 kernels beside those that ptx/ shows: masks, grouped heads, head dims and score terms.
FEATURES: Final = tuple(
    map(
        Case.parse,
        (
            f"forward bf16_d128_q{QUERIES}_s{KEYS}_b2_h4k1_causal_br_window150 seed=11",
            f"forward bf16_d128_q{QUERIES}_s{KEYS}_b2_h1_full_biasbhqk seed=12",
            f"forward f16_d64_q{QUERIES}_s{KEYS}_b2_h1_causal_dropout0.1 philox_seed=5 seed=13",
            f"forward f16_d128_q{QUERIES}_s{KEYS}_b2_h1_causal_softcap4_alibi_sinks seed=14",
            f"forward bf16_d256_q{QUERIES}_s{KEYS}_b2_h1_full seed=15",
            f"forward bf16_d192v128_q{QUERIES}_s{KEYS}_b2_h1_causal seed=16",
            f"forward bf16_d192v128_q4100_s{MULTICAST_LENGTH}_b1_h1_causal seed=27",
            f"forward bf16_d128_{_LENGTHS}_h1_causal seed=17",
            f"forward bf16_d512_q{QUERIES}_s{KEYS}_b2_h1_causal seed=28",
            f"forward f16_d320_q{QUERIES}_s{KEYS}_b2_h4k1_full_softcap4_alibi_sinks seed=29",
            f"forward bf16_d384v448_{_LENGTHS}_h1_causal_br_window150 seed=30",
            f"forward e4m3_d128_q{QUERIES}_s{KEYS}_b2_h1_causal_descalehead seed=34",
            f"forward e4m3_d256_q{QUERIES}_s{KEYS}_b2_h4k1_full_descalebatch_f16out seed=35",
            f"forward bf16_d576v512_q2_s{KEYS}_b3_h64k1_causal_br_paged64_mla seed=36",
            f"forward bf16_d128_q{QUERIES}_s{KEYS}_b2_h4k1_causal_br_paged64_kv8_descalehead seed=37",
            f"forward bf16_d128_q1_s{KEYS}_b3_h8k2_full_paged16_kv8_descalerow seed=38",
            f"forward bf16_d576v512_q2_s{KEYS}_b3_h64k1_causal_br_paged64_mla_kv8_descaletile seed=39",
            f"backward bf16_d128_q{QUERIES}_s{KEYS}_b2_h4k1_causal_br_window150 seed=18",
            f"backward f16_d96_q{QUERIES}_s{KEYS}_b2_h1_window_left100_right30 seed=19",
            f"backward bf16_d80v40_q{QUERIES}_s{KEYS}_b2_h1_causal seed=20",
            f"backward bf16_d128_q{QUERIES}_s{KEYS}_b2_h1_causal_deterministic seed=21",
            f"backward f16_d64_q{QUERIES}_s{KEYS}_b2_h1_causal_dropout0.1 philox_seed=6 seed=22",
            f"backward f16_d128_q{QUERIES}_s{KEYS}_b2_h1_causal_softcap4_alibi_sinks_gradsqkv seed=23",
            f"backward bf16_d128_{_LENGTHS}_h1_causal seed=24",
            f"backward bf16_d256_q{QUERIES}_s{KEYS}_b2_h1_full seed=25",
            f"backward bf16_d192v128_q{QUERIES}_s{KEYS}_b2_h1_causal seed=26",
            "backward bf16_d128_q700_s500_b5_h7_full_sinks seed=40",
            "backward f16_d64_q1100_s640_b5_h7_full_sinks seed=41",
            f"backward bf16_d512_q{QUERIES}_s{KEYS}_b2_h1_causal seed=31",
            f"backward f16_d320_q{QUERIES}_s{KEYS}_b2_h4k1_full_softcap4_alibi_sinks seed=32",
            f"backward bf16_d384v448_{_LENGTHS}_h1_causal_br_window150 seed=33",
            f"backward bf16_d128_q{QUERIES}_s{KEYS}_b2_h1_causal_biasbhqk seed=42",
            f"backward f16_d64_q{QUERIES}_s{KEYS}_b2_h1_full_biasbhqk_alibi seed=43",
            "backward bf16_d128_q700_s520_b2_h1_causal_biasbhqkgrad seed=48",
            "backward f16_d64_q700_s520_b2_h1_full_biasbhqkgrad_deterministic seed=49",
            "backward bf16_d128_q700_s520_b2_h1_causal_biassum seed=50",
            "backward bf16_d64_q260_s264_b24_h1_full_biassum seed=51",
        ),
    )
)
# Forwards whose few query tiles are in parts, which fill the SMs.
IN_PARTS: Final = tuple(
    map(
        Case.parse,
        (
            "forward bf16_d128_q500_s4200_b1_h2_causal_br seed=44",
            "forward bf16_d64_n260x3000,0x70,129x2500,300x10_h2_causal_br seed=45",
            "forward f16_d256_q300_s2300_b1_h2k1_full seed=46",
            "forward bf16_d128_q300_s2300_b1_h4k2_causal_br_paged64 seed=47",
            "forward bf16_d64_q300_s2300_b1_h4k2_causal_br_sinks seed=52",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem of one kernel. launch: binds kernels to guarded buffers; ratios: error / allowed of each result;
    extents: elements of each operand with gaps, from the first to the last."""

    line: str
    launch: Callable[[check.Kernels], device_memory.GuardedLaunch]
    ratios: Callable[[dict[str, Array]], dict[str, float]]
    extents: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """The log's fields of one kernel: launches of each kind, worst error / allowed, and the spread of free results."""

    launches: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, launches: int) -> None:
        """Counts launches that passed."""
        self.launches[kind] = self.launches.get(kind, 0) + launches

    def check(self, ratios: Mapping[str, float], what: str) -> None:
        """Keeps the worst ratios; AssertionError for one above 1."""
        failed = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
        assert not failed, (
            f"{what}: error / allowed {', '.join(f'{name} {value:.3g}' for name, value in failed.items())}"
        )
        for name, ratio in ratios.items():
            self.worst[name] = max(self.worst.get(name, 0.0), round(ratio, 4))


def feature_builds() -> dict[Build, Case]:
    """Returns the kernels of FEATURES, which have more heads in their workloads, and of IN_PARTS, with their cases."""
    found = {}
    for case in (*FEATURES, *IN_PARTS):
        builds = planner.builds_on(case.problem(), (9, 0))
        found[next(build for build in builds if (build.variant == SPLIT_KV) == (case in IN_PARTS))] = case
    return found


def workloads(artifact: Artifact, gpu: driver.Device) -> list[Workload]:
    """Returns the problems of a kernel. A decode kernel has one whose keys several blocks share, and one that fills the
    GPU without."""
    build = artifact.build
    if build.kind == "component_gemm":
        return [_component_gemm(artifact, gpu)]
    base = feature_builds().get(build)
    if build.family == "decode":
        base = base or decode_cases.of_build(build)[0].replace(layout="dense")
        return [fused(base, 1), fused(base, _times(base, artifact, gpu))]
    base = base or _base(build)
    return [fused(base, _times(base, artifact, gpu))]


def _base(build: Build) -> Case:
    """Returns a case of two heads for which the planner selects the kernel."""
    queries, keys = _lengths(build)
    spec = ProblemSpec(
        build.dtype,
        build.head_dim,
        num_queries=queries,
        num_keys=keys,
        batch=2,
        head_dim_value=build.head_dim_value,
        mask=masks.from_name(build.mask),
        deterministic=build.deterministic,
    )
    return Case(build.kind, spec, seed=1)


def _lengths(build: Build) -> tuple[int, int]:
    """Returns (queries, keys) for which the planner selects the kernel."""
    if build.variant == PER_HEAD:
        return HEADS_QUERIES, HEADS_KEYS
    return (MULTICAST_LENGTH, MULTICAST_LENGTH) if kernel_of(build).lengths == "long" else (QUERIES, KEYS)


def _times(base: Case, artifact: Artifact, gpu: driver.Device) -> int:
    """Returns the factor of the heads with which the case fills every SM WAVES times."""
    if artifact.build.variant == SPLIT_KV:  # with more, the planner has another kernel
        return 1
    if artifact.build.variant == PER_HEAD:  # with fewer, another kernel is faster
        return ceil_div(WAVES * gpu.num_sms, base.spec.batch * base.spec.num_heads_key)
    times = 1
    while True:
        case = with_heads(base, times)
        plan = plan_of(case, artifact.build, gpu)
        blocks, needed = blocks_of(plan, case), WAVES * gpu.num_sms * resident(plan, artifact)
        if blocks >= needed:
            return times
        times *= max(2, ceil_div(needed, max(blocks, 1)))


def with_heads(base: Case, times: int) -> Case:
    """Returns the case with `times` as many heads."""
    return base.replace(num_heads=base.spec.num_heads * times, num_heads_key=base.spec.num_heads_key * times)


def expect(base: Case, times: int) -> guarded_check.Expected:
    """Returns inputs and results of `with_heads`: copies of the base's heads, scaled by powers of two.

    The reference would be slow for all heads, and equal heads would hide a tile of another head. With dropout, which
    depends on the head's index, the reference computes all heads.
    """
    whole = with_heads(base, times)
    if base.spec.dropout_p or _has_common_scale(whole.problem()):
        return guarded_check.expect(whole)
    found = guarded_check.expect(base)
    parts = ({name: _copies(base, name, array, times) for name, array in part.items()} for part in _parts(found))
    return guarded_check.Expected(*parts)


def _has_common_scale(problem: Problem) -> bool:
    """Returns whether heads of e4m3 codes have one scale: then a head cannot be scaled without rounding its codes."""
    coded = [name for name in OPERANDS if getattr(problem, name).dtype in E4M3]
    scales = [problem.scales.get(f"{name}_scale") for name in coded if name != "value" or not problem.value_in_key]
    return any(scale is None or granularity(scale) == TENSOR for scale in scales)


def _parts(found: guarded_check.Expected) -> tuple[dict[str, Array], ...]:
    return found.arrays, found.truth, found.low


def _copies(base: Case, name: str, array: Array, times: int) -> Array:
    if name in SCALES:
        axis = min(array.ndim, 3) - 1  # the head is the last axis, but for the scale of each tile of columns
    elif name in HEAD_AXES:
        axis = HEAD_AXES[name]
    else:
        return array
    exponents = (0 if str(array.dtype) in E4M3 else _exponent(base, name, number) for number in range(times))
    return np.concatenate([array * array.dtype.type(2.0**exponent) for exponent in exponents], axis)


def _exponent(base: Case, name: str, number: int) -> int:
    """Returns the exponent of a copy's factor. Q K^T is the same in all copies, V and dO differ; no two neighbours are
    equal. In a latent cache the factor of V is that of K. The factor of e4m3 codes is that of their scales."""
    query, value, grad = (count % 3 - 1 for count in (number, number + number // 3, 2 * number))
    if base.spec.value_in_key:
        value = -query
    return {
        "query": query,
        "key": -query,
        "key_rope": -query,
        "value": value,
        "output": value,
        "grad_output": grad,
        "grad_value": grad,
        "grad_query": grad + value - query,
        "grad_key": grad + value + query,
        "grad_bias": grad + value,
        "grad_sinks": grad + value,
    }.get(name.removesuffix("_scale"), 0)


def plan_of(case: Case, build: Build, gpu: driver.Device) -> Plan:
    """Returns the plan with this build; Stale if the GPU has none for the case."""
    problem = case.problem()
    for plan in planner.plans_on(problem, gpu.compute_capability, gpu.num_sms):
        if plan.build == build:
            return plan
    raise Stale(f"{build.symbol} for {build.arch}: {gpu.name} has no such plan for {case.line}; build for it again")


def blocks_of(plan: Plan, case: Case) -> int:
    """Returns the blocks of the main kernel; for a persistent kernel its work tiles."""
    build, shape = plan.build, case.shape
    if build.shares_chunks:
        return ceil_div(shape.num_queries * shape.group, build.tile_m) * shape.num_heads_key * shape.batch
    if build.family == "sm90":
        rows, tile = (shape.num_queries, build.tile_m) if build.kind == "forward" else (shape.num_keys, build.tile_n)
        heads = shape.num_heads if build.kind == "forward" else shape.num_heads_key
        return ceil_div(rows, tile) * heads * shape.batch
    return math.prod(_main(plan).grid)


def _main(plan: Plan) -> Launch:
    main = entry_points.entries(plan.build)["main"]
    return next(launch for launch in plan.launches if launch.symbol == main)


def resident(plan: Plan, artifact: Artifact) -> int:
    """Returns how many blocks of the main kernel one SM holds."""
    main = artifact.main
    memory_bytes = _main(plan).shared_memory_bytes
    static = main.static_shared_memory_bytes
    return occupancy(plan.build.arch, plan.build.threads, main.registers, memory_bytes, static).blocks


def fused(base: Case, times: int) -> Workload:
    """Returns the workload of a fused kernel with `times` as many heads."""
    case, expected = with_heads(base, times), expect(base, times)
    return Workload(
        case.line,
        lambda chosen: guarded_check.guarded_case(case, expected, chosen),
        lambda found: guarded_check.ratios(case, expected, found),
        _extents(case.problem()),
    )


def _extents(problem: Problem) -> dict[str, int]:
    """Returns the extents of a workload. The values of a latent cache have gaps: they are the first columns of its
    keys."""
    operands = {name: getattr(problem, name) for name in OPERANDS}
    return {
        name: 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
        for name, tensor in operands.items()
        if not tensor.is_contiguous
    }


def _component_gemm(artifact: Artifact, gpu: driver.Device) -> Workload:
    build = artifact.build
    gemm = component_gemms.ComponentGemm(build.component_gemm, build.family, build.dtype, build.head_dim)
    tiles = WAVES * gpu.num_sms * resident(gemm.plan(1, build.arch), artifact)
    plan = gemm.plan(tiles, build.arch)
    given = component_gemms.operands(plan, "gaussian", 1)
    truth = component_gemms.product(plan, given)
    return Workload(
        f"{build.component_gemm} {tiles} tiles",
        lambda chosen: device_memory.guarded_component_gemm(plan, given, chosen),
        lambda found: {"c": component_gemms.relative_error(found["c"], truth) / component_gemms.ALLOWED[build.dtype]},
    )


class Repeater:
    """A kernel in guarded buffers, with device copies of its operands and of the results that it must repeat."""

    def __init__(
        self, guarded: device_memory.GuardedLaunch, workload: Workload, tools: Kernels, streams: tuple[int, int]
    ) -> None:
        self.guarded = guarded
        self._workload, self._tools = workload, tools
        self._stream, self._noise_stream = streams
        found = {name: buffer.read() for name, buffer in guarded.buffers.items()}
        self._sizes = {
            name: workload.extents.get(name, array.size) * array.itemsize for name, array in found.items()
        }  # bytes, with the gaps
        self._operands: dict[str, int] = {}  # addresses of the copies
        self._expected: dict[str, tuple[int, Array]] = {}
        self._farthest = dict.fromkeys(unordered(guarded.bound.plan), 0.0)  # of results that need not repeat

    def checked_results(self, name: str, findings: Findings) -> dict[str, Array]:
        """Returns the results of one launch; AssertionError if one is too far from float64."""
        self._launch(ALONE, 0)
        driver.synchronise(self._stream)
        found = self.guarded.read()
        findings.check(self._workload.ratios(found), f"{name}: {self._workload.line}")
        return found

    def keep(self, expected: Mapping[str, Array], stack: ExitStack) -> None:
        """Copies operands and expected results to the device, until the stack closes."""
        for name, buffer in self.guarded.buffers.items():
            if not buffer.is_output:
                self._operands[name] = stack.enter_context(_on_device(_bytes_at(buffer.address, self._sizes[name])))
        for name, values in expected.items():
            self._expected[name] = stack.enter_context(_on_device(values)), values

    def repeat(self, mode: str, launches: int, what: str, findings: Findings) -> None:
        """Launches `launches` times; AssertionError at the first with other bits or an inaccurate free result."""
        for number in range(1, launches + 1):
            self._launch(mode, number)
            for name, (kept, values) in self._expected.items():
                address = self.guarded.buffers[name].address
                found = self._tools.difference(values.dtype.name, address, kept, values.nbytes, self._stream)
                place = f"{what}, {mode}, launch {number} of {launches}: {self._workload.line}"
                if name in self._farthest:
                    self._check_if_further(name, found.distance, place, findings)
                else:
                    assert not found.words, f"{place}: {name} differs in {found.words} words, by {found.distance:.3g}"
        driver.synchronise(self._noise_stream)
        self.guarded.read()  # checks the guards
        findings.add(what if mode == ALONE and what != stress_builds.PLAIN else mode, launches)

    def _launch(self, mode: str, number: int) -> None:
        for name, buffer in self.guarded.buffers.items():
            if buffer.is_output:
                _fill_with_ones(buffer.address, self._sizes[name], self._stream)
        if self.guarded.workspace is not None:
            _fill_with_ones(self.guarded.workspace, self.guarded.bound.workspace_bytes // 4 * 4, self._stream)
        if mode == NOISE:
            self._tools.noise(number, NOISE_NANOSECONDS, self._noise_stream)
        if mode == PRODUCER:
            for name, copy in self._operands.items():
                address, size = self.guarded.buffers[name].address, self._sizes[name]
                _fill_with_ones(address, size, self._stream)
                self._tools.copy_late(address, copy, size, LATE_NANOSECONDS, self._stream)
        self.guarded.launch(self._stream)

    def _check_if_further(self, name: str, distance: float, place: str, findings: Findings) -> None:
        if distance <= self._farthest[name] * FURTHER:
            return
        findings.check(
            self._workload.ratios(self.guarded.read()), f"{place}: {name} differs by {distance:.3g} from the first"
        )
        self._farthest[name] = distance
        findings.spread[name] = max(findings.spread.get(name, 0.0), distance)


def stress(
    builds: Mapping[str, Artifact], given: Sequence[Workload], tools: Kernels, repeats: int, delayed: int
) -> Findings:
    """Launches the plain kernel, the first of the builds, `repeats` times in each mode and the others `delayed` times;
    AssertionError says what failed."""
    findings = Findings()
    with device_memory.stream() as own, device_memory.stream() as noise:
        for workload in given:
            findings.problems.append(workload.line)
            plain: dict[str, Array] = {}
            for name, artifact in builds.items():
                is_plain = name == stress_builds.PLAIN
                guarded = workload.launch(_only(artifact))
                found = _repeated(
                    name,
                    Repeater(guarded, workload, tools, (own, noise)),
                    plain,
                    repeats if is_plain else delayed,
                    findings,
                )
                plain = plain or found
    return findings


def _repeated(
    name: str, repeater: Repeater, plain: dict[str, Array], launches: int, findings: Findings
) -> dict[str, Array]:
    """Stresses one build, and returns the results that it must repeat: those of the plain kernel for a delay build.

    Another optimisation level may round otherwise: its first results are compared with float64.
    """
    with ExitStack() as stack:
        stack.enter_context(repeater.guarded)
        expected = plain if name.startswith(stress_builds.DELAY) else repeater.checked_results(name, findings)
        repeater.keep(expected, stack)
        for mode in (ALONE, NOISE, PRODUCER) if name == stress_builds.PLAIN else (ALONE,):
            repeater.repeat(mode, launches, name, findings)
    return expected


def line_of(builds: Mapping[str, Artifact], findings: Findings) -> record.Json:
    """Returns the kernel's own fields of the log."""
    plain = builds[stress_builds.PLAIN]
    return {
        "cubin_sha256": record.sha256(plain.cubin),
        "symbol": plain.build.symbol,
        "arch": plain.build.arch,
        "builds": {name: record.sha256(artifact.cubin) for name, artifact in builds.items()},
        "launches": findings.launches,
        "problems": findings.problems,
        "spread": findings.spread,
        "worst": findings.worst,
    }


def _only(artifact: Artifact) -> check.Kernels:
    """Returns a source of this kernel alone."""

    def chosen(build: Build) -> Artifact:
        if build != artifact.build:
            raise Stale(f"{build.symbol} for {build.arch}: not the kernel under stress")
        return artifact

    return chosen


def _fill_with_ones(address: int, size: int, stream: int) -> None:
    """Sets every bit: NaN in every float type, and not zero in any counter."""
    if size:
        driver.memset_words(address, size, device_memory.ALL_ONES, size // 4, 1, stream)


def _bytes_at(address: int, size: int) -> Array:
    """Returns the bytes at an address on the device."""
    found = np.empty(size, np.uint8)
    driver.copy_to_host(found.ctypes.data, address, size, 0)
    driver.synchronise(0)
    return found


@contextmanager
def _on_device(values: Array) -> Iterator[int]:
    """Yields the address of a copy of the values."""
    contiguous = np.ascontiguousarray(values)
    address = driver.allocate_now(max(contiguous.nbytes, 4), "a copy of a test tensor")
    try:
        driver.copy_to_device(address, contiguous.ctypes.data, contiguous.nbytes, 0)
        driver.synchronise(0)
        yield address
    finally:
        driver.free_now(address)
