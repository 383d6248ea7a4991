"""quantize_e4m3, and the forward of its codes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import Causal, Full, NotSupported, VariableLength, attention_forward, quantize_e4m3, rotate_rows
from cutlass_py_attn.reference import numpy_reference, quantization

Array = npt.NDArray[Any]
Round = Callable[[Array], Array]

RNG = np.random.default_rng(3)
SHAPE = 2, 30, 4, 48


def operand(*shape: int) -> Any:
    array = RNG.standard_normal(shape or SHAPE).astype(np.float32)
    array[..., 5] *= 40  # an outlier column
    return array


@pytest.mark.parametrize(
    ("granularity", "shape"), [("tensor", (1,)), ("head", (2,)), ("batch_head", (2, 2)), ("row", (2, 30, 2))]
)
def test_the_largest_of_a_group_is_the_largest_code(granularity: str, shape: tuple[int, ...]) -> None:
    array = operand()
    codes, factors = quantize_e4m3(array, granularity=granularity, num_heads_key=2)
    assert (codes.dtype, codes.shape) == (ml_dtypes.float8_e4m3fn, array.shape)
    assert (factors.dtype, factors.shape) == (np.float32, shape)
    rows = np.abs(array).reshape(2, 30, 2, 2, 48).max(axis=(3, 4))
    groups = rows.max(axis=1)
    found = {"tensor": groups.max().reshape(1), "head": groups.max(0), "batch_head": groups, "row": rows}
    largest = found[granularity]
    np.testing.assert_allclose(factors, largest / 448, rtol=1e-6)
    values = quantization.dequantise(codes, factors)
    spread = largest if granularity == "row" else np.broadcast_to(largest, (2, 2))[:, None]
    least = (spread / 448 * 2**-9).repeat(2, 2)[..., None]  # spacing of subnormals
    assert (np.abs(values - array) <= np.maximum(np.abs(array) * 2**-4, least)).all()


def test_sequences_have_factors_of_their_own() -> None:
    array, starts = operand(1, 30, 2, 16), np.array([0, 7, 7, 25])
    codes, factors = quantize_e4m3(array, cu_seqlens=starts)
    assert factors.shape == (3, 2)
    np.testing.assert_allclose(factors[2], np.abs(array[0, 7:25]).max(axis=(0, 2)) / 448, rtol=1e-6)
    assert (factors[1] > 0).all(), "an empty sequence"
    assert (np.abs(codes[0, :7].astype(np.float32)).max(axis=(0, 2)) == 448).all()


@pytest.mark.parametrize("columns", [48, 64, 80, 128])
def test_a_rotation_keeps_products_and_spreads_outliers(columns: int) -> None:
    query, key = operand(1, 9, 1, columns), operand(1, 9, 1, columns)
    rotated = [quantization.rotate(it) for it in (query, key)]
    products = [a[0, :, 0] @ b[0, :, 0].T for a, b in ((query, key), rotated)]
    np.testing.assert_allclose(products[1], products[0], rtol=1e-4, atol=1e-2)
    assert np.abs(rotated[0]).max() < 0.6 * np.abs(query).max()
    codes, factors = quantize_e4m3(query, rotate=True)
    values = quantization.dequantise(codes, factors)
    np.testing.assert_allclose(values, rotated[0], rtol=2**-4, atol=float(factors.max()) * 2**-9)


def test_special_numbers() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32).reshape(1, 1, 1, 4)
    codes, factors = quantize_e4m3(array)
    assert np.isfinite(factors).all()
    assert np.isnan(codes[0, 0, 0, 0].astype(np.float32))
    assert codes[0, 0, 0, 1:3].astype(np.float32).tolist() == [448, -448]
    zeros, factors = quantize_e4m3(np.zeros((1, 2, 1, 16), np.float16))
    assert (factors > 0).all()
    assert not zeros.astype(np.float32).any()


@pytest.mark.parametrize(
    ("options", "objection"),
    [
        (
            {"granularity": "rows"},
            "granularity = 'rows' (str): must be one of tensor, head, batch_head, row; choose one",
        ),
        (
            {"num_heads_key": 3},
            "num_heads_key = 3 (int): must be an int that divides the 4 heads of the array, or None",
        ),
        ({"rotate": 1}, "rotate = 1 (int): must be True or False; pass one of them"),
        ({"cu_seqlens": [0, 30]}, "must be ascending integers from 0 to at most the 30 rows of an array with batch 1"),
    ],
)
def test_objections(options: dict[str, Any], objection: str) -> None:
    with pytest.raises(NotSupported) as caught:
        quantize_e4m3(operand(), **options)
    (reason,) = caught.value.reasons
    assert objection in reason


def test_a_wrong_array_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"must be a NumPy array \(batch, rows, heads, columns\) of float16"):
        quantize_e4m3([1.0])


@pytest.mark.parametrize("granularity", ["tensor", "head", "batch_head"])
def test_the_forward_of_codes_on_the_cpu(granularity: str) -> None:
    """The factors of query belong to the key heads that its heads read."""
    arrays = {"query": operand(), "key": operand(2, 20, 2, 48), "value": operand(2, 20, 2, 32)}
    made = {name: quantize_e4m3(it, granularity=granularity, num_heads_key=2) for name, it in arrays.items()}
    factors = {f"{name}_scale": factor for name, (_, factor) in made.items()}
    codes = [code for code, _ in made.values()]
    output, logsumexp = attention_forward(*codes, mask=Causal(), backend="reference", **factors)
    of_bytes, _ = attention_forward(*(it.view(np.uint8) for it in codes), mask=Causal(), backend="reference", **factors)
    np.testing.assert_array_equal(of_bytes, output)
    values = [quantization.dequantise(code, factor) for code, factor in made.values()]
    truth, lse = numpy_reference.forward(*values, mask=Causal())
    assert output.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(output.astype(np.float64), truth, rtol=2**-8, atol=1e-30)
    np.testing.assert_allclose(logsumexp, lse, rtol=1e-6)
    exact, _ = numpy_reference.forward(*(it.astype(np.float64) for it in arrays.values()), mask=Causal())
    assert np.linalg.norm(truth - exact) < 0.3 * np.linalg.norm(exact), "outliers"


def test_sequences_on_the_cpu() -> None:
    starts = np.array([0, 4, 30], np.int32)
    arrays = [operand(1, 30, 2, 16) for _ in range(3)]
    made = [quantize_e4m3(it, cu_seqlens=starts) for it in arrays]
    sequences = VariableLength(starts, starts, 26, 26)
    names = ("query_scale", "key_scale", "value_scale")
    factors = dict(zip(names, (factor for _, factor in made), strict=True))
    out = np.zeros((1, 30, 2, 16), np.float16)
    output, _ = attention_forward(*(it for it, _ in made), sequences=sequences, backend="reference", out=out, **factors)
    assert output is out
    first = [quantization.dequantise(code, factor, starts)[:, :4] for code, factor in made]
    truth, _ = numpy_reference.forward(*first, mask=Full())
    np.testing.assert_allclose(output[:, :4].astype(np.float64), truth, rtol=2**-10, atol=1e-5)


def inputs_of(kind: str) -> list[Any]:
    """Query, key and value: normal, with a few large elements or a large column, or with a needle."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((1, rows, heads, 64)).astype(np.float32) for rows, heads in ((32, 4), (1024, 2), (1024, 2))
    )
    if kind == "elements":
        for array in (query, key):
            array += rng.standard_normal(array.shape).astype(np.float32) * 10 * (rng.random(array.shape) < 0.001)
    if kind == "column":
        key[..., 3] *= 20
        query[..., 3] *= 0.05
    if kind == "needle":
        query = 2 * np.repeat(key[:, 100:132], 2, 2)
    return [query, key, value]


