"""Host callbacks of several CPU devices: refused when traced if XLA has no thread that copies their operands."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jnp = jax.numpy

from cutlass_py_attn.jax import attention, merge_states  # noqa: E402

BEYOND, WITHIN = 1600, 1599  # rows of 2 heads of 8 float32: 102400 and 102336 bytes of a device
attend = functools.partial(attention, backend="reference")


def traced(kind: str, rows: int, devices: int = 2) -> Any:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType[kind],), devices=jax.devices()[:devices])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.ShapeDtypeStruct((devices, rows, 2, 8), np.float32, sharding=split)
    spec = jax.sharding.PartitionSpec("x")
    function = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec) if kind == "Auto" else attend
    with jax.set_mesh(mesh):
        return jax.eval_shape(function, array, array, array)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_more_threads_than_devices(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(NotSupported) as caught:
        traced(kind, BEYOND)
    assert caught.value.reasons == (
        "backend = 'reference' on 2 CPU devices with 2 threads, and operands of 102400 bytes on a device: must have "
        "more threads than devices for operands of 102400 bytes and more, because XLA may wait for ever; set the "
        "environment variable NPROC=3 before Python starts, or use fewer devices",
    )
    assert traced(kind, WITHIN).shape == (2, WITHIN, 2, 8)
    assert traced(kind, BEYOND, 1).shape == (1, BEYOND, 2, 8)
    monkeypatch.setenv("NPROC", "3")
    assert traced(kind, BEYOND).shape == (2, BEYOND, 2, 8)


def test_threads_are_the_cores_without_nproc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert traced("Explicit", BEYOND).shape == (2, BEYOND, 2, 8)
    with pytest.raises(NotSupported, match="on 8 CPU devices with 4 threads"):
        traced("Explicit", BEYOND, 8)


def test_merges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "1")
    output, logsumexp = jnp.zeros((2, BEYOND, 2, 8)), jnp.zeros((2, 2, BEYOND))
    merge = functools.partial(merge_states, backend="reference")
    assert jax.eval_shape(merge, output, logsumexp, output, logsumexp)[0].shape == output.shape, "one device"
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("x")
    with pytest.raises(NotSupported, match="on 2 CPU devices with 1 threads"):
        jax.eval_shape(
            jax.shard_map(merge, mesh=mesh, in_specs=spec, out_specs=spec), output, logsumexp, output, logsumexp
        )
