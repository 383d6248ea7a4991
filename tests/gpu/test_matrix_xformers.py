"""The matrix of xFormers' tests for memory-efficient attention, at its tolerances; inputs of deviation 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn import driver
from cutlass_py_attn.attention import Gradients, attention_backward, attention_forward
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem import OPERANDS, Tensor
from tests.gpu import matrix, memory
from tests.gpu.check import Kernels, same_bits
from tests.gpu.drawn_check import by_reference
from tests.gpu.matrix import Case
from tests.gpu.matrix_check import (
    FORWARD,
    OnDevice,
    attend,
    binomial_p_values,
    expect_close,
    expect_probe,
    expect_xformers,
    name_of,
    normal_p_value,
    options_of,
    shown,
)

LEAST_P_VALUE = 1e-6


def all_of(*cases: Case) -> pytest.MarkDecorator:
    """The test for each of these cases."""
    return pytest.mark.parametrize("one", cases, ids=name_of)


@all_of(*matrix.SHAPES)
def test_shapes(one: Case, kernels: Kernels) -> None:
    """Output, logsumexp and gradients over lengths, odd lengths, head dims, D != Dv, heads and many batches."""
    expect_xformers(one, kernels)


@all_of(*matrix.RANDOM)
def test_random_shapes(one: Case, kernels: Kernels) -> None:
    expect_xformers(one, kernels)


@all_of(*matrix.BIG)
def test_sizes_beyond_16_bits(one: Case, kernels: Kernels) -> None:
    """Strides, lengths, batches and heads beyond 65535."""
    expect_xformers(one, kernels)


@all_of(*matrix.LAYOUTS)
def test_layouts(one: Case, kernels: Kernels) -> None:
    """NaN rows behind each sequence, slices of packed tensors, gradients of the inputs' strides, grad_output of
    stride 0: results go to arrays of the operands' layouts, and nothing around them changes."""
    expect_xformers(one, kernels)


@all_of(*matrix.SCALES)
def test_custom_scale(one: Case, kernels: Kernels) -> None:
    expect_xformers(one, kernels)


@all_of(*matrix.BIASES)
def test_biases(one: Case, kernels: Kernels) -> None:
    """With and without a gradient, with a causal mask, broadcast, transposed, padded, in rows of 5 elements; -inf
    on all but the last row and column of one head, and on whole rows."""
    found = expect_xformers(one, kernels)
    if one.bias_values == "hidden":
        blind = slice(None, None, matrix.WHOLE_ROWS)
        assert not found["output"][:, blind].any()
        assert not found["grad_query"][:, blind].any()
        assert np.isneginf(found["logsumexp"][:, :, : one.queries : matrix.WHOLE_ROWS]).all()


@pytest.mark.parametrize("cases", matrix.MASKS.values(), ids=["_".join(map(str, key)) for key in matrix.MASKS])
def test_masks_and_windows(cases: tuple[Case, ...], kernels: Kernels) -> None:
    """The lengths at which the schedule of visited blocks has its edges."""
    for one in cases:
        expect_xformers(one, kernels)


@all_of(*matrix.BLIND)
def test_more_queries_than_keys(one: Case, kernels: Kernels) -> None:
    """Bottom-right: rows without keys are exact zeros, and -inf in logsumexp, which is +inf in its padding."""
    found = expect_xformers(one, kernels)
    blind = one.queries - one.keys
    assert not found["output"][:, :blind].any()
    assert not found["grad_query"][:, :blind].any()
    assert np.isneginf(found["logsumexp"][..., :blind]).all()
    assert np.isposinf(found["logsumexp"][..., one.queries :]).all()


@all_of(*matrix.GROUPED)
def test_grouped_heads(one: Case, kernels: Kernels) -> None:
    """Fewer heads of key and value, a single query row, and one head expanded by stride 0."""
    expect_xformers(one, kernels)


@all_of(*matrix.PACKED_SEQUENCES)
def test_sequences(one: Case, kernels: Kernels) -> None:
    """Block-diagonal masks; NaN lies in every row of no sequence and behind the used keys."""
    expect_xformers(one, kernels)


@all_of(*matrix.EMPTY)
def test_empty(one: Case, kernels: Kernels) -> None:
    found = expect_xformers(one, kernels)
    assert not any(array.any() for name, array in found.items() if name != "logsumexp")


@all_of(*matrix.DROPOUT, *matrix.DROPPED, *(case for case in matrix.DROPPED_SEQUENCES if case.family != "probe"))
def test_dropout(one: Case, kernels: Kernels) -> None:
    """Against the reference under the very mask that seed and offset give."""
    expect_xformers(one, kernels)


@all_of(*(case for case in matrix.DROPPED_SEQUENCES if case.family == "probe"))
def test_both_directions_drop_the_same_of_a_sequence(one: Case, kernels: Kernels) -> None:
    found = expect_xformers(one, kernels)
    arrays = one.arrays()
    truth = by_reference(one, arrays, "float64")
    for name in ("output", "grad_value"):
        assert np.array_equal(found[name] != 0, truth[name] != 0), name


