"""JAX benchmark: attention inside jax.jit beside jax.nn.dot_product_attention on cuDNN; needs a GPU and jax[cuda].

python -m tools.bench.bench_jax [--kernels FOLDER] [--record FILE]

`--record tools/bench/results/jax.json` writes the results; `python -m tools.docs.generate` copies them to docs/jax.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import jax

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import harness
from cutlass_py_attn.jax import attention
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


def measured_or_refused(function: Callable[..., Any], *arrays: Any) -> float | None:
    """Returns milliseconds, or None if the peer does not support the problem."""
    try:
        return round(measure(jax.jit(function), *arrays), 3)
    except (ValueError, NotImplementedError, RuntimeError):
        return None


def main() -> int:
    """Measures all cases, prints a table, and writes it to the file of --record."""
    parser = argparse.ArgumentParser(description="attention inside jax.jit beside cuDNN's, in milliseconds")
    parser.add_argument("--kernels", type=Path, help="use the kernels of this folder of a `cutlass-py-attn build`")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the run to FILE as JSON")
    given = parser.parse_args()
    kernels = Folder(given.kernels) if given.kernels else None
    rows = []
    for heading in jax_table.HEADINGS:
        print(heading)
    for case in CASES:
        rows.append(row(case, kernels))
        print(jax_table.row(rows[-1]), flush=True)
    if given.record:
        run = {**record.about_run(), "commit": harness.commit(), "jax": jax.__version__, "rows": rows}
        given.record.write_text(json.dumps(run, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
