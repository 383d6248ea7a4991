"""cutlass_py_attn.jax.attention with e4m3 operands: shapes, the reference on the host, vmap, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from cutlass_py_attn import Causal, NotSupported, attention_forward, quantize_e4m3  # noqa: E402
from cutlass_py_attn.jax import attention  # noqa: E402

NAMES = ("query", "key", "value")


def made(batch: int = 2) -> tuple[list[Any], dict[str, Any]]:
    """Returns codes of query (4 heads), key and value (2 heads), and their factors."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((batch, 12, heads, 32)).astype(np.float32) for heads in (4, 2, 2)]
    pairs = [quantize_e4m3(it, num_heads_key=2) for it in arrays]
    factors = {f"{name}_scale": factor for name, (_, factor) in zip(NAMES, pairs, strict=True)}
    return [codes for codes, _ in pairs], factors


def test_shape_and_values() -> None:
    codes, factors = made()
    shape = jax.eval_shape(lambda *it: attention(*it, mask=Causal(), **factors), *map(jnp.asarray, codes))
    assert (shape.shape, shape.dtype) == ((2, 12, 4, 32), jnp.bfloat16)
    found = jax.jit(lambda *it: attention(*it, mask=Causal(), backend="reference", **factors))(*codes)
    expected, _ = attention_forward(*codes, mask=Causal(), backend="reference", **factors)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("are_batched", [True, False], ids=["factors differ", "one factor"])
def test_vmap(are_batched: bool) -> None:
    codes, factors = made()
    stacked = [np.stack([it, it[::-1]]) for it in codes]
    given = {name: np.stack([it, it[::-1]]) for name, it in factors.items()} if are_batched else factors
    axes = dict.fromkeys(given, 0 if are_batched else None)

    def call(operands: list[Any], scales: dict[str, Any]) -> Any:
        return attention(*operands, backend="reference", **scales)

    found = np.asarray(jax.vmap(call, (0, axes))(stacked, given))
    for number in range(2):
        scales = {name: it[number] for name, it in given.items()} if are_batched else factors
        expected, _ = attention_forward(*(it[number] for it in stacked), backend="reference", **scales)
        np.testing.assert_array_equal(found[number].view(np.uint16), expected.view(np.uint16))


def test_objections() -> None:
    codes, factors = made()

    def total(scale: Any) -> Any:
        return attention(*codes, **{**factors, "key_scale": scale}).astype(jnp.float32).sum()

    with pytest.raises(NotSupported, match="key_scale is differentiated: must be a constant here"):
        jax.grad(total)(jnp.asarray(factors["key_scale"]))
    with pytest.raises(NotSupported, match=r"key_scale = .*: only e4m3 codes are scaled, and key has dtype float32"):
        attention(*(it.astype(np.float32) for it in codes), key_scale=factors["key_scale"])