@all_of(*matrix.DRAWS)
def test_keep_rates(one: Case, kernels: Kernels) -> None:
    """A thousand draws: every weight alone and all together are kept as often as they should be."""
    kept = shown(expect_probe(one, kernels)["output"], one.keys)
    chance = 1 - one.dropout_p
    assert normal_p_value(int(kept.sum()), kept.size, chance) > LEAST_P_VALUE
    p_values = binomial_p_values(one.batch, chance)[kept.sum(axis=0)]
    assert p_values.min() > LEAST_P_VALUE


@all_of(*matrix.SCALES, *matrix.BLIND, matrix.BIASES[0])
def test_again_gives_the_same_bits(one: Case, kernels: Kernels) -> None:
    """The query gradient too, where one block sums it."""
    one = replace(one, splits=1)
    arrays = one.arrays()
    first, second = (attend(one, arrays, kernels) for _ in range(2))
    assert [name for name in first if not same_bits(first[name], second[name])] == []


@all_of(*matrix.PACKED)
def test_packed_gradients(one: Case, kernels: Kernels) -> None:
    """Slices of one [B, M, 3, H, D] array, with the bits of separate ones."""
    one = replace(one, splits=1)
    arrays = one.arrays()
    apart = attend(one, arrays, kernels)
    packed = attention_backward(*_backward_operands(arrays, apart), packed=True, num_splits_key=1,
                                kernels=kernels, **options_of(one, arrays))  # fmt: skip
    item = apart["output"].itemsize
    row = 3 * one.heads * one.dim
    for name in OPERANDS:
        gradient = getattr(packed, name)
        assert gradient.strides == tuple(item * step for step in (one.queries * row, row, one.dim, 1))
        assert gradient.base is packed.query.base
        assert same_bits(gradient, apart[f"grad_{name}"]), name


@all_of(*matrix.PACKED)
def test_gradients_into_strided_arrays(one: Case, kernels: Kernels) -> None:
    """Into NumPy arrays of any strides; those are what comes back."""
    one = replace(one, splits=1)
    arrays = one.arrays()
    dense = attend(one, arrays, kernels)
    out = {name: np.zeros_like(arrays[name].swapaxes(1, 2)).swapaxes(1, 2) for name in OPERANDS}
    found = attention_backward(*_backward_operands(arrays, dense), out=Gradients(**out), num_splits_key=1,
                               kernels=kernels, **options_of(one, arrays))  # fmt: skip
    for name in OPERANDS:
        assert getattr(found, name) is out[name]
        assert same_bits(out[name], dense[f"grad_{name}"]), name


def _backward_operands(arrays: dict[str, Any], found: dict[str, Any]) -> list[Any]:
    return [arrays["grad_output"], *(arrays[name] for name in OPERANDS), found["output"], found["logsumexp"]]


@all_of(*matrix.PACKED)
def test_formats(one: Case, kernels: Kernels) -> None:
    """[B, M, K] is [B, M, 1, K] with an axis left out: refused with the remedy, and right once it is there."""
    one = replace(one, heads=1)
    arrays = one.arrays()
    flat = [arrays[name][:, :, 0] for name in OPERANDS]
    with pytest.raises(NotSupported, match=r"query has shape .* must be 4-D .* add the missing axes with size 1"):
        attention_forward(*flat, kernels=kernels)
    output, _ = attention_forward(*(array[:, :, None] for array in flat), scale=one.scale or None, kernels=kernels)
    expect_close(one, "output", output, by_reference(one, arrays, "float64")["output"], FORWARD[one.dtype])


def test_streams(kernels: Kernels) -> None:
    """Two streams beside the default one give its bits."""
    one = replace(matrix.SCALES[0], splits=1)
    arrays = one.arrays()
    expected = attend(one, arrays, kernels)
    with memory.stream() as first, memory.stream() as second:
        for stream in (first, second):
            found = attend(one, arrays, kernels, stream=stream)
            assert all(same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", OPERANDS)
def test_columns_apart_are_refused(name: str, kernels: Kernels) -> None:
    """Every second column of a wider array: a sentence, and never a fault of the GPU."""
    one = matrix.SCALES[0]
    arrays, problem = one.arrays(), one.forward.problem()
    tensors = {each: getattr(problem, each) for each in OPERANDS}
    _, rows, heads, columns = tensors[name].shape
    row = 2 * heads * columns
    tensors[name] = Tensor(tensors[name].shape, (rows * row, row, 2 * columns, 2), one.dtype)
    given = [OnDevice(tensor, arrays[each]) for each, tensor in tensors.items()]
    with pytest.raises(NotSupported, match=f"{name} has last stride 2: must be 1"):
        attention_forward(*given, kernels=kernels)
    for array in given:
        array.close()
    driver.call("cuCtxSynchronize")


@pytest.mark.parametrize("dtype", matrix.DTYPES)
def test_bias_of_another_dtype_is_refused(dtype: str, kernels: Kernels) -> None:
    one = next(case for case in matrix.BIASES if case.dtype == dtype)
    arrays = one.arrays()
    other = "float16" if dtype == "float32" else "float32"
    arrays["bias"] = arrays["bias"].astype(other)
    with pytest.raises(NotSupported, match=f"bias has dtype {other} but query has {dtype}: all must agree"):
        attend(one.forward, arrays, kernels)
