"""Stress run: one kernel launched again and again beside its stress builds, every launch compared on the device.

A problem fills every SM at least twice. Results that the kernel repeats must agree in every bit with the first launch
of the plain kernel, alone, beside noise and behind a producer that is late; sums whose order the scheduler chooses are
judged against float64 whenever a launch has moved further from the first than any before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cutlass_py_attn import driver, kernels, planner
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import Stale
from cutlass_py_attn.gemm.plans import plan_room
from cutlass_py_attn.hopper import MULTICAST_LENGTH
from cutlass_py_attn.inspection.occupancy import occupancy
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.plan import Build, Launch, Plan
from tests.gpu import check, decodes, drawn_check, memory, rooms
from tests.gpu.drawn import Drawn
from tools import record, stress_builds
from tools.stress_kernels import Kernels
from tools.verify_gpu import unordered

Array = npt.NDArray[Any]

WAVES: Final = 2  # how often a problem fills every SM
QUERIES, KEYS = 500, 520
HEADS_QUERIES, HEADS_KEYS = 200, 300  # of kernels whose blocks take whole heads: what they work on fits the L2 cache
ALONE, NOISE, PRODUCER = "alone", "noise", "producer"
NOISE_NANOSECONDS: Final = 200_000
LATE_NANOSECONDS: Final = 50_000
FURTHER: Final = 1.5  # times the distance that was judged last: a launch this far off is judged as well

# Where the heads lie in what has any.
HEAD_AXES: Final = {
    **dict.fromkeys(("query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value"), 2),
    **{"logsumexp": 1, "bias": 1, "alibi_slopes": 0, "sinks": 0},
}

# Hopper kernels beside those that ptx/ shows: masks, grouped heads, dims, and what only some scores have.
FEATURES: Final = (
    Drawn("forward", "bfloat16", 2, 4, QUERIES, KEYS, 128, heads_key=1, mask="causal_br:150", seed=11),
    Drawn("forward", "bfloat16", 2, 1, QUERIES, KEYS, 128, bias="bhqk", seed=12),
    Drawn("forward", "float16", 2, 1, QUERIES, KEYS, 64, mask="causal", dropout_p=0.1, philox_seed=5, seed=13),
    Drawn("forward", "float16", 2, 1, QUERIES, KEYS, 128, mask="causal", softcap=4.0, alibi="h", sinks=True, seed=14),
    Drawn("forward", "bfloat16", 2, 1, QUERIES, KEYS, 256, seed=15),
    Drawn("forward", "bfloat16", 2, 1, QUERIES, KEYS, 192, dim_value=128, mask="causal", seed=16),
    Drawn("forward", "bfloat16", 1, 1, 4100, MULTICAST_LENGTH, 192, dim_value=128, mask="causal", seed=27),
    Drawn(
        "forward", "bfloat16", 1, 1, 1, 1, 128, mask="causal", seed=17,
        sequences="260/520/520,0/70/70,129/129/129,300/10/10",
    ),
    Drawn("backward", "bfloat16", 2, 4, QUERIES, KEYS, 128, heads_key=1, mask="causal_br:150", seed=18),
    Drawn("backward", "float16", 2, 1, QUERIES, KEYS, 96, mask="window:100:30", seed=19),
    Drawn("backward", "bfloat16", 2, 1, QUERIES, KEYS, 80, dim_value=40, mask="causal", seed=20),
    Drawn("backward", "bfloat16", 2, 1, QUERIES, KEYS, 128, mask="causal", deterministic=True, seed=21),
    Drawn("backward", "float16", 2, 1, QUERIES, KEYS, 64, mask="causal", dropout_p=0.1, philox_seed=6, seed=22),
    Drawn("backward", "float16", 2, 1, QUERIES, KEYS, 128, mask="causal", softcap=4.0, alibi="h", sinks=True, seed=23),
    Drawn(
        "backward", "bfloat16", 1, 1, 1, 1, 128, mask="causal", seed=24,
        sequences="260/520/520,0/70/70,129/129/129,300/10/10",
    ),
    Drawn("backward", "bfloat16", 2, 1, QUERIES, KEYS, 256, seed=25),
    Drawn("backward", "bfloat16", 2, 1, QUERIES, KEYS, 192, dim_value=128, mask="causal", seed=26),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem of one kernel. judge: error / allowed of each result; free: results that need not repeat."""

    line: str
    place: Callable[[check.Kernels], memory.Placed]
    judge: Callable[[dict[str, Array]], dict[str, float]]
    free: frozenset[str] = frozenset()


