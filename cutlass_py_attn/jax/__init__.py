"""Attention for JAX: jax.jit, jax.grad, jax.vmap, shard_map and jax.export, with the same kernels.

    from cutlass_py_attn import Causal
    from cutlass_py_attn.jax import attention

    output = attention(query, key, value, mask=Causal())

A compiled program contains its kernels. A process that loads an exported program must import this package
(`import cutlass_py_attn.jax`), and needs neither the compiler nor a folder of kernels. Where there is a C compiler, the
package compiles the function that XLA calls, once; `native_library` says when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypedDict, Unpack

import numpy as np

from cutlass_py_attn import extras

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: cutlass_py_attn.jax needs JAX: {extras.remedy('jax')}, with a GPU 'jax[cuda13]' too",
        name=error.name,
    ) from error

from cutlass_py_attn.api import options as api_options
from cutlass_py_attn.api import unknown_options
from cutlass_py_attn.api.declaration import implemented_by
from cutlass_py_attn.api.options import MLA_HEAD_DIM_VALUE, VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.request import of_cache
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import (
    calls,
    derivatives,
    dot_product,
    flax_protocol,
    handler,
    native,
    native_library,
    on_mesh,
    sizes,
    split_rows,
    ulysses,
)
from cutlass_py_attn.jax.calls import CHECKPOINT_NAME
from cutlass_py_attn.jax.rows import reorder, restore
from cutlass_py_attn.jax.segments import packed_sequences
from cutlass_py_attn.jax.serving import append_to_cache, merge_states
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.masks import Full, Mask
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.scalars import SCALARS, integer_of
from cutlass_py_attn.problem.split_rows import ULYSSES
from cutlass_py_attn.problem.tensors import E4M3, KEY_ROPE, OPERANDS
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms import registry

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


class Options(TypedDict, total=False):
    """Options of `attention`. An option without a description is that of `cutlass_py_attn.attention_forward`.

    scale, softcap, dropout_p and the numbers of the mask are numbers that are known at trace time.

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

    mask: Mask
    scale: float | None
    bias: Any
    softcap: float
    alibi_slopes: Any
    sinks: Any
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


def _attention(query: Any, key: Any, value: Any, **options: Unpack[Options]) -> Any:
    wants_logsumexp = options.get("return_logsumexp", False)
    call, operands = _prepare({"query": query, "key": key, "value": value}, options, wants_logsumexp)
    operands = _varying(call, operands)
    if call.context is not None and call.context.strategy == ULYSSES:
        found = ulysses.attend(_with_rows_of_logsumexp, call, operands)
        return found if wants_logsumexp else found[0]
    return _with_rows_of_logsumexp(call, operands) if wants_logsumexp else _traced(call, operands)[0]


@implemented_by(_attention)
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Mask = Full(),  # noqa: B008
    scale: float | None = None,
    bias: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    score_terms: Mapping[str, Any] = {},
    dropout_p: float = 0.0,
    dropout_key: Any = None,
    sequences: VariableLength | Paged | None = None,
    deterministic: bool = False,
    return_logsumexp: bool = False,
    checkpoint_name: str = CHECKPOINT_NAME,
    context_axis: str | None = None,
    context_strategy: str = "all_gather",
    load_balance: str | None = None,
    kernels: Callable[[Build], Artifact] | None = None,
    arch: str | None = None,
    backend: str = "auto",
    query_scale: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
) -> Any:
    """Computes softmax(scale Q K^T + bias, masked) V, differentiable in query, key, value, bias and sinks.

    query: (batch, num_queries, num_heads, head_dim).
    key: (batch, num_keys, num_heads_key, head_dim); num_heads_key divides num_heads.
    value: (batch, num_keys, num_heads_key, head_dim_value).
    The options are keywords; `Options` describes each.

    The operands are float16, bfloat16 or float32, all of one dtype. Returns
    (batch, num_queries, num_heads, head_dim_value) in the same dtype. On sm_90a they may be float8_e4m3fn, which has no
    derivative; the output is then bfloat16.

    The call is checked when it is traced. When the program is lowered, the call is planned, and its kernels compiled if
    `kernels` is None; so jax.eval_shape needs neither a GPU nor kernels. Under vmap, the new axis joins the batch. With
    variable lengths, differentiated sinks, dropout, or different arrays of a score term that has no batch axis, the
    elements run one after the other instead.

    Reverse mode runs the backward kernels. Tangents and second derivatives are computed in jax.numpy, with memory of
    the scores; docs/jax.md says for which calls.

    A call on several devices is split by batch and heads, as the shardings of query, key and value say: on Explicit and
    Auto meshes, and inside shard_map. docs/jax_devices.md says what is not split.

    NotSupported lists every reason when the call is traced, among them shardings that cannot be split. When the program
    is lowered, NoDevice: there is no GPU, and `arch` is None; CompileError, Stale: there is no kernel.
    """
    raise NotImplementedError


