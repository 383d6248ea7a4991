"""SDPA: PyTorch's _scaled_dot_product_efficient_attention and its backward, with heads before rows.

PyTorch cuts a batch of more than 65535 into chunks, which its grid demands; here no size demands any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.attention import attention_backward, attention_forward
from cutlass_py_attn.conventions.calling import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.conventions.layouts import additive, as_given, is_bool, swapped, with_dense_rows, with_four_axes
from cutlass_py_attn.masks import Causal, Full
from cutlass_py_attn.problem import OPERANDS

_RANKS: Final = {**dict.fromkeys(OPERANDS, (4,)), "attn_bias": (1, 2, 3, 4)}
_GRADIENTS: Final = (*OPERANDS, "bias")


@dataclass(frozen=True, slots=True, eq=False)
class EfficientAttention(ForwardCall):
    """The arguments of `scaled_dot_product_efficient_attention`."""

    names: ClassVar = {"bias": "attn_bias"}
    heads_first: ClassVar = True

    query: Any
    key: Any
    value: Any
    attn_bias: Any
    compute_log_sumexp: bool
    dropout_p: float = 0.0
    is_causal: bool = False
    _: KW_ONLY
    scale: float | None = None

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """BHMK tensors and the bias."""
        return _RANKS

    def objections(self) -> list[str]:
        """None beside the problem's own."""
        return []


@dataclass(frozen=True, slots=True, eq=False)
class EfficientAttentionBackward(Call):
    """The arguments of `scaled_dot_product_efficient_attention_backward`."""

    names: ClassVar = {**EfficientAttention.names, "grad_output": "grad_out", "output": "out"}
    heads_first: ClassVar = True

    grad_out: Any
    query: Any
    key: Any
    value: Any
    attn_bias: Any
    out: Any
    logsumexp: Any
    philox_seed: Any
    philox_offset: Any
    dropout_p: float
    grad_input_mask: Sequence[bool]
    is_causal: bool = False
    _: KW_ONLY
    scale: float | None = None
    deterministic: bool = False

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """BHMK tensors, the bias and logsumexp."""
        return {**_RANKS, "grad_out": (4,), "out": (4,), "logsumexp": (3,)}

    def objections(self) -> list[str]:
        """Of grad_input_mask."""
        wanted = self.grad_input_mask
        if not isinstance(wanted, (tuple, list)) or [type(item) for item in wanted] != [bool] * len(_GRADIENTS):
            return [f"grad_input_mask = {wanted!r}: must be four bools, of query, key, value and attn_bias; correct it"]
        if wanted[3] and self.attn_bias is not None and is_bool(self.attn_bias):
            return ["grad_input_mask asks for attn_bias, which is bool: only a bias has a gradient; ask for three"]
        return []


@adapter(EfficientAttention)
def scaled_dot_product_efficient_attention(call: EfficientAttention) -> tuple[Any, Any, Any, Any]:
    """Attention as torch.ops.aten._scaled_dot_product_efficient_attention computes it, with its arguments.

    query [B, H, Mq, D], key [B, Hk, Mk, D], value [B, Hk, Mk, Dv] of any strides with contiguous channels, read in
    place, save in JAX. attn_bias: of 1 to 4 axes that broadcast to [B, H, Mq, Mk], either added, in query's dtype, or
    bool, True where a key is visible. is_causal: from the top left; attn_bias may come with it.

    Returns output [B, H, Mq, Dv], a view of a new [B, Mq, H, Dv] array, logsumexp float32 [B, H, ceil32(Mq)], or with 0
    rows unless compute_log_sumexp, philox_seed and philox_offset as given. Dropout drops what PyTorch drops.

    NotSupported lists every objection; see `attention_forward` for the other errors.
    """
    output, logsumexp = attention_forward(
        swapped(call.query),
        swapped(call.key),
        swapped(call.value),
        **_options(call),
    )
    if not call.compute_log_sumexp:
        logsumexp = logsumexp[..., :0]
    return swapped(output), logsumexp, call.philox_seed, call.philox_offset


@adapter(EfficientAttentionBackward)
def scaled_dot_product_efficient_attention_backward(
    call: EfficientAttentionBackward,
) -> tuple[Any, Any, Any, Any]:
    """The backward of `scaled_dot_product_efficient_attention`, with its namesake's arguments.

    grad_out and out [B, H, Mq, Dv] with any strides; logsumexp, philox_seed and philox_offset as the forward gave
    them; the others as the forward had them. grad_input_mask: four bools, which gradients to compute.
    deterministic: in place of PyTorch's global switch.

    Returns the gradients of query, key, value and attn_bias in their shapes, that of attn_bias summed over what was
    broadcast; None where not asked for, and four times None without grad_out.

    NotSupported lists every objection; see `attention_backward` for the other errors.
    """
    wanted = tuple(
        name
        for name, is_wanted in zip(_GRADIENTS, call.grad_input_mask, strict=True)
        if is_wanted and (name != "bias" or call.attn_bias is not None)
    )
    if call.grad_out is None or not wanted:
        return None, None, None, None
    found = attention_backward(
        with_dense_rows(swapped(call.grad_out)),
        swapped(call.query),
        swapped(call.key),
        swapped(call.value),
        with_dense_rows(swapped(call.out)),
        call.logsumexp,
        gradients=wanted,
        deterministic=call.deterministic,
        **_options(call),
    )
    of_operands = (found.query, found.key, found.value)
    query, key, value = (None if gradient is None else swapped(gradient) for gradient in of_operands)
    return query, key, value, None if found.bias is None else as_given(found.bias, call.attn_bias)


def _options(call: EfficientAttention | EfficientAttentionBackward) -> dict[str, Any]:
    bias = None if call.attn_bias is None else with_four_axes(additive(call.attn_bias, call.query.dtype))
    return {**options_of(call), "bias": bias, "mask": Causal() if call.is_causal else Full()}
