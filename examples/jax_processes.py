"""Attention whose rows are split over processes: one process for each GPU, or two on the CPU, by jax.distributed.

python examples/jax_processes.py [--processes N] [--kernels FOLDER]

starts N processes on this machine, one for each GPU by default. Without a GPU two processes compute on the CPU, by the
float64 reference. On several hosts, call `work` in each process, with an address of the first host.

Every process compares its rows of the output and of the gradients with those of one device. A difference counts by the
size of what is expected where that is above 1: |difference| / max(1, |expected|).
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn import Causal, Folder
from cutlass_py_attn.jax import attention, context_parallel_attention, reorder

BATCH, HEADS, HEADS_KEY = 1, 8, 4
STRATEGIES = ("all_gather", "ulysses", "ring")
SECONDS = 300  # until a process that waits for another one gives up
ALLOWED = {"gpu": 0.03, "reference": 1e-5}  # in bfloat16 and float32

Attention = Callable[..., Any]


def work(rank: int, processes: int, coordinator: str, gpus: int, kernels: str = "") -> float:
    """Computes one process's part, and returns its largest difference from one device.

    coordinator: address and port where process 0 listens. gpus: of this host, one for each of its processes; 0 for the
    CPU. kernels: folder of prebuilt kernels; "" to compile them.
    """
    if gpus:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, processes, rank, [rank % gpus] if gpus else None, initialization_timeout=SECONDS
    )
    backend, dtype, rows, head_dim = ("gpu", "bfloat16", 4096, 128) if gpus else ("reference", "float32", 64, 16)
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
    whole = [
        np.asarray(jax.random.normal(jax.random.key(i), (BATCH, rows, heads, head_dim)), jnp.dtype(dtype))
        for i, heads in enumerate((HEADS, HEADS_KEY, HEADS_KEY, HEADS))
    ]

    def place(array: np.ndarray) -> jax.Array:
        """Puts an array that every process has on the mesh, each device its rows."""
        return jax.make_array_from_callback(array.shape, by_rows, lambda index: array[index])

    options = {"mask": Causal(), "backend": backend, "kernels": Folder(kernels) if kernels else None}

    def both(function: Attention, query: Any, key: Any, value: Any, grad_output: Any) -> tuple[Any, ...]:
        output, pull = jax.vjp(functools.partial(function, **options), query, key, value)
        return output, *pull(grad_output)

    expected = jax.jit(functools.partial(both, attention))(*whole)
    expected = [np.asarray(reorder(array, devices), np.float32) for array in expected]
    worst = 0.0
    for strategy in STRATEGIES:
        split = functools.partial(
            context_parallel_attention,
            mesh=mesh,
            context_axis="context",
            context_strategy=strategy,
            load_balance="zigzag",
        )
        arrays = [place(np.asarray(reorder(array, devices))) for array in whole]
        found = jax.jit(functools.partial(both, split))(*arrays)
        differences = [
            difference(np.asarray(shard.data, np.float32), right[shard.index])
            for left, right in zip(found, expected, strict=True)
            for shard in left.addressable_shards
        ]
        worst = max(worst, *differences)
        text = f"process {rank} of {processes}, {devices} devices, {strategy}: largest difference"
        sys.stdout.write(f"{text} {max(differences):.1e}\n")
    jax.distributed.shutdown()
    return worst


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest |difference| / max(1, |expected|) of two arrays."""
    return float((np.abs(found - expected) / np.maximum(1, np.abs(expected))).max())


def main() -> int:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description="attention whose rows are split over processes")
    parser.add_argument("--processes", type=int, help="default: one for each GPU, or two without one")
    parser.add_argument("--kernels", default="", help="folder of prebuilt kernels")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        rank, processes, coordinator, gpus = given.part
        worst = work(int(rank), int(processes), coordinator, int(gpus), given.kernels)
        return int(not worst < ALLOWED["gpu" if int(gpus) else "reference"])
    if given.processes is not None and given.processes < 1:
        parser.error(f"--processes {given.processes}: must be at least 1")
    gpus = number_of_gpus()
    processes = given.processes or gpus or 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--kernels", given.kernels, "--part"]
    parts = [subprocess.Popen([*command, str(i), str(processes), coordinator, str(gpus)]) for i in range(processes)]
    return max(abs(part.wait()) for part in parts)


def number_of_gpus() -> int:
    """Returns the number of GPUs that JAX sees. Another process asks: this one must not initialise a GPU."""
    code = "import jax; print(sum(device.platform == 'gpu' for device in jax.devices()))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
