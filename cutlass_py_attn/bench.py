"""Bench: measures the fused kernels by CUDA graph replays, beside torch's where torch is installed.

python -m cutlass_py_attn.bench --kernels FOLDER --output FILE

bench_cases.py says what a case's name means and which cases are published.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cutlass_py_attn import arrays, bench_cases, bench_peers, bench_timing, driver, guests
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bench_cases import Case
from cutlass_py_attn.bench_timing import SAMPLES, Timed, sm_clock_mhz
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.launch import Bound, bind_problem
from cutlass_py_attn.plan import Build

RANDOM_ELEMENTS: Final = 1 << 20  # the inputs repeat this many random values; their kind does not change the time
RANDOM_INPUTS: Final = ("query", "key", "value", "grad_output", "bias", "sinks")
SUSTAINED: Final = "measure behind half a second of replays, at the clock that their power leaves"
PHILOX: Final = {"philox_seed": 1, "philox_offset": 0}

Kernels = Callable[[Build], Artifact]


@dataclass(frozen=True, slots=True)
class Row:
    """Ours against one peer; peer "" and no numbers of its own where none could be measured.

    baseline: a case of ours in the same run, "" for none; baseline_ratio: our rate in this case / our rate in that.
    ours_gb_s: operands and output of a forward of few queries, each read or written once; None for other cases.
    sustained: measured on a GPU that was kept busy, at the clock that the power leaves.
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


class Operands:
    """Every tensor of a case on the device, written once by us; peers see them through DLPack."""

    def __init__(self, case: Case, stream: int) -> None:
        problem = case.problem("backward")
        self.arrays: dict[str, arrays.DeviceArray] = {}
        for name, tensor in {**problem.tensors(), **problem.vectors()}.items():
            # What broadcasts by stride 0 is there once. DeviceArray has no integers: int32 travels as float32's bits.
            shape = tuple(size if step else 1 for size, step in zip(tensor.shape, tensor.strides, strict=True))
            dtype = "float32" if tensor.dtype == "int32" else tensor.dtype
            self.arrays[name] = arrays.DeviceArray(shape, dtype, 0, stream)
        self.arrays["logsumexp"] = arrays.DeviceArray(case.shape.logsumexp, "float32", 0, stream)
        rng = np.random.default_rng(1)
        for name in RANDOM_INPUTS:
            if name in self.arrays:
                values = rng.standard_normal(RANDOM_ELEMENTS, np.float32)
                self._write(name, values.astype(guests.numpy_dtype(self.arrays[name].dtype)), stream)
        if case.alibi:
            heads = np.arange(1, case.shape.num_heads + 1, dtype=np.float32)
            self._write("alibi_slopes", np.exp2(-8 * heads / case.shape.num_heads), stream)
        if case.lengths:
            bounds = np.cumsum([0, *case.lengths], dtype=np.int32)
            self._write("cu_seqlens_q", bounds, stream)
            self._write("cu_seqlens_k", bounds, stream)

    def pointers(self, names: Sequence[str]) -> dict[str, int]:
        """Addresses by name; seed and offset of dropout are numbers."""
        return {name: PHILOX[name] if name in PHILOX else self.arrays[name].pointer for name in names}

    def _write(self, name: str, values: np.ndarray[Any, Any], stream: int) -> None:
        """The values, again and again until the array is full."""
        array = self.arrays[name]
        for offset in range(0, array.nbytes, values.nbytes):
            size = min(values.nbytes, array.nbytes - offset)
            driver.copy_to_device(array.pointer + offset, values.ctypes.data, size, stream)
        driver.synchronise(stream)


def measure(case: Case, kernels: Kernels, samples: int = SAMPLES, *, sustained: bool = False) -> Iterator[Row]:
    """One row for each direction and peer; the forward's results are the backward's operands."""
    gpu = driver.device(0)
    timed = functools.partial(bench_timing.sustained if sustained else bench_timing.median, samples=samples)
    with gpu.current(), ExitStack() as stack:
        stream = driver.new_stream()
        stack.callback(driver.destroy_stream, stream)
        operands = Operands(case, stream)
        for direction in case.directions:
            flops = case.flops(direction)
            bound = bind_problem(case.problem(direction), kernels)
            ours, clock = _ours(bound, operands, stream, timed)
            peers: list[tuple[str, float | None]] = list(bench_peers.measure(case, direction, operands.arrays, timed))
            shared: dict[str, Any] = {
                "sm_clock_mhz": clock,
                "gpu": gpu.name,
                "commit": commit(),
                "sustained": sustained,
            }
            for peer, milliseconds in peers or [("", None)]:
                yield Row(
                    case.name,
                    direction,
                    peer,
                    peer_tflops=_tflops(flops, milliseconds) if milliseconds else None,
                    ours_tflops=_tflops(flops, ours),
                    ratio=round(milliseconds / ours, 4) if milliseconds else None,
                    ours_ms=round(ours, 4),
                    peer_ms=round(milliseconds, 4) if milliseconds else None,
                    ours_gb_s=round(case.bytes_read_once / ours / 1e6, 1) or None,
                    **shared,
                )


