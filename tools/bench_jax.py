"""Bench JAX: attention inside jax.jit beside jax.nn.dot_product_attention on cuDNN; needs a GPU and jax[cuda].

python tools/bench_jax.py [--kernels FOLDER]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jax

from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.jax import attention
from cutlass_py_attn.masks import Causal, Full

# dtype, batch, tokens, heads, head_dim, causal
Case = tuple[str, int, int, int, int, bool]
CASES: Final[tuple[Case, ...]] = (
    ("bfloat16", 4, 2048, 16, 128, True),
    ("bfloat16", 4, 2048, 16, 128, False),
    ("bfloat16", 4, 2048, 32, 64, True),
    ("bfloat16", 2, 8192, 16, 128, True),
    ("bfloat16", 4, 2048, 8, 256, True),
    ("float32", 4, 2048, 16, 64, True),
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


def numbers(case: Case, kernels: Any) -> Iterator[str]:
    """Ours and cuDNN's forward, then both directions, in milliseconds; "refused" where cuDNN takes no such problem."""
    dtype, batch, tokens, heads, head_dim, causal = case
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(each, (batch, tokens, heads, head_dim)).astype(dtype) for each in keys]
    ours = functools.partial(attention, mask=Causal() if causal else Full(), kernels=kernels)
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    yield f"{measure(jax.jit(ours), *arrays[:3]):.3f}"
    yield measured_or_refused(peer, *arrays[:3])
    yield f"{measure(jax.jit(functools.partial(both, ours)), *arrays):.3f}"
    yield measured_or_refused(functools.partial(both, peer), *arrays)


def measured_or_refused(function: Callable[..., Any], *arrays: Any) -> str:
    """Milliseconds, where the peer takes such a problem."""
    try:
        return f"{measure(jax.jit(function), *arrays):.3f}"
    except (ValueError, NotImplementedError, RuntimeError):
        return "refused"


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="attention inside jax.jit beside cuDNN's, in milliseconds")
    parser.add_argument("--kernels", type=Path, help="folder of a `cutlass-py-attn build`; nothing is compiled then")
    folder = parser.parse_args().kernels
    print("| dtype, batch, tokens, heads, head_dim, causal | ours | cuDNN | ours, both | cuDNN, both |")
    print("| --- | --- | --- | --- | --- |")
    for case in CASES:
        row = [", ".join(map(str, case)), *numbers(case, Folder(folder) if folder else None)]
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
