"""Derivatives of a call, by a second primitive: the tangents of output and logsumexp.

It is linear in the tangents of the operands, and its transpose is the backward:

    jvp of a forward     output and logsumexp, and the tangent primitive of both
    its transpose        the backward of those operands that have tangents
    jvp of a backward    in jax.numpy (`formulas`), as are tangents that forward mode computes

Which operands have tangents is a parameter of the tangent primitive, so that no cache of JAX confuses two calls which
differ in it. The transpose computes the gradients that are asked for, no others. jax.grad never computes a tangent;
forward mode and second derivatives do, by `formulas`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import calls, context, formulas, partition
from cutlass_py_attn.jax.batching import TANGENT
from cutlass_py_attn.jax.call_primitive import Params, attention, batch, bind, is_of_devices
from cutlass_py_attn.jax.calls import RESULTS, Call
from cutlass_py_attn.problem.quantization import SCALES
from cutlass_py_attn.problem.tensors import E4M3, OPERANDS

Arrays = dict[str, Any]


def attend(call: Call, operands: Arrays) -> tuple[Any, Any]:
    """Returns output and logsumexp, padded as the kernels write it; both are differentiable."""
    output, logsumexp = _bind(call, (), operands).values()
    return output, logsumexp


def _bind(call: Call, gradients: tuple[str, ...], operands: Arrays) -> Arrays:
    return bind(call, gradients, operands, calls.run if call.context is None else context.run)


def _jvp_attention(primals: Any, tangents: Any, *, params: Params, program: Any) -> tuple[Any, Any]:
    """Differentiates a forward by the tangent primitive, and a backward in jax.numpy."""
    call, gradients = params.call, params.gradients
    operands = dict(zip(params.operands, primals, strict=True))
    moving = {n: t for n, t in zip(params.operands, tangents, strict=True) if type(t) is not ad.Zero}
    if not gradients:
        if reasons := _objections(call, operands, [*moving]):
            raise NotSupported(reasons)
        named = {n: checkpoint_name(result, call.checkpoint_name) for n, result in _bind(call, (), operands).items()}
        return [*named.values()], [*_bind_tangent(call, {**operands, **named}, moving).values()]

    def compute(some: Arrays) -> list[Any]:
        return formulas.gradients(call, {**operands, **some}, gradients)

    results = _bind(call, gradients, operands)
    of_gradients = jax.jvp(compute, ({name: operands[name] for name in moving},), (moving,))[1]
    return [*results.values()], of_gradients


ad.primitive_jvps[attention] = _jvp_attention


# Tangents of output and logsumexp


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _TangentParams:
    """values: names of operands, output and logsumexp, in order. moving: names of the operands with a tangent."""

    call: Call
    values: tuple[str, ...]
    moving: tuple[str, ...]

    def named(self, arrays: Any) -> tuple[Arrays, Arrays]:
        """Returns values by name, and tangents by the operand's name."""
        count = len(self.values)
        return (
            dict(zip(self.values, arrays[:count], strict=True)),
            dict(zip(self.moving, arrays[count:], strict=True)),
        )


def _bind_tangent(call: Call, values: Arrays, tangents: Arrays) -> Arrays:
    params = _TangentParams(call, tuple(values), tuple(tangents))
    results = _tangent.bind(*values.values(), *tangents.values(), params=params)
    return dict(zip(RESULTS, results, strict=True))


def _types_of_tangents(*types: Any, params: _TangentParams) -> list[Any]:
    values, _ = params.named(types)
    return [values[name] for name in RESULTS]


def _compute_tangents(params: _TangentParams, *arrays: Any) -> list[Any]:
    return [*formulas.tangent(params.call, *params.named(arrays))]


def _jvp_tangent(primals: Any, tangents: Any, *, params: _TangentParams) -> tuple[list[Any], list[Any]]:
    values, linear = params.named(primals)
    of_values, of_linear = (
        {name: moved for name, moved in arrays.items() if type(moved) is not ad.Zero}
        for arrays in params.named(tangents)
    )
    results = [*_bind_tangent(params.call, values, linear).values()]
    parts = []
    if of_linear:
        parts.append([*_bind_tangent(params.call, values, of_linear).values()])
    if of_values:

        def compute(some: Arrays) -> list[Any]:
            return [*formulas.tangent(params.call, {**values, **some}, linear)]

        parts.append(jax.jvp(compute, ({name: values[name] for name in of_values},), (of_values,))[1])
    return results, [functools.reduce(jnp.add, terms) for terms in zip(*parts, strict=True)]


