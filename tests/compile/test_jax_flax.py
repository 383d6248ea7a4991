"""flax_attention: what Flax's attention modules pass to their attention_fn, and what they compute."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

from cutlass_py_attn.jax import dot_product_attention, flax_attention  # noqa: E402

B, T, S, N, D = 2, 6, 7, 2, 8
attend = functools.partial(flax_attention, backend="reference")
RNG = np.random.default_rng(0)
ARRAYS = [jnp.asarray(RNG.standard_normal((B, rows, N, D), np.float32)) for rows in (T, S, S)]
MASK = jnp.asarray(RNG.random((B, 1, T, S)) < 0.6).at[..., 0].set(True)
BIAS = jnp.asarray(RNG.standard_normal((1, N, T, S), np.float32))
KEY = jax.random.key(1)
# The keywords that flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention pass, of Flax 0.12.
LINEN = ("mask", "dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic", "dtype", "precision")
LINEN += ("force_fp32_for_softmax", "qk_attn_weights_einsum", "attn_weights_value_einsum", "module")
NNX = (*LINEN[:7], "module", "is_causal")


def test_the_modules_pass_only_arguments_that_it_has() -> None:
    """flax.linen reads the signature, also through functools.partial, and drops the others without a word."""
    assert {*LINEN, *NNX, "bias", "promote_dtype", "einsum_dot_general"} <= {*inspect.signature(attend).parameters}


@pytest.mark.parametrize("dtype", [bool, "float32", "int32"])
def test_masks_as_flax_makes_them(dtype: Any) -> None:
    expected = jax.nn.dot_product_attention(*ARRAYS, BIAS, MASK, is_causal=True)
    found = attend(*ARRAYS, bias=BIAS, mask=MASK.astype(dtype), is_causal=True, deterministic=True, dropout_rate=0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    traced = jax.jit(lambda mask: attend(*ARRAYS, bias=BIAS, mask=mask, is_causal=True))(MASK.astype(dtype))
    np.testing.assert_allclose(traced, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (3, 1, 2)], ids=str)
def test_any_number_of_batch_axes(batch: tuple[int, ...]) -> None:
    size = int(np.prod(batch))
    arrays = [jnp.asarray(RNG.standard_normal((size, rows, N, D), np.float32)) for rows in (T, S, S)]
    shaped = [array.reshape(*batch, *array.shape[1:]) for array in arrays]
    masks = [jnp.asarray(RNG.random((*batch, 1, T, S)) < 0.7).at[..., 0].set(True), MASK[:1], MASK[0, 0]]
    masks = masks if batch else [MASK[0], MASK[0, 0]]
    for mask in masks:
        whole = jnp.broadcast_to(mask, (*batch, 1, T, S)).reshape(size, 1, T, S)
        expected = jax.nn.dot_product_attention(*arrays, mask=whole)
        np.testing.assert_allclose(attend(*shaped, mask=mask), expected.reshape(*batch, T, N, D), rtol=1e-5, atol=1e-5)


def test_dtypes_are_promoted() -> None:
    halves = [array.astype("bfloat16") for array in ARRAYS]
    assert attend(*halves[:2], ARRAYS[2]).dtype == "float32"
    found = attend(*ARRAYS, dtype=jnp.bfloat16, precision="highest", force_fp32_for_softmax=True)
    np.testing.assert_array_equal(found, dot_product_attention(*halves, backend="reference"))
    as_half = lambda arrays, dtype: tuple(array.astype("float16") for array in arrays)  # noqa: E731
    assert attend(*ARRAYS, promote_dtype=as_half).dtype == "float16"


def test_dropout() -> None:
    """By dropout_rate and dropout_rng, unless deterministic; a raw key too."""
    options: dict[str, Any] = {"dropout_rate": 0.5, "broadcast_dropout": False}
    expected = dot_product_attention(*ARRAYS, dropout_p=0.5, dropout_key=KEY, backend="reference")
    np.testing.assert_array_equal(attend(*ARRAYS, dropout_rng=KEY, **options), expected)
    raw = attend(*ARRAYS, dropout_rng=jax.random.PRNGKey(1), **options)
    assert bool(jnp.any(raw != attend(*ARRAYS)))
    kept = attend(*ARRAYS, dropout_rng=KEY, deterministic=True, **options)
    np.testing.assert_array_equal(kept, attend(*ARRAYS))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shared dropout": (
        {"dropout_rate": 0.5, "dropout_rng": KEY},
        "broadcast_dropout = True: must be False",
    ),
    "no key": (
        {"dropout_rate": 0.5, "broadcast_dropout": False},
        "dropout_rng = None: must be a key",
    ),
    "rate": ({"dropout_rate": 2.0}, "dropout_rate = 2.0 (float): must be a probability"),
    "module": ({"module": "x"}, "call the module with sow_weights=False"),
    "einsum": ({"qk_attn_weights_einsum": jnp.einsum}, "leave qk_attn_weights_einsum_cls out"),
    "dot_general": ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general = "),
    "precision": ({"precision": jax.lax.Precision.HIGHEST}, "must be None, DEFAULT or HIGH"),
    "algorithm": ({"precision": "F32_F32_F32"}, "must be None or a jax.lax.Precision"),
    "deterministic": ({"deterministic": 3}, "deterministic = 3 (int): must be True or False"),
    "additive mask": ({"mask": jnp.where(MASK, 0.0, -1e9)}, "or as bias what is to be added to the scores"),
    "mask": ({"mask": jnp.ones((T, S + 1), bool)}, "mask.shape = (6, 8): must broadcast"),
    "query": ({"query": jnp.ones((3, 4))}, "must be an array (batch..., length, num_heads, head_dim)"),
    "option": ({"sofcap": 1.0}, "did you mean softcap?"),
}


@pytest.mark.parametrize(("changes", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], text: str) -> None:
    arguments = dict(zip(("query", "key", "value"), ARRAYS, strict=True)) | changes
    with pytest.raises(NotSupported) as caught:
        attend(**arguments)
    (reason,) = caught.value.reasons
    assert text in reason


def test_every_wrong_argument_is_named() -> None:
    with pytest.raises(NotSupported) as caught:
        attend(*ARRAYS, mask=jnp.ones((T, S + 1), bool), module="x", dropout_rate=0.5, is_causal=3)
    assert [refusal.name for refusal in caught.value.refusals] == [
        *("module", "broadcast_dropout", "dropout_rng", "mask", "is_causal"),
    ]


def test_modules_of_flax() -> None:
    """The parameters' gradients too, and decoding, for which flax.linen makes a float32 mask by itself."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    linen = pytest.importorskip("flax.linen")
    inputs = jnp.asarray(RNG.standard_normal((2, 8, 16), np.float32))
    mask = nnx.make_causal_mask(jnp.ones((2, 8)))

    def of_nnx(**options: Any) -> Any:
        module = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0), **options)
        loss = lambda module: jnp.sum(jnp.sin(module(inputs, mask=mask)))  # noqa: E731
        return module(inputs, mask=mask), jax.tree.leaves(nnx.grad(loss)(module))

    for one, other in zip(jax.tree.leaves(of_nnx(attention_fn=attend)), jax.tree.leaves(of_nnx()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    modules = [
        linen.MultiHeadDotProductAttention(num_heads=4, decode=True, **each) for each in ({}, {"attention_fn": attend})
    ]
    variables = modules[0].init(KEY, inputs)
    caches = [variables["cache"]] * 2
    for row in range(3):
        steps = [
            module.apply({"params": variables["params"], "cache": cache}, inputs[:, row : row + 1], mutable=["cache"])
            for module, cache in zip(modules, caches, strict=True)
        ]
        caches = [state["cache"] for _, state in steps]
        np.testing.assert_allclose(steps[0][0], steps[1][0], rtol=1e-5, atol=1e-5)
    whole = linen.MultiHeadDotProductAttention(
        num_heads=4, broadcast_dropout=False, dropout_rate=0.5, attention_fn=attend
    )
    dropped = whole.apply({"params": variables["params"]}, inputs, deterministic=False, rngs={"dropout": KEY})
    assert bool(jnp.any(dropped != whole.apply({"params": variables["params"]}, inputs, deterministic=True)))
