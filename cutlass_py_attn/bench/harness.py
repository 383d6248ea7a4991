"""Bench: measures the fused kernels by CUDA graph replays, and other packages' kernels beside them.

problem/spec.py has the grammar of a case's name; bench/cases.py lists the published cases.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench import cases as bench_cases
from cutlass_py_attn.bench import timing
from cutlass_py_attn.bench.timing import SAMPLES, Timed, sm_clock_mhz
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.spec import ProblemSpec, parse
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import arrays, driver, frameworks
from cutlass_py_attn.runtime.binding import Bound, bind_problem

RANDOM_ELEMENTS: Final = 1 << 20  # the inputs repeat this many random values; other values take the same time
CODE_SCALE: Final = 1.0  # of every e4m3 code
RANDOM_INPUTS: Final = ("query", "key", "value", "key_rope", "grad_output", "bias", "sinks")
SUSTAINED: Final = "measure after half a second of replays, at the clock to which their power lowers the GPU"
PHILOX: Final = {"philox_seed": 1, "philox_offset": 0}

Kernels = Callable[[Build], Artifact]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A peer's time of one call. milliseconds: None if the peer refused or failed; `refusal` has the reason then."""

    peer: str
    version: str
    milliseconds: float | None
    refusal: str = ""


# Measures each peer of a case and direction on the given operands: objects with `__dlpack__` by name. The last two
# arguments are the function that times a replay, and the number of calls in the CUDA graph that it replays.
Peers = Callable[[ProblemSpec, str, Mapping[str, Any], Timed, int], Iterable[Measurement]]


@dataclass(frozen=True, slots=True)
class Row:
    """One case and direction, ours and one peer's. peer: "" if no peer was measured; its numbers are None then.

    baseline: another case of ours in the same run, "" for none. baseline_ratio: our rate / our rate in the baseline.
    ours_gb_s: rate at which a forward of few queries reads operands and writes output once; None for other cases.
    sustained: measured after half a second of load, at the clock to which its power lowers the GPU.
    peer_version: what runs behind the peer's name. refusal: why a peer has no numbers; "" if it has, or for no peer.
    """

    case: str
    direction: str
    peer: str
    peer_tflops: float | None
    ours_tflops: float
    ratio: float | None
    sm_clock_mhz: int | None
    gpu: str
    commit: str
    ours_ms: float
    peer_ms: float | None
    baseline: str = ""
    baseline_ratio: float | None = None
    ours_gb_s: float | None = None
    sustained: bool = False
    peer_version: str = ""
    refusal: str = ""


class Operands:
    """Every tensor of a case on the device, written once; peers read the same memory through DLPack."""

    def __init__(self, case: ProblemSpec, stream: int) -> None:
        problem = case.problem("forward" if bench_cases.is_forward_only(case) else "backward")
        self.arrays: dict[str, arrays.DeviceArray] = {}
        for name, tensor in {**problem.tensors(), **problem.vectors()}.items():
            self.arrays[name] = arrays.DeviceArray(*_storage(tensor), 0, stream)
        if case.value_in_key:
            self.arrays["value"] = self.arrays["key"]
        self.arrays["logsumexp"] = arrays.DeviceArray(case.shape.logsumexp, "float32", 0, stream)
        rng = np.random.default_rng(1)
        for name in RANDOM_INPUTS:
            if name in self.arrays:
                count = min(RANDOM_ELEMENTS, math.prod(self.arrays[name].shape))
                values = rng.standard_normal(count, np.float32)
                self._write(name, values.astype(frameworks.numpy_dtype(self.arrays[name].dtype)), stream)
        for name in SCALES:
            if name in self.arrays:
                self._write(name, np.full(math.prod(self.arrays[name].shape), CODE_SCALE, np.float32), stream)
        if case.alibi:
            heads = np.arange(1, case.shape.num_heads + 1, dtype=np.float32)
            self._write("alibi_slopes", np.exp2(-8 * heads / case.shape.num_heads), stream)
        mask = case.drawn_mask()
        if isinstance(mask, ArrayMask):
            for name, array in mask.arrays().items():
                self._write(name, array, stream)
        if case.page_size:
            self._write_pages(case, rng, stream)
        elif case.sequences:
            queries, keys = zip(*((each.num_queries, each.num_keys) for each in case.sequences), strict=True)
            self._write("cu_seqlens_q", np.cumsum([0, *queries], dtype=np.int32), stream)
            self._write("cu_seqlens_k", np.cumsum([0, *keys], dtype=np.int32), stream)
        if case.has_used_keys and not case.page_size:
            self._write("seqused_k", np.array([each.used_keys for each in case.sequences], np.int32), stream)
        if case.philox_on_device:
            for name, value in PHILOX.items():
                self._write(name, np.array([value], np.int64), stream)

    def pointers(self, names: Sequence[str]) -> dict[str, int]:
        """Returns addresses by name; Philox seed and offset are values unless they are in device memory."""
        return {name: self.arrays[name].pointer if name in self.arrays else PHILOX[name] for name in names}

    def _write_pages(self, case: ProblemSpec, rng: np.random.Generator, stream: int) -> None:
        """Writes a table in which no page is used twice, in any order, and the lengths."""
        used = [each.num_keys if each.used_keys is None else each.used_keys for each in case.sequences]
        self._write("page_table", rng.permutation(case.batch * case.max_pages).astype(np.int32), stream)
        self._write("seqused_k", np.array(used or [case.num_keys] * case.batch, np.int32), stream)
        if case.has_ragged_queries:
            starts = np.cumsum([0, *(each.num_queries for each in case.sequences)], dtype=np.int32)
            self._write("cu_seqlens_q", starts, stream)

    def _write(self, name: str, values: np.ndarray[Any, Any], stream: int) -> None:
        """Writes the values repeatedly until the array is full."""
        array = self.arrays[name]
        for offset in range(0, array.nbytes, values.nbytes):
            size = min(values.nbytes, array.nbytes - offset)
            driver.copy_to_device(array.pointer + offset, values.ctypes.data, size, stream)
        driver.synchronise(stream)


