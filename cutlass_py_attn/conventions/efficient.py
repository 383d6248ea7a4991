"""Efficient: the raw operator of PyTorch's memory-efficient attention, _efficient_attention_forward and _backward."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.attention import attention_backward, attention_forward
from cutlass_py_attn.conventions.calling import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.conventions.layouts import with_dense_rows
from cutlass_py_attn.conventions.sequences import sequence_objections
from cutlass_py_attn.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.options import VariableLength
from cutlass_py_attn.problem import OPERANDS

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
        """BMHK tensors and vectors."""
        return {**_OPERAND_RANKS, **_SEQUENCE_RANKS}

    def objections(self) -> list[str]:
        """Of mask and sequences."""
        return _objections(self)


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
        """BMHK tensors, logsumexp and vectors."""
        return {**_OPERAND_RANKS, "grad_out": (4,), "out": (4,), "logsumexp": (3,), **_SEQUENCE_RANKS}

    def objections(self) -> list[str]:
        """Of mask and sequences."""
        return _objections(self)


@adapter(EfficientForward)
def efficient_attention_forward(call: EfficientForward) -> tuple[Any, Any, Any, Any, int, int]:
    """Attention as torch.ops.aten._efficient_attention_forward computes it, with its arguments in its order.

    query [B, Mq, H, D], key [B, Mk, Hk, D], value [B, Mk, Hk, Dv]; bias [B or 1, H or 1, Mq or 1, Mk or 1] in their
    dtype. cu_seqlens_q, cu_seqlens_k int32 [count + 1]: B is 1 and the sequences lie behind each other, none longer
    than max_seqlen_q and max_seqlen_k (None: as many as there are keys); without them these two are not looked at.
    seqlen_k int32 [count]: how many of its keys each sequence uses. custom_mask_type: 0 none, 1 causal from the top
    left, 2 from the bottom right; with 1 and 2 each query sees the last window_size keys alone, 0 and None for no
    window.

    Returns output [B, Mq, H, Dv], logsumexp float32 [B or count, H, ceil32(Mq or max_seqlen_q)], or with 0 rows
    unless compute_log_sumexp, philox_seed and philox_offset as given, and the longest lengths in force, which the
    backward takes as max_seqlen_q and max_seqlen_k. Dropout of dense tensors drops what PyTorch drops; with
    cu_seqlens PyTorch's forward and backward do not agree, and here both count from the longest lengths.

    NotSupported lists every objection; see `attention_forward` for the other errors.
    """
    output, logsumexp = attention_forward(
        call.query,
        call.key,
        call.value,
        **_options(call),
    )
    if not call.compute_log_sumexp:
        logsumexp = logsumexp[..., :0]
    return output, logsumexp, call.philox_seed, call.philox_offset, *_longest(call)


@adapter(EfficientBackward)
def efficient_attention_backward(call: EfficientBackward) -> tuple[Any, Any, Any, Any]:
    """The backward of `efficient_attention_forward`, with torch.ops.aten._efficient_attention_backward's arguments.

    grad_out and out [B, Mq, H, Dv] with any strides; logsumexp, philox_seed and philox_offset as the forward gave
    them; the others as the forward had them. num_splits_key: blocks that share one (batch, head); below 1 counts
    as 1, and None lets the plan choose. shared_storage_dqdkdv: the gradients of query, key and value, which must
    then have one shape, are slices of one [B, M, 3, H, D] array. seqlen_k, which PyTorch's backward lacks, must be
    the forward's. deterministic: in place of PyTorch's global switch.

    Returns the gradients of query, key, value and bias, each in its shape; None for bias without
    bias_requires_grad, and four times None without grad_out.

    NotSupported lists every objection; see `attention_backward` for the other errors.
    """
    if call.grad_out is None:
        return None, None, None, None
    found = attention_backward(
        with_dense_rows(call.grad_out),
        call.query,
        call.key,
        call.value,
        with_dense_rows(call.out),
        call.logsumexp,
        gradients=(*OPERANDS, "bias") if call.bias_requires_grad and call.bias is not None else OPERANDS,
        packed=call.shared_storage_dqdkdv,
        deterministic=call.deterministic,
        num_splits_key=max(call.num_splits_key, 1) if isinstance(call.num_splits_key, int) else call.num_splits_key,
        **_options(call),
    )
    return found.query, found.key, found.value, found.bias


def _objections(call: EfficientForward | EfficientBackward) -> list[str]:
    found = []
    kind, window = call.custom_mask_type, call.window_size
    if kind not in (0, 1, 2):
        found.append(f"custom_mask_type = {kind!r}: must be 0 (none), 1 (top left) or 2 (bottom right); choose one")
    if window is not None and (not isinstance(window, int) or window < 0):
        found.append(f"window_size = {window!r}: must be an int of at least 1, or 0 or None for no window; correct it")
    elif window and kind == 0:
        found.append(f"window_size = {window} with custom_mask_type = 0: must come with 1 or 2; leave one out")
    starts = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    if call.seqlen_k is not None and call.cu_seqlens_q is None:
        found.append("seqlen_k without cu_seqlens_q and cu_seqlens_k: must come with both; pass them")
    lengths = {"max_seqlen_q": call.max_seqlen_q}
    if call.max_seqlen_k is not None:
        lengths["max_seqlen_k"] = call.max_seqlen_k
    return found + sequence_objections(starts, lengths)


def _mask(call: EfficientForward | EfficientBackward) -> Mask:
    window_size = call.window_size or None
    if call.custom_mask_type == 0:
        return Full()
    return Causal(window_size) if call.custom_mask_type == 1 else CausalBottomRight(window_size)


def _longest(call: EfficientForward | EfficientBackward) -> tuple[int, int]:
    """The longest lengths in force: of all keys together where max_seqlen_k is left out."""
    queries, keys = int(call.query.shape[1]), int(call.key.shape[1])
    if call.cu_seqlens_q is None:
        return queries, keys
    return int(call.max_seqlen_q or 0), keys if call.max_seqlen_k is None else int(call.max_seqlen_k)


def _options(call: EfficientForward | EfficientBackward) -> dict[str, Any]:
    sequences = None
    if call.cu_seqlens_q is not None:
        sequences = VariableLength(call.cu_seqlens_q, call.cu_seqlens_k, *_longest(call), call.seqlen_k)
    return {**options_of(call), "bias": call.bias, "mask": _mask(call), "sequences": sequences}
