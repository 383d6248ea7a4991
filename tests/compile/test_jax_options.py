"""Options that a function of JAX does not have: the nearest of its own, and what another library's are here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal

jax = pytest.importorskip("jax", reason="jax is not installed")

import cutlass_py_attn.jax as package  # noqa: E402

ARRAY = np.ones((1, 4, 2, 8), np.float32)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": functools.partial(package.attention, ARRAY, ARRAY, ARRAY),
    "dot_product_attention": functools.partial(package.dot_product_attention, ARRAY, ARRAY, ARRAY),
    "context_parallel_attention": functools.partial(package.context_parallel_attention, ARRAY, ARRAY, ARRAY),
    "mla_attention": functools.partial(package.mla_attention, ARRAY, ARRAY),
    "merge_states": functools.partial(package.merge_states, ARRAY, ARRAY, ARRAY, ARRAY),
    "append_to_cache": functools.partial(package.append_to_cache, ARRAY, ARRAY, ARRAY, ARRAY, ARRAY),
}
CAUSAL, DROPOUT = "pass mask=Causal()", "pass dropout_p= and dropout_key="


def refusal(name: str, option: str) -> str:
    with pytest.raises(NotSupported) as caught:
        FUNCTIONS[name](**{option: 1})
    (found,) = caught.value.refusals
    assert (found.field, found.value) == ("option", f"{option!r} (str)")
    return found.remedy


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_that_all_functions_have(name: str) -> None:
    assert refusal(name, "implementation") == "pass backend=, or leave it out to compute on the GPU"
    assert refusal(name, "bakend").startswith("did you mean backend")
    assert refusal(name, "xyz") == "check the spelling, or leave it out"


@pytest.mark.parametrize(
    ("name", "option", "remedy"),
    [
        ("attention", "is_casual", CAUSAL),
        ("attention", "causal", CAUSAL),
        ("attention", "dropout_rate", DROPOUT),
        ("attention", "segment_ids", "pass sequences=packed_sequences(segment_ids, ...)"),
        ("attention", "local_window_size", "pass mask=Causal(window_size=...) or mask=Window(left, right)"),
        ("attention", "return_residual", "pass return_logsumexp=True"),
        ("dot_product_attention", "is_casual", "did you mean is_causal?"),
        ("dot_product_attention", "causal", "pass is_causal=True"),
        ("dot_product_attention", "dropout_rate", DROPOUT),
        ("dot_product_attention", "key_seq_lengths", "did you mean query_seq_lengths or key_value_seq_lengths?"),
        ("dot_product_attention", "segment_ids", "call attention with sequences=packed_sequences(segment_ids, ...)"),
        ("context_parallel_attention", "batch_axes", "did you mean batch_axis?"),
        ("mla_attention", "cache_scales", "did you mean cache_scale or cache_rope?"),
        ("merge_states", "max_seqlen_k", "did you mean max_seqlen_q or cu_seqlens_q?"),
        ("append_to_cache", "slot", "did you mean slots?"),
    ],
)
def test_a_remedy_that_the_function_has(name: str, option: str, remedy: str) -> None:
    assert refusal(name, option) == remedy


def test_an_unknown_option_is_named_beside_wrong_arguments() -> None:
    with pytest.raises(NotSupported) as caught:
        FUNCTIONS["dot_product_attention"](is_casual=True, query_seq_lengths=3, sequences=1)
    assert [reason.split(":")[0] for reason in caught.value.reasons] == [
        "sequences = 1 (int)",
        "option = 'is_casual' (str)",
        "query_seq_lengths = 3 (int)",
    ]


def test_a_mask_of_a_0d_array_is_a_static_argument() -> None:
    run = jax.jit(package.attention, static_argnames=("mask", "backend"))
    found = run(ARRAY, ARRAY, ARRAY, mask=Causal(np.array(2)), backend="reference")
    np.testing.assert_array_equal(found, run(ARRAY, ARRAY, ARRAY, mask=Causal(2), backend="reference"))
    assert run._cache_size() == 1
