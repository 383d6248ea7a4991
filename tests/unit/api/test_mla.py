"""Tests of mla_attention_forward: one cache for keys and values, through every way to the kernels but a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward, mla_attention_forward, problem_of
from cutlass_py_attn.api.options import MlaOptions, Options, VariableLength, check_options
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import CausalBottomRight
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.reference import quantization
from cutlass_py_attn.runtime.arrays import Array
from tests.support.refusals import expect_among

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((2, 2, 4, 576)).astype(np.float16)
CACHE = RNG.standard_normal((2, 9, 1, 576)).astype(np.float16)
TABLE, LENGTHS = np.array([[1, 0]]), np.array([11])


@pytest.mark.parametrize("columns", [None, 512, 300])
def test_the_first_columns_are_the_values(columns: int | None) -> None:
    options: dict[str, Any] = {"mask": CausalBottomRight(), "scale": 0.05, "backend": "reference"}
    chosen = {} if columns is None else {"head_dim_value": columns}
    found = mla_attention_forward(QUERY, CACHE, **chosen, **options)
    expected = attention_forward(QUERY, CACHE, CACHE[..., : columns or 512], **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_lengths_and_the_array_for_the_output() -> None:
    out = np.zeros((1, 2, 4, 512), np.float16)
    pool = RNG.standard_normal((3, 8, 1, 576)).astype(np.float16)
    paged: dict[str, Any] = {"sequences": Paged(TABLE, LENGTHS), "backend": "reference"}
    found, _ = mla_attention_forward(QUERY[:1], pool, out=out, **paged)
    assert found is out
    np.testing.assert_array_equal(out, attention_forward(QUERY[:1], pool, pool[..., :512], **paged)[0])
    packed = {"sequences": VariableLength(np.array([0, 2]), np.array([0, 9]), 2, 9), "backend": "reference"}
    found, _ = mla_attention_forward(QUERY[:1], CACHE[:1], **packed)
    np.testing.assert_array_equal(found, mla_attention_forward(QUERY[:1], CACHE[:1], backend="reference")[0])


def arrays(cache: Tensor) -> dict[str, Array]:
    """Device arrays at any addresses."""
    query = Tensor.contiguous((2, 1, 128, 576), "bfloat16")
    return {
        name: Array(4096, tensor.shape, tensor.strides, tensor.dtype, 0, "torch", None)
        for name, tensor in (("query", query), ("key", cache))
    }


def test_value_has_the_strides_of_the_cache() -> None:
    strided = Tensor((2, 70, 1, 576), (70 * 640, 640, 640, 1), "bfloat16")
    problem, new = problem_of("forward", arrays(strided), Options(head_dim_value=512))
    assert problem.value_in_key
    assert (problem.value.shape, problem.value.strides) == ((2, 70, 1, 512), strided.strides)
    assert new["output"].shape == (2, 1, 128, 512)


def test_a_host_array_has_the_strides_of_its_copy() -> None:
    given = {
        name: array._replace(device=None) for name, array in arrays(Tensor.contiguous((2, 70, 1, 576), "x")).items()
    }
    given["key"] = given["key"]._replace(dtype="bfloat16", strides=(1, 2, 3, 4))
    problem, _ = problem_of("forward", given, Options(head_dim_value=512))
    assert problem.value.strides == (70 * 576, 576, 576, 1)


POOL = RNG.standard_normal((3, 8, 1, 576)).astype(np.float16)
CODES, SCALE = quantization.quantise_latent(POOL[..., :512])
ROPE = np.ascontiguousarray(POOL[..., 512:])


@pytest.mark.parametrize("has_pages", [True, False])
@pytest.mark.parametrize("has_bytes", [True, False])
def test_codes_stand_for_code_times_scale(has_pages: bool, has_bytes: bool) -> None:
    options: dict[str, Any] = {"scale": 0.05, "backend": "reference"}
    query = QUERY[:1] if has_pages else np.tile(QUERY, (2, 1, 1, 1))[:3]
    options["sequences"] = Paged(TABLE, LENGTHS) if has_pages else None
    numbers = CODES.astype(np.float64).reshape(3, 8, 1, 4, 128) * SCALE[..., None]
    cache = np.concatenate([numbers.reshape(3, 8, 1, 512), ROPE], axis=-1).astype(np.float32)
    codes = CODES.view(np.uint8) if has_bytes else CODES
    output, logsumexp = mla_attention_forward(query, codes, cache_scale=SCALE, cache_rope=ROPE, **options)
    expected = attention_forward(query.astype(np.float32), cache, cache[..., :512], **options)
    assert output.dtype == query.dtype
    np.testing.assert_allclose(output, expected[0], rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(logsumexp, expected[1], rtol=1e-5)


def test_views_of_packed_rows_are_a_cache() -> None:
    packed = np.zeros((3, 8, 1, 656), np.uint8)
    codes, scale, rope = packed[..., :512], packed[..., 512:528].view(np.float32), packed[..., 528:].view(np.float16)
    codes[...], scale[...], rope[...] = CODES.view(np.uint8), SCALE, ROPE
    options: dict[str, Any] = {"sequences": Paged(TABLE, LENGTHS), "backend": "reference"}
    found = mla_attention_forward(QUERY[:1], codes, cache_scale=scale, cache_rope=rope, **options)
    apart = mla_attention_forward(QUERY[:1], CODES, cache_scale=SCALE, cache_rope=ROPE, **options)
    np.testing.assert_array_equal(found[0], apart[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache_scale": None}, "cache_scale: must be float32 (3, 8, 1, 4) with cache_rope, a scale of each 128"),
        ({"cache_rope": None}, "cache.shape: must be (3, 8, 1, 576) to match query (1, 2, 4, 576)"),
        ({"cache_scale": SCALE[..., :3]}, "cache_scale: must be float32 (3, 8, 1, 4)"),
        ({"cache_scale": SCALE.astype(np.float16)}, "cache_scale: must be float32"),
        ({"cache_rope": ROPE[..., :32]}, "cache_rope.shape: must be (3, 8, 1, 64), the rows of cache"),
        ({"cache_rope": ROPE.astype(np.float32)}, "cache_rope.dtype: must be float16 as query"),
        ({"cache": POOL}, "cache_rope: not to cache of float16 and query of float16"),
    ],
)
def test_refused_codes(changes: dict[str, Any], reason: str) -> None:
    given = {"cache": CODES, "cache_scale": SCALE, "cache_rope": ROPE, "sequences": Paged(TABLE, LENGTHS)} | changes
    with pytest.raises(NotSupported) as refused:
        mla_attention_forward(QUERY[:1], backend="reference", **given)
    expect_among(refused.value.refusals, reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": 1}, "option: must be one of mask, scale, sequences, backend, kernels, out, "),
        ({"head_dim_value": 600}, "head_dim_value: must be at most the 576 columns of cache"),
        ({"head_dim_value": 0}, "head_dim_value: must be from 1 to 65536"),
        ({"head_dim_value": None}, "head_dim_value: must be an int, the columns of the cache that are values"),
        ({"sequences": 3}, "sequences: must be a VariableLength or Paged object, or None"),
    ],
)
def test_refused_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotSupported) as refused:
        mla_attention_forward(QUERY, CACHE, backend="reference", **options)
    expect_among(refused.value.refusals, reason)


def test_the_columns_decide_what_is_prepared() -> None:
    narrow, wide = (check_options({"head_dim_value": columns}, MlaOptions) for columns in (64, 512))
    assert narrow.key != wide.key != Options().key
