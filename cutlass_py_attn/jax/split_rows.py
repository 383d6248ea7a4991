"""Options of a call whose rows are split over a mesh axis, and every reason to refuse such a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.jax import ulysses
from cutlass_py_attn.jax.calls import Call
from cutlass_py_attn.jax.context import is_causal, window_of
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.jax.rows import ALL_GATHER, RING, STRATEGIES, ULYSSES, ZIGZAG, Context
from cutlass_py_attn.problem.masks import Causal, Full
from cutlass_py_attn.problem.scalars import shown
from cutlass_py_attn.suggestions import did_you_mean

SPLITTING: Final = ("context_axis", "context_strategy", "load_balance")
OPTIONS: Final = (*SPLITTING, "return_logsumexp")
_OTHERS: Final = "pass context_strategy='all_gather' or 'ulysses'"


def option_objections(name: str, value: Any) -> list[str]:
    """Returns why the value of one of OPTIONS is refused."""
    if name == "context_axis":
        return [] if value is None else _axis_objections(value)
    if name == "context_strategy" and value not in STRATEGIES:
        return [f"{name} = {shown(value)}: must be one of {', '.join(STRATEGIES)}; "
                f"{did_you_mean(str(value), STRATEGIES, 'choose one')}"]  # fmt: skip
    if name == "load_balance" and value not in (None, ZIGZAG):
        return [f"{name} = {shown(value)}: must be {ZIGZAG!r}, or None for the natural order; choose one"]
    if name == "return_logsumexp" and not isinstance(value, bool):
        return [f"{name} = {shown(value)}: must be True or False; pass one of them"]
    return []


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
    found = [*_size_objections(call, call.context, operands)]
    found += {ALL_GATHER: _all_gather, RING: _ring, ULYSSES: _ulysses}[call.context.strategy](call, operands, sequences)
    if call.max_seqlens is not None and wants_logsumexp:
        found.append(
            "return_logsumexp with sequences and context_axis: must be one of the two, for sequences are split in the "
            "middle; leave return_logsumexp False"
        )
    return found


def _size_objections(call: Call, context: Context, operands: Mapping[str, Any]) -> Iterator[str]:
    rows, keys = (operands[name].shape[1] for name in ("query", "key"))
    if context.zigzag:
        for name, count in (("query", rows), ("key", keys)):
            if count % 2:
                yield (
                    f"{name} has {count} rows on each device with load_balance='zigzag': must be an even number, two "
                    "chunks; pad the rows, or pass load_balance=None"
                )
    ordered = not isinstance(call.mask, Full) or call.max_seqlens is not None
    if rows != keys and ordered and context.strategy != ULYSSES:
        yield (
            f"query has {rows} rows on each device and key {keys}, with mask {call.mask}: must be equal, for a mask "
            f"counts positions; pass Full(), or context_strategy={ULYSSES!r}"
        )
    bias = operands.get("bias")
    if bias is None or bias.ndim != 4 or call.max_seqlens is not None:
        return
    batch, _, heads, _ = operands["query"].shape
    allowed = batch, heads, rows, keys * context.size
    if any(size not in (1, whole) for size, whole in zip(bias.shape, allowed, strict=True)):
        yield (
            f"bias has shape {bias.shape}: must broadcast to {allowed}, the device's rows and the keys of all "
            f"{context.size} devices in natural order; split its rows alone"
        )


def _all_gather(call: Call, operands: Mapping[str, Any], sequences: VariableLength | None) -> Iterator[str]:
    yield from _term_objections(call, operands, ALL_GATHER)
    remedy = f"pass context_strategy={ULYSSES!r}"
    if "alibi_slopes" in operands and not is_causal(call.mask):
        yield (
            f"alibi_slopes with all_gather and mask {call.mask}: must be a causal mask, for ALiBi counts from the last "
            f"visible key; {remedy}"
        )
    if sequences is None:
        return
    if "bias" in operands:
        yield f"bias with sequences and all_gather: must be one of the two, for a sequence's rows are split; {remedy}"
    if not (is_causal(call.mask) or isinstance(call.mask, Full)):
        yield f"mask {call.mask} with sequences and all_gather: must be causal or Full(); {remedy}"
    if not isinstance(call.mask, Causal):
        return
    starts = sequences.cu_seqlens_q, sequences.cu_seqlens_k
    are_known = all(isinstance(each, np.ndarray) for each in starts)
    if sequences.seqused_k is not None or (are_known and not np.array_equal(*starts)):
        yield (
            f"sequences with all_gather and mask {call.mask}: must have cu_seqlens_q equal to cu_seqlens_k, and no "
            f"seqused_k; pass CausalBottomRight, or {remedy.removeprefix('pass ')}"
        )


def _ring(call: Call, operands: Mapping[str, Any], _: object) -> Iterator[str]:
    yield from _term_objections(call, operands, RING)
    context = call.context
    assert context is not None
    if "alibi_slopes" in operands:
        yield f"alibi_slopes with ring: must be None, for the kernels take no position of a part's keys; {_OTHERS}"
    if call.max_seqlens is not None:
        yield f"sequences with ring: must be None, for the parts would split sequences; {_OTHERS}"
    if not (is_causal(call.mask) or isinstance(call.mask, Full)):
        yield f"mask {call.mask} with ring: must be causal or Full(); {_OTHERS}"
    if is_causal(call.mask) and window_of(call.mask) is not None and context.zigzag:
        yield (
            f"mask {call.mask} with ring and load_balance='zigzag': must have no window; pass load_balance=None, with "
            "which the ring ends where the window ends"
        )


def _term_objections(call: Call, operands: Mapping[str, Any], strategy: str) -> Iterator[str]:
    if PHILOX in operands:
        yield (
            f"dropout_p = {call.dropout_p} with {strategy}: must be 0, for the kernels count random numbers of a "
            f"device's own rows and keys; pass context_strategy={ULYSSES!r}"
        )
    for term in call.score_terms:
        yield (
            f"score term {term.name!r} with {strategy}: must be absent, for a term counts the positions of a device's "
            f"own rows; pass context_strategy={ULYSSES!r}"
        )


def _ulysses(call: Call, operands: Mapping[str, Any], _: object) -> Iterator[str]:
    context = call.context
    assert context is not None
    heads, heads_key = operands["query"].shape[2], operands["key"].shape[2]
    if heads % context.size or heads_key == 0 or heads % heads_key:
        yield (
            f"query has {heads} heads and key {heads_key}, split over {context.size} devices of axis {context.axis}: "
            f"the number of devices must divide query's heads; pass context_strategy={ALL_GATHER!r}"
        )
        return
    if ulysses.repeats_of_key(heads, heads_key, context.size) is None:
        yield (
            f"key has {heads_key} heads, query {heads}, split over {context.size} devices of axis {context.axis}: each "
            f"device must have whole groups of query heads; pass context_strategy={ALL_GATHER!r}"
        )
        return
    yield from ulysses.split_of(context, call, dict(operands)).reasons()
