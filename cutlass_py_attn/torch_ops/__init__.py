"""PyTorch's attention operators: their names, argument orders and layouts on top of this package's kernels.

Each function has the arguments of the ATen operator of the same name, in the same order. It calls `attention_forward`
or `attention_backward` and returns the operator's tuple; None stands for an undefined tensor.

    operator   causal diagonal         tensors      logsumexp
    efficient  top left, bottom right  BMHK         (B, H, ceil32(Mq))
    flash      bottom right            BMHK, MHK    (B, H, Mq); packed (H, total_q) with cum_seq_q
    cudnn      top left                BHMK, MHK    (B, H, Mq, 1); packed (total_q, H, 1) with cum_seq_q

`flash_attn_with_kvcache` has the names of FlashAttention for a cache in pages, `flash_mla_with_kvcache` those of
FlashMLA for a latent cache in pages.

Arrays are NumPy, CuPy, torch or JAX arrays, all of one library and on one device. Every function also takes `stream`,
`backend` and `kernels`, as `attention_forward` does. No random generator is involved: a forward reads philox_seed and
philox_offset (0 by default) and returns them unchanged. Only efficient attention drops the same weights as PyTorch's
operator does for the same seed and offset. A row without visible keys has logsumexp -inf; the backward functions also
accept 0 and +inf, which PyTorch's operators return for such a row. NotSupported lists every reason under the argument
names of the operator: first the reasons that concern single arguments, then those of the whole problem.
"""

from cutlass_py_attn.torch_ops.cudnn import cudnn_attention_backward, cudnn_attention_forward
from cutlass_py_attn.torch_ops.efficient import efficient_attention_backward, efficient_attention_forward
from cutlass_py_attn.torch_ops.flash import flash_attention_backward, flash_attention_forward
from cutlass_py_attn.torch_ops.flash_kvcache import flash_attn_with_kvcache
from cutlass_py_attn.torch_ops.flash_mla import flash_mla_with_kvcache
from cutlass_py_attn.torch_ops.sdpa import (
    scaled_dot_product_efficient_attention,
    scaled_dot_product_efficient_attention_backward,
)

__all__ = [
    "cudnn_attention_backward",
    "cudnn_attention_forward",
    "efficient_attention_backward",
    "efficient_attention_forward",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attn_with_kvcache",
    "flash_mla_with_kvcache",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_efficient_attention_backward",
]
