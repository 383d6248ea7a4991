"""Bench: measures the fused kernels by CUDA graph replays, beside torch's where torch is installed.

python -m cutlass_py_attn.bench --kernels FOLDER --output FILE

A case is {dtype}_d{head_dim}[v{head_dim_value}]_s{seqlen}_b{batch}_h{heads}_{full|causal}[_deterministic]. Torch is
a peer and never a dependency: it is imported here alone, and reads the very memory that our kernels read.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from cutlass_py_attn import arrays, driver, masks
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.errors import AttentionError, NotSupported
from cutlass_py_attn.launch import Bound, bind, generic_arch
from cutlass_py_attn.plan import Build
from cutlass_py_attn.planner import plan_backward, plan_forward
from cutlass_py_attn.problem import SHORT_NAMES, Problem, Shape

SAMPLES: Final = 7
WARM_UPS: Final = 2
DIRECTIONS: Final = ("forward", "backward")
PEERS: Final = {
    "mem_efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
RANDOM_ELEMENTS: Final = 1 << 20  # the inputs repeat this many random values; their kind does not change the time
_DTYPES: Final = {short: name for name, short in SHORT_NAMES.items()}
_NAME: Final = re.compile(
    r"(?P<dtype>\w+?)_d(?P<dim>\d+)(?:v(?P<dim_value>\d+))?_s(?P<seqlen>\d+)_b(?P<batch>\d+)_h(?P<heads>\d+)"
    r"_(?P<mask>full|causal)(?P<deterministic>_deterministic)?"
)

Kernels = Callable[[Build], Artifact]
Captured = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One problem to measure."""

    name: str
    dtype: str
    shape: Shape
    mask: masks.Mask
    deterministic: bool

    def problem(self, direction: str) -> Problem:
        """The dense problem of one direction."""
        dense = Problem.dense(direction, self.shape, self.dtype, self.mask)
        return dense.replace(deterministic=self.deterministic and direction == "backward")


@dataclass(frozen=True, slots=True)
class Row:
    """Ours against one peer; peer "" and no numbers of its own where none could be measured."""

    case: str
    direction: str
    peer: str
    peer_tflops: float | None
    ours_tflops: float
    ratio: float | None
    sm_clock_mhz: int | None
    gpu: str
    commit: str


def parse(name: str) -> Case:
    """The case of that name; NotSupported shows the form."""
    found = _NAME.fullmatch(name)
    if found is None or found["dtype"] not in _DTYPES:
        raise NotSupported(
            f"case {name!r}: must be like bf16_d128_s8192_b4_h16_causal or f16_d64v32_s2048_b16_h32_full, with "
            f"_deterministic behind it or not, dtype one of {', '.join(_DTYPES)}"
        )
    head_dim, seqlen = int(found["dim"]), int(found["seqlen"])
    head_dim_value = int(found["dim_value"] or head_dim)
    shape = Shape(int(found["batch"]), seqlen, seqlen, int(found["heads"]), head_dim, head_dim_value)
    mask = masks.from_name(found["mask"])
    return Case(name, _DTYPES[found["dtype"]], shape, mask, found["deterministic"] is not None)


def default_cases() -> tuple[str, ...]:
    """The published set: 32768 rows in all, a quarter of that in float32."""
    names = []
    sizes = (("d64", 32), ("d128", 16))
    for dtype, (dim, heads), (seqlen, batch) in product(("bf16", "f16", "f32"), sizes, ((2048, 16), (8192, 4))):
        batches = batch // 4 if dtype == "f32" else batch
        names += [f"{dtype}_{dim}_s{seqlen}_b{batches}_h{heads}_{mask}" for mask in ("full", "causal")]
    return (*names, "bf16_d128_s8192_b4_h16_causal_deterministic")


class Operands:
    """Every tensor of a case on the device, written once by us; peers see them through DLPack."""

    def __init__(self, case: Case, stream: int) -> None:
        tensors = {name: tensor.shape for name, tensor in case.problem("backward").tensors().items()}
        self.arrays = {name: arrays.DeviceArray(shape, case.dtype, 0, stream) for name, shape in tensors.items()}
        self.arrays["logsumexp"] = arrays.DeviceArray(case.shape.logsumexp, "float32", 0, stream)
        rng = np.random.default_rng(1)
        for name in ("query", "key", "value", "grad_output"):
            values = rng.standard_normal(RANDOM_ELEMENTS, np.float32).astype(arrays.numpy_dtype(case.dtype))
            self._write(self.arrays[name], values, stream)

    def pointers(self, names: Sequence[str]) -> dict[str, int]:
        """Addresses by name."""
        return {name: self.arrays[name].pointer for name in names}

    @staticmethod
    def _write(array: arrays.DeviceArray, values: np.ndarray[Any, Any], stream: int) -> None:
        for offset in range(0, array.nbytes, values.nbytes):
            size = min(values.nbytes, array.nbytes - offset)
            driver.copy_to_device(array.pointer + offset, values.ctypes.data, size, stream)
        driver.synchronise(stream)


def measure(case: Case, kernels: Kernels, samples: int = SAMPLES) -> Iterator[Row]:
    """One row for each direction and peer; the forward's results are the backward's operands."""
    gpu = driver.device(0)
    with gpu.current(), ExitStack() as stack:
        stream = driver.new_stream()
        stack.callback(driver.destroy_stream, stream)
        operands = Operands(case, stream)
        for direction in DIRECTIONS:
            flops = case.problem(direction).flops
            bound = _bound(case.problem(direction), gpu, kernels)
            ours, clock = _ours(bound, operands, stream, samples)
            peers: list[tuple[str, float | None]] = list(_peers(case, direction, operands, samples))
            shared: dict[str, Any] = {"sm_clock_mhz": clock, "gpu": gpu.name, "commit": commit()}
            for peer, milliseconds in peers or [("", None)]:
                yield Row(
                    case.name,
                    direction,
                    peer,
                    peer_tflops=_tflops(flops, milliseconds) if milliseconds else None,
                    ours_tflops=_tflops(flops, ours),
                    ratio=round(milliseconds / ours, 4) if milliseconds else None,
                    **shared,
                )


