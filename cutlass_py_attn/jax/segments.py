"""Packed sequences from segment ids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import partition
from cutlass_py_attn.refusals import refuse


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
        ids = _array_of(segment_ids)
        is_valid = ids.ndim == 2 and bool(jnp.issubdtype(ids.dtype, jnp.integer))
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    reasons = []
    if not is_valid:
        reasons.append(refuse("segment_ids", segment_ids, "must be integers of shape (batch, tokens)", "convert them"))
    if not isinstance(max_segments, (int, np.integer)) or isinstance(max_segments, bool) or max_segments < 1:
        reasons.append(refuse("max_segments", max_segments, "must be an int of at least 1", "correct it"))
    if reasons:
        raise NotSupported(reasons)
    batch, tokens = ids.shape
    most = batch * int(max_segments)
    if isinstance(ids, jax.core.Tracer) or not getattr(ids, "is_fully_addressable", True):
        bounds = _bounds(partition.whole(ids), most)  # each device needs those of all sequences
    else:
        found = np.flatnonzero(_starts(np.asarray(ids), np))
        if found.size > most:
            raise NotSupported(
                f"segment_ids have {found.size} runs in {batch} rows: must be at most {most}, by max_segments = "
                f"{max_segments}; raise it"
            )
        bounds = jnp.asarray(np.append(found, [batch * tokens] * (most + 1 - found.size)), jnp.int32)
    return VariableLength(bounds, bounds, tokens, tokens)


def _array_of(ids: Any) -> Any:
    """Returns the ids as a JAX array, or as a NumPy array if no part of them is one.

    jax.numpy would make a traced array of NumPy's, whose values a compiled function could not check.
    """
    if isinstance(ids, (list, tuple)) and not any(isinstance(part, jax.Array) for part in jax.tree.leaves(ids)):
        return np.asarray(ids)
    return ids if isinstance(ids, np.ndarray) else jnp.asarray(ids)


def _bounds(ids: Any, most: int) -> Any:
    """Returns the start of each run of equal ids along a row, and the number of tokens in the rest of (most + 1,)."""
    return jnp.nonzero(_starts(ids, jnp).reshape(-1), size=most + 1, fill_value=ids.size)[0].astype(jnp.int32)


def _starts(ids: Any, numpy: Any) -> Any:
    """Returns whether a run of equal ids starts at a token, (batch, tokens). numpy: numpy or jax.numpy."""
    is_first = numpy.arange(ids.shape[1])[None, :] == 0
    return is_first | (ids != numpy.roll(ids, 1, axis=1))
