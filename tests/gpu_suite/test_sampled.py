"""Tests of the sampled reference: it agrees with the dense one, and notices a wrong row."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.reference import numpy_reference
from cutlass_py_attn.testing.cases import Case
from cutlass_py_attn.testing.check import Array
from tests.gpu import sampled

CASE = Case.parse("backward f16_d32_q70_s90_b1_h1_causal_br_window40 seed=3")
QUERIES, KEYS = np.array([0, 13, 69]), np.array([0, 50, 89])


def dense() -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the inputs of the backward, and every result in float64."""
    arrays, mask = CASE.arrays(), CASE.spec.mask
    operands = [arrays[name] for name in ("query", "key", "value")]
    output, logsumexp = numpy_reference.forward(*operands, mask=mask)
    given = arrays | {"output": output.astype("f2"), "logsumexp": logsumexp.astype("f4")}
    gradients = numpy_reference.backward(
        given["grad_output"], *operands, given["output"], given["logsumexp"], mask=mask
    )
    names = ("grad_query", "grad_key", "grad_value")
    found = {"output": output, "logsumexp": logsumexp} | dict(zip(names, gradients[:3], strict=True))
    return given, {name: array[0, 0, :70] if name == "logsumexp" else array[0, :, 0] for name, array in found.items()}


def rows(given: dict[str, Array], queries: Array, keys: Array) -> sampled.Rows:
    spec = CASE.spec
    visible = spec.mask.sees(queries[:, None], keys[None, :], spec.num_queries, spec.num_keys)
    of_queries = {name: given[name][0, queries, 0] for name in ("query", "grad_output", "output")}
    of_keys = {name: given[name][0, keys, 0] for name in ("key", "value")}
    scale = CASE.problem().scale_value
    return sampled.Rows(
        **of_queries,
        **of_keys,
        visible=visible,
        scale=scale,
        dtype=np.float16,
        logsumexp=given["logsumexp"][0, 0, queries],
    )


@pytest.mark.parametrize("kind", ["forward", "grad_query", "grad_key_value"])
def test_the_samples_are_those_of_the_dense_reference(kind: str) -> None:
    given, expected = dense()
    every_query, every_key = np.arange(CASE.spec.num_queries), np.arange(CASE.spec.num_keys)
    if kind == "grad_key_value":
        some, sample = rows(given, every_query, KEYS), KEYS
    else:
        some, sample = rows(given, QUERIES, every_key), QUERIES
    truth, low = (getattr(sampled, kind)(some, low=is_low) for is_low in (False, True))
    for name, array in truth.items():
        np.testing.assert_allclose(array, expected[name][sample], rtol=1e-6, atol=1e-9, err_msg=name)
    found = {name: expected[name][sample].astype("f4" if name == "logsumexp" else "f2") for name in truth}
    sampled.check(found, truth, low, kind)
    for name, array in found.items():
        wrong = np.roll(array, 1, axis=0)
        assert sampled.ratios({name: wrong}, truth, low)[name] > 1, "rows of other queries or keys"
        wrong = array.copy()
        wrong[-1] = np.nan
        assert sampled.ratios({name: wrong}, truth, low)[name] == np.inf
