"""Tests of options that a function does not have: the nearest of its own, and what another library's are here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cutlass_py_attn
from cutlass_py_attn.api import unknown_options
from cutlass_py_attn.errors import NotSupported

ARRAY = np.ones((1, 2, 1, 8), np.float32)
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "attention_forward": (cutlass_py_attn.attention_forward, 3),
    "attention_backward": (cutlass_py_attn.attention_backward, 6),
    "mla_attention_forward": (cutlass_py_attn.mla_attention_forward, 2),
    "append_to_cache": (cutlass_py_attn.append_to_cache, 5),
    "merge_states": (cutlass_py_attn.merge_states, 4),
    "quantize_e4m3": (cutlass_py_attn.quantize_e4m3, 1),
}


def refusal(name: str, option: str) -> str:
    function, operands = FUNCTIONS[name]
    with pytest.raises(NotSupported) as caught:
        function(*[ARRAY] * operands, **{option: 1})
    (found,) = caught.value.refusals
    assert (found.field, found.value) == ("option", f"{option!r} (str)")
    return found.remedy


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "quantize_e4m3"])
def test_the_nearest_option(name: str) -> None:
    assert refusal(name, "bakend").startswith("did you mean backend")
    assert refusal(name, "kernel").startswith("did you mean kernels")
    assert refusal(name, "implementation") == "pass backend=, or leave it out to compute on the GPU"
    assert refusal(name, "xyz") == "check the spelling, or leave it out"


@pytest.mark.parametrize(
    ("name", "option", "remedy"),
    [
        ("attention_forward", "is_casual", "pass mask=Causal()"),
        ("attention_forward", "dropout_rate", "pass dropout=Dropout(dropout_p, philox_seed, philox_offset)"),
        ("attention_backward", "determinstic", "did you mean deterministic?"),
        ("mla_attention_forward", "dropout_rate", "check the spelling, or leave it out"),
        ("mla_attention_forward", "block_table", "pass sequences=Paged(...)"),
        ("merge_states", "max_seqlen_k", "did you mean max_seqlen_q or cu_seqlens_q?"),
        ("append_to_cache", "slot", "did you mean slots?"),
        ("quantize_e4m3", "granularty", "did you mean granularity?"),
    ],
)
def test_a_remedy_that_the_function_has(name: str, option: str, remedy: str) -> None:
    assert refusal(name, option) == remedy


def test_every_unknown_option_is_named() -> None:
    @unknown_options.refuses_unknown_options("scale", "dropout_p")
    def attend(query: Any, *, is_causal: bool = False, **options: Any) -> Any:
        return query, is_causal, options

    assert attend(1, is_causal=True, scale=2) == (1, True, {"scale": 2})
    with pytest.raises(NotSupported) as caught:
        attend(1, is_casual=True, scales=2, dropout_rate=3)  # type: ignore[call-arg]
    assert {found.rule for found in caught.value.refusals} == {"must be one of query, is_causal, scale, dropout_p"}
    assert [found.remedy for found in caught.value.refusals] == [
        "did you mean is_causal?", "did you mean scale?", "pass dropout_p= and dropout_key=",
    ]  # fmt: skip
