"""Roles of the sm90 kernels, and the tiles that TMA loads: what their machine code reads of a Build.

kernel            warpgroups
forward           1 loads; 1, 2 or 3 compute S and O of 64 query rows each
forward, MLA      1 loads; 2 compute S of every second key tile, and half of the columns of O, of 64 query rows
forward, e4m3     1 loads and transposes values; 1, 2 or 3 compute S and O of 64 query rows each
e4m3 cache        1 loads and converts keys and values; 1, 2 or 3 compute S and O of 64 query rows each
forward, wide     1 loads; 2 compute S of every second key tile, and some columns of O, of 64 query rows
backward, wide    1 loads; 2 compute S and dP of every second tile, and some columns of dQ, dK or dV, of 64 rows
backward          1 loads; 1 computes dQ; 1 or 2 compute S, dP, dV and dK of 64 keys each
backward, 2-CTA   1 loads; 1 computes dQ of both blocks; 1 computes P and dV; 1 computes dS and dK
"""

from __future__ import annotations

from typing import Final

from cutlass_py_attn.launch.build import Build

LOAD_WARPGROUPS: Final = 1
# Tiles whose dropout bits the kernels generate at once; the first number that fits is chosen.
DROPOUT_TILES: Final = (32, 16, 8, 4)


def tma_tiles(build: Build) -> dict[str, tuple[int, int]]:
    """Returns (rows, columns) of the tiles that TMA loads, by operand, in the order of the kernel's tensor maps."""
    if build.kind == "backward":
        return {
            "query": (build.block_queries, build.columns),
            "grad_output": (build.block_queries, build.columns_value),
            "key": (build.tile_n, build.columns),
            "value": (build.tile_n, build.columns_value),
        }
    return {
        "query": (build.tile_m, build.columns),
        "key": (build.tile_n, build.columns),
        "value": (build.tile_n, build.columns_value),
    }


def num_stages(build: Build) -> dict[str, int]:
    """Returns the pipeline stages of each operand that TMA loads, as the shared-memory map has them."""
    return {
        name: build.buffer(name).bytes // (rows * columns * build.item_bytes)
        for name, (rows, columns) in tma_tiles(build).items()
    }


def dropout_tile_bytes(build: Build) -> int:
    """Returns the bytes of the dropout bits of one tile: one bit for each score."""
    return build.tile_m * build.tile_n // 8
