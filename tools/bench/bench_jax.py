"""JAX benchmark: attention inside jax.jit beside jax.nn.dot_product_attention on cuDNN; needs a GPU and jax[cuda].

python -m tools.bench.bench_jax [--kernels FOLDER] [--record FILE]
python -m tools.bench.bench_jax [--kernels FOLDER] --host [FILE]    the second table alone, for a record of two GPUs

The second table has the time of small programs, in which host time dominates, alone and beside a thread that executes
Python. CUTLASS_PY_ATTN_JAX_HANDLER chooses the handler of our calls (docs/jax_devices.md); the table names it.

`--record tools/bench/results/jax.json` writes the results; `python -m tools.docs.generate` copies them to
docs/data/jax.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import harness
from cutlass_py_attn.jax import attention, native_library
from cutlass_py_attn.problem.masks import Causal, Full
from tools.docs import jax_table
from tools.release import record


@dataclass(frozen=True, slots=True)
class Case:
    """One problem with as many queries as keys."""

    dtype: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    is_causal: bool


CASES: Final = (
    Case("bfloat16", 4, 2048, 16, 128, True),
    Case("bfloat16", 4, 2048, 16, 128, False),
    Case("bfloat16", 4, 2048, 32, 64, True),
    Case("bfloat16", 2, 8192, 16, 128, True),
    Case("bfloat16", 4, 2048, 8, 256, True),
    Case("float32", 4, 2048, 16, 64, True),
)
SMALL: Final = Case("bfloat16", 1, 128, 2, 128, True)  # host time dominates
CHAINED: Final = 8
HOST_CALLS: Final = 50
SAMPLES: Final = 5
CALLS: Final = 10  # per sample
WARM_UPS: Final = 3


def measure(function: Callable[..., Any], *arrays: Any, samples: int = SAMPLES, calls: int = CALLS) -> float:
    """Returns milliseconds per call: the median of `samples` samples of `calls` calls each."""
    for _ in range(WARM_UPS):
        jax.block_until_ready(function(*arrays))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arrays)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(found)


def both(function: Callable[..., Any], query: Any, key: Any, value: Any, grad_output: Any) -> Any:
    """Returns the output and the gradients of query, key and value."""
    output, vjp = jax.vjp(function, query, key, value)
    return output, vjp(grad_output)


def row(case: Case, kernels: Any) -> record.Json:
    """Returns the case with milliseconds of forward, and of forward and backward, of this package and of cuDNN.

    A time is None if cuDNN does not support the problem.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = case.batch, case.tokens, case.heads, case.head_dim
    arrays = [jax.random.normal(each, shape).astype(case.dtype) for each in keys]
    ours = functools.partial(attention, mask=Causal() if case.is_causal else Full(), kernels=kernels)
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="cudnn")
    return {
        **asdict(case),
        "ours_ms": round(measure(jax.jit(ours), *arrays[:3]), 3),
        "cudnn_ms": measured_or_refused(peer, *arrays[:3]),
        "ours_both_ms": round(measure(jax.jit(functools.partial(both, ours)), *arrays), 3),
        "cudnn_both_ms": measured_or_refused(functools.partial(both, peer), *arrays),
    }


def chained(function: Callable[..., Any], query: Any, key: Any, value: Any, grad_output: Any) -> Any:
    """Returns the result of several forwards, each of the result before it; takes grad_output as `both` does."""
    for _ in range(CHAINED):
        query = function(query, key, value)
    return query


PROGRAMS: Final[dict[str, Callable[..., Any]]] = {
    "forward": lambda function, query, key, value, _: function(query, key, value),
    "forward and backward": both,
    "eight forwards": chained,
}


@contextlib.contextmanager
def busy(threads: int) -> Iterator[None]:
    """Context manager with threads that execute Python without a pause, and so hold its lock when they can."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(1000))

    started = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in started:
            thread.join()


def host_rows(kernels: Any) -> Iterator[record.Json]:
    """Yields, for each small program, on one GPU and on two, the milliseconds of a call, alone and beside a thread.

    On two GPUs each has a batch of its own. The caller waits for each result before the next call.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    ours = functools.partial(attention, mask=Causal(), kernels=kernels)
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    for gpus in (1, 2)[: len(jax.devices())]:
        shape = gpus * SMALL.batch, SMALL.tokens, SMALL.heads, SMALL.head_dim
        mesh = jax.sharding.Mesh(jax.devices()[:gpus], ("x",))
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        arrays = [jax.device_put(jax.random.normal(each, shape).astype(SMALL.dtype), placed) for each in keys]
        for name, program in PROGRAMS.items():
            of_ours, of_cudnn = (jax.jit(functools.partial(program, function)) for function in (ours, peer))
            for threads in (0, 1):
                with busy(threads):
                    yield {
                        "program": name,
                        "gpus": gpus,
                        "busy_threads": threads,
                        "ours_ms": round(measure_calls(of_ours, *arrays), 3),
                        "cudnn_ms": measured_or_refused(of_cudnn, *arrays, of=measure_calls),
                    }


def measure_calls(function: Callable[..., Any], *arrays: Any) -> float:
    """Returns milliseconds until the result of one call is there: the median of HOST_CALLS calls."""
    for _ in range(WARM_UPS):
        jax.block_until_ready(function(*arrays))
    found = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def measured_or_refused(function: Callable[..., Any], *arrays: Any, of: Callable[..., float] = measure) -> float | None:
    """Returns milliseconds, or None if the peer does not support the problem."""
    try:
        return round(of(jax.jit(function), *arrays), 3)
    except (ValueError, NotImplementedError, RuntimeError):
        return None


def main() -> int:
    """Measures all cases, prints a table, and writes it to the file of --record."""
    parser = argparse.ArgumentParser(description="attention inside jax.jit beside cuDNN's, in milliseconds")
    parser.add_argument("--kernels", type=Path, help="use the kernels of this folder of a `cutlass-py-attn build`")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the run to FILE as JSON")
    parser.add_argument(
        "--host", type=Path, nargs="?", const=Path(), metavar="FILE", help="measure small programs alone; write to FILE"
    )
    given = parser.parse_args()
    kernels = Folder(given.kernels) if given.kernels else None
    rows = []
    if given.host is None:
        for heading in jax_table.HEADINGS:
            print(heading)
        for case in CASES:
            rows.append(row(case, kernels))
            print(jax_table.row(rows[-1]), flush=True)
    name = native_library.choice().name
    host = []
    for heading in jax_table.host_headings(name):
        print(heading)
    for found in host_rows(kernels):
        host.append(found)
        print(jax_table.host_row(found), flush=True)
    run = {**record.about_run(), "commit": harness.commit(), "jax": jax.__version__, "handler": name, "host": host}
    if given.host is not None:
        if given.host.name:
            record.put_part(given.host, f"{name} handler", run)
    elif given.record:
        run |= {"rows": rows}
        given.record.write_text(json.dumps(run, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
