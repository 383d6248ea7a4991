"""kernels/rows/append.py: machine code on random appends, executed for all threads, compared byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cutlass_py_attn.launch import abi
from tests.cases.serving_cases import AppendCase, append_case, latent_append_case
from tests.support.block_emulator import EmulatedBlock
from tests.support.gemm_emulator import compiled
from tests.support.ptx_threads import Array

PADDING = 0xA5  # the bytes between two memories


def emulate(case: AppendCase, arch: str) -> tuple[Array, Array]:
    """Executes the blocks of an append. Returns all bytes afterwards, and those of the reference."""
    plan, expected = case.plan(arch), case.expected()
    starts, parts, end = dict[int, int](), list[Array](), 0
    for number, memory in {id(it.memory): it.memory for it in case.arrays.values()}.items():
        starts[number] = end
        parts += [memory, np.full(-memory.size % 256, PADDING, np.uint8)]
        end += memory.size + parts[-1].size
    found = np.concatenate(parts)
    wanted = found.copy()
    for number, start in starts.items():
        wanted[start : start + expected[number].size] = expected[number]
    struct = np.zeros(1, abi.numpy_struct(abi.fields_of(plan.build)))
    addresses = {name: starts[id(it.memory)] + it.offset for name, it in case.arrays.items()}
    for name, value in {**dict(plan.params), **addresses}.items():
        struct[name] = value
    (launch,) = plan.launches
    ptx = compiled(plan).ptx
    for block in range(launch.grid[0]):
        EmulatedBlock(ptx, block, launch, found, struct, {}, plan.build.dtype, is_eager=True, seed=block).run()
    return found, wanted


@pytest.mark.parametrize(
    ("make", "seed", "symbol", "arch"),
    [
        (append_case, 25, "append_sm80_bf16_d72v40_8x16", "sm_80"),
        (append_case, 6, "append_sm80_bf16_d72v40_e4m3_8x16", "sm_80"),
        (append_case, 17, "append_sm80_f16_d7v3_a2_e4m3_row_16x8", "sm_90"),
        (latent_append_case, 49, "append_sm80_bf16_d512v64_e4m3_tile_4x32", "sm_90"),
        (latent_append_case, 9, "append_sm80_f32_d512v64_e4m3_tile_4x32", "sm_90"),
        (latent_append_case, 10, "append_sm80_bf16_d300v6_a4_e4m3_tile_4x32", "sm_90"),
        (latent_append_case, 18, "append_sm80_f16_d7v3_a2_e4m3_tile_16x8", "sm_80"),
    ],
)
def test_every_byte(make: Callable[[int], AppendCase], seed: int, symbol: str, arch: str) -> None:
    """Rows as they are, by given scales, and by computed ones of rows and of tiles of columns; skipped slots."""
    case = make(seed)
    assert case.plan(arch).symbol == symbol
    found, wanted = emulate(case, arch)
    np.testing.assert_array_equal(found, wanted)
