"""Decode on the GPU: few queries against many keys, in guarded buffers and any layout, against float64."""

from __future__ import annotations

import pytest

from tests.gpu import check, decodes, drawn_check, memory
from tests.gpu.drawn import Drawn


@pytest.mark.parametrize("one", decodes.ALL, ids=lambda one: one.line.replace(" ", "_"))
def test_decode(one: Drawn, kernels: check.Kernels) -> None:
    """Twice the same bits, from a workspace full of ones."""
    expected = drawn_check.expect(one)
    with memory.placed(one.problem(), expected.arrays, kernels) as placed:
        assert placed.bound.plan.build.family == "decode"
        found = placed.run()
        again = placed.run()
    assert all(check.same_bits(found[name], again[name]) for name in found)
    worst = drawn_check.findings(one, expected, found)
    assert max(worst.values()) <= 1, f"{worst}: {one.line}"
