"""merge_states on the GPU: within one unit in the last place of float64, for random problems and each library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.serving import merge_states
from cutlass_py_attn.testing.check import Array, Kernels
from tests.cases import serving_cases
from tests.support.refusals import expect_raised

GROUP = 24  # random problems of a test


@pytest.mark.parametrize("first", range(0, serving_cases.SEEDS, GROUP))
def test_random_merges(first: int, kernels: Kernels, arch: str) -> None:
    """Dims, dtypes, dense and packed rows, layouts, rows without keys whose outputs are NaN."""
    for seed in range(first, first + GROUP):
        assert not serving_cases.merge_case(seed).check(kernels, arch)[1], f"seed {seed}"


def inputs() -> list[Array]:
    """Returns two partial results of (3, 40, 4, 64) queries."""
    rng = np.random.default_rng(5)
    outputs = [rng.standard_normal((3, 40, 4, 64), np.float32).astype(np.float16) for _ in range(2)]
    logs = [np.full((3, 4, 64), np.inf, np.float32) for _ in range(2)]
    for log in logs:
        log[:, :, :40] = rng.standard_normal((3, 4, 40)) * 4
        log[rng.random(log.shape) < 0.1] = -np.inf
    return [outputs[0], logs[0], outputs[1], logs[1]]


def check(found: tuple[Array, Array], given: list[Array]) -> None:
    """Compares with the reference."""
    output, logsumexp = merge_states(*given, backend="reference")
    np.testing.assert_array_max_ulp(found[0], output, maxulp=1)
    np.testing.assert_array_equal(np.isinf(found[1]), np.isinf(logsumexp))
    finite = np.isfinite(logsumexp)
    np.testing.assert_allclose(found[1][finite], logsumexp[finite], rtol=0, atol=2e-6)


@pytest.mark.parametrize("module", ["torch", "cupy"])
def test_libraries(module: str, kernels: Kernels) -> None:
    """Results in the library of output_a; with `out`, in the caller's array."""
    library: Any = pytest.importorskip(module)
    given = inputs()
    to_device = (lambda array: library.from_numpy(array).cuda()) if module == "torch" else library.asarray
    to_host = (lambda array: array.cpu().numpy()) if module == "torch" else library.asnumpy
    arrays = [to_device(array) for array in given]
    for _ in range(3):
        found = merge_states(*arrays, kernels=kernels)
        check(tuple(map(to_host, found)), given)
    whole = to_device(np.zeros((3, 40, 8, 64), np.float16))
    _, logsumexp = merge_states(*arrays, out=whole[:, :, 2:6], kernels=kernels)
    check((to_host(whole)[:, :, 2:6], to_host(logsumexp)), given)
    assert not to_host(whole)[:, :, [0, 1, 6, 7]].any()
    expect_raised(lambda: merge_states(*arrays, out=arrays[0], kernels=kernels), ["output: shares it with output_a"])


def test_numpy(kernels: Kernels) -> None:
    """Host arrays are copied, and results are complete."""
    given = inputs()
    check(merge_states(*given, kernels=kernels), given)


def test_parts_of_attention(kernels: Kernels) -> None:
    """Packed parts, as a shared prefix gives them: the merge of both is attention over all keys."""
    rng = np.random.default_rng(8)
    query = rng.standard_normal((1, 50, 4, 64)).astype(np.float16)
    queries, keys = np.array([0, 20, 20, 50], np.int32), (90, 33)
    parts = [rng.standard_normal((2, 3, count, 2, 64)).astype(np.float16) for count in keys]

    def attend(part: Array) -> tuple[Any, Any]:
        count = part.shape[2]
        sequences = VariableLength(queries, np.arange(4) * count, 30, count)
        key, value = part.reshape(2, 1, 3 * count, 2, 64)
        return attention_forward(query, key, value, sequences=sequences, backend="reference")

    split = [attend(part) for part in parts]
    found = merge_states(*split[0], *split[1], cu_seqlens_q=queries, max_seqlen_q=30, kernels=kernels)
    output, logsumexp = attend(np.concatenate(parts, axis=2))
    np.testing.assert_allclose(found[0].astype("f4"), output.astype("f4"), rtol=0, atol=2e-3)
    assert np.array_equal(np.isinf(found[1]), np.isinf(logsumexp))
    finite = np.isfinite(logsumexp)
    np.testing.assert_allclose(found[1][finite], logsumexp[finite], rtol=0, atol=2e-6)
