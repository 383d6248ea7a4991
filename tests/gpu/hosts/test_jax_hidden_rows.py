"""Keys and rows that a boolean mask or a bias of -inf hides, on the GPU: values of float64, and exact zeros."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.problem.tensors import LSE_PADDING
from cutlass_py_attn.runtime import driver
from tests.support.selected_keys import selected_keys

BATCH, QUERIES, KEYS, HEADS, HEADS_KEY = 2, 203, 331, 4, 2
WINDOW = 150  # keys before and behind the diagonal
BLIND_ROWS, BLIND_KEYS = slice(0, None, 5), slice(64, 192)  # one tile of keys and more
ALLOWED = {"float16": 0.002, "bfloat16": 0.012, "float32": 2e-5}  # relative, of the whole array


@pytest.fixture
def jax() -> Any:
    """JAX with a GPU."""
    found = pytest.importorskip("jax", reason="jax is not installed")
    if found.default_backend() != "gpu":
        pytest.skip("jax has no GPU backend here")
    return found


@pytest.fixture
def compiler() -> None:
    """Skips a test that compiles its kernels where the compiler is missing; the suite of prebuilt ones lacks them."""
    pytest.importorskip("cutlass", reason="the compiler is not installed")


def target_of(family: str) -> str | None:
    """Returns the option `arch` with which a call runs in kernels of this family; None for the GPU's own."""
    if driver.device(0).compute_capability != (9, 0):
        if family == "sm90":
            pytest.skip("the GPU has no sm90 kernels")
        return None
    return {"sm90": "sm_90a", "sm80": "sm_90"}[family]


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(array: Any, dtype: str) -> Any:
    ml_dtypes = importlib.import_module("ml_dtypes")
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def operands(dtype: str, head_dim: int) -> tuple[Any, ...]:
    """Returns query, key, value and the gradient of the output."""
    heads = (QUERIES, HEADS), (KEYS, HEADS_KEY), (KEYS, HEADS_KEY), (QUERIES, HEADS)
    return tuple(rounded(draw(seed, BATCH, *shape, head_dim), dtype) for seed, shape in enumerate(heads))


def mask_of(heads: int) -> Any:
    """Returns a mask that hides single pairs, whole rows and whole keys, and of the last batch all."""
    mask = np.random.default_rng(9).random((BATCH, heads, QUERIES, KEYS)) < 0.6
    mask[:, :, BLIND_ROWS] = False
    mask[..., BLIND_KEYS] = False
    mask[-1] = False
    return mask


def expect(found: dict[str, Any], expected: dict[str, Any], visible: Any, dtype: str) -> None:
    """Expects the values, and exactly 0 in hidden rows and of hidden keys."""
    for name, array in found.items():
        one, other = np.asarray(array, np.float64), expected[name]
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other), err_msg=name)
        one, other = (np.where(np.isneginf(each), 0, each) for each in (one, other))
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error < ALLOWED[dtype], f"{name}: {error}"  # also false for NaN
    sees_keys = np.swapaxes(visible.any(-1), 1, 2)
    seen_keys = visible.reshape(BATCH, HEADS_KEY, -1, QUERIES, KEYS).any((2, 3)).transpose(0, 2, 1)
    assert not np.asarray(found["output"], np.float32)[~sees_keys].any()
    assert not np.asarray(found["query"], np.float32)[~sees_keys].any()
    for name in ("key", "value"):
        assert not np.asarray(found[name], np.float32)[~seen_keys].any(), name
    if "bias" in found:
        assert not np.asarray(found["bias"], np.float32)[np.broadcast_to(~visible.any(0), found["bias"].shape)].any()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "family"),
    [
        ("float16", 128, "sm90"),
        ("float16", 64, "sm80"),
        ("bfloat16", 64, "sm90"),
        ("bfloat16", 128, "sm80"),
        ("float32", 64, "sm80"),
    ],
)
def test_boolean_masks_of_dot_product_attention(jax: Any, dtype: str, head_dim: int, family: str) -> None:
    """With and without a trained bias, causality, a window and lengths of keys, the first 0."""
    dot_product_attention = importlib.import_module("cutlass_py_attn.jax").dot_product_attention
    query, key, value, of_output = operands(dtype, head_dim)
    of_residual = draw(7, BATCH, QUERIES, HEADS)
    bias = rounded(draw(8, 1, HEADS, QUERIES, KEYS), dtype)
    used = np.array([311, 331], np.int32)
    row, column = np.arange(QUERIES)[:, None], np.arange(KEYS)
    for has_bias, is_causal, has_window, has_lengths in itertools.product((False, True), repeat=4):
        mask = mask_of(HEADS if has_bias else 1)
        options: dict[str, Any] = {"arch": target_of(family), "mask": mask, "is_causal": is_causal}
        visible = np.broadcast_to(mask, (BATCH, HEADS, QUERIES, KEYS))
        if is_causal:
            visible = visible & (column <= row)
        if has_window:
            options["local_window_size"] = (WINDOW, WINDOW)
            visible = visible & (column >= row - WINDOW) & (column <= row + WINDOW)
        if has_lengths:
            options["key_value_seq_lengths"] = used
            visible = visible & (column < used[:, None, None, None])
        given = [query, key, value, *([bias] if has_bias else [])]

        def call(*arrays: Any, options: dict[str, Any] = options) -> Any:
            output, residual = dot_product_attention(*arrays, return_residual=True, **options)
            return output, residual.astype("float32")

        (output, residual), pull = jax.vjp(jax.jit(call), *map(jax.numpy.asarray, given))
        gradients = pull((jax.numpy.asarray(of_output), jax.numpy.asarray(of_residual)))
        expected = selected_keys((query, key, value), visible, bias if has_bias else None, of_output, of_residual)
        found = dict(zip(expected, (output, residual, *gradients), strict=False))
        expect(found, expected, visible, dtype)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 128), ("bfloat16", 256), ("float32", 64)])
def test_a_bias_of_minus_infinity_in_numpy(dtype: str, head_dim: int) -> None:
    query, key, value, of_output = operands(dtype, head_dim)
    visible = mask_of(HEADS)
    bias = rounded(np.where(visible, draw(8, BATCH, HEADS, QUERIES, KEYS), -np.inf), dtype)
    of_logsumexp = np.zeros((BATCH, HEADS, -(-QUERIES // LSE_PADDING) * LSE_PADDING), np.float32)
    of_residual = draw(7, BATCH, QUERIES, HEADS)
    of_logsumexp[:, :, :QUERIES] = np.swapaxes(of_residual, 1, 2)
    output, logsumexp = attention_forward(query, key, value, bias=bias)
    arrays = of_output, query, key, value, output, logsumexp
    gradients = attention_backward(*arrays, bias=bias, grad_logsumexp=of_logsumexp)
    residual = np.swapaxes(np.asarray(logsumexp)[:, :, :QUERIES], 1, 2)
    found = {"output": output, "residual": residual}
    found |= {name: getattr(gradients, name) for name in ("query", "key", "value")}
    finite = np.where(visible, np.asarray(bias, np.float64), 0)
    expect(found, selected_keys((query, key, value), visible, finite, of_output, of_residual), visible, dtype)