@unknown_options.refuses_unknown_options()
def mla_attention(
    query: Any,
    cache: Any,
    *,
    head_dim_value: int = MLA_HEAD_DIM_VALUE,
    cache_scale: Any = None,
    cache_rope: Any = None,
    mask: Mask = Full(),  # noqa: B008
    scale: float | None = None,
    sequences: VariableLength | Paged | None = None,
    return_logsumexp: bool = False,
    kernels: Callable[[Build], Artifact] | None = None,
    arch: str | None = None,
    backend: str = "auto",
) -> Any:
    """Computes `attention` of keys that contain the values: the latent cache of multi-head latent attention.

    query: (batch, num_queries, num_heads, head_dim).
    cache: (batch, num_keys, num_heads_key, head_dim), or a pool (pages, page_size, num_heads_key, head_dim) with
        `sequences=Paged(...)`. A row is a key, and its first head_dim_value columns are the value.
    cache_scale, cache_rope: of a cache of e4m3 codes (..., num_heads_key, 512): the float32 scales of each 128 columns,
        (..., num_heads_key, 4), and the columns behind the codes in the dtype of query, (..., num_heads_key, 64). JAX
        stores each of the three densely.
    The other options are those of `attention`; `cutlass_py_attn.mla_attention_forward` says more about both.

    Returns what `attention` returns, with head_dim_value columns; it is not differentiable. Splits over devices, vmap
    and errors are those of `attention`.
    """
    refusals, columns = split_rows.flag_refusals("return_logsumexp", return_logsumexp), integer_of(head_dim_value)
    if columns is None:
        refusals.append(refuse("head_dim_value", head_dim_value, "must be an int known at trace time", "pass it"))
    if refusals or columns is None:
        raise NotSupported(refusals)
    options = Options(mask=mask, scale=scale, sequences=sequences, kernels=kernels, arch=arch, backend=backend)
    of_codes = {"key_scale": cache_scale, KEY_ROPE: cache_rope}
    arrays = {"query": query, "key": cache, **{name: each for name, each in of_codes.items() if each is not None}}
    try:
        return _attend_to_cache(arrays, columns, options, return_logsumexp)
    except NotSupported as error:
        raise of_cache(error) from error


def _attend_to_cache(arrays: dict[str, Any], columns: int, options: Options, return_logsumexp: bool) -> Any:
    """Does `mla_attention` with options that are `Options`. arrays: by their names in a Problem, without value."""
    call, operands = _prepare(arrays, options, return_logsumexp)
    call = dataclasses.replace(call, head_dim_value=columns)
    operands = _varying(
        call, {"query": operands["query"], "key": operands["key"], "value": operands["key"], **operands}
    )
    return _with_rows_of_logsumexp(call, operands) if return_logsumexp else _traced(call, operands)[0]


@unknown_options.refuses_unknown_options(*Options.__annotations__)
def context_parallel_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    context_axis: str,
    mesh: Any = None,
    batch_axis: str | tuple[str, ...] | None = None,
    heads_axis: str | tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    """Computes `attention` of global arrays whose rows are split over a mesh axis, by a jax.shard_map around it.

    query, key, value: as for `attention`, whole; each device gets its rows. With load_balance="zigzag" the rows are in
        the order of `reorder`, and so are those of the results.
    context_axis: mesh axis that splits the rows.
    mesh: a jax.sharding.Mesh with Auto or Explicit axes; None for that of jax.set_mesh.
    batch_axis, heads_axis: other mesh axes that split the batch and the heads too; None for none.
    options: those of `attention`, such as context_strategy; a bias is split over rows, and sequences are whole.

    NotSupported lists every axis that is no axis of the mesh, sizes that the devices do not divide, and what
    `attention` refuses.
    """
    operands = {"query": query, "key": key, "value": value}
    return on_mesh.attend(attention, operands, mesh, batch_axis, heads_axis, {**options, "context_axis": context_axis})


