"""Layouts: views of operands, and conversions of logsumexp between operators, in the caller's array library.

This package's logsumexp is (batch or num_sequences, num_heads, ceil32(num_queries)) float32, padded with +inf after the
last query of each sequence. Conversions of packed sequences run on the device of cu_seqlens: the host reads no value,
so nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.problem.tensors import LSE_PADDING
from cutlass_py_attn.torch_ops.adapter import namespace


def swap_heads_and_rows(array: Any) -> Any:
    """Returns (B, H, M, K) as (B, M, H, K) or vice versa: a view, except in JAX, which has no views."""
    return array.swapaxes(1, 2)


def with_contiguous_rows(array: Any) -> Any:
    """Returns the array, or a copy if its last axis is not contiguous (as in the expanded gradient of a sum)."""
    module = namespace(array)
    if module.__name__ == "torch":
        return array if array.stride(-1) == 1 else array.contiguous()
    if module.__name__ == "cupy":
        return array if array.strides[-1] == array.itemsize else module.ascontiguousarray(array)
    return array  # NumPy and JAX arrays become contiguous when they are copied to the device


def with_four_axes(bias: Any) -> Any:
    """Returns a view of a bias of 1 to 4 axes with leading axes of size 1: (B or 1, H or 1, Mq or 1, Mk or 1)."""
    return bias[(None,) * (4 - bias.ndim) + (...,)]


def without_leading_axes(gradient: Any, bias: Any) -> Any:
    """Returns the gradient of `with_four_axes(bias)` with as many axes as bias has."""
    return gradient[(0,) * (4 - bias.ndim) + (...,)]


def is_bool(mask: Any) -> bool:
    """Whether the array is a boolean mask, not a bias."""
    return str(mask.dtype).removeprefix("torch.") == "bool"


def as_bias(mask: Any, dtype: Any) -> Any:
    """Returns a boolean mask as a bias of that dtype: 0 where True, -inf where False. Returns a bias unchanged."""
    if not is_bool(mask):
        return mask
    module = namespace(mask)
    visible, hidden = (module.full((), value, dtype=dtype) for value in (0.0, -math.inf))
    return module.where(mask, visible, hidden)


def pad_logsumexp(logsumexp: Any) -> Any:
    """Returns (B, H, Mq) as (B, H, ceil32(Mq)), padded with +inf."""
    batch, heads, rows = logsumexp.shape
    padding = round_up(rows, LSE_PADDING) - rows
    if not padding:
        return logsumexp
    return namespace(logsumexp).concatenate([logsumexp, _infinities(logsumexp, (batch, heads, padding))], -1)


def pack_logsumexp(logsumexp: Any, cu_seqlens: Any, tokens: int) -> Any:
    """Returns (num_sequences, H, ceil32(max_seqlen)) as (H, tokens), +inf for tokens after the last sequence."""
    sequences, heads, width = logsumexp.shape
    if 0 in (sequences, width):
        return _infinities(logsumexp, (heads, tokens))
    module = namespace(logsumexp)
    token = module.arange(tokens, dtype=module.int32, **_device_option(logsumexp))
    sequence = module.searchsorted(cu_seqlens[1:], token, side="right")
    sequence = module.clip(sequence, 0, sequences - 1)
    row = module.clip(token - cu_seqlens[sequence], 0, width - 1)
    gathered = logsumexp.swapaxes(0, 1)[:, sequence, row]
    return module.where(token < cu_seqlens[-1], gathered, math.inf)


def unpack_logsumexp(logsumexp: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
    """Returns (H, tokens) as (num_sequences, H, ceil32(max_seqlen)), padded with +inf."""
    heads, tokens = logsumexp.shape
    shape = (cu_seqlens.shape[0] - 1, heads, int(round_up(max_seqlen, LSE_PADDING)))
    if 0 in shape or not tokens:
        return _infinities(logsumexp, shape)
    module, device = namespace(logsumexp), _device_option(logsumexp)
    first, last = (bounds[:, None, None] for bounds in (cu_seqlens[:-1], cu_seqlens[1:]))
    token = first + module.arange(shape[2], dtype=module.int32, **device)
    head = module.arange(heads, dtype=module.int32, **device)[:, None]
    return module.where(token < last, logsumexp[head, module.clip(token, 0, tokens - 1)], math.inf)


def _infinities(like: Any, shape: tuple[int, ...]) -> Any:
    return namespace(like).full(shape, math.inf, dtype=like.dtype, **_device_option(like))


def _device_option(array: Any) -> dict[str, Any]:
    """Returns the option that allocates a new array on this array's device.

    CuPy has no such option: it allocates on its current device, which `use_stream` sets.
    """
    return {} if namespace(array).__name__ == "cupy" else {"device": array.device}
