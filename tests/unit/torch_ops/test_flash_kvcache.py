"""Tests of flash_attn_with_kvcache: FlashAttention's names, layouts and windows for a cache in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.torch_ops import flash_attn_with_kvcache
from tests.support.refusals import expect_among

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((2, 3, 4, 8)).astype(np.float32)
CACHE = [RNG.standard_normal((6, 4, 2, 8)).astype(np.float32) for _ in range(2)]
TABLE, LENGTHS = np.array([[4, 1], [0, 2]], np.int32), np.array([7, 2], np.int32)


def called(**changes: Any) -> Any:
    """The result of a call with some arguments changed."""
    given = {"q": QUERY, "k_cache": CACHE[0], "v_cache": CACHE[1], "page_table": TABLE, "cache_seqlens": LENGTHS}
    return flash_attn_with_kvcache(**(given | {"backend": "reference"} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ({}, Full()),
        ({"causal": True}, CausalBottomRight()),
        ({"window_size": (2, 1)}, Window(2, 1)),
        ({"window_size": (2, -1), "causal": True}, Window(2, 0)),
    ],
)
def test_masks_end_at_the_last_key(arguments: dict[str, Any], mask: Mask) -> None:
    output, logsumexp = called(**arguments, return_softmax_lse=True)
    expected = attention_forward(QUERY, *CACHE, mask=mask, sequences=Paged(TABLE, LENGTHS), backend="reference")
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(logsumexp, expected[1][:, :, :3])


def test_packed_queries() -> None:
    starts = np.array([0, 3, 6], np.int32)
    packed = {"q": QUERY.reshape(6, 4, 8), "cu_seqlens_q": starts, "max_seqlen_q": 3}
    output, logsumexp = called(**packed, causal=True, return_softmax_lse=True)
    expected, of_each = called(causal=True, return_softmax_lse=True)
    np.testing.assert_array_equal(output, expected.reshape(6, 4, 8))
    np.testing.assert_array_equal(logsumexp, of_each.transpose(1, 0, 2).reshape(4, 6))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"cache_seqlens": None}, "cache_seqlens: an int32 array on the operands' device"),
        ({"cache_seqlens": LENGTHS + 9}, "cache_seqlens[0]: from 0 to the 8 keys"),
        ({"k_cache": CACHE[0][:, :3]}, "page_size: a power of two"),
        ({"window_size": 5}, "window_size: two ints, below 0 for no limit"),
        ({"window_size": (1, "2")}, "window_size: two ints"),
        ({"q": [1.0], "cu_seqlens_q": TABLE[0]}, "q: take indices with cu_seqlens_q"),
        ({"q": None, "cu_seqlens_q": TABLE[0]}, "q: take indices with cu_seqlens_q, as a torch tensor"),
        ({"causal": "yes"}, "causal: True or False"),
        ({"softmax_scale": 1e-40}, "softmax_scale: a number with a magnitude"),
    ],
)
def test_refusals_have_the_names_of_the_arguments(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(NotSupported) as caught:
        called(**arguments)
    expect_among(caught.value.refusals, expected)
