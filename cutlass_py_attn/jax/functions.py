"""Functions of the package: each checks its arguments, and adds the call to the traced program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax

from cutlass_py_attn.api import unknown_options
from cutlass_py_attn.api.attention import of_cache
from cutlass_py_attn.api.options import MLA_HEAD_DIM_VALUE, VariableLength, takes_options
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import (
    calls,
    derivatives,
    dot_product,
    flax_protocol,
    handler,
    on_mesh,
    split_rows,
    ulysses,
)
from cutlass_py_attn.jax.calls import CHECKPOINT_NAME
from cutlass_py_attn.jax.options import Options, prepare
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.masks import Full, Mask
from cutlass_py_attn.problem.scalars import integer_of
from cutlass_py_attn.problem.split_rows import ALL_GATHER, ULYSSES
from cutlass_py_attn.problem.tensors import KEY_ROPE
from cutlass_py_attn.refusals import refuse


@takes_options(
    Options,
    dropout_p=0.0,
    dropout_key=None,
    return_logsumexp=False,
    checkpoint_name=CHECKPOINT_NAME,
    context_axis=None,
    context_strategy=ALL_GATHER,
    load_balance=None,
    arch=None,
)
def attention(query: Any, key: Any, value: Any, **options: Unpack[Options]) -> Any:
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
    wants_logsumexp = options.get("return_logsumexp", False)
    call, operands = prepare({"query": query, "key": key, "value": value}, options, wants_logsumexp)
    operands = _varying(call, operands)
    if call.context is not None and call.context.strategy == ULYSSES:
        found = ulysses.attend(_with_rows_of_logsumexp, call, operands)
        return found if wants_logsumexp else found[0]
    return _with_rows_of_logsumexp(call, operands) if wants_logsumexp else _traced(call, operands)[0]


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
    call, operands = prepare(arrays, options, return_logsumexp)
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
    static, arrays = prepare(call.operands, {**options, **call.options, "scale": scale})  # type: ignore[typeddict-item]
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
