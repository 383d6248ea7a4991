"""Attention for JAX: jax.jit, jax.grad, jax.vmap, shard_map and jax.export, with the same kernels.

    from cutlass_py_attn import Causal
    from cutlass_py_attn.jax import attention

    output = attention(query, key, value, mask=Causal())

A compiled program contains its kernels. A process that loads an exported program must import this package
(`import cutlass_py_attn.jax`), and needs neither the compiler nor a folder of kernels. Where there is a C compiler, the
package compiles the function that XLA calls, once; `native_library` says when.
"""

from __future__ import annotations

from cutlass_py_attn import extras

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: cutlass_py_attn.jax needs JAX: {extras.remedy('jax')}, with a GPU 'jax[cuda13]' too",
        name=error.name,
    ) from error

from cutlass_py_attn.jax import pytrees
from cutlass_py_attn.jax.functions import (
    attention,
    context_parallel_attention,
    dot_product_attention,
    export_checks,
    flax_attention,
    mla_attention,
)
from cutlass_py_attn.jax.options import Options
from cutlass_py_attn.jax.registration import register
from cutlass_py_attn.jax.rows import reorder, restore
from cutlass_py_attn.jax.segments import packed_sequences
from cutlass_py_attn.jax.serving import append_to_cache, merge_states

__all__ = [
    "Options",
    "append_to_cache",
    "attention",
    "context_parallel_attention",
    "dot_product_attention",
    "export_checks",
    "flax_attention",
    "merge_states",
    "mla_attention",
    "packed_sequences",
    "reorder",
    "restore",
]

pytrees.register()
register()