def _tflops(flops: int, milliseconds: float) -> float:
    return round(flops / milliseconds / 1e9, 2)


def _ours(bound: Bound, operands: Operands, stream: int, timed: Timed) -> tuple[float, int | None]:
    """Milliseconds of a replay with a workspace that is there already, and the clock behind it."""
    size = bound.workspace_bytes
    workspace = driver.allocate_now(size, "the workspace of a measurement") if size else None
    pointers = operands.pointers(bound.tensor_names)
    try:
        with captured(bound, pointers, stream, workspace) as replay:
            return timed(replay, stream), sm_clock_mhz()
    finally:
        driver.synchronise(stream)
        if workspace is not None:
            driver.free_now(workspace)


@contextmanager
def captured(
    bound: Bound, pointers: Mapping[str, int], stream: int, workspace: int | None
) -> Iterator[Callable[[], None]]:
    """Puts a CUDA graph of the bound's kernels on `stream`, which has run them once already."""
    bound(pointers, stream, workspace=workspace)
    driver.synchronise(stream)
    mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.call("cuStreamBeginCapture", stream, mode)
    bound(pointers, stream, workspace=workspace)
    graph = driver.call("cuStreamEndCapture", stream)
    ready = driver.call("cuGraphInstantiate", graph, 0)
    try:
        yield lambda: driver.call("cuGraphLaunch", ready, stream)
    finally:
        driver.call("cuGraphExecDestroy", ready)
        driver.call("cuGraphDestroy", graph)


def commit() -> str:
    """The commit of the tree that this file is in; "unknown" outside of one."""
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
    """The rows with baseline and its ratio, where the baseline is among them."""
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
    """Rows as aligned text, ours / peer and the baseline last."""
    lines = [f"{'case':<46} {'direction':<9} {'ours':>7} {'peer':>7} {'ratio':>6}  {'peer':<13}  of baseline"]
    for row in rows:
        peer = f"{row.peer_tflops:7.1f} {row.ratio:6.2f}" if row.peer_tflops is not None else f"{'':14}"
        baseline = f"{row.baseline_ratio:.2f} {row.baseline}" if row.baseline_ratio is not None else ""
        rate = f"{row.ours_gb_s:.0f} GB/s" if row.ours_gb_s else baseline
        line = f"{row.case:<46} {row.direction:<9} {row.ours_tflops:7.1f} {peer}  {row.peer or '-':<13}  {rate}"
        lines.append(line.rstrip())
    notes = (
        "TFLOP/s; ratio is ours / peer: more than 1 is faster than the peer. of baseline: our rate / our rate in the "
        "case behind it. GB/s: operands and output of few queries, read or written once"
    )
    return "\n".join([*lines, notes])


def run(
    names: Sequence[str],
    only: str,
    folder: Path | None,
    output: Path | None,
    samples: int,
    *,
    sustained: bool = False,
) -> tuple[list[Row], list[str]]:
    """Measure the cases (none named: the published ones) in whose names `only` is found.

    Returns the rows, and a text for each case that failed: the others are measured all the same. The rows are
    written as JSON after every case, so that a run which is cut off keeps what it has.
    """
    kernels: Kernels
    if folder is not None:
        kernels = Folder(folder)
    else:
        from cutlass_py_attn.compiler import artifact_for

        kernels = artifact_for
    cases = [bench_cases.parse(name) for name in bench_cases.chosen(names, only)]
    driver.device(0)  # without a GPU one NoDevice stands for all cases
    rows: list[Row] = []
    failures = []
    for case in cases:
        try:
            rows += measure(case, kernels, samples, sustained=sustained)
        except AttentionError as error:
            failures.append(f"{case.name}: {error}")
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps([asdict(row) for row in compared(rows)], indent=1) + "\n")
    return compared(rows), failures


def main() -> int:
    """`python -m cutlass_py_attn.bench`: as the command, without click."""
    parser = argparse.ArgumentParser(prog="python -m cutlass_py_attn.bench", description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="may be given several times")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases in whose name this expression is found")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--output", type=Path, help="write the rows there as JSON")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--sustained", action="store_true", help=SUSTAINED)
    given = parser.parse_args()
    try:
        rows, failures = run(
            given.case, given.only, given.kernels, given.output, given.samples, sustained=given.sustained
        )
    except AttentionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(table(rows) + "\n")
    sys.stderr.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