def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Computes what dot_product_attention of flax.linen and flax.nnx computes: an attention_fn for their modules.

        flax.nnx.MultiHeadAttention(..., attention_fn=flax_attention, broadcast_dropout=False)

    query: (batch..., num_queries, num_heads, head_dim), with any number of batch axes; key, value likewise.
    bias: broadcasts to (batch..., num_heads, num_queries, num_keys); it is added in the dtype of query.
    mask: broadcasts like bias; True or 1 where a query sees a key, as Flax makes masks of bool or float32. Other
        numbers, such as those of an additive mask, are refused unless the mask is traced: any number but 0 is then
        visible, as in Flax. A row that sees no key is 0; Flax computes the mean of the values.
    broadcast_dropout: must be False if weights are dropped, because the kernels draw each weight of its own.
    dropout_rng, dropout_rate: key of jax.random, and probability that a weight is dropped.
    deterministic: whether no weight is dropped, as in Flax; not the option of `attention` of the same name.
    dtype: of the computation and the output; None for the one to which JAX promotes query, key and value.
    precision: any jax.lax.Precision but HIGHEST of float32, whose products are three of TF32; None for the default.
    force_fp32_for_softmax: either; the softmax is computed in float32.
    module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
    promote_dtype: function of (query, key, value) and dtype that returns the three in one dtype; None for JAX's rule.
    is_causal: query i sees keys j <= i.
    options: options of `attention` without a name above, such as backend, kernels or softcap; bind them by
        functools.partial.

    Returns (batch..., num_queries, num_heads, head_dim_value), differentiable in query, key, value and bias. Flax is
    not imported. NotSupported lists every wrong argument, and what `attention` refuses.
    """
    given = flax_protocol.Arguments(
        query,
        key,
        value,
        bias,
        mask,
        broadcast_dropout,
        dropout_rng,
        dropout_rate,
        deterministic,
        dtype,
        precision,
        module,
        force_fp32_for_softmax,
        einsum_dot_general,
        qk_attn_weights_einsum,
        attn_weights_value_einsum,
        promote_dtype,
        is_causal,
    )
    return given.attend(dot_product_attention, options)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """Computes what jax.nn.dot_product_attention computes, with its arguments.

    query: (batch, num_queries, num_heads, head_dim), or without the batch; key, value likewise.
    bias: broadcasts to (batch, num_heads, num_queries, num_keys); it is added in the dtype of query.
    mask: bool, True where a query sees a key; broadcasts like bias. A hidden key has a weight of exactly 0. The kernels
        read the mask as a bias of -inf, so that is_causal, local_window_size and the lengths are faster where they say
        the same. Keys and values must be finite, hidden ones too.
    scale: factor of Q K^T; None for 1/sqrt(head_dim).
    is_causal: query i sees keys j <= i.
    query_seq_lengths: (batch,) integers; rows from there on are 0 in the output.
    key_value_seq_lengths: (batch,) integers; keys from there on are not seen. No array is repacked.
    local_window_size: query i sees keys i - left to i + right; one int for both.
    return_residual: whether to return (output, logsumexp), logsumexp (batch, num_queries, num_heads) in the dtype of
        query; -inf for a row that sees no key. Both are differentiable.
    options: options of `attention`, except those that the arguments above replace, such as softcap, dropout_p or
        deterministic.

    A row that sees no key, whatever hides them, is 0 in the output and gives zero gradients. JAX computes the mean of
    the values there, unless query_seq_lengths ends before the row. `implementation` does not exist here; `backend`
    says where a call is computed.

    NotSupported lists every wrong argument, and what `attention` refuses.
    """
    given = dot_product.Arguments(
        query, key, value, bias, mask, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size
    )
    others = {
        "sequences": ("must be key_value_seq_lengths here", "call `attention` for packed sequences"),
        "return_logsumexp": ("must be return_residual here", "rename it"),
        **dict.fromkeys(
            split_rows.SPLITTING, ("must be absent here", "call `attention` for rows that are split over devices")
        ),
    }
    refusals = [refuse(name, options[name], *others[name]) for name in others if name in options]
    keywords = (*dot_product.KEYWORDS, *Options.__annotations__)
    known = [name for name in dict.fromkeys(keywords) if name not in others]
    refusals += unknown_options.refusals((name for name in options if name not in others), known)
    refusals += split_rows.flag_refusals("return_residual", return_residual)
    call = given.translate(refusals)
    static, arrays = _prepare(call.operands, {**options, **call.options, "scale": scale})  # type: ignore[typeddict-item]
    if not return_residual:
        return call.output(_traced(static, arrays)[0])
    output, logsumexp = _with_rows_of_logsumexp(static, arrays)
    return call.output(output), call.residual(logsumexp)


def export_checks() -> list[Any]:
    """Returns the `disabled_checks` that jax.export needs for a function with this call.

    JAX gives no compatibility guarantee for custom calls of other packages. A version of this package that cannot
    read a call raises Stale.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(handler.TARGET)]


