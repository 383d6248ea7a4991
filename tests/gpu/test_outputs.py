"""The caller's arrays for results on the GPU: overlaps are refused, and interleaved slices get the right bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_backward, attention_forward
from cutlass_py_attn.api.results import Gradients
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.testing import check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array, Kernels, same_bits
from tests.gpu import test_arrays
from tests.gpu.test_arrays import Library
from tests.support.refusals import expect_among

# Of suite.TORCH_OPS, whose kernels every folder of prebuilt kernels has.
CASE = Case.parse("backward f16_d64_s72_b2_h4_causal seed=3")


@pytest.fixture(params=["torch", "cupy"])
def library(request: pytest.FixtureRequest) -> Library:
    """torch and CuPy."""
    pytest.importorskip(request.param)
    return test_arrays._library(request.param)


def operands_of(library: Library, kernels: Kernels) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns every operand of the backward, and the results of CASE."""
    arrays = CASE.arrays()
    expected = check.attend(CASE, arrays, kernels)
    given = arrays | {name: expected[name] for name in ("output", "logsumexp")}
    return {name: library.to_device(array) for name, array in given.items()}, expected


def backward(given: dict[str, Any], kernels: Kernels, out: Gradients) -> Gradients:
    """Computes the gradients of CASE."""
    names = ("grad_output", *check.OPERANDS, "output", "logsumexp")
    return attention_backward(
        *(given[name] for name in names),
        mask=CASE.spec.mask,
        num_splits_key=CASE.spec.num_splits_key,
        kernels=kernels,
        out=out,
    )


def test_overlapping_results_are_refused(library: Library, kernels: Kernels) -> None:
    """Nothing is written: the arrays keep their values."""
    given, _ = operands_of(library, kernels)
    before = {name: library.to_host(array).copy() for name, array in given.items()}
    query, key, value = (given[name] for name in check.OPERANDS)
    shared = given["grad_output"]
    whole = library.to_device(np.ones((2, 2 * 72, 4, 64), np.float16))
    for call, refusal in (
        (lambda: attention_forward(query, key, value, out=query, kernels=kernels), "output: shares it with query"),
        (lambda: backward(given, kernels, Gradients(query=shared)), "grad_query: shares it with grad_output"),
        (
            lambda: backward(given, kernels, Gradients(query=whole[:, :72], key=whole[:, 71:143])),
            "grad_query: shares it with grad_key",
        ),
        (
            lambda: backward(given, kernels, Gradients(key=whole[:, :72], value=whole[:, :72])),
            "grad_key: shares it with grad_value",
        ),
    ):
        with pytest.raises(NotSupported) as caught:
            call()
        expect_among(caught.value.refusals, refusal)
    for name, array in given.items():
        assert same_bits(library.to_host(array), before[name]), name
    assert (library.to_host(whole) == 1).all()


def test_results_as_slices_of_one_array(library: Library, kernels: Kernels) -> None:
    """Slices [:, :, i] interleave and share no element; the fourth keeps its values."""
    given, expected = operands_of(library, kernels)
    whole = library.to_device(np.ones((2, 72, 4, 4, 64), np.float16))
    found = backward(given, kernels, Gradients(*(whole[:, :, i] for i in range(3))))
    host = library.to_host(whole)
    names = [f"grad_{name}" for name in check.OPERANDS]
    for i, name in enumerate(names):
        assert same_bits(np.ascontiguousarray(host[:, :, i]), library.to_host(getattr(found, check.OPERANDS[i])))
        np.testing.assert_allclose(host[:, :, i].astype("f4"), expected[name].astype("f4"), rtol=2e-3, atol=2e-3)
    assert (host[:, :, 3] == 1).all()
    packed = library.to_device(np.stack([CASE.arrays()[name] for name in (*check.OPERANDS, "query")], axis=2))
    output, _ = attention_forward(
        *(packed[:, :, i] for i in range(3)), out=packed[:, :, 3], mask=CASE.spec.mask, kernels=kernels
    )
    assert same_bits(np.ascontiguousarray(library.to_host(packed)[:, :, 3]), expected["output"])
    assert output.shape == (2, 72, 4, 64)
