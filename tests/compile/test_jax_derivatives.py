"""Tests of derivatives in JAX programs: reverse and forward mode, vmap, remat, beside attention in jax.numpy."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.plan.performance import PerformanceWarning
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight
from cutlass_py_attn.score_terms import philox

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time
jnp = jax.numpy

from cutlass_py_attn.jax import attention, context_parallel_attention, random_words  # noqa: E402
from tests.support.masked_programs import calls_in  # noqa: E402
from tools.release import jax_programs  # noqa: E402
from tools.release.jax_programs import Layer  # noqa: E402

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


# vmap: element i of the results is the result of element i


@pytest.mark.parametrize("trained", [(0,), (0, 1)], ids=["query", "query and sinks"])
def test_vmap_with_one_key_of_dropout(trained: tuple[int, ...]) -> None:
    """Forward and backward of every element draw the mask of a call on its own."""
    sinks, examples = draw(20, 4), draw(21, 3, *SHAPES[0])

    def loss(query: Any, sinks: Any) -> Any:
        options = {"sinks": sinks, "dropout_p": 0.5, "dropout_key": jax.random.key(0)}
        return (ours(query, *OPERANDS[1:], **options) ** 2).sum()

    alone = [jax.value_and_grad(loss, trained)(query, sinks) for query in examples]
    found = jax.jit(jax.vmap(jax.value_and_grad(loss, trained), (0, None)))(examples, sinks)
    expect_close(found, jax.tree.map(lambda *arrays: jnp.stack(arrays), *alone))
    summed = jax.grad(lambda sinks: jax.vmap(loss, (0, None))(examples, sinks).sum())(sinks)
    of_sinks = [jax.grad(loss, 1)(query, sinks) for query in examples]
    expect_close(summed, functools.reduce(jnp.add, of_sinks))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4), (3, 1, 4)], ids=str)
def test_vmap_of_a_batch_of_one_with_slopes(shape: tuple[int, ...]) -> None:
    """Slopes have a batch axis or none, and are mapped or shared."""
    arrays, slopes = [draw(n, 3, 1, 6, 4, 8) for n in range(3)], jnp.abs(draw(3, *shape))
    axis = 0 if shape[0] == 3 else None

    def attend(query: Any, key: Any, value: Any, slopes: Any) -> Any:
        return ours(query, key, value, alibi_slopes=slopes)

    alone = [attend(*(array[i] for array in arrays), slopes if axis is None else slopes[i]) for i in range(3)]
    expect_close(jax.vmap(attend, (0, 0, 0, axis))(*arrays, slopes), jnp.stack(alone))


@pytest.mark.parametrize("what", ["sinks", "sequences", "dropout"])
def test_vmap_over_the_axis_of_an_explicit_mesh(what: str) -> None:
    """Elements that cannot join the batch run one after the other on the device that has them."""
    examples = draw(0, 8, 1, 16, 4, 8)
    bounds = jnp.array([0, 5, 16])
    options: dict[str, Any] = {
        "sinks": {},
        "sequences": {"sequences": VariableLength(bounds, bounds, 16, 16)},
        "dropout": {"dropout_p": 0.5, "dropout_key": jax.random.key(1)},
    }[what]

    def loss(sinks: Any, examples: Any) -> Any:
        return jax.vmap(lambda x: (ours(x, x, x, sinks=sinks, **options) ** 2).sum())(examples).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    expected = run(jnp.zeros(4), examples)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        expect_close(run(jnp.zeros(4), jax.device_put(examples, jax.NamedSharding(mesh, jax.P("x")))), expected)


@pytest.mark.parametrize("split", ["all", "query", "key", "examples too"])
@pytest.mark.parametrize("what", ["gradient", "tangent of gradient", "gradient of tangent"])
def test_vmap_of_calls_whose_batch_an_explicit_mesh_splits(what: str, split: str) -> None:
    """The mapped axis joins behind the split one; both split cannot join."""
    query, key = draw(0, 2, 4, 6, 4, 8), draw(1, 4, 6, 2, 8)
    plan = {
        "all": (jax.P(None, "x"), jax.P("x")),
        "query": (jax.P(None, "x"), jax.P()),
        "key": (jax.P(), jax.P("x")),
        "examples too": (jax.P("y", "x"), jax.P("x")),
    }[split]

    def loss(query: Any, key: Any) -> Any:
        return (jax.vmap(lambda each: ours(each, key, key) ** 2)(query)).sum()

    def run(query: Any, key: Any) -> Any:
        directions = jnp.cos(query), jnp.sin(key)
        if what == "gradient":
            return jax.value_and_grad(loss, (0, 1))(query, key)
        if what == "tangent of gradient":
            return jax.jvp(jax.grad(loss, (0, 1)), (query, key), directions)
        return jax.grad(lambda query, key: jax.jvp(loss, (query, key), directions)[1], (0, 1))(query, key)

    wanted = jax.jit(run)(query, key)
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=kinds)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, jax.NamedSharding(mesh, spec)) for array, spec in zip((query, key), plan, strict=True)
        ]
        expect_close(jax.jit(run)(*placed), wanted)


@pytest.mark.parametrize(
    ("options", "mapped", "obstacle"),
    [
        ({}, False, ""),
        ({"dropout_p": 0.5, "dropout_key": jax.random.key(0)}, False, "dropout"),
        ({"sinks": jnp.zeros(4)}, True, "gradients of sinks"),
        ({"sequences": VariableLength(jnp.array([0, 16]), jnp.array([0, 16]), 16, 16)}, False, "sequences"),
    ],
    ids=["joined", "dropout", "sinks", "sequences"],
)
def test_calls_that_cannot_join_the_batch_are_slow_and_say_so(
    options: dict[str, Any], mapped: bool, obstacle: str
) -> None:
    examples = jax.ShapeDtypeStruct((3, 1, 16, 4, 8), "float32")

    def loss(x: Any, sinks: Any) -> Any:
        terms = {"sinks": sinks} if mapped else {}
        return attention(x, x, x, **{**options, **terms}, arch="sm_90").sum()

    gradient = jax.vmap(jax.grad(loss, 1 if mapped else 0), (0, None))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        jax.eval_shape(gradient, examples, jax.ShapeDtypeStruct((4,), "float32"))
    slow = [str(warning.message) for warning in given if warning.category is PerformanceWarning]
    assert bool(slow) is bool(obstacle)
    assert all(text.startswith(f"vmap of attention with {obstacle} launches 3 calls one after") for text in slow)
    assert {warning.filename for warning in given if warning.category is PerformanceWarning} <= {__file__}


def test_a_row_without_keys_takes_no_gradient_of_its_logsumexp() -> None:
    """The loss selects other rows behind a square, whose gradient of -inf is NaN."""
    query, key, value = OPERANDS[0], OPERANDS[1][:, :4], OPERANDS[2][:, :4]  # the first 12 rows see no key

    def loss(query: Any, key: Any, value: Any) -> Any:
        output, lse = attention(query, key, value, mask=CausalBottomRight(), return_logsumexp=True, backend="reference")
        return (output**2).sum() + jnp.where(jnp.isinf(lse), 0.0, lse**2).sum()

    def of_seen_rows(query: Any, key: Any, value: Any) -> Any:
        output, lse = attention(query[:, 12:], key, value, mask=Causal(), return_logsumexp=True, backend="reference")
        return (output**2).sum() + (lse**2).sum()

    expect_close(jax.grad(loss, ARGUMENTS)(query, key, value), jax.grad(of_seen_rows, ARGUMENTS)(query, key, value))


# remat


@pytest.mark.parametrize(
    ("policy", "name", "expected"),
    [
        (None, "cutlass_py_attn", 3),
        (jax.checkpoint_policies.save_only_these_names("cutlass_py_attn"), "cutlass_py_attn", 2),
        (jax.checkpoint_policies.save_only_these_names("context"), "context", 2),
        (jax.checkpoint_policies.save_only_these_names("context"), "cutlass_py_attn", 3),
        (jax.checkpoint_policies.everything_saveable, "cutlass_py_attn", 2),
        (
            jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=["cutlass_py_attn"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            "cutlass_py_attn",
            2,
        ),
    ],
    ids=["nothing", "default name", "own name", "other name", "everything", "offload"],
)
def test_a_policy_saves_output_and_logsumexp_by_name(policy: Any, name: str, expected: int) -> None:
    def block(query: Any) -> Any:
        return (ours(2 * query, *OPERANDS[1:], checkpoint_name=name) ** 2).sum()

    assert calls_in(jax.grad(block), OPERANDS[0]) == 2
    assert calls_in(jax.grad(jax.checkpoint(block, policy=policy)), OPERANDS[0]) == expected


def test_a_wrong_checkpoint_name_is_refused() -> None:
    for name, shown in ((None, "None"), ("", r"'' \(str\)"), (3, r"3 \(int\)")):
        with pytest.raises(NotSupported, match=rf"checkpoint_name = {shown}: must be a str that is not empty"):
            ours(*OPERANDS, checkpoint_name=name)


# Forward mode and second derivatives


FEATURES = Layer(mask="causal", softcap=3.0, has_alibi=True, logsumexp="used")
DROPPED = dataclasses.replace(FEATURES, dropout="shared")
TERMS = ("query", "key", "value", "bias", "sinks")
LEAVES = {name: jax_programs.VALUES[name] for name in TERMS}
DIRECTIONS = {name: jnp.cos(3 * array) for name, array in LEAVES.items()}


def of_layer(attend: Any, layer: Layer) -> Callable[[dict[str, Any]], Any]:
    return lambda leaves: attend(layer, leaves, jax.random.key(3))


def derivatives_of(function: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns tangents, a linearization and its transpose, and second derivatives in three ways."""

    def loss(leaves: dict[str, Any]) -> Any:
        output, lse = function(leaves)
        return (output**2).sum() + jnp.sin(lse).sum()

    def slope(leaves: dict[str, Any]) -> Any:
        return jax.jvp(loss, (leaves,), (DIRECTIONS,))[1]

    def product(leaves: dict[str, Any]) -> Any:
        gradients = jax.grad(loss)(leaves)
        return sum((gradients[name] * DIRECTIONS[name]).sum() for name in leaves)

    results, linear = jax.linearize(function, LEAVES)
    sinks = {**LEAVES, "sinks": LEAVES["sinks"]}
    return {
        "jvp": jax.jvp(function, (LEAVES,), (DIRECTIONS,)),
        "linearize": (linear(DIRECTIONS), jax.linear_transpose(linear, LEAVES)(results)),
        "jacfwd": jax.jacfwd(lambda array: function({**sinks, "sinks": array}))(LEAVES["sinks"]),
        "forward over reverse": jax.jvp(jax.grad(loss), (LEAVES,), (DIRECTIONS,)),
        "reverse over forward": jax.grad(slope)(LEAVES),
        "reverse over reverse": jax.grad(product)(LEAVES),
        "forward over forward": jax.jvp(slope, (LEAVES,), (DIRECTIONS,)),
        "vmap": jax.vmap(
            lambda factor: jax.jvp(function, (LEAVES,), (jax.tree.map(lambda a: factor * a, DIRECTIONS),))
        )(jnp.arange(2.0)),
        "remat": jax.jvp(jax.checkpoint(function), (LEAVES,), (DIRECTIONS,)),
    }


