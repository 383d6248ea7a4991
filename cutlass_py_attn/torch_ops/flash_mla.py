"""Flash MLA: flash_mla_with_kvcache of FlashMLA for a latent cache in pages, with its argument names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn.api.attention import mla_attention_forward
from cutlass_py_attn.api.options import MLA_HEAD_DIM_VALUE
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import CausalBottomRight, Full
from cutlass_py_attn.problem.scalars import flag_of
from cutlass_py_attn.refusals import refuse

# Argument of `mla_attention_forward` -> argument of FlashMLA.
_NAMES: Final = {
    "query": "q",
    "cache": "k_cache",
    "page_table": "block_table",
    "seqused_k": "cache_seqlens",
    "head_dim_value": "head_dim_v",
    "scale": "softmax_scale",
}
_PATTERN: Final = re.compile(rf"\b({'|'.join(_NAMES)})\b")


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int = MLA_HEAD_DIM_VALUE,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    stream: object = None,
    backend: str = "auto",
    kernels: Callable[[Build], Artifact] | None = None,
) -> tuple[Any, Any]:
    """Computes flash_mla_with_kvcache of FlashMLA for a cache whose new rows are in it already.

    q: (batch, seqlen_q, num_heads_q, head_dim).
    k_cache: (num_blocks, page_block_size, num_heads_k, head_dim), any strides; page_block_size is a power of two.
    block_table: (batch, max_num_blocks_per_seq) int32, in device memory.
    cache_seqlens: (batch,) int32, keys of each sequence, in device memory.
    head_dim_v: columns of a row of the cache that are its value, from the first on.
    causal: query i sees keys j <= i + keys - queries of its sequence.

    Returns the output, (batch, seqlen_q, num_heads_q, head_dim_v), and the logsumexp, (batch, num_heads_q, seqlen_q)
    float32. A row without keys has output 0 and logsumexp -inf.

    Not here are tile_scheduler_metadata and num_splits, because the kernel finds both on the device, and the arguments
    of FlashMLA's 8-bit and sparse caches; `mla_attention_forward` reads packed 8-bit rows through views. NotSupported
    lists every reason under the names of these arguments; see `mla_attention_forward` for the other errors.
    """
    if flag_of(causal) is None:
        raise NotSupported(refuse("causal", causal, "must be True or False", "pass one of them"))
    try:
        output, logsumexp = mla_attention_forward(
            q,
            k_cache,
            head_dim_value=head_dim_v,
            mask=CausalBottomRight() if causal else Full(),
            scale=softmax_scale,
            sequences=Paged(block_table, cache_seqlens),
            stream=stream,
            backend=backend,
            kernels=kernels,
        )
    except NotSupported as error:
        raise error.renamed(lambda text: _PATTERN.sub(lambda match: _NAMES[match[1]], text)) from error
    return output, logsumexp[..., : q.shape[1]]
