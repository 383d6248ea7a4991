"""Tests of dot_product_attention: values, gradients and residual are those of jax.nn.dot_product_attention."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.errors import NotSupported
from tests.support import fakes
from tests.support.bad_calls import Unreadable
from tests.support.selected_keys import selected_keys

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

from cutlass_py_attn.jax import dot_product_attention  # noqa: E402

B, T, S, N, K, D = 2, 9, 12, 4, 2, 8
KEY = jax.random.key(0)


def draw(number: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32))


def operands() -> tuple[Any, Any, Any]:
    return draw(1, B, T, N, D), draw(2, B, S, K, D), draw(3, B, S, K, D)


ours = functools.partial(dot_product_attention, backend="reference")
theirs = jax.nn.dot_product_attention
VISIBLE = jnp.asarray(np.random.default_rng(0).random((B, 1, T, S)) < 0.7).at[..., 0].set(True)
QUERIES, KEYS = jnp.array([9, 4]), jnp.array([7, 12])
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True, "scale": 0.2},
    "bias": {"bias": draw(4, N, T, S)},
    "mask": {"mask": VISIBLE},
    "mask and bias": {"mask": VISIBLE[0, 0], "bias": draw(4, B, 1, T, S), "is_causal": True},
    "lengths": {"query_seq_lengths": QUERIES, "key_value_seq_lengths": KEYS},
    "lengths of keys, causal": {"key_value_seq_lengths": KEYS, "is_causal": True},
    "lengths of queries": {"query_seq_lengths": QUERIES},
    "lengths and bias": {"query_seq_lengths": QUERIES, "key_value_seq_lengths": KEYS, "bias": draw(4, 1, 1, T, S)},
    "lengths and mask": {"key_value_seq_lengths": KEYS, "mask": VISIBLE},
    "causal window": {"local_window_size": 3, "is_causal": True},
    "window": {"local_window_size": (4, 5)},
    "window and lengths": {"local_window_size": (4, 5), "key_value_seq_lengths": jnp.array([9, 12])},
}


def all_results(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Returns output, the residual of used rows, and the gradients of everything that is differentiable."""
    arrays = {"bias": options["bias"]} if "bias" in options else {}
    fixed = {name: value for name, value in options.items() if name not in arrays}

    def loss(operands: Any, arrays: Any) -> Any:
        output, residual = function(*operands, **arrays, **fixed, return_residual=True)
        return jnp.sum(jnp.sin(output)), (output, residual)

    gradients, (output, residual) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(operands(), arrays)
    used = np.arange(T) < np.asarray(options.get("query_seq_lengths", jnp.full(B, T)))[:, None]
    return output, np.asarray(residual)[used], gradients, function(*operands(), **options)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_results_are_those_of_jax(options: dict[str, Any]) -> None:
    for one, other in zip(
        jax.tree.leaves(all_results(ours, options)), jax.tree.leaves(all_results(theirs, options)), strict=True
    ):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [(0, 0), (0, 5), (5, 0)])
def test_windows_that_end_at_the_diagonal(window: tuple[int, int]) -> None:
    query, key, value = operands()
    found, expected = (each(query, key[:, :T], value[:, :T], local_window_size=window) for each in (ours, theirs))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


def test_lengths_are_not_repacked() -> None:
    """The kernels get the padded arrays as they lie, with the lengths beside them."""
    built = []

    def kernels(build: Any) -> Any:
        built.append(build)
        return fakes.artifact(build)

    call = functools.partial(dot_product_attention, kernels=kernels, arch="sm_90", key_value_seq_lengths=KEYS)
    program = jax.jit(call).lower(*operands()).as_text()
    assert [build.features for build in built] == [("grouped", "seqused", "varlen")]
    assert not re.search(r"stablehlo\.(gather|scatter|dynamic_slice|concatenate)", program)


def test_lengths_on_a_mesh_that_splits_the_batch() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    by_batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    options: dict[str, Any] = {"query_seq_lengths": QUERIES, "key_value_seq_lengths": KEYS}
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(ours, **options))(*(jax.device_put(a, by_batch) for a in operands()))
    assert found.sharding.is_equivalent_to(by_batch, 4)
    np.testing.assert_allclose(np.asarray(found), np.asarray(theirs(*operands(), **options)), rtol=1e-5, atol=1e-5)


def test_without_a_batch_axis_and_in_half_precision() -> None:
    arrays = [array[0].astype("float16") for array in operands()]
    found, residual = ours(*arrays, key_value_seq_lengths=KEYS[:1], return_residual=True)
    expected, expected_residual = theirs(*arrays, key_value_seq_lengths=KEYS[:1], return_residual=True)
    assert (found.shape, residual.shape, residual.dtype) == ((T, N, D), (T, N), "float16")
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=4e-3)
    np.testing.assert_allclose(np.asarray(residual), np.asarray(expected_residual), atol=4e-3)
    masked = ours(*arrays, mask=VISIBLE[0])
    np.testing.assert_allclose(np.asarray(masked), np.asarray(theirs(*arrays, mask=VISIBLE[0])), atol=4e-3)


