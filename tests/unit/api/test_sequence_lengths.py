"""Tests of NumPy sequence lengths: no value that is converted to int32 may wrap, in either backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import aligned, artifact
from tests.support.refusals import expect, expect_among

TOKENS = 40
WRAP = 2**32  # int32 arithmetic takes n + WRAP for n


def refusals_of(sequences: VariableLength, tokens: int = TOKENS, **options: Any) -> tuple[Refusal, ...]:
    """Returns why a forward with these lengths is refused. Its operands take no memory, whatever the tokens."""
    options["kernels"] = artifact
    operand = np.broadcast_to(aligned((1, 1, 2, 8), "f4"), (1, tokens, 2, 8))
    with pytest.raises(NotSupported) as caught:
        attention_forward(operand, operand, operand, sequences=sequences, **options)
    return caught.value.refusals


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_lengths_beyond_32_bits(driver_log: FakeDriver, backend: str, dtype: str) -> None:
    right, wrong = np.array([0, 15, TOKENS], dtype), np.array([0, 15, TOKENS + WRAP], dtype)
    for side, given in (("q", (wrong, right)), ("k", (right, wrong))):
        expect(refusals_of(VariableLength(*given, 25, 25), backend=backend), [f"cu_seqlens_{side}: start with 0"])
    used = np.array([15 + WRAP, 25], dtype)
    found = refusals_of(VariableLength(right, right, 25, 25, used), backend=backend)
    expect(found, ["seqused_k: from 0 to the keys"])
    assert not [call for call in driver_log.calls if call.name != "cuInit"]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_tokens_beyond_32_bits(driver_log: FakeDriver, backend: str) -> None:
    """Sequences of right lengths in a tensor whose rows cu_seqlens cannot number."""
    tokens = 2**31 + 8
    bounds = np.array([0, 2**29, tokens - 8, tokens])
    found = refusals_of(VariableLength(bounds, bounds, 2**29, 2**29), tokens, backend=backend)
    expect_among(found, "tokens of query: at most 536870912")
    expect_among(found, "tokens of key: at most 536870912")
    assert not [call for call in driver_log.calls if call.name != "cuInit"]


def lengths(*ends: int) -> np.ndarray[Any, Any]:
    return np.array([0, *ends], "i4")


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_sequences_end_at_most_at_the_tokens(driver_log: FakeDriver, backend: str, side: str) -> None:
    """One token more is refused; the tokens themselves and one less are not, and pass every other check."""
    right, beyond = lengths(15, TOKENS), lengths(15, TOKENS + 1)
    given = (beyond, right) if side == "q" else (right, beyond)
    found = refusals_of(VariableLength(*given, 26, 26), backend=backend)
    expect(found, [f"cu_seqlens_{side}: end at most at the {TOKENS} tokens"])
    for end in (TOKENS, TOKENS - 1):
        assert VariableLength(lengths(15, end), lengths(15, end), 25, 25).refusals((TOKENS, TOKENS)) == []


def test_each_bound_of_the_lengths_is_exact() -> None:
    ends, tokens = lengths(15, TOKENS), (TOKENS, TOKENS)
    for used, is_right in (([0, 0], True), ([15, 25], True), ([16, 25], False), ([15, 26], False), ([-1, 25], False)):
        found = VariableLength(ends, ends, 25, 25, np.array(used, "i4")).refusals(tokens)
        expect(found, [] if is_right else ["seqused_k: from 0 to the keys"])
    expect(VariableLength(ends, ends, 24, 25).refusals(tokens), ["max_seqlen_q: at least the longest sequence, 25"])
    expect(VariableLength(ends, ends, 25, 24).refusals(tokens), ["max_seqlen_k: at least the longest sequence, 25"])
    for wrong in ([1, 15, TOKENS], [-1, 15, TOKENS], [0, 15, 14]):
        expect(VariableLength(np.array(wrong), ends, 25, 25).refusals(tokens), ["cu_seqlens_q: start with 0"])
