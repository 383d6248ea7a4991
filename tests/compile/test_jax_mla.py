"""Tests of jax.mla_attention: a cache for keys and values, on the host."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn import Paged
from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import CausalBottomRight
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
    with pytest.raises(NotSupported, match="must be at most the 96 columns of cache; lower it"):
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
