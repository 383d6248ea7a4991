"""Flash, key/value cache: flash_attn_with_kvcache of FlashAttention for a cache in pages, with its argument names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Window
from cutlass_py_attn.problem.scalars import flag_of, integer_of
from cutlass_py_attn.refusals import refuse
from cutlass_py_attn.torch_ops.layouts import pack_logsumexp

# Argument of `attention_forward` -> argument of FlashAttention.
_NAMES: Final = {
    "query": "q",
    "key": "k_cache",
    "value": "v_cache",
    "seqused_k": "cache_seqlens",
    "query_scale": "q_descale",
    "key_scale": "k_descale",
    "value_scale": "v_descale",
    "scale": "softmax_scale",
    "mask left": "window_size[0]",
    "mask right": "window_size[1]",
}
_PATTERN: Final = re.compile(rf"\b({'|'.join(_NAMES)})\b")


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    page_table: Any,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    return_softmax_lse: bool = False,
    stream: object = None,
    backend: str = "auto",
    kernels: Callable[[Build], Artifact] | None = None,
) -> Any:
    """Computes flash_attn_with_kvcache of FlashAttention for a cache in pages, whose new keys are in it already.

    q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with cu_seqlens_q.
    k_cache, v_cache: (num_pages, page_size, num_heads_k, head_dim or head_dim_v), any strides; page_size is a power of
        two.
    cache_seqlens: (batch,) int32, keys of each sequence, in device memory.
    page_table: (batch, max_pages) int32, in device memory; FlashAttention-2 calls it block_table.
    cu_seqlens_q, max_seqlen_q: (batch + 1,) int32, starts of the sequences in q, and the most queries of a sequence.
    causal: query i sees keys j <= i + keys - queries of its sequence. window_size: (left, right) from that diagonal;
        below 0 for no limit. softcap, alibi_slopes: as in `attention_forward`.

    q_descale, k_descale, v_descale: (batch, num_heads_k) float32, or another shape of the scales of
        `attention_forward`, for caches of e4m3 codes (float8_e4m3fn, or uint8 for their bytes). q has 16 bits, so that
        q_descale must be None.

    Returns the output in the shape of q, and with return_softmax_lse also the logsumexp, (batch, num_heads, seqlen_q)
    or (num_heads, total_q) float32.

    Not here are the arguments that write keys or turn them: k, v, rotary_cos and others.
    NotSupported lists every reason under the names of these arguments; see `attention_forward` for the other errors.
    """
    refusals = [
        refuse(name, given, "must be True or False", "pass one of them")
        for name, given in (("causal", causal), ("return_softmax_lse", return_softmax_lse))
        if flag_of(given) is None
    ]
    edges = tuple(map(integer_of, window_size)) if isinstance(window_size, (tuple, list)) else ()
    if len(edges) != 2 or None in edges:
        refusals.append(refuse("window_size", window_size, "must be two ints, below 0 for no limit", "correct it"))
    is_packed = cu_seqlens_q is not None
    query = q
    if is_packed:
        try:
            query = q[None]
        except Exception:  # the library of an array decides the type of its errors
            refusals.append(refuse("q", q, "must take indices with cu_seqlens_q, as a torch tensor does", "pass one"))
    if refusals:
        raise NotSupported(refusals)
    left, right = (None if edge is None or edge < 0 else edge for edge in edges)
    try:
        output, logsumexp = attention_forward(
            query,
            k_cache,
            v_cache,
            mask=Window(left, 0 if causal else right),
            scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            query_scale=q_descale,
            key_scale=k_descale,
            value_scale=v_descale,
            sequences=Paged(page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q),
            stream=stream,
            backend=backend,
            kernels=kernels,
        )
    except NotSupported as error:
        raise error.renamed(lambda text: _PATTERN.sub(lambda match: _NAMES[match[1]], text)) from error
    output = output[0] if is_packed else output
    if not return_softmax_lse:
        return output
    if is_packed:
        return output, pack_logsumexp(logsumexp, cu_seqlens_q, int(q.shape[0]))
    return output, logsumexp[..., : q.shape[1]]
