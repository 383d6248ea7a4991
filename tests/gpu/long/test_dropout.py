"""Dropout over more tiles than the Hopper kernels draw bits for at once, on the GPU."""

from __future__ import annotations

import pytest

from cutlass_py_attn.plan import Build
from tests.gpu import drawn_check
from tests.gpu.cases import ARCH
from tests.gpu.check import Kernels
from tests.gpu.drawn import Drawn, builds_of

CASES = (
    Drawn("forward", "bfloat16", 1, 2, 130, 2500, 128, dropout_p=0.2, philox_seed=7),
    Drawn("forward", "float16", 1, 4, 200, 4301, 64, heads_key=2, mask="causal_br", dropout_p=0.3, philox_offset=3),
    Drawn("forward", "bfloat16", 1, 1, 150, 2121, 256, mask="window:2100:10", dropout_p=0.1, philox_seed=9),
    Drawn(
        "forward", "bfloat16", 1, 2, 1, 1, 128, mask="causal", dropout_p=0.3, sequences="90/2300/2300,3/1/1,7/2049/2049"
    ),
    Drawn("backward", "bfloat16", 1, 1, 2500, 130, 128, dropout_p=0.2, philox_seed=7),
    Drawn("backward", "bfloat16", 1, 4, 1100, 201, 128, heads_key=1, mask="causal", dropout_p=0.3, philox_offset=5),
    Drawn("backward", "float16", 1, 2, 1300, 203, 64, mask="causal_br", dropout_p=0.1, philox_seed=3),
    Drawn("backward", "float16", 1, 1, 2400, 70, 96, mask="window:2200:60", dropout_p=0.4, deterministic=True),
)  # fmt: skip


def builds(arch: str = ARCH) -> list[tuple[Build, ...]]:
    """The kernels of the cases, and what stands in for them."""
    return builds_of(CASES, arch)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.line.replace(" ", "_"))
def test_bits_of_more_tiles(one: Drawn, kernels: Kernels) -> None:
    drawn_check.expect_agreement(one, drawn_check.expect(one), kernels)
