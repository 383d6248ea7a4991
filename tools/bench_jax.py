"""Bench JAX: attention inside jax.jit beside jax.nn.dot_product_attention on cuDNN; needs a GPU and jax[cuda].

python tools/bench_jax.py [--kernels FOLDER] [--record FILE]

`--record tools/bench/results/jax.json` keeps the run; `python -m tools.docs` puts it into docs/jax.md.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutlass_py_attn import bench
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.jax import attention
from cutlass_py_attn.masks import Causal, Full
from tools import jax_table, record


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, of as many queries as keys."""

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
CALLS: Final = 10  # of one sample
WARM: Final = 3


def measure(function: Callable[..., Any], *arrays: Any) -> float:
    """Milliseconds a call, the median of samples of several calls each."""
    for _ in range(WARM):
        jax.block_until_ready(function(*arrays))
    found = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = function(*arrays)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / CALLS * 1e3)
    return statistics.median(found)


def both(function: Callable[..., Any], query: Any, key: Any, value: Any, grad_output: Any) -> Any:
    """The output and the three gradients."""
    output, pull = jax.vjp(function, query, key, value)
    return output, pull(grad_output)


def row(case: Case, kernels: Any) -> record.Json:
    """The case, and ours and cuDNN's forward and both directions in ms; None where cuDNN takes no such problem."""
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
    """Milliseconds, where the peer takes such a problem."""
    try:
        return round(measure(jax.jit(function), *arrays), 3)
    except (ValueError, NotImplementedError, RuntimeError):
        return None


def main() -> int:
    """Measure, print a table, and keep it where a file is named."""
    parser = argparse.ArgumentParser(description="attention inside jax.jit beside cuDNN's, in milliseconds")
    parser.add_argument("--kernels", type=Path, help="folder of a `cutlass-py-attn build`; nothing is compiled then")
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
        run = {**record.about_run(), "commit": bench.commit(), "jax": jax.__version__, "rows": rows}
        given.record.write_text(json.dumps(run, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
