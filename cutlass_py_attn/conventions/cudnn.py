"""cuDNN: PyTorch's _cudnn_attention_forward and _backward."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.attention import attention_backward, attention_forward
from cutlass_py_attn.conventions.calling import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.conventions.flash import debug_objections
from cutlass_py_attn.conventions.layouts import (
    packed,
    swapped,
    unpacked,
    with_dense_rows,
    with_four_axes,
    with_padded_rows,
)
from cutlass_py_attn.conventions.sequences import (
    is_packed,
    logsumexp_objections,
    packing_objections,
    ranks_of,
    sequences_of,
)
from cutlass_py_attn.masks import Causal, Full
from cutlass_py_attn.problem import OPERANDS

_NAMES: Final = {
    "bias": "attn_bias",
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_k": "cum_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
}


@dataclass(frozen=True, slots=True, eq=False)
class CudnnForward(ForwardCall):
    """The arguments of `cudnn_attention_forward`."""

    names: ClassVar = _NAMES
    heads_first: ClassVar = True

    query: Any
    key: Any
    value: Any
    attn_bias: Any
    cum_seq_q: Any
    cum_seq_k: Any
    max_q: int
    max_k: int
    compute_log_sumexp: bool
    dropout_p: float = 0.0
    is_causal: bool = False
    return_debug_mask: bool = False
    _: KW_ONLY
    scale: float | None = None

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """BHMK tensors, or with tokens in the place of a batch; the bias."""
        return _ranks(self, *OPERANDS)

    def objections(self) -> list[str]:
        """Of sequences and return_debug_mask."""
        return [*packing_objections(self), *debug_objections(self.return_debug_mask)]


@dataclass(frozen=True, slots=True, eq=False)
class CudnnBackward(Call):
    """The arguments of `cudnn_attention_backward`."""

    names: ClassVar = {**_NAMES, "grad_output": "grad_out", "output": "out"}
    heads_first: ClassVar = True

    grad_out: Any
    query: Any
    key: Any
    value: Any
    out: Any
    logsumexp: Any
    philox_seed: Any
    philox_offset: Any
    attn_bias: Any
    cum_seq_q: Any
    cum_seq_k: Any
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    _: KW_ONLY
    scale: float | None = None
    deterministic: bool = False

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """BHMK tensors, or with tokens in the place of a batch; the bias and logsumexp."""
        rank = 2 if is_packed(self) else 3
        return {**_ranks(self, "grad_out", *OPERANDS, "out"), "logsumexp": (rank, rank + 1)}

    def objections(self) -> list[str]:
        """Of sequences and logsumexp."""
        *rows, _ = map(int, self.query.shape)
        return [*packing_objections(self), *logsumexp_objections(self.logsumexp, (*rows, 1)[: self.logsumexp.ndim])]


@adapter(CudnnForward)
def cudnn_attention_forward(
    call: CudnnForward,
) -> tuple[Any, Any, Any, Any, int, int, Any, Any, None]:
    """Attention as torch.ops.aten._cudnn_attention_forward computes it, with its arguments in its order.

    query [B, H, Mq, D], key [B, Hk, Mk, D], value [B, Hk, Mk, Dv] of any strides with contiguous channels, read in
    place, save in JAX, and cum_seq_q and cum_seq_k None; or query [total_q, H, D] and key and value likewise, with
    the starts of the sequences, int32 [count + 1], none longer than max_q and max_k, which are looked at then alone.
    attn_bias: in query's dtype, of 2, 3 or 4 axes that broadcast to [B or count, H, Mq or max_q, Mk or max_k].
    is_causal: from the top left.

    Returns output [B, H, Mq, Dv], a view of a new [B, Mq, H, Dv] array, or [total_q, H, Dv]; logsumexp float32
    [B, H, Mq, 1], a view, or [total_q, H, 1], with +inf for tokens of no sequence, or None without
    compute_log_sumexp; cum_seq_q and cum_seq_k as given; the longest lengths; philox_seed and philox_offset as
    given; and None for the debug mask, which return_debug_mask must not ask for. Which weights dropout drops is
    not what cuDNN drops: a forward of one and a backward of the other do not belong together.

    NotSupported lists every objection; see `attention_forward` for the other errors.
    """
    query, key, value = (_ours(call, tensor) for tensor in (call.query, call.key, call.value))
    output, logsumexp = attention_forward(
        query,
        key,
        value,
        **_options(call),
    )
    if not call.compute_log_sumexp:
        logsumexp = None
    elif is_packed(call):
        logsumexp = packed(logsumexp, call.cum_seq_q, int(call.query.shape[0])).swapaxes(0, 1)[..., None]
    else:
        logsumexp = logsumexp[..., : query.shape[1], None]
    longest = (call.max_q, call.max_k) if is_packed(call) else (int(query.shape[1]), int(key.shape[1]))
    sequences = call.cum_seq_q, call.cum_seq_k, *longest
    return _theirs(call, output), logsumexp, *sequences, call.philox_seed, call.philox_offset, None


@adapter(CudnnBackward)
def cudnn_attention_backward(call: CudnnBackward) -> tuple[Any, Any, Any]:
    """The backward of `cudnn_attention_forward`, with torch.ops.aten._cudnn_attention_backward's arguments.

    grad_out and out like query with Dv columns, with any strides; logsumexp float32 [B, H, Mq] or [total_q, H],
    with or without a last axis of 1, philox_seed and philox_offset as the forward gave them; the others as the
    forward had them. deterministic: in place of PyTorch's global switch, with which PyTorch refuses cuDNN.

    Returns the gradients of query, key and value in their shapes, and none of attn_bias, as cuDNN; three times
    None without grad_out.

    NotSupported lists every objection; see `attention_backward` for the other errors.
    """
    if call.grad_out is None:
        return None, None, None
    options, logsumexp = _options(call), call.logsumexp
    if logsumexp.ndim > call.query.ndim - 1:
        logsumexp = logsumexp[..., 0]
    if is_packed(call):
        logsumexp = unpacked(logsumexp.swapaxes(0, 1), call.cum_seq_q, options["sequences"].max_seqlen_q)
    else:
        logsumexp = with_padded_rows(logsumexp)
    query, key, value = (_ours(call, tensor) for tensor in (call.query, call.key, call.value))
    found = attention_backward(
        with_dense_rows(_ours(call, call.grad_out)),
        query,
        key,
        value,
        with_dense_rows(_ours(call, call.out)),
        logsumexp,
        deterministic=call.deterministic,
        **options,
    )
    grad_query, grad_key, grad_value = (_theirs(call, gradient) for gradient in (found.query, found.key, found.value))
    return grad_query, grad_key, grad_value


def _ranks(call: CudnnForward | CudnnBackward, *tensors: str) -> dict[str, tuple[int, ...]]:
    return {**ranks_of(call, *tensors), "attn_bias": (2, 3, 4)}


def _options(call: CudnnForward | CudnnBackward) -> dict[str, Any]:
    return {
        **options_of(call),
        "bias": None if call.attn_bias is None else with_four_axes(call.attn_bias),
        "mask": Causal() if call.is_causal else Full(),
        "sequences": sequences_of(call),
    }


def _ours(call: CudnnForward | CudnnBackward, tensor: Any) -> Any:
    return tensor[None] if is_packed(call) else swapped(tensor)


def _theirs(call: CudnnForward | CudnnBackward, tensor: Any) -> Any:
    return tensor[0] if is_packed(call) else swapped(tensor)
