"""Warps, tiles and shared memory of the decode kernels: what their machine code reads of a Build.

The rows of a tile are the queries of all heads that share a key head: row r is query r // group of head r % group.
A team is one warp, or as many warps as the rows of a tile need. Each team computes its own keys of a tile.
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.integers import round_up
from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.gemm_spec import MMA_ROWS
from cutlass_py_attn.launch.smem import BUFFER_ALIGNMENT, stack, tile_bytes
from cutlass_py_attn.problem.tensors import F32_BYTES, WORD_BYTES
from cutlass_py_attn.score_terms import registry

MAX_QUERIES: Final = 16
WARP_OUTPUT: Final = {2: 4096, 4: 2048}  # elements of the output of one warp, by bytes per element of the operands
STAGE_ALIGNMENT: Final = 512
CUT_WORDS: Final = 8  # of the workspace: where the start of a team cuts a row, kernels/decode/chunk_schedule.py
SCHEDULE_WORDS: Final = 16  # a sum for each warp, then a block's first sequence and the chunks before it


def team_warps(tile_m: int, columns_value: int, item_bytes: int) -> int:
    """Returns the warps that share the rows of a tile: each holds 16 rows, or 32 if their output fits."""
    is_wide = 2 * MMA_ROWS * columns_value <= WARP_OUTPUT[item_bytes]
    return max(tile_m // (2 * MMA_ROWS if is_wide else MMA_ROWS), 1)


def team_keys(build: Build) -> int:
    """Returns the keys of a tile that one team computes."""
    return build.tile_n // build.warps_scores[1]


def operand_dtype(build: Build) -> str:
    """Returns the dtype of the operands of products: float16 with codes of e4m3, which converts to it exactly."""
    return "float16" if build.has(registry.KV8) else build.dtype


def stage_bytes(build: Build) -> tuple[int, int]:
    """Returns (bytes of a team's keys, bytes of its values) in one pipeline stage; with scales of rows, these too."""
    rows = team_keys(build)
    if build.has(registry.KV8):
        scales = 2 * F32_BYTES if build.has(registry.KV8_ROW) else 0
        end = round_up(rows * (build.columns + build.columns_value + scales), STAGE_ALIGNMENT)
        return rows * build.columns, end - rows * build.columns
    key, value = (
        round_up(tile_bytes(build.dtype, rows, columns), STAGE_ALIGNMENT)
        for columns in (build.columns, build.columns_value)
    )
    return key, value


def team_output_bytes(build: Build) -> int:
    """Returns the bytes of one team's float32 output, which takes the place of the pipeline stages."""
    return round_up(tile_bytes("float32", build.tile_m, build.columns_value), STAGE_ALIGNMENT)


def decode_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map: the query tile, the stages of all teams (reused for their outputs), statistics of each row.

    The statistics are a maximum, later a factor, and a sum, for each row and team.
    """
    teams = build.warps_scores[1]
    stages = teams * build.query_stages * sum(stage_bytes(build))
    return stack(
        ("query", tile_bytes(build.dtype, build.tile_m, build.columns), 0, 1),
        ("ring", max(stages, teams * team_output_bytes(build)), 0, 4),
        ("statistics", 2 * teams * build.tile_m * F32_BYTES, 4, 4),
    )


def persistent_map(build: Build) -> tuple[Buffer, ...]:
    """Returns the map of the persistent kernel: `decode_map`, and the sums that say which chunks a block has."""
    found = decode_map(build)
    end = round_up(found[-1].offset + found[-1].bytes, BUFFER_ALIGNMENT)
    return *found, Buffer("schedule", end, SCHEDULE_WORDS * WORD_BYTES, 0, 0)


def combine_bytes(build: Build, warps: int) -> int:
    """Returns the shared memory of the combine kernel: the part of a row that each of its warps sums.

    Of shared query tiles a warp sums whole rows.
    """
    return 0 if build.shares_query_tiles else warps * build.columns_value * F32_BYTES
