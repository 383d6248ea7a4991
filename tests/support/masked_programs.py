"""Programs of JAX that call attention with masks in memory: operands, attention in jax.numpy beside it, devices.

A test module sets JAX's configuration before it imports this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from cutlass_py_attn.jax import attention
from tests.support import fakes

P = jax.sharding.PartitionSpec
BATCH, ROWS, KEYS, HEADS, HEADS_KEY, DIM = 4, 10, 14, 4, 2, 8
Arrays = tuple[Any, ...]


def draw(number: int, *shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), dtype)


def operands(*leading: int, batch: int = BATCH, dtype: Any = np.float32) -> Arrays:
    shapes = (batch, ROWS, HEADS, DIM), *[(batch, KEYS, HEADS_KEY, DIM)] * 2
    return tuple(draw(number, *leading, *shape, dtype=dtype) for number, shape in enumerate(shapes))


def softmax_attention(query: Any, key: Any, value: Any, bias: Any, scale: float | None = None) -> tuple[Any, Any]:
    """Output and logsumexp in jax.numpy; a row that sees no key is 0, and -inf."""
    key, value = (jnp.repeat(array, query.shape[2] // array.shape[2], axis=2) for array in (key, value))
    scores = jnp.einsum("bmhd,bnhd->bhmn", query, key, precision="highest") * (scale or query.shape[3] ** -0.5) + bias
    is_seen = jnp.isfinite(scores)
    weights = jnp.where(is_seen, jnp.exp(jnp.where(is_seen, scores, 0)), 0)  # small scores need no maximum
    total = weights.sum(-1, keepdims=True)
    sees = total > 0
    weights = weights / jnp.where(sees, total, 1)
    logsumexp = jnp.where(sees, jnp.log(jnp.where(sees, total, 1)), -jnp.inf)[..., 0]
    return jnp.einsum("bhmn,bnhd->bmhd", weights, value, precision="highest"), logsumexp


def loss(attend: Callable[..., Any], *arguments: Any) -> Any:
    return jnp.sum(jnp.sin(attend(*arguments)))


def expect_close(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(*(np.asarray(array, np.float32) for array in (one, other)), tolerance, tolerance)


def calls_in(function: Callable[..., Any], *arguments: Any) -> int:
    """The number of forwards and backwards in a traced program."""

    def count(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            total += equation.primitive.name == "pure_callback"
            inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
            total += sum(count(each) for each in inner if hasattr(each, "eqns"))
        return total

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


SPLITS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "batch": (P("x"), (4,)),
    "heads": (P(None, None, "x"), (2,)),
    "both": (P("x", None, "y"), (2, 2)),
    "more than key heads": (P(None, None, "x"), (4,)),
}


def kernels(build: Any) -> Any:
    """Kernels that no other module's programs share."""
    return fakes.artifact(build)


def by_kernels(query: Any, key: Any, value: Any, mask: Any) -> Any:
    return attention(query, key, value, mask=mask, kernels=kernels, arch="sm_90")
