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
from cutlass_py_attn.problem.scalars import FLAG
from cutlass_py_attn.problem.split_rows import (
    ALL_GATHER,
    ULYSSES,
    ZIGZAG,
    SplitCall,
    order_refusals,
    strategy_refusals,
)
from cutlass_py_attn.refusals import Refusal, refuse, sentence

SPLITTING: Final = ("context_axis", "context_strategy", "load_balance")
OPTIONS: Final = (*SPLITTING, "return_logsumexp")


def option_refusals(name: str, value: Any) -> list[Refusal]:
    """Returns why the value of one of OPTIONS is refused."""
    if name == "context_axis":
        return [] if value is None else _axis_refusals(value)
    if name == "context_strategy":
        return strategy_refusals(value)
    if name == "load_balance":
        return order_refusals(value)
    if name == "return_logsumexp":
        return flag_refusals(name, value)
    return []


def flag_refusals(name: str, value: Any) -> list[Refusal]:
    """Returns why a value that decides what a call returns is refused."""
    return [] if isinstance(value, bool) else [FLAG.refusal(name, value)]


def unused_refusals(options: Mapping[str, Any]) -> list[Refusal]:
    """Returns why options of split rows are refused where no rows are split."""
    if options.get("context_axis") is not None:
        return []
    defaults = {"context_strategy": ALL_GATHER, "load_balance": None}
    return [
        refuse(name, options[name], "must come with context_axis", "name the mesh axis that splits rows")
        for name, default in defaults.items()
        if options.get(name, default) != default
    ]


def _axis_refusals(axis: Any) -> list[Refusal]:
    try:
        if isinstance(axis, str):
            jax.lax.axis_size(axis)
            return []
    except NameError:
        pass
    known = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "of which there is none here"
    rule = f"must be the name of a mesh axis of the jax.shard_map around the call, {known}"
    remedy = "call attention inside jax.shard_map over that axis, or context_parallel_attention"
    return [refuse("context_axis", axis, rule, remedy)]


def context_of(options: Mapping[str, Any]) -> Context | None:
    """Returns how the rows are split; None if they are not. options: checked."""
    axis = options.get("context_axis")
    if axis is None:
        return None
    strategy, load_balance = options.get("context_strategy", ALL_GATHER), options.get("load_balance")
    return Context(axis, jax.lax.axis_size(axis), strategy, load_balance == ZIGZAG)


def refusals(
    call: Call, operands: Mapping[str, Any], sequences: VariableLength | None, wants_logsumexp: bool
) -> list[Refusal]:
    """Returns why the rows of a call cannot be split in this way. operands: a device's. sequences: lists as arrays."""
    assert call.context is not None
    ranks = [name for name in ("query", "key", "value") if operands[name].ndim != 4]
    if ranks:
        rule = "must be 4-D (batch, rows, heads, head_dim), a device's rows"
        return [refuse(f"{name}.shape", operands[name].shape, rule, "reshape it") for name in ranks]
    described = _described(call, operands, sequences)
    found = [*described.refusals()]
    if not found and described.strategy == ULYSSES:
        found += map(sentence, ulysses.split_of(call.context, call, dict(operands)).reasons())
    if call.max_seqlens is not None and wants_logsumexp:
        rule = "must be False with sequences and context_axis, for sequences are split in the middle"
        found.append(refuse("return_logsumexp", True, rule, "leave it out"))
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
