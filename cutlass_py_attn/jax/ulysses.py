"""Ulysses: a call whose rows are split becomes one whose heads are split, by all-to-all exchanges.

Jacobs et al. 2023, DeepSpeed Ulysses. Between the exchanges each device has all rows of some heads in natural order, so
that every mask and score term is computed as on one device. JAX differentiates the exchanges: the transpose of an
all-to-all is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cutlass_py_attn.jax.calls import Call
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.jax.partition import HEADS, Split
from cutlass_py_attn.jax.rows import Context
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.split_rows import repeats_of_key
from cutlass_py_attn.score_terms import registry

Arrays = dict[str, Any]


def split_of(context: Context, call: Call, operands: Arrays) -> Split:
    """Returns the split by heads of the call on all rows; NotSupported if such a call is refused on one device.

    operands: a device's.
    """
    described = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in operands.items()}
    repeats = repeats_of_key(operands["query"].shape[2], operands["key"].shape[2], context.size) or 1
    for name in ("query", "key", "value"):
        batch, rows, heads, columns = described[name].shape
        heads *= 1 if name == "query" else repeats
        described[name] = jax.ShapeDtypeStruct((batch, rows * context.size, heads, columns), described[name].dtype)
    if "bias" in described and described["bias"].shape[2] > 1:
        batch, heads, rows, keys = described["bias"].shape
        described["bias"] = jax.ShapeDtypeStruct((batch, heads, rows * context.size, keys), described["bias"].dtype)
    problem: Problem = dataclasses.replace(call, context=None).problem(described, ())
    return Split(problem, (), (context.axis,), ((context.axis, context.size),))


def attend(run: Callable[[Call, Arrays], tuple[Any, Any]], call: Call, operands: Arrays) -> tuple[Any, Any]:
    """Returns output, and logsumexp (batch, num_heads, rows), of a device's rows.

    run: differentiable attention of one device, which returns both
    operands: the device's
    """
    assert call.context is not None
    context, call = call.context, dataclasses.replace(call, context=None)
    split = split_of(context, call, operands)
    own = {name: _of_heads(context, name, array) for name, array in _with_repeated_keys(context, operands).items()}

    def attention(own: Arrays) -> Arrays:
        return dict(zip(("output", "logsumexp"), run(call, own), strict=True))

    found = split.with_dropout(attention, own) if PHILOX in own else attention(own)
    output = jax.lax.all_to_all(context.from_natural(found["output"], 1), context.axis, 1, 2, tiled=True)
    if call.max_seqlens is not None:
        return output, found["logsumexp"]
    lines = context.from_natural(found["logsumexp"], 2)
    return output, jax.lax.all_to_all(lines, context.axis, 2, 1, tiled=True)


def _with_repeated_keys(context: Context, operands: Arrays) -> Arrays:
    repeats = repeats_of_key(operands["query"].shape[2], operands["key"].shape[2], context.size) or 1
    if repeats == 1:
        return operands
    return {**operands, **{name: jnp.repeat(operands[name], repeats, axis=2) for name in ("key", "value")}}


def _of_heads(context: Context, name: str, array: Any) -> Any:
    """Returns an operand of all rows and this device's heads."""
    if name in ("query", "key", "value"):
        return context.to_natural(jax.lax.all_to_all(array, context.axis, 2, 1, tiled=True), 1)
    vectors = {term.vector.name: term.vector for term in registry.terms() if term.vector is not None}
    if name == "bias":
        has_rows, has_heads = array.shape[2] > 1, array.shape[1] > 1
        if has_rows:
            exchanged = (
                jax.lax.all_to_all(array, context.axis, 1, 2, tiled=True)
                if has_heads
                else jax.lax.all_gather(array, context.axis, axis=2, tiled=True)
            )
            return context.to_natural(exchanged, 2)
        return _slice(context, array, 1) if has_heads else array
    axes = vectors[name].axes_of(array.ndim) if name in vectors else ()
    return _slice(context, array, axes.index(HEADS)) if HEADS in axes else array


def _slice(context: Context, array: Any, axis: int) -> Any:
    """Returns this device's part of an array that is whole on every device."""
    count = array.shape[axis] // context.size
    return jax.lax.dynamic_slice_in_dim(array, context.rank() * count, count, axis)
