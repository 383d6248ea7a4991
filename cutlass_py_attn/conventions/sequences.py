"""Sequences: tensors [tokens, heads, head_dim] of sequences behind each other, as flash and cudnn have them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from cutlass_py_attn.options import VariableLength


def is_packed(call: Any) -> bool:
    """Whether the tensors are [tokens, heads, head_dim], as cum_seq_q or cum_seq_k say."""
    return call.cum_seq_q is not None or call.cum_seq_k is not None


def ranks_of(call: Any, *tensors: str) -> dict[str, tuple[int, ...]]:
    """How many axes the tensors have, and the starts."""
    return {**dict.fromkeys(tensors, (3 if is_packed(call) else 4,)), "cum_seq_q": (1,), "cum_seq_k": (1,)}


def sequences_of(call: Any, seqused_k: Any = None) -> VariableLength | None:
    """The sequences of packed tensors. The namesakes take any bound of the lengths; ours are at most all tokens."""
    if not is_packed(call):
        return None
    max_q, max_k = min(int(call.max_q), int(call.query.shape[0])), min(int(call.max_k), int(call.key.shape[0]))
    return VariableLength(call.cum_seq_q, call.cum_seq_k, max_q, max_k, seqused_k)


def packing_objections(call: Any) -> list[str]:
    """What is wrong with cum_seq_q, cum_seq_k, max_q and max_k."""
    starts = {"cum_seq_q": call.cum_seq_q, "cum_seq_k": call.cum_seq_k}
    return sequence_objections(starts, {"max_q": call.max_q, "max_k": call.max_k})


def sequence_objections(starts: Mapping[str, Any], longest: Mapping[str, Any]) -> list[str]:
    """What is wrong with the starts of sequences, both or neither, and with their longest lengths."""
    lacking = [name for name, array in starts.items() if array is None]
    if len(lacking) == len(starts):
        return []
    found = [f"{name} is None: must come with {' and '.join(starts)}; pass it" for name in lacking]
    found += [
        f"{name} has dtype {array.dtype}: must be int32; convert it"
        for name, array in starts.items()
        if array is not None and not is_integer(array)
    ]
    return found + [
        f"{name} = {number!r}: must be an int of at least 0; pass the longest sequence's length"
        for name, number in longest.items()
        if not isinstance(number, Integral) or number < 0
    ]


def is_integer(array: Any) -> bool:
    """Whether the dtype is int32, or any integer of NumPy's."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return str(array.dtype).removeprefix("torch.") == "int32"


def logsumexp_objections(logsumexp: Any, shape: tuple[int, ...]) -> list[str]:
    """Of a logsumexp that lacks our padding, before that is added."""
    found = tuple(map(int, logsumexp.shape))
    return [] if found == shape else [f"logsumexp has shape {found}: must be {shape}, as the forward gives it"]
