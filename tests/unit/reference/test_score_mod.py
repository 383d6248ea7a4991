"""Tests of the reference's terms: bias, softcap, ALiBi, sinks, dropout, shared key heads and variable length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn.problem import masks
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.reference.numpy_reference import CuSeqlens, ReferenceScoreMod
from cutlass_py_attn.score_terms.dropout import keep_scale

Array = npt.NDArray[Any]
Sizes = tuple[int, int, int, int, int]

STEP = 1e-5
FULL, CAUSAL, BOTTOM_RIGHT = masks.Full(), masks.Causal(), masks.CausalBottomRight()
BATCH, HEADS = 2, 4
DIM, DIM_VALUE = 3, 2
P = 0.3
SLOPES = np.array([[0.5, 0.25, 0.125, 0.0], [1.0, 0.3, -0.2, 0.1]], np.float32)
SINKS = np.array([0.3, -1.0, 2.0, -np.inf], np.float32)


def drawn(num_queries: int, num_keys: int, heads_key: int = 2, batch: int = BATCH, seed: int = 0) -> tuple[Array, ...]:
    """Float64 query, key, value and grad_output, uncorrelated."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, num_queries, HEADS, DIM))
    key = rng.standard_normal((batch, num_keys, heads_key, DIM))
    value = rng.standard_normal((batch, num_keys, heads_key, DIM_VALUE))
    return query, key, value, rng.standard_normal((batch, num_queries, HEADS, DIM_VALUE))


def biased(*shape: int) -> Array:
    """A bias with a tenth of its pairs hidden."""
    rng = np.random.default_rng(7)
    bias = rng.standard_normal(shape)
    bias[rng.random(shape) < 0.1] = -np.inf
    return bias


def keep(batch: int, head: int, num_queries: int, num_keys: int) -> Array:
    """The same draw for the same sequence and head, whatever else is there."""
    return np.random.default_rng([batch, head]).random((num_queries, num_keys)) > P


def terms_of(name: str, num_queries: int, num_keys: int, sequences: int = BATCH) -> ReferenceScoreMod:
    """The terms of one test case; "all" has every one."""
    every = ReferenceScoreMod(
        bias=biased(sequences, HEADS, num_queries, num_keys),
        softcap=1.5,
        alibi_slopes=SLOPES[np.arange(sequences) % 2],
        sinks=SINKS,
        keep=keep,
        dropout_p=P,
    )
    if name == "dropout":
        return ReferenceScoreMod(keep=keep, dropout_p=P)
    if name == "none":
        return ReferenceScoreMod()
    return every if name == "all" else ReferenceScoreMod(**{name: getattr(every, name)})


NAMES = ("none", "bias", "softcap", "alibi_slopes", "sinks", "dropout", "all")


