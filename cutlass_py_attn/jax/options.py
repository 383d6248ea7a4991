"""Options of calls in JAX: what a caller may say, checked when a call is traced, as its static part and its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.api import options as api_options
from cutlass_py_attn.api import unknown_options
from cutlass_py_attn.api.options import ScoreOptions, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import (
    calls,
    handler,
    sizes,
    split_rows,
)
from cutlass_py_attn.jax.calls import CHECKPOINT_NAME
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.plan import planner
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.mask_function import ArrayMask
from cutlass_py_attn.problem.scalars import SCALARS
from cutlass_py_attn.problem.split_rows import array_mask_refusals
from cutlass_py_attn.problem.tensors import E4M3, MASK_ARRAYS, OPERANDS
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms import registry


class Options(ScoreOptions, total=False):
    """Options of `attention`. An option without a description is that of `cutlass_py_attn.attention_forward`.

    scale, softcap, dropout_p and the numbers of the mask are numbers that are known at trace time.

    mask: `KeyRanges` is a pytree: its arrays, which may be traced, are leaves, and its band is static. So one compiled
        program computes with other ranges. `BlockSparse` and `MaskFunction` are pytrees too; the function and the
        integers of a MaskFunction are static. Their arrays have no gradient, and are refused with context_axis.

    bias: (batch, num_heads, num_queries, num_keys), differentiable; it may broadcast over any axis, and its gradient
        is summed over that axis. -inf hides a key; a row that sees no key has output 0 and zero gradients.
    alibi_slopes: (num_heads,) or (batch, num_heads) float32, not differentiable; a gradient of them is refused.
    sinks: (num_heads,) float32, differentiable.
    query_scale, key_scale, value_scale: of e4m3 codes, float8_e4m3fn or uint8 for their bytes. Nothing of such a call
        is differentiable.
    score_terms: {name: array} of terms that `score_terms.register` registered; like alibi_slopes not differentiable. A
        process that runs an exported program with such a term must register the term too.
    dropout_p: probability that a weight is dropped, from 0 to 1.
    dropout_key: a key of jax.random; required if dropout_p is not 0.
    sequences: VariableLength, or Paged for a cache in pages, with JAX or NumPy arrays. The values of NumPy arrays are
        checked when the call is traced; those of JAX arrays are not read.
    deterministic: whether all gradients are bitwise equal from run to run; slower. Without it that of query may differ
        in the last bits, and with grouped heads or without a mask those of key and value.
    return_logsumexp: whether to return (output, logsumexp), both differentiable. logsumexp is (batch, num_heads,
        num_queries) float32, the natural logarithm of each row's softmax denominator; -inf for a row without keys. With
        `sequences` it is (count, num_heads, max_seqlen_q), +inf behind the end of each sequence.
    checkpoint_name: name of output and logsumexp for policies of jax.checkpoint. A policy that saves this name, such as
        jax.checkpoint_policies.save_only_these_names("cutlass_py_attn"), spares the second forward.
    context_axis: mesh axis over which the rows of query, key and value are split, inside jax.shard_map over this axis.
        None if every device has all rows; then split rows give wrong results without a word, because a device
        cannot know of the others.
    context_strategy: "all_gather", "ulysses" or "ring"; docs/several_gpus.md says which to choose.
    load_balance: "zigzag" if the rows are in the order of `reorder`; None for the natural order.
    kernels: function that returns the Artifact of a Build, such as artifact.Folder(path); None compiles the kernels
        and caches them on disk.
    arch: target to plan for ("sm_90"), on a machine without such a GPU; None for the first GPU.
    backend: "auto" and "gpu" compute on the GPU; "reference" computes on the host in NumPy float64, slowly.
    """

    score_terms: Mapping[str, Any]
    dropout_p: float
    dropout_key: Any
    sequences: VariableLength | Paged | None
    deterministic: bool
    return_logsumexp: bool
    checkpoint_name: str
    context_axis: str | None
    context_strategy: str
    load_balance: str | None
    kernels: Callable[[Build], Artifact] | None
    arch: str | None
    backend: str
    query_scale: Any
    key_scale: Any
    value_scale: Any


def prepare(
    operands: dict[str, Any], options: Options, wants_logsumexp: bool = False
) -> tuple[calls.Call, dict[str, Any]]:
    """Returns the static part of the call and its arrays by name; NotSupported lists every wrong option."""
    given: dict[str, Any] = {name: api_options.option_value(name, value) for name, value in options.items()}
    refusals = unknown_options.refusals(given, Options.__annotations__)
    refusals += [refusal for name, value in given.items() for refusal in _static_refusals(name, value)]
    refusals += split_rows.unused_refusals(given)
    dropout_p, dropout_key = given.get("dropout_p", 0.0), given.get("dropout_key")
    if isinstance(dropout_p, float) and dropout_p != 0 and dropout_key is None:
        refusals.append(refuse("dropout_p", dropout_p, "must come with dropout_key", "pass a key of jax.random"))
    try:
        checked = api_options.check_options(api_options.known(given, Options), Options)
    except NotSupported as error:
        raise NotSupported([*refusals, *error.refusals]) from error
    if checked.sequences is not None:
        checked = dataclasses.replace(checked, sequences=_with_numpy_lengths(checked.sequences))
    sequences = checked.sequences
    arrays, unreadable = _arrays(operands | checked.arrays())
    refusals += unreadable
    arrays |= {name: jax.lax.stop_gradient(arrays[name]) for name in MASK_ARRAYS if name in arrays}
    if symbolic := [*sizes.refusals(arrays)]:
        raise NotSupported([*refusals, *symbolic])
    if sequences is not None and not unreadable and arrays["query"].ndim == arrays["key"].ndim == 4:
        rows = arrays["query"].shape[1], arrays["key"].shape[1]  # other ranks are refused when the call is traced
        if isinstance(sequences, Paged):
            refusals += sequences.refusals(rows[0], (arrays["key"].shape[0], rows[1]))
        else:
            split = None if refusals else split_rows.context_of(given)
            size = 1 if split is None else split.size
            refusals += sequences.refusals((size * rows[0], size * rows[1]))
    if not refusals and dropout_p != 0:
        try:
            words = jax.random.bits(dropout_key, (2,), "uint32")
        except (TypeError, ValueError) as error:
            rule = f"must be a key of jax.random ({error})"
            raise NotSupported(refuse("dropout_key", dropout_key, rule, "pass jax.random.key(seed)")) from error
        arrays[handler.PHILOX] = jnp.concatenate([words, jnp.zeros(2, "uint32")])  # seed, then an offset of 0
    if refusals:
        raise NotSupported(refusals)
    call = calls.Call(
        mask=checked.mask,
        scale=checked.scale,
        softcap=checked.softcap,
        dropout_p=dropout_p,
        max_seqlens=(sequences.max_seqlen_q, sequences.max_seqlen_k) if isinstance(sequences, VariableLength) else None,
        paged=(sequences.max_seqlen_q, sequences.invariant) if isinstance(sequences, Paged) else None,
        score_terms=registry.registered_among(checked.score_terms),
        deterministic=checked.deterministic,
        kernels=checked.kernels,
        arch=given.get("arch"),
        backend=checked.backend,
        context=split_rows.context_of(given),
        checkpoint_name=given.get("checkpoint_name", CHECKPOINT_NAME),
        block_size=checked.block_size,
        mask_program=checked.mask_program,
        mask_scalars=checked.mask_scalars,
    )
    if call.context is not None:
        coded = [name for name in OPERANDS if str(arrays[name].dtype) in E4M3]
        if coded:
            rule = "must have 16 or 32 bits with context_axis, because rows that are split over devices have no scales"
            remedy = "dequantise, each code times its scale, or leave context_axis None"
            refusals = [refuse(f"{name}.dtype", str(arrays[name].dtype), rule, remedy) for name in coded]
        elif isinstance(sequences, Paged):
            rule = (
                "must be VariableLength or None with context_axis, because the rows of a cache in pages are not split "
                "over devices"
            )
            refusals = [refuse("sequences", sequences, rule, "leave context_axis None")]
        elif not (refusals := array_mask_refusals(checked.key_start, checked.visible_blocks, checked.mask_program)):
            refusals = split_rows.refusals(call, arrays, sequences, wants_logsumexp)
        if refusals:
            raise NotSupported(refusals)
    return call, arrays


def _with_numpy_lengths(sequences: VariableLength | Paged) -> VariableLength | Paged:
    """Returns the sequences with NumPy arrays in place of lists, so that their values are checked."""
    names = [item.name for item in dataclasses.fields(sequences)]
    given = {name: getattr(sequences, name) for name in names}
    lists: dict[str, Any] = {name: np.asarray(each) for name, each in given.items() if isinstance(each, (list, tuple))}
    return dataclasses.replace(sequences, **lists)


def _static_refusals(name: str, value: Any) -> list[Refusal]:
    """Returns why an option that is part of the compiled program, and no array, is refused."""
    if name in ("scale", "softcap", "dropout_p"):
        if not SCALARS[name].refusals(name, value):
            return []
        return [refuse(name, value, "must be a number that is known at trace time", "pass a Python number")]
    if name in split_rows.OPTIONS:
        return split_rows.option_refusals(name, value)
    if name == "checkpoint_name" and not (isinstance(value, str) and value):
        return [refuse("checkpoint_name", value, "must be a str that is not empty", "pass a name for jax.checkpoint")]
    if name == "deterministic":
        return SCALARS[name].refusals(name, value)
    if name == "mask":
        mask = value.band if isinstance(value, ArrayMask) else value
        return masks.refusals(mask) if type(mask) in masks.ALL.values() else []  # `check_options` refuses another type
    if name == "arch" and value is not None:
        return [*planner.arch_refusals(value)]
    if name == "kernels" and callable(value) and not isinstance(value, Hashable):
        return [refuse("kernels", value, "must be hashable, because JAX compares it", "define __hash__")]
    return []


def _arrays(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Refusal]]:
    """Returns the operands as JAX arrays, and why some are refused."""
    arrays, refusals = {}, []
    for name, value in given.items():
        try:
            if value is None:
                raise TypeError("None has no elements")
            arrays[name] = jnp.asarray(value)
        except Exception as error:  # the library of an array decides its type
            refusals.append(refuse(name, value, f"must be an array that JAX takes ({error})", "convert it"))
    return arrays, refusals