@pytest.mark.parametrize("layer", [FEATURES, DROPPED], ids=["terms", "dropout"])
def test_forward_mode_and_second_derivatives(layer: Layer) -> None:
    found = jax.jit(lambda: derivatives_of(of_layer(jax_programs.ours("reference"), layer)))()
    expect_close(found, jax.jit(lambda: derivatives_of(of_layer(jax_programs.plain, layer)))())


def test_second_derivatives_through_scan() -> None:
    """A Hessian-vector product of a loop over layers, where JAX inlines derivative rules of its own kind."""

    def loss(attend: Attention, query: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return attend(x, *OPERANDS[1:]), None

        return (jax.lax.scan(body, query, None, 2)[0] ** 2).sum()

    found, wanted = (
        jax.jit(lambda q, f=f: jax.jvp(jax.grad(functools.partial(loss, f)), (q,), (jnp.cos(q),)))(OPERANDS[0])
        for f in (ours, expected)
    )
    expect_close(found, wanted)


@pytest.mark.parametrize("offset", [0, 1, 2**32 - 3, 2**34 - 7, 2**64 - 9])
def test_random_words_are_those_of_the_kernels(offset: int) -> None:
    seed = 0x0123456789ABCDEF
    halves = np.array([seed, offset], np.uint64).view(np.uint32)
    indices = (np.arange(23, dtype=np.uint64) + np.uint64(offset)).astype(np.uint64)  # wraps, as the kernels' sums
    assert (np.asarray(random_words.words(jnp.asarray(halves), 23)) == philox.words(seed, indices)).all()


def test_what_has_no_tangent_is_refused_in_one_sentence() -> None:
    bounds = jnp.array([0, 5, 16])
    packed = functools.partial(ours, sequences=VariableLength(bounds, bounds, 16, 16))
    arrays = tuple(array[:1] for array in OPERANDS)
    jax.eval_shape(jax.grad(lambda q: packed(q, *arrays[1:]).sum()), arrays[0])
    with pytest.raises(NotSupported, match="forward-mode differentiation of attention with sequences, split rows or"):
        jax.jit(lambda: jax.jvp(packed, arrays, arrays)).lower()
    with pytest.raises(NotSupported, match="a second derivative of attention with sequences, split rows or registered"):
        jax.eval_shape(
            lambda: jax.grad(lambda q: jax.grad(lambda k: packed(q, k, arrays[2]).sum())(arrays[1]).sum())(arrays[0])
        )


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_vmap_of_split_rows_with_a_bias_of_all_keys(strategy: str) -> None:
    """The bias of a device has its own rows and all keys."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = functools.partial(context_parallel_attention, mesh=mesh, context_axis="x", context_strategy=strategy)
    query, bias = draw(40, 3, *SHAPES[0]), draw(41, 1, 4, 16, 16)

    def loss(attend: Attention, query: Any, bias: Any) -> Any:
        return (attend(query, *OPERANDS[1:], bias=bias, mask=Causal(), backend="reference") ** 2).sum()

    found, wanted = (
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, attend), (0, 1)), (0, None)))(query, bias)
        for attend in (split, attention)
    )
    expect_close(found, wanted)
