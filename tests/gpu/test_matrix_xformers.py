"""xFormers' tests of memory-efficient attention, at its tolerances, with gaussian inputs of deviation 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.tensors import OPERANDS, Tensor
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import device_memory
from cutlass_py_attn.testing.check import Kernels, same_bits
from cutlass_py_attn.testing.guarded_check import by_reference
from tests.cases import matrix
from tests.cases.matrix import MatrixCase
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


def all_of(*cases: MatrixCase) -> pytest.MarkDecorator:
    """The test for each of these cases."""
    return pytest.mark.parametrize("case", cases, ids=name_of)


@all_of(*matrix.SHAPES)
def test_shapes(case: MatrixCase, kernels: Kernels) -> None:
    """Output, logsumexp and gradients over lengths, odd lengths, head dims, D != Dv, heads and many batches."""
    expect_xformers(case, kernels)


@all_of(*matrix.RANDOM)
def test_random_shapes(case: MatrixCase, kernels: Kernels) -> None:
    expect_xformers(case, kernels)


@all_of(*matrix.BIG)
def test_sizes_beyond_16_bits(case: MatrixCase, kernels: Kernels) -> None:
    """Strides, lengths, batches and heads beyond 65535."""
    expect_xformers(case, kernels)


@all_of(*matrix.LAYOUTS)
def test_layouts(case: MatrixCase, kernels: Kernels) -> None:
    """NaN rows behind each sequence, slices of packed tensors, gradients of the inputs' strides, grad_output of
    stride 0: results go to arrays of the operands' layouts, and nothing around them changes."""
    expect_xformers(case, kernels)


@all_of(*matrix.SCALES)
def test_custom_scale(case: MatrixCase, kernels: Kernels) -> None:
    expect_xformers(case, kernels)


@all_of(*matrix.BIASES)
def test_biases(case: MatrixCase, kernels: Kernels) -> None:
    """With and without a gradient, with a causal mask, broadcast, transposed, padded, in rows of 5 elements; -inf
    on all but the last row and column of one head, and on whole rows."""
    found = expect_xformers(case, kernels)
    if case.bias_values == "hidden":
        blind = slice(None, None, matrix.WHOLE_ROWS)
        assert not found["output"][:, blind].any()
        assert not found["grad_query"][:, blind].any()
        assert np.isneginf(found["logsumexp"][:, :, : case.spec.num_queries : matrix.WHOLE_ROWS]).all()


@pytest.mark.parametrize("cases", matrix.MASKS.values(), ids=["_".join(map(str, key)) for key in matrix.MASKS])
def test_masks_and_windows(cases: tuple[MatrixCase, ...], kernels: Kernels) -> None:
    """The lengths at which the schedule of visited blocks has its edges."""
    for case in cases:
        expect_xformers(case, kernels)


@all_of(*matrix.BLIND)
def test_more_queries_than_keys(case: MatrixCase, kernels: Kernels) -> None:
    """Bottom-right: rows without keys are exact zeros, and -inf in logsumexp, which is +inf in its padding."""
    found = expect_xformers(case, kernels)
    blind = case.spec.num_queries - case.spec.num_keys
    assert not found["output"][:, :blind].any()
    assert not found["grad_query"][:, :blind].any()
    assert np.isneginf(found["logsumexp"][..., :blind]).all()
    assert np.isposinf(found["logsumexp"][..., case.spec.num_queries :]).all()


@all_of(*matrix.GROUPED)
def test_grouped_heads(case: MatrixCase, kernels: Kernels) -> None:
    """Fewer heads of key and value, a single query row, and one head expanded by stride 0."""
    expect_xformers(case, kernels)


@all_of(*matrix.PACKED_SEQUENCES)
def test_sequences(case: MatrixCase, kernels: Kernels) -> None:
    """Block-diagonal masks; NaN lies in every row of no sequence and behind the used keys."""
    expect_xformers(case, kernels)


@all_of(*matrix.EMPTY)
def test_empty(case: MatrixCase, kernels: Kernels) -> None:
    found = expect_xformers(case, kernels)
    assert not any(array.any() for name, array in found.items() if name != "logsumexp")


@all_of(*matrix.DROPOUT, *matrix.DROPPED, *(case for case in matrix.DROPPED_SEQUENCES if case.inputs != "probe"))
def test_dropout(case: MatrixCase, kernels: Kernels) -> None:
    """Against the reference under the very mask that seed and offset give."""
    expect_xformers(case, kernels)


@all_of(*(case for case in matrix.DROPPED_SEQUENCES if case.inputs == "probe"))
def test_both_directions_drop_the_same_of_a_sequence(case: MatrixCase, kernels: Kernels) -> None:
    found = expect_xformers(case, kernels)
    arrays = case.arrays()
    truth = by_reference(case, arrays, "float64")
    for name in ("output", "grad_value"):
        assert np.array_equal(found[name] != 0, truth[name] != 0), name


@all_of(*matrix.DRAWS)
def test_keep_rates(case: MatrixCase, kernels: Kernels) -> None:
    """A thousand draws: every weight alone and all together are kept as often as they should be."""
    kept = shown(expect_probe(case, kernels)["output"], case.spec.num_keys)
    chance = 1 - case.spec.dropout_p
    assert normal_p_value(int(kept.sum()), kept.size, chance) > LEAST_P_VALUE
    p_values = binomial_p_values(case.spec.batch, chance)[kept.sum(axis=0)]
    assert p_values.min() > LEAST_P_VALUE


