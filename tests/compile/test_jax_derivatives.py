"""Tests of derivatives in JAX programs whose calls differ in which operands are differentiated, beside jax.nn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.problem.masks import Causal

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time
jnp = jax.numpy

from cutlass_py_attn.jax import attention  # noqa: E402

Attention = Callable[..., Any]

ARGUMENTS = (0, 1, 2)
SHAPES = (2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8)


def draw(number: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32))


ours = functools.partial(attention, mask=Causal(), backend="reference")
expected = functools.partial(jax.nn.dot_product_attention, is_causal=True)
OPERANDS = tuple(draw(number, *shape) for number, shape in enumerate(SHAPES))
FROZEN_KEY, FROZEN_VALUE = draw(4, *SHAPES[1]), draw(5, *SHAPES[2])


def expect_close(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-4, atol=2e-5 * (1 + np.abs(other).max()))


def frozen_second(attend: Attention, *arrays: Any) -> Any:
    """Differentiates self-attention whose output attends to frozen keys and values."""
    return jax.grad(lambda q, k, v: (attend(attend(q, k, v), FROZEN_KEY, FROZEN_VALUE) ** 2).sum(), ARGUMENTS)(*arrays)


def frozen_first(attend: Attention, *arrays: Any) -> Any:
    return jax.grad(lambda q, k, v: (attend(attend(q, FROZEN_KEY, FROZEN_VALUE), k, v) ** 2).sum(), ARGUMENTS)(*arrays)


def three_kinds(attend: Attention, *arrays: Any) -> Any:
    """Differentiates three layers: query alone, all operands, query and value."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attend(attend(attend(q, FROZEN_KEY, FROZEN_VALUE), k, v), FROZEN_KEY, v) ** 2).sum()

    return jax.grad(loss, ARGUMENTS)(*arrays)


def vjp_around_another_gradient(attend: Attention, *arrays: Any) -> Any:
    output, pull = jax.vjp(attend, *arrays)
    first = pull(output)
    jax.grad(lambda q: attend(q, *arrays[1:]).sum())(arrays[0])
    return first, pull(output)


def rematerialized(program: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(program)
    def run(attend: Attention, *arrays: Any) -> Any:
        return program(jax.checkpoint(lambda *operands: attend(*operands)), *arrays)

    return run


PROGRAMS = {
    "frozen_second": frozen_second,
    "frozen_first": frozen_first,
    "three_kinds": three_kinds,
    "vjp_around_another_gradient": vjp_around_another_gradient,
    "remat_frozen_second": rematerialized(frozen_second),
    "remat_frozen_first": rematerialized(frozen_first),
}


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_that_differ_in_what_is_differentiated(name: str, is_jitted: bool) -> None:
    program = PROGRAMS[name]
    run = functools.partial(program, ours)
    found = (jax.jit(run) if is_jitted else run)(*OPERANDS)
    expect_close(found, jax.jit(functools.partial(program, expected))(*OPERANDS))


def test_a_trained_bias_beside_a_constant_one_of_its_shape() -> None:
    """An encoder with a learned relative bias and cross-attention with a constant padding bias, as in T5."""
    rows, heads, dim = 16, 4, 8
    inputs, targets = draw(10, 2, rows, heads * dim), draw(11, 2, rows, heads * dim)
    padding = jnp.where(jnp.arange(rows) < 12, 0.0, -1e9)[None, None, None] * jnp.ones((1, heads, rows, 1))
    weights = {"bias": draw(12, 1, heads, rows, rows)}
    weights |= {name: draw(n, 3, heads * dim, heads * dim) / 6 for n, name in enumerate(("encoder", "decoder"), 13)}

    def layer(attend: Attention, weight: Any, given: Any, memory: Any, bias: Any) -> Any:
        operands = (
            (each @ m).reshape(2, rows, heads, dim) for each, m in zip((given, memory, memory), weight, strict=True)
        )
        return given + attend(*operands, bias).reshape(given.shape)

    def loss(attend: Attention, weights: Any) -> Any:
        memory = layer(attend, weights["encoder"], inputs, inputs, weights["bias"] + padding)
        return (layer(attend, weights["decoder"], targets, memory, padding) ** 2).mean()

    def with_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias, backend="reference")

    found, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, attend)))(weights)
        for attend in (with_bias, jax.nn.dot_product_attention)
    )
    assert np.abs(wanted[1]["bias"]).max() > 1e-3
    expect_close(found, wanted)
