"""Backwards of so many short heads that a block of the Hopper family takes whole ones, against float64.

Heads have several key tiles, and every mask and feature comes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutlass_py_attn.plan import Build
from tests.gpu import drawn_check
from tests.gpu.cases import ARCH, MANY_HEADS
from tests.gpu.check import Kernels
from tests.gpu.drawn import Drawn, builds_of

PLAIN = Drawn("backward", "bfloat16", *MANY_HEADS, 128)
CASES = (
    *(replace(PLAIN, mask=mask) for mask in ("full", "causal", "causal_br", "causal:50", "window:40:70")),
    *(replace(PLAIN, dtype="float16", dim=32, mask=mask) for mask in ("full", "causal:50")),
    replace(PLAIN, dim=96, dim_value=72, mask="causal"),
    replace(PLAIN, dtype="float16", dim=64, mask="causal", alibi="h", softcap=4.0),
    replace(PLAIN, mask="causal", alibi="bh", deterministic=True),
    replace(PLAIN, mask="causal", dropout_p=0.3, philox_seed=42, philox_offset=3),
    replace(PLAIN, dim=64, dropout_p=0.5, philox_seed=1, softcap=2.0),
    replace(PLAIN, sinks=True, grads="qkvs"),
    replace(PLAIN, mask="causal", layout="packed", queries=300),
    replace(PLAIN, dtype="float16", batch=16, heads_key=8, queries=129, keys=200, mask="causal"),
    replace(PLAIN, batch=24, queries=65, keys=129),  # several heads for each block
)


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """The kernels of the cases, and what stands in for them."""
    return builds_of(CASES, arch)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.line.replace(" ", "_"))
def test_many_heads(one: Drawn, kernels: Kernels) -> None:
    drawn_check.expect_agreement(one, drawn_check.expect(one), kernels)
