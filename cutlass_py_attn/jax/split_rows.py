"""Options of a call whose rows are split over a mesh axis, and every reason to refuse such a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.jax import ulysses
from cutlass_py_attn.jax.calls import Call
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.jax.rows import Context
from cutlass_py_attn.problem.scalars import shown
from cutlass_py_attn.problem.split_rows import (
    ALL_GATHER,
    ULYSSES,
    ZIGZAG,
    SplitCall,
    order_objections,
    strategy_objections,
)

SPLITTING: Final = ("context_axis", "context_strategy", "load_balance")
OPTIONS: Final = (*SPLITTING, "return_logsumexp")


def option_objections(name: str, value: Any) -> list[str]:
    """Returns why the value of one of OPTIONS is refused."""
    if name == "context_axis":
        return [] if value is None else _axis_objections(value)
    if name == "context_strategy":
        return strategy_objections(value)
    if name == "load_balance":
        return order_objections(value)
    if name == "return_logsumexp":
        return flag_objections(name, value)
    return []


def flag_objections(name: str, value: Any) -> list[str]:
    """Returns why a value that decides what a call returns is refused."""
    return [] if isinstance(value, bool) else [f"{name} = {shown(value)}: must be True or False; pass one of them"]


def unused_objections(options: Mapping[str, Any]) -> list[str]:
    """Returns why options of split rows are refused where no rows are split."""
    if options.get("context_axis") is not None:
        return []
    defaults = {"context_strategy": ALL_GATHER, "load_balance": None}
    return [
        f"{name} = {shown(options[name])} without context_axis: must come together; name the mesh axis that splits rows"
        for name, default in defaults.items()
        if options.get(name, default) != default
    ]


def _axis_objections(axis: Any) -> list[str]:
    try:
        if isinstance(axis, str):
            jax.lax.axis_size(axis)
            return []
    except NameError:
        pass
    known = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "of which there is none here"
    return [
        f"context_axis = {shown(axis)}: must be the name of a mesh axis of the jax.shard_map around the call, {known}; "
        "call attention inside jax.shard_map over that axis, or context_parallel_attention"
    ]


def context_of(options: Mapping[str, Any]) -> Context | None:
    """Returns how the rows are split; None if they are not. options: checked."""
    axis = options.get("context_axis")
    if axis is None:
        return None
    strategy, load_balance = options.get("context_strategy", ALL_GATHER), options.get("load_balance")
    return Context(axis, jax.lax.axis_size(axis), strategy, load_balance == ZIGZAG)


def objections(
    call: Call, operands: Mapping[str, Any], sequences: VariableLength | None, wants_logsumexp: bool
) -> list[str]:
    """Returns why the rows of a call cannot be split in this way. operands: a device's. sequences: lists as arrays."""
    assert call.context is not None
    flat = [name for name in ("query", "key", "value") if operands[name].ndim != 4]
    if flat:
        return [
            f"{name} has shape {operands[name].shape}: must be 4-D (batch, rows, heads, head_dim), a device's rows; "
            "reshape it"
            for name in flat
        ]
    described = _described(call, operands, sequences)
    found = [*described.objections()]
    if not found and described.strategy == ULYSSES:
        found += ulysses.split_of(call.context, call, dict(operands)).reasons()
    if call.max_seqlens is not None and wants_logsumexp:
        found.append(
            "return_logsumexp with sequences and context_axis: must be one of the two, for sequences are split in the "
            "middle; leave return_logsumexp False"
        )
    return found


def _described(call: Call, operands: Mapping[str, Any], sequences: VariableLength | None) -> SplitCall:
    """Returns what decides whether the rows can be split."""
    context = call.context
    assert context is not None
    differ = False
    if sequences is not None:
        starts = sequences.cu_seqlens_q, sequences.cu_seqlens_k
        are_known = all(isinstance(each, np.ndarray) for each in starts)
        differ = sequences.seqused_k is not None or (are_known and not np.array_equal(*starts))
    bias = operands.get("bias")
    return SplitCall(
        strategy=context.strategy,
        zigzag=context.zigzag,
        size=context.size,
        where=f"{context.size} devices of axis {context.axis}",
        mask=call.mask,
        query=tuple(operands["query"].shape),
        key=tuple(operands["key"].shape),
        bias=None if bias is None else tuple(bias.shape),
        has_alibi="alibi_slopes" in operands,
        dropout_p=call.dropout_p if PHILOX in operands else 0.0,
        terms=tuple(term.name for term in call.score_terms),
        has_sequences=call.max_seqlens is not None,
        differ=differ,
    )
