"""The random appends and merges, and the ratios of a merge: every wrong value has one above 1."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.problem.append import TILE_SCALES
from cutlass_py_attn.reference import serving
from tests.cases import serving_cases
from tests.cases.serving_cases import logsumexp_ratio, output_ratio


def test_every_case_is_sound_and_most_store_rows() -> None:
    """Each problem is accepted; the kernels are few; the reference changes the caches of nearly every append."""
    builds: Counter[Build] = Counter()
    stored = 0
    for case in serving_cases.cases():
        assert case.problem.reasons() == []
        builds[case.plan("sm_90").build] += 1
        if isinstance(case, serving_cases.AppendCase):
            after = case.expected()
            caches = [placed for name, placed in case.arrays.items() if name.endswith("cache")]
            stored += all((after[id(cache.memory)] != cache.memory).any() for cache in caches)
    assert len(builds) == 55
    assert min(builds.values()) >= 2
    assert stored > 0.9 * 2 * serving_cases.SEEDS


def test_the_cases_cover_the_layouts() -> None:
    """Pools in one memory and in two, skipped slots, every form of the scales, packed and dense merges."""
    appends = [serving_cases.append_case(seed) for seed in range(serving_cases.SEEDS)]
    shared = [it.arrays["key_cache"].memory is it.arrays["value_cache"].memory for it in appends]
    assert 0.1 < np.mean(shared) < 0.9
    ranks = Counter(len(it.arrays["key_scale"].tensor.shape) if "key_scale" in it.arrays else -1 for it in appends)
    assert set(ranks) == {-1, 0, 1, 3}
    latent = [serving_cases.latent_append_case(seed) for seed in range(serving_cases.SEEDS)]
    assert {it.problem.scales for it in latent} == {TILE_SCALES}
    assert 0.2 < np.mean([it.arrays["key_cache"].memory is it.arrays["key_scale"].memory for it in latent]) < 0.6
    packed = [it.arrays["key_cache"].tensor for it in latent if it.problem.key.shape[2] == 512]
    assert 656 in {it.strides[1] for it in packed}
    slots = np.concatenate([it.arrays["slots"].view() for it in appends])
    assert (slots < 0).any()
    assert (slots == 2**32).any()
    merges = [serving_cases.merge_case(seed) for seed in range(serving_cases.SEEDS)]
    assert 0.2 < np.mean([it.problem.is_packed for it in merges]) < 0.7
    assert 0.2 < np.mean([it.problem.is_sum for it in merges]) < 0.5
    assert {plan.variant for it in merges for plan in [it.plan("sm_90").build]} == {*abi.FLOAT32_OUTPUTS}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_an_output_may_be_off_by_one_unit(dtype: type) -> None:
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((2, 1, 40, 3, 16)).astype(dtype)
    logs = rng.standard_normal((2, 1, 3, 64)).astype(np.float32)
    inputs = {"output_a": outputs[0], "output_b": outputs[1]}
    expected, _ = serving.merge(outputs[0], logs[0], outputs[1], logs[1])
    rounded = expected.astype(dtype)
    assert output_ratio(rounded, expected, inputs) <= 0.5
    bits = rounded.view(f"i{rounded.itemsize}")
    assert output_ratio((bits + (16 if dtype is np.float32 else 2)).view(dtype), expected, inputs) > 1
    for wrong in (np.nan, np.inf):
        found = rounded.copy()
        found[0, 7, 1, 3] = wrong
        assert output_ratio(found, expected, inputs) == np.inf
    expected[0, 7, 1, 3] = np.nan
    assert output_ratio(rounded, expected, inputs) == np.inf
    assert output_ratio(found, expected, inputs) == np.inf
    found[0, 7, 1, 3] = np.nan
    assert output_ratio(found, expected, inputs) <= 0.5


def test_a_logsumexp_may_be_off_by_one_unit() -> None:
    expected = np.array([-60.0, -1.0, 0.0, 3.0, 5.0, 100.0, -np.inf, np.inf])
    rounded = expected.astype(np.float32)
    assert logsumexp_ratio(rounded, expected) <= 0.5
    for place in range(6):
        found = rounded.copy()
        found[place] += 2 * np.spacing(np.float32(max(abs(expected[place]), 4)))
        assert logsumexp_ratio(found, expected) == pytest.approx(2, abs=0.01)
        found[place] = np.nan
        assert logsumexp_ratio(found, expected) == np.inf
    found = rounded.copy()
    found[6] = -1e30
    assert logsumexp_ratio(found, expected) == np.inf
