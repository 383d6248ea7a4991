"""Layouts: views of operands, and the logsumexp of each convention from ours and back, in the caller's library.

Ours is [batch or sequences, heads, ceil32(queries)], with +inf behind each last query. What goes by cu_seqlens is
computed where that lies: nothing is read on the host, so nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

from cutlass_py_attn.conventions.calling import namespace
from cutlass_py_attn.parts.integers import round_up
from cutlass_py_attn.problem import LSE_PADDING


def swapped(array: Any) -> Any:
    """[B, H, M, K] as [B, M, H, K], or the other way: a view, save in JAX, which has none."""
    return array.swapaxes(1, 2)


def with_dense_rows(array: Any) -> Any:
    """The array with a contiguous last axis: a copy where it is not, as of the expanded gradient of a sum."""
    module = namespace(array)
    if module.__name__ == "torch":
        return array if array.stride(-1) == 1 else array.contiguous()
    if module.__name__ == "cupy":
        return array if array.strides[-1] == array.itemsize else module.ascontiguousarray(array)
    return array  # NumPy and JAX arrays are dense once they are on the device


def with_four_axes(bias: Any) -> Any:
    """A bias of 1 to 4 axes, read from the right, as [B or 1, H or 1, Mq or 1, Mk or 1]: a view."""
    return bias[(None,) * (4 - bias.ndim) + (...,)]


def as_given(gradient: Any, bias: Any) -> Any:
    """The gradient of `with_four_axes(bias)` with the axes of bias."""
    return gradient[(0,) * (4 - bias.ndim) + (...,)]


def is_bool(mask: Any) -> bool:
    """Whether this is a mask of visible pairs, not a bias."""
    return str(mask.dtype).removeprefix("torch.") == "bool"


def additive(mask: Any, dtype: Any) -> Any:
    """A boolean mask as a bias of that dtype, 0 where True and -inf where False; a bias as it is."""
    if not is_bool(mask):
        return mask
    module = namespace(mask)
    visible, hidden = (module.full((), value, dtype=dtype) for value in (0.0, -math.inf))
    return module.where(mask, visible, hidden)


def with_padded_rows(logsumexp: Any) -> Any:
    """[B, H, Mq] as [B, H, ceil32(Mq)]."""
    batch, heads, rows = logsumexp.shape
    missing = round_up(rows, LSE_PADDING) - rows
    if not missing:
        return logsumexp
    return namespace(logsumexp).concatenate([logsumexp, _infinite(logsumexp, (batch, heads, missing))], -1)


def packed(logsumexp: Any, cu_seqlens: Any, tokens: int) -> Any:
    """[sequences, H, ceil32(longest)] as [H, tokens]; +inf for tokens behind the last sequence."""
    sequences, heads, width = logsumexp.shape
    if 0 in (sequences, width):
        return _infinite(logsumexp, (heads, tokens))
    module = namespace(logsumexp)
    token = module.arange(tokens, dtype=module.int32, **_place(logsumexp))
    sequence = module.searchsorted(cu_seqlens[1:], token, side="right")
    sequence = module.clip(sequence, 0, sequences - 1)
    row = module.clip(token - cu_seqlens[sequence], 0, width - 1)
    found = logsumexp.swapaxes(0, 1)[:, sequence, row]
    return module.where(token < cu_seqlens[-1], found, math.inf)


def unpacked(logsumexp: Any, cu_seqlens: Any, longest: int) -> Any:
    """[H, tokens] as [sequences, H, ceil32(longest)]."""
    heads, tokens = logsumexp.shape
    shape = (cu_seqlens.shape[0] - 1, heads, int(round_up(longest, LSE_PADDING)))
    if 0 in shape or not tokens:
        return _infinite(logsumexp, shape)
    module, place = namespace(logsumexp), _place(logsumexp)
    first, last = (bounds[:, None, None] for bounds in (cu_seqlens[:-1], cu_seqlens[1:]))
    token = first + module.arange(shape[2], dtype=module.int32, **place)
    head = module.arange(heads, dtype=module.int32, **place)[:, None]
    return module.where(token < last, logsumexp[head, module.clip(token, 0, tokens - 1)], math.inf)


def _infinite(like: Any, shape: tuple[int, ...]) -> Any:
    return namespace(like).full(shape, math.inf, dtype=like.dtype, **_place(like))


def _place(array: Any) -> dict[str, Any]:
    """The option that puts a new array where this one is; CuPy goes by its current device, set by `on_stream`."""
    return {} if namespace(array).__name__ == "cupy" else {"device": array.device}