def _tflops(flops: int, milliseconds: float) -> float:
    return round(flops / milliseconds / 1e9, 2)


def _bound(problem: Problem, gpu: driver.Device, kernels: Kernels) -> Bound:
    arch = generic_arch(gpu.compute_capability)
    is_forward = problem.direction == "forward"
    plan = plan_forward(problem, arch) if is_forward else plan_backward(problem, arch, gpu.num_sms)
    return bind(kernels(plan.build), plan, problem)


def _ours(bound: Bound, operands: Operands, stream: int, samples: int) -> tuple[float, int | None]:
    """Median milliseconds of a replay with a workspace that is there already, and the clock behind it."""
    size = bound.workspace_bytes
    workspace = driver.allocate_now(size, "the workspace of a measurement") if size else None
    pointers = operands.pointers(bound.tensor_names)
    try:
        bound(pointers, stream, workspace=workspace)
        driver.synchronise(stream)
        mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.call("cuStreamBeginCapture", stream, mode)
        bound(pointers, stream, workspace=workspace)
        captured = driver.call("cuStreamEndCapture", stream)
        graph = driver.call("cuGraphInstantiate", captured, 0)
        found = _median(lambda: driver.call("cuGraphLaunch", graph, stream), stream, samples), sm_clock_mhz()
        driver.call("cuGraphExecDestroy", graph)
        driver.call("cuGraphDestroy", captured)
        return found
    finally:
        driver.synchronise(stream)
        if workspace is not None:
            driver.free_now(workspace)


def _median(replay: Captured, stream: int, samples: int) -> float:
    """Milliseconds of one replay."""
    times = []
    for number in range(WARM_UPS + samples):
        start, end = driver.Event(), driver.Event()
        start.record(stream)
        replay()
        end.record(stream)
        elapsed = end.milliseconds_since(start)
        times += [elapsed] if number >= WARM_UPS else []
    return statistics.median(times)


def _peers(case: Case, direction: str, operands: Operands, samples: int) -> Iterator[tuple[str, float | None]]:
    """Median milliseconds of each peer that takes this case; nothing where torch is not installed."""
    try:
        torch = importlib.import_module("torch")
        usable = torch.cuda.is_available()
    except ImportError:
        return
    if not usable or case.deterministic:  # torch's backward has no such kernel to stand beside ours
        return
    for peer, backend in PEERS.items():
        try:
            yield peer, _peer(torch, backend, case, direction, operands, samples)
        except RuntimeError:  # torch has no kernel for this case in that backend, and says so this way
            continue
        finally:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _peer(torch: Any, backend: str, case: Case, direction: str, operands: Operands, samples: int) -> float:
    attention = importlib.import_module("torch.nn.attention")
    stream = torch.cuda.Stream()
    # Torch has [batch, heads, rows, columns]: the same memory, read in another order.
    q, k, v, grad_output = (
        torch.from_dlpack(operands.arrays[name]).transpose(1, 2) for name in ("query", "key", "value", "grad_output")
    )
    leaves = [tensor.detach().requires_grad_(direction == "backward") for tensor in (q, k, v)]
    causal = case.mask.bounded

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)), torch.cuda.stream(stream):
        output = forward()  # on the stream of the capture: torch runs a backward where its forward ran

        def launch() -> Any:
            if direction == "forward":
                return forward()
            return torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = launch()
        found = _median(graph.replay, int(stream.cuda_stream), samples)
    del kept
    return found


def sm_clock_mhz() -> int | None:
    """The first GPU's SM clock now, by NVML or nvidia-smi; None where neither is installed."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    except Exception:  # not installed, or NVML's own errors, which only an installed pynvml could name
        pass
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


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


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text, ours / peer last."""
    lines = [f"{'case':<46} {'direction':<9} {'ours':>7} {'peer':>7} {'ratio':>6}  peer"]
    for row in rows:
        peer = f"{row.peer_tflops:7.1f} {row.ratio:6.2f}" if row.peer_tflops is not None else f"{'':14}"
        lines.append(f"{row.case:<46} {row.direction:<9} {row.ours_tflops:7.1f} {peer}  {row.peer or '-'}")
    return "\n".join([*lines, "TFLOP/s; ratio is ours / peer: more than 1 is faster than the peer"])


def run(names: Sequence[str], folder: Path | None, output: Path | None, samples: int) -> list[Row]:
    """Measure the cases (none named: the default ones), write the rows as JSON, return them."""
    kernels: Kernels
    if folder is not None:
        kernels = Folder(folder)
    else:
        from cutlass_py_attn.compiler import artifact_for

        kernels = artifact_for
    cases = [parse(name) for name in names or default_cases()]
    rows = [row for case in cases for row in measure(case, kernels, samples)]
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def main() -> int:
    """`python -m cutlass_py_attn.bench`: as the command, without click."""
    parser = argparse.ArgumentParser(prog="python -m cutlass_py_attn.bench", description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="may be given several times")
    parser.add_argument("--kernels", type=Path, help="folder of prebuilt kernels; without it they are compiled")
    parser.add_argument("--output", type=Path, help="write the rows there as JSON")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args()
    try:
        rows = run(given.case, given.kernels, given.output, given.samples)
    except AttentionError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