HIDDEN = np.random.default_rng(5).random((B, 1, T, S)) < 0.6
HIDDEN[:, :, 3] = HIDDEN[..., 5] = False  # a row that sees no key, and a key that no row sees
PARTS: dict[str, dict[str, Any]] = {
    "bias": {"bias": draw(4, 1, N, T, S)},
    "mask": {"mask": HIDDEN},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (6, 5)},
    "queries": {"query_seq_lengths": np.array([9, 4])},
    "keys": {"key_value_seq_lengths": np.array([0, 7])},  # a sequence of length 0
}


def visible_pairs(options: dict[str, Any]) -> Any:
    """Returns which keys each query sees, (batch, num_heads, num_queries, num_keys)."""
    row, column = np.arange(T)[:, None], np.arange(S)
    visible = np.broadcast_to(options.get("mask", np.ones((1, 1, T, S), bool)), (B, N, T, S)).copy()
    left, right = options.get("local_window_size", (T, S))
    visible &= (column >= row - left) & (column <= row + (0 if options.get("is_causal") else right))
    visible &= row < options.get("query_seq_lengths", np.array([T] * B))[:, None, None, None]
    return visible & (column < options.get("key_value_seq_lengths", np.array([S] * B))[:, None, None, None])


@pytest.mark.parametrize("is_causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("has_window", [False, True], ids=["no window", "window"])
def test_every_way_to_hide_keys(is_causal: bool, has_window: bool) -> None:
    """Sixteen sets of arguments, of sixty-four: values, residuals and gradients of the float64 formula.

    Rows and keys that are hidden have results and gradients of exactly 0, also for an infinite gradient of their -inf.
    """
    arrays = operands()
    of_output, of_residual = draw(5, B, T, N, D), draw(6, B, T, N)
    fixed = (["causal"] if is_causal else []) + (["window"] if has_window else [])
    for chosen in itertools.product((False, True), repeat=4):
        names = [name for name, is_chosen in zip(("bias", "mask", "queries", "keys"), chosen, strict=True) if is_chosen]
        options = {name: value for part in (*fixed, *names) for name, value in PARTS[part].items()}
        differentiated = [*arrays, *([options["bias"]] if "bias" in options else [])]

        def call(*given: Any, options: dict[str, Any] = options) -> Any:
            terms = {"bias": given[3]} if len(given) > 3 else {}
            return ours(*given[:3], **options | terms, return_residual=True)

        (output, residual), pull = jax.vjp(call, *differentiated)
        visible = visible_pairs(options)
        sees_keys = np.swapaxes(visible.any(-1), 1, 2)
        gradients = pull((of_output, jnp.where(sees_keys, of_residual, jnp.nan)))
        expected = selected_keys(arrays, visible, options.get("bias"), of_output, np.where(sees_keys, of_residual, 0))
        found = dict(zip(expected, (output, residual, *gradients), strict=False))
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=2e-5, err_msg=f"{name}, {names}")
        assert not np.asarray(found["output"])[~sees_keys].any()
        assert not np.asarray(found["query"])[~sees_keys].any()
        seen_keys = visible.reshape(B, K, N // K, T, S).any((2, 3)).transpose(0, 2, 1)
        assert not np.asarray(found["key"])[~seen_keys].any()
        assert not np.asarray(found["value"])[~seen_keys].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_selects_in_half_precision(dtype: str) -> None:
    """A hidden key changes nothing, whatever its score, its bias and its value."""
    query, key, value = (array.astype(dtype) for array in operands())
    bias = jnp.zeros((1, 1, 1, S), dtype).at[..., :3].set(jnp.finfo(dtype).min)  # as frameworks hide padding
    causal = np.tril(np.ones((T, S), bool))
    found = ours(query, key, value, bias=bias, mask=causal)
    future = ours(query, key.at[:, 1:].set(30), value.at[:, 1:].add(5), bias=bias, mask=causal)
    if dtype == "float16":  # whose least number is an ordinary logit
        np.testing.assert_array_equal(found[:, 0], jnp.repeat(value[:, 0], N // K, axis=1))
    np.testing.assert_array_equal(found[:, 0], future[:, 0])
    large = {"query": jnp.full_like(query, 200), "key": key.at[:, 7:].set(200), "value": value}  # logits of 113000
    lengths = {"key_value_seq_lengths": jnp.array([7, 7]), "local_window_size": (8, 8)}
    expected = ours(large["query"], key[:, :7], value[:, :7], local_window_size=(8, 8), mask=jnp.ones((T, 7), bool))
    np.testing.assert_array_equal(ours(**large, **lengths), expected)


def test_lengths_beyond_the_arrays_are_the_whole_arrays() -> None:
    found = ours(*operands(), key_value_seq_lengths=jnp.array([7, 99]))
    np.testing.assert_array_equal(found, ours(*operands(), key_value_seq_lengths=KEYS))


def test_options_of_attention() -> None:
    dropped = ours(*operands(), dropout_p=0.5, dropout_key=KEY)
    assert bool((dropped != ours(*operands())).any())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "query": ({"query": "x"}, "query = 'x' (str): must be an array (batch, length, heads, head_dim)"),
    "rank": ({"key": jnp.ones((3, 4))}, "it has 2 axes; reshape it"),
    "bias": ({"bias": "x"}, "bias = 'x' (str): must be an array of at most 4 axes"),
    "bias of five axes": ({"bias": jnp.ones((1,) * 5)}, "must be an array of at most 4 axes"),
    "bias of another shape": ({"bias": jnp.ones((1, 1, T, S + 1))}, "bias.shape = "),
    "mask of another shape": (
        {"mask": jnp.ones((1, 1, T, S + 1), bool)},
        "mask.shape = (1, 1, 9, 13): must broadcast",
    ),
    "mask of another shape with lengths": (
        {"mask": jnp.ones((S + 1,), bool), "key_value_seq_lengths": KEYS},
        "mask.shape = (13,): must broadcast to (2, ",
    ),
    "mask and bias of other shapes": (
        {"mask": jnp.ones((1, 1, T, S), bool), "bias": jnp.ones((1, 1, T, S + 1))},
        "bias.shape = (1, 1, 9, 13): must broadcast",
    ),
    "mask of numbers": (
        {"mask": jnp.ones((1, 1, T, S))},
        "must be bool, True where a key is visible; pass mask.astype(bool) of ones",
    ),
    "is_causal": ({"is_causal": 1}, "is_causal = 1 (int): must be True or False"),
    "lengths of another batch": ({"query_seq_lengths": jnp.array([1])}, "must be an integer array of shape (2,)"),
    "lengths of another type": ({"key_value_seq_lengths": jnp.ones(2)}, "must be an integer array of shape (2,)"),
    "lengths str": ({"key_value_seq_lengths": "x"}, "key_value_seq_lengths = 'x' (str): must be an integer array"),
    "window": ({"local_window_size": -1}, "local_window_size = -1 (int): must be an int of at least 0"),
    "window with one wrong edge": ({"local_window_size": (4, -1)}, "local_window_size = (4, -1): must be an"),
    "window of three": ({"local_window_size": (1, 2, 3)}, "local_window_size = (1, 2, 3): must be"),
    "window beside the diagonal": (
        {"local_window_size": (1, 2)},
        "with 9 queries and 12 keys: must reach the diagonal",
    ),
    "sequences": ({"sequences": VariableLength(0, 0, 1, 1)}, "must be key_value_seq_lengths here"),
    "scale": ({"scale": "x"}, "scale = 'x' (str): must be a number"),
    "bool bias": (
        {"bias": VISIBLE},
        "must be of floating point, for a bias is added, and True would add 1; pass it as",
    ),
    "split rows": ({"context_axis": "x"}, "context_axis = 'x' (str): must be absent here; call `attention`"),
    "logsumexp": ({"return_logsumexp": True}, "return_logsumexp = True: must be return_residual here; rename it"),
    "residual": ({"return_residual": "no"}, "return_residual = 'no' (str): must be True or False; pass one of them"),
    "residual array": ({"return_residual": np.ones(2)}, "return_residual = array of shape (2,) and dtype float64"),
    "an operand that raises": ({"key": Unreadable("shape")}, "key = "),
    "a module": ({"value": np}, "value = <module 'numpy'"),
    "implementation": ({"implementation": "xla"}, "option = 'implementation' (str)"),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD)
def test_bad_arguments(changes: dict[str, Any], text: str) -> None:
    arguments = dict(zip(("query", "key", "value"), operands(), strict=True)) | changes
    with pytest.raises(NotSupported, match=re.escape(text)):
        ours(**arguments)


def test_every_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(NotSupported) as caught:
        ours(*operands(), is_causal=2, mask=jnp.ones((T, S)), local_window_size="x", query_seq_lengths=3)
    assert [reason.split()[0] for reason in caught.value.reasons] == [
        "mask",
        "is_causal",
        "query_seq_lengths",
        "local_window_size",
    ]


def test_the_residual_is_differentiable() -> None:
    """Against its formula: JAX's own residual has a gradient of 0."""
    bias, lengths = CASES["bias"]["bias"], jnp.array([7, 12])

    def formula(query: Any, key: Any, _: Any) -> Any:
        scores = jnp.einsum("btnd,bsnd->btns", query, jnp.repeat(key, N // K, 2), precision="highest") / D**0.5
        scores += jnp.swapaxes(bias, 0, 1)
        used = jnp.arange(S) < lengths[:, None, None, None]
        return jax.nn.logsumexp(jnp.where(used & (jnp.arange(S) <= jnp.arange(T)[:, None, None]), scores, -jnp.inf), -1)

    def residual(*arrays: Any) -> Any:
        options = {"bias": bias, "is_causal": True, "key_value_seq_lengths": lengths}
        return ours(*arrays, **options, return_residual=True)[1]

    found, expected = (
        jax.grad(lambda *arrays, each=each: jnp.sum(jnp.sin(each(*arrays))), (0, 1, 2))(*operands())
        for each in (residual, formula)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)