def _transpose_tangent(cotangents: Any, *arrays: Any, params: _TangentParams) -> list[Any]:
    """Returns the gradients of the tangents that are linear here, by the backward.

    A row without keys has a constant logsumexp of -inf: whatever gradient arrives there, such as NaN, does not count.
    """
    values, linear = params.named(arrays)
    wanted = tuple(name for name, array in linear.items() if ad.is_undefined_primal(array))
    given = {f"grad_{n}": array for n, array in zip(RESULTS, cotangents, strict=True) if type(array) is not ad.Zero}
    gradients: Arrays = {name: ad.Zero(linear[name].aval) for name in wanted}
    if "grad_logsumexp" in given:
        given["grad_logsumexp"] = jnp.where(jnp.isinf(values["logsumexp"]), 0, given["grad_logsumexp"])
    if given:
        operands = {**values, "grad_output": jnp.zeros_like(values["output"]), **given}
        results = _bind(params.call, wanted, operands)
        gradients = {name: partition.like(results[f"grad_{name}"], values[name]) for name in wanted}
    return [*(None for _ in values), *(gradients.get(name) for name in linear)]


def _batch_tangent(axis: Any, arrays: Any, axes: Any, *, params: _TangentParams) -> tuple[list[Any], list[int | None]]:
    if is_of_devices(params.call, axis):
        raise NotSupported(formulas.refusal("vmap of a tangent over the axis of split rows"))
    names = (*params.values, *(TANGENT + name for name in params.moving))
    mapped = {name for name, number in zip(names, axes, strict=True) if number is not None}
    own = tuple(name for name in params.moving if name in mapped or TANGENT + name in mapped)

    def apply(call: Call, operands: Arrays) -> Arrays:
        return _bind_tangent(call, *params.named([operands[name] for name in names]))

    return batch(axis, arrays, axes, params.call, names, own, RESULTS, apply)


_tangent: Final = Primitive("cutlass_py_attn_tangent")
_tangent.multiple_results = True
_tangent.def_abstract_eval(_types_of_tangents)
_tangent.def_impl(lambda *arrays, params: jax.jit(_compute_tangents, static_argnums=0)(params, *arrays))
mlir.register_lowering(
    _tangent, mlir.lower_fun(lambda *arrays, params: _compute_tangents(params, *arrays), multiple_results=True)
)
ad.primitive_jvps[_tangent] = _jvp_tangent
ad.primitive_transposes[_tangent] = _transpose_tangent
batching.fancy_primitive_batchers[_tangent] = _batch_tangent


def _objections(call: Call, values: Arrays, differentiated: list[str]) -> list[str]:
    """Returns which differentiated operands have no gradient."""
    constants = ("alibi_slopes", *SCALES, *(term.name for term in call.score_terms))
    reasons = [
        f"{name} is differentiated: must be a constant here; pass jax.lax.stop_gradient({name})"
        for name in constants
        if name in differentiated
    ]
    coded = [name for name in OPERANDS if str(values[name].dtype) in E4M3]
    if coded and differentiated and call.head_dim_value is None:
        reasons.append(
            f"{', '.join(differentiated)} with {', '.join(coded)} of e4m3 is differentiated: must be a constant, "
            "because only the forward takes codes; pass jax.lax.stop_gradient of it, or differentiate attention of "
            "16-bit operands"
        )
    if call.paged is not None and differentiated:
        listed = ", ".join(differentiated)
        reasons.append(
            f"{listed} with pages is differentiated: must be a constant, because a cache has no gradients; pass "
            "jax.lax.stop_gradient of it"
        )
    if call.head_dim_value is not None and differentiated:
        names = [name for name in differentiated if name != "value"]  # which is in the cache
        reasons.append(
            f"{', '.join(names)} with a latent cache is differentiated: must be a constant, because a cache "
            "has no gradients; call `attention` with keys and values of their own"
        )
    return reasons