def _storage(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Returns the shape and dtype of a DeviceArray for a tensor: axes of stride 0 have size 1, and integers are stored
    as the bits of float32, because DeviceArray has no integers."""
    shape = tuple(size if step else 1 for size, step in zip(tensor.shape, tensor.strides, strict=True))
    if tensor.dtype == "int64":
        return (2 * shape[0],), "float32"
    return shape, "float32" if tensor.dtype == "int32" else tensor.dtype


def measure(
    case: ProblemSpec,
    kernels: Kernels,
    samples: int = SAMPLES,
    *,
    sustained: bool = False,
    peers: Peers | None = None,
) -> Iterator[Row]:
    """Yields a row for each direction and peer; the backward reads the forward's results."""
    timed = functools.partial(timing.sustained if sustained else timing.median, samples=samples)
    for row in measure_with(timed, case, kernels, peers=peers):
        yield dataclasses.replace(row, sustained=sustained)


def measure_with(
    timed: Timed, case: ProblemSpec, kernels: Kernels, calls: int = 1, peers: Peers | None = None
) -> Iterator[Row]:
    """`measure` with a function that times a replay. calls: number of calls in the CUDA graph of a replay."""
    gpu = driver.device(0)
    with gpu.current(), ExitStack() as stack:
        stream = driver.create_stream()
        stack.callback(driver.destroy_stream, stream)
        operands = Operands(case, stream)
        for direction in bench_cases.directions(case):
            flops = bench_cases.flops(case, direction)
            bound = bind_problem(case.problem(direction), kernels)
            ours, clock = _ours(bound, operands, stream, timed, calls)
            alone = Row(
                case.name,
                direction,
                peer="",
                peer_tflops=None,
                ours_tflops=_tflops(flops, ours),
                ratio=None,
                sm_clock_mhz=clock,
                gpu=gpu.name,
                commit=commit(),
                ours_ms=round(ours, 6),
                peer_ms=None,
                ours_gb_s=round(bench_cases.bytes_read_once(case) / ours / 1e6, 1) or None,
            )
            measured = list(peers(case, direction, operands.arrays, timed, calls)) if peers else []
            yield from (_beside(alone, peer, flops, ours) for peer in measured)
            if not measured:
                yield alone


def _beside(alone: Row, peer: Measurement, flops: int, ours_ms: float) -> Row:
    """Returns the row with a peer's numbers, or with the reason that it has none."""
    named = dataclasses.replace(alone, peer=peer.peer, peer_version=peer.version, refusal=peer.refusal)
    if peer.milliseconds is None:
        return named
    return dataclasses.replace(
        named,
        peer_tflops=_tflops(flops, peer.milliseconds),
        ratio=round(peer.milliseconds / ours_ms, 4),
        peer_ms=round(peer.milliseconds, 6),
    )


def _tflops(flops: int, milliseconds: float) -> float:
    return round(flops / milliseconds / 1e9, 2)


def _ours(bound: Bound, operands: Operands, stream: int, timed: Timed, calls: int) -> tuple[float, int | None]:
    """Returns milliseconds of a call with an allocated workspace, and the SM clock after the replays."""
    size = bound.workspace_bytes
    workspace = driver.allocate_now(size, "the workspace of a measurement") if size else None
    pointers = operands.pointers(bound.tensor_names)
    try:
        with captured(bound, pointers, stream, workspace, calls) as replay:
            return timed(replay, stream) / calls, sm_clock_mhz()
    finally:
        driver.synchronise(stream)
        if workspace is not None:
            driver.free_now(workspace)


@contextmanager
def captured(
    bound: Bound, pointers: Mapping[str, int], stream: int, workspace: int | None, calls: int = 1
) -> Iterator[Callable[[], None]]:
    """Yields a function that launches a CUDA graph of `calls` calls on `stream`, which has run one call before."""

    def launch() -> None:
        bound(pointers, stream, workspace=workspace)

    launch()
    with captured_launches(launch, stream, calls) as replay:
        yield replay


@contextmanager
def captured_launches(launch: Callable[[], None], stream: int, calls: int = 1) -> Iterator[Callable[[], None]]:
    """Yields a function that launches a CUDA graph of `calls` times what `launch` launches on `stream`."""
    driver.synchronise(stream)
    mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.call("cuStreamBeginCapture", stream, mode)
    for _ in range(calls):
        launch()
    graph = driver.call("cuStreamEndCapture", stream)
    ready = driver.call("cuGraphInstantiate", graph, 0)
    try:
        yield lambda: driver.call("cuGraphLaunch", ready, stream)
    finally:
        driver.call("cuGraphExecDestroy", ready)
        driver.call("cuGraphDestroy", graph)


def commit() -> str:
    """Returns the commit of this file's tree; "unknown" outside a git repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def compared(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows with baseline and baseline_ratio, if the baseline is among the rows."""
    listed = list(rows)
    rates = {(row.case, row.direction): row.ours_tflops for row in listed}
    found = []
    for row in listed:
        baseline = bench_cases.FEATURE_CASES.get(row.case, "")
        rate = rates.get((baseline, row.direction))
        ratio = round(row.ours_tflops / rate, 4) if rate else None
        found.append(dataclasses.replace(row, baseline=baseline, baseline_ratio=ratio))
    return found


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as aligned text; ours / peer and the baseline are the last columns."""
    lines = [f"{'case':<46} {'direction':<9} {'ours':>7} {'peer':>7} {'ratio':>6}  {'peer':<13}  of baseline"]
    for row in rows:
        peer = f"{row.peer_tflops:7.1f} {row.ratio:6.2f}" if row.peer_tflops is not None else f"{'':14}"
        baseline = f"{row.baseline_ratio:.2f} {row.baseline}" if row.baseline_ratio is not None else ""
        rate = f"{row.ours_gb_s:.0f} GB/s  {baseline}" if row.ours_gb_s else baseline
        line = f"{row.case:<46} {row.direction:<9} {row.ours_tflops:7.1f} {peer}  {row.peer or '-':<13}  {rate}"
        lines.append(line.rstrip())
    notes = (
        "TFLOP/s; ratio is ours / peer: more than 1 is faster than the peer. A peer without numbers refused the case. "
        "of baseline: our rate / our rate in the case named after it. GB/s: operands and output of few queries, read "
        "or written once"
    )
    known = {row.peer: row.peer_version for row in rows if row.peer_version}
    return "\n".join([*lines, notes, *(f"{peer}: {version}" for peer, version in known.items())])


def run(
    names: Sequence[str],
    only: str,
    folder: Path | None,
    output: Path | None,
    samples: int,
    *,
    sustained: bool = False,
    peers: Peers | None = None,
) -> tuple[list[Row], list[str]]:
    """Measures the cases whose names match `only`; of the published ones if `names` is empty.

    Returns the rows, and a message for each case that failed; the other cases are still measured. The rows are written
    as JSON after every case, so that an interrupted run keeps them.
    """
    kernels: Kernels
    if folder is not None:
        kernels = Folder(folder)
    else:
        from cutlass_py_attn.compilation.turns import artifact_for

        kernels = artifact_for
    cases = [parse(name) for name in bench_cases.select(names, only)]
    driver.device(0)  # without a GPU: one NoDevice for all cases
    rows: list[Row] = []
    failures = []
    for case in cases:
        try:
            rows += measure(case, kernels, samples, sustained=sustained, peers=peers)
        except AttentionError as error:
            failures.append(f"{case.name}: {error}")
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps([asdict(row) for row in compared(rows)], indent=1) + "\n")
    return compared(rows), failures
