"""cuDNN: PyTorch's operators _cudnn_attention_forward and _cudnn_attention_backward."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.refusals import Refusal
from cutlass_py_attn.torch_ops.adapter import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.torch_ops.flash import debug_mask_refusals
from cutlass_py_attn.torch_ops.layouts import (
    pack_logsumexp,
    pad_logsumexp,
    swap_heads_and_rows,
    unpack_logsumexp,
    with_contiguous_rows,
    with_four_axes,
)
from cutlass_py_attn.torch_ops.sequences import (
    is_packed,
    logsumexp_refusals,
    packing_refusals,
    ranks_of,
    sequences_of,
)

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
        """(B, H, M, K) tensors, or packed (tokens, H, K) tensors; the bias."""
        return _ranks(self, *OPERANDS)

    def refusals(self) -> list[Refusal]:
        """Concern the sequences and return_debug_mask."""
        return [*packing_refusals(self), *debug_mask_refusals(self.return_debug_mask)]


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
        """(B, H, M, K) tensors, or packed (tokens, H, K) tensors; the bias and logsumexp."""
        rank = 2 if is_packed(self) else 3
        return {**_ranks(self, "grad_out", *OPERANDS, "out"), "logsumexp": (rank, rank + 1)}

    def refusals(self) -> list[Refusal]:
        """Concern the sequences and logsumexp."""
        *rows, _ = map(int, self.query.shape)
        return [*packing_refusals(self), *logsumexp_refusals(self.logsumexp, (*rows, 1)[: self.logsumexp.ndim])]


@adapter(CudnnForward)
def cudnn_attention_forward(
    call: CudnnForward,
) -> tuple[Any, Any, Any, Any, int, int, Any, Any, None]:
    """Computes torch.ops.aten._cudnn_attention_forward, with the operator's arguments in the operator's order.

    Dense tensors: query (B, H, Mq, D), key (B, Hk, Mk, D), value (B, Hk, Mk, Dv), cum_seq_q and cum_seq_k None. The
    last axis must be contiguous; other strides are free. Tensors are read in place, except in JAX.
    Packed tensors: query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, Dv).

    - cum_seq_q, cum_seq_k: cumulative sequence lengths (num_sequences + 1,) int32; None for dense tensors
    - max_q, max_k: upper bounds of the sequence lengths; ignored for dense tensors
    - attn_bias: 2, 3 or 4 axes that broadcast to (B or num_sequences, H, Mq or max_q, Mk or max_k), in query's dtype
    - is_causal: causal mask with its diagonal at the top left
    - return_debug_mask: must be False

    Returns nine values: output (B, H, Mq, Dv), a view of a new (B, Mq, H, Dv) array, or (total_q, H, Dv); logsumexp
    (B, H, Mq, 1) float32, a view, or (total_q, H, 1) with +inf for tokens outside of every sequence, or None without
    compute_log_sumexp; cum_seq_q; cum_seq_k; the maximal lengths of queries and of keys; philox_seed; philox_offset;
    None for the debug mask. Dropout drops other weights than cuDNN does, so the backward of a call must come from the
    same package as its forward.

    NotSupported lists every reason; see `attention_forward` for the other errors.
    """
    query, key, value = (_to_bmhk(call, tensor) for tensor in (call.query, call.key, call.value))
    output, logsumexp = attention_forward(
        query,
        key,
        value,
        **_options(call),
    )
    if not call.compute_log_sumexp:
        logsumexp = None
    elif is_packed(call):
        logsumexp = pack_logsumexp(logsumexp, call.cum_seq_q, int(call.query.shape[0])).swapaxes(0, 1)[..., None]
    else:
        logsumexp = logsumexp[..., : query.shape[1], None]
    max_seqlens = (call.max_q, call.max_k) if is_packed(call) else (int(query.shape[1]), int(key.shape[1]))
    sequences = call.cum_seq_q, call.cum_seq_k, *max_seqlens
    return _from_bmhk(call, output), logsumexp, *sequences, call.philox_seed, call.philox_offset, None


@adapter(CudnnBackward)
def cudnn_attention_backward(call: CudnnBackward) -> tuple[Any, Any, Any]:
    """Computes torch.ops.aten._cudnn_attention_backward, with the operator's arguments in the operator's order.

    - grad_out, out: shape of query with Dv columns, any strides
    - logsumexp: (B, H, Mq) or (total_q, H) float32, with or without a last axis of size 1, from the forward
    - philox_seed, philox_offset: from the forward
    - deterministic: replaces PyTorch's global switch, under which PyTorch does not choose cuDNN
    - all others: as in the forward

    Returns the gradients of query, key and value in the shapes of these. Like cuDNN it computes no gradient of
    attn_bias. If grad_out is None, the three gradients are None.

    NotSupported lists every reason; see `attention_backward` for the other errors.
    """
    if call.grad_out is None:
        return None, None, None
    options, logsumexp = _options(call), call.logsumexp
    if logsumexp.ndim > call.query.ndim - 1:
        logsumexp = logsumexp[..., 0]
    if is_packed(call):
        logsumexp = unpack_logsumexp(logsumexp.swapaxes(0, 1), call.cum_seq_q, options["sequences"].max_seqlen_q)
    else:
        logsumexp = pad_logsumexp(logsumexp)
    query, key, value = (_to_bmhk(call, tensor) for tensor in (call.query, call.key, call.value))
    gradients = attention_backward(
        with_contiguous_rows(_to_bmhk(call, call.grad_out)),
        query,
        key,
        value,
        with_contiguous_rows(_to_bmhk(call, call.out)),
        logsumexp,
        deterministic=call.deterministic,
        **options,
    )
    return _from_bmhk(call, gradients.query), _from_bmhk(call, gradients.key), _from_bmhk(call, gradients.value)


def _ranks(call: CudnnForward | CudnnBackward, *tensors: str) -> dict[str, tuple[int, ...]]:
    return {**ranks_of(call, *tensors), "attn_bias": (2, 3, 4)}


def _options(call: CudnnForward | CudnnBackward) -> dict[str, Any]:
    return {
        **options_of(call),
        "bias": None if call.attn_bias is None else with_four_axes(call.attn_bias),
        "mask": Causal() if call.is_causal else Full(),
        "sequences": sequences_of(call),
    }


def _to_bmhk(call: CudnnForward | CudnnBackward, tensor: Any) -> Any:
    return tensor[None] if is_packed(call) else swap_heads_and_rows(tensor)


def _from_bmhk(call: CudnnForward | CudnnBackward, tensor: Any) -> Any:
    return tensor[0] if is_packed(call) else swap_heads_and_rows(tensor)
