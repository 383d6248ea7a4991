"""Tests of the benchmark of split rows: its table, and that every function is one program of a known strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tools.bench import bench_context

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in tests/compile/test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time

from cutlass_py_attn import Causal  # noqa: E402
from cutlass_py_attn.jax import attention, primitive  # noqa: E402
from tests.support import fakes, xla_reference  # noqa: E402


def largest(jaxpr: Any, is_inside: bool = False) -> int:
    """Returns the bytes of the largest array of a device in the shard_map of a program, loops and branches included."""
    found = 0
    for equation in jaxpr.eqns:
        inside = is_inside or equation.primitive.name == "shard_map"
        for parameter in equation.params.values():
            for each in parameter if isinstance(parameter, tuple | list) else (parameter,):
                each = getattr(each, "jaxpr", each)
                if hasattr(each, "eqns"):
                    found = max(found, largest(each, inside))
        if is_inside:
            avals = (variable.aval for variable in equation.outvars)
            found = max(found, *(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "size")))
    return found


def test_no_array_grows_with_the_whole_sequence() -> None:
    """With as many rows on each device, 2 to 8 devices; only all-gather has all rows of keys and values."""
    call, rows = functools.partial(attention, mask=Causal(), arch="sm_90a"), 256
    sizes: dict[str, list[int]] = {}
    for devices in (2, 4, 8):
        _, named = bench_context.functions(jax, call, devices)
        described = jax.eval_shape(lambda devices=devices: bench_context.operands(jax, rows * devices, None))
        for name, function in named.items():
            if "cuDNN" not in name:
                program = jax.make_jaxpr(bench_context.both(jax, function))(*described)
                sizes.setdefault(name, []).append(largest(program.jaxpr))
    of_query = 4 * rows * bench_context.HEADS * bench_context.HEAD_DIM  # in float32
    assert sizes["ring, zigzag"] == [of_query] * 3
    assert sizes["ulysses"] == sizes["ulysses"][:1] * 3
    assert sizes["ulysses"][0] <= of_query
    first = sizes["all_gather, zigzag"][0]
    assert sizes["all_gather, zigzag"] == [first, 2 * first, 4 * first]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Attention by the NumPy reference, and small sizes."""
    xla_reference.register()
    monkeypatch.setattr(primitive, "TARGET", xla_reference.TARGET)
    sizes = {"HEADS": 4, "HEADS_KEY": 2, "HEAD_DIM": 8, "SHARDED_TOKENS": 16, "SECONDS": 0}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_context, name, size)
    return functools.partial(attention, mask=Causal(), kernels=fakes.artifact, arch="sm_90")


def test_rows_and_batch_and_heads_are_measured(small: Callable[..., Any]) -> None:
    """On the CPU, which has no cuDNN: its rows say so, and the others have times and memory."""
    rows = bench_context.rows(jax, small, 16, 2)
    assert [row["name"] for row in rows if row["forward"]] == [
        "one GPU",
        "all_gather, zigzag",
        "ulysses",
        "ring, zigzag",
    ]
    sharded = bench_context.sharded_rows(jax, small, 2)
    names = ["one GPU", "batch, Auto", "batch, Explicit", "heads, Auto", "heads, Explicit"]
    assert [row["name"] for row in sharded if row["forward"]] == names
    assert all((row["batch"], row["tokens"]) == (4, 16) for row in sharded)
    for row in (*rows, *sharded):
        if "cuDNN" in row["name"]:
            assert (row["forward"], row["both"]) == (None, None)
            assert row["error"]
        else:
            assert row["both"] > 0
            assert row["memory_mib"] >= 0
