"""kernels/sm90_forward/forward.py with options: its machine code, executed with all warp roles and barriers.

The weights of a key tile use the maxima before it, and the tile is computed again where a score exceeds them by far.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.kernels.sm90_common import shared_tiles
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.block_emulator import EmulatedBlock, emulate
from tests.support.machine_code import MachineCode

TILE = TileConfig.parse("64x128x8:2-speculative-halves")
FULL = "forward bf16_d64_q64_s512_b1_h1_full seed=3"  # a query tile and four key tiles, of which three are in the loop


class CountingBlock(EmulatedBlock):
    """Keeps which key tiles of the last block were computed again."""

    repeats: tuple[bool, ...] = ()

    def run(self) -> None:
        super().run()
        CountingBlock.repeats = tuple(self.reductions)


def planned(case: Case, tile: TileConfig = TILE) -> Plan:
    return planner.plan_with_tile(case.problem(), "sm_90a", tile, 1)


def run(case: Case, plan: Plan, ptx: str, arrays: dict[str, Any], *, is_eager: bool) -> dict[str, Any]:
    """Returns the results of the emulated kernel."""
    return emulate(case, plan, ptx, arrays, is_eager=is_eager, seed=7, block=CountingBlock)


@pytest.mark.parametrize(
    ("inputs", "is_eager", "repeats"),
    [("gaussian", True, (False,) * 3), ("rising", True, (True,) * 3), ("rising", False, (True,) * 3)],
)
def test_forward(inputs: str, is_eager: bool, repeats: tuple[bool, ...], machine_code: MachineCode) -> None:
    case = Case.parse(f"{FULL} inputs={inputs}")
    ptx = machine_code(plan := planned(case)).ptx
    expected = guarded_check.expect(case)
    found = run(case, plan, ptx, expected.arrays, is_eager=is_eager)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert CountingBlock.repeats == repeats


@pytest.mark.parametrize(
    ("name", "tile", "repeats"),
    [
        ("bf16_d64_q64_s448_b1_h1_causal_br_window300", "64x64x8:2-speculative", (True, False, True)),
        ("bf16_d192v128_q64_s400_b1_h1_causal_br", "64x128x8:2-speculative", (True, True)),
        ("bf16_d256_q64_s320_b1_h1_full", "64x64x8:2-speculative-halves", (True, False, True, False)),
    ],
)
def test_windows_and_wide_heads(name: str, tile: str, repeats: tuple[bool, ...], machine_code: MachineCode) -> None:
    """Key tiles that every row sees have masked ones before them, and in a window after them."""
    case = Case.parse(f"forward {name} seed=3 inputs=rising")
    ptx = machine_code(plan := planned(case, TileConfig.parse(tile))).ptx
    expected = guarded_check.expect(case)
    found = run(case, plan, ptx, expected.arrays, is_eager=False)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert CountingBlock.repeats == repeats


def test_scores_that_are_not_finite(machine_code: MachineCode) -> None:
    """Rows whose scores are -inf until the last key tile have no maximum until then; NaN and inf stay in their rows."""
    case = Case.parse(FULL)
    ptx = machine_code(plan := planned(case)).ptx
    arrays = guarded_check.expect(case).arrays
    query, key = arrays["query"], arrays["key"]
    query[0, :, 0, 0] = np.abs(query[0, :, 0, 0]) + 1
    query[0, 1:3, 0, 0] = np.inf, np.nan
    key[0, TILE.tile_n :, 0, 0] = -np.inf
    output = run(case, plan, ptx, arrays, is_eager=True)["output"].astype(np.float64)[0, :, 0]
    assert CountingBlock.repeats == (True,) * 3
    seen = slice(0, TILE.tile_n)
    scores = query[0, :, 0].astype(np.float64) @ key[0, seen, 0].astype(np.float64).T / np.sqrt(case.spec.head_dim)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        truth = weights / weights.sum(axis=1, keepdims=True) @ arrays["value"][0, seen, 0].astype(np.float64)
    is_wrong = np.isin(np.arange(len(output)), (1, 2))
    assert np.isnan(output[is_wrong]).all()
    assert np.abs(output - truth)[~is_wrong].max() < 0.01


def test_blocks_share_the_last_query_tile(monkeypatch: pytest.MonkeyPatch, machine_code: MachineCode) -> None:
    """Two blocks have a tile each, then half of the keys of the third; a second kernel joins their results."""
    monkeypatch.setattr(shared_tiles, "LEAST_SAVED", 0)
    case = Case.parse("forward bf16_d64_q130_s256_b1_h1_full seed=4 layout=padded")
    tile = TileConfig.parse("64x64x8:2-speculative-shared_end")
    plan = planner.plan_with_tile(case.problem(), "sm_90a", tile, 2)
    assert [launch.grid for launch in plan.launches] == [(2, 1, 1), (16, 1, 1)]
    ptx = machine_code(plan).ptx
    expected = guarded_check.expect(case)
    found = emulate(case, plan, ptx, expected.arrays, is_eager=False, seed=7)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize(
    ("name", "num_sms", "grids"),
    [
        # two query tiles of 6 and 7 key tiles in three parts each
        ("bf16_d64_q128_s448_b1_h1_causal_br", 6, [(6, 1, 1), (32, 1, 1)]),
        # a query tile of one key tile beside one of two, whose second part has no keys
        ("bf16_d64_q128_s256_b1_h1_causal", 4, [(4, 1, 1), (32, 1, 1)]),
        # a sink belongs to one of the parts of a row, which has keys
        ("bf16_d64_q128_s256_b1_h1_causal_sinks", 4, [(4, 1, 1), (32, 1, 1)]),
        # the second sequence has one query tile, and no keys for some parts
        ("bf16_d64_n128x300,40x64_h1_causal_br", 8, [(8, 1, 1), (64, 1, 1)]),
    ],
)
def test_blocks_share_few_query_tiles(
    name: str,
    num_sms: int,
    grids: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    machine_code: MachineCode,
) -> None:
    """Fewer query tiles than SMs are computed in parts, under a mask and with variable lengths too."""
    monkeypatch.setattr(shared_tiles, "LEAST_SAVED_FEW", 0)
    monkeypatch.setattr(shared_tiles, "PART_KEY_TILES", 0)
    case = Case.parse(f"forward {name} seed=5")
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse("64x64x8:2+split_kv-speculative"), num_sms)
    assert [launch.grid for launch in plan.launches] == grids
    ptx = machine_code(plan).ptx
    expected = guarded_check.expect(case)
    found = emulate(case, plan, ptx, expected.arrays, is_eager=False, seed=7)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