def by_formula(
    tensors: tuple[Array, ...], mask: masks.Mask, scale: float, terms: ReferenceScoreMod
) -> tuple[Array, Array]:
    """output and logsumexp [B, H, Mq] of full-size terms, an element of the formula at a time."""
    query, key, value = tensors[:3]
    (batch, num_queries, heads, _), num_keys = query.shape, key.shape[1]
    group = heads // key.shape[2]
    output, lse = np.zeros((batch, num_queries, heads, value.shape[3])), np.zeros((batch, heads, num_queries))
    i, j = np.arange(num_queries)[:, None], np.arange(num_keys)[None, :]
    for b, h in np.ndindex(batch, heads):
        scores = scale * query[b, :, h] @ key[b, :, h // group].T
        if terms.softcap:
            scores = terms.softcap * np.tanh(scores / terms.softcap)
        if terms.bias is not None:
            scores = scores + terms.bias[b, h]
        if terms.alibi_slopes is not None:
            scores = scores - float(terms.alibi_slopes[b, h]) * abs(i + num_keys - num_queries - j)
        exps = np.where(mask.materialise(num_queries, num_keys), np.exp(scores), 0)
        total = exps.sum(axis=1) + (0 if terms.sinks is None else math.exp(terms.sinks[h]))
        with np.errstate(divide="ignore"):
            lse[b, h] = np.log(total)
        weights = exps / np.where(total == 0, 1, total)[:, None]
        if terms.keep is not None:
            weights = weights * terms.keep(b, h, num_queries, num_keys) / (1 - float(np.float32(terms.dropout_p)))
        output[b, :, h] = weights @ value[b, :, h // group]
    return output, lse


def passes(tensors: tuple[Array, ...], mask: masks.Mask, terms: ReferenceScoreMod, **options: Any) -> tuple[Array, ...]:
    """output, logsumexp and all five gradients."""
    query, key, value, grad_output = tensors
    output, lse = numpy_reference.forward(query, key, value, mask=mask, score_mod=terms, **options)
    found = numpy_reference.backward(grad_output, query, key, value, output, lse, mask=mask, score_mod=terms, **options)
    return output, lse, *found


def directions(shape: tuple[int, ...], each_element: bool) -> Iterator[Array]:
    """Yields the unit vectors of all elements, or four random unit vectors, to which a wrong element contributes."""
    size = math.prod(shape)
    rng = np.random.default_rng(3)
    for direction in np.eye(size) if each_element else rng.standard_normal((4, size)):
        yield (direction / np.linalg.norm(direction)).reshape(shape)


def check_differences(
    tensors: tuple[Array, ...],
    mask: masks.Mask,
    terms: ReferenceScoreMod,
    scale: float | None = None,
    *,
    each_element: bool = False,
) -> None:
    """Compares every gradient with central differences of sum(output * grad_output) along `directions`."""
    grad_output = tensors[3]
    operands: list[Array | None] = [*tensors[:3], terms.bias, terms.sinks]
    operands = [None if tensor is None else tensor.astype(np.float64) for tensor in operands]

    def loss() -> float:
        query, key, value, bias, sinks = operands
        moved = replace(terms, bias=bias, sinks=sinks)
        return float(
            (numpy_reference.forward(query, key, value, mask=mask, scale=scale, score_mod=moved)[0] * grad_output).sum()
        )

    gradients = passes(tensors, mask, terms, scale=scale)[2:]
    for tensor, gradient in zip(operands, gradients, strict=True):
        assert (tensor is None) == (gradient is None)
        if tensor is None:
            continue
        kept = tensor.copy()
        for direction in directions(tensor.shape, each_element):
            tensor[...] = kept + STEP * direction
            above = loss()
            tensor[...] = kept - STEP * direction
            measured = (above - loss()) / (2 * STEP)
            assert (gradient * direction).sum() == pytest.approx(measured, rel=0, abs=1e-7)
        tensor[...] = kept


@pytest.mark.parametrize("mask", [FULL, BOTTOM_RIGHT, masks.CausalBottomRight(2)], ids=["full", "causal_br", "window"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 5), (5, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_differences(name: str, num_queries: int, num_keys: int, mask: masks.Mask) -> None:
    tensors = drawn(num_queries, num_keys)
    is_smallest = name == "all" and mask == BOTTOM_RIGHT and num_queries > num_keys
    check_differences(tensors, mask, terms_of(name, num_queries, num_keys), scale=0.9, each_element=is_smallest)


@pytest.mark.parametrize("shape", [(1, 1, 4, 1), (1, HEADS, 1, 5), (BATCH, 1, 1, 1), (1, 1, 1, 1)])
def test_gradients_of_a_broadcast_bias_are_the_differences(shape: tuple[int, ...]) -> None:
    bias = np.random.default_rng(1).standard_normal(shape)
    check_differences(drawn(4, 5), CAUSAL, replace(terms_of("all", 4, 5), bias=bias, alibi_slopes=SLOPES[0]))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, BOTTOM_RIGHT, masks.Window(40, 9)], ids=lambda mask: mask.name)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 270), (260, 530)])
