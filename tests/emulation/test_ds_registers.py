"""Backwards with dS in registers, or of one block per head: their machine code executed, with late copies and products.

The delta kernel, the main kernel and the postprocess kernel run one after another. Persistent blocks have several key
tiles; some query rows see no key, and one scale is below 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.kernels.sm90_common import shared_tiles
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.backward_block import BackwardBlock, BiasBackwardBlock
from tests.support.block_emulator import emulate
from tests.support.machine_code import MachineCode

NUM_SMS = 1
ERROR = 0.004  # relative L2 error of 16-bit operands
GRADIENTS = ("grad_query", "grad_key", "grad_value")


@pytest.mark.parametrize(
    ("tile", "line", "is_eager"),
    [
        ("64x128x16:3,2k2+ds_registers", "backward bf16_d128_q150_s140_b1_h1_causal_br_scale-0.05 seed=1", False),
        ("128x128x16:3,2k2+key_registers", "backward f16_d40v64_q150_s140_b1_h1_causal_br seed=2", True),
        ("64x128x16:3,2k2+ds_registers", "backward bf16_d128_s140_b1_h1_causal_deterministic_sinks seed=3", True),
        ("128x128x16:3,2+key_registers", "backward f16_d64_s140_b1_h1_causal_deterministic_sinks seed=4", False),
        ("64x128x16:3,2k2+ds_registers", "backward bf16_d128_q150_s140_b1_h1_causal_br_window50 seed=5", True),
        ("64x128x16:4,3k2+per_head", "backward bf16_d64_q64_s60_b1_h2_causal_br seed=6", True),
    ],
)
def test_gradients(tile: str, line: str, is_eager: bool, machine_code: MachineCode) -> None:
    case = Case.parse(line)
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse(tile), NUM_SMS)
    logsumexp = check(case, plan, machine_code(plan), is_eager=is_eager)
    assert np.isinf(logsumexp).any() != ("sinks" in case.problem().features)


def check(case: Case, plan: Plan, made: Artifact, *, is_eager: bool) -> np.ndarray[Any, Any]:
    """Executes the kernels and compares the gradients with those in float64; returns the logsumexps of the queries."""
    arrays = case.arrays()
    forward = guarded_check.by_reference(case, arrays, "float64")
    arrays |= {"output": forward["output"].astype(arrays["query"].dtype), "logsumexp": forward["logsumexp"]}
    truth = guarded_check.by_reference(case, arrays, "float64")
    others = [f"grad_{name}" for name in ("sinks", "bias") if getattr(case.problem(), f"grad_{name}") is not None]
    gradients = *GRADIENTS, *others
    block = BiasBackwardBlock if "grad_bias" in gradients else BackwardBlock
    found = emulate(case, plan, made.ptx, arrays, is_eager=is_eager, seed=7, block=block, outputs=gradients)
    for name in gradients:
        sizes = zip(found[name].shape, truth[name].shape, strict=True)  # the reference has a gradient of the whole bias
        expected = truth[name].sum(tuple(i for i, (size, full) in enumerate(sizes) if size < full), keepdims=True)
        error = found[name].astype(np.float64) - expected
        assert np.linalg.norm(error) < ERROR * np.linalg.norm(expected), name
    return forward["logsumexp"][..., : case.spec.num_queries]


@pytest.mark.parametrize(
    ("tile", "line", "splits"),
    [
        ("64x128x16:3,2k2+ds_registers-shared_end", "backward bf16_d128_q250_s300_b1_h1_full seed=7", 2),
        ("128x128x16:3,2k2+key_registers-shared_end", "backward f16_d64_q500_s300_b1_h2k1_full seed=8", 2),
    ],
)
def test_blocks_share_the_queries_of_the_last_key_tile(
    tile: str, line: str, splits: int, machine_code: MachineCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks have a key tile each; the third one is computed in parts, the last of which stores its sums."""
    monkeypatch.setattr(shared_tiles, "LEAST_SAVED_QUERY_TILES", 0)
    monkeypatch.setattr(shared_tiles, "PART_TILES", 0)
    case = Case.parse(line)
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse(tile), 2)
    assert (dict(plan.params)["shared_key_tiles"], dict(plan.params)["num_splits_query"]) == (1, splits)
    check(case, plan, machine_code(plan), is_eager=True)