def _varying(call: calls.Call, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands marked as varying over every shard_map axis that one of them varies over.

    So JAX sums the gradient of an operand that is the same on several devices.
    """
    axes = calls.varying_axes(operands)
    if call.context is not None and call.context.axis in jax.sharding.get_abstract_mesh().manual_axes:  # else vmap's
        axes |= {call.context.axis}
    return {name: calls.varying(array, axes) for name, array in operands.items()}


def _with_rows_of_logsumexp(call: calls.Call, operands: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the output, and logsumexp without the padding of its rows."""
    output, logsumexp = _traced(call, operands)
    rows = operands["query"].shape[1]
    if call.max_seqlens is not None:
        rows = call.max_seqlens[0]
    elif call.paged is not None and call.paged[0] is not None:
        rows = call.paged[0]
    return output, logsumexp[..., :rows]


_traced = jax.jit(derivatives.attend, static_argnums=0)  # equal calls of a program are traced once


def _prepare(
    operands: dict[str, Any], options: Options, wants_logsumexp: bool = False
) -> tuple[calls.Call, dict[str, Any]]:
    """Returns the static part of the call and its arrays by name; NotSupported lists every wrong option."""
    given: dict[str, Any] = {name: api_options.option_value(name, value) for name, value in options.items()}
    refusals = unknown_options.refusals(given, Options.__annotations__)
    refusals += [reason for name, value in given.items() for reason in _static_refusals(name, value)]
    refusals += split_rows.unused_refusals(given)
    dropout_p, dropout_key = given.get("dropout_p", 0.0), given.get("dropout_key")
    if isinstance(dropout_p, float) and dropout_p != 0 and dropout_key is None:
        refusals.append(refuse("dropout_p", dropout_p, "must come with dropout_key", "pass a key of jax.random"))
    try:
        checked = api_options.check_options(
            {name: value for name, value in given.items() if name in _SharedOptions.__annotations__}, _SharedOptions
        )
    except NotSupported as error:
        raise NotSupported([*refusals, *error.refusals]) from error
    given_arrays = operands | {name: given[name] for name in registry.array_options() if given.get(name) is not None}
    given_arrays |= {name: given[name] for name in SCALES if given.get(name) is not None}
    given_arrays |= checked.score_terms
    sequences = None if checked.sequences is None else _with_numpy_lengths(checked.sequences)
    given_arrays |= {} if sequences is None else sequences.arrays()
    arrays, unreadable = _arrays(given_arrays)
    refusals += unreadable
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
            raise NotSupported(
                refuse(
                    "dropout_key", dropout_key, f"must be a key of jax.random ({error})", "pass jax.random.key(seed)"
                )
            ) from error
        arrays[handler.PHILOX] = jnp.concatenate([words, jnp.zeros(2, "uint32")])  # seed, then an offset of 0
    if refusals:
        raise NotSupported(refusals)
    call = calls.Call(
        mask=given.get("mask", Full()),
        scale=given.get("scale"),
        softcap=given.get("softcap", 0.0),
        dropout_p=dropout_p,
        max_seqlens=(sequences.max_seqlen_q, sequences.max_seqlen_k) if isinstance(sequences, VariableLength) else None,
        paged=(sequences.max_seqlen_q, sequences.invariant) if isinstance(sequences, Paged) else None,
        score_terms=registry.registered_among(checked.score_terms),
        deterministic=given.get("deterministic", False),
        kernels=given.get("kernels"),
        arch=given.get("arch"),
        backend=checked.backend,
        context=split_rows.context_of(given),
        checkpoint_name=given.get("checkpoint_name", CHECKPOINT_NAME),
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
        else:
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
    if name == "mask" and type(value) in masks.ALL.values():  # `check_options` refuses another type
        return masks.refusals(value)
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


class _SharedOptions(TypedDict, total=False):
    """The options that `cutlass_py_attn.api.options` checks."""

    mask: Mask
    sequences: VariableLength | Paged | None
    score_terms: Mapping[str, Any]
    kernels: Callable[[Build], Artifact] | None
    backend: str


_native = None if (_library := native_library.choice().library) is None else native.NativeHandler(_library)
handler.register(
    jax.ffi.register_ffi_target, jax.ffi.pycapsule, None if _native is None else _native.function
)  # the C function calls functions in Python that live as long as _native