@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_formula(name: str, num_queries: int, num_keys: int, mask: masks.Mask) -> None:
    tensors = drawn(num_queries, num_keys)
    terms = terms_of(name, num_queries, num_keys)
    output, lse = numpy_reference.forward(*tensors[:3], mask=mask, scale=-0.7, score_mod=terms)
    expected, expected_lse = by_formula(tensors, mask, -0.7, terms)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6 if terms.keep else 1e-13)
    np.testing.assert_allclose(lse[:, :, :num_queries], expected_lse, rtol=0, atol=1e-12)
    assert np.isposinf(lse[:, :, num_queries:]).all()


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_a_broadcast_bias_has_the_sum_of_the_gradients(axes: tuple[int, ...]) -> None:
    tensors = drawn(300, 270)
    bias = biased(BATCH, HEADS, 300, 270)
    narrow = bias[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
    full = passes(tensors, CAUSAL, ReferenceScoreMod(bias=np.broadcast_to(narrow, bias.shape)))
    found = passes(tensors, CAUSAL, ReferenceScoreMod(bias=narrow))
    for tensor, same in zip((*found[:5],), (*full[:5],), strict=True):
        np.testing.assert_array_equal(tensor, same)
    np.testing.assert_allclose(found[5], full[5].sum(axis=axes, keepdims=True), rtol=0, atol=1e-12)


# Shared key heads


@pytest.mark.parametrize("heads_key", [1, 2, 4])
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_shared_key_heads_are_expanded_ones(heads_key: int, precision: str) -> None:
    query, key, value, grad_output = drawn(20, 30, heads_key)
    group = HEADS // heads_key
    expanded = (query, np.repeat(key, group, axis=2), np.repeat(value, group, axis=2), grad_output)
    terms = terms_of("all", 20, 30)
    found = passes((query, key, value, grad_output), CAUSAL, terms, precision=precision)
    expected = passes(expanded, CAUSAL, terms, precision=precision)
    for place, (tensor, same) in enumerate(zip(found, expected, strict=True)):
        if place in (3, 4):
            same = same.reshape(*same.shape[:2], heads_key, group, -1).sum(axis=3)
            atol, rtol = (1e-13, 0) if precision == "float64" else (1e-6, 2.0**-8)
            np.testing.assert_allclose(tensor, same, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(tensor, same)


# Dropout


@pytest.mark.parametrize("precision", ["float64", "float16"])
def test_everything_dropped_gives_zeros(precision: str) -> None:
    terms = ReferenceScoreMod(keep=lambda b, h, m, n: np.zeros((m, n), np.bool_), dropout_p=1.0, sinks=SINKS)
    assert keep_scale(terms.dropout_p) == 0
    output, lse, *gradients = passes(drawn(5, 7), FULL, terms, precision=precision)
    options: dict[str, Any] = {"mask": FULL, "precision": precision, "score_mod": ReferenceScoreMod(sinks=SINKS)}
    expected = numpy_reference.forward(*drawn(5, 7)[:3], **options)[1]
    np.testing.assert_array_equal(lse, expected)
    for tensor in (output, *(gradient for gradient in gradients if gradient is not None)):
        assert not tensor.any()


def test_dropout_keeps_and_scales() -> None:
    query, key, _, _ = drawn(5, 7)
    # With the identity as values, the output is the weights.
    identity = np.broadcast_to(np.eye(7)[None, :, None], (BATCH, 7, 2, 7))
    whole, lse = numpy_reference.forward(query, key, identity, mask=CAUSAL)
    found, same = numpy_reference.forward(query, key, identity, mask=CAUSAL, score_mod=terms_of("dropout", 5, 7))
    np.testing.assert_array_equal(lse, same)
    for b, h in np.ndindex(BATCH, HEADS):
        np.testing.assert_allclose(found[b, :, h], whole[b, :, h] * keep(b, h, 5, 7) * np.float64(np.float32(1 / 0.7)))


def test_keep_scale_is_that_of_float32() -> None:
    for p in (0.0, 1e-6, 0.22, 0.3, 0.7):
        assert keep_scale(p) == float(np.float32(1 / (1 - np.float64(np.float32(p)))))
    assert keep_scale(1 - 1e-9) == 0


# Rows without keys


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_rows_without_keys(kind: str, sinks: Array | None, precision: str) -> None:
    query, key, value, grad_output = tensors = drawn(7, 4)
    mask = BOTTOM_RIGHT if kind == "mask" else FULL
    bias = np.zeros((1, 1, 7, 4))
    if kind == "bias":
        bias[:, :, :3] = -np.inf
    terms = ReferenceScoreMod(bias=bias, sinks=sinks)
    output, lse, *expected = passes(tensors, mask, terms, precision=precision)
    assert not output[:, :3].any()
    assert output[:, 3:].any()
    for head in range(HEADS):
        assert (lse[:, head, :3] == (-np.inf if sinks is None else sinks[head])).all()
    assert not expected[0][:, :3].any()
    assert not expected[3][:, :, :3].any()
    grad_output[:, :3] = 1e3
    output[:, :3] = np.nan
    for convention in (np.inf, -np.inf, 0.0, np.nan):
        lse[:, :, :3] = convention
        found = numpy_reference.backward(
            grad_output, query, key, value, output, lse, mask=mask, precision=precision, score_mod=terms
        )
        for gradient, same in zip(found, expected, strict=True):
            assert (gradient is None) == (same is None)
            if gradient is not None:
                assert np.isfinite(same).all()
                np.testing.assert_array_equal(gradient, same)


def test_no_keys_at_all_leave_the_sink() -> None:
    tensors = drawn(5, 0)
    output, lse, *gradients = passes(tensors, FULL, replace(terms_of("all", 5, 0), dropout_p=P))
    np.testing.assert_array_equal(lse[:, :, :5], np.broadcast_to(SINKS[None, :, None], (BATCH, HEADS, 5)))
    assert not any(tensor.any() for tensor in (output, *gradients))


# Variable length

CU_Q, CU_K, USED = np.array([1, 5, 5, 8, 12]), np.array([0, 3, 9, 14, 20], np.int32), np.array([3, 2, 0, 7])
TOKENS_Q, TOKENS_K, NUM = 14, 23, 4
LENGTHS = CuSeqlens(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, max_seqlen_q=6, max_seqlen_k=9)
SHORTER = replace(LENGTHS, seqused_k=USED)


def sliced(terms: ReferenceScoreMod, number: int, num_queries: int, num_keys: int) -> ReferenceScoreMod:
    """The terms of one sequence, for a dense problem with a batch of one."""
    bias, slopes = terms.bias, terms.alibi_slopes
    if bias is not None:
        bias = bias[number if bias.shape[0] > 1 else 0][None]
        bias = bias[:, :, : num_queries if bias.shape[2] > 1 else 1, : num_keys if bias.shape[3] > 1 else 1]
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[number]
    its_keep = None if terms.keep is None else (lambda b, h, m, n: keep(number, h, m, n))
    return replace(terms, bias=bias, alibi_slopes=slopes, keep=its_keep, cu_seqlens=None)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, BOTTOM_RIGHT, masks.Window(1, 1)], ids=lambda mask: mask.name)
