"""Sequences: packed tensors (tokens, num_heads, head_dim) of the flash and cudnn operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.refusals import Refusal, refuse


def is_packed(call: Any) -> bool:
    """Whether the tensors are packed, (tokens, num_heads, head_dim): if cum_seq_q or cum_seq_k is given."""
    return call.cum_seq_q is not None or call.cum_seq_k is not None


def ranks_of(call: Any, *tensors: str) -> dict[str, tuple[int, ...]]:
    """Returns the allowed ranks of the tensors, of cum_seq_q and of cum_seq_k."""
    return {**dict.fromkeys(tensors, (3 if is_packed(call) else 4,)), "cum_seq_q": (1,), "cum_seq_k": (1,)}


def sequences_of(call: Any, seqused_k: Any = None) -> VariableLength | None:
    """Returns the sequences of packed tensors, None for dense tensors.

    PyTorch's operators accept any upper bound of the lengths as max_q and max_k; here the number of tokens limits it.
    """
    if not is_packed(call):
        return None
    max_q, max_k = min(int(call.max_q), int(call.query.shape[0])), min(int(call.max_k), int(call.key.shape[0]))
    return VariableLength(call.cum_seq_q, call.cum_seq_k, max_q, max_k, seqused_k)


def packing_refusals(call: Any) -> list[Refusal]:
    """Returns why cum_seq_q, cum_seq_k, max_q and max_k are refused."""
    starts = {"cum_seq_q": call.cum_seq_q, "cum_seq_k": call.cum_seq_k}
    return sequence_refusals(starts, {"max_q": call.max_q, "max_k": call.max_k})


def sequence_refusals(starts: Mapping[str, Any], max_seqlens: Mapping[str, Any]) -> list[Refusal]:
    """Returns why cumulative sequence lengths (given both or neither) and maximal lengths are refused."""
    missing = [name for name, array in starts.items() if array is None]
    if len(missing) == len(starts):
        return []
    refusals = [refuse(name, None, f"must come with {' and '.join(starts)}", "pass it") for name in missing]
    refusals += [
        refuse(f"{name}.dtype", str(array.dtype), "must be int32", "convert it")
        for name, array in starts.items()
        if array is not None and not is_integer(array)
    ]
    return refusals + [
        refuse(name, given, "must be an int of at least 0", "pass the longest sequence's length")
        for name, given in max_seqlens.items()
        if (number := integer_of(given)) is None or number < 0
    ]


def is_integer(array: Any) -> bool:
    """Whether the dtype is int32, or any integer dtype in NumPy."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return str(array.dtype).removeprefix("torch.") == "int32"


def logsumexp_refusals(logsumexp: Any, shape: tuple[int, ...]) -> list[Refusal]:
    """Returns why a logsumexp without padding is refused: it must have this shape."""
    given = tuple(map(int, logsumexp.shape))
    rule = f"must be {shape}, as the forward returns it"
    return [] if given == shape else [refuse("logsumexp.shape", given, rule, "pass that array")]
