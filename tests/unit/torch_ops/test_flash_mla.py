"""Tests of flash_mla_with_kvcache: FlashMLA's names for a latent cache in pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import CausalBottomRight, Full, Mask
from cutlass_py_attn.torch_ops import flash_mla_with_kvcache
from tests.support.refusals import expect_among

RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((2, 3, 4, 576)).astype(np.float16)
CACHE = RNG.standard_normal((6, 4, 1, 576)).astype(np.float16)
TABLE, LENGTHS = np.array([[4, 1], [0, 2]], np.int32), np.array([7, 2], np.int32)


def called(**changes: Any) -> Any:
    """The result of a call with some arguments changed."""
    given = {"q": QUERY, "k_cache": CACHE, "block_table": TABLE, "cache_seqlens": LENGTHS}
    return flash_mla_with_kvcache(**(given | {"backend": "reference"} | changes))


@pytest.mark.parametrize(("causal", "mask"), [(False, Full()), (True, CausalBottomRight())])
@pytest.mark.parametrize("columns", [512, 64])
def test_values_are_the_first_columns_of_the_cache(causal: bool, mask: Mask, columns: int) -> None:
    output, logsumexp = called(causal=causal, head_dim_v=columns, softmax_scale=0.1)
    lengths: dict[str, Any] = {"sequences": Paged(TABLE, LENGTHS), "backend": "reference"}
    expected = attention_forward(QUERY, CACHE, CACHE[..., :columns], mask=mask, scale=0.1, **lengths)
    assert output.shape == (2, 3, 4, columns)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(logsumexp, expected[1][:, :, :3])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"cache_seqlens": None}, "cache_seqlens: an int32 array on the operands' device"),
        ({"cache_seqlens": LENGTHS + 9}, "cache_seqlens[0]: from 0 to the 8 keys"),
        ({"k_cache": CACHE[:, :3]}, "page_size: a power of two"),
        ({"causal": 1.5}, "causal: True or False"),
        ({"head_dim_v": 600}, "head_dim_v: at most the 576 columns of k_cache"),
        ({"softmax_scale": "0.1"}, "softmax_scale: a number"),
        ({"block_table": TABLE[:1]}, "block_table.shape: one row for each of the 2 lengths"),
    ],
)
def test_wrong_arguments_are_refused_under_their_names(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(NotSupported) as refused:
        called(**arguments)
    expect_among(refused.value.refusals, expected)