@pytest.mark.parametrize("lengths", [LENGTHS, SHORTER], ids=["whole", "seqused_k"])
@pytest.mark.parametrize("shape", [(NUM, HEADS, 6, 9), (1, HEADS, 6, 1), (NUM, 1, 1, 9), (1, 1, 1, 1)])
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_variable_length_is_a_loop(
    mask: masks.Mask, lengths: CuSeqlens, shape: tuple[int, ...], precision: str
) -> None:
    tensors = drawn(TOKENS_Q, TOKENS_K, batch=1)
    terms = replace(terms_of("all", 6, 9, NUM), bias=biased(*shape), cu_seqlens=lengths)
    output, lse, *found = passes(tensors, mask, terms, precision=precision)
    assert lse.shape == (NUM, HEADS, 32)
    expected = [np.zeros_like(tensor) for tensor in (output, *found)]
    stops = CU_K[1:] if lengths.seqused_k is None else CU_K[:-1] + USED
    for number in range(NUM):
        rows, keys = slice(CU_Q[number], CU_Q[number + 1]), slice(CU_K[number], stops[number])
        sizes = int(rows.stop - rows.start), int(keys.stop - keys.start)
        its = tuple(tensor[:, part] for tensor, part in zip(tensors, (rows, keys, keys, rows), strict=True))
        one, one_lse, *parts = passes(its, mask, sliced(terms, number, *sizes), precision=precision)
        np.testing.assert_array_equal(lse[number, :, : sizes[0]], one_lse[0, :, : sizes[0]])
        assert np.isposinf(lse[number, :, sizes[0] :]).all()
        for whole, part, place in zip(expected[:4], (one, *parts[:3]), (rows, rows, keys, keys), strict=True):
            whole[:, place] += part
        at = slice(number, number + 1) if shape[0] > 1 else slice(0, 1)
        expected[4][at, :, : sizes[0] if shape[2] > 1 else 1, : sizes[1] if shape[3] > 1 else 1] += parts[3]
        expected[5] += parts[4]
    exact = precision == "float64"
    for tensor, same in zip((output, *found[:3], found[4]), (*expected[:4], expected[5]), strict=True):
        np.testing.assert_allclose(tensor, same, rtol=0, atol=1e-13 if exact else 1e-6)
    np.testing.assert_allclose(found[3], expected[4], rtol=0 if exact else 2.0**-7, atol=1e-13 if exact else 1e-2)


def test_gradients_of_variable_length_are_the_differences() -> None:
    terms = replace(terms_of("all", 6, 9, NUM), bias=biased(NUM, 1, 6, 9), cu_seqlens=SHORTER)
    check_differences(drawn(TOKENS_Q, TOKENS_K, batch=1), BOTTOM_RIGHT, terms)


