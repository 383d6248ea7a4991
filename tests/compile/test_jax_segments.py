"""Tests of packed sequences in JAX: VariableLength as a pytree, and sequences of segment ids."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

from cutlass_py_attn.jax import attention, packed_sequences  # noqa: E402

B, T, H, D = 2, 10, 2, 8
IDS = jnp.array([[3, 3, 3, 1, 1, 1, 1, 0, 0, 0], [7] * 10])
attend = functools.partial(attention, mask=Causal(), backend="reference")


def draw(number: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal((B, T, H, D), np.float32))


def packed(query: Any, key: Any, value: Any, ids: Any) -> Any:
    flat = (array.reshape(1, B * T, H, D) for array in (query, key, value))
    return attend(*flat, sequences=packed_sequences(ids, 3)).reshape(B, T, H, D)


def by_bias(query: Any, key: Any, value: Any, ids: Any) -> Any:
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return attend(query, key, value, bias=jnp.where(same, 0.0, -1e30))


@pytest.mark.parametrize("is_traced", [False, True])
def test_segments_do_not_see_each_other(is_traced: bool) -> None:
    arrays = draw(1), draw(2), draw(3)

    def both(function: Any) -> Any:
        total = lambda *given: jnp.sum(jnp.sin(function(*given)))  # noqa: E731
        gradients = jax.grad(total, (0, 1, 2))
        return jax.jit(gradients)(*arrays, IDS) if is_traced else gradients(*arrays, IDS)

    for one, other in zip(both(packed), both(by_bias), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


def test_sequences_are_an_argument_of_a_jitted_function() -> None:
    """One program for all lengths; other longest lengths are another one."""
    flat = [draw(number).reshape(1, B * T, H, D) for number in range(3)]
    traced = []

    @jax.jit
    def run(arrays: Any, sequences: VariableLength) -> Any:
        traced.append(sequences.max_seqlen_q)
        return attend(*arrays, sequences=sequences)

    for starts in (jnp.array([0, 5, 20]), jnp.array([0, 12, 18])):
        expected = attend(*flat, sequences=VariableLength(starts, starts, 15, 15))
        np.testing.assert_allclose(run(flat, VariableLength(starts, starts, 15, 15)), expected, rtol=1e-6, atol=1e-6)
    run(flat, VariableLength(starts, starts, 16, 16))
    assert traced == [15, 16]
    leaves, _ = jax.tree.flatten(VariableLength(starts, starts, 15, 15))
    assert len(leaves) == 2


def test_split_rows_take_known_bounds_of_queries_with_traced_ones_of_keys() -> None:
    arrays = [draw(number).reshape(1, B * T, H, D) for number in range(3)]
    starts = np.array([0, 12, 20], np.int32)
    rows = jax.sharding.PartitionSpec(None, "x")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @jax.jit
    def run(arrays: Any, bounds: Any) -> Any:
        sequences = VariableLength(starts, bounds, 12, 12)
        split = functools.partial(attend, sequences=sequences, context_axis="x")
        return jax.shard_map(split, mesh=mesh, in_specs=rows, out_specs=rows)(*arrays)

    expected = attend(*arrays, sequences=VariableLength(starts, starts, 12, 12))
    np.testing.assert_allclose(run(arrays, jnp.asarray(starts)), expected, rtol=1e-5, atol=1e-5)


def test_more_runs_than_allowed() -> None:
    with pytest.raises(NotSupported, match=re.escape("segment_ids have 4 runs in 2 rows: must be at most 2")):
        packed_sequences(IDS, 1)
    assert packed_sequences(IDS, 2).cu_seqlens_q.tolist() == [0, 3, 7, 10, 20], "as many as allowed"
    bounds = jax.jit(lambda ids: packed_sequences(ids, 1).cu_seqlens_q)(IDS)
    assert bounds.tolist() == [0, 3, 7]


@pytest.mark.parametrize("ids", [jnp.zeros((2, 3)), jnp.zeros(3, int), "x", None], ids=repr)
def test_bad_segment_ids(ids: Any) -> None:
    with pytest.raises(NotSupported) as caught:
        packed_sequences(ids, 0)
    assert [reason.split()[0] for reason in caught.value.reasons] == ["segment_ids", "max_segments"]


CONSTANTS = {"numpy": np.asarray(IDS), "jax": IDS, "list": IDS.tolist()}


@pytest.mark.parametrize("ids", CONSTANTS.values(), ids=CONSTANTS)
def test_ids_that_a_compiled_function_captures(ids: Any) -> None:
    bounds = jax.jit(lambda number: packed_sequences(ids, 3).cu_seqlens_q + number)(0)
    assert bounds.tolist() == [0, 3, 7, 10, 20, 20, 20]
    with pytest.raises(NotSupported, match="segment_ids have 4 runs in 2 rows"):
        jax.jit(lambda number: packed_sequences(ids, 1).cu_seqlens_q + number)(0)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("x", None), (None, "x")], ids=str)
def test_ids_that_a_mesh_splits(kind: str, spec: tuple[str | None, ...]) -> None:
    """Every device gets the bounds of all sequences."""
    expected = packed_sequences(IDS, 3).cu_seqlens_q
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType[kind],))
    bounds_of = lambda ids: packed_sequences(ids, 3).cu_seqlens_q  # noqa: E731
    with jax.set_mesh(mesh):
        ids = jax.device_put(IDS, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        for found in (bounds_of(ids), jax.jit(bounds_of)(ids), jax.jit(lambda number: bounds_of(ids) + number)(0)):
            np.testing.assert_array_equal(found, expected)
        of_rows = jax.jit(jax.vmap(lambda row: bounds_of(row[None])))(ids)
    np.testing.assert_array_equal(of_rows, [[0, 3, 7, 10], [0, 10, 10, 10]])


def test_numbers_of_other_libraries_and_lists_are_a_pytree() -> None:
    """A treedef is compared and hashed; a list of lengths is one array."""
    starts = [0, 5, 20]
    one, other = (
        jax.tree.flatten(VariableLength(starts, starts, longest, longest))[1] for longest in (15, np.array(15))
    )
    assert (one, hash(one)) == (other, hash(other))
    run = jax.jit(lambda sequences: sequences.cu_seqlens_q)
    assert run(VariableLength(starts, starts, np.array(15), 15)).tolist() == starts