@dataclass(slots=True)
class Findings:
    """What the log says of one kernel: launches of each kind, error / allowed, and how far free results moved."""

    launches: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, launches: int) -> None:
        """Launches that passed."""
        self.launches[kind] = self.launches.get(kind, 0) + launches

    def judged(self, ratios: Mapping[str, float], what: str) -> None:
        """Keep the worst; AssertionError for one above 1."""
        failed = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
        assert not failed, (
            f"{what}: error / allowed {', '.join(f'{name} {value:.3g}' for name, value in failed.items())}"
        )
        for name, ratio in ratios.items():
            self.worst[name] = max(self.worst.get(name, 0.0), round(ratio, 4))


def feature_builds() -> dict[Build, Drawn]:
    """The kernels of FEATURES."""
    return {planner.builds(drawn.problem(), "sm_90a")[0]: drawn for drawn in FEATURES}


def workloads(artifact: Artifact, gpu: driver.Device) -> list[Workload]:
    """The problems of a kernel; a decode has one whose keys are shared by blocks and one that fills the GPU."""
    build = artifact.build
    if build.kind == "room":
        return [_room(artifact, gpu)]
    sizes = *_lengths(build), build.head_dim, build.head_dim_value
    base = feature_builds().get(build) or Drawn(
        build.kind, build.dtype, 2, 1, *sizes, mask=build.mask, deterministic=build.deterministic, seed=1
    )
    if build.family == "decode":
        base = replace(decodes.of_build(build)[0], layout="dense")
        return [fused(base, 1, build), fused(base, _times(base, artifact, gpu), build)]
    return [fused(base, _times(base, artifact, gpu), build)]


def _lengths(build: Build) -> tuple[int, int]:
    """Queries and keys that the kernel takes."""
    if build.whole_heads:
        return HEADS_QUERIES, HEADS_KEYS
    return (MULTICAST_LENGTH, MULTICAST_LENGTH) if build.multicast else (QUERIES, KEYS)


def _times(base: Drawn, artifact: Artifact, gpu: driver.Device) -> int:
    """How many times as many heads fill every SM WAVES times."""
    if artifact.build.whole_heads:  # with fewer, another kernel is faster
        return ceil_div(WAVES * gpu.num_sms, base.batch * (base.heads_key or base.heads))
    times = 1
    while True:
        drawn = with_heads(base, times)
        plan = plan_of(drawn, artifact.build, gpu)
        blocks, needed = blocks_of(plan, drawn), WAVES * gpu.num_sms * resident(plan, artifact)
        if blocks >= needed:
            return times
        times *= max(2, ceil_div(needed, max(blocks, 1)))


def with_heads(base: Drawn, times: int) -> Drawn:
    """The problem with that many times as many heads."""
    return replace(base, heads=base.heads * times, heads_key=base.heads_key * times)


def expect(base: Drawn, times: int) -> drawn_check.Expected:
    """Inputs and results of `with_heads`: the heads of the base again and again, their numbers times powers of two.

    The reference would take long for all of them, and equal heads would hide a tile of another head. Dropout depends on
    the head's number, so that nothing repeats.
    """
    if base.dropout_p:
        return drawn_check.expect(with_heads(base, times))
    found = drawn_check.expect(base)
    parts = ({name: _copies(name, array, times) for name, array in part.items()} for part in _parts(found))
    return drawn_check.Expected(*parts)


def _parts(found: drawn_check.Expected) -> tuple[dict[str, Array], ...]:
    return found.arrays, found.truth, found.low


def _copies(name: str, array: Array, times: int) -> Array:
    if name not in HEAD_AXES:
        return array
    copies = [array * array.dtype.type(2.0 ** _exponent(name, number)) for number in range(times)]
    return np.concatenate(copies, HEAD_AXES[name])


