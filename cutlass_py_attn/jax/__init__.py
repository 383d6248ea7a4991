"""JAX: attention for jax.jit, jax.grad, jax.vmap, shard_map and jax.export, from the same kernels.

    from cutlass_py_attn import Causal
    from cutlass_py_attn.jax import attention

    output = attention(query, key, value, mask=Causal())

A program with this call holds its kernels: a process that loads an exported one needs this package, which it must
import (`import cutlass_py_attn.jax`), but neither the compiler nor a folder of kernels. No C++ is involved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Real
from typing import Any, TypedDict, Unpack

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: cutlass_py_attn.jax needs JAX: pip install 'cutlass-py-attn[jax]', with a GPU 'jax[cuda13]' too",
        name=error.name,
    ) from error

from cutlass_py_attn import options as numpy_options
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import calls, handler
from cutlass_py_attn.masks import Full, Mask
from cutlass_py_attn.options import VariableLength
from cutlass_py_attn.plan import Build
from cutlass_py_attn.problem import OPERANDS

__all__ = ["Options", "attention", "export_checks"]

DIFFERENTIABLE = (*OPERANDS, "bias", "sinks")


class Options(TypedDict, total=False):
    """Options of `attention`; those not told here mean what they do in `cutlass_py_attn.attention_forward`.

    scale, softcap, dropout_p and the mask are Python numbers, known when the call is traced.
    bias: gradients reach it; it may broadcast over any axis of [B, H, Mq, Mk], which its gradient is summed over.
    alibi_slopes: float32 [H] or [B, H]; no gradient reaches them: a call that would need one is refused.
    sinks: float32 [H]; gradients reach them.
    dropout_p: probability that a weight is dropped, from 0 to 1. dropout_key: a key of jax.random, needed where
        dropout_p is not 0.
    sequences: VariableLength with arrays of JAX or NumPy.
    deterministic: the query gradient is the same in every bit from run to run; slower.
    kernels: gives the Artifact of a Build, such as artifact.Folder(path); None compiles, and keeps on disk.
    arch: plan for this target ("sm_90"), on a machine without its GPU; None plans for the first GPU.
    backend: "auto" and "gpu" compute on the GPU; "reference" in NumPy float64 on the host, slowly.
    """

    mask: Mask
    scale: float | None
    bias: Any
    softcap: float
    alibi_slopes: Any
    sinks: Any
    dropout_p: float
    dropout_key: Any
    sequences: VariableLength | None
    deterministic: bool
    kernels: Callable[[Build], Artifact] | None
    arch: str | None
    backend: str


def attention(query: Any, key: Any, value: Any, **options: Unpack[Options]) -> Any:
    """softmax(scale Q K^T + bias, masked) V, with gradients of query, key, value, bias and sinks.

    query [B, Mq, H, D], key [B, Mk, Hk, D], value [B, Mk, Hk, Dv]: float16, bfloat16 or float32, all of one dtype,
    Hk a divisor of H. Options: see Options. Returns [B, Mq, H, Dv] in the same dtype.

    Plans, and compiles where no kernels are at hand, when it is traced. Under vmap the new axis joins the batch,
    except for sequences, for sinks that gradients reach, and for keys of dropout that differ, where items run one
    after the other. With one sharding of batch and heads for all operands, call it inside shard_map: XLA knows no
    rule to split it.

    NotSupported lists every objection when the call is traced; NoDevice: no GPU, and no arch; CompileError, Stale:
    no kernel.
    """
    call, operands = _prepared({"query": query, "key": key, "value": value}, options)
    return _traced(call, operands)


def export_checks() -> list[Any]:
    """What jax.export needs to be told to export a function with this call, as its `disabled_checks`.

    JAX promises nothing for custom calls of others; this package's are refused with Stale where it cannot read them.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(handler.TARGET)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: calls.Call, operands: dict[str, Any]) -> Any:
    return calls.forward(call, operands)[0]


