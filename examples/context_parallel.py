"""Causal attention whose rows are split over processes, one for each GPU, over NCCL: forward and backward.

    python examples/context_parallel.py --rank 0 --size 2 --address 127.0.0.1:29500 --device 0 &
    python examples/context_parallel.py --rank 1 --size 2 --address 127.0.0.1:29500 --device 1

    python examples/context_parallel.py --simulated 4      ranks are threads, and NumPy computes: no GPU

Every rank draws all rows, to compare its own with those of one device. A real program has its own rows alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from cutlass_py_attn import Causal, Folder, attention_backward, attention_forward, distributed
from cutlass_py_attn.distributed import simulated

TOKENS, HEADS, HEADS_KEY, HEAD_DIM = 128, 8, 2, 64
ORDER = "zigzag"


def step(group: distributed.Group, strategy: str, library: Any, dtype: Any, **options: Any) -> float:
    """Returns the largest difference of a rank's output and gradients from those of one device."""
    rng = np.random.default_rng(0)
    heads = (HEADS, HEADS_KEY, HEADS_KEY, HEADS)
    whole = [library.asarray(rng.standard_normal((1, TOKENS, count, HEAD_DIM)).astype(dtype)) for count in heads]
    parts = distributed.rows_of_rank(group.rank, group.size, TOKENS, ORDER)

    def own(array: Any) -> Any:
        return library.concatenate([array[:, part] for part in parts], axis=1)

    *operands, grad_output = map(own, whole)
    context: Any = {"group": group, "context_strategy": strategy, "load_balance": ORDER, "mask": Causal(), **options}
    output, logsumexp = distributed.attention_forward(*operands, **context)
    found = distributed.attention_backward(grad_output, *operands, output, logsumexp, **context)

    *operands, grad_output = whole
    results = attention_forward(*operands, mask=Causal(), **options)
    expected = attention_backward(grad_output, *operands, *results, mask=Causal(), **options)
    pairs = [
        (output, results[0]),
        *((getattr(found, name), getattr(expected, name)) for name in ("query", "key", "value")),
    ]
    return max(float(abs(one.astype("f4") - own(other).astype("f4")).max()) for one, other in pairs)


def report(group: distributed.Group, attend: Callable[..., float]) -> str:
    """Returns a line for each strategy: whether the rank's results are those of one device."""
    lines = []
    for strategy in ("all_gather", "ulysses", "ring"):
        difference = attend(group, strategy)
        lines.append(f"rank {group.rank} of {group.size}, {strategy}: {'equal' if difference < 0.02 else difference}\n")
    return "".join(lines)


def main() -> None:
    """Is one rank over NCCL, or runs simulated ranks."""
    parser = argparse.ArgumentParser(description="attention whose rows are split over processes")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument(
        "--address", default="127.0.0.1:29500", help="host:port of rank 0, or a file that all ranks see"
    )
    parser.add_argument("--device", type=int, default=0, help="this rank's GPU")
    parser.add_argument("--simulated", type=int, metavar="RANKS", help="run as many threads on the CPU")
    parser.add_argument("--kernels", help="folder of prebuilt kernels; without it they are compiled")
    given = parser.parse_args()
    if given.simulated:

        def on_host(group: distributed.Group, strategy: str) -> float:
            return step(group, strategy, np, np.float32, backend="reference")

        sys.stdout.writelines(simulated.run(given.simulated, lambda group: report(group, on_host)))
        return
    import cupy

    kernels = Folder(given.kernels) if given.kernels else None

    def on_gpu(group: distributed.Group, strategy: str) -> float:
        return step(group, strategy, cupy, np.float16, kernels=kernels)

    with distributed.connect(given.rank, given.size, given.address, device=given.device) as group:
        cupy.cuda.Device(given.device).use()
        sys.stdout.write(report(group, on_gpu))


if __name__ == "__main__":
    main()
