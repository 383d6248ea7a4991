"""Tests of jax.mla_attention: a cache for keys and values, of 16 bits or of e4m3 codes, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import Paged
from cutlass_py_attn.api.attention import attention_forward, mla_attention_forward
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import CausalBottomRight
from cutlass_py_attn.reference import quantization
from tests.support.bad_calls import Unreadable

jax = pytest.importorskip("jax")

from cutlass_py_attn.jax import mla_attention  # noqa: E402

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((2, 2, 4, 96)).astype(np.float16)
CACHE = RNG.standard_normal((2, 9, 1, 96)).astype(np.float16)


def test_values_are_the_first_columns_of_the_cache() -> None:
    def call(query: object, cache: object) -> object:
        options = {"head_dim_value": 64, "mask": CausalBottomRight(), "scale": 0.1}
        return mla_attention(query, cache, return_logsumexp=True, backend="reference", **options)

    output, logsumexp = jax.jit(call)(QUERY, CACHE)
    options = {"mask": CausalBottomRight(), "scale": 0.1, "backend": "reference"}
    expected = attention_forward(QUERY, CACHE, CACHE[..., :64], **options)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_allclose(logsumexp, expected[1][..., :2], rtol=1e-6)


def test_pages_and_vmap() -> None:
    pool = RNG.standard_normal((6, 4, 1, 96)).astype(np.float16)
    lengths = {"sequences": Paged(np.array([[4, 1], [0, 2]]), np.array([7, 2])), "backend": "reference"}
    found = mla_attention(QUERY, pool, head_dim_value=64, **lengths)
    np.testing.assert_array_equal(found, attention_forward(QUERY, pool, pool[..., :64], **lengths)[0])
    each = jax.vmap(lambda query, cache: mla_attention(query, cache, head_dim_value=64, backend="reference"))
    stacked = np.stack([QUERY, 2 * QUERY]), np.stack([CACHE, CACHE])
    for found, query, cache in zip(each(*stacked), *stacked, strict=True):
        expected, _ = attention_forward(query, cache, cache[..., :64], backend="reference")
        np.testing.assert_array_equal(found, expected)


def test_what_is_refused() -> None:
    with pytest.raises(NotSupported, match="cache with a latent cache is differentiated: must be a constant"):
        jax.grad(lambda cache: mla_attention(QUERY, cache, head_dim_value=64, backend="reference").sum())(CACHE)
    with pytest.raises(NotSupported, match="must be at most the 96 columns of cache with value_in_key; lower it"):
        mla_attention(QUERY, CACHE, backend="reference")
    with pytest.raises(NotSupported, match=r"head_dim_value = 'a' .str.: must be an int known at trace time"):
        mla_attention(QUERY, CACHE, head_dim_value="a")
    with pytest.raises(NotSupported) as caught:
        mla_attention(QUERY, CACHE, head_dim_value="a", return_logsumexp=np.ones(2))
    assert [reason.split(" = ")[0] for reason in caught.value.reasons] == ["return_logsumexp", "head_dim_value"]
    with pytest.raises(NotSupported, match=r"return_logsumexp = 'no' .str.: must be True or False; pass one of them"):
        mla_attention(QUERY, CACHE, head_dim_value=64, return_logsumexp="no", backend="reference")
    with pytest.raises(NotSupported, match=r"query = .*: must be an array that JAX takes \(no __array__\); convert it"):
        mla_attention(Unreadable("__array__"), CACHE, head_dim_value=64)


# A latent cache of e4m3 codes

LATENT_QUERY = RNG.standard_normal((2, 2, 8, 576)).astype(np.float16)
LATENT = RNG.standard_normal((2, 16, 1, 576)).astype(np.float16)
CODES, SCALE = quantization.quantise_latent(LATENT[..., :512])
ROPE = np.ascontiguousarray(LATENT[..., 512:])
CACHE_OF_CODES = {"cache": CODES, "cache_scale": SCALE, "cache_rope": ROPE}
PAGES = {"page_table": np.array([[1, 0], [0, 1]]), "seqused_k": np.array([19, 3])}


def by_python(query: Any = LATENT_QUERY, **given: Any) -> tuple[Any, Any]:
    """Output and logsumexp of the public function, on the host."""
    return mla_attention_forward(query, **{**CACHE_OF_CODES, "scale": 0.05, "backend": "reference", **given})


def by_jax(query: Any, cache: dict[str, Any], **given: Any) -> Any:
    """Output and logsumexp on the host; cache: its three arrays."""
    options = {"scale": 0.05, "backend": "reference", "return_logsumexp": True, **given}
    return mla_attention(query, **{**cache, **options})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_codes_stand_for_code_times_scale(dtype: str) -> None:
    cache = {**CACHE_OF_CODES, "cache": CODES.view(dtype)}
    output, logsumexp = jax.jit(by_jax)(LATENT_QUERY, cache)
    expected = by_python()
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(logsumexp, expected[1][..., :2])


def test_tables_and_codes_are_operands() -> None:
    @jax.jit
    def paged(table: Any, lengths: Any, cache: dict[str, Any]) -> Any:
        return by_jax(LATENT_QUERY, cache, sequences=Paged(table, lengths))[0]

    for lengths in (PAGES["seqused_k"], np.array([1, 32])):
        expected, _ = by_python(sequences=Paged(PAGES["page_table"], lengths))
        np.testing.assert_array_equal(paged(PAGES["page_table"], lengths, CACHE_OF_CODES), expected)
    assert paged._cache_size() == 1  # one program serves all lengths


@pytest.mark.parametrize("of_cache", [0, None], ids=["caches", "one cache"])
def test_vmap_over_codes(of_cache: int | None) -> None:
    queries = np.stack([LATENT_QUERY, 2 * LATENT_QUERY])
    both = {name: np.stack([array, array[::-1]]) for name, array in CACHE_OF_CODES.items()}
    given = CACHE_OF_CODES if of_cache is None else both
    found = jax.vmap(by_jax, (0, of_cache))(queries, given)[0]
    for number, each in enumerate(found):
        own = CACHE_OF_CODES if of_cache is None else {name: array[number] for name, array in both.items()}
        np.testing.assert_array_equal(each, by_python(queries[number], **own)[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_scale": None},
        {"cache_rope": None},
        {"cache": LATENT},
        {"cache": CODES[..., :256]},
        {"cache_scale": SCALE[..., :3]},
        {"cache_scale": SCALE.astype(np.float16)},
        {"cache_rope": ROPE[..., :32]},
        {"cache_rope": ROPE.astype(np.float32)},
        {"cache_rope": ROPE[:1], "cache_scale": SCALE[:, 1:]},
    ],
)
def test_refusals_of_codes_are_those_of_python(changes: dict[str, Any]) -> None:
    with pytest.raises(NotSupported) as expected:
        by_python(**changes)
    with pytest.raises(NotSupported) as caught:
        by_jax(LATENT_QUERY, {**CACHE_OF_CODES, **changes})
    assert caught.value.reasons == expected.value.reasons


def test_a_cache_of_codes_is_a_constant() -> None:
    def total(query: Any, rope: Any, scale: Any) -> Any:
        cache = {**CACHE_OF_CODES, "cache_rope": rope, "cache_scale": scale}
        return by_jax(query, cache)[0].astype("float32").sum()

    with pytest.raises(NotSupported) as caught:
        jax.grad(total, (0, 1, 2))(LATENT_QUERY, ROPE, SCALE)
    assert caught.value.reasons == (
        "cache_scale is differentiated: must be a constant here; pass jax.lax.stop_gradient(cache_scale)",
        "cache_rope, cache_scale, query with a latent cache is differentiated: must be a constant, because a cache has "
        "no gradients; call `attention` with keys and values of their own",
    )
