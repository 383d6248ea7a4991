"""Host benchmark: CPU time of a call until it returns, with other addresses in each call; needs a GPU.

python -m tools.bench.bench_host --build FOLDER     compile the kernels; needs no GPU
python -m tools.bench.bench_host [--kernels FOLDER] [--dtypes bfloat16] [--json]

Problems are small, and the stream is synchronised between samples only, so the launch queue never fills up.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.calls import default_kernels
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench.harness import captured_launches
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.append import plan_append
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import ITEM_BYTES, Shape, Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.runtime.arrays import DeviceArray
from cutlass_py_attn.runtime.binding import Bound, bind, bind_problem, portable_arch
from cutlass_py_attn.runtime.plan_launchers import GraphLauncher, Launcher, StreamLauncher
from tools.release import build_ptx

CALLS: Final = 40  # per sample
SAMPLES: Final = 60
SHAPE: Final = Shape(1, 128, 128, 2, 128, 128)
NEW_SETS: Final = 256  # sets of addresses
STEP_BYTES: Final = 256  # from one set of addresses to the next
DTYPES: Final = ("bfloat16", "float32")
HEAD_DIMS: Final = (128, 192)
DIRECTIONS: Final = ("forward", "backward")
LAUNCHERS: Final[dict[str, type[Launcher]]] = {"kernel by kernel": StreamLauncher, "as a graph": GraphLauncher}
LIBRARIES: Final = ("torch", "cupy")
STEP: Final = "bf16_d128_q1_s1024_b64_h32k8_full_paged16"  # a decode step of 64 conversations
ALLOWED_US: Final = {"bound forward": 4.0, "bound backward": 8.0, "bound decode": 6.0, "attention": 25.0}


@dataclass(frozen=True, slots=True)
class Row:
    """Host time of one call in microseconds: median and minimum of the samples."""

    what: str
    dtype: str
    median_us: float
    least_us: float


def measure(what: str, dtype: str, call: Callable[[], object], samples: int = SAMPLES, calls: int = CALLS) -> Row:
    """Measures `call` after two warm-up calls."""
    call()
    call()
    driver.call("cuCtxSynchronize")
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
        driver.call("cuCtxSynchronize")
    return Row(what, dtype, statistics.median(found), min(found))


def problem_of(direction: str, dtype: str, head_dim: int) -> Problem:
    """Returns the problem of a direction: SHAPE with this head dim, causal."""
    return Problem.dense(direction, replace(SHAPE, head_dim=head_dim, head_dim_value=head_dim), dtype, Causal())


def builds(dtypes: Sequence[str]) -> list[build_ptx.Choices]:
    """Returns every kernel that `rows` launches, once; each with the kernels to fall back to."""
    problems = (problem_of(*case) for case in itertools.product(DIRECTIONS, dtypes, HEAD_DIMS))
    found = dict.fromkeys(planner.builds_on(problem, build_ptx.HOPPER) for problem in problems)
    if parse(STEP).dtype in dtypes:
        decode, append = step_problems()
        found[planner.builds_on(decode, build_ptx.HOPPER)] = None
        found[(plan_append(append, portable_arch(build_ptx.HOPPER)).build,)] = None
    return list(found)


def step_problems() -> tuple[Problem, AppendProblem]:
    """Returns the problems of STEP: its attention, and the append of one token of each conversation."""
    decode = parse(STEP).problem("forward")
    batch, _, _, head_dim = decode.query.shape
    pages, page_size, heads, _ = decode.key.shape
    return decode, AppendProblem.dense((batch, heads, head_dim), (pages, page_size), decode.dtype)


def bound_rows(direction: str, dtype: str, head_dim: int, kernels: Any) -> Iterator[Row]:
    """Yields the rows of Bound calls.

    Addresses alternate between two sets, or cycle through more sets than any cache holds, or stay the same. The other
    rows take the workspace from the pool, launch kernel by kernel, and launch as a graph.
    """
    stream = driver.create_stream()
    problem = problem_of(direction, dtype, head_dim)
    bound = bind_problem(problem, kernels)
    elements = max(math.prod(tensor.shape) for tensor in problem.tensors().values())
    arrays = {
        name: DeviceArray((elements + NEW_SETS * STEP_BYTES // 4,), "float32", 0, stream) for name in bound.tensor_names
    }
    sets = [{name: array.pointer + number * STEP_BYTES for name, array in arrays.items()} for number in range(NEW_SETS)]
    workspace = DeviceArray((bound.workspace_bytes // 4,), "float32", 0, stream)
    address = workspace.pointer or None
    alternating, new, same = itertools.cycle(sets[:2]), itertools.cycle(sets), sets[0]
    what = f"bound {direction} d{head_dim}"
    yield measure(what, dtype, lambda: bound(next(alternating), stream, workspace=address))
    yield measure(f"{what}, new addresses", dtype, lambda: bound(next(new), stream, workspace=address))
    yield measure(f"{what}, the same addresses", dtype, lambda: bound(same, stream, workspace=address))
    if address:
        yield measure(f"{what}, workspace of the pool", dtype, lambda: bound(next(alternating), stream))
    for how, launcher_type in LAUNCHERS.items():
        other = bind_problem(problem, kernels)
        other.launcher_type = launcher_type
        yield measure(f"{what}, {how}", dtype, functools.partial(_call, other, new, stream, address))
    driver.synchronise(stream)


def step_rows(kernels: Any) -> Iterator[Row]:
    """Yields the rows of an engine's decode step: attention, an append and attention, and both in a CUDA graph.

    The lengths are 0 and the slots negative, so that the GPU is faster than the host.
    """
    stream = driver.create_stream()
    decode, append = step_problems()
    attend = bind_problem(decode, kernels)
    plan = plan_append(append, portable_arch(driver.device(0).compute_capability))
    store = bind(kernels(plan.build), plan)
    logsumexp = Tensor.contiguous(decode.shape.logsumexp, "float32")
    tensors = {**append.tensors(), **decode.tensors(), **decode.vectors(), "logsumexp": logsumexp}
    words = {
        name: -(-math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 8) // 4) for name, tensor in tensors.items()
    }
    arrays = {name: DeviceArray((count,), "float32", 0, stream) for name, count in words.items()}
    for name, array in arrays.items():
        driver.memset_words(array.pointer, array.nbytes, 0xFFFFFFFF * (name == "slots"), array.nbytes // 4, 1, stream)
    workspace = DeviceArray((attend.workspace_bytes // 4,), "float32", 0, stream)
    stored = {name: arrays[name].pointer for name in store.tensor_names}
    attended = {name: arrays[name].pointer for name in attend.tensor_names}

    def attention() -> None:
        attend(attended, stream, workspace=workspace.pointer)

    def step() -> None:
        store(stored, stream)
        attention()

    yield measure("bound decode, paged", decode.dtype, attention)
    yield measure("bound append and decode", decode.dtype, step)
    with captured_launches(step, stream) as replay:
        yield measure("captured append and decode", decode.dtype, replay)
    driver.synchronise(stream)


def _call(bound: Bound, sets: Iterator[dict[str, int]], stream: int, workspace: int | None) -> None:
    bound(next(sets), stream, workspace=workspace)


def library_rows(module: str, dtype: str, kernels: Any) -> Iterator[Row]:
    """Yields the rows of attention_forward and attention_backward with arrays of one library, on its current stream."""
    library = importlib.import_module(module)
    if module == "torch":
        kind = getattr(library, dtype)
        query, key, value = (library.randn(SHAPE.of(n), device="cuda").to(kind) for n in ("query", "key", "value"))
        stream: Any = library.cuda.current_stream()
    else:
        from cutlass_py_attn.runtime.frameworks import numpy_dtype

        kind = numpy_dtype(dtype)
        query, key, value = (
            library.random.standard_normal(SHAPE.of(n), dtype="f4").astype(kind) for n in ("query", "key", "value")
        )
        stream = library.cuda.get_current_stream()
    options: dict[str, Any] = {"mask": Causal(), "kernels": kernels, "stream": stream}
    output, logsumexp = attention_forward(query, key, value, **options)
    yield measure(
        f"attention_forward, {module}", dtype, lambda: attention_forward(query, key, value, **options), calls=20
    )

    def backward() -> Gradients:
        return attention_backward(output, query, key, value, output, logsumexp, **options)

    yield measure(f"attention_backward, {module}", dtype, backward, calls=20)


def rows(kernels: Any, dtypes: Sequence[str]) -> Iterator[Row]:
    """Yields all rows; prints a library that cannot be imported to stderr."""
    with driver.device(0).current():
        for dtype, head_dim, direction in itertools.product(dtypes, HEAD_DIMS, DIRECTIONS):
            yield from bound_rows(direction, dtype, head_dim, kernels)
        if parse(STEP).dtype in dtypes:
            yield from step_rows(kernels)
        for module, dtype in itertools.product(LIBRARIES, dtypes):
            try:
                yield from library_rows(module, dtype, kernels)
            except ImportError as error:
                print(f"{module}: {error}", file=sys.stderr)


def allowed(row: Row) -> float | None:
    """Returns the allowed microseconds of a call of this kind; None for a call without a target."""
    if row.what.endswith(("pool", *LAUNCHERS)):
        return None
    return next((limit for start, limit in ALLOWED_US.items() if row.what.startswith(start)), None)


def main(given: Sequence[str] | None = None) -> int:
    """Builds the kernels, or measures and prints all rows; returns 1 if a median exceeds its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile the kernels into FOLDER, for --kernels")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="use what --build wrote; without it, compile")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="dtypes to measure")
    arguments = parser.parse_args(given)
    if arguments.build:
        return build_ptx.build_into(arguments.build, builds(arguments.dtypes))

    found = list(rows(Folder(arguments.kernels) if arguments.kernels else default_kernels(), arguments.dtypes))
    if arguments.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    else:
        print(f"{'call':44} {'dtype':9} {'median':>8} {'least':>8} {'allowed':>8}   us on {driver.device(0).name}")
        for row in found:
            limit = allowed(row)
            print(f"{row.what:44} {row.dtype:9} {row.median_us:8.2f} {row.least_us:8.2f} {limit or '':>8}")
    return int(any(row.median_us > (allowed(row) or float("inf")) for row in found))


if __name__ == "__main__":
    sys.exit(main())