def error_of(kind: str, codes_of: str, *, rotate: bool = False) -> float:
    """Relative error of the output. codes_of: "operands", or the granularity of the scales of a cache."""
    query, key, value = inputs_of(kind)
    truth, _ = numpy_reference.forward(*(it.astype(np.float64) for it in (query, key, value)), mask=Full())
    scales: dict[str, Any] = {}
    if codes_of == "operands":
        query, scales["query_scale"] = quantize_e4m3(query, num_heads_key=2, rotate=rotate)
    else:
        query = (rotate_rows(query) if rotate else query).astype(np.float16)
    granularity = "batch_head" if codes_of == "operands" else codes_of
    key, scales["key_scale"] = quantize_e4m3(key, granularity=granularity, rotate=rotate)
    value, scales["value_scale"] = quantize_e4m3(value, granularity=granularity)
    output, _ = attention_forward(query, key, value, backend="reference", **scales)
    return float(np.linalg.norm(output.astype(np.float64) - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize(
    ("kind", "errors"),
    [
        ("normal", (0.049, 0.046, 0.039, 0.038, 0.037)),
        ("elements", (0.085, 0.051, 0.078, 0.049, 0.031)),
        ("column", (0.048, 0.095, 0.039, 0.078, 0.038)),
        ("needle", (0.026, 0.026, 0.026, 0.026, 0.025)),
    ],
)
def test_errors_of_outliers_and_needles(kind: str, errors: tuple[float, ...]) -> None:
    """Those of docs/fp8.md."""
    found = [error_of(kind, of, rotate=rotate) for of in ("operands", "head") for rotate in (False, True)]
    np.testing.assert_allclose([*found, error_of(kind, "row")], errors, atol=1e-3)


def by_head(array: Array) -> Array:
    """The numbers that the e4m3 codes of one head mean."""
    scale = np.abs(array).max() / 448
    return (array / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale


def by_tile(array: Array) -> Array:
    """The same with a scale for each tile of 64 x 128."""
    tiles = [
        [by_head(tile) for tile in np.split(rows, len(array) // 128, 1)] for rows in np.split(array, len(array) // 64)
    ]
    return np.block(tiles)


def by_row(array: Array) -> Array:
    """The same with 256 for the largest element of a row."""
    largest = array.max(1, keepdims=True) / 256
    return (array / largest).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float) * largest


def to_bfloat16(array: Array) -> Array:
    return array.astype(np.float32).astype(ml_dtypes.bfloat16).astype(float)


def unrounded(array: Array) -> Array:
    return array


@pytest.mark.parametrize(
    ("operand", "weights", "grad_scores", "errors"),
    [
        (by_head, by_row, by_tile, (0.066, 0.066, 0.053)),
        (unrounded, by_row, by_tile, (0.026, 0.026, 0.024)),
        (to_bfloat16, to_bfloat16, to_bfloat16, (0.004, 0.004, 0.003)),
    ],
)
def test_errors_of_gradients(operand: Round, weights: Round, grad_scores: Round, errors: tuple[float, ...]) -> None:
    """Those of docs/fp8.md, of gradients from rounded operands, P and dS."""
    inputs = np.random.default_rng(0).standard_normal((4, 1024, 128))

    def gradients(operands: Sequence[Array], weights: Round, grad_scores: Round) -> list[Array]:
        query, key, value, grad_output = operands
        scores = query @ key.T / np.sqrt(128)
        probabilities = np.exp(scores - np.log(np.exp(scores).sum(1, keepdims=True)))
        grad_probabilities = grad_output @ value.T
        delta = (probabilities * grad_probabilities).sum(1, keepdims=True)
        rounded = grad_scores(probabilities * (grad_probabilities - delta))
        return [rounded @ key, rounded.T @ query, weights(probabilities).T @ grad_output]

    truth = gradients(list(inputs), unrounded, unrounded)
    found = gradients([operand(each) for each in inputs], weights, grad_scores)
    measured = [np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(found, truth, strict=True)]
    np.testing.assert_allclose(measured, errors, atol=1e-3)


def test_rotated_rows_keep_their_dtype_and_products() -> None:
    query, key = operand().astype(np.float16), operand().astype(np.float16)
    rotated = [rotate_rows(it) for it in (query, key)]
    assert {it.dtype for it in rotated} == {np.dtype(np.float16)}
    products = [np.einsum("bqhd,bkhd->bhqk", a.astype(float), b.astype(float)) for a, b in ((query, key), rotated)]
    assert np.linalg.norm(products[1] - products[0]) < 2e-3 * np.linalg.norm(products[0])
    with pytest.raises(NotSupported, match=r"must be a NumPy array \(..., columns\) of float16"):
        rotate_rows(np.zeros(3, np.int32))
