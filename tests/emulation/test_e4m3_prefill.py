"""Kernels that read an e4m3 cache: the machine code of whole forwards, with copies that end at once or late."""

from __future__ import annotations

import pytest

from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import E4M3_CACHE
from cutlass_py_attn.plan import planner
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
from tests.support.block_emulator import emulate
from tests.support.machine_code import MachineCode
from tests.support.mma_emulator import MmaBlock

NUM_SMS = 1
# The sm80 forward with several key tiles, pages and scales of rows, or no pages and a scale of each head; the
# persistent decode kernel, whose second kernel joins the partial results of a row.
RUNS = (
    (
        "64x32x4:1,0",
        "forward f16_d40v36_q50_s70_b1_h1_window_left30_right9_paged4_kv8_descalerow seed=2 table=csr",
        False,
    ),
    # 96 codes in a row, which 64 bytes do not divide.
    ("128x64x4:1,0", "forward bf16_d80_q20_s70_b1_h1_causal_br_paged16_kv8_descalerow seed=3", False),
    ("64x32x4:1,0", "forward bf16_d64_q20_s50_b1_h1_causal_br_kv8_descalehead seed=1 inputs=needle", True),
    ("16x64x4:2,0+persistent", "forward f16_d40v36_q3_s140_b1_h2_full_paged4_kv8_descalebatch seed=5", False),
)
# The sm90 forward: sequences of several lengths with one without keys, scales of a head in the scale of the exponent;
# scales of rows with pages of few rows; score terms with padded columns and no pages.
HOPPER_RUNS = (
    (
        "64x64x8:2,0",
        "forward f16_d64_n67x200u130,0x20u20,9x20u0_h2k1_causal_br_paged16_kv8_descalebatch seed=3",
        False,
    ),
    (
        "64x64x8:2,0",
        "forward bf16_d64_q20_s150_b1_h2k1_window_left60_right0_paged2_kv8_descalerow seed=2 table=csr",
        True,
    ),
    (
        "128x64x12:2,0",
        "forward bf16_d96v48_q70_s150_b1_h1_full_softcap4_sinks_kv8_descalehead seed=5 layout=padded",
        True,
    ),
)


@pytest.mark.parametrize(("tile", "line", "is_eager"), RUNS)
def test_forward(tile: str, line: str, is_eager: bool, machine_code: MachineCode) -> None:
    family = None if "+" in tile else "sm80"
    expect_close(line, is_eager, machine_code, arch="sm_90", tile=TileConfig.parse(tile), family=family)


@pytest.mark.parametrize(("tile", "line", "is_eager"), HOPPER_RUNS)
def test_hopper_forward(tile: str, line: str, is_eager: bool, machine_code: MachineCode) -> None:
    expect_close(line, is_eager, machine_code, arch="sm_90a", tile=TileConfig.parse(f"{tile}+{E4M3_CACHE}-plain"))


def expect_close(
    line: str, is_eager: bool, machine_code: MachineCode, arch: str, tile: TileConfig, family: str | None = None
) -> None:
    """Compares the machine code's results with float64."""
    case = Case.parse(line)
    plan = planner.plan_with_tile(case.problem(), arch, tile, NUM_SMS, family=family)
    ptx = machine_code(plan).ptx
    expected = guarded_check.expect(case)
    found = emulate(case, plan, ptx, expected.arrays, is_eager=is_eager, seed=7, block=MmaBlock)
    ratios = guarded_check.ratios(case, expected, found)
    assert all(ratio <= 1 for ratio in ratios.values()), ratios
