"""Tests of torch_ops: the results of each operator against the NumPy reference, with its mask as an explicit bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn import torch_ops as to
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import masks
from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.score_terms.dropout import Dropout, keep_mask
from cutlass_py_attn.torch_ops import layouts
from cutlass_py_attn.torch_ops.adapter import dropout_of

Array = np.ndarray[Any, Any]
B, H, D, DV = 2, 4, 8, 12
SEED, OFFSET = 42, 5
STARTS = [[0, 5, 5, 38], [0, 7, 9, 40]]
CPU: dict[str, Any] = {"backend": "reference"}


def drawn(*shape: int, dtype: Any = "f4", seed: int = 0) -> Array:
    """Returns normal random numbers, different for each shape and seed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def operands(mq: int, mk: int, hk: int = H, dtype: Any = "f4") -> tuple[Array, Array, Array, Array]:
    """Returns query, key, value and grad_out, (batch, seqlen, heads, head_dim)."""
    rows = [
        drawn(B, m, h, d, dtype=dtype, seed=i) for i, (m, h, d) in enumerate(((mq, H, D), (mk, hk, D), (mk, hk, DV)))
    ]
    return rows[0], rows[1], rows[2], drawn(B, mq, H, DV, dtype=dtype, seed=9)


def expected(tensors: tuple[Array, ...], seen: Array, **terms: Any) -> list[Array]:
    """Returns output, logsumexp and the gradients of query, key, value and bias of dense tensors.

    seen: mask (Mq, Mk) bool, applied as a bias. terms: bias, softcap, scale, dropout_p; base: index of the first random
    word of (batch, head) (0, 0); stride: number of random words of a head.
    """
    query, key, value, grad_out = (tensor.astype("f8") for tensor in tensors)
    mq, mk = query.shape[1], key.shape[1]
    bias = np.where(seen, terms.get("bias", 0.0), -np.inf).astype("f8")
    bias = np.broadcast_to(bias, (query.shape[0], query.shape[2], mq, mk)).copy()
    dropout = Dropout(terms.get("dropout_p", 0.0), SEED, OFFSET)
    base, stride = terms.get("base", 0), terms.get("stride", mq * mk)

    def keep(batch: int, head: int, *size: int) -> Array:
        return keep_mask(dropout, base + (batch * query.shape[2] + head) * stride, *size)

    given = numpy_reference.ReferenceScoreMod(
        bias=bias, softcap=terms.get("softcap", 0.0), keep=keep if dropout.is_active else None,
        dropout_p=dropout.dropout_p,
    )  # fmt: skip
    options: Any = {"mask": masks.Full(), "scale": terms.get("scale"), "score_mod": given}
    output, logsumexp = numpy_reference.forward(query, key, value, **options)
    gradients = numpy_reference.backward(grad_out, query, key, value, output, logsumexp, **options)
    assert gradients.bias is not None
    return [output, logsumexp, *gradients[:3], gradients.bias]


def same(found: Any, wanted: Array, dtype: Any = np.float32) -> None:
    """Asserts equal shapes and dtypes, and values equal up to the rounding of the dtype."""
    assert (found.shape, found.dtype) == (wanted.shape, np.dtype(dtype))
    rounding = 2e-2 if np.dtype(dtype).itemsize == 2 else 2e-5
    np.testing.assert_allclose(found.astype("f8"), wanted, rtol=rounding, atol=rounding)


def diagonal(mq: int, mk: int, offset: int = 0) -> Array:
    """Returns key - query - offset of every (query, key)."""
    return np.arange(mk)[None, :] - np.arange(mq)[:, None] - offset


def heads_first(*tensors: Array) -> list[Array]:
    """Returns (B, M, H, K) tensors as views (B, H, M, K)."""
    return [np.swapaxes(tensor, 1, 2) for tensor in tensors]


LENGTHS = [(5, 9), (9, 5), (33, 40), (1, 7), (64, 32)]


