"""Tests of the NumPy reference and of inputs.py: derivatives by differences, a tiled form, and every kind of edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.tensors import Shape
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing import inputs
from tests.support import faulty_backward

Array = npt.NDArray[Any]
STEP = 1e-5

FULL, CAUSAL, BOTTOM_RIGHT = masks.Full(), masks.Causal(), masks.CausalBottomRight()
WINDOWS = masks.Causal(3), masks.CausalBottomRight(200), masks.Window(2, 1), masks.Window(130, None)
MASKS = (FULL, CAUSAL, BOTTOM_RIGHT, *WINDOWS)


def label(value: object) -> str:
    """A mask's name with its window."""
    return f"{value.name}-{value.left}-{value.right}" if isinstance(value, masks.Mask) else str(value)


def drawn(shape: Shape, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Float64 operands, uncorrelated."""
    rng = np.random.default_rng(seed)
    query, key, value, grad_output = (rng.standard_normal(shape.of(name)) for name in inputs.NAMES)
    return query, key, value, grad_output


def dense(q: Array, k: Array, v: Array, seen: Array, scale: float) -> tuple[Array, Array]:
    """One head the plain way: output [rows, channels] and logsumexp [rows]."""
    weights = np.where(seen, np.exp(scale * (q @ k.T)), 0)
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total == 0, 1, total)[:, None], np.log(total)


@pytest.mark.parametrize("mask", MASKS, ids=label)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(7, 9), (9, 7), (6, 6), (1, 4), (5, 1)])
@pytest.mark.parametrize("scale", [None, 0.37, -0.8])
def test_gradients_are_the_differences(mask: masks.Mask, num_queries: int, num_keys: int, scale: float | None) -> None:
    query, key, value, grad_output = drawn(Shape(1, num_queries, num_keys, 2, 5, 4))
    operands = [query, key, value]

    def loss() -> float:
        return float((numpy_reference.forward(*operands, mask=mask, scale=scale)[0] * grad_output).sum())

    output, lse = numpy_reference.forward(*operands, mask=mask, scale=scale)
    gradients = numpy_reference.backward(grad_output, *operands, output, lse, mask=mask, scale=scale)
    for tensor, gradient in zip(operands, gradients[:3], strict=True):
        measured = np.zeros_like(tensor)
        for index in np.ndindex(tensor.shape):
            kept = tensor[index]
            tensor[index] = kept + STEP
            above = loss()
            tensor[index] = kept - STEP
            measured[index] = (above - loss()) / (2 * STEP)
            tensor[index] = kept
        np.testing.assert_allclose(gradient, measured, rtol=0, atol=1e-7)


@pytest.mark.parametrize("mask", MASKS, ids=label)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 517), (600, 257)])
def test_forward_is_the_dense_form(mask: masks.Mask, num_queries: int, num_keys: int) -> None:
    query, key, value, _ = drawn(Shape(2, num_queries, num_keys, 2, 16, 24))
    output, lse = numpy_reference.forward(query, key, value, mask=mask, scale=-0.2)
    seen = mask.materialise(num_queries, num_keys)
    for batch, head in np.ndindex(2, 2):
        q, k, v = (tensor[batch, :, head] for tensor in (query, key, value))
        expected, expected_lse = dense(q, k, v, seen, -0.2)
        np.testing.assert_allclose(output[batch, :, head], expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(lse[batch, head, :num_queries], expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=label)
def test_ranges_of_a_mask_are_the_mask(mask: masks.Mask) -> None:
    query, key, value, grad_output = drawn(Shape(2, 300, 217, 4, 8, 8, 2))
    ranges = KeyRanges.of(mask, 300, 217)
    output, lse = numpy_reference.forward(query, key, value, mask=mask)
    for expected, found in zip((output, lse), numpy_reference.forward(query, key, value, mask=ranges), strict=True):
        np.testing.assert_array_equal(found, expected)
    gradients, others = (
        numpy_reference.backward(grad_output, query, key, value, output, lse, mask=given) for given in (mask, ranges)
    )
    for expected, found in zip(gradients[:3], others[:3], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1)])
def test_ranges_of_each_head(shape: tuple[int, int]) -> None:
    """Many ranges are empty; a group of two query heads reads a key head."""
    query, key, value, _ = drawn(Shape(2, 300, 40, 4, 8, 8, 2))
    ranges = KeyRanges(*np.random.default_rng(3).integers(-5, 45, (2, *shape, 300)))
    seen = np.broadcast_to(ranges.materialise(40), (2, 4, 300, 40))
    output, lse = numpy_reference.forward(query, key, value, mask=ranges, scale=0.3)
    for batch, head in np.ndindex(2, 4):
        operands = query[batch, :, head], key[batch, :, head // 2], value[batch, :, head // 2]
        expected, expected_lse = dense(*operands, seen[batch, head], 0.3)
        np.testing.assert_allclose(output[batch, :, head], expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(lse[batch, head, :300], expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=label)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 517), (517, 300)])
def test_five_products_by_tiles_are_the_dense_form(mask: masks.Mask, num_queries: int, num_keys: int) -> None:
    tensors = drawn(Shape(1, num_queries, num_keys, 1, 32, 24))
    query, key, value, grad_output = tensors
    output, lse = numpy_reference.forward(query, key, value, mask=mask)
    gradients = numpy_reference.backward(grad_output, query, key, value, output, lse, mask=mask)
    tiled = faulty_backward.run(tensors, mask, "exact")
    for name, expected in zip(faulty_backward.NAMES, (output, *gradients[:3]), strict=True):
        np.testing.assert_allclose(tiled[name], expected, rtol=0, atol=1e-12)


def test_rows_without_keys_and_padding() -> None:
    query, key, value, grad_output = drawn(Shape(1, 70, 40, 2, 8, 8))
    output, lse = numpy_reference.forward(query, key, value, mask=BOTTOM_RIGHT)
    assert lse.shape == (1, 2, 96)
    assert np.isposinf(lse[:, :, 70:]).all()
    assert np.isneginf(lse[:, :, :30]).all()
    assert np.isfinite(lse[:, :, 30:70]).all()
    assert not output[:, :30].any()
    expected = numpy_reference.backward(grad_output, query, key, value, output, lse, mask=BOTTOM_RIGHT)[:3]
    assert not expected[0][:, :30].any()
    assert all(np.isfinite(gradient).all() for gradient in expected)
    spoilt = output.copy()
    spoilt[:, :30] = np.nan
    for convention in (np.inf, -np.inf, 0.0, np.nan):
        lse[:, :, :30] = convention
        found = numpy_reference.backward(grad_output, query, key, value, spoilt, lse, mask=BOTTOM_RIGHT)[:3]
        for gradient, same in zip(found, expected, strict=True):
            np.testing.assert_array_equal(gradient, same)


@pytest.mark.parametrize("convention", [np.inf, -np.inf])
def test_an_infinite_logsumexp_switches_its_row_off(convention: float) -> None:
    query, key, value, grad_output = drawn(Shape(1, 4, 6, 1, 8, 8))
    output, lse = numpy_reference.forward(query, key, value, mask=FULL)
    lse[0, 0, 2] = convention
    found = numpy_reference.backward(grad_output, query, key, value, output, lse, mask=FULL)[:3]
    grad_output[0, 2] = 0
    expected = numpy_reference.backward(grad_output, query, key, value, output, lse, mask=FULL)[:3]
    assert not found[0][0, 2].any()
    for gradient, same in zip(found, expected, strict=True):
        np.testing.assert_array_equal(gradient, same)


@pytest.mark.parametrize("empty", ["batch", "num_queries", "num_keys", "num_heads"])
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_empty_problems(empty: str, precision: str) -> None:
    sizes = {"batch": 2, "num_queries": 5, "num_keys": 7, "num_heads": 3, "head_dim": 8, "head_dim_value": 16}
    shape = Shape(**(sizes | {empty: 0}))
    for family in inputs.FAMILIES:
        query, key, value, grad_output = inputs.make(family, shape, "bfloat16", CAUSAL, 0)
        output, lse = numpy_reference.forward(query, key, value, mask=CAUSAL, precision=precision)
        assert output.shape == shape.of("output")
        assert not output.any()
        assert lse.shape == shape.logsumexp
        if empty == "num_keys":
            assert np.isneginf(lse[:, :, :5]).all()
            assert np.isposinf(lse[:, :, 5:]).all()
        gradients = numpy_reference.backward(
            grad_output, query, key, value, output, lse, mask=CAUSAL, precision=precision
        )
        for name, gradient in zip(("query", "key", "value"), gradients[:3], strict=True):
            assert gradient.shape == shape.of(name)
            assert not gradient.any()


# Half a unit in the last place, from 2^-9 of bfloat16 to 2^-24 of float32: results lose a few of them.
@pytest.mark.parametrize(("precision", "unit"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12), ("float32", 2.0**-24)])
def test_low_loses_what_its_type_loses(precision: str, unit: float) -> None:
    shape = Shape(2, 200, 260, 2, 64, 32)
    query, key, value, grad_output = inputs.make("gaussian", shape, precision, CAUSAL, 1)

    def results(wanted: str) -> tuple[Array, ...]:
        output, lse = numpy_reference.forward(query, key, value, mask=CAUSAL, precision=wanted)
        found = numpy_reference.backward(grad_output, query, key, value, output, lse, mask=CAUSAL, precision=wanted)
        assert found.bias is None
        assert found.sinks is None
        return output, *found[:3]

    stored = numpy_reference.DTYPES[precision]
    for truth, low in zip(results("float64"), results(precision), strict=True):
        assert truth.dtype == np.float64
        assert low.dtype == np.float32
        np.testing.assert_array_equal(low.astype(stored).astype(np.float32), low)
        loss = np.linalg.norm(low - truth) / np.linalg.norm(truth)
        assert unit / 2 < loss < 12 * unit


def test_blocks_and_dtypes_of_inputs_do_not_matter() -> None:
    query, key, value, _ = inputs.make("gaussian", Shape(1, 40, 50, 2, 8, 8), "bfloat16", FULL, 3)
    wide = [tensor.astype(np.float64) for tensor in (query, key, value)]
    for found, same in zip(
        numpy_reference.forward(query, key, value, mask=FULL), numpy_reference.forward(*wide, mask=FULL), strict=True
    ):
        np.testing.assert_array_equal(found, same)


def test_large_scores_do_not_overflow() -> None:
    query, key, value, _ = drawn(Shape(1, 3, 4, 1, 8, 8))
    output, lse = numpy_reference.forward(1e4 * query, key, value, mask=FULL)
    assert np.isfinite(output).all()
    assert np.isfinite(lse[:, :, :3]).all()


def test_what_does_not_fit_is_refused() -> None:
    query, key, value, grad_output = drawn(Shape(1, 3, 4, 2, 8, 6))
    output, lse = numpy_reference.forward(query, key, value, mask=FULL)
    with pytest.raises(ValueError, match=r"query: .* rank 3"):
        numpy_reference.forward(query[0], key, value, mask=FULL)
    with pytest.raises(ValueError, match=r"key: shape \(1, 4, 2, 7\).* must be \(1, 4, 2, 8\)"):
        numpy_reference.forward(query, key[..., :7], value, mask=FULL)
    with pytest.raises(ValueError, match=r"value: shape \(1, 4, 2, 6\).* must be \(1, 4, 1, 6\)"):
        numpy_reference.forward(query, key[:, :, :1], value, mask=FULL)
    with pytest.raises(ValueError, match="value: "):
        numpy_reference.forward(query, key, value[:, :3], mask=FULL)
    with pytest.raises(ValueError, match="no channels"):
        numpy_reference.forward(query[..., :0], key[..., :0], value, mask=FULL)
    with pytest.raises(ValueError, match="precision 'int8'"):
        numpy_reference.forward(query, key, value, mask=FULL, precision="int8")
    with pytest.raises(ValueError, match="grad_output: "):
        numpy_reference.backward(grad_output[..., :5], query, key, value, output, lse, mask=FULL)
    with pytest.raises(ValueError, match=r"logsumexp: .* must be \(1, 2, 32\)"):
        numpy_reference.backward(grad_output, query, key, value, output, lse[:, :, :3], mask=FULL)


CONSTANT = {("zero_scores", "query"), ("zero_scores", "key"), ("saturated", "key")}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("family", sorted(inputs.FAMILIES))
def test_inputs_repeat_and_differ_by_seed(family: str, dtype: str) -> None:
    shape = Shape(2, 9, 11, 3, 16, 8)
    first, again, other = (inputs.make(family, shape, dtype, BOTTOM_RIGHT, seed) for seed in (1, 1, 2))
    for name, tensor, same, different in zip(inputs.NAMES, first, again, other, strict=True):
        assert tensor.shape == shape.of(name)
        assert tensor.dtype == numpy_reference.DTYPES[dtype]
        np.testing.assert_array_equal(tensor, same)
        assert (tensor != different).any() or (family, name) in CONSTANT


@pytest.mark.parametrize("mask", MASKS, ids=label)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 500), (500, 300)])
def test_needle_rows_have_two_keys(mask: masks.Mask, num_queries: int, num_keys: int) -> None:
    query, key, _, _ = inputs.make("needle", Shape(1, num_queries, num_keys, 1, 128, 8), "bfloat16", mask, 0)
    seen = mask.materialise(num_queries, num_keys)
    # With the identity as values, the output is the weights.
    weights = numpy_reference.forward(query, key, np.eye(num_keys)[None, :, None], mask=mask)[0][0, :, 0]
    for row in np.flatnonzero(seen.sum(axis=1) >= 2):
        strongest = np.sort(weights[row])[-2:]
        np.testing.assert_allclose(strongest, 0.5, atol=0.02)
        assert weights[row, np.flatnonzero(seen[row])[-1]] == strongest[1] or strongest[0] == strongest[1]


def test_equal_keys_and_integers_are_what_they_say() -> None:
    shape = Shape(2, 9, 11, 3, 16, 8)
    key = inputs.make("equal_keys", shape, "float32", FULL, 0)[1]
    assert (key == key[:, :1]).all()
    for tensor in inputs.make("integers", shape, "bfloat16", FULL, 0):
        assert set(np.unique(tensor.astype(np.float32)).tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0}


def test_unknown_family_and_dtype_are_refused() -> None:
    shape = Shape(1, 1, 1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"family 'noise'.*needle"):
        inputs.make("noise", shape, "float16", FULL, 0)
    with pytest.raises(ValueError, match="dtype 'int8'"):
        inputs.make("gaussian", shape, "int8", FULL, 0)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, masks.CausalBottomRight(3), masks.Window(2, 1)], ids=label)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(7, 5), (300, 4)])
def test_gradients_of_output_and_logsumexp_are_the_differences(
    mask: masks.Mask, num_queries: int, num_keys: int
) -> None:
    """Rows without keys too, whose logsumexp is the sink; more rows than a block of queries has."""
    query, key, value, grad_output = drawn(Shape(1, num_queries, num_keys, 2, 5, 4, 1))
    sinks, bias = np.array([0.3, -0.6]), np.random.default_rng(1).standard_normal((1, 2, 1, num_keys))
    operands = {"query": query[:, :, :2], "key": key, "value": value, "bias": bias, "sinks": sinks}
    score_mod = numpy_reference.ReferenceScoreMod(bias=bias, sinks=sinks, softcap=3.0)
    arrays = operands["query"], key, value
    padded = -(-num_queries // 32) * 32
    grad_logsumexp = np.random.default_rng(2).standard_normal((1, 2, padded))

    def loss() -> float:
        output, lse = numpy_reference.forward(*arrays, mask=mask, score_mod=score_mod)
        return float((output * grad_output).sum() + (lse * grad_logsumexp)[:, :, :num_queries].sum())

    output, lse = numpy_reference.forward(*arrays, mask=mask, score_mod=score_mod)
    gradients = numpy_reference.backward(
        grad_output, *arrays, output, lse, mask=mask, score_mod=score_mod, grad_logsumexp=grad_logsumexp
    )
    for name, tensor in operands.items():
        gradient = getattr(gradients, name)
        indices = list(np.ndindex(tensor.shape))
        for index in indices[:: max(1, len(indices) // 40)]:
            kept = tensor[index]
            tensor[index] = kept + STEP
            above = loss()
            tensor[index] = kept - STEP
            measured = (above - loss()) / (2 * STEP)
            tensor[index] = kept
            np.testing.assert_allclose(gradient[index], measured, rtol=0, atol=1e-6)


def test_a_gradient_of_logsumexp_of_another_shape_is_refused() -> None:
    query, key, value, grad_output = drawn(Shape(1, 7, 9, 2, 5, 4))
    output, lse = numpy_reference.forward(query, key, value, mask=FULL)
    with pytest.raises(ValueError, match=r"grad_logsumexp: shape \(1, 2, 7\) does not fit"):
        numpy_reference.backward(
            grad_output, query, key, value, output, lse, mask=FULL, grad_logsumexp=lse[:, :, :7].copy()
        )
