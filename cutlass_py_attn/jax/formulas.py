"""Tangents of attention, and its gradients, in jax.numpy: for derivatives that no kernel computes.

With P_ij = exp(S_ij - logsumexp_i), Z of dropout, c the derivative of softcap, and w_i = exp(sink - logsumexp_i):

    dS = c * scale (dQ K^T + Q dK^T) + dbias,   dlogsumexp_i = sum_j P_ij dS_ij + w_i dsink
    dO = (Z P) dV + (Z P * dS) V - dlogsumexp * O

The first line is the derivative of a logarithm of a sum of exponentials, the second one that of P V with
P = exp(S - logsumexp). Scores are kept: memory is batch * num_heads * num_queries * num_keys float32, several times.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.jax import partition, random_words
from cutlass_py_attn.jax.calls import Call
from cutlass_py_attn.jax.handler import PHILOX
from cutlass_py_attn.plan import performance
from cutlass_py_attn.problem.mask_program import MaskProgram, array_functions
from cutlass_py_attn.problem.tensors import F32_BYTES, MASK_ARRAYS, RANGE_EDGES, VISIBLE_BLOCKS
from cutlass_py_attn.score_terms.dropout import keep_scale, threshold

Arrays = dict[str, Any]

_PRODUCT: Final = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
_HEADS_AXES: Final = {  # of the query heads
    **{"query": 2, "output": 2, "bias": 1, "logsumexp": 1, "sinks": 0},
    **dict.fromkeys((*RANGE_EDGES, VISIBLE_BLOCKS), 1),
}


def tangent(call: Call, values: Arrays, tangents: Arrays) -> tuple[Any, Any]:
    """Returns the tangents of output and logsumexp, in their shapes and dtypes.

    values: operands, output and logsumexp by name
    tangents: of operands, by the operand's name
    """
    scores = _Scores(call, values, "forward-mode differentiation")
    moved = {name: scores.grouped(name, array) for name, array in tangents.items()}
    of_products: Any = 0.0
    if "query" in moved:
        of_products = of_products + _PRODUCT("bmkgd,bnkd->bkgmn", moved["query"], scores.key)
    if "key" in moved:
        of_products = of_products + _PRODUCT("bmkgd,bnkd->bkgmn", scores.query, moved["key"])
    of_scores = of_products * scores.scale * scores.softcap_slope + moved.get("bias", 0.0)
    weighted = scores.weights * of_scores
    of_lse = weighted.sum(-1)
    if "sinks" in moved:
        of_lse = of_lse + scores.sink_weights * moved["sinks"][..., None]
    of_output = _PRODUCT("bkgmn,bnkd->bmkgd", scores.multiplier * weighted, scores.value)
    of_output = of_output - jnp.moveaxis(of_lse, 3, 1)[..., None] * scores.output
    if "value" in moved:
        of_output = of_output + _PRODUCT("bkgmn,bnkd->bmkgd", scores.multiplier * scores.weights, moved["value"])
    output, logsumexp = values["output"], values["logsumexp"]
    of_lse = of_lse.reshape(of_lse.shape[0], -1, of_lse.shape[3])
    of_lse = jnp.pad(of_lse, ((0, 0), (0, 0), (0, logsumexp.shape[2] - of_lse.shape[2])))
    return _like(of_output, output), _like(of_lse, logsumexp)


def gradients(call: Call, values: Arrays, names: tuple[str, ...]) -> list[Any]:
    """Returns the gradients of these operands, in their shapes and dtypes. JAX differentiates this function.

    values: as for `tangent`, and grad_output, and grad_logsumexp if there is one
    """
    scores = _Scores(call, values, "a second derivative")
    grad_output = scores.grouped("output", values["grad_output"])
    delta = jnp.moveaxis((grad_output * scores.output).sum(-1), 1, 3)
    if "grad_logsumexp" in values:
        delta = delta - scores.grouped("logsumexp", values["grad_logsumexp"])
    of_weights = scores.multiplier * _PRODUCT("bmkgd,bnkd->bkgmn", grad_output, scores.value)
    of_bias = scores.weights * (of_weights - delta[..., None])
    of_scores = of_bias * scores.softcap_slope * scores.scale
    compute = {
        "query": lambda: _PRODUCT("bkgmn,bnkd->bmkgd", of_scores, scores.key),
        "key": lambda: _PRODUCT("bkgmn,bmkgd->bnkd", of_scores, scores.query),
        "value": lambda: _PRODUCT("bkgmn,bmkgd->bnkd", scores.multiplier * scores.weights, grad_output),
        "bias": lambda: _summed(of_bias.reshape(of_bias.shape[0], -1, *of_bias.shape[3:]), values["bias"].shape),
        "sinks": lambda: -(scores.sink_weights * delta).sum((0, 3)),
    }
    return [_like(compute[name](), values[name]) for name in names]


def refusal(purpose: str) -> str:
    """Returns why a call has no formula here."""
    return (
        f"{purpose} of attention with sequences, split rows or registered score terms: must be of operands "
        "(batch, rows, heads, head_dim) without these, for only the gradient has kernels; use jax.grad once, or "
        "attention in jax.numpy"
    )


def _like(derivative: Any, primal: Any) -> Any:
    """Returns a derivative in the shape, dtype and sharding of its primal."""
    return partition.like(derivative.reshape(primal.shape).astype(primal.dtype), primal)


def _summed(array: Any, shape: tuple[int, ...]) -> Any:
    return array.sum([axis for axis, size in enumerate(shape) if size == 1], keepdims=True)


class _Scores:
    """Weights of one call, and its operands in float32 with the query heads as (key head, head of its group)."""

    def __init__(self, call: Call, values: Arrays, purpose: str):
        if call.max_seqlens or call.paged or call.context or call.score_terms:
            raise NotSupported(refusal(purpose))
        self._heads_key = values["key"].shape[2]
        self.query, self.output = (self.grouped(name, values[name]) for name in ("query", "output"))
        self.key, self.value = (values[name].astype(jnp.float32) for name in ("key", "value"))
        batch, rows, heads, head_dim = values["query"].shape
        keys = values["key"].shape[1]
        self.scale = 1 / np.sqrt(head_dim) if call.scale is None else call.scale
        if call.backend != "reference":
            performance.warn_caller(
                f"{purpose} of attention is computed in jax.numpy, which stores scores of "
                f"{batch * heads * rows * keys * F32_BYTES} bytes several times; only gradients have kernels"
            )
        scores = _PRODUCT("bmkgd,bnkd->bkgmn", self.query, self.key) * self.scale
        self.softcap_slope: Any = 1.0
        if call.softcap:
            tanh = jnp.tanh(scores / call.softcap)
            scores, self.softcap_slope = tanh * call.softcap, 1 - tanh * tanh
        if "bias" in values:
            scores = scores + self.grouped("bias", values["bias"])
        if "alibi_slopes" in values:
            slopes = values["alibi_slopes"].reshape(-1, self._heads_key, heads // self._heads_key)
            distance = np.abs(np.arange(rows)[:, None] + keys - rows - np.arange(keys))
            scores = scores - slopes[..., None, None] * distance.astype(np.float32)
        scores = jnp.where(self._is_seen(call, values), scores, -jnp.inf)
        lse = self.grouped("logsumexp", values["logsumexp"])
        lse = jnp.where(jnp.isinf(lse), jnp.inf, lse)  # rows without keys: every weight is 0
        self.weights = jnp.exp(scores - lse[..., None])
        if "sinks" in values:
            self.sink_weights = jnp.exp(self.grouped("sinks", values["sinks"])[..., None] - lse)
        self.multiplier: Any = 1.0
        if PHILOX in values:
            words = random_words.words(values[PHILOX], batch * heads * rows * keys)
            is_kept = (words >= np.uint32(threshold(call.dropout_p))).reshape(batch, heads, rows, keys)
            self.multiplier = self.grouped("bias", is_kept) * np.float32(keep_scale(call.dropout_p))

    def _is_seen(self, call: Call, values: Arrays) -> Any:
        """Returns whether a query sees a key, which broadcasts to the scores, by all that the mask of a call has."""
        rows, keys = values["query"].shape[1], values["key"].shape[1]
        key = np.arange(keys)
        is_seen = jnp.broadcast_to(call.mask.band(rows, keys).sees(np.arange(rows)[:, None], key[None]), (rows, keys))
        if "key_start" in values:
            start, end = (self._split_heads(name, values[name])[..., None] for name in RANGE_EDGES)
            is_seen = is_seen & (start <= key) & (key < end)
        if VISIBLE_BLOCKS in values:
            block_rows, block_keys = (
                np.arange(size) // of for size, of in zip((rows, keys), call.block_size, strict=True)
            )
            blocks = self._split_heads(VISIBLE_BLOCKS, values[VISIBLE_BLOCKS] != 0)
            is_seen = is_seen & blocks[..., block_rows[:, None], block_keys]
        if call.mask_program is not None:
            is_seen = is_seen & self._by_function(call, call.mask_program, values)
        return is_seen

    def _by_function(self, call: Call, program: str, values: Arrays) -> Any:
        """Returns whether a query sees a key by the mask function of a call."""
        (batch, rows, heads, _), keys = values["query"].shape, values["key"].shape[1]
        sizes = batch, heads, rows, keys
        of_batch, head, row, key = (jnp.arange(size, dtype=jnp.int32) for size in sizes)
        of_batch, head = of_batch[:, None, None, None, None], head.reshape(self._heads_key, -1)[..., None, None]
        arrays = [partition.whole(values[name]) for name in MASK_ARRAYS if name in values]
        scalars = [jnp.int32(number) for number in call.mask_scalars or ()]
        functions = array_functions(jnp, arrays)
        return MaskProgram.parse(program).compute((of_batch, head, row[:, None], key), scalars, functions)

    def grouped(self, name: str, array: Any) -> Any:
        """Returns an operand, or its tangent, in float32 with the axis of the query heads split."""
        array = array.astype(jnp.float32)
        return array if name in ("key", "value") else self._split_heads(name, array)

    def _split_heads(self, name: str, array: Any) -> Any:
        """Returns an array with the axis of the query heads as (key head, head of its group)."""
        axis = _HEADS_AXES[name]
        if name == "logsumexp":
            array = array[:, :, : self.query.shape[1]]
        heads = (1, 1) if array.shape[axis] == 1 else (self._heads_key, array.shape[axis] // self._heads_key)
        return array.reshape(*array.shape[:axis], *heads, *array.shape[axis + 1 :])