def test_rows_outside_of_the_sequences_are_not_read() -> None:
    tensors = drawn(TOKENS_Q, TOKENS_K, batch=1)
    terms = replace(terms_of("all", 6, 9, NUM), cu_seqlens=SHORTER)
    expected = passes(tensors, CAUSAL, terms)
    outside_q, outside_k = np.ones(TOKENS_Q, np.bool_), np.ones(TOKENS_K, np.bool_)
    outside_q[CU_Q[0] : CU_Q[-1]] = False
    for start, used in zip(CU_K[:-1], USED, strict=True):
        outside_k[start : start + used] = False
    for tensor, outside in zip(tensors, (outside_q, outside_k, outside_k, outside_q), strict=True):
        tensor[:, outside] = np.nan
    found = passes(tensors, CAUSAL, terms)
    for tensor, same in zip(found, expected, strict=True):
        np.testing.assert_array_equal(tensor, same)
    for place, outside in ((0, outside_q), (2, outside_q), (3, outside_k), (4, outside_k)):
        assert not found[place][:, outside].any()


def test_no_sequences() -> None:
    lengths = CuSeqlens(cu_seqlens_q=np.zeros(1, int), cu_seqlens_k=np.zeros(1, int), max_seqlen_q=3, max_seqlen_k=3)
    output, lse, *gradients = passes(drawn(5, 6, batch=1), FULL, ReferenceScoreMod(cu_seqlens=lengths))
    assert lse.shape == (0, HEADS, 32)
    assert not any(tensor.any() for tensor in (output, *gradients[:3]))


# Low precision


# Half a unit in the last place; the terms add roundings of their own to those of plain attention.
@pytest.mark.parametrize(("precision", "unit"), [("bfloat16", 2.0**-9), ("float16", 2.0**-12), ("float32", 2.0**-24)])
@pytest.mark.parametrize("name", NAMES)
def test_low_loses_what_its_type_loses(name: str, precision: str, unit: float) -> None:
    stored = numpy_reference.DTYPES[precision]
    tensors = tuple(tensor.astype(stored) for tensor in drawn(200, 260))
    terms = terms_of(name, 200, 260)
    if terms.bias is not None:
        terms = replace(terms, bias=terms.bias.astype(stored))
    truths, lows = (passes(tensors, CAUSAL, terms, precision=wanted) for wanted in ("float64", precision))
    for place, (truth, low) in enumerate(zip(truths, lows, strict=True)):
        if truth is None or place == 1:
            continue
        assert low.dtype == np.float32
        # The gradient of sinks, which are float32 in every precision, is not rounded to the type.
        if place != 6:
            np.testing.assert_array_equal(low.astype(stored).astype(np.float32), low)
        loss = np.linalg.norm(low - truth) / np.linalg.norm(truth)
        # A sum over all queries, in float32 alone: how much it loses is the BLAS's too.
        most = 40 if (place, precision) == (6, "float32") else 30
        assert unit / 8 < loss < most * unit


def test_low_stores_what_a_framework_stores() -> None:
    """Head 0 of one sequence, written out with a rounding wherever an eager framework would store a tensor."""

    def stored(values: Array) -> Array:
        return values.astype(numpy_reference.DTYPES["bfloat16"]).astype(np.float32)

    tensors = tuple(stored(tensor) for tensor in drawn(40, 50, HEADS, 1))
    bias = stored(np.random.default_rng(1).standard_normal((1, HEADS, 1, 50)))
    terms = replace(terms_of("all", 40, 50, 1), bias=bias)
    q, k, v, do = (tensor[0, :, 0].copy() for tensor in tensors)
    scale, softcap, sink = np.float32(0.4), np.float32(terms.softcap), np.float32(SINKS[0])
    output, lse, *found = passes(tensors, FULL, terms, precision="bfloat16", scale=0.4)

    scaled_k = stored(scale * k)
    tanh = stored(np.tanh(stored(stored(q @ scaled_k.T) / softcap)))
    distance = abs(np.arange(40)[:, None] + 10 - np.arange(50)[None, :]).astype(np.float32)
    scores = stored(stored(tanh * softcap) + (bias[0, 0] - SLOPES[0, 0] * distance))
    top = np.maximum(scores.max(axis=1, keepdims=True), sink)
    exps, sink_exps = np.exp(scores - top), np.exp(sink - top)
    total = exps.sum(axis=1, keepdims=True) + sink_exps
    weights, multiplier = stored(exps / total), keep(0, 0, 40, 50) * np.float32(keep_scale(terms.dropout_p))
    dropped = stored(weights * multiplier)
    np.testing.assert_array_equal(output[0, :, 0], stored(dropped @ v))
    np.testing.assert_array_equal(lse[0, 0, :40], (top + np.log(total))[:, 0])

    grad_weights = stored(stored(do @ v.T) * multiplier)
    delta = (do * output[0, :, 0]).sum(axis=1, keepdims=True)
    grad_scores = stored(weights * (grad_weights - delta))
    grad_scaled = stored(grad_scores * (1 - tanh * tanh))
    np.testing.assert_array_equal(found[0][0, :, 0], stored(grad_scaled @ scaled_k))
    np.testing.assert_array_equal(found[1][0, :, 0], stored(stored(grad_scaled.T @ q) * scale))
    np.testing.assert_array_equal(found[2][0, :, 0], stored(dropped.T @ do))
    np.testing.assert_array_equal(found[3][0, 0], stored(grad_scores.sum(axis=0, keepdims=True)))
    np.testing.assert_allclose(found[4][0], -stored(stored(sink_exps / total) * delta).sum(), rtol=1e-5)


