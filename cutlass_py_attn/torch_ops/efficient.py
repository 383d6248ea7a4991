"""Efficient: PyTorch's operators _efficient_attention_forward and _efficient_attention_backward."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.torch_ops.adapter import CUSTOM_MASK_TYPE, Call, ForwardCall, adapter, options_of
from cutlass_py_attn.torch_ops.layouts import with_contiguous_rows
from cutlass_py_attn.torch_ops.sequences import sequence_refusals

_OPERAND_RANKS: Final = dict.fromkeys((*OPERANDS, "bias"), (4,))
_SEQUENCE_RANKS: Final = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqlen_k"), (1,))


@dataclass(frozen=True, slots=True, eq=False)
class EfficientForward(ForwardCall):
    """The arguments of `efficient_attention_forward`."""

    names: ClassVar = {"seqused_k": "seqlen_k"}

    query: Any
    key: Any
    value: Any
    bias: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    dropout_p: float
    custom_mask_type: int
    compute_log_sumexp: bool = False
    _: KW_ONLY
    scale: float | None = None
    seqlen_k: Any = None
    window_size: int | None = None

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """(B, M, H, K) tensors and vectors."""
        return {**_OPERAND_RANKS, **_SEQUENCE_RANKS}

    def refusals(self) -> list[Refusal]:
        """Concern the mask and the sequences."""
        return _refusals(self)


@dataclass(frozen=True, slots=True, eq=False)
class EfficientBackward(Call):
    """The arguments of `efficient_attention_backward`."""

    names: ClassVar = {
        **EfficientForward.names,
        "grad_output": "grad_out",
        "output": "out",
        "packed": "shared_storage_dqdkdv",
    }

    grad_out: Any
    query: Any
    key: Any
    value: Any
    bias: Any
    out: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    logsumexp: Any
    dropout_p: float
    philox_seed: Any
    philox_offset: Any
    custom_mask_type: int
    bias_requires_grad: bool
    _: KW_ONLY
    scale: float | None = None
    num_splits_key: int | None = None
    window_size: int | None = None
    shared_storage_dqdkdv: bool = False
    seqlen_k: Any = None
    deterministic: bool = False

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """(B, M, H, K) tensors, logsumexp and vectors."""
        return {**_OPERAND_RANKS, "grad_out": (4,), "out": (4,), "logsumexp": (3,), **_SEQUENCE_RANKS}

    def refusals(self) -> list[Refusal]:
        """Concern the mask and the sequences."""
        return _refusals(self)


@adapter(EfficientForward)
def efficient_attention_forward(call: EfficientForward) -> tuple[Any, Any, Any, Any, int, int]:
    """Computes torch.ops.aten._efficient_attention_forward, with the operator's arguments in the operator's order.

    - query (B, Mq, H, D), key (B, Mk, Hk, D), value (B, Mk, Hk, Dv)
    - bias: (B or 1, H or 1, Mq or 1, Mk or 1) in query's dtype; None for none
    - cu_seqlens_q, cu_seqlens_k: cumulative lengths of packed sequences (num_sequences + 1,) int32, with B = 1; None
      for dense tensors
    - max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths; ignored for dense tensors; max_seqlen_k None
      for the number of all keys
    - seqlen_k: number of keys used of each packed sequence, (num_sequences,) int32; None for all
    - custom_mask_type: 0 none, 1 causal with the diagonal at the top left, 2 with the diagonal at the bottom right
    - window_size: with custom_mask_type 1 and 2, each query sees the last window_size keys only; 0 or None for all

    Returns six values: output (B, Mq, H, Dv); logsumexp (B or num_sequences, H, ceil32(Mq or max_seqlen_q)) float32,
    with 0 columns unless compute_log_sumexp; philox_seed; philox_offset; the maximal lengths of queries and of keys,
    which are the backward's max_seqlen_q and max_seqlen_k. Dense tensors: dropout drops the same weights as PyTorch's
    operator. Packed sequences: PyTorch's forward and backward disagree on dropout; here both index the random numbers
    by the maximal lengths.

    NotSupported lists every reason; see `attention_forward` for the other errors.
    """
    output, logsumexp = attention_forward(
        call.query,
        call.key,
        call.value,
        **_options(call),
    )
    if not call.compute_log_sumexp:
        logsumexp = logsumexp[..., :0]
    return output, logsumexp, call.philox_seed, call.philox_offset, *_max_seqlens(call)


@adapter(EfficientBackward)
def efficient_attention_backward(call: EfficientBackward) -> tuple[Any, Any, Any, Any]:
    """Computes torch.ops.aten._efficient_attention_backward, with the operator's arguments in the operator's order.

    - grad_out, out: (B, Mq, H, Dv), any strides
    - logsumexp, philox_seed, philox_offset: from the forward
    - num_splits_key: thread blocks for each (batch, head); values below 1 count as 1; None lets the plan choose
    - shared_storage_dqdkdv: the gradients of query, key and value are slices of one (B, M, 3, H, D) array; the three
      operands must then have one shape
    - seqlen_k: as in the forward; PyTorch's backward has no such argument
    - deterministic: replaces PyTorch's global switch
    - all others: as in the forward

    Returns the gradients of query, key, value and bias in the shapes of these; None for bias without
    bias_requires_grad. If grad_out is None, all four are None.

    NotSupported lists every reason; see `attention_backward` for the other errors.
    """
    if call.grad_out is None:
        return None, None, None, None
    gradients = attention_backward(
        with_contiguous_rows(call.grad_out),
        call.query,
        call.key,
        call.value,
        with_contiguous_rows(call.out),
        call.logsumexp,
        gradients=(*OPERANDS, "bias") if call.bias_requires_grad and call.bias is not None else OPERANDS,
        packed=call.shared_storage_dqdkdv,
        deterministic=call.deterministic,
        num_splits_key=max(call.num_splits_key, 1) if isinstance(call.num_splits_key, int) else call.num_splits_key,
        **_options(call),
    )
    return gradients.query, gradients.key, gradients.value, gradients.bias


def _refusals(call: EfficientForward | EfficientBackward) -> list[Refusal]:
    refusals: list[Refusal] = []
    kind, window = call.custom_mask_type, call.window_size
    if kind not in (0, 1, 2):
        refusals.append(CUSTOM_MASK_TYPE.refusal("custom_mask_type", kind))
    if window is not None and window < 0:
        refusals.append(refuse("window_size", window, "must be an int of at least 1", "pass 0 or None for no window"))
    elif window and kind == 0:
        rule = "must come with custom_mask_type 1 or 2, not 0"
        refusals.append(refuse("window_size", window, rule, "leave one out"))
    starts = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    if call.seqlen_k is not None and call.cu_seqlens_q is None:
        rule = "must come with cu_seqlens_q and cu_seqlens_k"
        refusals.append(refuse("seqlen_k", call.seqlen_k, rule, "pass them"))
    lengths = {"max_seqlen_q": call.max_seqlen_q}
    if call.max_seqlen_k is not None:
        lengths["max_seqlen_k"] = call.max_seqlen_k
    return refusals + sequence_refusals(starts, lengths)


def _mask(call: EfficientForward | EfficientBackward) -> Mask:
    window_size = call.window_size or None
    if call.custom_mask_type == 0:
        return Full()
    return Causal(window_size) if call.custom_mask_type == 1 else CausalBottomRight(window_size)


def _max_seqlens(call: EfficientForward | EfficientBackward) -> tuple[int, int]:
    """Returns the maximal lengths of queries and of keys; all keys together if max_seqlen_k is None."""
    queries, keys = int(call.query.shape[1]), int(call.key.shape[1])
    if call.cu_seqlens_q is None:
        return queries, keys
    return int(call.max_seqlen_q or 0), keys if call.max_seqlen_k is None else int(call.max_seqlen_k)


def _options(call: EfficientForward | EfficientBackward) -> dict[str, Any]:
    sequences = None
    if call.cu_seqlens_q is not None:
        sequences = VariableLength(call.cu_seqlens_q, call.cu_seqlens_k, *_max_seqlens(call), call.seqlen_k)
    return {**options_of(call), "bias": call.bias, "mask": _mask(call), "sequences": sequences}
