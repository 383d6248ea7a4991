"""SDPA: PyTorch's operator _scaled_dot_product_efficient_attention and its backward, on (B, H, M, K) tensors.

PyTorch splits a batch of more than 65535 into chunks because of its grid; the kernels here need no chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.tensors import OPERANDS
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.torch_ops.adapter import Call, ForwardCall, adapter, options_of
from cutlass_py_attn.torch_ops.layouts import (
    as_bias,
    is_bool,
    swap_heads_and_rows,
    with_contiguous_rows,
    with_four_axes,
    without_leading_axes,
)

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
        """(B, H, M, K) tensors and the bias."""
        return _RANKS

    def refusals(self) -> list[Refusal]:
        """No reasons beside those of the problem."""
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
        """(B, H, M, K) tensors, the bias and logsumexp."""
        return {**_RANKS, "grad_out": (4,), "out": (4,), "logsumexp": (3,)}

    def refusals(self) -> list[Refusal]:
        """Concern grad_input_mask."""
        wanted = self.grad_input_mask
        if not isinstance(wanted, (tuple, list)) or [type(item) for item in wanted] != [bool] * len(_GRADIENTS):
            return [
                refuse("grad_input_mask", wanted, "must be four bools, for query, key, value, attn_bias", "correct it")
            ]
        if wanted[3] and self.attn_bias is not None and is_bool(self.attn_bias):
            rule = "must not request attn_bias, which is bool, for a boolean mask has no gradient"
            return [refuse("grad_input_mask", wanted, rule, "pass False for it")]
        return []


@adapter(EfficientAttention)
def scaled_dot_product_efficient_attention(call: EfficientAttention) -> tuple[Any, Any, Any, Any]:
    """Computes torch.ops.aten._scaled_dot_product_efficient_attention, with its arguments in the operator's order.

    - query (B, H, Mq, D), key (B, Hk, Mk, D), value (B, Hk, Mk, Dv): any strides with a contiguous last axis; read in
      place, except in JAX
    - attn_bias: 1 to 4 axes that broadcast to (B, H, Mq, Mk); a bias in query's dtype, or a boolean mask, True for
      visible keys; None for none
    - is_causal: causal mask with its diagonal at the top left; may be combined with attn_bias

    Returns four values: output (B, H, Mq, Dv), a view of a new (B, Mq, H, Dv) array; logsumexp (B, H, ceil32(Mq))
    float32, with 0 columns unless compute_log_sumexp; philox_seed; philox_offset. Dropout drops the same weights as
    PyTorch's operator.

    NotSupported lists every reason; see `attention_forward` for the other errors.
    """
    output, logsumexp = attention_forward(
        swap_heads_and_rows(call.query),
        swap_heads_and_rows(call.key),
        swap_heads_and_rows(call.value),
        **_options(call),
    )
    if not call.compute_log_sumexp:
        logsumexp = logsumexp[..., :0]
    return swap_heads_and_rows(output), logsumexp, call.philox_seed, call.philox_offset


@adapter(EfficientAttentionBackward)
def scaled_dot_product_efficient_attention_backward(
    call: EfficientAttentionBackward,
) -> tuple[Any, Any, Any, Any]:
    """Computes torch.ops.aten._scaled_dot_product_efficient_attention_backward, with its arguments in the same order.

    - grad_out, out: (B, H, Mq, Dv), any strides
    - logsumexp, philox_seed, philox_offset: from the forward
    - grad_input_mask: four bools, whether to compute the gradients of query, key, value and attn_bias
    - deterministic: replaces PyTorch's global switch
    - all others: as in the forward

    Returns the gradients of query, key, value and attn_bias in the shapes of these; the gradient of attn_bias is summed
    over broadcast axes. A gradient that is not requested is None. If grad_out is None, all four are None.

    NotSupported lists every reason; see `attention_backward` for the other errors.
    """
    wanted = tuple(
        name
        for name, is_wanted in zip(_GRADIENTS, call.grad_input_mask, strict=True)
        if is_wanted and (name != "bias" or call.attn_bias is not None)
    )
    if call.grad_out is None or not wanted:
        return None, None, None, None
    computed = attention_backward(
        with_contiguous_rows(swap_heads_and_rows(call.grad_out)),
        swap_heads_and_rows(call.query),
        swap_heads_and_rows(call.key),
        swap_heads_and_rows(call.value),
        with_contiguous_rows(swap_heads_and_rows(call.out)),
        call.logsumexp,
        gradients=wanted,
        deterministic=call.deterministic,
        **_options(call),
    )
    gradients = (computed.query, computed.key, computed.value)
    query, key, value = (None if gradient is None else swap_heads_and_rows(gradient) for gradient in gradients)
    return query, key, value, None if computed.bias is None else without_leading_axes(computed.bias, call.attn_bias)


def _options(call: EfficientAttention | EfficientAttentionBackward) -> dict[str, Any]:
    bias = None if call.attn_bias is None else with_four_axes(as_bias(call.attn_bias, call.query.dtype))
    return {**options_of(call), "bias": bias, "mask": Causal() if call.is_causal else Full()}