# What does not fit


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        (ReferenceScoreMod(bias=np.zeros((2, 4, 5))), r"bias: shape \(2, 4, 5\), must be \(2, 4, 5, 7\)"),
        (ReferenceScoreMod(bias=np.zeros((2, 4, 5, 8))), r"bias: shape \(2, 4, 5, 8\), must be \(2, 4, 5, 7\)"),
        (ReferenceScoreMod(softcap=-1.0), "softcap -1.0: must be"),
        (ReferenceScoreMod(softcap=math.nan), "softcap nan: must be"),
        (ReferenceScoreMod(alibi_slopes=np.zeros((1, 3))), r"alibi_slopes: .* must be \(4,\) or \(2, 4\)"),
        (ReferenceScoreMod(sinks=np.zeros(3)), r"sinks: shape \(3,\), must be \(4,\)"),
        (ReferenceScoreMod(dropout_p=1.5, keep=keep), "dropout_p 1.5: must be from 0 to 1"),
        (ReferenceScoreMod(dropout_p=0.5), "dropout_p 0.5: keep must say"),
        (
            ReferenceScoreMod(keep=lambda b, h, m, n: np.ones((n, m), np.bool_)),
            r"keep: returned shape \(7, 5\) .* \(5, 7\)",
        ),
        (ReferenceScoreMod(score_terms={"nothing": SINKS}), "score_terms: nothing must be registered terms"),
        (ReferenceScoreMod(cu_seqlens=LENGTHS), "query: batch 2, must be 1"),
    ],
)
def test_terms_that_do_not_fit_are_refused(terms: ReferenceScoreMod, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        numpy_reference.forward(*drawn(5, 7)[:3], mask=FULL, score_mod=terms)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cu_seqlens_q": CU_Q[:-1]}, "cu_seqlens_k: 5 entries, must be 4"),
        ({"cu_seqlens_q": CU_Q + 3}, "cu_seqlens_q: .* at most 14"),
        ({"cu_seqlens_k": CU_K[::-1]}, "cu_seqlens_k: .* rise"),
        ({"cu_seqlens_k": CU_K.astype(np.float32)}, "cu_seqlens_k: float32 .* integers"),
        ({"seqused_k": USED[1:]}, "seqused_k: 3 entries, must be 4"),
        ({"seqused_k": USED - 1}, "seqused_k: -1 keys from row 9 on"),
        ({"seqused_k": USED + 2}, "seqused_k: 9 keys from row 14 on, must lie within 22 rows"),
        ({"max_seqlen_q": 3}, "max_seqlen_q 3: sequence 0 has 4 rows"),
        ({"max_seqlen_k": 5}, "max_seqlen_k 5: sequence 1 has 6 keys"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    query, key, value, _ = drawn(TOKENS_Q, TOKENS_K - 1, batch=1)
    changed = ReferenceScoreMod(cu_seqlens=replace(LENGTHS, **change))
    with pytest.raises(ValueError, match=text):
        numpy_reference.forward(query, key, value, mask=FULL, score_mod=changed)


def test_key_heads_must_divide_the_heads() -> None:
    query, key, value, _ = drawn(5, 7, heads_key=3)
    with pytest.raises(ValueError, match="key: 3 heads, must be a divisor of query's 4"):
        numpy_reference.forward(query, key, value, mask=FULL)
