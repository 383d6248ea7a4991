"""The GPU test of latent caches of e4m3 codes notices a wrong scale, and allows the rounding of the kernel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cutlass_py_attn.testing import e4m3_inputs, guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.gpu.hosts.test_jax import LATENT_CACHES, latent_results

CASES = pytest.mark.parametrize("case", LATENT_CACHES.values(), ids=LATENT_CACHES)
LAST_TILE = 3


@CASES
def test_the_reference_passes_and_a_neighbours_scale_does_not(case: Case) -> None:
    """The whole test, with the reference in place of the kernel."""
    jax = pytest.importorskip("jax")
    expected = guarded_check.expect(case)
    scale = expected.arrays["key_scale"].copy()
    found = latent_results(jax, case, expected.arrays, backend="reference")
    assert max(guarded_check.ratios(case, expected, found).values()) <= 1
    scale[..., LAST_TILE] = scale[..., LAST_TILE - 1]
    wrong = latent_results(jax, case, {**expected.arrays, "key_scale": scale}, backend="reference")
    assert min(guarded_check.ratios(case, expected, wrong).values()) > 2


@CASES
def test_products_of_code_and_scale_may_be_rounded(case: Case) -> None:
    """As the kernel rounds them: to bfloat16 before the product of query and key."""
    expected = guarded_check.expect(case)
    key = e4m3_inputs.dequantised(case.problem(), expected.arrays)["key"].astype(ml_dtypes.bfloat16)
    arrays = {**expected.arrays, "key": key, "value": key[..., : case.spec.head_dim_value]}
    found = guarded_check.by_reference(case.replace(e4m3_cache=False, descale=""), arrays, "float64")
    ratios = guarded_check.ratios(case, expected, found)
    assert max(ratios.values()) < 1
    has_keys = np.isfinite(expected.truth["logsumexp"])
    error = np.abs(found["logsumexp"][has_keys] - expected.truth["logsumexp"][has_keys])
    assert error.max() > 1e-3, "this rounding moves a logsumexp by more than that of the kernel's float32"
