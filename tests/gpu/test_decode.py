"""Decode on the GPU: few queries against many keys, in guarded buffers and any layout, against float64."""

from __future__ import annotations

import pytest

from tests.gpu import check, decodes, drawn_check
from tests.gpu.drawn import Drawn


@pytest.mark.parametrize("one", decodes.ALL, ids=lambda one: one.line.replace(" ", "_"))
def test_decode(one: Drawn, kernels: check.Kernels) -> None:
    """Twice the same bits, from a workspace full of ones."""
    drawn_check.expect_decode(one, kernels)
