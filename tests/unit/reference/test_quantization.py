"""Tests of the reference's codes: what they stand for, and attention of them on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.reference import quantization
from cutlass_py_attn.torch_ops import flash_attn_with_kvcache

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((2, 3, 4, 8)).astype(ml_dtypes.bfloat16)
POOLS = [RNG.standard_normal((6, 4, 2, 8)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2)]
TABLE, LENGTHS = np.array([[4, 1], [0, 2]], np.int32), np.array([7, 2], np.int32)
SCALES: dict[str, Any] = {
    "none": None,
    "scalar": np.array(2.0, np.float32),
    "one": np.array([2.0], np.float32),
    "heads": np.array([2.0, 0.5], np.float32),
    "sequences": np.array([[2.0, 0.5], [0.25, 3.0]], np.float32),
    "rows": RNG.random((6, 4, 2)).astype(np.float32),
}


def expected_rows(codes: Any, scale: Any, number: int) -> Any:
    """The numbers of a sequence's rows, one by one."""
    found = np.zeros((int(LENGTHS[number]), 2, 8))
    for key in range(len(found)):
        page, row = int(TABLE[number, key // 4]), key % 4
        for head in range(2):
            places = {None: None, 0: (), 1: (head,), 2: (number, head), 3: (page, row, head)}
            place = places[None if scale is None else scale.ndim]
            factor = 1.0 if place is None else scale[place if scale.shape != (1,) else 0]
            found[key, head] = codes[page, row, head].astype(np.float64) * float(factor)
    return found


@pytest.mark.parametrize("of_value", SCALES)
@pytest.mark.parametrize("of_key", SCALES)
def test_paged_attention_of_codes(of_key: str, of_value: str) -> None:
    scales = {"key_scale": SCALES[of_key], "value_scale": SCALES[of_value]}
    output, _ = attention_forward(QUERY, *POOLS, sequences=Paged(TABLE, LENGTHS), backend="reference", **scales)
    for number in range(2):
        key, value = (expected_rows(pool, scale, number) for pool, scale in zip(POOLS, scales.values(), strict=True))
        for head in range(4):
            scores = QUERY[number, :, head].astype(np.float64) @ key[:, head // 2].T / np.sqrt(8)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            truth = weights @ value[:, head // 2] / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(output[number, :, head].astype(np.float64), truth, rtol=1e-2, atol=1e-2)


def test_flash_names_of_scales() -> None:
    scales = {"key_scale": SCALES["sequences"], "value_scale": SCALES["heads"]}
    truth, _ = attention_forward(QUERY, *POOLS, sequences=Paged(TABLE, LENGTHS), backend="reference", **scales)
    given: dict[str, Any] = {"k_descale": SCALES["sequences"], "v_descale": SCALES["heads"], "backend": "reference"}
    found = flash_attn_with_kvcache(QUERY, *POOLS, page_table=TABLE, cache_seqlens=LENGTHS, **given)
    np.testing.assert_array_equal(found, truth)
    given["q_descale"] = SCALES["one"]
    with pytest.raises(NotSupported, match=r"q_descale = .*: only e4m3 codes are scaled, and q has dtype bfloat16"):
        flash_attn_with_kvcache(QUERY, *POOLS, page_table=TABLE, cache_seqlens=LENGTHS, **given)


def test_rows_of_variable_lengths_have_the_scale_of_their_sequence() -> None:
    codes = np.ones((1, 6, 2, 3), ml_dtypes.float8_e4m3fn)
    scale = np.array([[5.0, 2.0], [9.0, 9.0], [3.0, 4.0]], np.float32)
    found = quantization.dequantise(codes, scale, np.array([0, 2, 2, 5]))
    np.testing.assert_array_equal(found[0, :, :, 0], [[5, 2], [5, 2], [3, 4], [3, 4], [3, 4], [1, 1]])


def test_codes_times_their_scale_are_near() -> None:
    rows = RNG.standard_normal((2, 7, 3, 16)).astype(np.float32)
    scale = quantization.scales_of(rows, "row", 3)
    codes = quantization.quantise(rows, scale)
    error = np.abs(quantization.dequantise(codes, scale) - rows)
    assert (error <= np.abs(rows) * 2.0**-4 + scale[..., None] * 2.0**-10).all()
    assert np.abs(quantization.dequantise(codes, None)).max() == 448
