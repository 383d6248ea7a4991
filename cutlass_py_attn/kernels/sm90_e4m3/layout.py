"""sm90 forward of variant e4m3: 8-bit operands, shared memory, registers, and the sums of O in two levels.

An accumulator of 8-bit wgmma keeps 14 bits, so that its sum over a long row loses what each addition cuts off. The
kernel therefore sums one key tile in an accumulator, and adds that to O in float32.

warpgroup      warps
1              0 loads; 2 and 3 store every value tile a second time, with the keys of a column next to each other
1 to 3         64 query rows each
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.gemm_spec import WARPGROUP_ROWS
from cutlass_py_attn.launch.smem import BARRIER_BYTES, first_that_fits, stack, tile_bytes

# Registers per thread by tile_m: of the warpgroup that loads and transposes values, of those that compute.
REGISTERS: Final = {64: (56, 240), 128: (40, 232), 192: (32, 160)}
TRANSPOSING_WARPS: Final = 2
FIRST_TRANSPOSING_WARP: Final = 2
TILE_N: Final = (64, 128)  # keys of a tile: whole strips of transposed values
ONE_PART_COLUMNS: Final = 128  # of O, up to which a key tile's sum has one accumulator
# Columns of O in one accumulator of a key tile's sum in wider heads. Blocks of 64 rows, for features that leave few
# registers, have fewer.
PART_COLUMNS, PART_COLUMNS_OF_FEW_ROWS = 64, 32


def part_columns(build: Build) -> int:
    """Returns the columns of O whose sum over one key tile is in registers at once."""
    if build.columns_value <= ONE_PART_COLUMNS:
        return build.columns_value
    return PART_COLUMNS_OF_FEW_ROWS if build.tile_m == WARPGROUP_ROWS else PART_COLUMNS


def forward_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the forward, with two query stages if they fit."""
    maps = {stages: _forward_with(build, stages) for stages in (2, 1)}
    return maps[first_that_fits(build, maps.items())]


def _forward_with(build: Build, query_stages: int) -> tuple[Buffer, ...]:
    """Places the stages of query, key, value and transposed value, and a full and an empty barrier for each stage."""
    dtype, tile_m, tile_n, stages = build.dtype, build.tile_m, build.tile_n, build.query_stages
    return stack(
        ("query", query_stages * tile_bytes(dtype, tile_m, build.columns), 0, 1),
        ("key", stages * tile_bytes(dtype, tile_n, build.columns), 0, 1),
        ("value", stages * tile_bytes(dtype, tile_n, build.columns_value), 0, 3),
        ("value_transposed", stages * tile_bytes(dtype, build.columns_value, tile_n), 0, 3),
        ("barriers", 2 * BARRIER_BYTES * (query_stages + 3 * stages), 0, 4),
    )


def consumer_registers(build: Build, threads: int) -> int:
    """Returns the registers of a consumer thread for S, the weights as 8-bit numbers, O and the sum of a key tile."""
    return build.tile_m * (build.tile_n + build.tile_n // 4 + build.columns_value + part_columns(build)) // threads


def registers(build: Build) -> tuple[int, ...]:
    """Returns the registers per thread of each role: loads and transposes, computes."""
    return REGISTERS[build.tile_m]
