"""Flash: PyTorch's _flash_attention_forward and _backward, with what FlashAttention has beyond them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.attention import attention_backward, attention_forward
from cutlass_py_attn.conventions.calling import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.conventions.layouts import packed, unpacked, with_dense_rows, with_padded_rows
from cutlass_py_attn.conventions.sequences import (
    is_packed,
    logsumexp_objections,
    packing_objections,
    ranks_of,
    sequences_of,
)
from cutlass_py_attn.masks import Window
from cutlass_py_attn.problem import OPERANDS

_NAMES: Final = {
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_k": "cum_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "mask left": "window_size_left",
    "mask right": "window_size_right",
}


@dataclass(frozen=True, slots=True, eq=False)
class FlashForward(ForwardCall):
    """The arguments of `flash_attention_forward`."""

    names: ClassVar = _NAMES

    query: Any
    key: Any
    value: Any
    cum_seq_q: Any
    cum_seq_k: Any
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool = False
    _: KW_ONLY
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Any = None
    alibi_slopes: Any = None
    softcap: float = 0.0

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Tensors with a batch, or with tokens in its place."""
        return _ranks(self, *OPERANDS)

    def objections(self) -> list[str]:
        """Of windows, sequences and return_debug_mask."""
        return [*_objections(self), *debug_objections(self.return_debug_mask)]


@dataclass(frozen=True, slots=True, eq=False)
class FlashBackward(Call):
    """The arguments of `flash_attention_backward`."""

    names: ClassVar = {**_NAMES, "grad_output": "grad_out", "output": "out"}

    grad_out: Any
    query: Any
    key: Any
    value: Any
    out: Any
    logsumexp: Any
    cum_seq_q: Any
    cum_seq_k: Any
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    philox_seed: Any
    philox_offset: Any
    _: KW_ONLY
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Any = None
    alibi_slopes: Any = None
    softcap: float = 0.0
    deterministic: bool = False

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Tensors with a batch, or with tokens in its place; logsumexp likewise."""
        ranks = _ranks(self, "grad_out", *OPERANDS, "out")
        return {**ranks, "logsumexp": (2 if is_packed(self) else 3,)}

    def objections(self) -> list[str]:
        """Of windows, sequences and logsumexp."""
        *batch, rows, heads, _ = map(int, self.query.shape)
        return [*_objections(self), *logsumexp_objections(self.logsumexp, (*batch, heads, rows))]


@adapter(FlashForward)
def flash_attention_forward(call: FlashForward) -> tuple[Any, Any, Any, Any, None]:
    """Attention as torch.ops.aten._flash_attention_forward computes it, with its arguments in its order.

    query [B, Mq, H, D], key [B, Mk, Hk, D], value [B, Mk, Hk, Dv], and cum_seq_q and cum_seq_k None; or query
    [total_q, H, D] and key and value likewise, with the starts of the sequences, int32 [count + 1], none longer
    than max_q and max_k, and of keys the first seqused_k, int32 [count], or all. max_q and max_k are not looked at
    without cum_seq_q. Hk divides H. The diagonal ends in the bottom right: query i sees from window_size_left keys
    before key i + Mk - Mq to window_size_right behind it; below 0 and None for no limit, and is_causal is a
    window_size_right of 0. alibi_slopes float32 [H] or [B or count, H]; softcap: bound of the scores, 0 for none.

    Returns output like query with Dv columns; logsumexp float32 [B, H, Mq], a view, or [H, total_q], with +inf for
    tokens of no sequence; philox_seed and philox_offset as given; and None for the debug mask, which
    return_debug_mask must not ask for. Which weights dropout drops is not what FlashAttention drops: a forward of
    one and a backward of the other do not belong together.

    NotSupported lists every objection; see `attention_forward` for the other errors.
    """
    query, key, value = (_batched(call, tensor) for tensor in (call.query, call.key, call.value))
    output, logsumexp = attention_forward(
        query,
        key,
        value,
        **_options(call),
    )
    if is_packed(call):
        output, logsumexp = output[0], packed(logsumexp, call.cum_seq_q, int(call.query.shape[0]))
    else:
        logsumexp = logsumexp[..., : call.query.shape[1]]
    return output, logsumexp, call.philox_seed, call.philox_offset, None


@adapter(FlashBackward)
def flash_attention_backward(call: FlashBackward) -> tuple[Any, Any, Any]:
    """The backward of `flash_attention_forward`, with torch.ops.aten._flash_attention_backward's arguments.

    grad_out and out like query with Dv columns, with any strides; logsumexp float32 [B, H, Mq] or [H, total_q],
    philox_seed and philox_offset as the forward gave them; the others as the forward had them. Newer PyTorch has
    rng_state in the place of philox_seed, a state of FlashAttention's own. deterministic: in place of PyTorch's
    global switch.

    Returns the gradients of query, key and value in their shapes; three times None without grad_out.

    NotSupported lists every objection; see `attention_backward` for the other errors.
    """
    if call.grad_out is None:
        return None, None, None
    options = _options(call)
    if is_packed(call):
        logsumexp = unpacked(call.logsumexp, call.cum_seq_q, options["sequences"].max_seqlen_q)
    else:
        logsumexp = with_padded_rows(call.logsumexp)
    query, key, value = (_batched(call, tensor) for tensor in (call.query, call.key, call.value))
    found = attention_backward(
        with_dense_rows(_batched(call, call.grad_out)),
        query,
        key,
        value,
        with_dense_rows(_batched(call, call.out)),
        logsumexp,
        deterministic=call.deterministic,
        **options,
    )
    if is_packed(call):
        return found.query[0], found.key[0], found.value[0]
    return found.query, found.key, found.value


def debug_objections(return_debug_mask: bool) -> list[str]:
    """The weights of a debug mask are never stored."""
    return ["return_debug_mask = True: must be False; the weights are never stored"] if return_debug_mask else []


def _ranks(call: FlashForward | FlashBackward, *tensors: str) -> dict[str, tuple[int, ...]]:
    return {**ranks_of(call, *tensors), "seqused_k": (1,), "alibi_slopes": (1, 2)}


def _objections(call: FlashForward | FlashBackward) -> list[str]:
    windows = {"window_size_left": call.window_size_left, "window_size_right": call.window_size_right}
    found = [
        f"{name} = {size!r}: must be an int, or None for no limit; correct it"
        for name, size in windows.items()
        if size is not None and not isinstance(size, int)
    ]
    if call.seqused_k is not None and not is_packed(call):
        found.append("seqused_k without cum_seq_q and cum_seq_k: must come with both; pass them")
    return found + packing_objections(call)


def _options(call: FlashForward | FlashBackward) -> dict[str, Any]:
    return {
        **options_of(call),
        "mask": _mask(call),
        "softcap": call.softcap,
        "alibi_slopes": call.alibi_slopes,
        "sequences": sequences_of(call, call.seqused_k),
    }


def _batched(call: FlashForward | FlashBackward, tensor: Any) -> Any:
    return tensor[None] if is_packed(call) else tensor


def _mask(call: FlashForward | FlashBackward) -> Window:
    right = 0 if call.is_causal else call.window_size_right
    left, right = (None if size is None or size < 0 else size for size in (call.window_size_left, right))
    return Window(left, right)