def _forward(call: calls.Call, operands: dict[str, Any]) -> tuple[Any, Any]:
    """The output, and what the backward reads; which gradients it owes is the structure of `wanted`."""
    values = {name: operand.value for name, operand in operands.items()}
    reached = [name for name, operand in operands.items() if operand.perturbed]
    if "alibi_slopes" in reached:
        raise NotSupported(
            "alibi_slopes has a gradient: none reaches it here; pass jax.lax.stop_gradient(alibi_slopes)"
        )
    output, logsumexp = calls.forward(call, values)
    wanted = dict.fromkeys(name for name in DIFFERENTIABLE if name in reached)
    return output, (values, output, logsumexp, wanted)


def _backward(call: calls.Call, saved: Any, grad_output: Any) -> tuple[dict[str, Any]]:
    values, output, logsumexp, wanted = saved
    gradients: dict[str, Any] = dict.fromkeys(values)
    if wanted and not isinstance(grad_output, jax.custom_derivatives.SymbolicZero):
        operands = {**values, "grad_output": grad_output, "output": output, "logsumexp": logsumexp}
        gradients |= calls.backward(call, operands, tuple(wanted))
    return (gradients,)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)
# Equal calls of a program are traced once; and shard_map outside of jit takes no custom_vjp with symbolic zeros.
_traced = jax.jit(_attend, static_argnums=0)


def _prepared(operands: dict[str, Any], options: Options) -> tuple[calls.Call, dict[str, Any]]:
    """The static part of the call and its arrays by name; NotSupported lists every objection to the options."""
    unknown = [name for name in options if name not in Options.__annotations__]
    reasons = [
        f"option {name!r} is unknown: must be one of {', '.join(Options.__annotations__)}; check the spelling"
        for name in unknown
    ]
    numbers = {"scale": options.get("scale"), "softcap": options.get("softcap"), "dropout_p": options.get("dropout_p")}
    reasons += [
        f"{name} = {number!r}: must be a number that is known when the call is traced; pass a Python number"
        for name, number in numbers.items()
        if number is not None and not isinstance(number, Real)
    ]
    dropout_p, dropout_key = options.get("dropout_p", 0.0), options.get("dropout_key")
    if isinstance(dropout_p, Real) and dropout_p != 0 and dropout_key is None:
        reasons.append(f"dropout_p = {dropout_p} without dropout_key: must come together; pass a key of jax.random")
    known = ("mask", "sequences", "backend")
    try:
        chosen = numpy_options.settings({name: value for name, value in options.items() if name in known}, _Known)
    except NotSupported as error:
        reasons += error.reasons
    if reasons:
        raise NotSupported(reasons)
    arrays = {name: jnp.asarray(array) for name, array in operands.items()}
    for name in ("bias", "alibi_slopes", "sinks"):
        if options.get(name) is not None:
            arrays[name] = jnp.asarray(options[name])
    if chosen.sequences is not None:
        arrays |= {name: jnp.asarray(array) for name, array in chosen.sequences.arrays().items()}
    if dropout_p != 0:
        words = jax.random.bits(dropout_key, (2,), "uint32")
        arrays[handler.PHILOX] = jnp.concatenate([words, jnp.zeros(2, "uint32")])  # seed, then an offset of 0
    sequences = chosen.sequences
    call = calls.Call(
        mask=options.get("mask", Full()),
        scale=options.get("scale"),
        softcap=options.get("softcap", 0.0),
        dropout_p=dropout_p,
        longest=None if sequences is None else (int(sequences.max_seqlen_q), int(sequences.max_seqlen_k)),
        deterministic=options.get("deterministic", False),
        kernels=options.get("kernels"),
        arch=options.get("arch"),
        backend=chosen.backend,
    )
    return call, arrays


class _Known(TypedDict, total=False):
    """The options that mean the same to `cutlass_py_attn.options`, and are judged there."""

    mask: Mask
    sequences: VariableLength | None
    backend: str


handler.register(jax.ffi.register_ffi_target, jax.ffi.pycapsule)