def _exponent(name: str, number: int) -> int:
    """Of the factor of a copy: Q K^T is the same in all, V and dO differ. Next to each other no two are equal."""
    query, value, grad = (count % 3 - 1 for count in (number, number + number // 3, 2 * number))
    return {
        "query": query,
        "key": -query,
        "value": value,
        "output": value,
        "grad_output": grad,
        "grad_value": grad,
        "grad_query": grad + value - query,
        "grad_key": grad + value + query,
    }.get(name, 0)


def plan_of(drawn: Drawn, build: Build, gpu: driver.Device) -> Plan:
    """Of this build for the problem; Stale where the GPU has none."""
    problem = drawn.problem()
    for plan in planner.plans_on(problem, gpu.compute_capability, gpu.num_sms):
        if plan.build == build:
            return plan
    raise Stale(f"{build.symbol} for {build.arch}: {gpu.name} has no such plan for {drawn.line}; build for it again")


def blocks_of(plan: Plan, drawn: Drawn) -> int:
    """Blocks of the main kernel; of one whose blocks stay and take tiles in turn, the tiles."""
    build = plan.build
    if build.family == "hopper":
        shape = drawn.shape
        rows, tile = (shape.num_queries, build.tile_m) if build.kind == "forward" else (shape.num_keys, build.tile_n)
        heads = shape.num_heads if build.kind == "forward" else shape.num_heads_key
        return ceil_div(rows, tile) * heads * shape.batch
    return math.prod(_main(plan).grid)


def _main(plan: Plan) -> Launch:
    main = kernels.entries(plan.build)["main"]
    return next(launch for launch in plan.launches if launch.symbol == main)


def resident(plan: Plan, artifact: Artifact) -> int:
    """Blocks of the main kernel that one SM holds."""
    main = artifact.main
    memory_bytes = _main(plan).shared_memory_bytes
    static = main.static_shared_memory_bytes
    return occupancy(plan.build.arch, plan.build.threads, main.registers, memory_bytes, static).blocks


def fused(base: Drawn, times: int, build: Build) -> Workload:
    """Of a fused kernel, with `times` as many heads."""
    drawn, expected = with_heads(base, times), expect(base, times)
    numbers = {"philox_seed": drawn.philox_seed, "philox_offset": drawn.philox_offset} if drawn.dropout_p else {}
    return Workload(
        drawn.line,
        lambda chosen: memory.placed(drawn.problem(), expected.arrays, chosen, numbers),
        lambda found: drawn_check.findings(drawn, expected, found),
        frozenset(unordered(build)),
    )


def _room(artifact: Artifact, gpu: driver.Device) -> Workload:
    build = artifact.build

    def planned(tiles: int) -> Plan:
        return plan_room(build.room, build.family, build.dtype, build.head_dim, build.arch, tiles)

    plan = planned(WAVES * gpu.num_sms * resident(planned(1), artifact))
    given = rooms.operands(plan, "gaussian", 1)
    truth = rooms.product(plan, given)
    return Workload(
        f"{build.room} {dict(plan.sizes)['tiles']} tiles",
        lambda chosen: memory.placed_room(plan, given, chosen),
        lambda found: {"c": rooms.relative_error(found["c"], truth) / rooms.ALLOWED[build.dtype]},
    )


class Repeater:
    """A kernel in buffers of its own, beside copies of its operands and of the results that it must repeat."""

    def __init__(self, placed: memory.Placed, workload: Workload, tools: Kernels, streams: tuple[int, int]) -> None:
        self.placed = placed
        self._workload, self._tools = workload, tools
        self._stream, self._noise_stream = streams
        self._sizes = {name: buffer.read().nbytes for name, buffer in placed.buffers.items()}
        self._operands: dict[str, int] = {}  # addresses of the copies
        self._expected: dict[str, tuple[int, Array]] = {}
        self._farthest = dict.fromkeys(workload.free, 0.0)

    def judged(self, name: str, findings: Findings) -> dict[str, Array]:
        """The results of one launch; AssertionError where one is too far from float64."""
        self._launch(ALONE, 0)
        driver.synchronise(self._stream)
        found = self.placed.read()
        findings.judged(self._workload.judge(found), f"{name}: {self._workload.line}")
        return found

    def keep(self, expected: Mapping[str, Array], stack: ExitStack) -> None:
        """Copy operands and expected results to the device, until the stack closes."""
        for name, buffer in self.placed.buffers.items():
            if not buffer.is_output:
                self._operands[name] = stack.enter_context(_on_device(buffer.read()))
        for name, values in expected.items():
            self._expected[name] = stack.enter_context(_on_device(values)), values

    def repeat(self, mode: str, launches: int, what: str, findings: Findings) -> None:
        """Launch that often; AssertionError at the first launch with other bits, or with a free result too far off."""
        for number in range(1, launches + 1):
            self._launch(mode, number)
            for name, (kept, values) in self._expected.items():
                address = self.placed.buffers[name].address
                found = self._tools.difference(values.dtype.name, address, kept, values.nbytes, self._stream)
                place = f"{what}, {mode}, launch {number} of {launches}: {self._workload.line}"
                if name in self._workload.free:
                    self._judge_if_further(name, found.distance, place, findings)
                else:
                    assert not found.words, f"{place}: {name} differs in {found.words} words, by {found.distance:.3g}"
        driver.synchronise(self._noise_stream)
        self.placed.read()  # checks the guards
        findings.add(what if mode == ALONE and what != stress_builds.PLAIN else mode, launches)

    def _launch(self, mode: str, number: int) -> None:
        for name, buffer in self.placed.buffers.items():
            if buffer.is_output:
                _forget(buffer.address, self._sizes[name], self._stream)
        if self.placed.workspace is not None:
            _forget(self.placed.workspace, self.placed.bound.workspace_bytes // 4 * 4, self._stream)
        if mode == NOISE:
            self._tools.noise(number, NOISE_NANOSECONDS, self._noise_stream)
        if mode == PRODUCER:
            for name, copy in self._operands.items():
                address, size = self.placed.buffers[name].address, self._sizes[name]
                _forget(address, size, self._stream)
                self._tools.copy_late(address, copy, size, LATE_NANOSECONDS, self._stream)
        self.placed.launch(self._stream)

    def _judge_if_further(self, name: str, distance: float, place: str, findings: Findings) -> None:
        if distance <= self._farthest[name] * FURTHER:
            return
        findings.judged(self._workload.judge(self.placed.read()), f"{place}: {name} is {distance:.3g} off the first")
        self._farthest[name] = distance
        findings.spread[name] = max(findings.spread.get(name, 0.0), distance)


def stress(
    builds: Mapping[str, Artifact], given: Sequence[Workload], tools: Kernels, repeats: int, delayed: int
) -> Findings:
    """Launch the plain kernel, the first of the builds, `repeats` times in each mode and the others `delayed` times;
    AssertionError says what failed."""
    findings = Findings()
    with memory.stream() as own, memory.stream() as noise:
        for workload in given:
            findings.problems.append(workload.line)
            plain: dict[str, Array] = {}
            for name, artifact in builds.items():
                is_plain = name == stress_builds.PLAIN
                placed = workload.place(_only(artifact))
                found = _repeated(
                    name,
                    Repeater(placed, workload, tools, (own, noise)),
                    plain,
                    repeats if is_plain else delayed,
                    findings,
                )
                plain = plain or found
    return findings


def _repeated(
    name: str, repeater: Repeater, plain: dict[str, Array], launches: int, findings: Findings
) -> dict[str, Array]:
    """Put one build under stress, and give back what it has to repeat: the plain kernel's results, where it is the
    plain kernel with delays. Another optimisation may round otherwise: it is judged, and repeats itself."""
    with ExitStack() as stack:
        stack.enter_context(repeater.placed)
        expected = plain if name.startswith(stress_builds.DELAY) else repeater.judged(name, findings)
        repeater.keep(expected, stack)
        for mode in (ALONE, NOISE, PRODUCER) if name == stress_builds.PLAIN else (ALONE,):
            repeater.repeat(mode, launches, name, findings)
    return expected


def line_of(builds: Mapping[str, Artifact], findings: Findings) -> record.Json:
    """The kernel's own fields of the log."""
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
    """This kernel and no other."""

    def chosen(build: Build) -> Artifact:
        if build != artifact.build:
            raise Stale(f"{build.symbol} for {build.arch}: not under stress")
        return artifact

    return chosen


def _forget(address: int, size: int, stream: int) -> None:
    """Ones in every bit: NaN in every float type, and no zero in any counter."""
    if size:
        driver.fill_words(address, size, memory.ALL_ONES, size // 4, 1, stream)


@contextmanager
def _on_device(values: Array) -> Iterator[int]:
    """The address of a copy of the values."""
    contiguous = np.ascontiguousarray(values)
    address = driver.allocate_now(max(contiguous.nbytes, 4), "a copy of a test tensor")
    try:
        driver.copy_to_device(address, contiguous.ctypes.data, contiguous.nbytes, 0)
        driver.synchronise(0)
        yield address
    finally:
        driver.free_now(address)