@pytest.mark.parametrize(("mq", "mk"), LENGTHS)
@pytest.mark.parametrize(("kind", "window"), [(0, None), (0, 0), *product((1, 2), (None, 0, 1, 3))])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_efficient_dense(mq: int, mk: int, kind: int, window: int | None, dropout_p: float) -> None:
    tensors = operands(mq, mk)
    *qkv, grad_out = tensors
    bias = drawn(B, H, mq, mk, seed=3)
    away = diagonal(mq, mk, mk - mq if kind == 2 else 0)
    seen = (away <= 0 if kind else away == away) & (away > -window if window else True)
    wanted = expected(tensors, seen, bias=bias, scale=0.3, dropout_p=dropout_p)
    forward = to.efficient_attention_forward(
        *qkv, bias, None, None, 77, None, dropout_p, kind, True, scale=0.3, window_size=window, philox_seed=SEED,
        philox_offset=OFFSET, **CPU,
    )  # fmt: skip
    output, logsumexp, *rest = forward
    assert rest == [SEED, OFFSET, mq, mk]
    same(output, wanted[0])
    same(logsumexp, wanted[1])
    found = to.efficient_attention_backward(
        grad_out, *qkv, bias, output, None, None, mq, mk, logsumexp, dropout_p, SEED, OFFSET, kind, True, scale=0.3,
        window_size=window, **CPU,
    )  # fmt: skip
    for gradient, right in zip(found, wanted[2:], strict=True):
        same(gradient, right)


def of_sequences(
    seen: Callable[[int, int], Array], tensors: tuple[Array, ...], **terms: Any
) -> Iterator[tuple[slice, slice, list[Array]]]:
    """Yields the slices and `expected` of each sequence of STARTS; dropout is indexed by the maximal lengths."""
    mq, mk = (max(b - a for a, b in pairwise(side)) for side in STARTS)
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(*map(pairwise, STARTS), strict=True)):
        query, key, value, grad_out = tensors
        part = (query[:, q0:q1], key[:, k0:k1], value[:, k0:k1], grad_out[:, q0:q1])
        stride = mq * mk
        wanted = expected(part, seen(q1 - q0, k1 - k0), base=b * H * stride, stride=stride, **terms)
        yield slice(q0, q1), slice(k0, k1), wanted


def variable(extra: int = 0) -> tuple[tuple[Array, ...], list[Array]]:
    """Returns tensors (1, tokens, heads, head_dim) with `extra` tokens after the last sequence, and STARTS."""
    sizes = STARTS[0][-1] + extra, STARTS[1][-1] + extra
    shapes = ((sizes[0], D), (sizes[1], D), (sizes[1], DV), (sizes[0], DV))
    tensors = tuple(drawn(1, m, H, d, seed=i) for i, (m, d) in enumerate(shapes))
    return tensors, [np.array(side, np.int32) for side in STARTS]


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("longest", [(33, 31), (35, None)])
def test_efficient_variable_length(kind: int, dropout_p: float, longest: tuple[int, int | None]) -> None:
    tensors, bounds = variable(2)
    *qkv, grad_out = tensors
    drop = {} if not dropout_p else {"philox_seed": SEED, "philox_offset": OFFSET}
    output, logsumexp, seed, offset, *lengths = to.efficient_attention_forward(
        *qkv, None, *bounds, *longest, dropout_p, kind, True, **drop, **CPU
    )
    assert lengths == [longest[0], longest[1] or 42]
    found = to.efficient_attention_backward(
        grad_out, *qkv, None, output, *bounds, *lengths, logsumexp, dropout_p, seed, offset, kind, True, **CPU
    )
    assert found[3] is None
    if dropout_p and longest != (33, 31):
        return  # `of_sequences` indexes dropout by the true maximal lengths

    def seen(mq: int, mk: int) -> Array:
        return diagonal(mq, mk, mk - mq if kind == 2 else 0) <= (0 if kind else mk)

    for b, (q, k, wanted) in enumerate(of_sequences(seen, tensors, dropout_p=dropout_p)):
        same(output[:, q], wanted[0])
        same(logsumexp[b, :, : wanted[1].shape[2]], wanted[1][0])
        for gradient, rows, right in zip(found, (q, k, k), wanted[2:5], strict=False):
            same(gradient[:, rows], right)


