"""Flash: PyTorch's operators _flash_attention_forward and _flash_attention_backward, plus softcap of FlashAttention."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.problem.masks import Window
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.torch_ops.adapter import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.torch_ops.layouts import pack_logsumexp, pad_logsumexp, unpack_logsumexp, with_contiguous_rows
from cutlass_py_attn.torch_ops.sequences import (
    is_packed,
    logsumexp_refusals,
    packing_refusals,
    ranks_of,
    sequences_of,
)

_NAMES: Final = {
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_k": "cum_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "query_scale": "q_descale",
    "key_scale": "k_descale",
    "value_scale": "v_descale",
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
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """(B, M, H, K) tensors, or packed (tokens, H, K) tensors."""
        factors = dict.fromkeys(("q_descale", "k_descale", "v_descale"), (0, 1, 2))
        return {**_ranks(self, *OPERANDS), **factors}

    def refusals(self) -> list[Refusal]:
        """Concern the window, the sequences and return_debug_mask."""
        return [*_refusals(self), *debug_mask_refusals(self.return_debug_mask)]


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
        """(B, M, H, K) tensors, or packed (tokens, H, K) tensors; logsumexp."""
        ranks = _ranks(self, "grad_out", *OPERANDS, "out")
        return {**ranks, "logsumexp": (2 if is_packed(self) else 3,)}

    def refusals(self) -> list[Refusal]:
        """Concern the window, the sequences and logsumexp."""
        *batch, rows, heads, _ = map(int, self.query.shape)
        return [*_refusals(self), *logsumexp_refusals(self.logsumexp, (*batch, heads, rows))]


@adapter(FlashForward)
def flash_attention_forward(call: FlashForward) -> tuple[Any, Any, Any, Any, None]:
    """Computes torch.ops.aten._flash_attention_forward, with the operator's arguments in the operator's order.

    Dense tensors: query (B, Mq, H, D), key (B, Mk, Hk, D), value (B, Mk, Hk, Dv), cum_seq_q and cum_seq_k None.
    Packed tensors: query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, Dv). Hk divides H.

    - cum_seq_q, cum_seq_k: cumulative sequence lengths (num_sequences + 1,) int32; None for dense tensors
    - max_q, max_k: upper bounds of the sequence lengths; ignored for dense tensors
    - seqused_k: number of keys used of each packed sequence, (num_sequences,) int32; None for all
    - window_size_left, window_size_right: query i sees keys i + Mk - Mq - window_size_left to
      i + Mk - Mq + window_size_right (diagonal at the bottom right); None or negative for no limit
    - is_causal: same as window_size_right = 0
    - alibi_slopes: (H,) or (B or num_sequences, H) float32; None for none
    - softcap: bound of the scores, softcap * tanh(score / softcap); 0 for none
    - q_descale, k_descale, v_descale: what a code of 1 is worth in float8_e4m3fn tensors, (B or num_sequences, Hk)
      float32 as in FlashAttention, or fewer; the output is then bfloat16. None for 1
    - return_debug_mask: must be False

    Returns five values: output, the shape of query with Dv columns; logsumexp (B, H, Mq) float32, a view, or
    (H, total_q) with +inf for tokens outside of every sequence; philox_seed; philox_offset; None for the debug mask.
    Dropout drops other weights than FlashAttention does, so the backward of a call must come from the same package as
    its forward.

    NotSupported lists every reason; see `attention_forward` for the other errors.
    """
    query, key, value = (_batched(call, tensor) for tensor in (call.query, call.key, call.value))
    output, logsumexp = attention_forward(
        query,
        key,
        value,
        query_scale=call.q_descale,
        key_scale=call.k_descale,
        value_scale=call.v_descale,
        **_options(call),
    )
    if is_packed(call):
        output, logsumexp = output[0], pack_logsumexp(logsumexp, call.cum_seq_q, int(call.query.shape[0]))
    else:
        logsumexp = logsumexp[..., : call.query.shape[1]]
    return output, logsumexp, call.philox_seed, call.philox_offset, None


@adapter(FlashBackward)
def flash_attention_backward(call: FlashBackward) -> tuple[Any, Any, Any]:
    """Computes torch.ops.aten._flash_attention_backward, with the operator's arguments in the operator's order.

    - grad_out, out: shape of query with Dv columns, any strides
    - logsumexp: (B, H, Mq) or (H, total_q) float32, from the forward
    - philox_seed, philox_offset: from the forward; newer PyTorch has FlashAttention's rng_state instead of philox_seed
    - deterministic: replaces PyTorch's global switch
    - all others: as in the forward

    Returns the gradients of query, key and value in the shapes of these. If grad_out is None, they are None.

    NotSupported lists every reason; see `attention_backward` for the other errors.
    """
    if call.grad_out is None:
        return None, None, None
    options = _options(call)
    if is_packed(call):
        logsumexp = unpack_logsumexp(call.logsumexp, call.cum_seq_q, options["sequences"].max_seqlen_q)
    else:
        logsumexp = pad_logsumexp(call.logsumexp)
    query, key, value = (_batched(call, tensor) for tensor in (call.query, call.key, call.value))
    gradients = attention_backward(
        with_contiguous_rows(_batched(call, call.grad_out)),
        query,
        key,
        value,
        with_contiguous_rows(_batched(call, call.out)),
        logsumexp,
        deterministic=call.deterministic,
        **options,
    )
    if is_packed(call):
        return gradients.query[0], gradients.key[0], gradients.value[0]
    return gradients.query, gradients.key, gradients.value


def debug_mask_refusals(return_debug_mask: bool) -> list[Refusal]:
    """Returns why a debug mask is refused: no kernel stores the attention weights."""
    rule = "must be False, because no kernel stores the attention weights"
    return [refuse("return_debug_mask", True, rule, "leave it out")] if return_debug_mask else []


def _ranks(call: FlashForward | FlashBackward, *tensors: str) -> dict[str, tuple[int, ...]]:
    return {**ranks_of(call, *tensors), "seqused_k": (1,), "alibi_slopes": (1, 2)}


def _refusals(call: FlashForward | FlashBackward) -> list[Refusal]:
    refusals: list[Refusal] = []
    if call.seqused_k is not None and not is_packed(call):
        rule = "must come with cum_seq_q and cum_seq_k"
        refusals.append(refuse("seqused_k", call.seqused_k, rule, "pass them"))
    return refusals + packing_refusals(call)


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
