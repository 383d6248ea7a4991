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