def test_efficient_seqlen_k_hides_keys_in_both_directions() -> None:
    tensors, bounds = variable()
    *qkv, grad_out = tensors
    used = np.array([3, 0, 30], np.int32)
    output, logsumexp, *_ = to.efficient_attention_forward(
        *qkv, None, *bounds, 33, 31, 0.0, 2, True, seqlen_k=used, **CPU
    )
    found = to.efficient_attention_backward(
        grad_out, *qkv, None, output, *bounds, 33, 31, logsumexp, 0.0, 0, 0, 2, False, seqlen_k=used, **CPU
    )
    part = tuple(t[:, 5:38] if t.shape[1] == 38 else t[:, 9:39] for t in tensors)
    wanted = expected(part, diagonal(33, 30, -3) <= 0)
    same(output[:, 5:38], wanted[0])
    same(found[1][:, 9:39], wanted[3])
    assert not found[1][:, 39:].any()


BIASES = [(9,), (5, 9), (1, 9), (5, 1), (H, 5, 9), (1, 5, 9), (B, 1, 1, 9), (B, H, 5, 9)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_sdpa_bias(shape: tuple[int, ...], causal: bool, dropout_p: float) -> None:
    tensors = operands(5, 9, hk=2)
    *qkv, grad_out = heads_first(*tensors)
    bias = drawn(*shape, seed=4)
    wanted = expected(tensors, diagonal(5, 9) <= (0 if causal else 9), bias=bias, dropout_p=dropout_p)
    output, logsumexp, seed, offset = to.scaled_dot_product_efficient_attention(
        *qkv, bias, True, dropout_p, causal, philox_seed=SEED, philox_offset=OFFSET, **CPU
    )
    same(output, np.swapaxes(wanted[0], 1, 2))
    same(logsumexp, wanted[1])
    assert np.swapaxes(output, 1, 2).flags.c_contiguous
    gradients = to.scaled_dot_product_efficient_attention_backward(
        grad_out, *qkv, bias, output, logsumexp, seed, offset, dropout_p, [True] * 4, causal, **CPU
    )
    for gradient, right in zip(gradients, heads_first(*wanted[2:5]), strict=False):
        same(gradient, right)
    summed = tuple(i for i, size in enumerate((1,) * (4 - len(shape)) + shape) if size == 1)
    same(gradients[3], wanted[5].sum(axis=summed).reshape(shape))


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("dtype", ["f2", "f4", ml_dtypes.bfloat16])
def test_sdpa_bool_mask(shape: tuple[int, ...], dtype: Any) -> None:
    tensors = operands(5, 9, dtype=dtype)
    *qkv, grad_out = heads_first(*tensors)
    visible = drawn(*shape, seed=7) > 0
    wanted = expected(tensors, np.broadcast_to(visible, (B, H, 5, 9)))
    output, logsumexp, seed, offset = to.scaled_dot_product_efficient_attention(*qkv, visible, True, **CPU)
    same(output, np.swapaxes(wanted[0], 1, 2), dtype)
    asked = [False, True, False, False]
    found = to.scaled_dot_product_efficient_attention_backward(
        grad_out, *qkv, visible, output, logsumexp, seed, offset, 0.0, asked, **CPU
    )
    same(found[1], np.swapaxes(wanted[3], 1, 2), dtype)
    assert [gradient is None for gradient in found] == [True, False, True, True]


WINDOWS = [(None, None), (-1, -1), (3, -1), (None, 2), (2, 1), (0, 0), (100, 100)]


def flash_seen(mq: int, mk: int, left: int | None, right: int | None, causal: bool) -> Array:
    """Returns FlashAttention's mask (Mq, Mk) bool."""
    away = diagonal(mq, mk, mk - mq)
    right = 0 if causal else right
    hidden = (away < -left) if left is not None and left >= 0 else np.zeros_like(away, bool)
    return ~hidden & (away <= right if right is not None and right >= 0 else True)


@pytest.mark.parametrize(("mq", "mk"), LENGTHS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_dense(mq: int, mk: int, window: tuple[int | None, int | None], causal: bool) -> None:
    tensors = operands(mq, mk, hk=2)
    *qkv, grad_out = tensors
    slopes = drawn(H, seed=5) ** 2
    alibi = -slopes[:, None, None] * np.abs(diagonal(mq, mk, mk - mq))
    wanted = expected(tensors, flash_seen(mq, mk, *window, causal), bias=alibi, softcap=1.5, scale=0.5, dropout_p=0.3)
    options: dict[str, Any] = {"scale": 0.5, "softcap": 1.5, "alibi_slopes": slopes, **CPU}
    options |= dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    output, logsumexp, seed, offset, debug = to.flash_attention_forward(
        *qkv, None, None, 0, 0, 0.3, causal, False, philox_seed=SEED, philox_offset=OFFSET, **options
    )
    assert (seed, offset, debug) == (SEED, OFFSET, None)
    same(output, wanted[0])
    same(logsumexp, wanted[1][..., :mq])
    found = to.flash_attention_backward(
        grad_out, *qkv, output, logsumexp, None, None, 0, 0, 0.3, causal, seed, offset, **options
    )
    for gradient, right in zip(found, wanted[2:5], strict=True):
        same(gradient, right)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("longest", [(33, 31), (1000, 1000)])
@pytest.mark.parametrize("extra", [0, 3])
def test_flash_variable_length(window: tuple[int | None, int | None], longest: tuple[int, int], extra: int) -> None:
    tensors, bounds = variable(extra)
    *qkv, grad_out = (tensor[0] for tensor in tensors)
    options: dict[str, Any] = dict(zip(("window_size_left", "window_size_right"), window, strict=True)) | CPU
    dropout_p = 0.3 if longest == (33, 31) else 0.0
    output, logsumexp, *_ = to.flash_attention_forward(
        *qkv, *bounds, *longest, dropout_p, False, philox_seed=SEED, philox_offset=OFFSET, **options
    )
    assert logsumexp.shape == (H, 38 + extra)
    assert np.isposinf(logsumexp[:, 38:]).all()
    found = to.flash_attention_backward(
        grad_out, *qkv, output, logsumexp, *bounds, *longest, dropout_p, False, SEED, OFFSET, **options
    )

    def seen(mq: int, mk: int) -> Array:
        return flash_seen(mq, mk, *window, causal=False)

    for q, k, wanted in of_sequences(seen, tensors, dropout_p=dropout_p):
        same(output[q], wanted[0][0])
        same(logsumexp[:, q], wanted[1][0, :, : q.stop - q.start])
        for gradient, rows, right in zip(found, (q, k, k), wanted[2:5], strict=True):
            same(gradient[rows], right[0])


@pytest.mark.parametrize("shape", [(5, 9), (1, 9), (1, 5, 9), (H, 5, 9), (B, 1, 5, 9), (B, H, 5, 9)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("trailing", [True, False])
def test_cudnn_dense(shape: tuple[int, ...], causal: bool, trailing: bool) -> None:
    tensors = operands(5, 9, hk=1)
    *qkv, grad_out = heads_first(*tensors)
    bias = drawn(*shape, seed=4)
    seen = diagonal(5, 9) <= (0 if causal else 9)
    wanted = expected(tensors, seen, bias=bias, scale=0.2, dropout_p=0.3)
    drop = {"philox_seed": SEED, "philox_offset": OFFSET}
    output, logsumexp, *rest = to.cudnn_attention_forward(
        *qkv, bias, None, None, 0, 0, True, 0.3, causal, scale=0.2, **drop, **CPU
    )
    assert rest == [None, None, 5, 9, SEED, OFFSET, None]
    same(output, np.swapaxes(wanted[0], 1, 2))
    same(logsumexp, wanted[1][..., :5, None])
    found = to.cudnn_attention_backward(
        grad_out, *qkv, output, logsumexp if trailing else logsumexp[..., 0], SEED, OFFSET, bias, None, None, 5, 9,
        0.3, causal, scale=0.2, **CPU,
    )  # fmt: skip
    for gradient, right in zip(found, heads_first(*wanted[2:5]), strict=True):
        same(gradient, right)


@pytest.mark.parametrize("trailing", [True, False])
def test_cudnn_variable_length(trailing: bool) -> None:
    tensors, bounds = variable()
    *qkv, grad_out = (tensor[0] for tensor in tensors)
    output, logsumexp, *rest = to.cudnn_attention_forward(*qkv, None, *bounds, 35, 999, True, is_causal=True, **CPU)
    assert rest[:4] == [*bounds, 35, 999]
    assert logsumexp.shape == (38, H, 1)
    found = to.cudnn_attention_backward(
        grad_out,
        *qkv,
        output,
        logsumexp if trailing else logsumexp[..., 0],
        0,
        0,
        None,
        *bounds,
        35,
        999,
        0.0,
        True,
        **CPU,
    )
    for q, k, wanted in of_sequences(lambda *size: diagonal(*size) <= 0, tensors):
        same(output[q], wanted[0][0])
        same(logsumexp[q, :, 0].T, wanted[1][0, :, : q.stop - q.start])
        for gradient, place, right in zip(found, (q, k, k), wanted[2:5], strict=True):
            same(gradient[place], right[0])


@pytest.mark.parametrize("tokens_after", [0, 4])
@pytest.mark.parametrize("lengths", [[], [0, 0], [7], [0, 33, 0, 1, 64, 0]], ids=str)
def test_packed_logsumexp(lengths: list[int], tokens_after: int) -> None:
    """Each row of the padded form is the row of its token, and vice versa."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    tokens, longest = int(starts[-1]) + tokens_after, max(lengths, default=0)
    values = np.random.default_rng(1).standard_normal((H, tokens)).astype("f4")
    padded = layouts.unpack_logsumexp(values, starts, longest)
    assert (padded.shape, padded.dtype) == ((len(lengths), H, -(-longest // 32) * 32), np.float32)
    for b, (first, last) in enumerate(pairwise(starts.tolist())):
        np.testing.assert_array_equal(padded[b, :, : last - first], values[:, first:last])
        assert np.isposinf(padded[b, :, last - first :]).all()
    again = layouts.pack_logsumexp(padded, starts, tokens)
    assert (again.shape, again.dtype) == (values.shape, np.float32)
    np.testing.assert_array_equal(again[:, : starts[-1]], values[:, : starts[-1]])
    assert np.isposinf(again[:, starts[-1] :]).all()


@pytest.mark.parametrize(("rows", "padded"), [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64)])
def test_padded_logsumexp(rows: int, padded: int) -> None:
    found = layouts.pad_logsumexp(np.ones((B, H, rows), np.float32))
    assert (found.shape, found.dtype) == ((B, H, padded), np.float32)
    assert (found[..., :rows] == 1).all()
    assert np.isposinf(found[..., rows:]).all()


class OnDevice:
    """A scalar in CUDA memory."""

    shape = ()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_philox_numbers() -> None:
    """Host arrays of one element become ints, as PyTorch returns them; device arrays are passed on."""
    assert dropout_of(0.0, "anything", None) is None
    assert dropout_of(0.5, 3, 4) == Dropout(0.5, 3, 4)
    assert dropout_of(0.5, np.int64(3), np.array([4])) == Dropout(0.5, 3, 4)
    assert dropout_of(0.5, np.array(-1), np.array(-(2**63))) == Dropout(0.5, 2**64 - 1, 2**63)
    seed, offset = OnDevice(), OnDevice()
    drawn = dropout_of(0.5, seed, offset)
    assert drawn is not None
    assert drawn.philox_seed is seed
    assert drawn.philox_offset is offset
    with pytest.raises(NotSupported, match="philox_seed = -1 \\(int\\): must be an int from 0"):
        to.scaled_dot_product_efficient_attention(*operands(5, 5)[:3], None, True, 0.5, philox_seed=-1, **CPU)
