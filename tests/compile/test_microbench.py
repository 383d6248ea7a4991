"""Tests of the microbenchmarks' machine code: the measured instructions, their counts, and the parameters."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

from cutlass_py_attn.compilation.cubin import read
from cutlass_py_attn.launch import abi
from tools.lab.microbench import cases
from tools.lab.microbench.compiling import compiled

KERNELS = {micro.symbol: micro for micro in cases.all_cases()}
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16"
# (pattern, occurrences in the PTX; None for at least one).
EXPECTED: dict[str, tuple[tuple[str, int | None], ...]] = {
    "micro_wgmma_n64": ((WGMMA.format(n=64), 4), ("ld\\.shared\\.v4", 0), ("setmaxnreg", 0)),
    "micro_wgmma_n128_beside": ((WGMMA.format(n=128), 4), ("ld\\.shared\\.v4", cases.LOADS), ("setmaxnreg", 2)),
    "micro_wgmma_n256_rs_beside": ((WGMMA.format(n=256), 4), ("ld\\.shared\\.v4", cases.LOADS)),
    "micro_red_v4": ((r"red\.relaxed\.gpu\.global\.add\.v4\.f32", None),),
    "micro_red_bulk": ((r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32", 1),),
    "micro_copy_4x16384": (
        (r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes", 4),
        (r"mbarrier\.init", 2),
        (r"barrier\.cluster\.wait", 2),
    ),
    "micro_function_ex2": ((r"ex2\.approx\.ftz\.f32", cases.CHAINS),),
    "micro_function_ex2_f16x2": ((r"ex2\.approx\.f16x2", cases.CHAINS),),
    "micro_function_ex2_bf16x2": ((r"ex2\.approx\.ftz\.bf16x2", cases.CHAINS),),
    "micro_function_tanh": ((r"tanh\.approx\.f32", cases.CHAINS),),
    "micro_function_mixed2": ((r"ex2\.approx\.ftz\.f32", cases.CHAINS - 2),),
    "micro_function_polynomial": (("ex2", 0), (r"\bshl\.b32", None)),
}


@pytest.mark.parametrize("symbol", EXPECTED)
def test_ptx_has_the_measured_instructions(symbol: str) -> None:
    output = compiled(KERNELS[symbol])
    (kernel,) = read(output.cubin).kernels.values()
    assert kernel.symbol == f"{symbol}_0"
    assert [parameter.size for parameter in kernel.parameters] == [abi.numpy_struct(cases.FIELDS).itemsize]
    assert kernel.reqntid == (KERNELS[symbol].threads, 1, 1)
    for pattern, count in EXPECTED[symbol]:
        found = len(re.findall(pattern, output.ptx))
        assert found == count if count is not None else found > 0, pattern
    assert output.ptx.count("%clock64") == 2
    assert output.ptx.count("%globaltimer") == 2
