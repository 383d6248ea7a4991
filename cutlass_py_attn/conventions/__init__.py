"""Conventions: attention under the names, argument orders and layouts of PyTorch's three CUDA entry points.

Each function takes what its namesake takes, in the same order, maps it to `attention_forward` or
`attention_backward`, and gives back the same tuple; None stands for an undefined tensor. No kernel is new.

               diagonal        tensors      logsumexp
    efficient  either corner   BMHK         [B, H, ceil32(Mq)]
    flash      bottom right    BMHK, MHK    [B, H, Mq], packed [H, total_q] with cum_seq_q
    cudnn      top left        BHMK, MHK    [B, H, Mq, 1], packed [total_q, H, 1] with cum_seq_q

Arrays are NumPy, CuPy, torch or JAX arrays, all of one library and on one device. Beside its namesake's arguments
every function takes stream, backend and kernels, as `attention_forward` does. There is no random generator here:
a forward draws from the philox_seed and philox_offset that it is given (0 when left out) and returns them as they
were. Of the three namesakes only efficient attention draws the same numbers from them. A row that sees no key has
logsumexp -inf; the backward functions take 0 and +inf, the namesakes' marks for it, as well. NotSupported lists
every objection under the names of the arguments here: first those to the arguments, then those to the problem.
"""

from cutlass_py_attn.conventions.cudnn import cudnn_attention_backward, cudnn_attention_forward
from cutlass_py_attn.conventions.efficient import efficient_attention_backward, efficient_attention_forward
from cutlass_py_attn.conventions.flash import flash_attention_backward, flash_attention_forward
from cutlass_py_attn.conventions.sdpa import (
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
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_efficient_attention_backward",
]
