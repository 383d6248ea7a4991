"""Tests of caches in pages in JAX: traced tables and lengths, values by the reference, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import CausalBottomRight
from cutlass_py_attn.problem.spec import parse

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

import cutlass_py_attn.jax as attention_module  # noqa: E402
from cutlass_py_attn.jax import partition  # noqa: E402
from tests.support.refused_pages import paged_problem  # noqa: E402

attention = attention_module.attention
RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((3, 2, 4, 8)).astype(np.float32)
POOLS = [RNG.standard_normal((20, 4, 2, 8)).astype(np.float32) for _ in range(2)]
TABLE = RNG.permutation(20)[:15].reshape(3, 5).astype(np.int32)
LENGTHS = np.array([7, 0, 20], np.int32)


def paged(query: Any, key: Any, value: Any, table: Any, lengths: Any) -> Any:
    """Attention with a cache in pages, by the reference on the host."""
    sequences = Paged(table, lengths)
    return attention(query, key, value, mask=CausalBottomRight(), sequences=sequences, backend="reference")


def expected(query: Any) -> Any:
    """The output of the public function."""
    sequences = Paged(TABLE, LENGTHS)
    return attention_forward(query, *POOLS, mask=CausalBottomRight(), sequences=sequences, backend="reference")[0]


def test_tables_and_lengths_are_operands() -> None:
    compiled = jax.jit(paged)
    np.testing.assert_array_equal(compiled(QUERY, *POOLS, TABLE, LENGTHS), expected(QUERY))
    shorter = np.array([1, 0, 3], np.int32)
    again = attention_forward(
        QUERY, *POOLS, mask=CausalBottomRight(), sequences=Paged(TABLE, shorter), backend="reference"
    )
    np.testing.assert_array_equal(compiled(QUERY, *POOLS, TABLE, shorter), again[0])
    assert compiled._cache_size() == 1  # one program serves all lengths


CODES = [pool.astype(ml_dtypes.float8_e4m3fn) for pool in POOLS]
SCALES = {
    "key_scale": RNG.random((3, 2)).astype(np.float32),
    "value_scale": RNG.random((2,)).astype(np.float32),
}
ROW_SCALES = {name: RNG.random((20, 4, 2)).astype(np.float32) for name in SCALES}


@pytest.mark.parametrize("scales", [SCALES, ROW_SCALES], ids=["heads", "rows"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_scales_of_e4m3_codes_are_operands(dtype: str, scales: dict[str, Any]) -> None:
    pools = CODES if dtype != "uint8" else [codes.view(np.uint8) for codes in CODES]
    query = QUERY.astype(ml_dtypes.bfloat16)
    given = {"mask": CausalBottomRight(), "backend": "reference"}

    @jax.jit
    def called(table: Any, lengths: Any, scales: Any) -> Any:
        return attention(query, *pools, sequences=Paged(table, lengths), **given, **scales)

    expected = attention_forward(query, *pools, sequences=Paged(TABLE, LENGTHS), **given, **scales)[0]
    np.testing.assert_array_equal(called(TABLE, LENGTHS, scales), expected)


def test_e4m3_caches_have_no_gradients() -> None:
    def loss(query: Any) -> Any:
        found = attention(query, *CODES, sequences=Paged(TABLE, LENGTHS), backend="reference", **SCALES)
        return found.astype(jnp.float32).sum()

    with pytest.raises(NotSupported, match="query with key, value of e4m3 is differentiated"):
        jax.grad(loss)(jnp.asarray(QUERY, jnp.bfloat16))


def test_heads_of_scales_may_be_split() -> None:
    problem = parse("bf16_d64_q1_s64_b3_h8k2_full_paged16_kv8").problem("forward")
    assert partition.axes_of("key_scale", (2,), problem) == ("num_heads_key",)
    assert partition.axes_of("key_scale", (3, 2), problem) == ("sequences", "num_heads_key")
    assert partition.axes_of("key_scale", (13, 16, 2), problem) == ("num_pages", "page_size", "num_heads_key")
    assert partition.axes_of("key_scale", (1,), problem) == ("key_scale_0",)
    latent = parse("bf16_d576v512_q1_s64_b3_h8k2_full_paged16_mla_kv8_descaletile").problem("forward")
    rows = ("num_pages", "page_size", "num_heads_key")
    assert partition.axes_of("key_scale", (13, 16, 2, 4), latent) == (*rows, "tiles")
    assert partition.axes_of("key_rope", (13, 16, 2, 64), latent) == (*rows, "rope_columns")
    assert partition.axes_of("key", (13, 16, 2, 512), latent) == (*rows, "code_columns")


def test_packed_queries_and_a_table_with_bounds() -> None:
    starts, bounds = np.array([0, 2, 4, 6]), np.array([0, 2, 2, 7])
    flat = np.concatenate([TABLE[0, :2], TABLE[2]])
    sequences = Paged(flat, LENGTHS, starts, 2, bounds)
    found = attention(
        QUERY.reshape(1, 6, 4, 8), *POOLS, mask=CausalBottomRight(), sequences=sequences, backend="reference"
    )
    np.testing.assert_array_equal(np.asarray(found).reshape(QUERY.shape), expected(QUERY))


def test_logsumexp_has_the_rows_of_the_queries() -> None:
    output, logsumexp = attend_with_logsumexp(QUERY, Paged(TABLE, LENGTHS))
    found = attention_forward(
        QUERY, *POOLS, mask=CausalBottomRight(), sequences=Paged(TABLE, LENGTHS), backend="reference"
    )
    np.testing.assert_array_equal(output, found[0])
    np.testing.assert_array_equal(logsumexp, found[1][..., : QUERY.shape[1]])
    packed = attend_with_logsumexp(QUERY.reshape(1, 6, 4, 8), Paged(TABLE, LENGTHS, np.array([0, 2, 4, 6]), 2))[1]
    np.testing.assert_array_equal(packed, logsumexp)


def attend_with_logsumexp(query: Any, sequences: Paged) -> Any:
    """Output and logsumexp, by the reference on the host."""
    return attention(
        query, *POOLS, mask=CausalBottomRight(), sequences=sequences, backend="reference", return_logsumexp=True
    )


def test_the_rows_of_a_cache_are_not_split_over_devices() -> None:
    def split(query: Any) -> Any:
        return attention(query, *POOLS, sequences=Paged(TABLE, LENGTHS), context_axis="x")

    rows = jax.P(None, "x")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(NotSupported, match=r"sequences = Paged\(.*: must be VariableLength or None with context_axis"):
        jax.shard_map(split, mesh=mesh, in_specs=rows, out_specs=rows)(QUERY)


def test_vmap_computes_one_element_after_the_other() -> None:
    both = np.stack([QUERY, 2 * QUERY])
    found = jax.vmap(paged, in_axes=(0, None, None, None, None))(both, *POOLS, TABLE, LENGTHS)
    np.testing.assert_array_equal(found, np.stack([expected(each) for each in both]))


def test_a_cache_has_no_gradients() -> None:
    with pytest.raises(NotSupported, match="query with pages is differentiated: must be a constant"):
        jax.grad(lambda query: paged(query, *POOLS, TABLE, LENGTHS).sum())(QUERY)


def test_values_of_numpy_arrays_are_checked() -> None:
    with pytest.raises(NotSupported, match="must be from 0 to the 20 keys of the sequence's pages"):
        paged(QUERY, *POOLS, TABLE, LENGTHS + 1)
    with pytest.raises(NotSupported, match=r"page_table.dtype = 'float32' .*: must be int32"):
        paged(QUERY, *POOLS, jnp.zeros((3, 5)), LENGTHS)
    for table, lengths in ((TABLE[0, 0], LENGTHS), (TABLE[0], LENGTHS), (TABLE, LENGTHS[0]), (TABLE, LENGTHS[None])):
        with pytest.raises(NotSupported, match=r"page_table.shape = .*: must|seqused_k = array of shape .*: must"):
            paged(QUERY, *POOLS, np.asarray(table), np.asarray(lengths))


def test_heads_alone_may_be_split_over_devices() -> None:
    problem = paged_problem()
    axes = {name: partition.axes_of(name, getattr(problem, name).shape, problem) for name in ("query", "key")}
    assert [axis for axis in axes["query"] if axis == partition.BATCH] == []
    assert [axis for axis in axes["key"] if axis in (partition.BATCH, partition.HEADS_KEY)] == [partition.HEADS_KEY]
    assert set(axes["query"]).isdisjoint(axes["key"][:2])


@jax.jit
def decode(query: Any, sequences: Paged) -> Any:
    return attention(query, *POOLS, mask=CausalBottomRight(), sequences=sequences, backend="reference")


def test_a_paged_cache_is_an_argument_of_a_compiled_step() -> None:
    """One program for all tables and lengths; max_seqlen_q and invariant are static."""
    before = decode._cache_size()
    np.testing.assert_array_equal(decode(QUERY, Paged(TABLE, LENGTHS)), expected(QUERY))
    decode(QUERY, Paged(TABLE[::-1], LENGTHS - LENGTHS // 2))
    assert decode._cache_size() == before + 1
    decode(QUERY, Paged(TABLE, LENGTHS, invariant=True))
    assert decode._cache_size() == before + 2
    starts = np.array([0, 2, 4, 6], np.int32)
    packed = decode(QUERY.reshape(1, 6, 4, 8), Paged(TABLE, LENGTHS, starts, np.array(2)))
    np.testing.assert_allclose(packed.reshape(QUERY.shape), expected(QUERY), rtol=1e-6, atol=1e-6)
    leaves, tree = jax.tree.flatten(Paged(TABLE, LENGTHS, starts, 2))
    assert len(leaves) == 3
    assert tree != jax.tree.flatten(Paged(TABLE, LENGTHS, starts, 3))[1]
    assert jax.tree.unflatten(tree, leaves).max_seqlen_q == 2
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(Paged(TABLE, LENGTHS))]
    assert paths == [".page_table", ".seqused_k"]


def test_scan_carries_a_paged_cache() -> None:
    """A decode loop: each step stores a key and a value of every sequence, and attends to all so far."""
    steps, count = 3, len(TABLE)
    queries, keys, values = (RNG.standard_normal((steps, count, 1, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    lengths = np.array([7, 0, 16], np.int32)

    def step(carry: Any, rows: Any) -> Any:
        pools, sequences = carry
        query, key, value = rows
        place = sequences.seqused_k
        slots = sequences.page_table[jnp.arange(count), place // 4] * 4 + place % 4
        pools = attention_module.append_to_cache(key[:, 0], value[:, 0], *pools, slots, backend="reference")
        sequences = dataclasses.replace(sequences, seqused_k=place + 1)
        return (pools, sequences), attention(query, *pools, sequences=sequences, backend="reference")

    start = tuple(map(jnp.asarray, POOLS)), Paged(jnp.asarray(TABLE), jnp.asarray(lengths))
    (_, sequences), outputs = jax.jit(lambda start: jax.lax.scan(step, start, (queries, keys, values)))(start)
    assert sequences.seqused_k.tolist() == (lengths + steps).tolist()
    for number in range(count):
        cached = (pool[TABLE[number]].reshape(20, 2, 8)[: lengths[number]].astype(np.float64) for pool in POOLS)
        parts = [*zip(cached, (keys, values), strict=True)]
        for index in range(steps):
            stored = [np.concatenate([part, new[: index + 1, number, 0]]) for part, new in parts]
            key, value = (np.repeat(part, 2, axis=1) for part in stored)
            scores = np.einsum("hd,khd->hk", queries[index, number, 0], key) / np.sqrt(8)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            truth = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), value)
            np.testing.assert_allclose(outputs[index, number, 0], truth, rtol=1e-5, atol=1e-6)


def test_vmap_over_paged_caches() -> None:
    tables = np.stack([TABLE, TABLE[::-1]])
    lengths = np.stack([LENGTHS, LENGTHS[::-1]])
    found = jax.vmap(decode, in_axes=(None, 0))(QUERY, Paged(tables, lengths))
    for number in range(2):
        np.testing.assert_array_equal(found[number], decode(QUERY, Paged(tables[number], lengths[number])))
