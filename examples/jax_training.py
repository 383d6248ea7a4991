"""Trains one attention block in JAX: loss and gradients are computed by the package's kernels, inside jax.jit.

python examples/jax_training.py

The task: predict, at each position of a sequence of random tokens, the token two positions before. The gradients of
the first step are compared with those of the same block in jax.numpy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cutlass_py_attn import Causal
from cutlass_py_attn.jax import attention

TOKENS, DISTANCE = 16, 2
HEADS, HEAD_DIM = 2, 64
WIDTH = HEADS * HEAD_DIM
RATE = 0.003

Attention = Callable[..., Any]


def plain(query: Any, key: Any, value: Any) -> Any:
    """Computes causal attention in jax.numpy, for comparison."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


def parameters(key: Any, length: int) -> dict[str, Any]:
    """Returns random embeddings of tokens and positions, four projections, and the projection to logits."""
    shapes = {
        "token": (TOKENS, WIDTH), "position": (length, WIDTH), "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH), "output": (WIDTH, WIDTH), "logits": (WIDTH, TOKENS),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(each, shape) / WIDTH**0.5
        for each, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(attend: Attention, p: dict[str, Any], tokens: Any) -> Any:
    """Returns the mean cross entropy of predicting the token DISTANCE positions before."""
    x = p["token"][tokens] + p["position"]
    product = functools.partial(jnp.matmul, precision="highest")
    heads = [product(x, p[name]).reshape(*tokens.shape, HEADS, HEAD_DIM) for name in ("query", "key", "value")]
    x = x + product(attend(*heads).reshape(x.shape), p["output"])
    logits = jax.nn.log_softmax(product(x, p["logits"]))[:, DISTANCE:]
    return -jnp.take_along_axis(logits, tokens[:, :-DISTANCE, None], axis=-1).mean()


def adam(p: Any, gradients: Any, state: tuple[Any, Any, Any]) -> tuple[Any, tuple[Any, Any, Any]]:
    """Does one step of Adam; returns parameters and state."""
    first, second, count = state
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
    count += 1
    rate = RATE * (1 - 0.99**count) ** 0.5 / (1 - 0.9**count)
    p = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), p, first, second)
    return p, (first, second, count)


def main(steps: int = 200, batch: int = 32, length: int = 64, **options: Any) -> tuple[list[float], float]:
    """Returns the losses of all steps, and the largest relative difference of a gradient from jax.numpy's.

    options: passed to `attention`, such as kernels or backend.
    """
    attend = functools.partial(attention, mask=Causal(), **options)
    key, drawn = jax.random.split(jax.random.key(0))
    p = parameters(key, length)
    tokens = jax.random.randint(drawn, (batch, length), 0, TOKENS)
    found, expected = (jax.jit(jax.grad(functools.partial(loss, each)))(p, tokens) for each in (attend, plain))
    differences = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), found, expected)
    worst = max(float(difference) for difference in jax.tree.leaves(differences))

    @jax.jit
    def step(p: Any, state: Any, key: Any) -> tuple[Any, Any, Any]:
        tokens = jax.random.randint(key, (batch, length), 0, TOKENS)
        value, gradients = jax.value_and_grad(functools.partial(loss, attend))(p, tokens)
        return *adam(p, gradients, state), value

    zeros = jax.tree.map(jnp.zeros_like, p)
    state, losses = (zeros, zeros, 0), []
    for number in range(steps):
        p, state, value = step(p, state, jax.random.fold_in(drawn, number))
        losses.append(value)
    return [float(value) for value in losses], worst


if __name__ == "__main__":
    losses, worst = main()
    for number in (*range(0, len(losses), 40), len(losses) - 1):
        sys.stdout.write(f"step {number:3}  loss {losses[number]:.4f}\n")
    sys.stdout.write(f"largest relative difference of a gradient from jax.numpy's: {worst:.1e}\n")
