"""e4m3 caches on the GPU, in guarded buffers: NaN in every row and scale that no kernel may use."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.quantization import quantize_e4m3
from cutlass_py_attn.reference import quantization
from cutlass_py_attn.runtime import driver
from cutlass_py_attn.testing import check, guarded_check
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import same_bits
from cutlass_py_attn.testing.device_memory import guarded_launch, stream
from cutlass_py_attn.testing.guarded_check import guarded_case
from tests.cases import kv8_cases, paged_cases
from tests.gpu.test_launch import captured
from tests.gpu.test_paged import name_of

OF_CODES = 1e-2  # relative error of the output (norm): weights and products of 16 bits
CHANGED = ("query", "key", "value", "key_scale", "value_scale", "page_table", "seqused_k")


@pytest.mark.parametrize("case", kv8_cases.DECODE, ids=name_of)
def test_decode(case: Case, kernels: check.Kernels) -> None:
    """Two launches give the same bits, from a workspace full of ones."""
    guarded_check.check_decode(case, kernels)


@pytest.mark.parametrize("case", kv8_cases.PREFILL, ids=name_of)
def test_prefill(case: Case, kernels: check.Kernels) -> None:
    """The forward of this GPU, no decode kernel, twice with the same bits."""
    expected = guarded_check.expect(case)
    with guarded_case(case, expected, kernels) as guarded:
        assert guarded.bound.plan.build.family in ("sm80", "sm90"), case.line
        found, again = guarded.run(), guarded.run()
    assert all(same_bits(found[name], again[name]) for name in found), case.line
    worst = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in worst.values()), worst


def test_one_captured_launch_serves_all_lengths(kernels: check.Kernels) -> None:
    first = kv8_cases.REPLAYED
    with guarded_launch(first.problem(), first.arrays(), kernels) as guarded, stream() as handle:
        guarded.launch(handle)  # what is loaded at first use must be before the capture
        graph = captured(guarded.launch, handle)
        for used in paged_cases.REPLAYED_LENGTHS:
            case = paged_cases.with_lengths(first, used).replace(seed=sum(used))
            expected = guarded_check.expect(case)
            for name in CHANGED:
                guarded.buffers[name].change(expected.arrays[name])
            guarded.reset()
            driver.call("cuGraphLaunch", graph, handle)
            driver.synchronise(handle)
            worst = guarded_check.ratios(case, expected, guarded.read())
            assert all(ratio <= 1 for ratio in worst.values()), (used, worst)


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(kernels: check.Kernels) -> None:
    whole = kv8_cases.INVARIANT
    arrays = whole.arrays()
    with guarded_launch(whole.problem(), arrays, kernels) as guarded:
        together = guarded.run()
    for number, lengths in enumerate(whole.spec.sequences):
        one = {name: arrays[name][number : number + 1] for name in ("query", "page_table", "seqused_k")}
        alone = whole.replace(sequences=(lengths,)).problem()
        problem = alone.replace(key=whole.problem().key, value=whole.problem().value)
        with guarded_launch(problem, arrays | one, kernels) as guarded:
            found = guarded.run()
        for name in ("output", "logsumexp"):
            assert same_bits(found[name], together[name][number : number + 1]), (number, name)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_arrays_of_codes_and_of_their_bytes(dtype: str, kernels: check.Kernels) -> None:
    case = kv8_cases.DECODE[0]
    expected = guarded_check.expect(case)
    given = expected.arrays
    pools = [given[name] if dtype != "uint8" else given[name].view(np.uint8) for name in ("key", "value")]
    scales = {name: given[name] for name in ("key_scale", "value_scale")}
    sequences = Paged(given["page_table"], given["seqused_k"])
    output, logsumexp = attention_forward(given["query"], *pools, sequences=sequences, kernels=kernels, **scales)
    worst = guarded_check.ratios(case, expected, {"output": output, "logsumexp": logsumexp})
    assert all(ratio <= 1 for ratio in worst.values()), worst


@pytest.mark.parametrize("queries", [1, 300], ids=["decode", "prefill"])
@pytest.mark.parametrize("granularity", ["batch_head", "row"])
@pytest.mark.parametrize("inputs", ["gaussian", "outliers", "needle"])
def test_long_rows(
    inputs: str,
    granularity: str,
    queries: int,
    kernels: check.Kernels,
    record_property: Callable[[str, float], None],
) -> None:
    """Against float64 of the numbers that the kernel reads: as exact as with keys and values of 16 bits."""
    rng = np.random.default_rng(queries)
    keys, width = 32768, 128
    query = rng.standard_normal((1, queries, 1, width), np.float32)
    key, value = (rng.standard_normal((1, keys, 1, width), np.float32) for _ in range(2))
    if inputs == "outliers":
        key += 10 * rng.standard_normal(key.shape, np.float32) * (rng.random(key.shape, np.float32) < 0.001)
    if inputs == "needle":
        query = query / 10 + 2 * key[:, rng.permutation(keys)[:queries]]
    query = query.astype(ml_dtypes.bfloat16)
    codes, scales, truth = [], {}, []
    for name, array in (("key", key), ("value", value)):
        made, scales[f"{name}_scale"] = quantize_e4m3(array, granularity=granularity)
        codes.append(made)
        truth.append([quantization.dequantise(made, scales[f"{name}_scale"])[0, :, 0], array[0, :, 0]])
    output, _ = attention_forward(query, *codes, kernels=kernels, **scales)
    errors = []
    for keys_of, values_of in zip(*truth, strict=True):
        scores = query[0, :, 0].astype(np.float64) @ keys_of.T / np.sqrt(width)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        exact = weights @ values_of / weights.sum(axis=1, keepdims=True)
        errors.append(np.linalg.norm(output[0, :, 0].astype(np.float64) - exact) / np.linalg.norm(exact))
    record_property("error of the codes", float(errors[0]))
    record_property("error of the operands", float(errors[1]))
    assert errors[0] <= OF_CODES
