"""Threads of XLA's CPU backend, which a program of several CPU devices with host callbacks may exhaust.

A callback waits until JAX has copied its operands. XLA copies those of SMALL_BYTES and more in the threads that run
the devices. If the callback of every device waits in a thread, and there is no other thread, nothing is ever copied.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any, Final

import jax

from cutlass_py_attn.errors import NotSupported

SMALL_BYTES: Final = 100 * 1024  # XLA copies fewer at once, without a thread


def expect_enough(operands: Mapping[str, Any]) -> None:
    """Raises NotSupported for a host callback inside shard_map whose program may wait for ever.

    operands: a device's.
    """
    largest = max((array.size * array.dtype.itemsize for array in operands.values()), default=0)
    devices, threads = _devices(), _threads()
    if largest < SMALL_BYTES or devices < 2 or devices < threads or jax.default_backend() != "cpu":
        return
    raise NotSupported(
        f"backend = 'reference' on {devices} CPU devices with {threads} threads, and operands of {largest} bytes on a "
        f"device: must have more threads than devices for operands of {SMALL_BYTES} bytes and more, because XLA may "
        f"wait for ever; set the environment variable NPROC={devices + 1} before Python starts, or use fewer devices"
    )


def _devices() -> int:
    """Returns the devices of this process that run a call of the current shard_map; 1 outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return 1
    return min(math.prod(mesh.shape.values()), jax.local_device_count("cpu"))


def _threads() -> int:
    """Returns how many threads XLA has for CPU devices, unless there are more devices: the cores, or NPROC."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["NPROC"])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
