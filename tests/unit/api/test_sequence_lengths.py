"""Tests of NumPy sequence lengths: no value that is converted to int32 may wrap, in either backend."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import aligned, artifact

TOKENS = 40
WRAP = 2**32  # int32 arithmetic takes n + WRAP for n


def reasons_of(sequences: VariableLength, tokens: int = TOKENS, **options: Any) -> list[str]:
    """Returns why a forward with these lengths is refused. Its operands take no memory, whatever the tokens."""
    options["kernels"] = artifact
    operand = np.broadcast_to(aligned((1, 1, 2, 8), "f4"), (1, tokens, 2, 8))
    with pytest.raises(NotSupported) as caught:
        attention_forward(operand, operand, operand, sequences=sequences, **options)
    return list(caught.value.reasons)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_lengths_beyond_32_bits(driver_log: FakeDriver, backend: str, dtype: str) -> None:
    right, wrong = np.array([0, 15, TOKENS], dtype), np.array([0, 15, TOKENS + WRAP], dtype)
    for side, given in (("q", (wrong, right)), ("k", (right, wrong))):
        (reason,) = reasons_of(VariableLength(*given, 25, 25), backend=backend)
        assert re.match(rf"cu_seqlens_{side} = \[0, 15, {TOKENS + WRAP}\]: must start with 0", reason)
    used = np.array([15 + WRAP, 25], dtype)
    (reason,) = reasons_of(VariableLength(right, right, 25, 25, used), backend=backend)
    assert reason.startswith(f"seqused_k = [{15 + WRAP}, 25]: must be from 0 to the keys")
    assert not [call for call in driver_log.calls if call.name != "cuInit"]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_tokens_beyond_32_bits(driver_log: FakeDriver, backend: str) -> None:
    """Sequences of right lengths in a tensor whose rows cu_seqlens cannot number."""
    tokens = 2**31 + 8
    bounds = np.array([0, 2**29, tokens - 8, tokens])
    found = reasons_of(VariableLength(bounds, bounds, 2**29, 2**29), tokens, backend=backend)
    ours = [text for text in found if "tokens: must be at most 536870912" in text]
    assert [text.split(" ")[0] for text in ours] == ["query", "key"]
    assert not [call for call in driver_log.calls if call.name != "cuInit"]


def lengths(*ends: int) -> np.ndarray[Any, Any]:
    return np.array([0, *ends], "i4")


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_sequences_end_at_most_at_the_tokens(driver_log: FakeDriver, backend: str, side: str) -> None:
    """One token more is refused; the tokens themselves and one less are not, and pass every other check."""
    right, beyond = lengths(15, TOKENS), lengths(15, TOKENS + 1)
    given = (beyond, right) if side == "q" else (right, beyond)
    assert reasons_of(VariableLength(*given, 26, 26), backend=backend) == [
        f"cu_seqlens_{side} = [0, 15, {TOKENS + 1}]: must start with 0, never fall and end at most at the {TOKENS} "
        "tokens; correct it"
    ]
    for end in (TOKENS, TOKENS - 1):
        assert VariableLength(lengths(15, end), lengths(15, end), 25, 25).reasons((TOKENS, TOKENS)) == []


def test_each_bound_of_the_lengths_is_exact() -> None:
    ends, tokens = lengths(15, TOKENS), (TOKENS, TOKENS)
    for used, is_right in (([0, 0], True), ([15, 25], True), ([16, 25], False), ([15, 26], False), ([-1, 25], False)):
        found = VariableLength(ends, ends, 25, 25, np.array(used, "i4")).reasons(tokens)
        assert found == ([] if is_right else [
            f"seqused_k = {used}: must be from 0 to the keys of each sequence; correct it"
        ])  # fmt: skip
    assert VariableLength(ends, ends, 24, 25).reasons(tokens) == [
        "max_seqlen_q = 24: must be at least the longest sequence, 25; raise it"
    ]
    assert VariableLength(ends, ends, 25, 24).reasons(tokens) == [
        "max_seqlen_k = 24: must be at least the longest sequence, 25; raise it"
    ]
    for wrong in ([1, 15, TOKENS], [-1, 15, TOKENS], [0, 15, 14]):
        (reason,) = VariableLength(np.array(wrong), ends, 25, 25).reasons(tokens)
        assert reason.startswith(f"cu_seqlens_q = {wrong}: must start with 0, never fall and end at most")