@all_of(*matrix.SCALES, *matrix.BLIND, matrix.BIASES[0])
def test_again_gives_the_same_bits(case: MatrixCase, kernels: Kernels) -> None:
    """The query gradient too, where one block sums it."""
    case = case.replace(num_splits_key=1)
    arrays = case.arrays()
    first, second = (attend(case, arrays, kernels) for _ in range(2))
    assert [name for name in first if not same_bits(first[name], second[name])] == []


@all_of(*matrix.PACKED)
def test_packed_gradients(case: MatrixCase, kernels: Kernels) -> None:
    """Slices of one [B, M, 3, H, D] array, with the bits of separate ones."""
    case = case.replace(num_splits_key=1)
    arrays = case.arrays()
    apart = attend(case, arrays, kernels)
    packed = attention_backward(*_backward_operands(arrays, apart), packed=True, num_splits_key=1,
                                kernels=kernels, **options_of(case, arrays))  # fmt: skip
    item = apart["output"].itemsize
    row = 3 * case.spec.num_heads * case.spec.head_dim
    for name in OPERANDS:
        gradient = getattr(packed, name)
        steps = case.spec.num_queries * row, row, case.spec.head_dim, 1
        assert gradient.strides == tuple(item * step for step in steps)
        assert gradient.base is packed.query.base
        assert same_bits(gradient, apart[f"grad_{name}"]), name


@all_of(*matrix.PACKED)
def test_gradients_into_strided_arrays(case: MatrixCase, kernels: Kernels) -> None:
    """Into NumPy arrays of any strides; those are what comes back."""
    case = case.replace(num_splits_key=1)
    arrays = case.arrays()
    dense = attend(case, arrays, kernels)
    out = {name: np.zeros_like(arrays[name].swapaxes(1, 2)).swapaxes(1, 2) for name in OPERANDS}
    found = attention_backward(*_backward_operands(arrays, dense), out=Gradients(**out), num_splits_key=1,
                               kernels=kernels, **options_of(case, arrays))  # fmt: skip
    for name in OPERANDS:
        assert getattr(found, name) is out[name]
        assert same_bits(out[name], dense[f"grad_{name}"]), name


def _backward_operands(arrays: dict[str, Any], found: dict[str, Any]) -> list[Any]:
    return [arrays["grad_output"], *(arrays[name] for name in OPERANDS), found["output"], found["logsumexp"]]


@all_of(*matrix.PACKED)
def test_formats(case: MatrixCase, kernels: Kernels) -> None:
    """[B, M, K] is [B, M, 1, K] with an axis left out: refused with the remedy, and right once it is there."""
    case = case.replace(num_heads=1)
    arrays = case.arrays()
    flat = [arrays[name][:, :, 0] for name in OPERANDS]
    with pytest.raises(NotSupported, match=r"query.shape = .* must be 4-D .* add the missing axes with size 1"):
        attention_forward(*flat, kernels=kernels)
    output, _ = attention_forward(*(array[:, :, None] for array in flat), scale=case.spec.scale, kernels=kernels)
    expect_close(case, "output", output, by_reference(case, arrays, "float64")["output"], FORWARD[case.spec.dtype])


def test_streams(kernels: Kernels) -> None:
    """Two streams beside the default one give its bits."""
    case = matrix.SCALES[0].replace(num_splits_key=1)
    arrays = case.arrays()
    expected = attend(case, arrays, kernels)
    with device_memory.stream() as first, device_memory.stream() as second:
        for stream in (first, second):
            found = attend(case, arrays, kernels, stream=stream)
            assert all(same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", OPERANDS)
def test_columns_apart_are_refused(name: str, kernels: Kernels) -> None:
    """Every second column of a wider array: a sentence, and never a fault of the GPU."""
    case = matrix.SCALES[0]
    arrays, problem = case.arrays(), case.forward.problem()
    tensors = {each: getattr(problem, each) for each in OPERANDS}
    _, rows, heads, columns = tensors[name].shape
    row = 2 * heads * columns
    tensors[name] = Tensor(tensors[name].shape, (rows * row, row, 2 * columns, 2), case.spec.dtype)
    given = [OnDevice(tensor, arrays[each]) for each, tensor in tensors.items()]
    with pytest.raises(NotSupported, match=rf"{name}.strides = .*: the last must be 1"):
        attention_forward(*given, kernels=kernels)
    for array in given:
        array.close()
    driver.call("cuCtxSynchronize")


@pytest.mark.parametrize("dtype", matrix.DTYPES)
def test_bias_of_another_dtype_is_refused(dtype: str, kernels: Kernels) -> None:
    case = next(case for case in matrix.BIASES if case.spec.dtype == dtype)
    arrays = case.arrays()
    other = "float16" if dtype == "float32" else "float32"
    arrays["bias"] = arrays["bias"].astype(other)
    with pytest.raises(NotSupported, match=rf"bias.dtype = '{other}' .*: must be {dtype} as query"):
        attend(case.forward, arrays, kernels)
