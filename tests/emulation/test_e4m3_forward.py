"""kernels/sm90_e4m3/forward.py: its machine code on whole problems, executed with all warp roles and barriers."""

from __future__ import annotations

import numpy as np
import pytest

from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import planner
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.block_emulator import EmulatedBlock, emulate
from tests.support.machine_code import MachineCode

NUM_SMS = 1  # so that a block computes several work tiles
# All of one kernel, with two heads, each of a query tile and two key tiles, and whether asynchronous work ends at once.
RUNS = (
    ("forward e4m3_d64_q100_s140_b1_h2_causal_br_descalebatch seed=2", False),
    ("forward e4m3_d64_q100_s140_b1_h2_causal_br_scale0.3 inputs=zero_scores layout=padded", True),
)


@pytest.mark.parametrize(("line", "is_eager"), RUNS)
def test_forward(line: str, is_eager: bool, machine_code: MachineCode) -> None:
    case = Case.parse(line)
    plan = planner.plan_forward(case.problem(), "sm_90a", NUM_SMS)
    ptx = machine_code(plan).ptx
    expected = guarded_check.expect(case)
    found = emulate(case, plan, ptx, expected.arrays, is_eager=is_eager, seed=7)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert np.isfinite(found["output"].astype(np.float32)).all()


class CountingBlock(EmulatedBlock):
    """Keeps which key tiles of the last block were computed again."""

    repeats: tuple[bool, ...] = ()

    def run(self) -> None:
        super().run()
        CountingBlock.repeats = tuple(self.reductions)


# A query tile and four key tiles, of which three are in the loop; the tile, the options and the key tiles that repeat.
SPECULATIVE = "64x128x8:2+e4m3-speculative"
OPTIONS = (
    ("q64_s512", "gaussian", SPECULATIVE, True, (False,) * 3),
    ("q64_s512", "rising", SPECULATIVE, False, (True,) * 3),
)


@pytest.mark.parametrize(("lengths", "inputs", "tile", "is_eager", "repeats"), OPTIONS)
def test_options(
    lengths: str, inputs: str, tile: str, is_eager: bool, repeats: tuple[bool, ...], machine_code: MachineCode
) -> None:
    case = Case.parse(f"forward e4m3_d64_{lengths}_b1_h1_full seed=3 inputs={inputs}")
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse(tile), NUM_SMS)
    ptx = machine_code(plan).ptx
    expected = guarded_check.expect(case)
    found = emulate(case, plan, ptx, expected.arrays, is_eager=is_eager, seed=7, block=CountingBlock)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
    assert CountingBlock.repeats == repeats


def test_codes_that_are_not_finite(machine_code: MachineCode) -> None:
    """Rows of NaN have NaN, and no other row has."""
    case = Case.parse("forward e4m3_d64_q64_s512_b1_h1_full seed=3")
    plan = planner.plan_with_tile(case.problem(), "sm_90a", TileConfig.parse(SPECULATIVE), NUM_SMS)
    ptx = machine_code(plan).ptx
    expected = guarded_check.expect(case)
    expected.arrays["query"][0, 5, 0, 0] = np.nan
    found = emulate(case, plan, ptx, expected.arrays, is_eager=True, seed=7, block=CountingBlock)
    assert CountingBlock.repeats == (True,) * 3
    is_nan = np.isnan(found["output"].astype(np.float32)[0, :, 0]).any(axis=1)
    assert np.flatnonzero(is_nan).tolist() == [5]
