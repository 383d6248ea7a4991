"""JAX calls: a problem as a traced and lowered call of `cutlass_py_attn.jax`, and the payload of its custom call."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.jax import attention, functions, handler, mla_attention, payload, primitive
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import KEY_ROPE, Tensor
from tests.support.bundle_hosts import WORKSPACE
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import artifact
from tests.support.front_ends import mask_of, plan_calls, planned, sequences_of, without_cleared_results
from tests.support.native_frames import Call

TERMS = ("bias", "alibi_slopes", "sinks")


def as_in_jax(problem: Problem) -> Problem:
    """The problem as JAX has it: dropout's seed and offset are in device memory, and no axis has stride 0."""
    changes: dict[str, Any] = {"philox_on_device": True} if problem.dropout_p else {}
    if problem.bias is not None:
        axes = zip(problem.bias.shape, problem.bias.strides, strict=True)
        changes["bias"] = Tensor.contiguous(tuple(size if step else 1 for size, step in axes), problem.bias.dtype)
    return problem.replace(**changes)


def by_handler(log: FakeDriver, call: Call, problem: Problem) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """What the handler in Python asks, and what the plan does with the same addresses."""
    addresses = call.addresses(1)
    given = dict(zip(call.bound.names, addresses, strict=True))
    workspace, seed = given.get(handler.WORKSPACE, WORKSPACE), given.get(handler.PHILOX, 0)
    log.clear()
    call.python(addresses)
    found = without_cleared_results(log, problem, workspace)
    given |= {"philox_seed": seed, "philox_offset": seed + 8}
    return found, plan_calls(log, planned(problem), problem, given, workspace, call.stream)


def payload_of(problem: Problem) -> payload.Payload:
    """The payload of the custom call in the lowered program of a call for an H200, after a round trip through bytes."""
    arrays = {
        name: jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(tensor.dtype))
        for name, tensor in (problem.tensors() | problem.vectors()).items()
        if not name.startswith("philox")
    }
    found: list[payload.Payload] = []
    real = payload.Payload.pack

    def pack(packed: payload.Payload) -> bytes:
        data = real(packed)
        found.append(payload.unpack(data))
        return data

    functions._traced.clear_cache()
    primitive.payload_of.cache_clear()
    with mock.patch.object(payload.Payload, "pack", pack):
        jax.jit(_function(problem)).trace(arrays).lower(lowering_platforms=("cuda",))
    return found[-1]


def _function(problem: Problem) -> Any:
    """The forward, or the gradients, as a function of the arrays by name."""

    def forward(operands: dict[str, Any], others: dict[str, Any]) -> Any:
        return _attend(problem, {**others, **operands})

    def backward(arrays: dict[str, Any]) -> Any:
        operands = {name: arrays[name] for name in problem.gradients}
        (_, logsumexp), pull = jax.vjp(lambda operands: forward(operands, arrays), operands)
        of_logsumexp = arrays.get("grad_logsumexp", jnp.zeros_like(logsumexp))[..., : logsumexp.shape[2]]
        return pull((arrays["grad_output"], of_logsumexp))[0]

    return backward if problem.direction == "backward" else lambda arrays: forward({}, arrays)


def _attend(problem: Problem, arrays: dict[str, Any]) -> Any:
    options = {
        "mask": mask_of(problem, arrays),
        "scale": problem.scale,
        "sequences": sequences_of(problem, arrays),
        "kernels": artifact,
        "arch": "sm_90",
        "return_logsumexp": problem.grad_logsumexp is not None or problem.direction == "forward",
    }
    if problem.value_in_key:
        codes = {"cache_scale": arrays.get("key_scale"), "cache_rope": arrays.get(KEY_ROPE)}
        columns = problem.shape.head_dim_value
        return mla_attention(arrays["query"], arrays["key"], head_dim_value=columns, **codes, **options)
    operands = [arrays[name] for name in ("query", "key", "value")]
    options |= {name: arrays.get(name) for name in (*TERMS, *problem.scales)}
    options |= {"softcap": problem.softcap, "deterministic": problem.deterministic}
    if problem.dropout_p:
        options |= {"dropout_p": problem.dropout_p, "dropout_key": jax.random.key(0)}
    found = attention(*operands, **options)
    return found if options["return_logsumexp"] else (found, jnp.zeros(problem.shape.logsumexp, np.float32))
