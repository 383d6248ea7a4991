"""Packed sequences in JAX: VariableLength as a pytree, and from segment ids."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.scalars import shown

_ARRAYS: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_LONGEST: Final = ("max_seqlen_q", "max_seqlen_k")

# So a VariableLength is an argument or a result of jax.jit; its longest lengths are static.
jax.tree_util.register_dataclass(VariableLength, _ARRAYS, _LONGEST)


def packed_sequences(segment_ids: Any, max_segments: int) -> VariableLength:
    """Returns the sequences of packed tokens: each run of equal ids along a row is one.

    segment_ids: (batch, tokens) integers, such as those of a data pipeline; 0, often that of padding, is an id like any
        other.
    max_segments: at least the mean number of runs in a row, known at trace time. Concrete ids are checked; tokens of
        further runs of traced ids belong to no sequence, and their output is 0.

    Pass the result as `sequences`, with query, key and value as (1, batch * tokens, num_heads, head_dim).
    NotSupported: ids of another kind, or more runs.
    """
    try:
        ids = jnp.asarray(segment_ids)
        is_valid = ids.ndim == 2 and bool(jnp.issubdtype(ids.dtype, jnp.integer))
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    reasons = []
    if not is_valid:
        reasons.append(f"segment_ids = {shown(segment_ids)}: must be integers of shape (batch, tokens); convert them")
    if not isinstance(max_segments, (int, np.integer)) or isinstance(max_segments, bool) or max_segments < 1:
        reasons.append(f"max_segments = {shown(max_segments)}: must be an int of at least 1; correct it")
    if reasons:
        raise NotSupported(reasons)
    batch, tokens = ids.shape
    starts = jnp.concatenate([jnp.ones((batch, 1), bool), ids[:, 1:] != ids[:, :-1]], 1)[:, :tokens]
    most = batch * int(max_segments)
    if not isinstance(ids, jax.core.Tracer) and (found := int(starts.sum())) > most:
        raise NotSupported(
            f"segment_ids have {found} runs in {batch} rows: must be at most {most}, by max_segments = {max_segments}; "
            "raise it"
        )
    bounds = jnp.nonzero(starts.reshape(-1), size=most + 1, fill_value=batch * tokens)[0].astype(jnp.int32)
    return VariableLength(bounds, bounds, tokens, tokens)
